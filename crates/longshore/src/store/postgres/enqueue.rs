//! Enqueue: stores jobs in `jobs` and `ready`, in one commit or in the caller's own
//! transaction. [`keys`] decides what happens if a key is taken.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::PostgresStore;
use super::listen::notify_due;
use super::pool::Class;
use super::run::{LockWait, Mode, Work, enqueue_deadline, within};
use super::steps::{delete_progress, was_suspended};
use super::tables::insert_ready;
use super::turns::add_turns;
use super::tx::{Fault, Query, Sql, Tx};
use crate::error::{Error, Result};
use crate::job::{FlowId, JobId};
use crate::rules::enqueue::{Enqueued, EnqueuedAs, EnqueuedBatch, UniqueMode, ValidJob};
use crate::rules::keys::{self, Decision, Holders, Owner, RunAt};
use crate::rules::lifecycle::When;
use crate::rules::retry::millis;
use crate::store::{Enqueue, KeyWait, NewMember};

/// The number of rows per insert: large enough to make the round trip cheap, small
/// enough to keep the statement small.
pub(super) const INSERT_STEP: usize = 5000;
/// How often the owner of a unique key may change before an enqueue gives up.
const MAX_ROUNDS: usize = 10;

#[async_trait]
impl Enqueue for PostgresStore {
    async fn enqueue(&self, jobs: &[ValidJob], wait: KeyWait) -> Result<EnqueuedBatch> {
        let mode = match wait {
            _ if jobs.iter().all(|job| !job.is_keyed()) => Mode::enqueue(Class::Quick, jobs),
            KeyWait::Skip | KeyWait::Short => Mode::enqueue(Class::Slow, jobs),
            KeyWait::Long | KeyWait::UpTo(_) => Mode::enqueue(Class::Waiting, jobs),
        };
        let work: Work<_, _> =
            |tx, (jobs, wait): &(Vec<ValidJob>, LockWait)| Box::pin(enqueue(tx, jobs, wait.remaining()));
        self.run_here(mode, (jobs.to_vec(), LockWait::new(wait)), work).await
    }
}

/// `max_wait` limits how long the enqueue waits for a key that another client's open
/// transaction holds.
async fn enqueue(tx: &mut Tx<'_>, jobs: &[ValidJob], max_wait: Duration) -> Sql<EnqueuedBatch> {
    if jobs.iter().all(|job| !job.is_keyed()) {
        match insert_plain(tx, jobs).await {
            // An id already exists: an earlier try was stored, but its reply was lost.
            Err(fault) if fault.is_duplicate() => {}
            done => {
                let created_at = Some(done?);
                return Ok(EnqueuedBatch { results: jobs.iter().map(created).collect(), created_at });
            }
        }
    }
    let mut transaction = within(enqueue_deadline([]), tx.begin()).await?;
    let tx = &mut transaction.tx();
    within(enqueue_deadline([]), tx.limit_lock_waits(max_wait)).await?;
    let batch =
        insert_parts(tx, jobs, Deadlines::PerPart).await.map_err(|fault| match fault.is_lock_timeout() {
            true => Error::locked(held_key(jobs)).into(),
            false => fault,
        })?;
    within(enqueue_deadline([]), transaction.commit()).await?;
    Ok(batch)
}

/// Whether the parts of an enqueue have deadlines. A large batch over a slow network takes
/// long, but gets replies all the time; a dead connection does not.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Deadlines {
    None,
    PerPart,
}

/// The message of an enqueue that waited for a key in vain.
fn held_key(jobs: &[ValidJob]) -> String {
    let key = match jobs {
        [job] if job.unique.is_some() && job.idempotency_key.is_some() => "idempotency_key or unique_key",
        [job] if job.unique.is_some() => "unique_key",
        [job] if job.idempotency_key.is_some() => "idempotency_key",
        _ => "a key of the jobs",
    };
    format!(
        "{key}: another client's open transaction holds the key, and did not end in time; \
         nothing was stored; end that transaction, or try again later"
    )
}

/// Stores jobs in the caller's own transaction: no commit and no retry.
pub(super) async fn enqueue_in(tx: &mut Tx<'_>, jobs: &[ValidJob]) -> Sql<Vec<Enqueued>> {
    let batch = insert_any(tx, jobs).await?;
    notify_due(tx, jobs).await?;
    Ok(batch.results)
}

/// Stores jobs with and without keys. Keys are taken in sorted order, so that two
/// batches never wait for each other.
pub(super) async fn insert_any(tx: &mut Tx<'_>, jobs: &[ValidJob]) -> Sql<EnqueuedBatch> {
    insert_parts(tx, jobs, Deadlines::None).await
}

async fn insert_parts(tx: &mut Tx<'_>, jobs: &[ValidJob], deadlines: Deadlines) -> Sql<EnqueuedBatch> {
    let deadline = |part: &[usize]| match deadlines {
        Deadlines::None => Duration::MAX,
        Deadlines::PerPart => enqueue_deadline(part.iter().map(|i| &jobs[*i])),
    };
    let mut parts = Parts { results: vec![None; jobs.len()], now: None, repeated: false };
    let (mut simple, mut unique): (Vec<usize>, Vec<usize>) =
        (0..jobs.len()).partition(|i| jobs[*i].unique.is_none());
    simple.sort_by_key(|i| jobs[*i].idempotency_key.as_deref());
    unique
        .sort_by_key(|i| (jobs[*i].unique.as_ref().map(|(key, _)| key), jobs[*i].idempotency_key.as_deref()));
    for step in simple.chunks(INSERT_STEP) {
        within(deadline(step), insert_new(tx, jobs, step, &mut parts)).await?;
    }
    for i in unique {
        parts.results[i] = Some(within(deadline(&[i]), enqueue_unique(tx, &jobs[i], &mut parts)).await?);
    }
    debug_assert!(parts.results.iter().all(Option::is_some), "one result per job, in order");
    Ok(EnqueuedBatch {
        results: parts.results.into_iter().flatten().collect(),
        created_at: parts.now.filter(|_| !parts.repeated),
    })
}

/// What the parts of an enqueue have stored so far.
struct Parts {
    results: Vec<Option<Enqueued>>,
    /// The time of the transaction, which is that of all jobs it creates.
    now: Option<DateTime<Utc>>,
    /// Whether an earlier try, whose reply was lost, had stored one of the jobs.
    repeated: bool,
}

/// Stores new jobs. The literals add columns that few jobs have; `$none` are those that these jobs do not have.
macro_rules! insert_jobs {
    ($arrays:literal, $names:literal, $columns:literal, $due:literal, $none:literal, $more:expr) => {
        concat!(
            "
    with input as (
      select *
        from unnest((select $1::uuid[]), (select $2::text[]), (select $3::text[]), (select $4::int2[]), (select $5::int2[]), (select $6::text[]), (select $7::timestamptz[]),
                    (select $8::int8[]), (select $9::int8[]), (select $10::text[]), (select $11::text[])", $arrays, ")
          as input(id, kind, queue, priority, max_attempts, payload, run_at, delay_us, timeout_ms, flags, options", $names, ")),
    timed as (
      select id, kind, queue, priority, max_attempts, payload, timeout_ms, options,
             coalesce(run_at, longshore.clock() + delay_us * interval '1 microsecond') as run_at,
             case when flags is not null then array(select json_array_elements_text(flags::json)) end as flags", $names, $none, "
        from input),
    stored as (
      insert into longshore.jobs
             (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload, flags, options", $columns, ")
      select id, longshore.clock(), run_at, timeout_ms, priority, max_attempts, kind, queue,
             payload::json, flags, options::json", $columns, "
        from timed),
    enqueued as (",
            insert_ready!(
                job: "t",
                run_at: $due,
                lease_no: "0",
                attempts: "0",
                interruptions: "0",
                keyed: "false",
                held: "t.held",
                from: "timed t",
            ),
            ")",
            $more,
            "
    select longshore.clock() as now"
        )
    };
}

const INSERT: &str =
    insert_jobs!("", "", "", "t.run_at", ", null::text as grp, null::uuid as flow, null::bool as held", "");

/// As [`INSERT`], for jobs of which some have a group.
const INSERT_GROUPED: &str = insert_jobs!(
    ", (select $12::text[])",
    ", grp",
    ", grp",
    "t.run_at",
    ", null::uuid as flow, null::bool as held",
    concat!(",", add_turns!("timed"))
);

/// As [`INSERT`], for members of a flow. Those that wait for others are held.
const INSERT_MEMBERS: &str = insert_jobs!(
    ", (select $12::text[]), (select $13::uuid[]), (select $14::text[]), (select $15::bool[])",
    ", grp, flow, task, held",
    ", grp, flow, task",
    "case when t.held then '9999-12-31 23:59:59+00' else t.run_at end",
    "",
    concat!(",", add_turns!("timed"))
);

/// Stores jobs of a flow, or callbacks that are not members of one.
pub(super) async fn insert_members(tx: &mut Tx<'_>, flow: Option<FlowId>, members: &[NewMember]) -> Sql<()> {
    let columns = Columns::of(members.iter().map(|member| &member.job));
    columns
        .bind(sqlx::query(tx.sql(INSERT_MEMBERS)))
        .bind(&columns.groups)
        .bind(vec![flow.map(|flow| flow.0); members.len()])
        .bind(members.iter().map(|member| member.task.as_deref()).collect::<Vec<_>>())
        .bind(members.iter().map(|member| member.is_held.then_some(true)).collect::<Vec<_>>())
        .fetch_one(&mut *tx.connection)
        .await?;
    Ok(())
}

/// Stores jobs that have no keys. Returns when they were created.
async fn insert_plain(tx: &mut Tx<'_>, jobs: &[ValidJob]) -> Sql<DateTime<Utc>> {
    let (first, rest) = jobs.split_at(jobs.len().min(INSERT_STEP));
    if rest.is_empty() {
        return insert_step(tx, first).await;
    }
    let mut transaction = tx.begin().await?;
    let created_at = insert_step(&mut transaction.tx(), first).await?;
    for step in rest.chunks(INSERT_STEP) {
        insert_step(&mut transaction.tx(), step).await?;
    }
    transaction.commit().await?;
    Ok(created_at)
}

async fn insert_step(tx: &mut Tx<'_>, jobs: &[ValidJob]) -> Sql<DateTime<Utc>> {
    let columns = Columns::of(jobs.iter());
    let query = if jobs.iter().any(|job| job.group.is_some()) {
        columns.bind(sqlx::query(tx.sql(INSERT_GROUPED))).bind(&columns.groups)
    } else {
        columns.bind(sqlx::query(tx.sql(INSERT)))
    };
    Ok(query.fetch_one(&mut *tx.connection).await?.try_get("now")?)
}

/// As [`INSERT`], for jobs that may exist already: by id, because an earlier reply
/// was lost, or by idempotency key. The key may be that of a merged request: the filter
/// finds those that are committed, and `has_merged_key` those that the insert waited for.
const INSERT_NEW: &str = concat!(
    "
    with input as (
      select *
        from unnest((select $1::uuid[]), (select $2::text[]), (select $3::text[]), (select $4::int2[]), (select $5::int2[]), (select $6::text[]), (select $7::timestamptz[]),
                    (select $8::int8[]), (select $9::int8[]), (select $10::text[]), (select $11::text[]), (select $12::text[]), (select $13::text[]))
          as input(id, kind, queue, priority, max_attempts, payload, run_at, delay_us, timeout_ms, flags, options,
                   grp, idempotency_key)),
    stored as (
      insert into longshore.jobs
             (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload, flags, options,
              grp, idempotency_key)
      select id, longshore.clock(),
             coalesce(run_at, longshore.clock() + delay_us * interval '1 microsecond'),
             timeout_ms, priority, max_attempts, kind, queue, payload::json,
             case when flags is not null then array(select json_array_elements_text(flags::json)) end,
             options::json, grp, idempotency_key
        from input
       where (select j.id
                from longshore.merged_requests m
                join longshore.jobs j on j.id = m.job
               where m.idempotency_key = input.idempotency_key) is null
          on conflict do nothing
      returning id, run_at, timeout_ms, priority, max_attempts, kind, queue, flags, grp, flow, idempotency_key),
    enqueued as (",
    insert_ready!(
        job: "s",
        run_at: "s.run_at",
        lease_no: "0",
        attempts: "0",
        interruptions: "0",
        keyed: "false",
        held: "null",
        from: "stored s",
    ),
    "),",
    add_turns!("stored"),
    "
    select (select count(*) from stored) as stored,
           longshore.has_merged_key(array(select idempotency_key from stored)) as was_merged,
           longshore.clock() as now,
           -- not needed if all are stored
           case when (select count(*) from stored) < cardinality($1::uuid[]) then array(select id from stored) end as ids",
);

const BY_KEY_OR_ID: &str = "
    select idempotency_key, id
      from longshore.jobs
     where idempotency_key = any($1::text[])
        or id = any($2::uuid[])
     union all
    select m.idempotency_key, j.id
      from longshore.merged_requests m
      join longshore.jobs j on j.id = m.job
     where m.idempotency_key = any($1::text[])";

/// Stores the jobs of one step, which have no unique key. Skips those whose id or
/// idempotency key already exists.
async fn insert_new(tx: &mut Tx<'_>, jobs: &[ValidJob], step: &[usize], parts: &mut Parts) -> Sql<()> {
    let columns = Columns::of(step.iter().map(|i| &jobs[*i]));
    let keys: Vec<Option<&str>> = step.iter().map(|i| jobs[*i].idempotency_key.as_deref()).collect();
    let query = columns.bind(sqlx::query(tx.sql(INSERT_NEW))).bind(&columns.groups).bind(&keys);
    let row = query.fetch_one(&mut *tx.connection).await?;
    let stored = unless_merged(&row)?;
    parts.now = Some(row.try_get("now")?);
    if stored == step.len() as i64 {
        for i in step {
            parts.results[*i] = Some(created(&jobs[*i]));
        }
        return Ok(());
    }
    let stored: Vec<Uuid> = row.try_get::<Option<_>, _>("ids")?.unwrap_or_default();
    let mut stored: BTreeSet<Uuid> = stored.into_iter().collect();
    let keys: Vec<&str> = keys.into_iter().flatten().collect();
    let rows = sqlx::query(tx.sql(BY_KEY_OR_ID))
        .bind(&keys)
        .bind(&columns.ids)
        .fetch_all(&mut *tx.connection)
        .await?;
    let (mut by_key, mut ids) = (BTreeMap::<String, Uuid>::new(), BTreeSet::<Uuid>::new());
    for row in rows {
        ids.insert(row.try_get("id")?);
        if let Some(key) = row.try_get::<Option<String>, _>("idempotency_key")? {
            by_key.entry(key).or_insert(row.try_get("id")?);
        }
    }
    for i in step {
        let job = &jobs[*i];
        // Of several jobs with one id, the first is stored.
        let is_new = stored.remove(&job.id.0);
        let stored_as = if is_new { EnqueuedAs::Created } else { job.stored_as() };
        let holders = Holders {
            earlier: ids.contains(&job.id.0).then_some((job.id, stored_as)),
            idempotency: job.idempotency_key.as_ref().and_then(|key| by_key.get(key)).map(|id| JobId(*id)),
            unique: None,
        };
        parts.results[*i] = Some(match keys::decide(holders, UniqueMode::default()) {
            Decision::Repeat(id, how) => {
                parts.repeated |= !is_new;
                Enqueued { id, how }
            }
            Decision::Existing(id) => Enqueued { id, how: EnqueuedAs::Existing },
            Decision::Insert | Decision::Dedupe(_) | Decision::Replace(..) | Decision::Supersede(_) => {
                return Err(Error::unavailable(
                    "idempotency_key: the job that held the key was just removed; try again",
                )
                .into());
            }
        });
    }
    Ok(())
}

/// How many rows a statement has stored, unless the idempotency key of one of
/// them was merged into another job while the statement waited. Then the transaction
/// starts over, and finds that job.
fn unless_merged(row: &PgRow) -> Sql<i64> {
    if row.try_get::<Option<bool>, _>("was_merged")? == Some(true) {
        return Err(Fault::LostRace(Error::unavailable(
            "idempotency_key: taken at the same moment; try again",
        )));
    }
    Ok(row.try_get("stored")?)
}

/// Stores one job with a unique key. Each decision is stored by one statement,
/// which changes nothing if the owner of the key has changed; then the holders are
/// read again.
async fn enqueue_unique(tx: &mut Tx<'_>, job: &ValidJob, parts: &mut Parts) -> Sql<Enqueued> {
    let mode = job.unique.as_ref().map(|(_, mode)| *mode).unwrap_or_default();
    for _ in 0..MAX_ROUNDS {
        let (holders, now) = holders(tx, job).await?;
        parts.now = Some(now);
        let (stored, id, how) = match keys::decide(holders, mode) {
            Decision::Repeat(id, how) => {
                parts.repeated = true;
                (true, id, how)
            }
            Decision::Existing(id) => (true, id, EnqueuedAs::Existing),
            Decision::Dedupe(owner) => {
                if job.idempotency_key.is_some() {
                    merge(tx, job, owner, EnqueuedAs::Existing, job.idempotency_key.as_deref()).await?;
                }
                (true, owner, EnqueuedAs::Existing)
            }
            Decision::Insert => (insert(tx, job).await?, job.id, EnqueuedAs::Created),
            Decision::Replace(owner, run_at) => {
                (replace(tx, job, owner, run_at).await?, owner, EnqueuedAs::Replaced)
            }
            Decision::Supersede(owner) => (supersede(tx, job, owner).await?, job.id, EnqueuedAs::Created),
        };
        if stored {
            return Ok(Enqueued { id, how });
        }
    }
    // A new transaction may get through: it starts after the others' commits.
    Err(Fault::LostRace(Error::unavailable(
        "unique_key: the job that owns the key keeps changing state; try again",
    )))
}

/// If the owner of the key is in neither table, the result has no owner. The insert then
/// finds the key taken, and the holders are read again.
const HOLDERS: &str = "
    select exists (
             select 1
               from longshore.jobs
              where id = $1) as stored,
           (select j.id
              from longshore.jobs j
             where j.id = m.job) as merged_into,
           m.replaced,
           coalesce(
             (select id
                from longshore.jobs
               where idempotency_key = $2),
             (select j.id
                from longshore.merged_requests o
                join longshore.jobs j on j.id = o.job
               where o.idempotency_key = $2)) as idempotency,
           k.job as owner,
           exists (
             select 1
               from longshore.ready w
              where w.id = k.job) as waiting,
           (select r.cancel_requested
              from longshore.running r
             where r.id = k.job) as cancelling,   -- null if it does not run
           longshore.clock() as now
      from (select 1) as one_row
      left join longshore.keys k on k.key = $3
      left join longshore.merged_requests m on m.id = $1";

/// Finds the jobs that have the id or the keys of this job. Also returns the time of the
/// transaction.
async fn holders(tx: &mut Tx<'_>, job: &ValidJob) -> Sql<(Holders, DateTime<Utc>)> {
    let row = sqlx::query(tx.sql(HOLDERS))
        .bind(job.id.0)
        .bind(&job.idempotency_key)
        .bind(job.unique.as_ref().map(|(key, _)| key))
        .fetch_one(&mut *tx.connection)
        .await?;
    let earlier = if row.try_get("stored")? {
        Some((job.id, job.stored_as()))
    } else if let Some(id) = row.try_get("merged_into")? {
        let how = if row.try_get("replaced")? { EnqueuedAs::Replaced } else { EnqueuedAs::Existing };
        Some((JobId(id), how))
    } else {
        None
    };
    let owner = if row.try_get("waiting")? {
        Some(Owner::Waiting)
    } else {
        row.try_get::<Option<bool>, _>("cancelling")?
            .map(|cancelling| if cancelling { Owner::Cancelling } else { Owner::Running })
    };
    let holders = Holders {
        earlier,
        idempotency: row.try_get::<Option<Uuid>, _>("idempotency")?.map(JobId),
        unique: row.try_get::<Option<Uuid>, _>("owner")?.map(JobId).zip(owner),
    };
    Ok((holders, row.try_get("now")?))
}

/// Inserts the new owner of a key into `ready`.
macro_rules! insert_owner {
    () => {
        insert_ready!(
            job: "s",
            run_at: "s.run_at",
            lease_no: "0",
            attempts: "0",
            interruptions: "0",
            keyed: "true",
            held: "null",
            from: "stored s",
        )
    };
}

/// Stores nothing if another job owns the key. If the id or the idempotency key was
/// taken meanwhile, the statement fails and is retried.
const INSERT_OWNER: &str = concat!(
    "
    with owned as (
      insert into longshore.keys (key, job)
      values ($12, $1)
          on conflict (key) do nothing
      returning job),
    stored as (
      insert into longshore.jobs
             (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload, flags, options,
              idempotency_key, unique_key, grp)
      select o.job, longshore.clock(), coalesce($7, longshore.clock() + $8 * interval '1 microsecond'),
             $9, $4, $5, $2, $3, $6::text::json, $10, $11::text::json, $13, $12, $14
        from owned o
      returning *),
    enqueued as (",
    insert_owner!(),
    "),",
    add_turns!("stored"),
    "
    select (select count(*) from owned) as stored,
           case when $13::text is not null
                then longshore.has_merged_key(array(select idempotency_key from stored)) end as was_merged",
);

/// Stores the new job with its key. Returns whether the key was free.
async fn insert(tx: &mut Tx<'_>, job: &ValidJob) -> Sql<bool> {
    let query = bind(sqlx::query(tx.sql(INSERT_OWNER)), job, job.id);
    Ok(unless_merged(&query.fetch_one(&mut *tx.connection).await?)? > 0)
}

/// A job in `ready` owns its key, so the row itself shows that it still does. The
/// lease number stays, so that earlier holders of a lease remain fenced off. The
/// idempotency key is stored too, if the job has none.
const REPLACE: &str = concat!(
    "
    with deleted as (
      delete from longshore.ready
       where id = $1
      returning id, run_at, lease_no, interruptions),",
    delete_progress!("select id from deleted"),
    "
    changed as (
      update longshore.jobs j
         set kind = $2,
             queue = $3,
             priority = $4,
             max_attempts = $5,
             payload = $6::text::json,
             run_at = case when $15 then j.run_at
                           else coalesce($7, longshore.clock() + $8 * interval '1 microsecond') end,
             timeout_ms = $9,
             flags = $10,
             options = $11::text::json,
             grp = $14,
             idempotency_key = coalesce(j.idempotency_key, $13)
        from deleted d
       where j.id = d.id
         and j.unique_key = $12
      returning j.idempotency_key),
    enqueued as (",
    insert_ready!(
        job: "d",
        run_at: concat!(
            "case when $15 and ",
            was_suspended!("d.id"),
            " then least(d.run_at, longshore.clock())
                  when $15 then d.run_at
                  else coalesce($7, longshore.clock() + $8 * interval '1 microsecond') end"
        ),
        lease_no: "d.lease_no",
        attempts: "0",
        interruptions: "d.interruptions",
        keyed: "true",
        held: "null",
        from: "(select id, run_at, lease_no, interruptions, $2::text as kind, $3::text as queue, $4::int2 as priority,
                     $5::int2 as max_attempts, $9::int8 as timeout_ms, $10::text[] as flags, $14::text as grp,
                     null::uuid as flow
                from deleted) as d",
    ),
    "
      returning run_at, priority, queue, grp),",
    add_turns!("enqueued"),
    "
    select (select count(*) from deleted) as stored,
           longshore.has_merged_key(array(select idempotency_key from changed where idempotency_key = $13)) as was_merged,
           (select idempotency_key from changed) as own_key",
);

/// Replaces the contents of the waiting owner of the key and merges the request into it.
/// Returns whether it was still waiting.
async fn replace(tx: &mut Tx<'_>, job: &ValidJob, owner: JobId, run_at: RunAt) -> Sql<bool> {
    let query = bind(sqlx::query(tx.sql(REPLACE)), job, owner).bind(run_at == RunAt::Preserved);
    let row = query.fetch_one(&mut *tx.connection).await?;
    if unless_merged(&row)? == 0 {
        return Ok(false);
    }
    let own_key: Option<String> = row.try_get("own_key")?;
    let other_key = job.idempotency_key.as_deref().filter(|key| own_key.as_deref() != Some(*key));
    merge(tx, job, owner, EnqueuedAs::Replaced, other_key).await?;
    Ok(true)
}

/// Locks in the usual order: the row in `running` first, then the key.
const SUPERSEDE: &str = concat!(
    "
    with owner as (
      update longshore.running
         set superseded = true
       where id = $15
         and not superseded
      returning id),
    moved as (
      update longshore.keys k
         set job = $1
        from owner o
       where k.key = $12
         and k.job = o.id
      returning k.job),
    stored as (
      insert into longshore.jobs
             (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload, flags, options,
              idempotency_key, unique_key, grp)
      select m.job, longshore.clock(), coalesce($7, longshore.clock() + $8 * interval '1 microsecond'),
             $9, $4, $5, $2, $3, $6::text::json, $10, $11::text::json, $13, $12, $14
        from moved m
      returning *),
    enqueued as (",
    insert_owner!(),
    "),",
    add_turns!("stored"),
    "
    select (select count(*) from owner) as stored,
           case when $13::text is not null
                then longshore.has_merged_key(array(select idempotency_key from stored)) end as was_merged",
);

/// Stores the new job and moves the key of a running owner to it. Returns whether
/// the owner was still running.
async fn supersede(tx: &mut Tx<'_>, job: &ValidJob, owner: JobId) -> Sql<bool> {
    let query = bind(sqlx::query(tx.sql(SUPERSEDE)), job, job.id).bind(owner.0);
    Ok(unless_merged(&query.fetch_one(&mut *tx.connection).await?)? > 0)
}

const MERGE: &str = "
    select longshore.merge_request($1, $2, $3, $4)";

/// Stores that the request became part of `owner`, so that its id and this key return
/// that job from now on.
async fn merge(tx: &mut Tx<'_>, job: &ValidJob, owner: JobId, how: EnqueuedAs, key: Option<&str>) -> Sql<()> {
    sqlx::query(tx.sql(MERGE))
        .bind(job.id.0)
        .bind(owner.0)
        .bind(how == EnqueuedAs::Replaced)
        .bind(key)
        .execute(&mut *tx.connection)
        .await?;
    Ok(())
}

/// Binds the fourteen parameters of a job with a unique key, stored under `id`.
fn bind<'q>(query: Query<'q>, job: &'q ValidJob, id: JobId) -> Query<'q> {
    let (run_at, delay_us) = split(job.when);
    query
        .bind(id.0)
        .bind(&job.kind)
        .bind(&job.queue)
        .bind(job.priority)
        .bind(job.max_attempts as i16)
        .bind(&job.payload)
        .bind(run_at)
        .bind(delay_us)
        .bind(job.timeout.map(millis))
        .bind((!job.flags.is_empty()).then_some(&job.flags))
        .bind(&job.options)
        .bind(job.unique.as_ref().map(|(key, _)| key))
        .bind(&job.idempotency_key)
        .bind(&job.group)
}

fn created(job: &ValidJob) -> Enqueued {
    Enqueued { id: job.id, how: EnqueuedAs::Created }
}

/// Jobs as arrays, one per column.
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
    groups: Vec<Option<&'a str>>,
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
            columns.groups.push(job.group.as_deref());
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

/// A point in time as the statements take it: an instant, or a number of microseconds
/// from now.
pub(super) fn split(when: When) -> (Option<DateTime<Utc>>, Option<i64>) {
    match when {
        When::At(at) => (Some(at), None),
        When::After(delay) => (None, Some(i64::try_from(delay.as_micros()).unwrap_or(i64::MAX))),
    }
}
