//! Enqueue: jobs into `jobs` and `ready`, in one commit or in the caller's own
//! transaction.

use chrono::{DateTime, Utc};
use sqlx::{Connection, PgConnection, Row};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

use super::{Done, PostgresStore, Query};
use crate::enqueue::{Enqueued, EnqueuedAs, ValidJob};
use crate::error::{Error, Result};
use crate::job::JobId;
use crate::lifecycle::When;
use crate::store::{KeyWait, millis};

/// Rows of one insert: enough to forget the round trip, few enough that the
/// statement stays small.
const INSERT_STEP: usize = 5000;

const INSERT: &str = "
    with input as (
      select *
        from unnest((select $1::uuid[]), (select $2::text[]), (select $3::text[]), (select $4::int2[]), (select $5::int2[]), (select $6::text[]), (select $7::timestamptz[]),
                    (select $8::int8[]), (select $9::int8[]), (select $10::text[]), (select $11::text[]))
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
        from unnest((select $1::uuid[]), (select $2::text[]), (select $3::text[]), (select $4::int2[]), (select $5::int2[]), (select $6::text[]), (select $7::timestamptz[]),
                    (select $8::int8[]), (select $9::int8[]), (select $10::text[]), (select $11::text[]), (select $12::text[]))
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

const BY_KEY_OR_ID: &str = "
    select idempotency_key, id
      from longshore.jobs
     where idempotency_key = any($1::text[])
        or id = any($2::uuid[])";

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
        wait: KeyWait,
    ) -> Done<Vec<Enqueued>> {
        if jobs.iter().all(|job| !job.is_keyed()) {
            match self.insert_plain(connection, jobs).await {
                // An id is there already: an earlier try was stored after all.
                Err(fault) if fault.code().as_deref() == Some("23505") => {}
                done => return done.map(|()| jobs.iter().map(created).collect()),
            }
        }
        self.insert_keyed(connection, jobs, wait).await
    }

    /// Stores jobs inside the caller's own transaction: no commit, no retry,
    /// and no statement that a key held elsewhere could fail.
    pub async fn enqueue_in(
        &self,
        connection: &mut PgConnection,
        jobs: &[ValidJob],
    ) -> Result<Vec<Enqueued>> {
        let answers = self.insert_any(connection, jobs).await?;
        self.notify_due(connection, jobs).await?;
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
        wait: KeyWait,
    ) -> Done<Vec<Enqueued>> {
        // Somebody's open transaction may hold a key of this batch.
        let lock_timeout = match wait {
            KeyWait::Long if jobs.len() == 1 => "10s",
            KeyWait::Long => "3s",
            KeyWait::Short => "200ms",
        };
        let mut tx = connection.begin().await?;
        sqlx::query("select set_config('lock_timeout', $1, true)")
            .bind(lock_timeout)
            .execute(&mut *tx)
            .await?;
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
            (jobs[*i].unique.as_ref().map(|(key, _)| key), jobs[*i].idempotency_key.as_deref())
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
        let rows =
            sqlx::query(self.sql(BY_KEY_OR_ID)).bind(&keys).bind(&columns.ids).fetch_all(connection).await?;
        let (mut holders, mut ids) = (BTreeMap::<String, Uuid>::new(), BTreeSet::<Uuid>::new());
        for row in rows {
            ids.insert(row.try_get(1)?);
            if let Some(key) = row.try_get::<Option<String>, _>(0)? {
                holders.insert(key, row.try_get(1)?);
            }
        }
        for i in step {
            let job = &jobs[*i];
            let holder = job.idempotency_key.as_ref().and_then(|key| holders.get(key)).map(|id| JobId(*id));
            answers[*i] = Some(match holder {
                _ if ids.contains(&job.id.0) => created(job),
                Some(id) => Enqueued { id, how: EnqueuedAs::Existing },
                None => {
                    return Err(Error::unavailable(
                        "the holder of an idempotency key was removed at this moment; try again",
                    )
                    .into());
                }
            });
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
