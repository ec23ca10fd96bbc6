//! Cron schedules: storing them, and moving one to its next tick exactly once.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::enqueue::insert_any;
use super::tx::{Fault, Sql, Tx};
use crate::enqueue::ValidJob;
use crate::store::{Schedule, Ticked, Ticking};

const PUT_SCHEDULE: &str = "
    insert into longshore.schedules as s (name, expression, zone, missed, template, paused, next_at, last_at)
    values ($1, $2, $3, $4, $5, $6, $7, $8)
        on conflict (name) do update
       set expression = excluded.expression,
           zone = excluded.zone,
           missed = excluded.missed,
           template = excluded.template,
           next_at = case
             when (s.expression, s.zone) = (excluded.expression, excluded.zone) then s.next_at
             else excluded.next_at
           end
    returning name, expression, zone, missed, template, paused, next_at, last_at";

pub(super) async fn put_schedule(tx: &mut Tx<'_>, schedule: &Schedule) -> Sql<Schedule> {
    let stored = sqlx::query(tx.sql(PUT_SCHEDULE))
        .bind(&schedule.name)
        .bind(&schedule.expression)
        .bind(&schedule.zone)
        .bind(&schedule.missed)
        .bind(&schedule.template)
        .bind(schedule.paused)
        .bind(schedule.next_at)
        .bind(schedule.last_at)
        .fetch_one(&mut *tx.connection)
        .await?;
    read_schedule(&stored)
}

const SCHEDULES: &str = "
    select name, expression, zone, missed, template, paused, next_at, last_at
      from longshore.schedules
     order by name collate \"C\"";

pub(super) async fn schedules(tx: &mut Tx<'_>) -> Sql<Vec<Schedule>> {
    let rows = sqlx::query(tx.sql(SCHEDULES)).fetch_all(&mut *tx.connection).await?;
    rows.iter().map(read_schedule).collect()
}

const SET_TICKING: &str = "
    update longshore.schedules
       set paused = $2
     where name = $1";

pub(super) async fn set_ticking(tx: &mut Tx<'_>, name: &str, ticking: Ticking) -> Sql<bool> {
    let set = sqlx::query(tx.sql(SET_TICKING))
        .bind(name)
        .bind(ticking == Ticking::Held)
        .execute(&mut *tx.connection)
        .await?;
    Ok(set.rows_affected() > 0)
}

pub(super) async fn remove_schedule(tx: &mut Tx<'_>, name: &str) -> Sql<bool> {
    let deleted = sqlx::query(tx.sql("delete from longshore.schedules where name = $1"))
        .bind(name)
        .execute(&mut *tx.connection)
        .await?;
    Ok(deleted.rows_affected() > 0)
}

/// Compare and set: of all processes that see this tick, one moves the schedule on. The
/// expression and the other fields are compared too: a next tick computed from an old
/// expression would be wrong for a new one.
const FIRE: &str = "
    update longshore.schedules
       set next_at = $3,
           last_at = coalesce($4, last_at)
     where name = $1
       and next_at = $2
       and expression = $5
       and zone = $6
       and missed = $7
       and template = $8
       and not paused";

/// How long a tick waits for a row or a key that another client's transaction holds. Long
/// enough for another process that fires the same tick; short enough that a pass over many
/// locked schedules does not delay the others.
const MAX_LOCK_WAIT: Duration = Duration::from_millis(50);

pub(super) async fn fire(
    tx: &mut Tx<'_>,
    seen: &Schedule,
    next: DateTime<Utc>,
    fired: Option<DateTime<Utc>>,
    jobs: &[ValidJob],
) -> Sql<Ticked> {
    let firing = async {
        let mut transaction = tx.begin().await?;
        let tx = &mut transaction.tx();
        tx.limit_lock_waits(MAX_LOCK_WAIT).await?;
        let moved = sqlx::query(tx.sql(FIRE))
            .bind(&seen.name)
            .bind(seen.next_at)
            .bind(next)
            .bind(fired)
            .bind(&seen.expression)
            .bind(&seen.zone)
            .bind(&seen.missed)
            .bind(&seen.template)
            .execute(&mut *tx.connection)
            .await?;
        if moved.rows_affected() == 0 {
            return Ok(Ticked::Moved);
        }
        let enqueued = insert_any(tx, jobs).await?;
        transaction.commit().await?;
        Ok(Ticked::Fired(enqueued.results))
    };
    match firing.await {
        Err(fault) if Fault::is_lock_timeout(&fault) => Ok(Ticked::Locked),
        done => done,
    }
}

fn read_schedule(row: &PgRow) -> Sql<Schedule> {
    Ok(Schedule {
        name: row.try_get("name")?,
        expression: row.try_get("expression")?,
        zone: row.try_get("zone")?,
        missed: row.try_get("missed")?,
        template: row.try_get("template")?,
        paused: row.try_get("paused")?,
        next_at: row.try_get("next_at")?,
        last_at: row.try_get("last_at")?,
    })
}
