//! The tables: their migrations and their clock.

use std::sync::Arc;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use rusqlite::params;

use super::SqliteStore;
use super::tx::{Sql, Tx, host_clock, instant};
use crate::error::Result;
use crate::store::{Applied, Migrated, Migrating, Migration, Scripts, Store, older_workers_live};

pub(super) const MIGRATIONS: &[Migration] = &[Migration {
    version: 1,
    script: include_str!("../../../migrations/sqlite/0001_initial.sql"),
    oldest_worker: 1,
}];
/// The view, replaced by every migration.
const VIEWS: &str = include_str!("../../../migrations/sqlite/views.sql");

pub(super) const fn scripts(migrations: &'static [Migration]) -> Scripts {
    Scripts { migrations, replaced: VIEWS }
}

#[async_trait]
impl Migrating for SqliteStore {
    fn migrations(&self) -> &'static [Migration] {
        MIGRATIONS
    }

    async fn migrate(&self, migrations: &'static [Migration]) -> Result<Migrated> {
        // Most calls find nothing to do and need not wait for the writing thread.
        let scripts = scripts(migrations);
        let from = scripts.version_of(&self.engine.read(applied).await?)?;
        if from == scripts.version() {
            return Ok(Migrated { from, to: from });
        }
        self.engine.write(move |tx| migrate(tx, migrations)).await
    }

    async fn schema_version(&self) -> Result<i64> {
        let applied = self.engine.read(applied).await?;
        Ok(applied.iter().map(|applied| applied.version).max().unwrap_or(0))
    }

    async fn now(&self) -> Result<DateTime<Utc>> {
        self.engine.read(|tx| tx.now().map(instant)).await
    }

    async fn pin_clock(&self, at: Option<DateTime<Utc>>) -> Result<()> {
        self.engine
            .write(move |tx| {
                const PIN: &str = "
        update clock
           set pinned = ?1";
                tx.execute(PIN, params![at.map(|at| at.timestamp_micros())])?;
                Ok(())
            })
            .await
    }

    fn with_own_connection(&self) -> Arc<dyn Store> {
        // The one writing thread serves all callers and never waits for a handler.
        Arc::new(self.clone())
    }
}

/// Runs the missing migrations, in the caller's transaction.
fn migrate(tx: &Tx<'_>, migrations: &'static [Migration]) -> Sql<Migrated> {
    const CREATE_HISTORY: &str = "
        create table if not exists migrations (
            version          integer primary key,
            applied_at       integer not null,
            oldest_worker    integer not null,
            revision         text not null
        ) strict";
    const RECORD: &str = "
        insert into migrations (version, applied_at, oldest_worker, revision)
        values (?1, ?2, ?3, ?4)";
    let scripts = scripts(migrations);
    let to = scripts.version();
    let from = scripts.version_of(&applied(tx)?)?;
    if from == to {
        return Ok(Migrated { from, to });
    }
    tx.conn.execute_batch(CREATE_HISTORY)?;
    let excluded = scripts.excludes_workers(from);
    if let Some(oldest) = excluded {
        refuse_live_workers(tx, oldest)?;
    }
    for migration in scripts.missing(from) {
        tx.conn.execute_batch(migration.script)?;
        let Migration { version, oldest_worker, .. } = migration;
        tx.execute(RECORD, params![version, host_clock(), oldest_worker, scripts.revision()])?;
    }
    tx.conn.execute_batch(VIEWS)?;
    if let Some(oldest) = excluded {
        // Workers whose heartbeat is too old may still run. They must not claim any more.
        const END: &str = "
            update workers
               set dead_at = ?1
             where dead_at is null
               and schema_version < ?2";
        tx.execute(END, [tx.now()?, oldest])?;
    }
    Ok(Migrated { from, to })
}

fn refuse_live_workers(tx: &Tx<'_>, oldest: i64) -> Sql<()> {
    const LIVE: &str = "
        select name
          from workers
         where dead_at is null
           and schema_version < ?2
           and heartbeat_at > ?1 - stale_after_ms * 1000
         order by name";
    let live: Vec<String> = tx.rows(LIVE, [tx.now()?, oldest], |row| row.get(0))?;
    if live.is_empty() { Ok(()) } else { Err(older_workers_live(oldest, &live).into()) }
}

/// The migrations of the tables, none if there are no tables.
pub(super) fn applied(tx: &Tx<'_>) -> Sql<Vec<Applied>> {
    const HAS_HISTORY: &str = "
        select 1
          from sqlite_master
         where type = 'table'
           and name = 'migrations'";
    const APPLIED: &str = "
        select *
          from migrations";
    if tx.row(HAS_HISTORY, [], |_| Ok(()))?.is_none() {
        return Ok(Vec::new());
    }
    tx.rows(APPLIED, [], |row| {
        // Early tables have no revision.
        Ok(Applied { version: row.get("version")?, revision: row.get("revision").ok() })
    })
}
