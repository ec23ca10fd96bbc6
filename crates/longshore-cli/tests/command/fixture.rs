//! The fixture of the command tests: a separate database for every test, functions that run
//! the binary against it, and a client that brings jobs into states no command can.

use std::cell::OnceCell;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use longshore::store::{ClaimCursor, ClaimRequest, Claimed, NewWorker};
use longshore::{Client, Ending, JobId, NewJob, Report};
use serde_json::Value;
use sqlx::Connection;

use crate::process::Process;

/// Turns each function into one test per database engine.
macro_rules! on_every_engine {
    ($($case:ident),* $(,)?) => {
        mod sqlite {
            $(#[test] fn $case() { super::$case(&crate::fixture::Fixture::sqlite()) })*
        }
        mod postgres {
            $(#[test] fn $case() {
                match crate::fixture::Fixture::postgres() {
                    Some(fixture) => super::$case(&fixture),
                    None => crate::missing::skip("LONGSHORE_TEST_DATABASE_URL is not set"),
                }
            })*
        }
    };
}
pub(crate) use on_every_engine;

/// Like [`on_every_engine`], plus one test through a server: the commands must behave the
/// same.
macro_rules! on_every_target {
    ($($case:ident),* $(,)?) => {
        crate::fixture::on_every_engine!($($case),*);
        mod served {
            $(#[test] fn $case() { super::$case(&crate::fixture::Fixture::served()) })*
        }
    };
}
pub(crate) use on_every_target;

/// An id that no job or token has.
pub(crate) const UNKNOWN_ID: &str = "01990000-0000-7000-8000-000000000000";

pub(crate) struct Fixture {
    pub(crate) url: String,
    storage: Storage,
    access: Access,
    runtime: tokio::runtime::Runtime,
}

/// How commands reach the queue.
enum Access {
    Database,
    /// Through a server, which is started for the first command that needs it.
    Server(OnceCell<(Process, String)>),
}

/// Commands that always use the database directly.
const DATABASE_COMMANDS: [&str; 5] = ["migrate", "check", "tokens", "worker", "serve"];

/// Where the database is, so that it can be removed.
enum Storage {
    Folder(PathBuf),
    Schema { server: String, name: String },
}

impl Fixture {
    pub(crate) fn sqlite() -> Self {
        let folder = std::env::temp_dir().join(format!("longshore-cli-{}", JobId::new()));
        std::fs::create_dir(&folder).unwrap();
        let url = format!("sqlite:{}", folder.join("jobs.db").display());
        Fixture::new(url, Storage::Folder(folder))
    }

    pub(crate) fn postgres() -> Option<Self> {
        let server = std::env::var("LONGSHORE_TEST_DATABASE_URL").ok()?;
        let name = format!("cli_{}", JobId::new().0.simple());
        let joint = if server.contains('?') { '&' } else { '?' };
        // The test database may have fsync off.
        let url = format!("{server}{joint}schema={name}&durability=relaxed");
        Some(Fixture::new(url, Storage::Schema { server, name }))
    }

    /// SQLite, with commands going through a server.
    pub(crate) fn served() -> Self {
        let mut fixture = Fixture::sqlite();
        fixture.access = Access::Server(OnceCell::new());
        fixture
    }

    fn new(url: String, storage: Storage) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Fixture { url, storage, access: Access::Database, runtime }
    }

    /// Starts a server for this queue and returns its URL. It does not sweep by itself, so that
    /// tests can do so, unless a flag sets the interval.
    pub(crate) fn serve(&self, flags: &str) -> (Process, String) {
        let mut command = binary();
        command.env("DATABASE_URL", &self.url).env("LONGSHORE_SWEEP_INTERVAL", "1h");
        command.args(["serve", "--bind", "127.0.0.1:0", "--json"]);
        let mut server = Process::start(command.args(flags.split_whitespace()));
        let url = format!("http://{}", server.address());
        (server, url)
    }

    /// The binary with these arguments and with the target in its environment.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = binary();
        match &self.access {
            Access::Server(server) if !DATABASE_COMMANDS.iter().any(|name| args.contains(name)) => {
                let (_, url) = server.get_or_init(|| self.serve("--allow-unknown-kinds"));
                command.env("LONGSHORE_SERVER", url);
            }
            _ => {
                command.env("DATABASE_URL", &self.url);
            }
        }
        command.args(args);
        command
    }

    /// Creates the tables.
    pub(crate) fn migrated(&self) -> &Self {
        self.run("migrate").ok();
        self
    }

    /// Registers these kinds, as a worker would.
    pub(crate) fn with_kinds(&self, kinds: &[&str]) -> &Self {
        kinds.iter().for_each(|kind| drop(self.run(&format!("kinds put {kind}")).ok()));
        self
    }

    /// Runs a command line, split at spaces.
    pub(crate) fn run(&self, line: &str) -> CommandOutput {
        self.run_args(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs a command with arguments that may contain spaces.
    pub(crate) fn run_args(&self, args: &[&str]) -> CommandOutput {
        CommandOutput::of(self.command(args).stdin(Stdio::null()).output().unwrap())
    }

    /// Runs a command line with this standard input.
    pub(crate) fn run_with_input(&self, line: &str, input: &[u8]) -> CommandOutput {
        let mut command = self.command(&line.split_whitespace().collect::<Vec<_>>());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // The command may fail before it has read everything.
        let _ = child.stdin.take().unwrap().write_all(input);
        CommandOutput::of(child.wait_with_output().unwrap())
    }

    /// Runs `longshore enqueue` and returns the job's id.
    pub(crate) fn enqueue(&self, line: &str) -> String {
        self.run(&format!("enqueue {line} --json")).json()["job_id"].as_str().unwrap().to_owned()
    }

    /// The database file, if this is SQLite.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        match &self.storage {
            Storage::Folder(folder) => Some(folder.join("jobs.db")),
            Storage::Schema { .. } => None,
        }
    }

    /// Calls the library in this process.
    pub(crate) fn with_client<T>(&self, work: impl AsyncFnOnce(Client) -> longshore::Result<T>) -> T {
        self.runtime.block_on(async {
            let client = Client::connect(&self.url).await.unwrap();
            work(client).await.unwrap()
        })
    }

    /// Registers a worker and claims up to `limit` jobs of the default queue.
    pub(crate) fn claim(&self, limit: u32) -> (NewWorker, Vec<Claimed>) {
        self.with_client(async |client| {
            let worker = NewWorker::new("crane 7");
            client.store().register(&worker).await?;
            let request = ClaimRequest::new(worker.id, limit);
            let claims = client.store().claim(&request, &mut ClaimCursor::default()).await?;
            Ok((worker, claims.jobs))
        })
    }

    /// Enqueues a job, claims it and settles it with this ending.
    pub(crate) fn finished_job(&self, job: NewJob, ending: Ending) -> JobId {
        let id = self.with_client(async |client| client.enqueue(job).await).id;
        let (_, claimed) = self.claim(1);
        assert_eq!(claimed[0].lease().id, id, "the job that was just enqueued");
        self.settle(&claimed[0], ending);
        id
    }

    pub(crate) fn failed_job(&self, kind: &str, error: &str) -> JobId {
        let ending = Ending::Failed { error: error.into(), retry_in: None };
        self.finished_job(NewJob::new(kind, &()), ending)
    }

    pub(crate) fn settle(&self, claimed: &Claimed, ending: Ending) {
        let report = Report { claimed, ending, follow_ups: Vec::new(), has_progressed: false };
        self.with_client(async |client| {
            let settled = client.settle(vec![report]).await;
            // The client follows flows in the background, and must not be dropped while it holds one.
            client.flush().await;
            settled
        });
    }

    /// Sets the database's clock to `later` than now.
    pub(crate) fn move_clock(&self, later: Duration) {
        self.with_client(async |client| {
            let now = client.store().now().await?;
            client.store().pin_clock(Some(now + later)).await
        });
    }

    /// Runs SQL that damages the tables.
    pub(crate) fn damage(&self, sql: &str) {
        match &self.storage {
            Storage::Folder(_) => {
                let tables = rusqlite::Connection::open(self.file().unwrap()).unwrap();
                tables.execute_batch(sql).unwrap();
            }
            Storage::Schema { server, name } => {
                self.postgres_sql(server, &format!("set search_path to {name}; {sql}"));
            }
        }
    }

    fn postgres_sql(&self, server: &str, sql: &str) {
        self.runtime.block_on(async {
            let mut connection = sqlx::PgConnection::connect(server).await.unwrap();
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
        });
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        match &self.storage {
            Storage::Folder(folder) => {
                let _ = std::fs::remove_dir_all(folder);
            }
            Storage::Schema { server, name } => {
                self.postgres_sql(server, &format!("drop schema if exists {name} cascade"));
            }
        }
    }
}

/// The binary, without the target and the configuration file of this machine's user.
pub(crate) fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longshore"));
    for variable in ["DATABASE_URL", "LONGSHORE_SERVER", "LONGSHORE_TOKEN", "LONGSHORE_TOKEN_FILE"] {
        command.env_remove(variable);
    }
    command.env("LONGSHORE_CONFIG", "");
    command
}

/// The output and exit code of a command.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl CommandOutput {
    pub(crate) fn of(output: Output) -> Self {
        CommandOutput {
            code: output.status.code().expect("ended by a signal"),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Asserts success and nothing on standard error.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{self:?}");
        self
    }

    /// Asserts success and returns the JSON document on standard output.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        self.ok().document()
    }

    /// The JSON document, however the command ended.
    #[track_caller]
    pub(crate) fn document(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Asserts this exit code and an error message that contains each of `parts`.
    #[track_caller]
    pub(crate) fn fails_with(self, code: i32, parts: &[&str]) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.starts_with("error: "), "{self:?}");
        for part in parts {
            assert!(self.err.contains(part), "`{part}` is not in {self:?}");
        }
        self
    }
}
