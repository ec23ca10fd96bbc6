//! Worker processes: registration, the list that operators see, and the reply to a
//! heartbeat.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;

use super::db::{Engine, How, Row, Rows, Sql, Statement, args};
use super::{Lease, SCHEMA_VERSION};
use crate::error::Result;
use crate::job::WorkerId;
use crate::rules::enqueue::{ALL_QUEUES, DEFAULT_QUEUE};
use crate::rules::retry::millis;

/// A worker process to register.
#[derive(Clone, Debug)]
pub struct NewWorker {
    /// Its id, new at every start.
    pub id: WorkerId,
    /// A name for display.
    pub name: String,
    /// The queues it claims from; [`ALL_QUEUES`] means every queue.
    pub queues: Vec<String>,
    /// The kinds it handles; `None` means any.
    pub kinds: Option<Vec<String>>,
    /// The number of jobs it runs at once.
    pub concurrency: u32,
    /// The worker is dead after this time without a heartbeat.
    pub stale_after: Duration,
    /// The host it runs on, if known.
    pub host: Option<String>,
    /// Its process id, if known.
    pub pid: Option<u32>,
    /// The version of Longshore it was built with, if known.
    pub version: Option<String>,
}

impl NewWorker {
    /// A worker for the default queue that is stale after the default of 60 s.
    pub fn new(name: impl Into<String>) -> Self {
        NewWorker {
            id: WorkerId::new(),
            name: name.into(),
            queues: vec![DEFAULT_QUEUE.into()],
            kinds: None,
            concurrency: 4,
            stale_after: Duration::from_secs(60),
            host: None,
            pid: None,
            version: None,
        }
    }
}

/// The part of a worker's registration that calls under its id depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The queues it claims from.
    pub queues: Vec<String>,
    /// The time without a heartbeat after which it is dead.
    pub stale_after: Duration,
}

/// A worker as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct WorkerRecord {
    /// Its id, new at every start.
    pub id: WorkerId,
    /// A name for display.
    pub name: String,
    /// The queues it claims from; [`ALL_QUEUES`] means every queue.
    pub queues: Vec<String>,
    /// The kinds it handles; absent means any.
    pub kinds: Option<Vec<String>>,
    /// The number of jobs it runs at once.
    pub concurrency: u32,
    /// The time without a heartbeat after which it is dead.
    #[serde(rename = "stale_after_seconds", serialize_with = "in_seconds")]
    pub stale_after: Duration,
    /// When it registered.
    pub started_at: DateTime<Utc>,
    /// The time of its last heartbeat.
    pub heartbeat_at: DateTime<Utc>,
    /// When it was declared dead; `None` while it is alive.
    pub dead_at: Option<DateTime<Utc>>,
    /// Whether its heartbeat is older than the threshold. A stale worker is declared dead by
    /// the next sweep or, if it holds a resilient job, after a multiple of the threshold.
    pub stale: bool,
    /// The number of leases it holds.
    pub running: u64,
    /// The host it runs on; absent if unknown.
    pub host: Option<String>,
    /// Its process id; absent if unknown.
    pub pid: Option<u32>,
    /// The version of Longshore it was built with; absent if unknown.
    pub version: Option<String>,
}

impl WorkerRecord {
    /// Whether it claims from this queue.
    pub fn claims_from(&self, queue: &str) -> bool {
        self.queues.iter().any(|name| name == queue || name == ALL_QUEUES)
    }
}

fn in_seconds<S: serde::Serializer>(duration: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_f64(duration.as_secs_f64())
}

/// A live lease of a worker, as a heartbeat returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveLease {
    /// The lease.
    pub lease: Lease,
    /// How long ago the job was claimed.
    pub age: Duration,
    /// Whether the job was interrupted before.
    pub is_suspect: bool,
    /// Whether the handler should stop, because the job is to be cancelled.
    pub cancel_requested: bool,
}

/// The reply to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beat {
    /// The worker is alive.
    Alive {
        /// Held leases that are no longer live.
        lost: Vec<Lease>,
        /// Held leases whose handlers should stop.
        cancel: Vec<Lease>,
    },
    /// The worker was declared dead or is unknown. It must stop its handlers and
    /// register again under a new id.
    Dead,
}

/// Workers.
#[async_trait]
pub trait Workers {
    /// Adds a worker, alive from now on. Registering again updates the worker's
    /// queues, kinds and concurrency; a worker that was declared dead stays dead.
    async fn register(&self, worker: &NewWorker) -> Result<()>;

    /// Returns what a worker registered with, whether it is alive or dead; `None` if it
    /// is unknown. The cost does not depend on the number of workers and leases.
    async fn registration(&self, worker: WorkerId) -> Result<Option<Registration>>;

    /// Whether a worker has leased a job of a queue that is not one of these. It may have some after it has
    /// changed its queues.
    async fn has_leases_outside(&self, worker: WorkerId, queues: &[String]) -> Result<bool>;

    /// Returns every live lease of a worker, ordered by job id, so that a worker can
    /// find what it has leased after the reply to a claim was lost.
    async fn leases(&self, worker: WorkerId) -> Result<Vec<Lease>>;

    /// Returns the live leases of a worker whose jobs are to be cancelled, ordered by
    /// job id. Reads an index that contains only such leases, and changes nothing: it
    /// is not a heartbeat.
    async fn cancels(&self, worker: WorkerId) -> Result<Vec<Lease>>;

    /// Refreshes a worker's heartbeat. Returns which of the leases it holds are lost
    /// and which jobs it must cancel. A worker that was declared dead stays dead.
    async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat>;

    /// Refreshes a worker's heartbeat, as [`beat`](Workers::beat) does, and returns every live lease of the
    /// worker, ordered by job id; `None` if the worker was declared dead or is unknown.
    async fn beat_and_list(&self, worker: WorkerId) -> Result<Option<Vec<LiveLease>>>;

    /// Removes a worker that has shut down. If it still has leases, it is declared
    /// dead instead, and recovery takes them.
    async fn retire(&self, worker: WorkerId) -> Result<()>;

    /// Lists all workers, newest first. A worker is stale if its heartbeat is older
    /// than `threshold` or, without one, than the worker's own `stale_after`.
    async fn workers(&self, threshold: Option<Duration>) -> Result<Vec<WorkerRecord>>;
}

#[async_trait]
impl<E: Engine> Workers for E {
    async fn register(&self, worker: &NewWorker) -> Result<()> {
        self.call(How::WHILE_AWAITED, worker.clone(), |rows, worker| Box::pin(register(rows, worker))).await
    }

    async fn registration(&self, worker: WorkerId) -> Result<Option<Registration>> {
        self.call(How::READ, worker, |rows, worker| Box::pin(registration(rows, *worker))).await
    }

    async fn has_leases_outside(&self, worker: WorkerId, queues: &[String]) -> Result<bool> {
        self.call(How::READ, (worker, queues.to_vec()), |rows, (worker, queues)| {
            Box::pin(has_leases_outside(rows, *worker, queues))
        })
        .await
    }

    async fn leases(&self, worker: WorkerId) -> Result<Vec<Lease>> {
        self.call(How::READ, worker, |rows, worker| Box::pin(leases(rows, &LEASES, *worker))).await
    }

    async fn cancels(&self, worker: WorkerId) -> Result<Vec<Lease>> {
        self.call(How::READ_WHILE_AWAITED, worker, |rows, worker| Box::pin(leases(rows, &CANCELS, *worker)))
            .await
    }

    async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat> {
        self.call(How::WHILE_AWAITED, (worker, held.to_vec()), |rows, (worker, held)| {
            rows.beat(*worker, held)
        })
        .await
    }

    async fn beat_and_list(&self, worker: WorkerId) -> Result<Option<Vec<LiveLease>>> {
        self.call(How::WHILE_AWAITED, worker, |rows, worker| rows.beat_and_list(*worker)).await
    }

    async fn retire(&self, worker: WorkerId) -> Result<()> {
        self.call(How::QUICK, worker, |rows, worker| Box::pin(retire(rows, *worker))).await
    }

    async fn workers(&self, threshold: Option<Duration>) -> Result<Vec<WorkerRecord>> {
        self.call(How::READ, threshold, |rows, threshold| Box::pin(workers(rows, *threshold))).await
    }
}

static REGISTER: Statement = Statement::new(
    "
    insert into longshore.workers as w
           (id, name, queues, kinds, concurrency, stale_after_ms, started_at, heartbeat_at, host, pid, version,
            schema_version)
    values ($1, $2, $3, $4, $5, $6, longshore.clock(), longshore.clock(), $7, $8, $9, $10)
        on conflict (id) do update
       set queues = excluded.queues,
           kinds = excluded.kinds,
           concurrency = excluded.concurrency,
           heartbeat_at = excluded.heartbeat_at,
           schema_version = excluded.schema_version
     where w.dead_at is null",
);

async fn register(rows: &mut dyn Rows, worker: &NewWorker) -> Sql<()> {
    let NewWorker { id, name, queues, kinds, concurrency, stale_after, host, pid, version } = worker;
    let stale_after = millis(*stale_after);
    // The column holds no larger number.
    let concurrency = (*concurrency).min(i32::MAX as u32);
    let args = args![*id, name, queues, kinds, concurrency, stale_after, host, *pid, version, SCHEMA_VERSION];
    rows.execute(&REGISTER, args).await.map(drop)
}

static REGISTRATION: Statement = Statement::new(
    "
    select queues, stale_after_ms
      from longshore.workers
     where id = $1",
);

async fn registration(rows: &mut dyn Rows, worker: WorkerId) -> Sql<Option<Registration>> {
    let Some(mut row) = rows.row(&REGISTRATION, args![worker]).await? else { return Ok(None) };
    let stale_after = Duration::from_millis(row.take("stale_after_ms")?);
    Ok(Some(Registration { queues: row.take("queues")?, stale_after }))
}

static LEASES_OUTSIDE: Statement = Statement::new(
    "
    select 1
      from longshore.running
     where worker = $1
       and queue <> all($2::text[])
     limit 1",
);

async fn has_leases_outside(rows: &mut dyn Rows, worker: WorkerId, queues: &[String]) -> Sql<bool> {
    rows.has_row(&LEASES_OUTSIDE, args![worker, queues]).await
}

static LEASES: Statement = Statement::new(
    "
    select id, lease_no
      from longshore.running
     where worker = $1
     order by id",
);

static CANCELS: Statement = Statement::new(
    "
    select id, lease_no
      from longshore.running
     where worker = $1
       and cancel_requested
     order by id",
);

async fn leases(rows: &mut dyn Rows, which: &'static Statement, worker: WorkerId) -> Sql<Vec<Lease>> {
    let read = |mut row: Row| Ok(Lease { id: row.take("id")?, lease_no: row.take("lease_no")?, worker });
    rows.rows(which, args![worker]).await?.into_iter().map(read).collect()
}

static REMOVE_WORKER: Statement = Statement::new(
    "
    delete from longshore.workers as w
     where w.id = $1
       and not exists (
             select 1
               from longshore.running r
              where r.worker = w.id)",
);

static DECLARE_DEAD: Statement = Statement::new(
    "
    update longshore.workers
       set dead_at = longshore.clock()
     where id = $1
       and dead_at is null",
);

async fn retire(rows: &mut dyn Rows, worker: WorkerId) -> Sql<()> {
    if rows.execute(&REMOVE_WORKER, args![worker]).await? == 0 {
        rows.execute(&DECLARE_DEAD, args![worker]).await?;
    }
    Ok(())
}

static WORKERS: Statement = Statement::new(
    "
    select w.id, w.name, w.queues, w.kinds, w.concurrency, w.stale_after_ms, w.started_at, w.heartbeat_at, w.dead_at,
           coalesce(leased.jobs, 0) as running, w.host, w.pid, w.version, longshore.clock() as now
      from longshore.workers w
      left join (
             select worker, count(*) as jobs
               from longshore.running
              group by worker) as leased
        on leased.worker = w.id
     order by w.started_at desc, w.id desc",
);

async fn workers(rows: &mut dyn Rows, threshold: Option<Duration>) -> Sql<Vec<WorkerRecord>> {
    rows.rows(&WORKERS, &[]).await?.into_iter().map(|row| worker_record(row, threshold)).collect()
}

fn worker_record(mut row: Row, threshold: Option<Duration>) -> Sql<WorkerRecord> {
    let stale_after_ms: i64 = row.take("stale_after_ms")?;
    let heartbeat_at: DateTime<Utc> = row.take("heartbeat_at")?;
    let threshold_ms = threshold.map_or(stale_after_ms, millis);
    let now: DateTime<Utc> = row.take("now")?;
    Ok(WorkerRecord {
        id: row.take("id")?,
        name: row.take("name")?,
        queues: row.take("queues")?,
        kinds: row.take("kinds")?,
        concurrency: row.take("concurrency")?,
        stale_after: Duration::from_millis(stale_after_ms.unsigned_abs()),
        started_at: row.take("started_at")?,
        heartbeat_at,
        dead_at: row.take("dead_at")?,
        stale: now - heartbeat_at > TimeDelta::milliseconds(threshold_ms),
        running: row.take("running")?,
        host: row.take("host")?,
        pid: row.take("pid")?,
        version: row.take("version")?,
    })
}
