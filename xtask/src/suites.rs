//! The suites that test the built server from outside: generated requests and clients, the browser
//! and the SDKs. `test` and `ci` run them at the same time as they build and run the Rust tests,
//! because they mostly wait.
//!
//! Each suite is a task of its own, such as `cargo xtask browser`, and runs as a process of its own.
//! Its output goes to a file and is printed when it has ended.

use std::{
    env, fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    run::{Result, target_dir, took},
    server,
    steps::{Place, Step, Steps},
    test::{OpenDatabase, URL_VARIABLE},
    time_limit::status_unless,
    tools::{Missing, is_ci},
};

/// Their arguments for `cargo xtask`; the slowest first, so that the last ones to end are short.
const SUITES: [&str; 5] = ["sdks typescript", "sdks python", "browser", "schemathesis --short", "clients"];

/// How many suites run at once, beside a build or the Rust tests.
const AT_ONCE: usize = 2;

/// A suite that has not ended after this is stuck.
const TIME_LIMIT: Duration = Duration::from_secs(25 * 60);

/// What the browser tests and the SDKs run on Postgres: everything (`full`), or the tests that are
/// marked for it (`smoke`). On SQLite they always run everything.
const POSTGRES_VARIABLE: &str = "LONGSHORE_TEST_POSTGRES";

/// The suites with marked tests.
const WITH_MARKS: [&str; 3] = ["sdks typescript", "sdks python", "browser"];

/// The file to which a marked test adds its name when it has run on Postgres. Without a mark nothing would run there,
/// and nothing would fail.
const MARKED_VARIABLE: &str = "LONGSHORE_TEST_MARKED";

/// The exit code of a task that could not test anything; see [`crate::run::Unavailable`].
pub(crate) const UNAVAILABLE: u8 = 3;

/// Suites that run in the background until they are collected. Dropping them stops them.
pub(crate) struct Suites {
    shared: Arc<Shared>,
    lanes: Vec<JoinHandle<()>>,
}

/// What the threads share that run one suite after the other.
struct Shared {
    suites: Vec<&'static str>,
    next: AtomicUsize,
    stopped: AtomicBool,
    ended: Mutex<Vec<Ended>>,
    database_url: String,
    logs: PathBuf,
}

struct Ended {
    name: &'static str,
    duration: Duration,
    outcome: Outcome,
}

enum Outcome {
    Passed,
    Failed(String),
    Unavailable(String),
}

impl Suites {
    /// Starts all suites whose programs are installed. The server must have been built.
    pub(crate) fn start(missing: &Missing, database: &OpenDatabase, steps: &mut Steps) -> Result<Suites> {
        let mut possible = Vec::new();
        for suite in SUITES {
            match missing.prevents(name(suite)) {
                Some(reason) => steps.leave_out(name(suite), &reason),
                None => possible.push(suite),
            }
        }
        let logs = target_dir().join("suites");
        fs::create_dir_all(&logs)?;
        if !possible.is_empty() {
            eprintln!("==> suites: {}, in the background; output in {}", possible.join(", "), logs.display());
        }
        let shared = Arc::new(Shared {
            suites: possible,
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            ended: Mutex::default(),
            database_url: database.url().to_owned(),
            logs,
        });
        let lane = |shared: Arc<Shared>| thread::spawn(move || shared.run());
        let lanes = (0..AT_ONCE).map(|_| lane(shared.clone())).collect();
        Ok(Suites { shared, lanes })
    }

    /// Waits for the suites. Returns what failed.
    pub(crate) fn collect(mut self, steps: &mut Steps) -> Vec<String> {
        for lane in self.lanes.drain(..) {
            // A thread that panicked leaves suites behind that have not ended.
            let _ = lane.join();
        }
        let ended = std::mem::take(&mut *self.shared.ended.lock().unwrap_or_else(PoisonError::into_inner));
        let mut failures = Vec::new();
        for name in self.shared.suites.iter().copied().map(name) {
            if ended.iter().all(|ended| ended.name != name) {
                steps.leave_out(name, "the thread that runs suites has panicked");
                failures.push(format!("{name}: did not end"));
            }
        }
        for Ended { name, duration, outcome } in ended {
            steps.add(Step { name: name.to_owned(), duration, place: Place::Beside });
            match outcome {
                Outcome::Passed => {}
                Outcome::Failed(error) => failures.push(format!("{name}: {error}")),
                Outcome::Unavailable(reason) => {
                    steps.leave_out(name, &reason);
                    failures.extend(is_ci().then(|| format!("{name}: {reason}")));
                }
            }
        }
        failures
    }
}

impl Drop for Suites {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        for lane in self.lanes.drain(..) {
            let _ = lane.join();
        }
    }
}

/// The name of a suite: its arguments without flags.
fn name(suite: &'static str) -> &'static str {
    suite.split(" --").next().unwrap_or(suite)
}

impl Shared {
    fn run(&self) {
        while let Some(suite) = self.suites.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let name = name(suite);
            let log = self.logs.join(format!("{}.log", name.replace(' ', "-")));
            let marked = log.with_extension("marked");
            let began = Instant::now();
            let status = self.status(suite, &log, &marked);
            if self.stopped.load(Ordering::Relaxed) {
                return;
            }
            let duration = began.elapsed();
            let output = fs::read(&log).unwrap_or_default();
            let output = String::from_utf8_lossy(&output);
            // Not with `eprint`, which panics if the disk is full.
            let text = format!("==> {name}: output\n{output}    {name}: ended after {}\n", took(duration));
            let _ = io::stderr().write_all(text.as_bytes());
            let outcome = match status {
                Ok(status) => judge_marks(name, judge(status, &output), &marked),
                Err(error) => Outcome::Failed(error),
            };
            let ended = Ended { name, duration, outcome };
            self.ended.lock().unwrap_or_else(PoisonError::into_inner).push(ended);
        }
    }

    /// Runs the suite. The status is `None` if it was killed.
    fn status(&self, suite: &str, log: &Path, marked: &Path) -> Result<Option<ExitStatus>, String> {
        let run = || -> Result<Option<ExitStatus>> {
            let file = fs::File::create(log)?;
            fs::write(marked, "")?;
            let mut command = Command::new(env::current_exe()?);
            command
                .args(suite.split(' '))
                .env(URL_VARIABLE, &self.database_url)
                .env(server::BINARY_VARIABLE, server::built())
                // The SDKs and the pages are the same on both engines, and the Rust tests compare the engines.
                .env(POSTGRES_VARIABLE, "smoke")
                .env(MARKED_VARIABLE, marked)
                .stdin(Stdio::null())
                .stdout(file.try_clone()?)
                .stderr(file);
            let began = Instant::now();
            let is_over = || self.stopped.load(Ordering::Relaxed) || began.elapsed() > TIME_LIMIT;
            status_unless(&is_over, &mut command)
        };
        run().map_err(|error| error.to_string())
    }
}

fn judge(status: Option<ExitStatus>, output: &str) -> Outcome {
    let last = output.lines().rfind(|line| line.starts_with("xtask: ")).unwrap_or("xtask: no message");
    let reason = last.trim_start_matches("xtask: ").to_owned();
    match status {
        None => Outcome::Failed(format!("it was stopped after {}", took(TIME_LIMIT))),
        Some(status) if status.success() => Outcome::Passed,
        Some(status) if status.code() == Some(i32::from(UNAVAILABLE)) => Outcome::Unavailable(reason),
        Some(status) => Outcome::Failed(format!("{reason} ({status})")),
    }
}

/// A suite fails if none of its marked tests has run on Postgres.
fn judge_marks(suite: &str, outcome: Outcome, marked: &Path) -> Outcome {
    let has_run = || fs::metadata(marked).is_ok_and(|file| file.len() > 0);
    match outcome {
        Outcome::Passed if WITH_MARKS.contains(&suite) && !has_run() => {
            Outcome::Failed("no test that is marked `smoke` has run on Postgres".into())
        }
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn exited(code: i32) -> Option<ExitStatus> {
        Some(ExitStatus::from_raw(code << 8))
    }

    #[test]
    fn only_a_task_that_could_not_test_anything_is_unavailable() {
        assert!(matches!(judge(exited(0), ""), Outcome::Passed));
        assert!(
            matches!(judge(exited(1), "xtask: it broke"), Outcome::Failed(error) if error.contains("it broke"))
        );
        let unavailable = judge(exited(3), "==> npm\nxtask: npm cannot install the packages\n");
        assert!(matches!(unavailable, Outcome::Unavailable(why) if why == "npm cannot install the packages"));
        assert!(matches!(judge(None, ""), Outcome::Failed(_)));
        assert!(matches!(judge(Some(ExitStatus::from_raw(9)), ""), Outcome::Failed(_)), "killed by a signal");
    }

    #[test]
    fn a_suite_of_which_nothing_has_run_on_postgres_fails() {
        let missing = Path::new("/nowhere/browser.marked");
        let (empty, written) = (Path::new("/dev/null"), Path::new(file!()));
        let written = &crate::run::workspace().join(written);
        for (suite, marked, passes) in [
            ("browser", missing, false),
            ("browser", empty, false),
            ("browser", written, true),
            ("clients", missing, true),
        ] {
            let outcome = judge_marks(suite, Outcome::Passed, marked);
            assert_eq!(matches!(outcome, Outcome::Passed), passes, "{suite}, {}", marked.display());
        }
        let unavailable = judge_marks("browser", Outcome::Unavailable("npm".into()), missing);
        assert!(matches!(unavailable, Outcome::Unavailable(_)));
        assert!(WITH_MARKS.iter().all(|suite| SUITES.map(name).contains(suite)));
    }

    #[test]
    fn a_suite_that_did_not_end_is_a_failure_and_is_listed() {
        let shared = Shared {
            suites: vec!["browser", "schemathesis --short"],
            next: AtomicUsize::new(2),
            stopped: AtomicBool::new(false),
            ended: Mutex::new(vec![Ended {
                name: "browser",
                duration: Duration::ZERO,
                outcome: Outcome::Passed,
            }]),
            database_url: String::new(),
            logs: PathBuf::new(),
        };
        let mut steps = Steps::new();
        let failures = Suites { shared: Arc::new(shared), lanes: Vec::new() }.collect(&mut steps);
        assert_eq!(failures, ["schemathesis: did not end"]);
        assert!(steps.report(&[], &failures).contains("DID NOT RUN\n    schemathesis: "));
    }

    #[test]
    fn flags_are_not_a_part_of_the_name() {
        assert_eq!(
            SUITES.map(name),
            ["sdks typescript", "sdks python", "browser", "schemathesis", "clients"]
        );
    }
}
