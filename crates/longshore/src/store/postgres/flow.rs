//! What happens to a lease: progress and checkpoints, settle, and the heartbeat
//! that keeps it. Enqueue and claim have files of their own.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Row};
use uuid::Uuid;

use super::enqueue::{millis, split};
use super::{Done, Fault, PostgresStore};
use crate::error::Result;
use crate::job::{AttemptEnd, JobId, WorkerId};
use crate::lifecycle::{Finish, Flags, Leave, Requeue};
use crate::store::{Beat, Fenced, Interruptor, Lease, NewWorker, Settled, Settlement, WorkerRecord, clean};

// ---- while it runs ------------------------------------------------------

const MARK_STARTED: &str = "
    update longshore.running
       set started_at = longshore.clock()
     where id = $1
       and lease_no = $2
       and worker = $3";

const PROGRESS: &str = "
    with input as (
      select *
        from unnest($1::uuid[], $2::int4[], $3::uuid[], $4::text[]) as input(id, lease_no, worker, progress)),
    held as (
      select r.id, i.lease_no, i.progress
        from longshore.running r
        join input i
          on i.id = r.id
         and i.lease_no = r.lease_no   -- fence: a newer lease owns the row
         and i.worker = r.worker
       order by r.id
         for no key update of r)
    update longshore.running r
       set progress = h.progress::json
      from held h
     where r.id = h.id
    returning r.id, r.lease_no";

/// The lease's row is locked against being taken, so a checkpoint of a lost
/// lease cannot land on top of its successor's.
const SAVE_CHECKPOINT: &str = "
    with held as (
      select id, lease_no
        from longshore.running
       where id = $1
         and lease_no = $2
         and worker = $3
         for key share)
    insert into longshore.checkpoints (job, lease_no, data, saved_at)
    select id, lease_no, $4::text::json, longshore.clock()
      from held
        on conflict (job) do update
       set lease_no = excluded.lease_no,
           data = excluded.data,
           saved_at = excluded.saved_at";

const ASSERT_LEASE: &str = "
    select 1
      from longshore.running
     where id = $1
       and lease_no = $2
       and worker = $3
       for key share";

impl PostgresStore {
    pub(super) async fn mark_started_on(&self, connection: &mut PgConnection, lease: &Lease) -> Done<Fenced> {
        let done = sqlx::query(self.sql(MARK_STARTED))
            .bind(lease.id.0)
            .bind(lease.lease_no)
            .bind(lease.worker.0)
            .execute(connection)
            .await?;
        Ok(fenced(done.rows_affected() > 0))
    }

    pub(super) async fn progress_on(
        &self,
        connection: &mut PgConnection,
        reports: &[(Lease, Box<RawValue>)],
    ) -> Done<Vec<Fenced>> {
        // The last report of a lease stands; an update touches a row once.
        let newest: BTreeMap<Lease, &str> =
            reports.iter().map(|(lease, progress)| (*lease, progress.get())).collect();
        let rows = sqlx::query(self.sql(PROGRESS))
            .bind(newest.keys().map(|lease| lease.id.0).collect::<Vec<_>>())
            .bind(newest.keys().map(|lease| lease.lease_no).collect::<Vec<_>>())
            .bind(newest.keys().map(|lease| lease.worker.0).collect::<Vec<_>>())
            .bind(newest.values().copied().collect::<Vec<_>>())
            .fetch_all(connection)
            .await?;
        let mut held = Vec::with_capacity(rows.len());
        for row in rows {
            held.push((row.try_get::<Uuid, _>(0)?, row.try_get::<i32, _>(1)?));
        }
        Ok(reports.iter().map(|(lease, _)| fenced(held.contains(&(lease.id.0, lease.lease_no)))).collect())
    }

    pub(super) async fn save_checkpoint_on(
        &self,
        connection: &mut PgConnection,
        lease: &Lease,
        data: &RawValue,
    ) -> Done<Fenced> {
        let done = sqlx::query(self.sql(SAVE_CHECKPOINT))
            .bind(lease.id.0)
            .bind(lease.lease_no)
            .bind(lease.worker.0)
            .bind(data.get())
            .execute(connection)
            .await?;
        Ok(fenced(done.rows_affected() > 0))
    }

    pub(super) async fn checkpoint_on(
        &self,
        connection: &mut PgConnection,
        id: JobId,
    ) -> Done<Option<Box<RawValue>>> {
        let text: Option<String> =
            sqlx::query_scalar(self.sql("select data::text from longshore.checkpoints where job = $1"))
                .bind(id.0)
                .fetch_optional(connection)
                .await?;
        Ok(text.map(super::inspect::raw).transpose()?)
    }

    pub(super) async fn assert_lease_on(&self, connection: &mut PgConnection, lease: &Lease) -> Done<Fenced> {
        let held = sqlx::query(self.sql(ASSERT_LEASE))
            .bind(lease.id.0)
            .bind(lease.lease_no)
            .bind(lease.worker.0)
            .fetch_optional(connection)
            .await?;
        Ok(fenced(held.is_some()))
    }

    /// Whether a lease is live, inside the caller's own transaction: until that
    /// ends, nobody can take the lease, so what it commits was done by the
    /// job's only owner.
    pub async fn assert_lease_in(&self, connection: &mut PgConnection, lease: &Lease) -> Result<Fenced> {
        Ok(self.assert_lease_on(connection, lease).await?)
    }
}

fn fenced(held: bool) -> Fenced {
    if held { Fenced::Held } else { Fenced::LeaseLost }
}

// ---- settle -------------------------------------------------------------

const FINISH: &str = "
    with input as (
      select *
        from unnest($1::uuid[], $2::int4[], $3::uuid[], $4::bool[], $5::bool[], $6::bool[], $7::text[], $8::int2[],
                    $9::int2[], $10::text[], $11::text[], $12::text[])
          as input(id, lease_no, worker, cancel_seen, superseded_seen, recovers_dead, outcome, attempts,
                   interruptions, error, result, history)),
    taken as (
      delete from longshore.running
       where id = any(array(
               select r.id
                 from longshore.running r
                 join input i
                   on i.id = r.id
                  and i.lease_no = r.lease_no   -- fence: a newer lease owns the row
                  and i.worker = r.worker
                  and (i.cancel_seen is null or i.cancel_seen = r.cancel_requested)
                  and (i.superseded_seen is null or i.superseded_seen = r.superseded)
                  and (i.recovers_dead is not true or not exists (
                        select 1
                          from longshore.workers w
                         where w.id = r.worker
                           and w.dead_at is null))
                order by r.id                   -- one lock order everywhere
                  for update of r))
      returning id, worker, claimed_at, lease_no, attempt, max_attempts, keyed, kind, queue),
    settled as materialized (
      select t.*, i.recovers_dead, i.outcome::longshore.outcome as outcome, i.attempts, i.interruptions,
             i.error, i.result, i.history
        from taken t
        join input i
          on i.id = t.id
         and i.lease_no = t.lease_no),
    ended as (
      insert into longshore.finished
             (id, started_at, finished_at, finished_by, lease_no, outcome, attempts, max_attempts,
              interruptions, last_error, result)
      select s.id, s.claimed_at, longshore.clock(), case when s.recovers_dead is null then s.worker end,
             s.lease_no, s.outcome, s.attempts, s.max_attempts, s.interruptions,
             case
               when s.error is not null then s.error
               when s.lease_no > 1 then (
                 select a.error
                   from longshore.attempts a
                  where a.job = s.id
                    and a.error is not null
                  order by a.lease_no desc
                  limit 1)
             end,
             s.result::json
        from settled s),
    remembered as (
      insert into longshore.attempts (job, lease_no, attempt, what, worker, started_at, ended_at, error)
      select s.id, s.lease_no, s.attempt, s.history, s.worker, s.claimed_at, longshore.clock(), s.error
        from settled s
       where s.history is not null),
    freed as (
      delete from longshore.keys
       where job = any(array(select t.id from taken t where t.keyed))),
    counted as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), count(*), count(*), s.outcome,
             longshore.run_bucket(s.claimed_at, longshore.clock()), s.queue, s.kind
        from settled s
       group by 4, 5, 6, 7)
    select id, lease_no from taken";

const REQUEUE: &str = "
    with input as (
      select *
        from unnest($1::uuid[], $2::int4[], $3::uuid[], $4::bool[], $5::bool[], $6::bool[], $7::int2[], $8::int2[],
                    $9::timestamptz[], $10::int8[], $11::text[], $12::text[])
          as input(id, lease_no, worker, cancel_seen, superseded_seen, recovers_dead, attempts, interruptions,
                   run_at, delay_us, history, error)),
    taken as (
      delete from longshore.running
       where id = any(array(
               select r.id
                 from longshore.running r
                 join input i
                   on i.id = r.id
                  and i.lease_no = r.lease_no   -- fence: a newer lease owns the row
                  and i.worker = r.worker
                  and (i.cancel_seen is null or i.cancel_seen = r.cancel_requested)
                  and (i.superseded_seen is null or i.superseded_seen = r.superseded)
                  and (i.recovers_dead is not true or not exists (
                        select 1
                          from longshore.workers w
                         where w.id = r.worker
                           and w.dead_at is null))
                order by r.id                   -- one lock order everywhere
                  for update of r))
      returning *),
    requeued as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select t.id, coalesce(i.run_at, longshore.clock() + i.delay_us * interval '1 microsecond'), longshore.clock(),
             t.timeout_ms, t.lease_no, t.priority, i.attempts, t.max_attempts, i.interruptions,
             t.keyed, t.kind, t.queue, t.flags
        from taken t
        join input i
          on i.id = t.id
         and i.lease_no = t.lease_no),
    remembered as (
      insert into longshore.attempts (job, lease_no, attempt, what, worker, started_at, ended_at, error)
      select t.id, t.lease_no, t.attempt, i.history, t.worker, t.claimed_at, longshore.clock(), i.error
        from taken t
        join input i
          on i.id = t.id
         and i.lease_no = t.lease_no)
    select id, lease_no from taken";

/// Why settlements found no lease: it lives with other flags, or this very end
/// was stored before and the answer lost, or it is gone. The error is compared,
/// too: a sweeper may have charged the attempt in the holder's name.
const DIAGNOSE: &str = "
    select i.nth, r.cancel_requested, r.superseded,
           exists (
             select 1
               from longshore.finished f
              where f.id = i.id
                and f.lease_no = i.lease_no
                and f.finished_by = i.worker
                and f.outcome::text = i.outcome)
        or exists (
             select 1
               from longshore.attempts a
              where a.job = i.id
                and a.lease_no = i.lease_no
                and a.worker = i.worker
                and i.outcome is null
                and a.what = i.history
                and a.error is not distinct from i.error)
      from unnest($1::uuid[], $2::int4[], $3::uuid[], $4::text[], $5::text[], $6::text[]) with ordinality
        as i(id, lease_no, worker, outcome, history, error, nth)
      left join longshore.running r
        on r.id = i.id
       and r.lease_no = i.lease_no
       and r.worker = i.worker";

/// One settlement on its way in, and where its answer goes.
struct Item<'a> {
    nth: usize,
    settlement: &'a Settlement,
    /// `None` for the holder's own word; for a sweeper's, whether the holder
    /// must be dead.
    recovers_dead: Option<bool>,
}

impl Item<'_> {
    fn lease_key(&self) -> (Uuid, i32) {
        (self.settlement.lease.id.0, self.settlement.lease.lease_no)
    }
}

impl PostgresStore {
    pub(super) async fn settle_on(
        &self,
        connection: &mut PgConnection,
        batch: &[Settlement],
    ) -> Done<Vec<Settled>> {
        let items = batch.iter().enumerate();
        let items = items.map(|(nth, settlement)| Item { nth, settlement, recovers_dead: None });
        self.end_leases(connection, items.collect()).await
    }

    pub(super) async fn recover_on(
        &self,
        connection: &mut PgConnection,
        batch: &[(Interruptor, Settlement)],
    ) -> Done<Vec<Settled>> {
        let items = batch.iter().enumerate().map(|(nth, (why, settlement))| Item {
            nth,
            settlement,
            recovers_dead: Some(*why != Interruptor::HungHandler),
        });
        self.end_leases(connection, items.collect()).await
    }

    async fn end_leases(&self, connection: &mut PgConnection, items: Vec<Item<'_>>) -> Done<Vec<Settled>> {
        let mut answers = vec![Settled::LeaseLost; items.len()];
        let (alone, together): (Vec<_>, Vec<_>) =
            items.iter().partition(|item| !item.settlement.follow_ups.is_empty());
        self.end_together(connection, &together, &mut answers).await?;
        for item in alone {
            let mut tx = connection.begin().await?;
            self.end_together(&mut tx, &[item], &mut answers).await?;
            // Stored before the answer was lost: then the follow-ups were too,
            // and their ids are found again.
            if answers[item.nth] == Settled::Stored {
                self.insert_any(&mut tx, &item.settlement.follow_ups).await?;
            }
            tx.commit().await?;
        }
        Ok(answers)
    }

    async fn end_together(
        &self,
        connection: &mut PgConnection,
        items: &[&Item<'_>],
        answers: &mut [Settled],
    ) -> Done<()> {
        let mut finishes: Vec<(&Item<'_>, &Finish)> = Vec::new();
        let mut requeues: Vec<(&Item<'_>, &Requeue)> = Vec::new();
        let mut leases = HashSet::with_capacity(items.len());
        for item in items {
            // The same lease twice in one batch: the first word counts, the
            // second finds the lease gone.
            if !leases.insert(item.lease_key()) {
                continue;
            }
            match &item.settlement.leave {
                Leave::Finish(finish) => finishes.push((item, finish)),
                Leave::Requeue(requeue) => requeues.push((item, requeue)),
            }
        }
        let mut stored = Vec::with_capacity(items.len());
        if !finishes.is_empty() {
            stored.extend(self.finish(connection, &finishes).await?);
        }
        if !requeues.is_empty() {
            stored.extend(self.requeue(connection, &requeues).await?);
        }
        if stored.len() == items.len() {
            items.iter().for_each(|item| answers[item.nth] = Settled::Stored);
            return Ok(());
        }
        let mut stored: HashSet<(Uuid, i32)> = stored.into_iter().collect();
        let (done, missed): (Vec<&Item<'_>>, Vec<&Item<'_>>) =
            items.iter().partition(|item| stored.remove(&item.lease_key()));
        done.iter().for_each(|item| answers[item.nth] = Settled::Stored);
        self.diagnose(connection, &missed, answers).await
    }

    async fn finish(
        &self,
        connection: &mut PgConnection,
        items: &[(&Item<'_>, &Finish)],
    ) -> Done<Vec<(Uuid, i32)>> {
        let query = bind_leases(sqlx::query_as(self.sql(FINISH)), items.iter().map(|(item, _)| *item));
        let finishes = || items.iter().map(|(_, finish)| *finish);
        let ids = query
            .bind(finishes().map(|f| f.outcome.as_str()).collect::<Vec<_>>())
            .bind(finishes().map(|f| f.attempts as i16).collect::<Vec<_>>())
            .bind(finishes().map(|f| f.interruptions as i16).collect::<Vec<_>>())
            .bind(finishes().map(|f| f.error.as_deref().map(clean)).collect::<Vec<_>>())
            .bind(
                finishes()
                    .map(|f| f.result.as_ref().map(|result| result.get().to_owned()))
                    .collect::<Vec<_>>(),
            )
            .bind(finishes().map(|f| f.history.map(AttemptEnd::as_str)).collect::<Vec<_>>())
            .fetch_all(connection)
            .await?;
        Ok(ids)
    }

    async fn requeue(
        &self,
        connection: &mut PgConnection,
        items: &[(&Item<'_>, &Requeue)],
    ) -> Done<Vec<(Uuid, i32)>> {
        let query = bind_leases(sqlx::query_as(self.sql(REQUEUE)), items.iter().map(|(item, _)| *item));
        let requeues = || items.iter().map(|(_, requeue)| *requeue);
        let (run_ats, delays): (Vec<_>, Vec<_>) = requeues().map(|r| split(r.when)).unzip();
        let ids = query
            .bind(requeues().map(|r| r.attempts as i16).collect::<Vec<_>>())
            .bind(requeues().map(|r| r.interruptions as i16).collect::<Vec<_>>())
            .bind(run_ats)
            .bind(delays)
            .bind(requeues().map(|r| r.history.as_str()).collect::<Vec<_>>())
            .bind(requeues().map(|r| r.error.as_deref().map(clean)).collect::<Vec<_>>())
            .fetch_all(connection)
            .await?;
        Ok(ids)
    }

    async fn diagnose(
        &self,
        connection: &mut PgConnection,
        missed: &[&Item<'_>],
        answers: &mut [Settled],
    ) -> Done<()> {
        let leases = || missed.iter().map(|item| &item.settlement.lease);
        let traces: Vec<Trace> = missed.iter().map(|item| Trace::of(item)).collect();
        let rows = sqlx::query(self.sql(DIAGNOSE))
            .bind(leases().map(|lease| lease.id.0).collect::<Vec<_>>())
            .bind(leases().map(|lease| lease.lease_no).collect::<Vec<_>>())
            .bind(leases().map(|lease| lease.worker.0).collect::<Vec<_>>())
            .bind(traces.iter().map(|trace| trace.outcome).collect::<Vec<_>>())
            .bind(traces.iter().map(|trace| trace.history).collect::<Vec<_>>())
            .bind(traces.into_iter().map(|trace| trace.error).collect::<Vec<_>>())
            .fetch_all(connection)
            .await?;
        for row in rows {
            let item = missed[row.try_get::<i64, _>(0)? as usize - 1];
            let flags = row.try_get::<Option<bool>, _>(1)?.zip(row.try_get::<Option<bool>, _>(2)?);
            answers[item.nth] = match flags {
                Some((cancel_requested, superseded))
                    if item.recovers_dead.is_none() || flags_differ(item, flags) =>
                {
                    Settled::Flagged(Flags { cancel_requested, superseded })
                }
                // The lease lives, with the flags as seen: its holder is not
                // dead, and keeps it.
                Some(_) => Settled::LeaseLost,
                None if item.recovers_dead.is_none() && row.try_get(3)? => Settled::Stored,
                None => Settled::LeaseLost,
            };
        }
        Ok(())
    }
}

fn flags_differ(item: &Item<'_>, found: Option<(bool, bool)>) -> bool {
    item.settlement.seen.map(|seen| (seen.cancel_requested, seen.superseded)) != found
}

/// What a stored settlement leaves behind: its outcome, or its history entry.
#[derive(Default)]
struct Trace {
    outcome: Option<&'static str>,
    history: Option<&'static str>,
    error: Option<String>,
}

impl Trace {
    fn of(item: &Item<'_>) -> Self {
        match &item.settlement.leave {
            Leave::Finish(finish) => Trace { outcome: Some(finish.outcome.as_str()), ..Trace::default() },
            Leave::Requeue(requeue) => Trace {
                history: Some(requeue.history.as_str()),
                error: requeue.error.as_deref().map(|error| clean(error).into_owned()),
                ..Trace::default()
            },
        }
    }
}

type LeaseQuery<'q> = sqlx::query::QueryAs<'q, sqlx::Postgres, (Uuid, i32), sqlx::postgres::PgArguments>;

/// The six arrays that both settle statements begin with: whose lease, and on
/// what condition.
fn bind_leases<'q, 'i>(
    query: LeaseQuery<'q>,
    items: impl Iterator<Item = &'i Item<'i>> + Clone,
) -> LeaseQuery<'q> {
    let settlements = items.clone().map(|item| item.settlement);
    query
        .bind(settlements.clone().map(|s| s.lease.id.0).collect::<Vec<_>>())
        .bind(settlements.clone().map(|s| s.lease.lease_no).collect::<Vec<_>>())
        .bind(settlements.clone().map(|s| s.lease.worker.0).collect::<Vec<_>>())
        .bind(settlements.clone().map(|s| s.seen.map(|seen| seen.cancel_requested)).collect::<Vec<_>>())
        .bind(settlements.map(|s| s.seen.map(|seen| seen.superseded)).collect::<Vec<_>>())
        .bind(items.map(|item| item.recovers_dead).collect::<Vec<_>>())
}

// ---- workers ------------------------------------------------------------

const REGISTER: &str = "
    insert into longshore.workers
           (id, name, queues, kinds, concurrency, stale_after_ms, started_at, heartbeat_at)
    values ($1, $2, $3, $4, $5, $6, longshore.clock(), longshore.clock())
        on conflict (id) do nothing";

const BEAT: &str = "
    with alive as (
      update longshore.workers
         set heartbeat_at = longshore.clock()
       where id = $1
         and dead_at is null
      returning id)
    select exists (select 1 from alive), h.nth, r.id is null
      from (select 1) as always
      left join (unnest($2::uuid[], $3::int4[]) with ordinality as h(id, lease_no, nth)
                 left join longshore.running r
                   on r.id = h.id
                  and r.lease_no = h.lease_no
                  and r.worker = $1)
        on r.id is null or r.cancel_requested";

const RETIRE: &str = "
    delete from longshore.workers w
     where w.id = $1
       and not exists (
             select 1
               from longshore.running r
              where r.worker = w.id)";

const DECLARE_DEAD: &str = "
    update longshore.workers
       set dead_at = longshore.clock()
     where id = $1
       and dead_at is null";

const WORKERS: &str = "
    select w.id, w.name, w.queues, w.kinds, w.concurrency, w.stale_after_ms, w.started_at, w.heartbeat_at, w.dead_at,
           w.heartbeat_at < longshore.clock()
             - coalesce($1::int8, w.stale_after_ms) * interval '1 millisecond',
           (select count(*) from longshore.running r where r.worker = w.id)
      from longshore.workers w
     order by w.id desc";

impl PostgresStore {
    pub(super) async fn register_on(&self, connection: &mut PgConnection, worker: &NewWorker) -> Done<()> {
        sqlx::query(self.sql(REGISTER))
            .bind(worker.id.0)
            .bind(&worker.name)
            .bind(&worker.queues)
            .bind(&worker.kinds)
            .bind(worker.concurrency as i32)
            .bind(millis(worker.stale_after))
            .execute(connection)
            .await?;
        Ok(())
    }

    pub(super) async fn beat_on(
        &self,
        connection: &mut PgConnection,
        worker: WorkerId,
        held: &[Lease],
    ) -> Done<Beat> {
        let rows = sqlx::query(self.sql(BEAT))
            .bind(worker.0)
            .bind(held.iter().map(|lease| lease.id.0).collect::<Vec<_>>())
            .bind(held.iter().map(|lease| lease.lease_no).collect::<Vec<_>>())
            .fetch_all(connection)
            .await?;
        let (mut lost, mut cancel) = (Vec::new(), Vec::new());
        for row in &rows {
            if !row.try_get::<bool, _>(0)? {
                return Ok(Beat::Dead);
            }
            if let Some(nth) = row.try_get::<Option<i64>, _>(1)? {
                let list = if row.try_get(2)? { &mut lost } else { &mut cancel };
                list.push(held[nth as usize - 1]);
            }
        }
        Ok(Beat::Alive { lost, cancel })
    }

    pub(super) async fn retire_on(&self, connection: &mut PgConnection, worker: WorkerId) -> Done<()> {
        let gone = sqlx::query(self.sql(RETIRE)).bind(worker.0).execute(&mut *connection).await?;
        if gone.rows_affected() == 0 {
            sqlx::query(self.sql(DECLARE_DEAD)).bind(worker.0).execute(connection).await?;
        }
        Ok(())
    }

    pub(super) async fn workers_on(
        &self,
        connection: &mut PgConnection,
        threshold: Option<Duration>,
    ) -> Done<Vec<WorkerRecord>> {
        let rows = sqlx::query(self.sql(WORKERS)).bind(threshold.map(millis)).fetch_all(connection).await?;
        let record = |row: &PgRow| -> Result<WorkerRecord, Fault> {
            Ok(WorkerRecord {
                id: WorkerId(row.try_get(0)?),
                name: row.try_get(1)?,
                queues: row.try_get(2)?,
                kinds: row.try_get(3)?,
                concurrency: row.try_get::<i32, _>(4)? as u32,
                stale_after: Duration::from_millis(row.try_get::<i64, _>(5)? as u64),
                started_at: row.try_get(6)?,
                heartbeat_at: row.try_get(7)?,
                dead_at: row.try_get(8)?,
                stale: row.try_get(9)?,
                running: row.try_get::<i64, _>(10)? as u64,
            })
        };
        rows.iter().map(record).collect()
    }
}
