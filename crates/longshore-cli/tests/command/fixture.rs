//! The fixture: a database of its own for every case, the binary that is run
//! against it, and a client to bring jobs into states that no command can.

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

/// Makes each case a test on each engine.
macro_rules! on_every_engine {
    ($($case:ident),* $(,)?) => {
        mod sqlite {
            $(#[test] fn $case() { super::$case(&crate::fixture::Fixture::sqlite()) })*
        }
        mod postgres {
            $(#[test] fn $case() {
                match crate::fixture::Fixture::postgres() {
                    Some(fixture) => super::$case(&fixture),
                    None => eprintln!("skipped: LONGSHORE_TEST_DATABASE_URL is not set"),
                }
            })*
        }
    };
}
pub(crate) use on_every_engine;

/// As [`on_every_engine`], and once more by a server: the commands must not be
/// able to tell.
macro_rules! on_every_target {
    ($($case:ident),* $(,)?) => {
        crate::fixture::on_every_engine!($($case),*);
        mod served {
            $(#[test] fn $case() { super::$case(&crate::fixture::Fixture::served()) })*
        }
    };
}
pub(crate) use on_every_target;

/// An id that no job has.
pub(crate) const UNKNOWN_ID: &str = "01990000-0000-7000-8000-000000000000";

pub(crate) struct Fixture {
    pub(crate) url: String,
    place: Place,
    way: Way,
    runtime: tokio::runtime::Runtime,
}

/// How commands reach the queue.
enum Way {
    Database,
    /// By a server, which starts with the first command that asks it.
    Server(OnceCell<(Process, String)>),
}

/// These work on the database itself.
const ON_THE_DATABASE: [&str; 5] = ["migrate", "check", "tokens", "worker", "serve"];

enum Place {
    Folder(PathBuf),
    Schema { server: String, name: String },
}

impl Fixture {
    pub(crate) fn sqlite() -> Self {
        let folder = std::env::temp_dir().join(format!("longshore-cli-{}", JobId::new()));
        std::fs::create_dir(&folder).unwrap();
        let url = format!("sqlite:{}", folder.join("jobs.db").display());
        Fixture::new(url, Place::Folder(folder))
    }

    pub(crate) fn postgres() -> Option<Self> {
        let server = std::env::var("LONGSHORE_TEST_DATABASE_URL").ok()?;
        let name = format!("cli_{}", JobId::new().0.simple());
        let joint = if server.contains('?') { '&' } else { '?' };
        let url = format!("{server}{joint}schema={name}");
        Some(Fixture::new(url, Place::Schema { server, name }))
    }

    /// On SQLite, by a server.
    pub(crate) fn served() -> Self {
        let mut fixture = Fixture::sqlite();
        fixture.way = Way::Server(OnceCell::new());
        fixture
    }

    fn new(url: String, place: Place) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Fixture { url, place, way: Way::Database, runtime }
    }

    /// A server of this queue. It sweeps only when told, so that cases can.
    pub(crate) fn serve(&self, flags: &str) -> (Process, String) {
        let mut command = binary();
        command.env("DATABASE_URL", &self.url);
        command.args(["serve", "--bind", "127.0.0.1:0", "--json", "--sweep-interval", "1h"]);
        let mut server = Process::start(command.args(flags.split_whitespace()));
        let url = format!("http://{}", server.address());
        (server, url)
    }

    /// The binary with the queue in its variables, for this command line.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = binary();
        match &self.way {
            Way::Server(server) if !ON_THE_DATABASE.iter().any(|on| words.contains(on)) => {
                let (_, url) = server.get_or_init(|| self.serve("--allow-unknown-kinds"));
                command.env("LONGSHORE_SERVER", url);
            }
            _ => {
                command.env("DATABASE_URL", &self.url);
            }
        }
        command.args(words);
        command
    }

    /// With tables.
    pub(crate) fn migrated(&self) -> &Self {
        self.run("migrate").ok();
        self
    }

    /// As if a worker had announced these kinds.
    pub(crate) fn with_kinds(&self, kinds: &[&str]) -> &Self {
        kinds.iter().for_each(|kind| drop(self.run(&format!("kinds put {kind}")).ok()));
        self
    }

    /// Runs a command line; words are split at spaces.
    pub(crate) fn run(&self, line: &str) -> CommandOutput {
        self.run_args(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs a command line of words that may hold spaces.
    pub(crate) fn run_args(&self, words: &[&str]) -> CommandOutput {
        CommandOutput::of(self.command(words).stdin(Stdio::null()).output().unwrap())
    }

    /// Runs a command line with something on its standard input.
    pub(crate) fn run_with_input(&self, line: &str, input: &[u8]) -> CommandOutput {
        let mut command = self.command(&line.split_whitespace().collect::<Vec<_>>());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // It may have read enough to refuse before it has read all.
        let _ = child.stdin.take().unwrap().write_all(input);
        CommandOutput::of(child.wait_with_output().unwrap())
    }

    /// Enqueues by the command and returns the job's id.
    pub(crate) fn enqueue(&self, line: &str) -> String {
        self.run(&format!("enqueue {line} --json")).json()["job_id"].as_str().unwrap().to_owned()
    }

    /// A file that only the SQLite engine has.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        match &self.place {
            Place::Folder(folder) => Some(folder.join("jobs.db")),
            Place::Schema { .. } => None,
        }
    }

    /// Uses the library in this process.
    pub(crate) fn with_client<T>(&self, work: impl AsyncFnOnce(Client) -> longshore::Result<T>) -> T {
        self.runtime.block_on(async {
            let client = Client::connect(&self.url).await.unwrap();
            work(client).await.unwrap()
        })
    }

    /// A registered worker that holds up to `limit` jobs of the default queue.
    pub(crate) fn claim(&self, limit: u32) -> (NewWorker, Vec<Claimed>) {
        self.with_client(async |client| {
            let worker = NewWorker::new("crane 7");
            client.store().register(&worker).await?;
            let request = ClaimRequest::new(worker.id, limit);
            let claims = client.store().claim(&request, &mut ClaimCursor::default()).await?;
            Ok((worker, claims.jobs))
        })
    }

    /// Enqueues a job and ends it.
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
        let report = Report { claimed, ending, follow_ups: Vec::new() };
        self.with_client(async |client| client.settle(vec![report]).await);
    }

    /// Lets the engine's clock stand `later` than it is.
    pub(crate) fn move_clock(&self, later: Duration) {
        self.with_client(async |client| {
            let now = client.store().now().await?;
            client.store().pin_clock(Some(now + later)).await
        });
    }

    /// Does to the tables what no code of ours would.
    pub(crate) fn damage(&self, sql: &str) {
        match &self.place {
            Place::Folder(_) => {
                let tables = rusqlite::Connection::open(self.file().unwrap()).unwrap();
                tables.execute_batch(sql).unwrap();
            }
            Place::Schema { server, name } => {
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
        match &self.place {
            Place::Folder(folder) => {
                let _ = std::fs::remove_dir_all(folder);
            }
            Place::Schema { server, name } => {
                self.postgres_sql(server, &format!("drop schema if exists {name} cascade"));
            }
        }
    }
}

/// The binary, without this process's own database or server and this machine's
/// own file.
pub(crate) fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longshore"));
    for variable in ["DATABASE_URL", "LONGSHORE_SERVER", "LONGSHORE_TOKEN", "LONGSHORE_TOKEN_FILE"] {
        command.env_remove(variable);
    }
    command.env("LONGSHORE_CONFIG", "");
    command
}

/// What a command said.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl CommandOutput {
    pub(crate) fn of(output: Output) -> Self {
        CommandOutput {
            code: output.status.code().expect("not ended by a signal"),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Done, and nothing on standard error.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!((self.code, self.err.as_str()), (0, ""), "{self:?}");
        self
    }

    /// Done, with one JSON document on standard output.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        self.ok().document()
    }

    /// The JSON document, however the command ended.
    #[track_caller]
    pub(crate) fn document(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Ended with `code`, saying an error that contains each of `words`.
    #[track_caller]
    pub(crate) fn fails_with(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.err.starts_with("error: "), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "`{word}` is not in {self:?}");
        }
        self
    }
}
