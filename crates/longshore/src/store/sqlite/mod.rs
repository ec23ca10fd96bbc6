//! The SQLite engine: one file, nothing to install, several processes on one
//! host; `:memory:` for tests.
//!
//! Owns the store and its ground: opening, migrating, the clock, how faults are
//! told. The verbs are in `enqueue`, `claim`, `flow` (progress, settle, heartbeat), `upkeep` (recovery,
//! schedules, retention), `operate` (operators' moves), `inspect` and `glance` (looking) and
//! `access` (tokens, kinds), in the order of the trait; the threads are in
//! `engine`.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use rusqlite::types::ValueRef;
use rusqlite::{CachedStatement, Connection, ErrorCode, OptionalExtension, Params, Row, params};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::*;
use crate::enqueue::{MAX_PAYLOAD, check_json};
use crate::job::Outcome;
use crate::lifecycle::When;
use engine::{Engine, Place};

mod access;
mod claim;
mod engine;
mod enqueue;
mod flow;
mod glance;
mod inspect;
mod list;
mod operate;
mod settle;
mod upkeep;

#[cfg(test)]
mod tests;

/// Older ones have a bug that can lose commits in WAL mode.
const OLDEST_SQLITE: i32 = 3_051_003;

const MIGRATIONS: [(i64, &str); SCHEMA_VERSION as usize] = [
    (1, include_str!("../../../migrations/sqlite/0001_queue.sql")),
    (2, include_str!("../../../migrations/sqlite/0002_server.sql")),
];

/// The queue in an SQLite file. Cheap to share behind an `Arc`; its threads
/// end when it is dropped.
///
/// ```
/// use longshore::NewJob;
/// use longshore::store::{Store, sqlite::SqliteStore};
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = SqliteStore::open("sqlite::memory:").await?;
/// store.migrate().await?;
/// let job = NewJob::new("greet", "Ada").validate()?;
/// store.enqueue(std::slice::from_ref(&job)).await?;
/// assert!(store.get(job.id()).await?.is_some());
/// # Ok::<(), longshore::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct SqliteStore {
    engine: Engine,
}

impl SqliteStore {
    /// Opens `sqlite:PATH`, `sqlite://PATH` or `sqlite::memory:`. A missing
    /// file is made; nothing is migrated.
    pub async fn open(url: &str) -> Result<Self> {
        if rusqlite::version_number() < OLDEST_SQLITE {
            return Err(Error::schema(format!(
                "SQLite {} is too old; build with the bundled one, or link 3.51.3 or newer",
                rusqlite::version()
            )));
        }
        let store = SqliteStore { engine: Engine::open(place(url)?).await? };
        match store.schema_version().await? {
            found if found > SCHEMA_VERSION => Err(newer(found)),
            _ => Ok(store),
        }
    }

    /// Enqueues on the caller's own connection, so that the jobs exist if and
    /// only if the caller's transaction commits. The connection must be to the
    /// same file. Call [`wake`](Store::wake) after the commit, or leave it to
    /// polling.
    ///
    /// ```
    /// # use longshore::NewJob;
    /// # use longshore::store::{Store, sqlite::SqliteStore};
    /// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
    /// # let file = std::env::temp_dir().join(format!("longshore-doc-{}.db", std::process::id()));
    /// # let store = SqliteStore::open(&format!("sqlite:{}", file.display())).await?;
    /// # store.migrate().await?;
    /// let job = NewJob::new("send_email", "welcome").validate()?;
    /// let mut mine = rusqlite::Connection::open(&file).unwrap();
    /// let tx = mine.transaction().unwrap();
    /// tx.execute_batch("create table if not exists users (name text); insert into users values ('Ada')").unwrap();
    /// store.enqueue_in(&tx, &[job.clone()])?;
    /// tx.commit().unwrap();
    /// assert!(store.get(job.id()).await?.is_some());
    /// # for end in ["", "-wal", "-shm"] { let _ = std::fs::remove_file(format!("{}{end}", file.display())); }
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn enqueue_in(&self, tx: &Connection, jobs: &[ValidJob]) -> Result<Vec<Enqueued>> {
        // On a connection without a transaction the savepoint is one.
        let run = |sql| tx.execute_batch(sql).map_err(Fault::from);
        run("savepoint longshore_enqueue")?;
        let done = enqueue::enqueue(&Tx::new(tx), jobs);
        if done.is_err() {
            run("rollback to longshore_enqueue")?;
        }
        run("release longshore_enqueue")?;
        Ok(done?)
    }
}

/// Jobs stored by the caller's connection, inside whatever transaction is open
/// on it.
impl crate::client::CallerTransaction for &Connection {
    async fn enqueue(self, store: &dyn Store, jobs: &[ValidJob]) -> Result<Vec<Enqueued>> {
        let any: &dyn std::any::Any = store;
        let store = any.downcast_ref::<SqliteStore>().ok_or_else(|| {
            Error::invalid(
                "transaction",
                "transaction: an SQLite transaction, but this client uses another engine",
            )
        })?;
        store.enqueue_in(self, jobs)
    }
}

fn place(url: &str) -> Result<Place> {
    let refuse = |message: String| Err(Error::invalid("url", format!("database URL: {message}")));
    let path = url.strip_prefix("sqlite:").unwrap_or(url);
    let path = path.strip_prefix("//").unwrap_or(path);
    if path == ":memory:" {
        return Ok(Place::Memory);
    }
    if path.is_empty() {
        return refuse("names no file; use sqlite:path/to/file.db or sqlite::memory:".into());
    }
    if path.contains('?') {
        return refuse("SQLite takes no parameters after `?`; use sqlite:path/to/file.db".into());
    }
    let path = PathBuf::from(path);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return refuse(format!("the folder `{}` does not exist; create it first", folder.display()));
    }
    Ok(Place::File(path))
}

/// A transaction on some connection, and its time.
struct Tx<'c> {
    conn: &'c Connection,
    clock: Cell<Option<Clock>>,
}

#[derive(Clone, Copy)]
struct Clock {
    now: i64,
    pinned: bool,
}

impl<'c> Tx<'c> {
    fn new(conn: &'c Connection) -> Self {
        Tx { conn, clock: Cell::new(None) }
    }

    fn prepare(&self, sql: &str) -> Sql<CachedStatement<'c>> {
        Ok(self.conn.prepare_cached(sql)?)
    }

    fn execute(&self, sql: &str, params: impl Params) -> Sql<usize> {
        Ok(self.prepare(sql)?.execute(params)?)
    }

    /// The only row, or none.
    fn row<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Sql<Option<T>> {
        Ok(self.prepare(sql)?.query_row(params, read).optional()?)
    }

    /// All rows.
    fn rows<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Sql<Vec<T>> {
        let mut statement = self.prepare(sql)?;
        let rows = statement.query_map(params, read)?;
        Ok(rows.collect::<rusqlite::Result<_>>()?)
    }

    /// The engine's clock, the same throughout the transaction.
    fn now(&self) -> Sql<i64> {
        Ok(self.clock()?.now)
    }

    fn clock(&self) -> Sql<Clock> {
        const PINNED: &str = "
            select pinned
              from clock";
        if let Some(clock) = self.clock.get() {
            return Ok(clock);
        }
        // Read after the write lock was taken, so that of two processes the
        // later writer also has the later time.
        let pinned = self.row(PINNED, [], |row| row.get::<_, Option<i64>>(0))?.flatten();
        let clock = Clock { now: pinned.unwrap_or_else(host_clock), pinned: pinned.is_some() };
        self.clock.set(Some(clock));
        Ok(clock)
    }

    fn due(&self, when: When) -> Sql<i64> {
        Ok(match when {
            When::At(at) => at.timestamp_micros(),
            When::After(delay) => self.now()?.saturating_add(micros(delay)),
        })
    }
}

fn host_clock() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    micros(since)
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

fn instant(micros: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(micros).unwrap_or_default()
}

/// Reads columns as the domain knows them.
trait Columns {
    fn uuid(&self, column: usize) -> rusqlite::Result<Uuid>;
    fn job(&self, column: usize) -> rusqlite::Result<JobId>;
    fn worker(&self, column: usize) -> rusqlite::Result<WorkerId>;
    fn time(&self, column: usize) -> rusqlite::Result<DateTime<Utc>>;
    fn maybe_time(&self, column: usize) -> rusqlite::Result<Option<DateTime<Utc>>>;
    fn timeout(&self, column: usize) -> rusqlite::Result<Option<Duration>>;
    fn outcome(&self, column: usize) -> rusqlite::Result<Outcome>;
    fn list(&self, column: usize) -> rusqlite::Result<Vec<String>>;
    fn maybe_list(&self, column: usize) -> rusqlite::Result<Option<Vec<String>>>;
    fn json(&self, column: usize) -> rusqlite::Result<Option<Box<RawValue>>>;
}

impl Columns for Row<'_> {
    fn uuid(&self, column: usize) -> rusqlite::Result<Uuid> {
        self.get(column).map(Uuid::from_bytes)
    }

    fn job(&self, column: usize) -> rusqlite::Result<JobId> {
        self.uuid(column).map(JobId)
    }

    fn worker(&self, column: usize) -> rusqlite::Result<WorkerId> {
        self.uuid(column).map(WorkerId)
    }

    fn time(&self, column: usize) -> rusqlite::Result<DateTime<Utc>> {
        self.get(column).map(instant)
    }

    fn maybe_time(&self, column: usize) -> rusqlite::Result<Option<DateTime<Utc>>> {
        Ok(self.get::<_, Option<i64>>(column)?.map(instant))
    }

    fn timeout(&self, column: usize) -> rusqlite::Result<Option<Duration>> {
        let ms = self.get::<_, Option<i64>>(column)?;
        Ok(ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis))
    }

    fn outcome(&self, column: usize) -> rusqlite::Result<Outcome> {
        decoded(self.get_ref(column)?, Outcome::from_stored)
    }

    fn list(&self, column: usize) -> rusqlite::Result<Vec<String>> {
        match self.get_ref(column)? {
            ValueRef::Null => Ok(Vec::new()),
            text => decoded(text, |text| serde_json::from_str(text)),
        }
    }

    fn maybe_list(&self, column: usize) -> rusqlite::Result<Option<Vec<String>>> {
        match self.get_ref(column)? {
            ValueRef::Null => Ok(None),
            _ => self.list(column).map(Some),
        }
    }

    fn json(&self, column: usize) -> rusqlite::Result<Option<Box<RawValue>>> {
        match self.get_ref(column)? {
            ValueRef::Null => Ok(None),
            text => decoded(text, |text| RawValue::from_string(text.to_owned())).map(Some),
        }
    }
}

fn decoded<T, E>(value: ValueRef<'_>, decode: impl FnOnce(&str) -> Result<T, E>) -> rusqlite::Result<T>
where
    E: std::error::Error + Send + Sync + 'static,
{
    decode(value.as_str()?).map_err(|error| rusqlite::types::FromSqlError::Other(Box::new(error)).into())
}

/// A list as its column holds it: JSON, or nothing.
fn stored_list(list: &[String]) -> Sql<Option<String>> {
    match list.is_empty() {
        true => Ok(None),
        false => json_list(list).map(Some),
    }
}

fn json_list(list: &[String]) -> Sql<String> {
    let json = serde_json::to_string(list);
    json.map_err(|error| Error::internal("a list of strings does not encode").with_source(error).into())
}

/// What a piece of work comes to inside the engine.
type Sql<T> = Result<T, Fault>;

/// Why it failed: the driver's error, or already one of ours. Kept apart from
/// [`Error`] so that no driver type enters the public API.
#[derive(Debug)]
enum Fault {
    Driver(rusqlite::Error),
    Ours(Error),
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Fault::Driver(error)
    }
}

impl From<rusqlite::types::FromSqlError> for Fault {
    fn from(error: rusqlite::types::FromSqlError) -> Self {
        Fault::Driver(error.into())
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Ours(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        let error = match fault {
            Fault::Driver(error) => error,
            Fault::Ours(error) => return error,
        };
        let said = error.to_string();
        let told = match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                Error::unavailable("another process has kept the database locked for 5 s; try again")
            }
            Some(ErrorCode::ReadOnly) => Error::read_only(
                "the database file or its folder cannot be written; give this user write access to both",
            ),
            Some(ErrorCode::DiskFull) => {
                Error::unavailable("the disk that holds the database is full; free some space and try again")
            }
            Some(ErrorCode::CannotOpen | ErrorCode::SystemIoFailure | ErrorCode::OutOfMemory) => {
                Error::unavailable(format!("the database file cannot be used ({said}); try again"))
            }
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
                Error::internal(format!("the database file is damaged ({said}); restore it from a backup"))
            }
            _ if said.contains("no such table") => {
                Error::schema("the database has no queue tables; run `longshore migrate`")
            }
            _ if said.contains("no such column") || said.contains("has no column") => {
                Error::schema("the queue tables are of another version; run `longshore migrate`")
            }
            _ => Error::internal(format!("the database refused a statement: {said}")),
        };
        told.with_source(error)
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn migrate(&self) -> Result<Migrated> {
        // Most calls find nothing to do; those need not wait for a writer.
        let found = self.schema_version().await?;
        if found == SCHEMA_VERSION {
            return Ok(Migrated { from: found, to: found });
        }
        self.engine.write(migrate).await
    }

    async fn schema_version(&self) -> Result<i64> {
        self.engine.read(schema_version).await
    }

    async fn now(&self) -> Result<DateTime<Utc>> {
        self.engine.read(|tx| tx.now().map(instant)).await
    }

    async fn pin_clock(&self, at: Option<DateTime<Utc>>) -> Result<()> {
        self.engine.write(move |tx| pin_clock(tx, at)).await
    }

    fn with_own_connection(&self) -> Arc<dyn Store> {
        // The one writing thread serves all callers and never waits for a handler.
        Arc::new(self.clone())
    }

    async fn enqueue(&self, jobs: &[ValidJob], _: KeyWait) -> Result<Vec<Enqueued>> {
        // There is one writer at a time, so no open transaction can hold a key.
        let jobs = jobs.to_vec();
        self.engine.write(move |tx| enqueue::enqueue(tx, &jobs)).await
    }

    fn notify_local(&self, queues: &[String]) -> bool {
        self.engine.notify(queues)
    }

    async fn notify_others(&self, _: &[String]) -> Result<()> {
        // Other processes notice the commit by themselves: `data_version` changes.
        Ok(())
    }

    async fn subscribe(&self) -> Result<Wakeups> {
        Ok(Wakeups(self.engine.subscribe()))
    }

    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims> {
        let (request, mut moved) = (request.clone(), std::mem::take(cursor));
        let work = move |tx: &Tx<'_>| {
            let claims = claim::claim(tx, &request, &mut moved)?;
            Ok((claims, moved))
        };
        let (claims, moved) = self.engine.write(work).await?;
        *cursor = moved;
        Ok(claims)
    }

    async fn claims(&self, leases: &[Lease]) -> Result<Vec<Option<Claimed>>> {
        let leases = leases.to_vec();
        self.engine.read(move |tx| claim::claims(tx, &leases)).await
    }

    async fn mark_started(&self, lease: &Lease) -> Result<Fenced> {
        let lease = *lease;
        self.engine.write(move |tx| flow::mark_started(tx, &lease)).await
    }

    async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        reports.iter().try_for_each(|(_, progress)| check_json("progress", progress.get(), MAX_PAYLOAD))?;
        let reports = reports.to_vec();
        self.engine.write(move |tx| flow::progress(tx, &reports)).await
    }

    async fn save_checkpoint(&self, lease: &Lease, data: &RawValue) -> Result<Fenced> {
        check_json("checkpoint", data.get(), MAX_PAYLOAD)?;
        let (lease, data) = (*lease, data.to_owned());
        self.engine.write(move |tx| flow::save_checkpoint(tx, &lease, &data)).await
    }

    async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>> {
        self.engine.read(move |tx| flow::checkpoint(tx, id)).await
    }

    async fn assert_lease(&self, lease: &Lease) -> Result<Fenced> {
        let lease = *lease;
        self.engine.read(move |tx| flow::assert_lease(tx, &lease)).await
    }

    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>> {
        let settlements = settlements.to_vec();
        self.engine.write(move |tx| settle::settle(tx, &settlements)).await?
    }

    async fn register(&self, worker: &NewWorker) -> Result<()> {
        let worker = worker.clone();
        self.engine.write(move |tx| flow::register(tx, &worker)).await
    }

    async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat> {
        let held = held.to_vec();
        self.engine.write(move |tx| flow::beat(tx, worker, &held)).await
    }

    async fn leases(&self, worker: WorkerId) -> Result<Vec<Lease>> {
        self.engine.read(move |tx| flow::leases(tx, worker)).await
    }

    async fn retire(&self, worker: WorkerId) -> Result<()> {
        self.engine.write(move |tx| flow::retire(tx, worker)).await
    }

    async fn workers(&self, threshold: Option<Duration>) -> Result<Vec<WorkerRecord>> {
        self.engine.read(move |tx| inspect::workers(tx, threshold)).await
    }

    async fn mark_dead(&self, threshold: Option<Duration>) -> Result<Vec<WorkerId>> {
        self.engine.write(move |tx| upkeep::mark_dead(tx, threshold)).await
    }

    async fn interrupted(&self, scope: &SweepScope) -> Result<Vec<Interrupted>> {
        let scope = scope.clone();
        self.engine.read(move |tx| upkeep::interrupted(tx, &scope)).await
    }

    async fn recover(&self, recoveries: &[(Interruptor, Settlement)]) -> Result<Vec<Settled>> {
        let recoveries = recoveries.to_vec();
        self.engine.write(move |tx| upkeep::recover(tx, &recoveries)).await?
    }

    async fn locate(&self, id: JobId) -> Result<Option<State>> {
        self.engine.read(move |tx| operate::locate(tx, id)).await
    }

    async fn operate(&self, id: JobId, from: &State, to: &Operation) -> Result<Operated> {
        let (from, to) = (from.clone(), to.clone());
        self.engine.write(move |tx| operate::operate(tx, id, &from, &to)).await
    }

    async fn dead_letters(&self, filter: &DeadFilter) -> Result<Vec<JobId>> {
        let filter = filter.clone();
        self.engine.read(move |tx| operate::dead_letters(tx, &filter)).await
    }

    async fn set_queue(&self, name: &str, change: &QueueChange) -> Result<()> {
        let (name, change) = (name.to_owned(), change.clone());
        self.engine.write(move |tx| operate::set_queue(tx, &name, &change)).await
    }

    async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.engine.read(inspect::queues).await
    }

    async fn get(&self, id: JobId) -> Result<Option<JobRecord>> {
        self.engine.read(move |tx| list::get(tx, id)).await
    }

    async fn list(&self, filter: &ListFilter) -> Result<Page> {
        filter.validate()?;
        let filter = filter.clone();
        self.engine.read(move |tx| list::list(tx, &filter)).await
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        self.engine.read(inspect::counts).await
    }

    async fn glance(&self, most: u32, also: &[JobId]) -> Result<Vec<Glance>> {
        let also = also.to_vec();
        self.engine.read(move |tx| glance::glance(tx, most, &also)).await
    }

    async fn overdue(&self) -> Result<Vec<(String, Duration)>> {
        self.engine.read(inspect::overdue).await
    }

    async fn ahead(&self, id: JobId, kinds: Option<&[String]>, most: u32) -> Result<Option<Ahead>> {
        let kinds = kinds.map(<[_]>::to_vec);
        self.engine.read(move |tx| inspect::ahead(tx, id, kinds.as_deref(), most)).await
    }

    async fn tallied(&self, since: DateTime<Utc>) -> Result<Vec<Tallied>> {
        self.engine.read(move |tx| inspect::tallied(tx, since)).await
    }

    async fn check(&self) -> Result<CheckReport> {
        self.engine.read(inspect::check).await
    }

    async fn put_schedule(&self, schedule: &Schedule) -> Result<Schedule> {
        schedule.validate()?;
        let schedule = schedule.clone();
        self.engine.write(move |tx| upkeep::put_schedule(tx, &schedule)).await
    }

    async fn schedules(&self) -> Result<Vec<Schedule>> {
        self.engine.read(upkeep::schedules).await
    }

    async fn set_ticking(&self, name: &str, ticking: Ticking) -> Result<bool> {
        let name = name.to_owned();
        self.engine.write(move |tx| upkeep::set_ticking(tx, &name, ticking)).await
    }

    async fn remove_schedule(&self, name: &str) -> Result<bool> {
        let name = name.to_owned();
        self.engine.write(move |tx| upkeep::remove_schedule(tx, &name)).await
    }

    async fn fire(
        &self,
        seen: &Schedule,
        next: DateTime<Utc>,
        fired: Option<DateTime<Utc>>,
        jobs: &[ValidJob],
    ) -> Result<Option<Vec<Enqueued>>> {
        let (seen, jobs) = (seen.clone(), jobs.to_vec());
        self.engine.write(move |tx| upkeep::fire(tx, &seen, next, fired, &jobs)).await
    }

    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained> {
        let policy = *policy;
        self.engine.write(move |tx| upkeep::retain(tx, &policy, step)).await
    }

    async fn fold_tallies(&self, step: u32) -> Result<u64> {
        self.engine.write(move |tx| upkeep::fold_tallies(tx, step)).await
    }

    async fn put_token(&self, token: &NewToken) -> Result<()> {
        token.validate()?;
        let token = token.clone();
        self.engine.write(move |tx| access::put_token(tx, &token)).await
    }

    async fn token(&self, hash: &[u8; 32]) -> Result<Option<TokenRecord>> {
        let hash = *hash;
        self.engine.read(move |tx| access::token(tx, &hash)).await
    }

    async fn tokens(&self) -> Result<Vec<TokenRecord>> {
        self.engine.read(access::tokens).await
    }

    async fn revoke_token(&self, id: Uuid) -> Result<bool> {
        self.engine.write(move |tx| access::revoke_token(tx, id)).await
    }

    async fn put_kinds(&self, kinds: &[NewKind]) -> Result<()> {
        kinds.iter().try_for_each(NewKind::validate)?;
        let kinds = kinds.to_vec();
        self.engine.write(move |tx| access::put_kinds(tx, &kinds)).await
    }

    async fn kinds(&self) -> Result<Vec<KindRecord>> {
        self.engine.read(access::kinds).await
    }

    async fn remove_kind(&self, name: &str) -> Result<bool> {
        let name = name.to_owned();
        self.engine.write(move |tx| access::remove_kind(tx, &name)).await
    }
}

/// Runs what is missing, in the transaction it is called in.
fn migrate(tx: &Tx<'_>) -> Sql<Migrated> {
    const LEDGER: &str = "
        create table if not exists migrations (
            version          integer primary key,
            applied_at       integer not null
        ) strict";
    const RECORD: &str = "
        insert into migrations (version, applied_at)
        values (?1, ?2)";
    let from = schema_version(tx)?;
    if from > SCHEMA_VERSION {
        return Err(newer(from).into());
    }
    tx.conn.execute_batch(LEDGER)?;
    for (version, script) in MIGRATIONS {
        if version > from {
            tx.conn.execute_batch(script)?;
            tx.execute(RECORD, params![version, host_clock()])?;
        }
    }
    Ok(Migrated { from, to: SCHEMA_VERSION })
}

fn schema_version(tx: &Tx<'_>) -> Sql<i64> {
    const HAS_LEDGER: &str = "
        select 1
          from sqlite_master
         where type = 'table'
           and name = 'migrations'";
    const NEWEST: &str = "
        select coalesce(max(version), 0)
          from migrations";
    if tx.row(HAS_LEDGER, [], |_| Ok(()))?.is_none() {
        return Ok(0);
    }
    Ok(tx.row(NEWEST, [], |row| row.get(0))?.unwrap_or(0))
}

fn pin_clock(tx: &Tx<'_>, at: Option<DateTime<Utc>>) -> Sql<()> {
    const PIN: &str = "
        update clock
           set pinned = ?1";
    tx.execute(PIN, params![at.map(|at| at.timestamp_micros())])?;
    Ok(())
}
