//! Turns: the line in which groups with waiting jobs wait to be claimed from.

use rusqlite::params;

use super::operate::WasReady;
use super::tx::{Sql, Tx};

/// Adds a turn for a job that was inserted into `ready`, unless the group has one that is not later:
/// there is one writer, so no claim can delete that one without seeing the job. A turn is never in the
/// past, so a new group comes after those that wait already.
pub(super) fn add_turn(tx: &Tx<'_>, queue: &str, group: &str, priority: i16, run_at: i64) -> Sql<()> {
    const ADD: &str = "
        insert into turns (at, priority, queue, grp)
        select ?1, ?2, ?3, ?4
         where not exists (
               select 1
                 from turns indexed by turns_group
                where queue = ?3
                  and grp = ?4
                  and priority = ?2
                  and at <= ?1)";
    tx.execute(ADD, params![run_at.max(tx.now()?), priority, queue, group])?;
    Ok(())
}

/// Adds a turn for the group of a job that was not due and leaves `ready`. Its turn may be at the end of time, where
/// nobody would find that the group has no jobs left.
pub(super) fn add_turn_of_removed(tx: &Tx<'_>, row: &WasReady) -> Sql<()> {
    let now = tx.now()?;
    match &row.group {
        Some(group) if row.run_at > now => add_turn(tx, &row.queue, group, row.priority, now),
        _ => Ok(()),
    }
}

/// Adds a turn for a group with a limit whose lease ended, because another of its jobs may
/// start now.
pub(super) fn add_turn_of_freed(tx: &Tx<'_>, queue: &str, group: &str, priority: i16) -> Sql<()> {
    const NEXT: &str = "
        select priority
          from turns
         where queue = ?1
           and grp = ?2
         order by priority desc
         limit 1";
    let next = tx.row(NEXT, params![queue, group], |row| row.get(0))?;
    add_turn(tx, queue, group, next.unwrap_or(priority), tx.now()?)
}
