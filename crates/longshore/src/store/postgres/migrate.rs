//! The schema: its name in our statements, its migrations and its clock.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use super::tx::{Sql, Tx};
use crate::error::{Error, Result};
use crate::store::{Migrated, OLDEST_WORKER, SCHEMA_VERSION, older_workers_live, schema_too_new};

const MIGRATIONS: [(i64, &str); SCHEMA_VERSION as usize] = [
    (1, include_str!("../../../migrations/postgres/0001_queue.sql")),
    (2, include_str!("../../../migrations/postgres/0002_server.sql")),
    (3, include_str!("../../../migrations/postgres/0003_hardening.sql")),
    (4, include_str!("../../../migrations/postgres/0004_first_run.sql")),
    (5, include_str!("../../../migrations/postgres/0005_steps.sql")),
    (6, include_str!("../../../migrations/postgres/0006_flow_control.sql")),
    (7, include_str!("../../../migrations/postgres/0007_flow_returns.sql")),
    (8, include_str!("../../../migrations/postgres/0008_dashboard.sql")),
    (9, include_str!("../../../migrations/postgres/0009_tokens_have_limits.sql")),
];
/// The view and the SQL functions, replaced by every migration.
const FUNCTIONS: &str = include_str!("../../../migrations/postgres/functions.sql");

pub(super) const DEFAULT_SCHEMA: &str = "longshore";

pub(super) async fn migrate(tx: &mut Tx<'_>) -> Sql<Migrated> {
    let from = schema_version(tx).await?;
    if from > SCHEMA_VERSION {
        return Err(schema_too_new(from).into());
    }
    if from == SCHEMA_VERSION {
        return Ok(Migrated { from, to: from });
    }
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    // One process migrates; the others wait and then find nothing to do. The lock ends
    // with the transaction, so it works behind a transaction pooler.
    sqlx::query("select pg_advisory_xact_lock(hashtextextended($1, 0))")
        .bind(tx.fill("longshore.migrations"))
        .execute(&mut *tx.connection)
        .await?;
    // `create schema if not exists` would need a privilege on the database that a role
    // with a schema of its own may not have, even if the schema exists.
    let name = &tx.store.schema.name;
    let exists: bool = sqlx::query_scalar("select exists (select 1 from pg_namespace where nspname = $1)")
        .bind(name)
        .fetch_one(&mut *tx.connection)
        .await?;
    if !exists {
        sqlx::raw_sql(AssertSqlSafe(format!("create schema \"{name}\"")))
            .execute(&mut *tx.connection)
            .await?;
    }
    let history = tx.fill(
        "create table if not exists longshore.migrations (
             version bigint primary key,
             applied_at timestamptz not null default now())",
    );
    sqlx::raw_sql(AssertSqlSafe(history)).execute(&mut *tx.connection).await?;
    let from = schema_version(tx).await?;
    if from > SCHEMA_VERSION {
        return Err(schema_too_new(from).into());
    }
    if (1..OLDEST_WORKER).contains(&from) {
        refuse_live_workers(tx).await?;
    }
    for (version, script) in MIGRATIONS.iter().filter(|(version, _)| *version > from) {
        sqlx::raw_sql(AssertSqlSafe(tx.fill(script))).execute(&mut *tx.connection).await?;
        sqlx::query(tx.sql("insert into longshore.migrations (version) values ($1)"))
            .bind(version)
            .execute(&mut *tx.connection)
            .await?;
    }
    sqlx::raw_sql(AssertSqlSafe(tx.fill(FUNCTIONS))).execute(&mut *tx.connection).await?;
    transaction.commit().await?;
    Ok(Migrated { from, to: SCHEMA_VERSION })
}

/// Workers of an earlier version would ignore limits of groups or changes of flows. None can register before
/// the transaction ends.
async fn refuse_live_workers(tx: &mut Tx<'_>) -> Sql<()> {
    const LOCK: &str = "
        lock table longshore.workers in share row exclusive mode";
    const LIVE: &str = "
        select name
          from longshore.workers
         where dead_at is null
           and heartbeat_at > longshore.clock() - stale_after_ms * interval '1 millisecond'
         order by name";
    sqlx::query(tx.sql(LOCK)).execute(&mut *tx.connection).await?;
    let live: Vec<String> = sqlx::query_scalar(tx.sql(LIVE)).fetch_all(&mut *tx.connection).await?;
    if live.is_empty() { Ok(()) } else { Err(older_workers_live(&live).into()) }
}

pub(super) async fn schema_version(tx: &mut Tx<'_>) -> Sql<i64> {
    let table = tx.fill("longshore.migrations");
    let exists: bool = sqlx::query_scalar("select to_regclass($1) is not null")
        .bind(table)
        .fetch_one(&mut *tx.connection)
        .await?;
    if !exists {
        return Ok(0);
    }
    let newest = tx.sql("select coalesce(max(version), 0) from longshore.migrations");
    Ok(sqlx::query_scalar(newest).fetch_one(&mut *tx.connection).await?)
}

pub(super) async fn now(tx: &mut Tx<'_>) -> Sql<DateTime<Utc>> {
    Ok(sqlx::query_scalar(tx.sql("select longshore.clock()")).fetch_one(&mut *tx.connection).await?)
}

/// Replacing the function takes effect in all processes at once, because every
/// statement reads the time through it.
pub(super) async fn pin_clock(tx: &mut Tx<'_>, at: Option<DateTime<Utc>>) -> Sql<()> {
    let body = match at {
        None => "select now()".to_owned(),
        Some(at) => format!("select ''{}''::timestamptz", at.to_rfc3339()),
    };
    let clock = tx.fill(&format!(
        "create or replace function longshore.clock() returns timestamptz
         language sql stable parallel safe as '{body}'"
    ));
    sqlx::raw_sql(AssertSqlSafe(clock)).execute(&mut *tx.connection).await?;
    Ok(())
}

/// The name of the schema, and our statements with it filled in.
#[derive(Clone, Debug)]
pub(super) struct Schema {
    pub(super) name: String,
    filled: Arc<RwLock<HashMap<&'static str, Arc<str>>>>,
}

impl Schema {
    pub(super) fn new(name: &str) -> Result<Self> {
        let first = |c: char| c.is_ascii_lowercase() || c == '_';
        let is_valid = name.len() <= 63
            && name.starts_with(first)
            && !name.starts_with("pg_")   // reserved by Postgres
            && name.chars().all(|c| first(c) || c.is_ascii_digit());
        if !is_valid {
            return Err(Error::invalid(
                "schema",
                "schema: start with a lowercase letter or an underscore, then use lowercase letters, digits and underscores; at most 63 characters, and not starting with pg_",
            ));
        }
        Ok(Schema { name: name.into(), filled: Arc::default() })
    }

    /// The constants name the default schema, so that they run in psql as they are.
    /// Another name replaces it here; `new` has checked it.
    pub(super) fn sql(&self, text: &'static str) -> SqlStr {
        if self.name == DEFAULT_SCHEMA {
            return text.into_sql_str();
        }
        let cached = self.filled.read().unwrap_or_else(PoisonError::into_inner).get(text).cloned();
        let filled = cached.unwrap_or_else(|| {
            let filled: Arc<str> = self.fill(text).into();
            self.filled.write().unwrap_or_else(PoisonError::into_inner).insert(text, filled.clone());
            filled
        });
        AssertSqlSafe(filled).into_sql_str()
    }

    pub(super) fn fill(&self, text: &str) -> String {
        if self.name == DEFAULT_SCHEMA {
            return text.into();
        }
        // Quoted, because a name may be an SQL keyword.
        text.replace("longshore.wake", &self.channel("wake"))
            .replace("longshore.stop", &self.channel("stop"))
            // Quoted: the function has the same name.
            .replace("'longshore.emit'", &format!("'{}'", self.channel("emit")))
            .replace("longshore.", &format!("\"{}\".", self.name))
    }

    /// The channel for notifications of due jobs (`wake`), of cancels (`stop`) or of events (`emit`).
    /// Postgres cuts channel names at 63 bytes. Two long schema names with the same
    /// first 58 bytes share a channel and wake each other needlessly.
    pub(super) fn channel(&self, purpose: &str) -> String {
        format!("{:.58}.{purpose}", self.name)
    }
}
