//! The schema: its name in our statements, its migrations and its clock.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use super::tx::{Sql, Tx};
use super::{Inner, PostgresStore};
use crate::error::{Error, Result};
use crate::store::{Applied, Migrated, Migrating, Migration, Scripts, Store, older_workers_live};

pub(super) const MIGRATIONS: &[Migration] = &[Migration {
    version: 1,
    script: include_str!("../../../migrations/postgres/0001_initial.sql"),
    oldest_worker: 1,
}];
/// The view and the SQL functions, replaced by every migration.
const FUNCTIONS: &str = include_str!("../../../migrations/postgres/functions.sql");

pub(super) const DEFAULT_SCHEMA: &str = "longshore";

pub(super) const fn scripts(migrations: &'static [Migration]) -> Scripts {
    Scripts { migrations, replaced: FUNCTIONS }
}

#[async_trait]
impl Migrating for PostgresStore {
    fn migrations(&self) -> &'static [Migration] {
        MIGRATIONS
    }

    async fn migrate(&self, migrations: &'static [Migration]) -> Result<Migrated> {
        self.run(migrations, |tx, migrations| Box::pin(migrate(tx, migrations))).await
    }

    async fn schema_version(&self) -> Result<i64> {
        let applied = self.run((), |tx, ()| Box::pin(applied(tx))).await?;
        Ok(applied.iter().map(|applied| applied.version).max().unwrap_or(0))
    }

    async fn now(&self) -> Result<DateTime<Utc>> {
        self.run_read((), |tx, ()| {
            Box::pin(async move {
                Ok(sqlx::query_scalar(tx.sql("select longshore.clock()"))
                    .fetch_one(&mut *tx.connection)
                    .await?)
            })
        })
        .await
    }

    async fn pin_clock(&self, at: Option<DateTime<Utc>>) -> Result<()> {
        // Replacing the function takes effect in all processes at once, because every statement reads
        // the time through it.
        self.run(at, |tx, at| {
            Box::pin(async move {
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
            })
        })
        .await
    }

    fn with_own_connection(&self) -> Arc<dyn Store> {
        Arc::new(PostgresStore(Arc::new(Inner {
            pool: self.0.pool.single_connection(),
            schema: self.0.schema.clone(),
            listener: self.0.listener.unconnected(),
            notify: self.0.notify,
            durability: self.0.durability,
            unsound: self.0.unsound.clone(),
        })))
    }
}

async fn migrate(tx: &mut Tx<'_>, migrations: &'static [Migration]) -> Sql<Migrated> {
    let scripts = scripts(migrations);
    let to = scripts.version();
    let from = scripts.version_of(&applied(tx).await?)?;
    if from == to {
        return Ok(Migrated { from, to });
    }
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    // One process migrates; the others wait and then find nothing to do. The lock ends
    // with the transaction, so it works behind a transaction pooler.
    sqlx::query("select pg_advisory_xact_lock(hashtextextended($1, 0))")
        .bind(tx.fill("longshore.migrations"))
        .execute(&mut *tx.connection)
        .await?;
    create_schema(tx).await?;
    let from = scripts.version_of(&applied(tx).await?)?;
    let excluded = scripts.excludes_workers(from);
    if let Some(oldest) = excluded {
        refuse_live_workers(tx, oldest).await?;
    }
    for migration in scripts.missing(from) {
        sqlx::raw_sql(AssertSqlSafe(tx.fill(migration.script))).execute(&mut *tx.connection).await?;
        const RECORD: &str = "
            insert into longshore.migrations (version, oldest_worker, revision)
            values ($1, $2, $3)";
        sqlx::query(tx.sql(RECORD))
            .bind(migration.version)
            .bind(migration.oldest_worker)
            .bind(scripts.revision())
            .execute(&mut *tx.connection)
            .await?;
    }
    sqlx::raw_sql(AssertSqlSafe(tx.fill(FUNCTIONS))).execute(&mut *tx.connection).await?;
    if let Some(oldest) = excluded {
        // Workers whose heartbeat is too old may still run. They must not claim any more.
        const END: &str = "
            update longshore.workers
               set dead_at = longshore.clock()
             where dead_at is null
               and schema_version < $1";
        sqlx::query(tx.sql(END)).bind(oldest).execute(&mut *tx.connection).await?;
    }
    transaction.commit().await?;
    Ok(Migrated { from, to })
}

/// Creates the schema and the table of applied migrations.
async fn create_schema(tx: &mut Tx<'_>) -> Sql<()> {
    const CREATE_HISTORY: &str = "
        create table if not exists longshore.migrations (
            version          bigint primary key,
            applied_at       timestamptz not null default now(),
            oldest_worker    bigint not null,
            revision         text not null)";
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
    sqlx::raw_sql(AssertSqlSafe(tx.fill(CREATE_HISTORY))).execute(&mut *tx.connection).await?;
    Ok(())
}

/// None can register before the transaction ends.
async fn refuse_live_workers(tx: &mut Tx<'_>, oldest: i64) -> Sql<()> {
    const LOCK: &str = "
        lock table longshore.workers in share row exclusive mode";
    const LIVE: &str = "
        select name
          from longshore.workers
         where dead_at is null
           and schema_version < $1
           and heartbeat_at > longshore.clock() - stale_after_ms * interval '1 millisecond'
         order by name";
    sqlx::query(tx.sql(LOCK)).execute(&mut *tx.connection).await?;
    let live: Vec<String> =
        sqlx::query_scalar(tx.sql(LIVE)).bind(oldest).fetch_all(&mut *tx.connection).await?;
    if live.is_empty() { Ok(()) } else { Err(older_workers_live(oldest, &live).into()) }
}

/// The migrations of the tables, none if there are no tables.
pub(super) async fn applied(tx: &mut Tx<'_>) -> Sql<Vec<Applied>> {
    // As JSON, because early tables have no revision.
    const APPLIED: &str = "
        select version, to_jsonb(m) ->> 'revision'
          from longshore.migrations m";
    let exists: bool = sqlx::query_scalar("select to_regclass($1) is not null")
        .bind(tx.fill("longshore.migrations"))
        .fetch_one(&mut *tx.connection)
        .await?;
    if !exists {
        return Ok(Vec::new());
    }
    let rows: Vec<(i64, Option<String>)> =
        sqlx::query_as(tx.sql(APPLIED)).fetch_all(&mut *tx.connection).await?;
    Ok(rows.into_iter().map(|(version, revision)| Applied { version, revision }).collect())
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
