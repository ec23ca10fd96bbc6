//! A job's way through the tables: enqueue, claim, what happens while it runs,
//! settle, and the heartbeat that keeps its lease.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use uuid::Uuid;

use super::{Done, Fault, PostgresStore};
use crate::enqueue::{Enqueued, EnqueuedAs, Options, ValidJob};
use crate::error::{Error, Result};
use crate::job::{AttemptEnd, JobId, Outcome, WorkerId};
use crate::lifecycle::{Finish, Flags, Leave, Requeue, When};
use crate::store::cursor::{ClaimCursor, Place, Position, Start, Taken};
use crate::store::{
    Beat, ClaimRequest, Claimed, Claims, Fenced, Interruptor, Lease, NewWorker, Settled, Settlement,
    Suspects, WorkerRecord, clean,
};

/// Rows of one insert: enough to forget the round trip, few enough that the
/// statement stays small.
const INSERT_STEP: usize = 5000;
/// How long an enqueue waits for another transaction's key in a shared batch.
const KEY_PATIENCE: &str = "2s";

// ---- enqueue ------------------------------------------------------------

const INSERT: &str = "
    with input as (
      select *
        from unnest($1::uuid[], $2::text[], $3::text[], $4::int2[], $5::int2[], $6::text[], $7::timestamptz[],
                    $8::int8[], $9::int8[], $10::text[], $11::text[])
          as input(id, kind, queue, priority, max_attempts, payload, run_at, delay_us, timeout_ms, flags, options)),
    timed as (
      select id, kind, queue, priority, max_attempts, payload, timeout_ms, options,
             coalesce(run_at, longshore.clock() + delay_us * interval '1 microsecond') as run_at,
             case when flags is not null then array(select json_array_elements_text(flags::json)) end as flags
        from input),
    stored as (
      insert into longshore.jobs
             (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload, flags, options)
      select id, longshore.clock(), run_at, timeout_ms, priority, max_attempts, kind, queue,
             payload::json, flags, options::json
        from timed)
    insert into longshore.ready
           (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue, flags)
    select id, run_at, longshore.clock(), timeout_ms, 0, priority, 0, max_attempts, 0, false, kind, queue, flags
      from timed";

/// As [`INSERT`], for jobs that may be there already: by id, because an answer
/// was lost, or by idempotency key.
const INSERT_NEW: &str = "
    with input as (
      select *
        from unnest($1::uuid[], $2::text[], $3::text[], $4::int2[], $5::int2[], $6::text[], $7::timestamptz[],
                    $8::int8[], $9::int8[], $10::text[], $11::text[], $12::text[])
          as input(id, kind, queue, priority, max_attempts, payload, run_at, delay_us, timeout_ms, flags, options,
                   idempotency_key)),
    stored as (
      insert into longshore.jobs
             (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload, flags, options,
              idempotency_key)
      select id, longshore.clock(),
             coalesce(run_at, longshore.clock() + delay_us * interval '1 microsecond'),
             timeout_ms, priority, max_attempts, kind, queue, payload::json,
             case when flags is not null then array(select json_array_elements_text(flags::json)) end,
             options::json, idempotency_key
        from input
          on conflict do nothing
      returning id, run_at, timeout_ms, priority, max_attempts, kind, queue, flags),
    waiting as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select id, run_at, longshore.clock(), timeout_ms, 0, priority, 0, max_attempts, 0, false, kind, queue, flags
        from stored)
    select id from stored";

const BY_IDEMPOTENCY_KEY: &str = "
    select idempotency_key, id
      from longshore.jobs
     where idempotency_key = any($1::text[])";

/// Unique keys have rules of their own, which stand in the SQL function.
const ENQUEUE_UNIQUE: &str = "
    select e.job, e.how
      from longshore.enqueue(
             kind => $1, payload => $2::text::json, queue => $3, priority => $4, max_attempts => $5,
             run_at => $6, delay => $7 * interval '1 microsecond',
             idempotency_key => $8, unique_key => $9, unique_mode => $10,
             timeout => $11 * interval '1 millisecond',
             flags => $12, options => $13::text::json, id => $14, wake => false) e";

impl PostgresStore {
    /// Stores jobs in one commit.
    pub(super) async fn enqueue_on(
        &self,
        connection: &mut PgConnection,
        jobs: &[ValidJob],
    ) -> Done<Vec<Enqueued>> {
        if jobs.iter().all(|job| !job.is_keyed()) {
            match self.insert_plain(connection, jobs).await {
                // An id is there already: an earlier try was stored after all.
                Err(fault) if fault.code().as_deref() == Some("23505") => {}
                done => return done.map(|()| jobs.iter().map(created).collect()),
            }
        }
        match self.insert_keyed(connection, jobs, Some(KEY_PATIENCE)).await {
            // Somebody's open transaction holds a key of this batch: let the
            // others go ahead. Each alone waits as long as it takes.
            Err(fault) if fault.code().as_deref() == Some("55P03") && jobs.len() > 1 => {
                let mut answers = Vec::with_capacity(jobs.len());
                for job in jobs {
                    answers.extend(self.insert_keyed(connection, std::slice::from_ref(job), None).await?);
                }
                Ok(answers)
            }
            done => done,
        }
    }

    /// Stores jobs inside the caller's own transaction: no commit, no retry,
    /// and no statement that a key held elsewhere could fail.
    pub async fn enqueue_in(
        &self,
        connection: &mut PgConnection,
        jobs: &[ValidJob],
    ) -> Result<Vec<Enqueued>> {
        let answers = self.insert_any(connection, jobs).await?;
        let queues: Vec<String> = due_queues(jobs);
        self.notify_on(connection, &queues).await?;
        Ok(answers)
    }

    async fn insert_plain(&self, connection: &mut PgConnection, jobs: &[ValidJob]) -> Done<()> {
        if jobs.len() <= INSERT_STEP {
            return self.insert_step(connection, jobs).await;
        }
        let mut tx = connection.begin().await?;
        for step in jobs.chunks(INSERT_STEP) {
            self.insert_step(&mut tx, step).await?;
        }
        Ok(tx.commit().await?)
    }

    async fn insert_step(&self, connection: &mut PgConnection, jobs: &[ValidJob]) -> Done<()> {
        let columns = Columns::of(jobs.iter());
        columns.bind(sqlx::query(self.sql(INSERT))).execute(connection).await?;
        Ok(())
    }

    async fn insert_keyed(
        &self,
        connection: &mut PgConnection,
        jobs: &[ValidJob],
        patience: Option<&str>,
    ) -> Done<Vec<Enqueued>> {
        let mut tx = connection.begin().await?;
        if let Some(patience) = patience {
            sqlx::query("select set_config('lock_timeout', $1, true)")
                .bind(patience)
                .execute(&mut *tx)
                .await?;
        }
        let answers = self.insert_any(&mut tx, jobs).await?;
        tx.commit().await?;
        Ok(answers)
    }

    /// Any mixture of jobs, keys in sorted order so that two batches never
    /// wait for each other.
    pub(super) async fn insert_any(
        &self,
        connection: &mut PgConnection,
        jobs: &[ValidJob],
    ) -> Done<Vec<Enqueued>> {
        let mut answers: Vec<Option<Enqueued>> = vec![None; jobs.len()];
        let (mut simple, mut unique): (Vec<usize>, Vec<usize>) =
            (0..jobs.len()).partition(|i| jobs[*i].unique.is_none());
        simple.sort_by_key(|i| jobs[*i].idempotency_key.as_deref());
        unique.sort_by_key(|i| {
            (jobs[*i].idempotency_key.as_deref(), jobs[*i].unique.as_ref().map(|(key, _)| key))
        });
        for step in simple.chunks(INSERT_STEP) {
            self.insert_new(connection, jobs, step, &mut answers).await?;
        }
        for i in unique {
            answers[i] = Some(self.insert_unique(connection, &jobs[i]).await?);
        }
        Ok(answers.into_iter().flatten().collect())
    }

    async fn insert_new(
        &self,
        connection: &mut PgConnection,
        jobs: &[ValidJob],
        step: &[usize],
        answers: &mut [Option<Enqueued>],
    ) -> Done<()> {
        let columns = Columns::of(step.iter().map(|i| &jobs[*i]));
        let keys: Vec<Option<&str>> = step.iter().map(|i| jobs[*i].idempotency_key.as_deref()).collect();
        let query = columns.bind(sqlx::query(self.sql(INSERT_NEW))).bind(&keys);
        let stored = query.fetch_all(&mut *connection).await?.len();
        if stored == step.len() {
            for i in step {
                answers[*i] = Some(created(&jobs[*i]));
            }
            return Ok(());
        }
        let keys: Vec<&str> = keys.into_iter().flatten().collect();
        let rows = sqlx::query(self.sql(BY_IDEMPOTENCY_KEY)).bind(&keys).fetch_all(connection).await?;
        let mut holders = BTreeMap::<String, Uuid>::new();
        for row in rows {
            holders.insert(row.try_get(0)?, row.try_get(1)?);
        }
        for i in step {
            let job = &jobs[*i];
            let holder = match &job.idempotency_key {
                None => job.id,
                // Gone again at once: retention took the holder in between.
                Some(key) => JobId(*holders.get(key).ok_or_else(|| {
                    Error::unavailable("the holder of an idempotency key was just removed; try again")
                })?),
            };
            let how = if holder == job.id { EnqueuedAs::Created } else { EnqueuedAs::Existing };
            answers[*i] = Some(Enqueued { id: holder, how });
        }
        Ok(())
    }

    async fn insert_unique(&self, connection: &mut PgConnection, job: &ValidJob) -> Done<Enqueued> {
        let (run_at, delay_us) = split(job.when);
        let (key, mode) = job.unique.as_ref().map(|(key, mode)| (key, mode.as_str())).unzip();
        let row = sqlx::query(self.sql(ENQUEUE_UNIQUE))
            .bind(&job.kind)
            .bind(&job.payload)
            .bind(&job.queue)
            .bind(i32::from(job.priority))
            .bind(i32::from(job.max_attempts))
            .bind(run_at)
            .bind(delay_us)
            .bind(&job.idempotency_key)
            .bind(key)
            .bind(mode)
            .bind(job.timeout.map(millis))
            .bind((!job.flags.is_empty()).then_some(&job.flags))
            .bind(&job.options)
            .bind(job.id.0)
            .fetch_one(connection)
            .await?;
        let how = match row.try_get::<&str, _>(1)? {
            "created" => EnqueuedAs::Created,
            "replaced" => EnqueuedAs::Replaced,
            _ => EnqueuedAs::Existing,
        };
        Ok(Enqueued { id: JobId(row.try_get(0)?), how })
    }
}

fn created(job: &ValidJob) -> Enqueued {
    Enqueued { id: job.id, how: EnqueuedAs::Created }
}

fn due_queues(jobs: &[ValidJob]) -> Vec<String> {
    let due = jobs.iter().filter(|job| job.when == When::NOW).map(|job| job.queue.clone());
    due.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Jobs turned on their side: one array a column.
#[derive(Default)]
struct Columns<'a> {
    ids: Vec<Uuid>,
    kinds: Vec<&'a str>,
    queues: Vec<&'a str>,
    priorities: Vec<i16>,
    max_attempts: Vec<i16>,
    payloads: Vec<&'a str>,
    run_ats: Vec<Option<DateTime<Utc>>>,
    delays: Vec<Option<i64>>,
    timeouts: Vec<Option<i64>>,
    flags: Vec<Option<String>>,
    options: Vec<Option<&'a str>>,
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

impl<'a> Columns<'a> {
    fn of(jobs: impl Iterator<Item = &'a ValidJob>) -> Self {
        let mut columns = Columns::default();
        for job in jobs {
            let (run_at, delay) = split(job.when);
            columns.ids.push(job.id.0);
            columns.kinds.push(&job.kind);
            columns.queues.push(&job.queue);
            columns.priorities.push(job.priority);
            columns.max_attempts.push(job.max_attempts as i16);
            columns.payloads.push(&job.payload);
            columns.run_ats.push(run_at);
            columns.delays.push(delay);
            columns.timeouts.push(job.timeout.map(millis));
            columns.flags.push((!job.flags.is_empty()).then(|| serde_json::json!(job.flags).to_string()));
            columns.options.push(job.options.as_deref());
        }
        columns
    }

    fn bind<'q>(&self, query: Query<'q>) -> Query<'q> {
        query
            .bind(&self.ids)
            .bind(&self.kinds)
            .bind(&self.queues)
            .bind(&self.priorities)
            .bind(&self.max_attempts)
            .bind(&self.payloads)
            .bind(&self.run_ats)
            .bind(&self.delays)
            .bind(&self.timeouts)
            .bind(&self.flags)
            .bind(&self.options)
    }
}

/// A point in time as the statements take it: an instant, or microseconds from
/// the engine's now.
pub(super) fn split(when: When) -> (Option<DateTime<Utc>>, Option<i64>) {
    match when {
        When::At(at) => (Some(at), None),
        When::After(delay) => (None, Some(i64::try_from(delay.as_micros()).unwrap_or(i64::MAX))),
    }
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).max(1)
}

// ---- claim --------------------------------------------------------------

/// Which (queue, priority) have waiting jobs: one index probe each, however
/// many jobs wait there and whenever they are due.
const DISCOVER: &str = "
    with recursive asked as (
      select q.queue, s.max_running is not null as limited
        from unnest($1::text[]) as q(queue)
        left join longshore.queues s on s.name = q.queue
       where s.paused is not true),
    places as (
      select a.queue, a.limited, (
               select r.priority
                 from longshore.ready r
                where r.queue = a.queue
                  and r.interruptions = 0
                order by r.priority desc
                limit 1) as priority
        from asked a
      union all
      select p.queue, p.limited, (
               select r.priority
                 from longshore.ready r
                where r.queue = p.queue
                  and r.interruptions = 0
                  and r.priority < p.priority
                order by r.priority desc
                limit 1)
        from places p
       where p.priority is not null)
    select longshore.clock(),
           exists (
             select 1
               from longshore.ready r
              where r.queue = any($1)
                and r.interruptions > 0),
           exists (
             select 1
               from asked a
              where a.limited),
           p.queue, p.limited, p.priority
      from (select 1) as always
      left join places p on p.priority is not null";

const LOCK_LIMITED: &str = "
    select name, max_running
      from longshore.queues
     where name = any($1)
       and max_running is not null
     order by name
       for update skip locked";

const COUNT_LIMITED: &str = "
    select queue, count(*)
      from longshore.running
     where queue = any($1)
       and limited
     group by queue";

/// Looks first and locks after: `look` merges the places in claim order without
/// locks (lazily, from the highest priority down, so that lower ones are not
/// read when higher ones suffice), which says how many to take where; `picked`
/// takes that many from each place, passing over what others have locked.
/// Rows of `ready` are never updated, so once locked, where they lie (`ctid`) is
/// as good as their id and spares the index.
const TAKE: &str = "
    with asked as (
      select q.queue, q.cap
        from unnest($1::text[], $2::int4[]) as q(queue, cap)
        left join longshore.queues s on s.name = q.queue
       where s.paused is not true
         and (s.max_running is null or q.cap is not null)
         and exists (
               select 1
                 from longshore.workers w
                where w.id = $3
                  and w.dead_at is null)),
    place as materialized (
      select p.queue, p.priority, a.cap,
             coalesce(p.run_at, '-infinity') as after_run_at,
             coalesce(p.id, '00000000-0000-0000-0000-000000000000') as after_id
        from unnest($4::text[], $5::int2[], $6::timestamptz[], $7::uuid[]) as p(queue, priority, run_at, id)
        join asked a on a.queue = p.queue
       order by p.priority desc),
    look as materialized (
      select p.queue, p.priority, c.run_at, c.id, p.cap, false as suspect
        from (select * from place order by priority desc) p
       cross join lateral (
               select r.run_at, r.id
                 from longshore.ready r
                where r.queue = p.queue
                  and r.priority = p.priority
                  and r.interruptions = 0
                  and (r.run_at, r.id) > (p.after_run_at, p.after_id)
                  and r.run_at <= longshore.clock()
                  and ($8::text[] is null or r.kind = any($8))
                  and ($9::text[] is null or r.flags && $9)
                  and ($10::text[] is null or r.flags is null or not r.flags && $10)
                order by r.run_at, r.id
                limit least($11::int4, p.cap)) c
       order by p.priority desc
       fetch first $11 rows with ties),
    suspect as (
      select a.queue, c.priority, c.run_at, c.id, a.cap, true as suspect
        from asked a
       cross join lateral (
               select r.priority, r.run_at, r.id
                 from longshore.ready r
                where r.queue = a.queue
                  and r.interruptions > 0
                  and r.run_at <= longshore.clock()
                  and ($8::text[] is null or r.kind = any($8))
                  and ($9::text[] is null or r.flags && $9)
                  and ($10::text[] is null or r.flags is null or not r.flags && $10)
                order by r.priority desc, r.run_at, r.id
                limit least($12::int4, a.cap)) c
       order by c.priority desc, c.run_at, c.id
       limit $12),
    chosen as materialized (
      select queue, priority, run_at, id, suspect
        from (select *,
                     row_number() over (partition by queue order by priority desc, run_at, id) as nth
                from (select * from look
                      union all
                      select * from suspect) as seen) as ranked
       where cap is null or nth <= cap
       order by priority desc, run_at, id
       limit $11),
    picked as (
      select c.place
        from (select queue, priority, count(*) as n
                from chosen
               where not suspect
               group by queue, priority) as quota
        join place p using (queue, priority)
       cross join lateral (
               select r.ctid as place
                 from longshore.ready r
                where r.queue = p.queue
                  and r.priority = p.priority
                  and r.interruptions = 0
                  and (r.run_at, r.id) > (p.after_run_at, p.after_id)
                  and r.run_at <= longshore.clock()
                  and ($8::text[] is null or r.kind = any($8))
                  and ($9::text[] is null or r.flags && $9)
                  and ($10::text[] is null or r.flags is null or not r.flags && $10)
                order by r.run_at, r.id
                limit quota.n
                  for update skip locked) c),
    picked_suspect as (
      select r.ctid as place
        from longshore.ready r
       where r.id = (select id from chosen where suspect)
         for update skip locked),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select place from picked) || array(select place from picked_suspect))
      returning *),
    leased as (
      insert into longshore.running
             (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, limited, kind, queue, flags)
      select t.id, $3, longshore.clock(), t.timeout_ms, t.lease_no + 1, t.priority, t.attempt + 1, t.max_attempts,
             t.interruptions, t.keyed, exists (select 1 from asked a where a.queue = t.queue and a.cap is not null),
             t.kind, t.queue, t.flags
        from taken t)
    select (select count(*) from chosen), longshore.clock(),
           t.id, t.kind, t.queue, t.priority, t.attempt + 1, t.max_attempts, t.interruptions, t.lease_no + 1,
           t.timeout_ms, t.flags, t.run_at, j.payload::text, j.options::text
      from (select 1) as always
      left join (taken t join longshore.jobs j on j.id = t.id) on true
     order by t.priority desc, t.run_at, t.id";

impl PostgresStore {
    pub(super) async fn claim_on(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
    ) -> Done<Claims> {
        let wanted = request.limit as usize;
        let mut jobs = Vec::new();
        if wanted == 0 || request.queues.is_empty() {
            return Ok(Claims { jobs, more: false });
        }
        if cursor.start(request, Instant::now()) == Start::Resume {
            let limited = cursor.places().iter().any(|place| place.limited);
            let more = self.take_any(connection, request, cursor, &mut jobs, limited).await?;
            if more || jobs.len() >= wanted || !cursor.may_scan_head(Instant::now()) {
                return Ok(Claims { jobs, more });
            }
        }
        let began = Instant::now();
        let found = self.discover(connection, request, cursor).await?;
        let mut more = false;
        if !cursor.places().is_empty() || found.suspects {
            more = self.take_any(connection, request, cursor, &mut jobs, found.limited).await?;
        } else {
            cursor.advance(&[], false, Some(found.now));
        }
        cursor.head_scanned(began, Instant::now());
        Ok(Claims { jobs, more })
    }

    async fn discover(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
    ) -> Done<Discovered> {
        let rows = sqlx::query(self.sql(DISCOVER)).bind(&request.queues).fetch_all(connection).await?;
        let first = rows.first().ok_or_else(|| Error::internal("the discovery of queues gave no answer"))?;
        let found =
            Discovered { now: first.try_get(0)?, suspects: first.try_get(1)?, limited: first.try_get(2)? };
        let mut places = Vec::with_capacity(rows.len());
        for row in &rows {
            if let Some(queue) = row.try_get::<Option<String>, _>(3)? {
                places.push(Place {
                    queue,
                    limited: row.try_get(4)?,
                    priority: row.try_get(5)?,
                    after: None,
                });
            }
        }
        cursor.set_places(places);
        Ok(found)
    }

    async fn take_any(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
        jobs: &mut Vec<Claimed>,
        limited: bool,
    ) -> Done<bool> {
        match limited {
            false => self.take(connection, request, cursor, jobs, Vec::new()).await,
            true => self.take_limited(connection, request, cursor, jobs).await,
        }
    }

    /// Limited queues are never overdrawn: whoever holds the queue's row counts
    /// what runs, in a statement of its own that sees the last holder's
    /// commit, and takes the rest. Others pass the queue over meanwhile.
    async fn take_limited(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
        jobs: &mut Vec<Claimed>,
    ) -> Done<bool> {
        let mut tx = connection.begin().await?;
        let locked = sqlx::query(self.sql(LOCK_LIMITED)).bind(&request.queues).fetch_all(&mut *tx).await?;
        let mut free = BTreeMap::<String, i64>::new();
        for row in &locked {
            free.insert(row.try_get(0)?, row.try_get::<i32, _>(1)?.into());
        }
        let names: Vec<&str> = free.keys().map(String::as_str).collect();
        let running = sqlx::query(self.sql(COUNT_LIMITED)).bind(&names).fetch_all(&mut *tx).await?;
        for row in &running {
            if let Some(left) = free.get_mut(row.try_get::<&str, _>(0)?) {
                *left -= row.try_get::<i64, _>(1)?;
            }
        }
        let caps =
            free.into_iter().map(|(queue, left)| (queue, left.clamp(0, i32::MAX.into()) as i32)).collect();
        let more = self.take(&mut tx, request, cursor, jobs, caps).await?;
        tx.commit().await?;
        Ok(more)
    }

    /// Takes what the limit leaves room for from the cursor's places; says
    /// whether there may be more.
    async fn take(
        &self,
        connection: &mut PgConnection,
        request: &ClaimRequest,
        cursor: &mut ClaimCursor,
        jobs: &mut Vec<Claimed>,
        caps: Vec<(String, i32)>,
    ) -> Done<bool> {
        let wanted = request.limit as usize - jobs.len();
        // One suspect at a time, counting one that this call took already.
        let suspect = request.suspects == Suspects::One && jobs.iter().all(|job| job.interruptions == 0);
        let query = bind_take(sqlx::query(self.sql(TAKE)), request, cursor, &caps, wanted, suspect);
        let rows = query.fetch_all(connection).await?;
        let looked: i64 = rows.first().map_or(Ok(0), |row| row.try_get(0))?;
        let scanned_at: Option<DateTime<Utc>> = rows.first().map(|row| row.try_get(1)).transpose()?;
        let before = jobs.len();
        for row in &rows {
            if let Some(id) = row.try_get::<Option<Uuid>, _>(2)? {
                jobs.push(claimed(row, JobId(id), request.worker)?);
            }
        }
        // Full is what was there to take, not what was left of it after
        // others had locked theirs.
        let full = looked >= wanted as i64;
        let taken: Vec<Taken> =
            jobs[before..].iter().filter(|job| job.interruptions == 0).map(taken).collect();
        cursor.advance(&taken, full, scanned_at);
        Ok(full)
    }
}

impl PostgresStore {
    /// How Postgres would carry out this claim now, starting at the head: the
    /// plan with its costs and buffers. Runs the claim and takes it back.
    pub async fn explain_claim(&self, request: &ClaimRequest) -> Result<String> {
        self.run(request.clone(), |store, connection, request| {
            Box::pin(store.explain_claim_on(connection, request))
        })
        .await
    }

    async fn explain_claim_on(&self, connection: &mut PgConnection, request: &ClaimRequest) -> Done<String> {
        let mut tx = connection.begin().await?;
        let mut cursor = ClaimCursor::default();
        self.discover(&mut tx, request, &mut cursor).await?;
        let text = format!("explain (analyze, buffers, settings) {}", self.0.schema.fill(TAKE));
        let query = sqlx::query(AssertSqlSafe(text));
        let query = bind_take(query, request, &cursor, &[], request.limit as usize, true);
        let rows = query.fetch_all(&mut *tx).await?;
        tx.rollback().await?;
        let lines: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<sqlx::Result<_>>()?;
        Ok(lines.join("\n"))
    }
}

/// The twelve parameters of [`TAKE`].
fn bind_take<'q>(
    query: Query<'q>,
    request: &ClaimRequest,
    cursor: &ClaimCursor,
    caps: &[(String, i32)],
    wanted: usize,
    suspect: bool,
) -> Query<'q> {
    let cap = |queue: &String| caps.iter().find(|(name, _)| name == queue).map(|(_, left)| *left);
    let places = cursor.places().iter();
    query
        .bind(request.queues.clone())
        .bind(request.queues.iter().map(cap).collect::<Vec<_>>())
        .bind(request.worker.0)
        .bind(places.clone().map(|place| place.queue.clone()).collect::<Vec<_>>())
        .bind(places.clone().map(|place| place.priority).collect::<Vec<_>>())
        .bind(places.clone().map(|place| place.after.map(|after| after.run_at)).collect::<Vec<_>>())
        .bind(places.map(|place| place.after.map(|after| after.id)).collect::<Vec<_>>())
        .bind(request.kinds.clone())
        .bind((!request.accept_flags.is_empty()).then(|| request.accept_flags.clone()))
        .bind((!request.forbid_flags.is_empty()).then(|| request.forbid_flags.clone()))
        .bind(wanted as i32)
        .bind(i32::from(suspect))
}

struct Discovered {
    now: DateTime<Utc>,
    suspects: bool,
    limited: bool,
}

fn taken(job: &Claimed) -> Taken {
    Taken {
        queue: job.queue.clone(),
        priority: job.priority,
        at: Position { run_at: job.run_at, id: job.lease.id.0 },
    }
}

fn claimed(row: &PgRow, id: JobId, worker: WorkerId) -> Done<Claimed> {
    Ok(Claimed {
        kind: row.try_get(3)?,
        queue: row.try_get(4)?,
        priority: row.try_get(5)?,
        attempt: row.try_get::<i32, _>(6)? as u16,
        max_attempts: row.try_get::<i16, _>(7)? as u16,
        interruptions: row.try_get::<i16, _>(8)? as u16,
        lease: Lease { id, lease_no: row.try_get(9)?, worker },
        timeout: row.try_get::<Option<i64>, _>(10)?.map(|ms| Duration::from_millis(ms as u64)),
        flags: row.try_get::<Option<Vec<String>>, _>(11)?.unwrap_or_default(),
        run_at: row.try_get(12)?,
        claimed_at: row.try_get(1)?,
        payload: row.try_get(13)?,
        options: Options::from_stored(row.try_get(14)?)?,
    })
}

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
/// was stored before and the answer lost, or it is gone.
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
                and a.what = i.history)
      from unnest($1::uuid[], $2::int4[], $3::uuid[], $4::text[], $5::text[]) with ordinality
        as i(id, lease_no, worker, outcome, history, nth)
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
        let (outcomes, histories): (Vec<_>, Vec<_>) = missed.iter().map(|item| trace_of(item)).unzip();
        let rows = sqlx::query(self.sql(DIAGNOSE))
            .bind(leases().map(|lease| lease.id.0).collect::<Vec<_>>())
            .bind(leases().map(|lease| lease.lease_no).collect::<Vec<_>>())
            .bind(leases().map(|lease| lease.worker.0).collect::<Vec<_>>())
            .bind(outcomes)
            .bind(histories)
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
fn trace_of(item: &Item<'_>) -> (Option<&'static str>, Option<&'static str>) {
    match &item.settlement.leave {
        Leave::Finish(finish) => (Some(Outcome::as_str(finish.outcome)), None),
        Leave::Requeue(requeue) => (None, Some(requeue.history.as_str())),
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
