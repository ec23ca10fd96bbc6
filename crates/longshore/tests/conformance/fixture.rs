//! The fixture: a queue of its own for every case, on either engine, with the
//! clock stopped. A case ends with a proof that every job is in one place.

use std::future::Future;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::{DateTime, TimeZone, Utc};
use longshore::lifecycle::State;
use longshore::store::{
    ClaimCursor, ClaimRequest, Claimed, Fenced, Lease, NewWorker, SweepScope, WorkerRecord,
};
use longshore::{
    AttemptEnd, Client, Ending, Interruption, JobId, JobRecord, NewJob, Outcome, Report, Status,
    SweepOptions, SweepReport, WorkerId,
};
use serde_json::value::RawValue;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const MINUTE: Duration = Duration::from_secs(60);
pub(crate) const HOUR: Duration = Duration::from_secs(60 * 60);
pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    Postgres,
    Sqlite,
}

/// A queue database and a client of it. Clones are the same database.
#[derive(Clone)]
pub(crate) struct Fixture(Arc<Inner>);

struct Inner {
    engine: Engine,
    place: Database,
    client: Client,
    /// Other databases the case asked for, to be removed with this one.
    others: Mutex<Vec<Database>>,
    damaged: AtomicBool,
}

#[derive(Clone, Debug)]
enum Database {
    Schema(String),
    File(PathBuf),
}

/// Runs one case on one engine: what the `cases!` macro calls.
pub(crate) async fn run<Case, Run>(engine: Engine, case: Case)
where
    Case: FnOnce(Fixture) -> Run,
    Run: Future<Output = ()> + Send + 'static,
{
    let fixture = Fixture::open(engine).await;
    // A task of its own, so that a panic can be caught and the database removed.
    let ended = tokio::spawn(case(fixture.clone())).await;
    let report = match ended.is_ok() && !fixture.0.damaged.load(Ordering::Relaxed) {
        true => Some(fixture.check().await),
        false => None,
    };
    fixture.remove().await;
    if let Err(died) = ended {
        std::panic::resume_unwind(died.into_panic());
    }
    if let Some(report) = report {
        assert_eq!(report.expect("check").problems, Vec::<String>::new(), "the case left damage behind");
    }
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
        let place = Database::fresh(engine);
        let client = Client::connect(&place.url()).await.expect("the engine opens");
        client.migrate().await.expect("the tables are made");
        client.store().pin_clock(Some(start())).await.expect("the clock stops");
        Fixture(Arc::new(Inner {
            engine,
            place,
            client,
            others: Mutex::default(),
            damaged: AtomicBool::new(false),
        }))
    }

    async fn remove(&self) {
        let others = std::mem::take(&mut *self.0.others.lock().expect("others"));
        for place in others.iter().chain([&self.0.place]) {
            place.remove().await;
        }
    }

    pub(crate) fn engine(&self) -> Engine {
        self.0.engine
    }

    /// How to reach this database.
    pub(crate) fn url(&self) -> String {
        self.0.place.url()
    }

    /// The file of a SQLite fixture.
    pub(crate) fn file(&self) -> &PathBuf {
        match &self.0.place {
            Database::File(path) => path,
            Database::Schema(_) => panic!("a Postgres fixture has no file"),
        }
    }

    /// This fixture's own handle, for a task to keep.
    pub(crate) fn handle(&self) -> Client {
        self.0.client.clone()
    }

    /// Another handle to the same database, as another process would have.
    pub(crate) async fn second(&self) -> Client {
        Client::connect(&self.url()).await.expect("a second handle opens")
    }

    /// The URL of a database without tables, removed with this one.
    pub(crate) fn bare_url(&self) -> String {
        let place = Database::fresh(self.0.engine);
        let url = place.url();
        self.0.others.lock().expect("others").push(place);
        url
    }

    /// For cases that plant damage or leave the database unusable.
    pub(crate) fn skip_the_final_check(&self) {
        self.0.damaged.store(true, Ordering::Relaxed);
    }

    /// Runs SQL behind the engine's back. The tables have the same names on
    /// both; `{id}` stands for the id's literal.
    pub(crate) async fn sql(&self, text: &str, id: Option<JobId>) {
        let text = self.fill(text, id);
        match &self.0.place {
            Database::Schema(schema) => {
                let mut connection = postgres(schema).await;
                sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut connection).await.expect("raw sql");
            }
            Database::File(path) => {
                let connection = rusqlite::Connection::open(path).expect("raw connection");
                connection.busy_timeout(5 * SECOND).expect("busy timeout");
                connection.execute_batch(&text).expect("raw sql");
            }
        }
    }

    /// Asks SQL behind the engine's back for one number.
    pub(crate) async fn ask(&self, text: &str, id: Option<JobId>) -> i64 {
        let text = self.fill(text, id);
        match &self.0.place {
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

    /// A raw connection that finds our tables without naming the schema.
    pub(crate) async fn postgres(&self) -> PgConnection {
        match &self.0.place {
            Database::Schema(schema) => postgres(schema).await,
            Database::File(_) => panic!("a SQLite fixture has no Postgres connection"),
        }
    }

    fn fill(&self, text: &str, id: Option<JobId>) -> String {
        let Some(id) = id else { return text.into() };
        text.replace("{id}", &self.literal(id.0))
    }

    /// A uuid as this engine's SQL writes it.
    pub(crate) fn literal(&self, id: Uuid) -> String {
        match self.0.engine {
            Engine::Postgres => format!("'{id}'::uuid"),
            Engine::Sqlite => format!("x'{}'", id.simple()),
        }
    }
}

impl Database {
    fn fresh(engine: Engine) -> Self {
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
            // Best effort: a schema left behind harms nobody.
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

/// Adds a parameter to a URL that may have some already.
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

/// Where every case's clock stands: no round number, and not today.
pub(crate) fn start() -> DateTime<Utc> {
    Utc.with_ymd_and_hms(2031, 5, 6, 7, 8, 9).single().expect("a real instant")
}

impl Fixture {
    pub(crate) async fn now(&self) -> DateTime<Utc> {
        self.store().now().await.expect("now")
    }

    /// Moves the stopped clock on.
    pub(crate) async fn advance(&self, by: Duration) {
        let now = self.now().await;
        self.store().pin_clock(Some(now + by)).await.expect("the clock moves");
    }
}

// ---- enqueue, claim, settle --------------------------------------------------

/// A job of `kind` whose payload says so.
pub(crate) fn job(kind: &str) -> NewJob {
    NewJob::new(kind, &serde_json::json!({ "for": kind }))
}

pub(crate) fn raw(json: &str) -> Box<RawValue> {
    RawValue::from_string(json.into()).expect("JSON")
}

impl Fixture {
    /// Enqueues a job of `kind` with every default.
    pub(crate) async fn enqueue_kind(&self, kind: &str) -> JobId {
        self.add(job(kind)).await
    }

    /// Enqueues a job that must be new.
    pub(crate) async fn add(&self, job: NewJob) -> JobId {
        let enqueued = self.enqueue(job).await.expect("enqueue");
        assert_eq!(enqueued.how, longshore::EnqueuedAs::Created);
        enqueued.id
    }

    /// A worker that has just registered, dead after a minute without a beat.
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
        self.claim_as(&ClaimRequest::new(worker, limit)).await
    }

    /// Claims from one queue.
    pub(crate) async fn claim_from(&self, queue: &str, worker: WorkerId, limit: u32) -> Vec<Claimed> {
        self.claim_as(&ClaimRequest { queues: vec![queue.into()], ..ClaimRequest::new(worker, limit) }).await
    }

    /// Claims with a cursor that remembers nothing.
    pub(crate) async fn claim_as(&self, request: &ClaimRequest) -> Vec<Claimed> {
        self.store().claim(request, &mut ClaimCursor::default()).await.expect("claim").jobs
    }

    /// Claims the one job that can be claimed.
    pub(crate) async fn claim_one(&self, worker: WorkerId) -> Claimed {
        let mut claimed = self.claim(worker, 2).await;
        assert_eq!(claimed.len(), 1, "{claimed:?}");
        claimed.remove(0)
    }

    /// Enqueues a job and claims it for a worker of its own. Works only while
    /// nothing else waits in the default queue.
    pub(crate) async fn running(&self, job: NewJob) -> Claimed {
        let id = self.add(job).await;
        let worker = self.worker().await;
        let claimed = self.claim_one(worker).await;
        assert_eq!(claimed.lease().id, id);
        claimed
    }

    pub(crate) async fn finish(&self, claimed: &Claimed, ending: Ending) -> Fenced {
        let report = Report { claimed, ending, follow_ups: Vec::new() };
        self.settle(vec![report]).await.expect("settle").remove(0)
    }

    /// Settles a lease that is known to be live.
    pub(crate) async fn must_finish(&self, claimed: &Claimed, ending: Ending) {
        assert_eq!(self.finish(claimed, ending).await, Fenced::Held);
    }

    /// A job that has ended.
    pub(crate) async fn ended(&self, job: NewJob, outcome: Outcome) -> JobId {
        let claimed = self.running(job).await;
        let ending = match outcome {
            Outcome::Succeeded => done(),
            Outcome::FailedPermanent => failed_for_good(),
            Outcome::Cancelled => gave_up(),
        };
        self.must_finish(&claimed, ending).await;
        claimed.lease().id
    }
}

// ---- endings -----------------------------------------------------------------

pub(crate) fn done() -> Ending {
    Ending::Succeeded { result: Some(raw(r#"{"sent": 3}"#)) }
}

/// A success that leaves nothing to remember. An engine may store such ends by
/// a shorter way than the others, so that each promise is asked of both.
pub(crate) fn done_plainly() -> Ending {
    Ending::Succeeded { result: None }
}

/// As that, but not whatever the flags say.
pub(crate) fn gave_up_plainly() -> Ending {
    Ending::Cancelled { reason: None }
}

/// A failure that may be tried again in ten seconds.
pub(crate) fn failed() -> Ending {
    Ending::Failed { error: "smtp said 451".into(), retry_in: Some(10 * SECOND) }
}

pub(crate) fn failed_for_good() -> Ending {
    Ending::Failed { error: "no such mailbox".into(), retry_in: None }
}

pub(crate) fn gave_up() -> Ending {
    Ending::Cancelled { reason: Some("saw the cancellation".into()) }
}

pub(crate) fn snoozed() -> Ending {
    Ending::Snoozed { delay: 20 * SECOND }
}

pub(crate) fn interrupted() -> Ending {
    Ending::Interrupted(Interruption { delay: 30 * SECOND, max_interruptions: 3 })
}

/// Every ending there is, with everything that it can leave behind.
pub(crate) fn endings() -> [Ending; 7] {
    [done(), failed(), failed_for_good(), gave_up(), snoozed(), Ending::Released, interrupted()]
}

// ---- recovery ----------------------------------------------------------------

impl Fixture {
    pub(crate) async fn sweep_now(&self) -> SweepReport {
        self.sweep(&SweepOptions::default()).await.expect("sweep")
    }

    /// Lets every worker die and its jobs go back to the queue, due at once.
    pub(crate) async fn crash_all_workers(&self) -> SweepReport {
        self.advance(HOUR / 2).await;
        let options = SweepOptions {
            scope: SweepScope { resilient_factor: 1, ..SweepScope::default() },
            interruption: Interruption { delay: Duration::ZERO, ..Interruption::default() },
            ..SweepOptions::default()
        };
        self.sweep(&options).await.expect("sweep")
    }

    /// A job that has been interrupted once and waits, due.
    pub(crate) async fn suspect(&self, job: NewJob) -> JobId {
        let claimed = self.running(job).await;
        assert_eq!(self.crash_all_workers().await.recovered, 1);
        claimed.lease().id
    }
}

// ---- looking -----------------------------------------------------------------

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

    /// How many jobs are in `status`, by the counts.
    pub(crate) async fn counted(&self, status: Status) -> u64 {
        let counts = self.counts().await.expect("counts");
        counts.iter().filter(|count| count.status == status).map(|count| count.jobs).sum()
    }
}

/// What must not change when nothing may: the record without its clock-free
/// noise, as text.
pub(crate) fn picture(job: &JobRecord) -> String {
    serde_json::to_string(job).expect("a record is JSON")
}

pub(crate) fn ids(claimed: &[Claimed]) -> Vec<JobId> {
    claimed.iter().map(|job| job.lease().id).collect()
}

pub(crate) fn kinds(claimed: &[Claimed]) -> Vec<&str> {
    claimed.iter().map(Claimed::kind).collect()
}

/// A lease as its claim gave it, but held by somebody else.
pub(crate) fn stolen(lease: Lease, worker: WorkerId) -> Lease {
    Lease { worker, ..lease }
}
