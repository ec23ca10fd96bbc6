//! Other job queues. A separate program (`crates/bench-peers`) runs them once for each
//! figure, so that their dependencies stay out of this program.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;

use crate::Result;
use crate::report::Sample;

const ON_POSTGRES: &[&str] = &["graphile_worker", "riverqueue", "awa", "rust_job_queue"];
/// Without rust_job_queue, which stores and claims jobs one by one: it would take minutes
/// and reach a twentieth of the others' rate.
const DRAINED_ON_POSTGRES: &[&str] = &["graphile_worker", "riverqueue", "awa"];
pub(super) const ON_SQLITE: &[&str] = &["riverqueue_sqlite"];

/// A run that takes longer is killed.
const TIME_LIMIT: Duration = Duration::from_secs(900);

/// What a peer runs; the `scenarios` module runs the same with Longshore.
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

/// The line of JSON that the program prints.
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

/// The program that runs the other job queues.
#[derive(Clone)]
pub(super) struct Peers {
    program: PathBuf,
}

impl Peers {
    pub(super) fn find(program: &Path) -> Result<Self> {
        if !program.is_file() {
            return Err(format!(
                "there is no peers program at {}; `cargo xtask bench worker --peers` builds it",
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
        let output = tokio::time::timeout(TIME_LIMIT, program.output())
            .await
            .map_err(|_| format!("no result within {} s", TIME_LIMIT.as_secs()))??;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{}: {}", output.status, stderr.trim()).into());
        }
        let stdout = String::from_utf8_lossy(&output.stdout);
        let line = stdout.lines().last().ok_or("it printed nothing")?;
        Ok(serde_json::from_str(line)?)
    }
}
