//! Cron schedules: storing them, and moving one to its next tick exactly once.

use chrono::{DateTime, Utc};
use rusqlite::{Row, params};

use super::enqueue::enqueue;
use super::tx::{Columns, Sql, Tx};
use crate::enqueue::ValidJob;
use crate::store::{Schedule, Ticked, Ticking};

pub(super) fn put_schedule(tx: &Tx<'_>, schedule: &Schedule) -> Sql<Schedule> {
    const PUT: &str = "
        insert into schedules
               (name, expression, zone, missed, template, paused, next_at, last_at)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
            on conflict (name) do update
           set expression = excluded.expression,
               zone = excluded.zone,
               missed = excluded.missed,
               template = excluded.template,
               next_at = case
                 when (expression, zone) = (excluded.expression, excluded.zone) then next_at
                 else excluded.next_at
               end
        returning name, expression, zone, missed, template, paused, next_at, last_at";
    let mut put = tx.prepare(PUT)?;
    let stored = put.query_row(
        params![
            schedule.name,
            schedule.expression,
            schedule.zone,
            schedule.missed,
            schedule.template,
            schedule.paused,
            schedule.next_at.timestamp_micros(),
            schedule.last_at.map(|at| at.timestamp_micros()),
        ],
        read_schedule,
    )?;
    Ok(stored)
}

pub(super) fn schedules(tx: &Tx<'_>) -> Sql<Vec<Schedule>> {
    const ALL: &str = "
        select name,
               expression,
               zone,
               missed,
               template,
               paused,
               next_at,
               last_at
          from schedules
         order by name";
    tx.rows(ALL, [], read_schedule)
}

pub(super) fn set_ticking(tx: &Tx<'_>, name: &str, ticking: Ticking) -> Sql<bool> {
    const SET: &str = "
        update schedules
           set paused = ?2
         where name = ?1";
    Ok(tx.execute(SET, params![name, ticking == Ticking::Held])? > 0)
}

pub(super) fn remove_schedule(tx: &Tx<'_>, name: &str) -> Sql<bool> {
    const REMOVE: &str = "
        delete from schedules
         where name = ?1";
    Ok(tx.execute(REMOVE, [name])? > 0)
}

pub(super) fn fire(
    tx: &Tx<'_>,
    seen: &Schedule,
    next: DateTime<Utc>,
    fired: Option<DateTime<Utc>>,
    jobs: &[ValidJob],
) -> Sql<Ticked> {
    // Compare and set: of all processes that see this tick, one moves the schedule on. The
    // expression and the other fields are compared too: a next tick computed from an old
    // expression would be wrong for a new one.
    const MOVE_ON: &str = "
        update schedules
           set next_at = ?3,
               last_at = coalesce(?4, last_at)
         where name = ?1
           and next_at = ?2
           and expression = ?5
           and zone = ?6
           and missed = ?7
           and template = ?8
           and paused = 0";
    let moved = tx.execute(
        MOVE_ON,
        params![
            seen.name,
            seen.next_at.timestamp_micros(),
            next.timestamp_micros(),
            fired.map(|at| at.timestamp_micros()),
            seen.expression,
            seen.zone,
            seen.missed,
            seen.template,
        ],
    )?;
    if moved > 0 { Ok(Ticked::Fired(enqueue(tx, jobs)?.results)) } else { Ok(Ticked::Moved) }
}

fn read_schedule(row: &Row<'_>) -> rusqlite::Result<Schedule> {
    Ok(Schedule {
        name: row.get("name")?,
        expression: row.get("expression")?,
        zone: row.get("zone")?,
        missed: row.get("missed")?,
        template: row.get("template")?,
        paused: row.get("paused")?,
        next_at: row.time("next_at")?,
        last_at: row.maybe_time("last_at")?,
    })
}
