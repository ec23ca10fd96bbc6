//! The Postgres server around the measurements: its settings, fresh schemas,
//! and the same ground for every timed phase.

use std::collections::HashMap;
use std::future::Future;
use std::time::{Duration, Instant};

use longshore::Client;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::Result;
use crate::report::{Sample, client_cpu};

/// What is read out before anything is measured.
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

/// A connection for everything that is not timed.
pub(crate) struct Admin {
    pub(crate) connection: PgConnection,
    url: String,
    settings: Vec<(&'static str, String)>,
    /// Others who use the server while we measure.
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

const STATEMENTS: &str = "
    select query, sum(calls)::int8
      from pg_stat_statements
     where dbid = (select oid from pg_database where datname = current_database())
       and query not like '%pg_stat_statements%'
     group by query";

const COUNT_STATEMENTS: &str = "
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

    /// Says what the server promises. Figures of a server that forgets commits
    /// mean nothing here, so without durable commits there are none.
    pub(crate) fn is_durable(&self) -> bool {
        let told: Vec<String> = self.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        println!("Postgres: {}", told.join(", "));
        if self.other_sessions > 0 {
            println!(
                "warning: {} other sessions use this server; their work is in these figures, their WAL too",
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
            println!("warning: {} off; not measured, because commits would cost nothing", off.join(" and "));
        }
        off.is_empty()
    }

    pub(crate) fn settings_json(&self) -> Value {
        let mut facts: Value =
            self.settings.iter().map(|(name, value)| (name.to_string(), json!(value))).collect();
        facts["other_sessions_at_start"] = json!(self.other_sessions);
        facts
    }

    /// An empty database on the same server, in the place of whatever had its
    /// name.
    pub(crate) async fn fresh_database(&mut self, name: &str) -> Result<String> {
        self.drop_database(name).await?;
        self.execute(&format!("create database {name}")).await?;
        self.execute("checkpoint").await?;
        Ok(in_database(&self.url, name))
    }

    pub(crate) async fn drop_database(&mut self, name: &str) -> Result<()> {
        self.execute(&format!("drop database if exists {name} with (force)")).await
    }

    /// A connection of its own, as a program without a library would have.
    pub(crate) async fn raw_connection(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect(&self.url).await?)
    }

    /// Empty tables in `schema`, and a client of them.
    pub(crate) async fn fresh_schema(&mut self, schema: &str) -> Result<Client> {
        self.drop_schema(schema).await?;
        // Before the tables are filled, not after: every page that is then
        // touched again, as in a busy queue, is already in the log in full.
        self.execute("checkpoint").await?;
        let client = self.client(schema).await?;
        client.migrate().await?;
        Ok(client)
    }

    /// A client of the tables in `schema`.
    pub(crate) async fn client(&self, schema: &str) -> Result<Client> {
        let joint = if self.url.contains('?') { '&' } else { '?' };
        Ok(Client::connect(&format!("{}{joint}schema={schema}", self.url)).await?)
    }

    pub(crate) async fn has_schema(&mut self, schema: &str) -> Result<bool> {
        let there = "select to_regnamespace($1) is not null";
        Ok(sqlx::query_scalar(there).bind(schema).fetch_one(&mut self.connection).await?)
    }

    pub(crate) async fn drop_schema(&mut self, schema: &str) -> Result<()> {
        self.execute(&format!("drop schema if exists {schema} cascade")).await
    }

    /// What autovacuum would have done by now.
    pub(crate) async fn vacuum_analyze(&mut self, schema: &str) -> Result<()> {
        for table in ["jobs", "ready", "running", "finished", "tallies"] {
            self.execute(&format!("vacuum (analyze) {schema}.{table}")).await?;
        }
        Ok(())
    }

    /// Runs a statement of our own making.
    pub(crate) async fn execute(&mut self, sql: &str) -> Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut self.connection).await?;
        Ok(())
    }

    /// Times some work on the server.
    pub(crate) async fn timed(&mut self, work: impl Future<Output = Result<u64>>) -> Result<Sample> {
        let wal = self.wal_position().await?;
        let (cpu, began) = (client_cpu(), Instant::now());
        let jobs = work.await?;
        let took = began.elapsed();
        let client_cpu = client_cpu().zip(cpu).map(|(after, before)| after - before);
        let wal_bytes = Some(self.wal_position().await? - wal);
        Ok(Sample { jobs, took, wal_bytes, client_cpu })
    }

    /// How many bytes the log has grown to so far.
    pub(crate) async fn wal_position(&mut self) -> Result<u64> {
        let bytes: i64 = sqlx::query_scalar("select (pg_current_wal_lsn() - '0/0'::pg_lsn)::int8")
            .fetch_one(&mut self.connection)
            .await?;
        Ok(bytes as u64)
    }

    /// How many transactions have committed in this database. Sessions report
    /// theirs now and then, and at the latest when they end: call this when the
    /// others have left.
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

    /// As [`commits`](Self::commits), while others are at it: what their
    /// sessions did within the last second may be missing.
    pub(crate) async fn commits_so_far(&mut self) -> Result<u64> {
        let commits: i64 = sqlx::query_scalar(COMMITS).fetch_one(&mut self.connection).await?;
        Ok(commits as u64)
    }

    /// Has the server count the statements of sessions that begin after this;
    /// whether it can (`pg_stat_statements`).
    pub(crate) async fn count_statements(&mut self) -> bool {
        self.execute("create extension if not exists pg_stat_statements").await.is_ok()
            && sqlx::query(STATEMENTS).execute(&mut self.connection).await.is_ok()
            && self.execute(COUNT_STATEMENTS).await.is_ok()
    }

    /// How often each statement has run in this database, as far as they are
    /// counted.
    pub(crate) async fn statements(&mut self) -> Result<HashMap<String, i64>> {
        let is_there = "select to_regclass('pg_stat_statements') is not null";
        if !sqlx::query_scalar(is_there).fetch_one(&mut self.connection).await? {
            return Ok(HashMap::new());
        }
        let counted: Vec<(String, i64)> = sqlx::query_as(STATEMENTS).fetch_all(&mut self.connection).await?;
        Ok(counted.into_iter().collect())
    }
}

/// The same server and settings, another database.
fn in_database(url: &str, name: &str) -> String {
    let (place, settings) = url.split_once('?').map_or((url, None), |(place, after)| (place, Some(after)));
    let host_at = place.find("://").map_or(0, |at| at + 3);
    let server = place[host_at..].find('/').map_or(place, |at| &place[..host_at + at]);
    match settings {
        Some(settings) => format!("{server}/{name}?{settings}"),
        None => format!("{server}/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::in_database;

    #[test]
    fn another_database_keeps_the_server_and_the_settings() {
        assert_eq!(in_database("postgres://me@host:5433/mine", "other"), "postgres://me@host:5433/other");
        assert_eq!(in_database("postgres://host", "other"), "postgres://host/other");
        assert_eq!(in_database("postgres://host/mine?a=/b", "other"), "postgres://host/other?a=/b");
    }
}
