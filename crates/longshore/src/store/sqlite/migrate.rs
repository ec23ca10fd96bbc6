//! The tables: their migrations and their clock.

use chrono::{DateTime, Utc};
use rusqlite::params;

use super::tx::{Sql, Tx, host_clock, instant};
use crate::store::{Migrated, OLDEST_WORKER, SCHEMA_VERSION, older_workers_live, schema_too_new};

const MIGRATIONS: [(i64, &str); SCHEMA_VERSION as usize] = [
    (1, include_str!("../../../migrations/sqlite/0001_queue.sql")),
    (2, include_str!("../../../migrations/sqlite/0002_server.sql")),
    (3, include_str!("../../../migrations/sqlite/0003_hardening.sql")),
    (4, include_str!("../../../migrations/sqlite/0004_first_run.sql")),
    (5, include_str!("../../../migrations/sqlite/0005_steps.sql")),
    (6, include_str!("../../../migrations/sqlite/0006_flow_control.sql")),
    (7, include_str!("../../../migrations/sqlite/0007_flow_returns.sql")),
    (8, include_str!("../../../migrations/sqlite/0008_dashboard.sql")),
    (9, include_str!("../../../migrations/sqlite/0009_tokens_have_limits.sql")),
];
/// The view, replaced by every migration.
const VIEWS: &str = include_str!("../../../migrations/sqlite/views.sql");

/// Runs the missing migrations, in the caller's transaction.
pub(super) fn migrate(tx: &Tx<'_>) -> Sql<Migrated> {
    const CREATE_HISTORY: &str = "
        create table if not exists migrations (
            version          integer primary key,
            applied_at       integer not null
        ) strict";
    const RECORD: &str = "
        insert into migrations (version, applied_at)
        values (?1, ?2)";
    let from = schema_version(tx)?;
    if from > SCHEMA_VERSION {
        return Err(schema_too_new(from).into());
    }
    tx.conn.execute_batch(CREATE_HISTORY)?;
    if (1..OLDEST_WORKER).contains(&from) {
        refuse_live_workers(tx)?;
    }
    for (version, script) in MIGRATIONS {
        if version > from {
            tx.conn.execute_batch(script)?;
            tx.execute(RECORD, params![version, host_clock()])?;
        }
    }
    tx.conn.execute_batch(VIEWS)?;
    Ok(Migrated { from, to: SCHEMA_VERSION })
}

/// Workers of an earlier version would ignore limits of groups or changes of flows.
fn refuse_live_workers(tx: &Tx<'_>) -> Sql<()> {
    const LIVE: &str = "
        select name
          from workers
         where dead_at is null
           and heartbeat_at > ?1 - stale_after_ms * 1000
         order by name";
    let live: Vec<String> = tx.rows(LIVE, [tx.now()?], |row| row.get(0))?;
    if live.is_empty() { Ok(()) } else { Err(older_workers_live(&live).into()) }
}

pub(super) fn schema_version(tx: &Tx<'_>) -> Sql<i64> {
    const HAS_HISTORY: &str = "
        select 1
          from sqlite_master
         where type = 'table'
           and name = 'migrations'";
    const NEWEST: &str = "
        select coalesce(max(version), 0)
          from migrations";
    if tx.row(HAS_HISTORY, [], |_| Ok(()))?.is_none() {
        return Ok(0);
    }
    Ok(tx.row(NEWEST, [], |row| row.get(0))?.unwrap_or(0))
}

pub(super) fn now(tx: &Tx<'_>) -> Sql<DateTime<Utc>> {
    tx.now().map(instant)
}

pub(super) fn pin_clock(tx: &Tx<'_>, at: Option<DateTime<Utc>>) -> Sql<()> {
    const PIN: &str = "
        update clock
           set pinned = ?1";
    tx.execute(PIN, params![at.map(|at| at.timestamp_micros())])?;
    Ok(())
}
