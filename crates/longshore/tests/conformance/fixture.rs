//! The fixture of a case: its own empty database on one engine, with a pinned clock,
//! and shortcuts to enqueue, claim, settle and inspect. After each case the fixture
//! checks that every job is in exactly one place.

use std::future::Future;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::{DateTime, TimeZone, Utc};
use longshore::rules::lifecycle::State;
use longshore::store::{ClaimCursor, ClaimRequest, Claimed, Fenced, NewWorker};
use longshore::{
    AttemptEnd, Client, Ending, Interruption, JobId, JobRecord, Lease, NewJob, Outcome, Report, Status,
    SweepOptions, SweepReport, SweepScope, WorkerId, WorkerRecord,
};
use serde_json::value::RawValue;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const MINUTE: Duration = Duration::from_secs(60);
pub(crate) const HOUR: Duration = Duration::from_secs(60 * 60);
pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How long a case waits for something that must happen. Only a case that hangs takes so long, however
/// slow the machine is: no rule may depend on it.
pub(crate) const MAX_WAIT: Duration = MINUTE;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    Postgres,
    Sqlite,
}

/// A database and a client connected to it. Clones share both.
#[derive(Clone)]
pub(crate) struct Fixture(Arc<Inner>);

struct Inner {
    engine: Engine,
    database: Database,
    client: Client,
    /// Further databases that the case requested. They are removed with this one.
    others: Mutex<Vec<Database>>,
    skip_check: AtomicBool,
}

#[derive(Clone, Debug)]
enum Database {
    Schema(String),
    File(PathBuf),
}

/// Runs one case on one engine. The `cases!` macro calls it.
pub(crate) async fn run<Case, Run>(engine: Engine, case: Case)
where
    Case: FnOnce(Fixture) -> Run,
    Run: Future<Output = ()> + Send + 'static,
{
    let fixture = Fixture::open(engine).await;
    // The case runs in its own task, so that the database is removed after a panic too.
    let ended = tokio::spawn(case(fixture.clone())).await;
    let must_check = ended.is_ok() && !fixture.0.skip_check.load(Ordering::Relaxed);
    let report = if must_check { Some(fixture.check().await) } else { None };
    fixture.remove().await;
    if let Err(panicked) = ended {
        std::panic::resume_unwind(panicked.into_panic());
    }
    if let Some(report) = report {
        assert_eq!(report.expect("check").problems, [], "the case left inconsistent rows");
    }
}

/// Runs a case that compares both engines, SQLite first.
pub(crate) async fn run_on_both<Case, Run>(case: Case) -> Run::Output
where
    Case: FnOnce([Fixture; 2]) -> Run,
    Run: Future<Output: Send + 'static> + Send + 'static,
{
    let sides = [Fixture::open(Engine::Sqlite).await, Fixture::open(Engine::Postgres).await];
    let ended = tokio::spawn(case(sides.clone())).await;
    for side in sides {
        side.remove().await;
    }
    ended.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
}

/// A number that a developer sets to repeat a random case or to run more of them.
pub(crate) fn number_in_environment(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}: `{text}` is not a number")))
}

impl Deref for Fixture {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.0.client
    }
}

// ---- databases ---------------------------------------------------------------

impl Fixture {
    async fn open(engine: Engine) -> Self {
        let database = Database::new(engine);
        let client = Client::connect(&database.url()).await.expect("connect");
        client.migrate().await.expect("migrate");
        client.store().pin_clock(Some(start())).await.expect("pin_clock");
        Fixture(Arc::new(Inner {
            engine,
            database,
            client,
            others: Mutex::default(),
            skip_check: AtomicBool::new(false),
        }))
    }

    async fn remove(&self) {
        let others = std::mem::take(&mut *self.0.others.lock().expect("others"));
        for database in others.iter().chain([&self.0.database]) {
            database.remove().await;
        }
    }

    pub(crate) fn engine(&self) -> Engine {
        self.0.engine
    }

    /// The URL of this database.
    pub(crate) fn url(&self) -> String {
        self.0.database.url()
    }

    /// The file of a SQLite database.
    pub(crate) fn file(&self) -> &PathBuf {
        match &self.0.database {
            Database::File(path) => path,
            Database::Schema(_) => panic!("a Postgres database has no file"),
        }
    }

    /// A clone of this fixture's client, for a task to own.
    pub(crate) fn client(&self) -> Client {
        self.0.client.clone()
    }

    /// A separate client of the same database, as another process would have.
    pub(crate) async fn second_client(&self) -> Client {
        Client::connect(&self.url()).await.expect("connect")
    }

    /// The URL of a new database without tables. It is removed with this one.
    pub(crate) fn bare_url(&self) -> String {
        let database = Database::new(self.0.engine);
        let url = database.url();
        self.0.others.lock().expect("others").push(database);
        url
    }

    /// For cases that corrupt rows on purpose or leave the database unusable.
    pub(crate) fn skip_final_check(&self) {
        self.0.skip_check.store(true, Ordering::Relaxed);
    }

    /// Runs SQL on its own connection. Table names are the same on both
    /// engines; `{id}` is replaced by the literal of `id`.
    pub(crate) async fn sql(&self, text: &str, id: Option<JobId>) {
        self.try_sql(text, id).await.expect("raw sql");
    }

    /// As [`sql`](Self::sql); returns the database's message if it refuses the statement.
    pub(crate) async fn try_sql(&self, text: &str, id: Option<JobId>) -> Result<(), String> {
        let text = self.fill(text, id);
        match &self.0.database {
            Database::Schema(schema) => {
                let mut connection = postgres(schema).await;
                let done = sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut connection).await;
                if done.is_err() {
                    // The server reports an error before it releases the locks of the statement.
                    connection.ping().await.expect("the statement has ended");
                }
                done.map(drop).map_err(|error| error.to_string())
            }
            Database::File(path) => {
                let connection = rusqlite::Connection::open(path).expect("raw connection");
                connection.busy_timeout(5 * SECOND).expect("busy timeout");
                connection.execute_batch(&text).map_err(|error| error.to_string())
            }
        }
    }

    /// Runs SQL on its own connection and returns the one number it selects.
    pub(crate) async fn query_number(&self, text: &str, id: Option<JobId>) -> i64 {
        let text = self.fill(text, id);
        match &self.0.database {
            Database::Schema(schema) => {
                let mut connection = postgres(schema).await;
                sqlx::query_scalar(AssertSqlSafe(text)).fetch_one(&mut connection).await.expect("raw sql")
            }
            Database::File(path) => {
                let connection = rusqlite::Connection::open(path).expect("raw connection");
                connection.busy_timeout(5 * SECOND).expect("busy timeout");
                connection.query_row(&text, [], |row| row.get(0)).expect("raw sql")
            }
        }
    }

    /// A connection whose search path is the schema of this database.
    pub(crate) async fn postgres(&self) -> PgConnection {
        match &self.0.database {
            Database::Schema(schema) => postgres(schema).await,
            Database::File(_) => panic!("a SQLite database has no Postgres connection"),
        }
    }

    fn fill(&self, text: &str, id: Option<JobId>) -> String {
        let Some(id) = id else { return text.into() };
        text.replace("{id}", &self.literal(id.0))
    }

    /// The SQL literal of a uuid on this engine.
    pub(crate) fn literal(&self, id: Uuid) -> String {
        match self.0.engine {
            Engine::Postgres => format!("'{id}'::uuid"),
            Engine::Sqlite => format!("x'{}'", id.simple()),
        }
    }
}

/// A transaction of another client that keeps every result from being stored until it is released.
pub(crate) enum StoreLock {
    Postgres(PgConnection),
    Sqlite(rusqlite::Connection),
}

impl StoreLock {
    pub(crate) async fn new(fixture: &Fixture) -> Self {
        match fixture.engine() {
            Engine::Postgres => {
                let mut connection = fixture.postgres().await;
                let lock = "begin; lock table finished in share mode";
                sqlx::raw_sql(lock).execute(&mut connection).await.expect("lock");
                StoreLock::Postgres(connection)
            }
            Engine::Sqlite => {
                let connection = rusqlite::Connection::open(fixture.file()).expect("raw connection");
                connection.busy_timeout(5 * SECOND).expect("busy timeout");
                connection.execute_batch("begin immediate").expect("lock");
                StoreLock::Sqlite(connection)
            }
        }
    }

    pub(crate) async fn release(self) {
        match self {
            StoreLock::Postgres(mut connection) => {
                sqlx::raw_sql("rollback").execute(&mut connection).await.expect("rollback");
            }
            StoreLock::Sqlite(connection) => connection.execute_batch("rollback").expect("rollback"),
        }
    }
}

impl Database {
    fn new(engine: Engine) -> Self {
        let name = Uuid::now_v7().simple();
        match engine {
            Engine::Postgres => Database::Schema(format!("t_{name}")),
            Engine::Sqlite => Database::File(std::env::temp_dir().join(format!("longshore-{name}.db"))),
        }
    }

    fn url(&self) -> String {
        match self {
            Database::Schema(schema) => with_parameter(&database_url(), &format!("schema={schema}")),
            Database::File(path) => format!("sqlite:{}", path.display()),
        }
    }

    async fn remove(&self) {
        match self {
            // Best effort: a schema that is left over does no harm.
            Database::Schema(schema) => {
                let drop = format!("drop schema if exists {schema} cascade");
                if let Ok(mut connection) = PgConnection::connect(&database_url()).await {
                    let _ = sqlx::raw_sql(AssertSqlSafe(drop)).execute(&mut connection).await;
                }
            }
            Database::File(path) => {
                for suffix in ["", "-wal", "-shm"] {
                    let _ = std::fs::remove_file(format!("{}{suffix}", path.display()));
                }
            }
        }
    }
}

/// Adds a query parameter to a URL that may already have some.
pub(crate) fn with_parameter(url: &str, parameter: &str) -> String {
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}{parameter}")
}

pub(crate) fn database_url() -> String {
    std::env::var("LONGSHORE_TEST_DATABASE_URL").expect(
        "LONGSHORE_TEST_DATABASE_URL is not set: run `cargo xtask test`, which starts a Postgres and sets it",
    )
}

async fn postgres(schema: &str) -> PgConnection {
    let mut connection = PgConnection::connect(&database_url()).await.expect("raw connection");
    let path = format!("set search_path = {schema}");
    sqlx::raw_sql(AssertSqlSafe(path)).execute(&mut connection).await.expect("search_path");
    connection
}

// ---- the clock ---------------------------------------------------------------

/// The time at which the clock of every case is pinned: neither round nor today.
pub(crate) fn start() -> DateTime<Utc> {
    Utc.with_ymd_and_hms(2031, 5, 6, 7, 8, 9).single().expect("a valid time")
}

impl Fixture {
    pub(crate) async fn now(&self) -> DateTime<Utc> {
        self.store().now().await.expect("now")
    }

    /// Moves the pinned clock forward.
    pub(crate) async fn advance(&self, by: Duration) {
        let now = self.now().await;
        self.store().pin_clock(Some(now + by)).await.expect("pin_clock");
    }
}

// ---- enqueue, claim, settle --------------------------------------------------

/// A job of `kind` whose payload contains the kind.
pub(crate) fn job(kind: &str) -> NewJob {
    NewJob::new(kind, &serde_json::json!({ "for": kind }))
}

pub(crate) fn raw(json: &str) -> Box<RawValue> {
    RawValue::from_string(json.into()).expect("JSON")
}

impl Fixture {
    /// Enqueues a job of `kind` with default options.
    pub(crate) async fn enqueue_kind(&self, kind: &str) -> JobId {
        self.add(job(kind)).await
    }

    /// Enqueues a job that must be new.
    pub(crate) async fn add(&self, job: NewJob) -> JobId {
        let enqueued = self.enqueue(job).await.expect("enqueue");
        assert_eq!(enqueued.how, longshore::EnqueuedAs::Created);
        enqueued.id
    }

    /// Registers a worker that counts as dead after a minute without a heartbeat.
    pub(crate) async fn worker(&self) -> WorkerId {
        self.worker_with(MINUTE).await
    }

    pub(crate) async fn worker_with(&self, stale_after: Duration) -> WorkerId {
        let worker = NewWorker { stale_after, ..NewWorker::new("test") };
        self.store().register(&worker).await.expect("register");
        worker.id
    }

    pub(crate) async fn worker_record(&self, id: WorkerId) -> Option<WorkerRecord> {
        let workers = self.store().workers(None).await.expect("workers");
        workers.into_iter().find(|worker| worker.id == id)
    }

    /// Claims up to `limit` jobs of any kind from the default queue.
    pub(crate) async fn claim(&self, worker: WorkerId, limit: u32) -> Vec<Claimed> {
        self.claim_with(&ClaimRequest::new(worker, limit)).await
    }

    /// Claims from one queue.
    pub(crate) async fn claim_from(&self, queue: &str, worker: WorkerId, limit: u32) -> Vec<Claimed> {
        self.claim_with(&ClaimRequest { queues: vec![queue.into()], ..ClaimRequest::new(worker, limit) })
            .await
    }

    /// Claims with a new cursor.
    pub(crate) async fn claim_with(&self, request: &ClaimRequest) -> Vec<Claimed> {
        self.0.client.claim(request, &mut ClaimCursor::default()).await.expect("claim").jobs
    }

    /// Claims the only job that is due.
    pub(crate) async fn claim_one(&self, worker: WorkerId) -> Claimed {
        let mut claimed = self.claim(worker, 2).await;
        assert_eq!(claimed.len(), 1, "{claimed:?}");
        claimed.remove(0)
    }

    /// Enqueues a job and claims it for a new worker. No other job may wait in the
    /// default queue.
    pub(crate) async fn running(&self, job: NewJob) -> Claimed {
        let id = self.add(job).await;
        let worker = self.worker().await;
        let claimed = self.claim_one(worker).await;
        assert_eq!(claimed.lease().id, id);
        claimed
    }

    pub(crate) async fn finish(&self, claimed: &Claimed, ending: Ending) -> Fenced {
        let report = Report { claimed, ending, follow_ups: Vec::new(), has_progressed: false };
        self.settle(vec![report]).await.expect("settle").remove(0)
    }

    /// Settles a lease that is known to be live.
    pub(crate) async fn must_finish(&self, claimed: &Claimed, ending: Ending) {
        assert_eq!(self.finish(claimed, ending).await, Fenced::Held);
    }

    /// Enqueues a job and runs it to the given outcome.
    pub(crate) async fn ended(&self, job: NewJob, outcome: Outcome) -> JobId {
        let claimed = self.running(job).await;
        let ending = match outcome {
            Outcome::Succeeded => done(),
            Outcome::FailedPermanent => failed_permanently(),
            Outcome::Cancelled => observed_cancel(),
        };
        self.must_finish(&claimed, ending).await;
        claimed.lease().id
    }
}

// ---- endings -----------------------------------------------------------------

pub(crate) fn done() -> Ending {
    Ending::Succeeded { result: Some(raw(r#"{"sent": 3}"#)) }
}

/// A success with nothing to store apart from the end itself. An engine may use a
/// shorter statement for such ends, so cases about settling test both.
pub(crate) fn done_without_result() -> Ending {
    Ending::Succeeded { result: None }
}

/// As above, but unlike a success its end depends on the flags.
pub(crate) fn observed_cancel_without_reason() -> Ending {
    Ending::Cancelled { reason: None }
}

/// A failure that is retried after ten seconds.
pub(crate) fn failed() -> Ending {
    Ending::Failed { error: "smtp said 451".into(), retry_in: Some(10 * SECOND) }
}

pub(crate) fn failed_permanently() -> Ending {
    Ending::Failed { error: "no such mailbox".into(), retry_in: None }
}

pub(crate) fn observed_cancel() -> Ending {
    Ending::Cancelled { reason: Some("saw the cancellation".into()) }
}

pub(crate) fn snoozed() -> Ending {
    Ending::Snoozed { delay: 20 * SECOND }
}

pub(crate) fn interrupted() -> Ending {
    Ending::Interrupted(Interruption { delay: 30 * SECOND, max_interruptions: 3 })
}

/// The end of a claim whose handler never started.
pub(crate) fn not_started(claimed: &Claimed) -> Ending {
    Ending::NotStarted { run_at: claimed.run_at() }
}

/// Every ending of an attempt that started, each with all the data that it can carry.
pub(crate) fn endings() -> [Ending; 7] {
    [done(), failed(), failed_permanently(), observed_cancel(), snoozed(), Ending::Released, interrupted()]
}

// ---- recovery ----------------------------------------------------------------

impl Fixture {
    pub(crate) async fn sweep_now(&self) -> SweepReport {
        self.sweep(&SweepOptions::default()).await.expect("sweep")
    }

    /// Lets every worker become stale and recovers their jobs, due at once.
    pub(crate) async fn crash_all_workers(&self) -> SweepReport {
        self.advance(HOUR / 2).await;
        let options = SweepOptions {
            scope: SweepScope { resilient_factor: 1, ..SweepScope::default() },
            interruption: Interruption { delay: Duration::ZERO, ..Interruption::default() },
            ..SweepOptions::default()
        };
        self.sweep(&options).await.expect("sweep")
    }

    /// Enqueues a job and interrupts it once, so that it is due as a suspect.
    pub(crate) async fn suspect(&self, job: NewJob) -> JobId {
        let claimed = self.running(job).await;
        assert_eq!(self.crash_all_workers().await.recovered, 1);
        claimed.lease().id
    }
}

// ---- inspect -----------------------------------------------------------------

impl Fixture {
    pub(crate) async fn job(&self, id: JobId) -> JobRecord {
        self.get(id).await.expect("get")
    }

    pub(crate) async fn status(&self, id: JobId) -> Status {
        self.job(id).await.status
    }

    pub(crate) async fn state(&self, id: JobId) -> State {
        self.store().locate(id).await.expect("locate").expect("the job exists")
    }

    /// How the job's unsuccessful attempts ended, oldest first.
    pub(crate) async fn history(&self, id: JobId) -> Vec<AttemptEnd> {
        self.job(id).await.errors.iter().map(|attempt| attempt.what).collect()
    }

    /// The number of jobs in `status`, according to `Client::counts`.
    pub(crate) async fn count(&self, status: Status) -> u64 {
        let counts = self.counts().await.expect("counts");
        counts.iter().filter(|count| count.status == status).map(|count| count.jobs).sum()
    }
}

/// The whole record as JSON, to compare before and after.
pub(crate) fn snapshot(job: &JobRecord) -> String {
    serde_json::to_string(job).expect("JSON")
}

pub(crate) fn ids(claimed: &[Claimed]) -> Vec<JobId> {
    claimed.iter().map(|job| job.lease().id).collect()
}

pub(crate) fn kinds(claimed: &[Claimed]) -> Vec<&str> {
    claimed.iter().map(Claimed::kind).collect()
}

/// The same lease, but with another worker as its holder.
pub(crate) fn held_by(lease: Lease, worker: WorkerId) -> Lease {
    Lease { worker, ..lease }
}
