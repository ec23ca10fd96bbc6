//! The Postgres server around the measurements: its settings, fresh schemas,
//! and the same ground for every timed phase.

use longshore::Client;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::Result;

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
    guests: i64,
}

const GUESTS: &str = "
    select count(*)
      from pg_stat_activity
     where backend_type = 'client backend'
       and pid <> pg_backend_pid()";

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
        let guests = sqlx::query_scalar(GUESTS).fetch_one(&mut connection).await?;
        Ok(Admin { connection, url: url.into(), settings, guests })
    }

    /// Says what the server promises. Figures of a server that forgets commits
    /// mean nothing here, so without durable commits there are none.
    pub(crate) fn is_durable(&self) -> bool {
        let told: Vec<String> = self.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        println!("Postgres: {}", told.join(", "));
        if self.guests > 0 {
            println!(
                "warning: {} other sessions use this server; their work is in these figures, their WAL too",
                self.guests
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

    pub(crate) fn facts(&self) -> Value {
        let mut facts: Value =
            self.settings.iter().map(|(name, value)| (name.to_string(), json!(value))).collect();
        facts["other_sessions_at_start"] = json!(self.guests);
        facts
    }

    /// A connection of its own, as a program without a library would have.
    pub(crate) async fn raw_connection(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect(&self.url).await?)
    }

    /// Empty tables in `schema`, and a client of them.
    pub(crate) async fn fresh(&mut self, schema: &str) -> Result<Client> {
        self.drop(schema).await?;
        // Before the tables are filled, not after: every page that is then
        // touched again, as in a busy queue, is already in the log in full.
        self.execute("checkpoint").await?;
        let joint = if self.url.contains('?') { '&' } else { '?' };
        let client = Client::connect(&format!("{}{joint}schema={schema}", self.url)).await?;
        client.migrate().await?;
        Ok(client)
    }

    pub(crate) async fn drop(&mut self, schema: &str) -> Result<()> {
        self.execute(&format!("drop schema if exists {schema} cascade")).await
    }

    /// What autovacuum would have done by now.
    pub(crate) async fn settle_statistics(&mut self, schema: &str) -> Result<()> {
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

    /// How many bytes the log has grown to so far.
    pub(crate) async fn wal_position(&mut self) -> Result<u64> {
        let bytes: i64 = sqlx::query_scalar("select (pg_current_wal_lsn() - '0/0'::pg_lsn)::int8")
            .fetch_one(&mut self.connection)
            .await?;
        Ok(bytes as u64)
    }
}
