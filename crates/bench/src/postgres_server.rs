//! The Postgres server to measure on: its settings, fresh schemas, and the same
//! starting conditions for every timed phase.

use std::collections::HashMap;
use std::future::Future;
use std::time::{Duration, Instant};

use longshore::Client;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::Result;
use crate::report::{Sample, client_cpu};

/// The settings to report.
const SETTINGS: &[&str] = &[
    "server_version",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "shared_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "max_connections",
    "jit",
];

/// A connection for everything outside the timed phases.
pub(crate) struct Admin {
    pub(crate) connection: PgConnection,
    url: String,
    settings: Vec<(&'static str, String)>,
    /// How many other sessions used the server when the benchmark connected.
    other_sessions: i64,
}

const OTHER_SESSIONS: &str = "
    select count(*)
      from pg_stat_activity
     where backend_type = 'client backend'
       and pid <> pg_backend_pid()";

const OTHER_SESSIONS_IN_DATABASE: &str = "
    select count(*)
      from pg_stat_activity
     where datname = current_database()
       and pid <> pg_backend_pid()
       and backend_type = 'client backend'";

const COMMITS: &str = "
    select xact_commit
      from pg_stat_database
     where datname = current_database()";

const STATEMENT_COUNTS: &str = "
    select query, sum(calls)::int8
      from pg_stat_statements
     where dbid = (select oid from pg_database where datname = current_database())
       and query not like '%pg_stat_statements%'
     group by query";

const ENABLE_STATEMENT_COUNTS: &str = "
    do $$
    begin
        execute format('alter database %I set pg_stat_statements.track = top', current_database());
    end
    $$";

impl Admin {
    pub(crate) async fn connect(url: &str) -> Result<Self> {
        let mut connection = PgConnection::connect(url).await?;
        let mut settings = Vec::new();
        for name in SETTINGS {
            let value = sqlx::query_scalar("select current_setting($1)")
                .bind(name)
                .fetch_one(&mut connection)
                .await?;
            settings.push((*name, value));
        }
        let other_sessions = sqlx::query_scalar(OTHER_SESSIONS).fetch_one(&mut connection).await?;
        Ok(Admin { connection, url: url.into(), settings, other_sessions })
    }

    /// Prints the server's settings and returns whether it commits durably. If it does
    /// not, callers do not measure, because the figures would be meaningless.
    pub(crate) fn check_durability(&self) -> bool {
        let settings: Vec<String> =
            self.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        println!("Postgres: {}", settings.join(", "));
        if self.other_sessions > 0 {
            println!(
                "warning: {} other sessions use this server; their work and their WAL affect these figures",
                self.other_sessions
            );
        }
        let off: Vec<&str> = self
            .settings
            .iter()
            .filter(|(name, value)| matches!(*name, "fsync" | "synchronous_commit") && value == "off")
            .map(|(name, _)| *name)
            .collect();
        if !off.is_empty() {
            println!("warning: not measured: with {} off, commits would cost nothing", off.join(" and "));
        }
        off.is_empty()
    }

    pub(crate) fn settings_json(&self) -> Value {
        let mut settings: Value =
            self.settings.iter().map(|(name, value)| (name.to_string(), json!(value))).collect();
        settings["other_sessions_at_start"] = json!(self.other_sessions);
        settings
    }

    /// Creates an empty database on the same server, replacing one of the same name, and
    /// returns its URL.
    pub(crate) async fn fresh_database(&mut self, name: &str) -> Result<String> {
        self.drop_database(name).await?;
        self.execute(&format!("create database {name}")).await?;
        self.execute("checkpoint").await?;
        Ok(with_database(&self.url, name))
    }

    pub(crate) async fn drop_database(&mut self, name: &str) -> Result<()> {
        self.execute(&format!("drop database if exists {name} with (force)")).await
    }

    /// A new connection without the library.
    pub(crate) async fn raw_connection(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect(&self.url).await?)
    }

    /// Creates empty tables in `schema`, replacing existing ones, and returns a client for
    /// them.
    pub(crate) async fn fresh_schema(&mut self, schema: &str) -> Result<Client> {
        self.drop_schema(schema).await?;
        // Before the tables are filled, not after: then pages that are written again
        // later already have their full image in the WAL, as in a busy queue.
        self.execute("checkpoint").await?;
        let client = self.client(schema).await?;
        client.migrate().await?;
        Ok(client)
    }

    /// A client for the existing tables in `schema`.
    pub(crate) async fn client(&self, schema: &str) -> Result<Client> {
        let separator = if self.url.contains('?') { '&' } else { '?' };
        Ok(Client::connect(&format!("{}{separator}schema={schema}", self.url)).await?)
    }

    pub(crate) async fn has_schema(&mut self, schema: &str) -> Result<bool> {
        let exists = "select to_regnamespace($1) is not null";
        Ok(sqlx::query_scalar(exists).bind(schema).fetch_one(&mut self.connection).await?)
    }

    pub(crate) async fn drop_schema(&mut self, schema: &str) -> Result<()> {
        self.execute(&format!("drop schema if exists {schema} cascade")).await
    }

    /// Does what autovacuum would have done after a while.
    pub(crate) async fn vacuum_analyze(&mut self, schema: &str) -> Result<()> {
        for table in ["jobs", "ready", "running", "finished", "tallies", "turns"] {
            self.execute(&format!("vacuum (analyze) {schema}.{table}")).await?;
        }
        Ok(())
    }

    /// Runs a statement that this program has composed.
    pub(crate) async fn execute(&mut self, sql: &str) -> Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut self.connection).await?;
        Ok(())
    }

    /// Measures the time, the WAL and the client's CPU time of `work`, which returns the
    /// number of jobs.
    pub(crate) async fn timed(&mut self, work: impl Future<Output = Result<u64>>) -> Result<Sample> {
        let wal = self.wal_position().await?;
        let (cpu, started) = (client_cpu(), Instant::now());
        let jobs = work.await?;
        let took = started.elapsed();
        let client_cpu = client_cpu().zip(cpu).map(|(after, before)| after - before);
        let wal_bytes = Some(self.wal_position().await? - wal);
        Ok(Sample { jobs, took, wal_bytes, client_cpu })
    }

    /// The number of bytes written to the WAL so far.
    pub(crate) async fn wal_position(&mut self) -> Result<u64> {
        let bytes: i64 = sqlx::query_scalar("select (pg_current_wal_lsn() - '0/0'::pg_lsn)::int8")
            .fetch_one(&mut self.connection)
            .await?;
        Ok(bytes as u64)
    }

    /// How many transactions have committed in this database. Sessions report their
    /// commits with a delay, at the latest when they end, so this waits until all other
    /// sessions have ended.
    pub(crate) async fn commits(&mut self) -> Result<u64> {
        for _ in 0..100 {
            let others: i64 =
                sqlx::query_scalar(OTHER_SESSIONS_IN_DATABASE).fetch_one(&mut self.connection).await?;
            if others == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.commits_so_far().await
    }

    /// Like [`commits`](Self::commits), but does not wait for other sessions: commits of
    /// the last second may be missing.
    pub(crate) async fn commits_so_far(&mut self) -> Result<u64> {
        let commits: i64 = sqlx::query_scalar(COMMITS).fetch_one(&mut self.connection).await?;
        Ok(commits as u64)
    }

    /// Makes the server count the statements of later sessions. Returns false if it
    /// cannot, because `pg_stat_statements` is missing.
    pub(crate) async fn enable_statement_counts(&mut self) -> bool {
        self.execute("create extension if not exists pg_stat_statements").await.is_ok()
            && sqlx::query(STATEMENT_COUNTS).execute(&mut self.connection).await.is_ok()
            && self.execute(ENABLE_STATEMENT_COUNTS).await.is_ok()
    }

    /// How often each statement has run in this database; empty if the server does not
    /// count statements.
    pub(crate) async fn statement_counts(&mut self) -> Result<HashMap<String, i64>> {
        let is_installed = "select to_regclass('pg_stat_statements') is not null";
        if !sqlx::query_scalar(is_installed).fetch_one(&mut self.connection).await? {
            return Ok(HashMap::new());
        }
        let counted: Vec<(String, i64)> =
            sqlx::query_as(STATEMENT_COUNTS).fetch_all(&mut self.connection).await?;
        Ok(counted.into_iter().collect())
    }
}

/// The URL of another database on the same server, with the same parameters.
fn with_database(url: &str, name: &str) -> String {
    let (location, parameters) =
        url.split_once('?').map_or((url, None), |(location, parameters)| (location, Some(parameters)));
    let host_at = location.find("://").map_or(0, |at| at + 3);
    let server = location[host_at..].find('/').map_or(location, |at| &location[..host_at + at]);
    match parameters {
        Some(parameters) => format!("{server}/{name}?{parameters}"),
        None => format!("{server}/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::with_database;

    #[test]
    fn another_database_keeps_the_server_and_the_parameters() {
        assert_eq!(with_database("postgres://me@host:5433/mine", "other"), "postgres://me@host:5433/other");
        assert_eq!(with_database("postgres://host", "other"), "postgres://host/other");
        assert_eq!(with_database("postgres://host/mine?a=/b", "other"), "postgres://host/other?a=/b");
    }
}
