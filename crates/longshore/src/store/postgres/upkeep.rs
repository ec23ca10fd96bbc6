//! What keeps the queue in order: recovery of dead workers, schedules,
//! retention and the folding of tallies. Works in bounded steps by key, reads
//! no payloads, and needs no leader: a row lock or a condition decides.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Row};
use uuid::Uuid;

use super::{Done, PostgresStore};
use crate::enqueue::{Enqueued, Options, ValidJob};
use crate::error::Error;
use crate::job::{JobId, WorkerId};
use crate::lifecycle::{Flags, Running};
use crate::store::{Interrupted, Interruptor, Retained, Retention, Schedule, SweepScope, Ticking, millis};

// ---- recovery -----------------------------------------------------------

const MARK_DEAD: &str = "
    update longshore.workers
       set dead_at = longshore.clock()
     where id = any(array(
             select id
               from longshore.workers
              where dead_at is null
                and heartbeat_at < longshore.clock() - coalesce($1::int8, stale_after_ms) * interval '1 millisecond'
              order by id
                for update skip locked))
    returning id";

/// The dead stay visible for a while, and for as long as a lease names them.
const FORGET_DEAD: &str = "
    delete from longshore.workers w
     where w.dead_at < longshore.clock() - interval '1 hour'
       and not exists (
             select 1
               from longshore.running r
              where r.worker = w.id)";

const INTERRUPTED: &str = "
    select r.id, r.kind, r.queue, r.flags, r.lease_no, r.worker, r.attempt, r.max_attempts, r.interruptions,
           r.started_at is not null, r.cancel_requested, r.superseded, r.claimed_at, j.options::text, why.word
      from longshore.running r
      join longshore.jobs j on j.id = r.id
      left join longshore.workers w on w.id = r.worker
     cross join lateral (
             select coalesce(r.flags && $3::text[], false) as resilient) as job_is
     cross join lateral (
             select case when job_is.resilient then $4::float8 else 1 end as factor) as slow
     cross join lateral (   -- ten years at the most: past that nothing differs, and clocks end
             select least(coalesce($1::int8, w.stale_after_ms) * slow.factor, 315360000000)
                      * interval '1 millisecond' as silence,
                    least(coalesce($1::int8, $2::int8) * slow.factor, 315360000000)
                      * interval '1 millisecond' as margin) as patience
     cross join lateral (
             select case
                      when w.id is null
                       and r.claimed_at < longshore.clock() - patience.margin
                      then 'unknown'
                      when w.heartbeat_at < longshore.clock() - patience.silence
                        or (w.dead_at is not null and not job_is.resilient)
                      then 'dead'
                      when w.dead_at is null
                       and w.id is not null
                       and r.claimed_at < longshore.clock() - patience.margin
                                            - r.timeout_ms * interval '1 millisecond'
                      then 'hung'
                    end as word) as why
     where why.word is not null
       and r.id > coalesce($5, '00000000-0000-0000-0000-000000000000')
     order by r.id
     limit $6";

impl PostgresStore {
    pub(super) async fn mark_dead_on(
        &self,
        connection: &mut PgConnection,
        threshold: Option<Duration>,
    ) -> Done<Vec<WorkerId>> {
        sqlx::query(self.sql(FORGET_DEAD)).execute(&mut *connection).await?;
        let dead: Vec<Uuid> =
            sqlx::query_scalar(self.sql(MARK_DEAD)).bind(threshold.map(millis)).fetch_all(connection).await?;
        Ok(dead.into_iter().map(WorkerId).collect())
    }

    pub(super) async fn interrupted_on(
        &self,
        connection: &mut PgConnection,
        scope: &SweepScope,
    ) -> Done<Vec<Interrupted>> {
        let rows = sqlx::query(self.sql(INTERRUPTED))
            .bind(scope.threshold.map(millis))
            .bind(millis(scope.orphan_after))
            .bind(&scope.resilient_flags)
            .bind(f64::from(scope.resilient_factor.max(1)))
            .bind(scope.after.map(|id| id.0))
            .bind(i64::from(scope.limit))
            .fetch_all(connection)
            .await?;
        rows.iter().map(interrupted).collect()
    }
}

fn interrupted(row: &PgRow) -> Done<Interrupted> {
    let why = match row.try_get::<&str, _>(14)? {
        "unknown" => Interruptor::UnknownWorker,
        "dead" => Interruptor::DeadWorker,
        _ => Interruptor::HungHandler,
    };
    Ok(Interrupted {
        id: JobId(row.try_get(0)?),
        kind: row.try_get(1)?,
        queue: row.try_get(2)?,
        flags: row
            .try_get::<Option<Vec<Option<String>>>, _>(3)?
            .unwrap_or_default()
            .into_iter()
            .flatten()
            .collect(),
        running: Running {
            lease_no: row.try_get(4)?,
            worker: WorkerId(row.try_get(5)?),
            attempt: row.try_get::<i16, _>(6)? as u16,
            max_attempts: row.try_get::<i16, _>(7)? as u16,
            interruptions: row.try_get::<i16, _>(8)? as u16,
            started: row.try_get(9)?,
            flags: Flags { cancel_requested: row.try_get(10)?, superseded: row.try_get(11)? },
        },
        claimed_at: row.try_get(12)?,
        // One bad row must not stop the recovery of the others.
        retry: Options::from_stored(row.try_get(13)?).ok().and_then(|options| options.retry),
        why,
    })
}

// ---- schedules ----------------------------------------------------------

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

const SCHEDULES: &str = "
    select name, expression, zone, missed, template, paused, next_at, last_at
      from longshore.schedules
     order by name";

const SET_TICKING: &str = "
    update longshore.schedules
       set paused = $2
     where name = $1";

/// Compare and set: of all the processes that see this tick, one moves it on.
/// The rest of what it was decided from is compared too, because a tick after
/// an old line would be none of the new one's.
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

impl PostgresStore {
    pub(super) async fn put_schedule_on(
        &self,
        connection: &mut PgConnection,
        schedule: &Schedule,
    ) -> Done<Schedule> {
        let stored = sqlx::query(self.sql(PUT_SCHEDULE))
            .bind(&schedule.name)
            .bind(&schedule.expression)
            .bind(&schedule.zone)
            .bind(&schedule.missed)
            .bind(&schedule.template)
            .bind(schedule.paused)
            .bind(schedule.next_at)
            .bind(schedule.last_at)
            .fetch_one(connection)
            .await?;
        read_schedule(&stored)
    }

    pub(super) async fn schedules_on(&self, connection: &mut PgConnection) -> Done<Vec<Schedule>> {
        let rows = sqlx::query(self.sql(SCHEDULES)).fetch_all(connection).await?;
        rows.iter().map(read_schedule).collect()
    }

    pub(super) async fn set_ticking_on(
        &self,
        connection: &mut PgConnection,
        name: &str,
        ticking: Ticking,
    ) -> Done<bool> {
        let set = sqlx::query(self.sql(SET_TICKING))
            .bind(name)
            .bind(ticking == Ticking::Held)
            .execute(connection)
            .await?;
        Ok(set.rows_affected() > 0)
    }

    pub(super) async fn remove_schedule_on(&self, connection: &mut PgConnection, name: &str) -> Done<bool> {
        let gone = sqlx::query(self.sql("delete from longshore.schedules where name = $1"))
            .bind(name)
            .execute(connection)
            .await?;
        Ok(gone.rows_affected() > 0)
    }

    pub(super) async fn fire_on(
        &self,
        connection: &mut PgConnection,
        seen: &Schedule,
        next: DateTime<Utc>,
        fired: Option<DateTime<Utc>>,
        jobs: &[ValidJob],
    ) -> Done<Option<Vec<Enqueued>>> {
        let mut tx = connection.begin().await?;
        let moved = sqlx::query(self.sql(FIRE))
            .bind(&seen.name)
            .bind(seen.next_at)
            .bind(next)
            .bind(fired)
            .bind(&seen.expression)
            .bind(&seen.zone)
            .bind(&seen.missed)
            .bind(&seen.template)
            .execute(&mut *tx)
            .await?;
        if moved.rows_affected() == 0 {
            return Ok(None);
        }
        let enqueued = self.insert_any(&mut tx, jobs).await?;
        tx.commit().await?;
        Ok(Some(enqueued))
    }
}

fn read_schedule(row: &PgRow) -> Done<Schedule> {
    Ok(Schedule {
        name: row.try_get(0)?,
        expression: row.try_get(1)?,
        zone: row.try_get(2)?,
        missed: row.try_get(3)?,
        template: row.try_get(4)?,
        paused: row.try_get(5)?,
        next_at: row.try_get(6)?,
        last_at: row.try_get(7)?,
    })
}

// ---- retain -------------------------------------------------------------

/// Whoever holds the row walks; others find nothing to do.
const BEGIN_WALK: &str = "
    select cursor
      from longshore.upkeep
     where name = $1
       for update skip locked";

const RETAIN: &str = "
    with page as materialized (
      select id, outcome, finished_at
        from longshore.finished
       where id > coalesce($1, '00000000-0000-0000-0000-000000000000')
       order by id
       limit $2),
    gone as (
      delete from longshore.finished
       where id = any(array(
               select f.id
                 from longshore.finished f
                where f.id = any(array(
                        select id
                          from page
                         where finished_at < longshore.clock() - interval '1 millisecond'
                                 * case outcome
                                     when 'succeeded' then $3::int8
                                     when 'cancelled' then $4::int8
                                     when 'failed_permanent' then $5::int8
                                   end))
                order by f.id
                  for update skip locked))   -- somebody's retry: next time
      returning id, outcome),
    forgotten as (
      delete from longshore.jobs
       where id = any(array(select id from gone))
      returning id, queue, kind),
    history as (
      delete from longshore.attempts
       where job = any(array(select id from gone))),
    saved as (
      delete from longshore.checkpoints
       where job = any(array(select id from gone))),
    uncounted as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 0, -count(*), g.outcome, 0, j.queue, j.kind
        from gone g
        join forgotten j on j.id = g.id
       group by g.outcome, j.queue, j.kind),
    walked as (
      update longshore.upkeep
         set cursor = (
               select case when count(*) = $2 then (array_agg(id order by id desc))[1] end
                 from page)
       where name = 'retain')
    select (select count(*) from gone), (select count(*) from page)";

/// Raw rows of past minutes become one row a minute, minutes of two hours ago
/// hours, and hours of a week ago one row for all time. `kept` adds up to the
/// same at every instant, because each step is one statement.
const FOLD: &str = "
    with old as (
      select ctid
        from longshore.tallies
       where level = $1
         and minute < $2
       order by minute
       limit $3
         for update skip locked),
    gone as (
      delete from longshore.tallies
       where ctid = any(array(select ctid from old))
      returning *),
    merged as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, level, queue, kind)
      select case $1 when 0 then minute when 1 then date_trunc('hour', minute) else 'epoch' end,
             case when $1 < 2 then sum(ended) else 0 end, sum(kept), outcome,
             case when $1 < 2 then run_bucket else 0 end, $1 + 1, queue, kind
        from gone
       group by 1, 4, 5, queue, kind)
    select count(*) from gone";

/// All time is one row a (queue, kind, outcome): merge what the last step added.
const FOLD_BASE: &str = "
    with gone as (
      delete from longshore.tallies t
       where t.level = 3
         and (t.queue, t.kind, t.outcome) in (
               select queue, kind, outcome
                 from longshore.tallies
                where level = 3
                group by queue, kind, outcome
               having count(*) > 1)
      returning *)
    insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, level, queue, kind)
    select 'epoch', 0, sum(kept), outcome, 0, 3, queue, kind
      from gone
     group by outcome, queue, kind
    having sum(kept) <> 0";

impl PostgresStore {
    pub(super) async fn retain_on(
        &self,
        connection: &mut PgConnection,
        policy: &Retention,
        step: u32,
    ) -> Done<Retained> {
        let mut tx = connection.begin().await?;
        let walk: Option<(Option<Uuid>,)> =
            sqlx::query_as(self.sql(BEGIN_WALK)).bind("retain").fetch_optional(&mut *tx).await?;
        let Some((cursor,)) = walk else { return Ok(Retained { removed: 0, done: true }) };
        let (removed, seen): (i64, i64) = sqlx::query_as(self.sql(RETAIN))
            .bind(cursor)
            .bind(i64::from(step))
            .bind(policy.succeeded.map(millis))
            .bind(policy.cancelled.map(millis))
            .bind(policy.failed_permanent.map(millis))
            .fetch_one(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(Retained { removed: removed as u64, done: seen < i64::from(step) })
    }

    pub(super) async fn fold_tallies_on(&self, connection: &mut PgConnection, step: u32) -> Done<u64> {
        let mut tx = connection.begin().await?;
        let walk = sqlx::query(self.sql(BEGIN_WALK)).bind("fold").fetch_optional(&mut *tx).await?;
        if walk.is_none() {
            return Ok(0);
        }
        let now: DateTime<Utc> =
            sqlx::query_scalar(self.sql("select date_trunc('minute', longshore.clock())"))
                .fetch_one(&mut *tx)
                .await?;
        let hour = chrono::TimeDelta::hours(1);
        let bounds = [(0i16, now), (1, now - hour * 2), (2, now - hour * 24 * 7)];
        let mut folded = 0;
        for (level, before) in bounds {
            let rows: i64 = sqlx::query_scalar(self.sql(FOLD))
                .bind(level)
                .bind(before)
                .bind(i64::from(step))
                .fetch_one(&mut *tx)
                .await?;
            folded += u64::try_from(rows).map_err(|_| Error::internal("a count below zero"))?;
            if level == 2 && rows > 0 {
                sqlx::query(self.sql(FOLD_BASE)).execute(&mut *tx).await?;
            }
        }
        tx.commit().await?;
        Ok(folded)
    }
}
