//! The fixture: a queue of its own for a case, worker processes on it, and the
//! log that all of them write.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use longshore::store::ListFilter;
use longshore::{Client, JobId, JobRecord, NewJob, Status};
use sqlx::Connection;

use crate::worker::{Event, EventKind, WorkerConfig};

/// How long a case waits for what must come, however busy the machine.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(60);

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Makes each case a test on each engine.
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

/// Makes each case a test on Postgres.
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
        Ok(server) => Fleet::postgres(&server).run(case),
        Err(_) => eprintln!("skipped: LONGSHORE_TEST_DATABASE_URL is not set"),
    }
}

/// A queue and the processes that work on it.
pub(crate) struct Fleet {
    pub(crate) config: WorkerConfig,
    folder: PathBuf,
    /// To be dropped: server and name.
    schema: Option<(String, String)>,
    workers: Vec<Process>,
    client: Option<Client>,
}

impl Fleet {
    pub(crate) fn sqlite() -> Self {
        let folder = folder();
        let url = format!("sqlite:{}", folder.join("jobs.db").display());
        Fleet::new(url, folder, None)
    }

    pub(crate) fn postgres(server: &str) -> Self {
        let name = format!("faults_{}", JobId::new().0.simple());
        let joint = if server.contains('?') { '&' } else { '?' };
        Fleet::new(format!("{server}{joint}schema={name}"), folder(), Some((server.to_owned(), name)))
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
            threshold: ms(1500),
            sweep: ms(150),
            recovery_delay: ms(100),
            grace: ms(500),
        };
        Fleet { config, folder, schema, workers: Vec::new(), client: None }
    }

    pub(crate) fn run(mut self, case: impl AsyncFnOnce(&mut Fleet)) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let client = Client::connect(&self.config.url).await.unwrap();
            client.migrate().await.unwrap();
            self.client = Some(client);
            case(&mut self).await;
            self.workers.clear();
            let problems = self.client().check().await.unwrap().problems;
            assert!(problems.is_empty(), "every job is in exactly one place: {problems:?}");
            self.client = None;
            if let Some((server, name)) = self.schema.take() {
                let mut connection = sqlx::PgConnection::connect(&server).await.unwrap();
                let drop = format!("drop schema if exists {name} cascade");
                sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&mut connection).await.unwrap();
            }
        });
    }

    pub(crate) fn client(&self) -> &Client {
        self.client.as_ref().unwrap()
    }

    // ---- processes -------------------------------------------------------

    /// Starts a worker process and says how to name it.
    pub(crate) fn start(&mut self) -> usize {
        let config = self.config.clone();
        self.start_with(&config)
    }

    pub(crate) fn start_with(&mut self, config: &WorkerConfig) -> usize {
        self.spawn(&mut config.command())
    }

    /// Starts any process and says how to name it.
    pub(crate) fn spawn(&mut self, command: &mut Command) -> usize {
        let nth = self.workers.len();
        let (said, printed) =
            (self.folder.join(format!("said-{nth}")), self.folder.join(format!("printed-{nth}")));
        command.stdin(Stdio::null());
        command.stdout(File::create(&printed).unwrap()).stderr(File::create(&said).unwrap());
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        self.workers.push(Process { child, said, printed });
        nth
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

    pub(crate) fn worker(&mut self, nth: usize) -> &mut Process {
        &mut self.workers[nth]
    }

    // ---- jobs ------------------------------------------------------------

    /// Enqueues `count` jobs whose leases take so many milliseconds.
    pub(crate) async fn enqueue(&self, kind: &str, takes: &[u64], count: usize) -> Vec<JobId> {
        let mut ids = Vec::with_capacity(count);
        while ids.len() < count {
            let batch = (0..(count - ids.len()).min(5000)).map(|_| NewJob::new(kind, takes));
            let enqueued = self.client().enqueue_many(batch).await.unwrap();
            ids.extend(enqueued.into_iter().map(|job| job.id));
        }
        ids
    }

    pub(crate) async fn get(&self, id: JobId) -> JobRecord {
        self.client().get(id).await.unwrap()
    }

    /// Every job there is.
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

    pub(crate) async fn wait_until_succeeded(&mut self, jobs: usize) {
        self.wait_until("all jobs succeed", async |fleet| {
            fleet.count(Status::Succeeded).await == jobs as u64
        })
        .await;
    }

    // ---- what happened ---------------------------------------------------

    pub(crate) fn events(&self) -> Vec<Event> {
        let text = std::fs::read_to_string(&self.config.events).unwrap_or_default();
        // The last line may be under way.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub(crate) fn events_of(&self, kind: &EventKind) -> Vec<Event> {
        self.events().into_iter().filter(|event| event.kind == *kind).collect()
    }

    /// How often each job did this.
    pub(crate) fn event_counts(&self, kind: &EventKind) -> BTreeMap<JobId, usize> {
        let mut times = BTreeMap::new();
        self.events_of(kind).iter().for_each(|event| *times.entry(event.job).or_default() += 1);
        times
    }

    /// Waits for what must come.
    pub(crate) async fn wait_until(&mut self, what: &str, mut there: impl AsyncFnMut(&mut Fleet) -> bool) {
        let began = Instant::now();
        while !there(self).await {
            if began.elapsed() > MAX_WAIT {
                let counts = self.client().counts().await;
                panic!("never: {what}; {counts:?}; {}", self.stderr());
            }
            tokio::time::sleep(ms(20)).await;
        }
    }

    /// The end of what each process said.
    fn stderr(&self) -> String {
        let tail = |worker: &Process| {
            let said = worker.stderr();
            let lines: Vec<&str> = said.lines().collect();
            lines[lines.len().saturating_sub(15)..].join("\n")
        };
        self.workers.iter().map(|worker| format!("\n-- {}\n{}", worker.pid(), tail(worker))).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.stderr());
        }
        self.workers.clear();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("longshore-faults-{}", JobId::new()));
    std::fs::create_dir(&folder).unwrap();
    folder
}

/// A process; killed when it is dropped.
pub(crate) struct Process {
    child: Child,
    said: PathBuf,
    printed: PathBuf,
}

impl Process {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by its name.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.pid().to_string()]).status().unwrap();
        assert!(sent.success(), "kill -s {name}");
    }

    /// How it ended, if it has.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// How it ends, and after how long.
    pub(crate) async fn wait_for_exit(&mut self) -> (ExitStatus, Duration) {
        let began = Instant::now();
        loop {
            match self.exit_status() {
                Some(status) => return (status, began.elapsed()),
                None => assert!(began.elapsed() < MAX_WAIT, "it never ends: {}", self.stderr()),
            }
            tokio::time::sleep(ms(5)).await;
        }
    }

    /// EventKind it wrote to standard error so far.
    pub(crate) fn stderr(&self) -> String {
        std::fs::read_to_string(&self.said).unwrap_or_default()
    }

    /// EventKind it wrote to standard output so far.
    pub(crate) fn stdout(&self) -> String {
        std::fs::read_to_string(&self.printed).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
