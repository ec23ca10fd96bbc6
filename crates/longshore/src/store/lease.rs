//! The lease: the right to run one attempt of one job. Has what a worker stores and reads under it while the
//! job runs. `claim` has how leases begin, and `settle` how they end.

use std::collections::{BTreeMap, HashSet};

use async_trait::async_trait;
use serde::Serialize;
use serde_json::value::RawValue;

use super::Claimed;
use super::db::{Arg, Engine, How, Row, Rows, Sql, Statement, args};
use crate::error::Result;
use crate::job::{JobId, WorkerId};
use crate::rules::enqueue::{MAX_PAYLOAD, check_json};

/// The right to run one attempt of one job. A claim creates it. Every later operation
/// on the attempt names it, and changes nothing if it is no longer live: the lease is
/// the fence against stale workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Lease {
    /// The job.
    pub id: JobId,
    /// The number of the lease. Every claim of the job increases it by one; it never
    /// decreases.
    pub lease_no: i32,
    /// The worker that holds it.
    pub worker: WorkerId,
}

/// Whether the lease was live when an operation ran under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Fenced {
    /// The lease was live, and the operation is done.
    Held,
    /// The lease was not live, and nothing changed.
    LeaseLost,
}

impl Fenced {
    pub(super) fn of(is_held: bool) -> Self {
        if is_held { Fenced::Held } else { Fenced::LeaseLost }
    }
}

/// Live leases.
#[async_trait]
pub trait Leases {
    /// Returns the claim behind each lease, as [`claim`](super::Claiming::claim) returned it,
    /// for callers that do not keep claims in memory; `None` if the lease is not
    /// live. Only `run_at` may differ: the due time of a retry is deleted when the
    /// job is claimed, so this is the time the job was enqueued for.
    async fn claims(&self, leases: &[Lease]) -> Result<Vec<Option<Claimed>>>;

    /// Records that the handler of a suspect job is about to start, so that later
    /// interruptions of this attempt count.
    async fn mark_started(&self, lease: &Lease) -> Result<Fenced>;

    /// Replaces the progress shown for running jobs.
    async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>>;

    /// Saves the checkpoints of running jobs. They are kept when the attempts end. The last one of each lease
    /// counts.
    async fn save_checkpoints(&self, checkpoints: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>>;

    /// Returns the newest checkpoint of a job.
    async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>>;

    /// Returns whether a lease is live now.
    async fn assert_lease(&self, lease: &Lease) -> Result<Fenced>;
}

#[async_trait]
impl<E: Engine> Leases for E {
    async fn claims(&self, leases: &[Lease]) -> Result<Vec<Option<Claimed>>> {
        self.call(How::READ, leases.to_vec(), |rows, leases| rows.claims(leases)).await
    }

    async fn mark_started(&self, lease: &Lease) -> Result<Fenced> {
        self.call(How::QUICK, *lease, |rows, lease| Box::pin(mark_started(rows, *lease))).await
    }

    async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        reports.iter().try_for_each(|(_, progress)| check_json("progress", progress.get(), MAX_PAYLOAD))?;
        self.call(How::QUICK, reports.to_vec(), |rows, reports| {
            Box::pin(save_newest(rows, &SAVE_PROGRESS, reports))
        })
        .await
    }

    async fn save_checkpoints(&self, checkpoints: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        checkpoints.iter().try_for_each(|(_, data)| check_json("checkpoint", data.get(), MAX_PAYLOAD))?;
        self.call(How::QUICK, checkpoints.to_vec(), |rows, checkpoints| {
            Box::pin(save_newest(rows, &SAVE_CHECKPOINTS, checkpoints))
        })
        .await
    }

    async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>> {
        self.call(How::READ, id, |rows, id| Box::pin(checkpoint(rows, *id))).await
    }

    async fn assert_lease(&self, lease: &Lease) -> Result<Fenced> {
        self.call(How::READ, *lease, |rows, lease| Box::pin(assert_lease(rows, *lease))).await
    }
}

/// Like the statements of `settle`, this waits only 2 s for a row that the user's own
/// transaction has locked: after a client gives up, its statement keeps waiting in the
/// server.
static MARK_STARTED: Statement = Statement::new(
    "
    update longshore.running
       set started_at = coalesce(started_at, longshore.clock())   -- the first start counts
     where id = (select $1::uuid where set_config('lock_timeout', '2s', true) <> '')
       and lease_no = $2
       and worker = $3",
);

async fn mark_started(rows: &mut dyn Rows, lease: Lease) -> Sql<Fenced> {
    let Lease { id, lease_no, worker } = lease;
    Ok(Fenced::of(rows.execute(&MARK_STARTED, args![id, lease_no, worker]).await? > 0))
}

static SAVE_PROGRESS: Statement = Statement::new(
    "
    with held as (
      select r.id as job, i.progress
        from unnest((select $1::uuid[] where set_config('lock_timeout', '2s', true) <> ''), (select $2::int4[]), (select $3::uuid[]), (select $4::text[]))
          as i(id, lease_no, worker, progress)
        join longshore.running r
          on r.id = i.id
         and r.lease_no = i.lease_no   -- fence: a newer lease owns the row
         and r.worker = i.worker
       order by r.id
         for no key update of r)
    update longshore.running as r
       set progress = h.progress::json
      from held h
     where r.id = h.job
    returning id, lease_no",
);

/// Locks the lease's row so that the lease cannot be taken meanwhile. A checkpoint of a
/// lost lease cannot overwrite one of the next lease.
static SAVE_CHECKPOINTS: Statement = Statement::new(
    "
    with held as (
      select r.id, r.lease_no, i.data
        from unnest((select $1::uuid[] where set_config('lock_timeout', '2s', true) <> ''), (select $2::int4[]), (select $3::uuid[]), (select $4::text[]))
          as i(id, lease_no, worker, data)
        join longshore.running r
          on r.id = i.id
         and r.lease_no = i.lease_no   -- fence: a newer lease owns the row
         and r.worker = i.worker
       order by r.id
         for key share of r)
    insert into longshore.checkpoints (job, lease_no, data, saved_at)
    select id, lease_no, data::json, longshore.clock()
      from held
     where true   -- SQLite would read `on conflict` as a join
        on conflict (job) do update
       set lease_no = excluded.lease_no,
           data = excluded.data,
           saved_at = excluded.saved_at
    returning job as id, lease_no",
);

/// Stores the last value of each lease: one statement can change a row only once.
async fn save_newest(
    rows: &mut dyn Rows,
    save: &'static Statement,
    values: &[(Lease, Box<RawValue>)],
) -> Sql<Vec<Fenced>> {
    let newest: BTreeMap<Lease, &str> = values.iter().map(|(lease, value)| (*lease, value.get())).collect();
    let args = [
        Arg::Ids(Some(newest.keys().map(|lease| lease.id.0).collect())),
        Arg::Ints(newest.keys().map(|lease| lease.lease_no.into()).collect()),
        Arg::Ids(Some(newest.keys().map(|lease| lease.worker.0).collect())),
        newest.into_values().collect::<Vec<_>>().into(),
    ];
    let key = |mut row: Row| Ok((row.take("id")?, row.take("lease_no")?));
    let held: HashSet<(JobId, i32)> =
        rows.rows(save, &args).await?.into_iter().map(key).collect::<Sql<_>>()?;
    // The worker is not compared: a lease number belongs to one worker.
    Ok(values.iter().map(|(lease, _)| Fenced::of(held.contains(&(lease.id, lease.lease_no)))).collect())
}

static CHECKPOINT: Statement = Statement::new(
    "
    select data::text as data
      from longshore.checkpoints
     where job = $1",
);

async fn checkpoint(rows: &mut dyn Rows, id: JobId) -> Sql<Option<Box<RawValue>>> {
    rows.row(&CHECKPOINT, args![id]).await?.map(|mut row| row.take("data")).transpose()
}

static ASSERT_LEASE: Statement = Statement::new(
    "
    select 1
      from longshore.running
     where id = $1
       and lease_no = $2
       and worker = $3
       for key share",
);

/// In a transaction on Postgres, the lease cannot be taken away until it ends.
pub(super) async fn assert_lease(rows: &mut dyn Rows, lease: Lease) -> Sql<Fenced> {
    let Lease { id, lease_no, worker } = lease;
    Ok(Fenced::of(rows.has_row(&ASSERT_LEASE, args![id, lease_no, worker]).await?))
}
