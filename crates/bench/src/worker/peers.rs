//! Other job queues: a program of their own, run once for each figure, so that
//! what they depend on stays out of this one.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;

use crate::Result;
use crate::report::Sample;

const ON_POSTGRES: &[&str] = &["graphile_worker", "riverqueue", "awa", "rust_job_queue"];
/// Without the one that stores and claims one by one: for minutes, and for a
/// twentieth of the others' rate.
const DRAINED_ON_POSTGRES: &[&str] = &["graphile_worker", "riverqueue", "awa"];
pub(super) const ON_SQLITE: &[&str] = &["riverqueue_sqlite"];

/// A run that takes longer is ended.
const AT_MOST: Duration = Duration::from_secs(900);

/// What a peer is put through; see the scenarios of our own side.
#[derive(Clone, Copy)]
pub(super) enum Scenario {
    Drain { jobs: u64 },
    Sustained { callers: usize, time: Duration },
    Enqueue { callers: usize, time: Duration },
    Pickup { samples: u64 },
}

impl Scenario {
    pub(super) fn peers_on_postgres(self) -> &'static [&'static str] {
        match self {
            Scenario::Drain { .. } => DRAINED_ON_POSTGRES,
            _ => ON_POSTGRES,
        }
    }

    fn arguments(self) -> Vec<String> {
        let callers = |name: &str, callers: usize, time: Duration| {
            let seconds = time.as_secs_f64().to_string();
            vec![name.into(), "--callers".into(), callers.to_string(), "--seconds".into(), seconds]
        };
        let jobs = |name: &str, jobs: u64| vec![name.into(), "--jobs".into(), jobs.to_string()];
        match self {
            Scenario::Drain { jobs: n } => jobs("drain", n),
            Scenario::Pickup { samples } => jobs("pickup", samples),
            Scenario::Sustained { callers: n, time } => callers("sustained", n, time),
            Scenario::Enqueue { callers: n, time } => callers("enqueue", n, time),
        }
    }
}

/// The line that the program prints.
#[derive(Deserialize)]
pub(super) struct Outcome {
    jobs: u64,
    seconds: f64,
    cpu_seconds: Option<f64>,
    wal_bytes: Option<u64>,
    pub(super) latencies_micros: Vec<u64>,
}

impl Outcome {
    pub(super) fn sample(&self) -> Sample {
        Sample {
            jobs: self.jobs,
            took: Duration::from_secs_f64(self.seconds),
            wal_bytes: self.wal_bytes,
            client_cpu: self.cpu_seconds.map(Duration::from_secs_f64),
        }
    }
}

/// The program that knows them.
#[derive(Clone)]
pub(super) struct Peers {
    program: PathBuf,
}

impl Peers {
    pub(super) fn find(program: &Path) -> Result<Self> {
        if !program.is_file() {
            return Err(format!(
                "no program of peers at {}; `cargo xtask bench worker --peers` builds it",
                program.display()
            )
            .into());
        }
        Ok(Peers { program: program.into() })
    }

    /// Runs `peer` once, in the empty database at `url`.
    pub(super) async fn run(&self, peer: &str, scenario: Scenario, url: &str) -> Result<Outcome> {
        let mut program = Command::new(&self.program);
        let arguments = scenario.arguments();
        let (name, settings) = (&arguments[0], &arguments[1..]);
        program.arg(name).arg(peer).arg("--database").arg(url).args(settings);
        program.stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(AT_MOST, program.output())
            .await
            .map_err(|_| format!("no answer within {} s", AT_MOST.as_secs()))??;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{}: {}", output.status, said.trim()).into());
        }
        let said = String::from_utf8_lossy(&output.stdout);
        let line = said.lines().last().ok_or("it printed nothing")?;
        Ok(serde_json::from_str(line)?)
    }
}
