//! The test fixture: a queue for one test, the processes that work on it, and the
//! event log that all worker processes write.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use longshore::{Client, JobId, JobRecord, ListFilter, NewJob, Status};
use sqlx::Connection;

use crate::missing::skip;
use crate::worker::{Event, EventKind, WorkerConfig};

/// How long a test waits for an expected state. Only a test that hangs takes so long, and
/// the runner ends it a little later.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(150);
/// No worker is silent for so long because the machine is busy.
const LONG_THRESHOLD: Duration = Duration::from_secs(60);

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Turns each case into one test per engine.
macro_rules! on_every_engine {
    ($($case:ident),* $(,)?) => {
        mod sqlite {
            $(#[test] fn $case() { crate::fleet::Fleet::sqlite().run(async |fleet| super::$case(fleet).await) })*
        }
        mod postgres {
            $(#[test] fn $case() { crate::fleet::run_on_postgres(async |fleet| super::$case(fleet).await) })*
        }
    };
}
pub(crate) use on_every_engine;

/// Turns each case into a test on Postgres.
macro_rules! on_postgres {
    ($($case:ident),* $(,)?) => {
        $(mod $case {
            #[test] fn postgres() { crate::fleet::run_on_postgres(async |fleet| super::$case(fleet).await) }
        })*
    };
}
pub(crate) use on_postgres;

pub(crate) fn run_on_postgres(case: impl AsyncFnOnce(&mut Fleet)) {
    match std::env::var("LONGSHORE_TEST_DATABASE_URL") {
        Ok(database) => Fleet::postgres(&database).run(case),
        Err(_) => skip("LONGSHORE_TEST_DATABASE_URL is not set"),
    }
}

/// A queue and the processes that work on it.
pub(crate) struct Fleet {
    /// The configuration of the workers that are started from now on.
    pub(crate) config: WorkerConfig,
    folder: PathBuf,
    /// The database URL and the schema to drop at the end.
    schema: Option<(String, String)>,
    processes: Vec<Process>,
    client: Option<Client>,
}

impl Fleet {
    pub(crate) fn sqlite() -> Self {
        let folder = create_folder();
        let url = format!("sqlite:{}", folder.join("jobs.db").display());
        Fleet::new(url, folder, None)
    }

    pub(crate) fn postgres(database: &str) -> Self {
        let schema = format!("faults_{}", JobId::new().0.simple());
        let separator = if database.contains('?') { '&' } else { '?' };
        // The test database may have fsync off.
        let url = format!("{database}{separator}schema={schema}&durability=relaxed");
        Fleet::new(url, create_folder(), Some((database.to_owned(), schema)))
    }

    fn new(url: String, folder: PathBuf, schema: Option<(String, String)>) -> Self {
        let config = WorkerConfig {
            url,
            events: folder.join("events").display().to_string(),
            queues: vec!["default".into()],
            concurrency: 4,
            threads: 2,
            poll: ms(50),
            heartbeat: ms(150),
            threshold: LONG_THRESHOLD,
            sweep: ms(150),
            recovery_delay: ms(100),
            max_interruptions: 3,
            grace: ms(500),
        };
        Fleet { config, folder, schema, processes: Vec::new(), client: None }
    }

    /// Runs the case, then checks the database and removes everything.
    pub(crate) fn run(mut self, case: impl AsyncFnOnce(&mut Fleet)) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let client = Client::connect(&self.config.url).await.unwrap();
            client.migrate().await.unwrap();
            self.client = Some(client);
            case(&mut self).await;
            self.processes.clear();
            let problems = self.client().check().await.unwrap().problems;
            assert!(problems.is_empty(), "every job is in exactly one place: {problems:?}");
            self.client = None;
            if let Some((database, schema)) = self.schema.take() {
                let mut connection = sqlx::PgConnection::connect(&database).await.unwrap();
                let drop = format!("drop schema if exists {schema} cascade");
                sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&mut connection).await.unwrap();
            }
        });
    }

    pub(crate) fn client(&self) -> &Client {
        self.client.as_ref().unwrap()
    }

    /// A connection whose search path is the schema of this queue.
    pub(crate) async fn connect(&self) -> sqlx::PgConnection {
        let (database, schema) = self.schema.as_ref().unwrap();
        let mut connection = sqlx::PgConnection::connect(database).await.unwrap();
        let path = format!("set search_path = {schema}");
        sqlx::raw_sql(sqlx::AssertSqlSafe(path)).execute(&mut connection).await.unwrap();
        connection
    }

    // ---- processes -------------------------------------------------------

    /// Starts a worker process and returns its index for [`Fleet::process`].
    pub(crate) fn start(&mut self) -> usize {
        let config = self.config.clone();
        self.start_with(&config)
    }

    pub(crate) fn start_with(&mut self, config: &WorkerConfig) -> usize {
        self.spawn(&mut config.command())
    }

    /// Starts any process and returns its index for [`Fleet::process`].
    pub(crate) fn spawn(&mut self, command: &mut Command) -> usize {
        let index = self.processes.len();
        let stdout = self.folder.join(format!("stdout-{index}"));
        let stderr = self.folder.join(format!("stderr-{index}"));
        command.stdin(Stdio::null());
        command.stdout(File::create(&stdout).unwrap()).stderr(File::create(&stderr).unwrap());
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        self.processes.push(Process { child, stdout, stderr });
        index
    }

    /// Starts a worker process and waits until it has registered.
    pub(crate) async fn start_and_register(&mut self) -> usize {
        let before = self.registered_workers().await;
        let worker = self.start();
        self.wait_until("the worker registers", async |fleet| fleet.registered_workers().await > before)
            .await;
        worker
    }

    pub(crate) async fn registered_workers(&self) -> usize {
        self.client().workers(None).await.unwrap().len()
    }

    pub(crate) fn process(&mut self, index: usize) -> &mut Process {
        &mut self.processes[index]
    }

    /// Stops a process, but not while it writes to SQLite: nobody else could write then.
    pub(crate) async fn pause(&mut self, index: usize) {
        let began = Instant::now();
        loop {
            self.process(index).signal("STOP");
            if self.schema.is_some() {
                return;
            }
            let connection = rusqlite::Connection::open(self.folder.join("jobs.db")).unwrap();
            connection.busy_timeout(Duration::from_secs(1)).unwrap();
            if connection.execute_batch("begin immediate; rollback").is_ok() {
                return;
            }
            assert!(began.elapsed() < MAX_WAIT, "the database stays locked");
            self.process(index).signal("CONT");
        }
    }

    /// Lets the worker in a process that was killed or paused count as dead at once.
    pub(crate) async fn count_as_dead(&mut self, index: usize) {
        let stale =
            format!("update workers set stale_after_ms = 1 where pid = {}", self.process(index).pid());
        if self.schema.is_some() {
            let mut connection = self.connect().await;
            sqlx::raw_sql(sqlx::AssertSqlSafe(stale)).execute(&mut connection).await.unwrap();
        } else {
            let connection = rusqlite::Connection::open(self.folder.join("jobs.db")).unwrap();
            connection.busy_timeout(MAX_WAIT).unwrap();
            connection.execute_batch(&stale).unwrap();
        }
    }

    /// Kills a process, and lets its worker count as dead.
    pub(crate) async fn kill(&mut self, index: usize) {
        self.process(index).signal("KILL");
        self.process(index).wait_for_exit().await;
        self.count_as_dead(index).await;
    }

    // ---- jobs ------------------------------------------------------------

    /// Enqueues `count` jobs. `millis` is how long each lease takes, as in
    /// [`crate::worker`].
    pub(crate) async fn enqueue(&self, kind: &str, millis: &[u64], count: usize) -> Vec<JobId> {
        let mut ids = Vec::with_capacity(count);
        while ids.len() < count {
            let batch = (0..(count - ids.len()).min(5000)).map(|_| NewJob::new(kind, millis));
            let enqueued = self.client().enqueue_many(batch).await.unwrap();
            ids.extend(enqueued.into_iter().map(|job| job.id));
        }
        ids
    }

    /// Ends the leases that take [`crate::worker::UNTIL_OPENED`].
    pub(crate) fn open_gate(&self) {
        File::create(self.config.gate()).unwrap();
    }

    pub(crate) async fn get(&self, id: JobId) -> JobRecord {
        self.client().get(id).await.unwrap()
    }

    /// All jobs in the queue.
    pub(crate) async fn jobs(&self) -> Vec<JobRecord> {
        let mut filter = ListFilter { limit: ListFilter::MAX_LIMIT, ..ListFilter::default() };
        let mut jobs = Vec::new();
        loop {
            let page = self.client().list(&filter).await.unwrap();
            jobs.extend(page.jobs);
            match page.next {
                Some(next) => filter.cursor = Some(next),
                None => return jobs,
            }
        }
    }

    pub(crate) async fn count(&self, status: Status) -> u64 {
        let counts = self.client().counts().await.unwrap();
        counts.iter().filter(|count| count.status == status).map(|count| count.jobs).sum()
    }

    /// Waits until handlers have started this many times.
    pub(crate) async fn wait_until_started(&mut self, times: usize) {
        self.wait_until("all handlers have started", async |fleet| {
            fleet.events_of(&EventKind::Start).len() == times
        })
        .await;
    }

    pub(crate) async fn wait_until_succeeded(&mut self, jobs: usize) {
        self.wait_until("all jobs succeed", async |fleet| {
            fleet.count(Status::Succeeded).await == jobs as u64
        })
        .await;
    }

    // ---- events and states -----------------------------------------------

    pub(crate) fn events(&self) -> Vec<Event> {
        let text = std::fs::read_to_string(&self.config.events).unwrap_or_default();
        // A process may still be writing the last line.
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        complete.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub(crate) fn events_of(&self, kind: &EventKind) -> Vec<Event> {
        self.events().into_iter().filter(|event| event.kind == *kind).collect()
    }

    /// The number of events of this kind for each job.
    pub(crate) fn event_counts(&self, kind: &EventKind) -> BTreeMap<JobId, usize> {
        let mut counts = BTreeMap::new();
        self.events_of(kind).iter().for_each(|event| *counts.entry(event.job).or_default() += 1);
        counts
    }

    /// Waits until `condition` holds; `description` is for the failure message.
    pub(crate) async fn wait_until(
        &mut self,
        description: &str,
        mut condition: impl AsyncFnMut(&mut Fleet) -> bool,
    ) {
        let began = Instant::now();
        while !condition(self).await {
            if began.elapsed() > MAX_WAIT {
                let counts = self.client().counts().await;
                panic!("never happened: {description}; {counts:?}; {}", self.logs());
            }
            tokio::time::sleep(ms(20)).await;
        }
    }

    /// The last lines that each process wrote to standard error.
    fn logs(&self) -> String {
        let tail = |process: &Process| {
            let stderr = process.stderr();
            let lines: Vec<&str> = stderr.lines().collect();
            lines[lines.len().saturating_sub(15)..].join("\n")
        };
        self.processes.iter().map(|process| format!("\n-- {}\n{}", process.pid(), tail(process))).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        self.processes.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn create_folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("longshore-faults-{}", JobId::new()));
    std::fs::create_dir(&folder).unwrap();
    folder
}

/// A process that is killed when this is dropped.
pub(crate) struct Process {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Process {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends the signal with this name, like `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.pid().to_string()]).status().unwrap();
        assert!(sent.success(), "kill -s {name}");
    }

    /// The exit status, if the process has exited.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Waits for the process to exit, and returns how it did and after how long.
    pub(crate) async fn wait_for_exit(&mut self) -> (ExitStatus, Duration) {
        let began = Instant::now();
        loop {
            match self.exit_status() {
                Some(status) => return (status, began.elapsed()),
                None => assert!(began.elapsed() < MAX_WAIT, "the process does not exit: {}", self.stderr()),
            }
            tokio::time::sleep(ms(5)).await;
        }
    }

    /// Everything it has written to standard error so far.
    pub(crate) fn stderr(&self) -> String {
        std::fs::read_to_string(&self.stderr).unwrap_or_default()
    }

    /// Everything it has written to standard output so far.
    pub(crate) fn stdout(&self) -> String {
        std::fs::read_to_string(&self.stdout).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
