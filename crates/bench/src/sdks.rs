//! `bench sdks`: workers that call the API over HTTP. Drains a backlog of jobs that do nothing, with the
//! library, with a bare HTTP client in Rust, and with one worker process of each SDK; measures how long a job
//! waits until its handler starts; and runs other job queues, if commands for them are given.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use longshore::api::Access;
use longshore::store::ClaimCursor;
use longshore::{Client, Context, Failure, NewJob, Status, Worker};
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use crate::api::TestServer;
use crate::api::load_generator::Connection;
use crate::library::{Claimer, KIND, enqueue_bulk};
use crate::postgres_server::Admin;
use crate::report::{self, median, quantile, table, thousands};
use crate::{Result, ServerOptions};

const SCHEMA: &str = "bench_sdks";
/// The kind of the jobs whose start is measured. The payload is the time of the enqueue.
const PICK_UP: &str = "pick_up";
/// How long a process may take to start, and to drain the backlog.
const MAX_START: Duration = Duration::from_secs(20);
const MAX_DRAIN: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(20);

/// Options of `bench sdks`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// Jobs in the backlog.
    #[arg(long, default_value_t = 40_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1000..))]
    jobs: u64,
    /// Jobs whose start is measured.
    #[arg(long, default_value_t = 500, value_name = "N", value_parser = clap::value_parser!(u64).range(10..))]
    pick_ups: u64,
    /// How often everything is measured. The medians are printed.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// A worker to measure, as NAME=COMMAND. It gets LONGSHORE_SERVER and LONGSHORE_TOKEN, and handles the kinds
    /// `bench` (returns at once) and `pick_up` (prints the milliseconds since the time in its payload, one line each).
    #[arg(long = "worker", value_name = "NAME=COMMAND", value_parser = named)]
    workers: Vec<(String, String)>,
    /// Another job queue, as NAME=COMMAND. It drains BENCH_JOBS jobs that do nothing, and prints jobs per second.
    #[arg(long = "peer", value_name = "NAME=COMMAND", value_parser = named)]
    peers: Vec<(String, String)>,
    /// The file to write the figures to.
    #[arg(long, value_name = "FILE", default_value = "target/bench/sdks.json")]
    json: PathBuf,
}

fn named(text: &str) -> Result<(String, String), String> {
    let (name, command) = text.split_once('=').ok_or("give NAME=COMMAND")?;
    Ok((name.into(), command.into()))
}

/// What was measured of one contender, one value per round.
struct Figures {
    name: String,
    per_second: Vec<f64>,
    /// Milliseconds, at the median and at 95 %.
    pick_up: Vec<(f64, f64)>,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let mut admin = Admin::connect(options.server.url()?).await?;
    if !admin.check_durability() {
        return Ok(());
    }
    let names = ["the library", "HTTP, in Rust"].into_iter().map(str::to_owned);
    let names = names.chain(options.workers.iter().chain(&options.peers).map(|(name, _)| name.clone()));
    let mut figures: Vec<Figures> =
        names.map(|name| Figures { name, per_second: Vec::new(), pick_up: Vec::new() }).collect();
    let measured = async {
        for round in 1..=options.rounds {
            for (nth, figures) in figures.iter_mut().enumerate() {
                eprintln!("round {round}: {}", figures.name);
                measure(options, &mut admin, nth, figures).await?;
            }
        }
        Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    };
    let measured = measured.await;
    admin.drop_schema(SCHEMA).await?;
    measured?;
    print(&figures);
    let figures: Vec<Value> = figures
        .iter()
        .map(|one| json!({ "name": one.name, "per_second": one.per_second, "pick_up_ms": one.pick_up }))
        .collect();
    let figures = json!({
        "taken_at": chrono::Utc::now().to_rfc3339(),
        "machine": report::machine(),
        "facts": admin.settings_json(),
        "jobs": options.jobs,
        "contenders": figures,
    });
    report::write(&options.json, &figures)
}

async fn measure(options: &Options, admin: &mut Admin, nth: usize, figures: &mut Figures) -> Result<()> {
    let workers = options.workers.len();
    if let Some((_, command)) = nth.checked_sub(2 + workers).and_then(|nth| options.peers.get(nth)) {
        figures.per_second.push(run_peer(command, options.jobs).await?);
        return Ok(());
    }
    let client = admin.fresh_schema(SCHEMA).await?;
    enqueue_bulk(&client, options.jobs, 5_000).await?;
    admin.vacuum_analyze(SCHEMA).await?;
    match nth.checked_sub(2).and_then(|nth| options.workers.get(nth)) {
        None if nth == 0 => {
            figures.per_second.push(drain_with_library(&client, options.jobs).await?);
            figures.pick_up.push(pick_ups_of_library(&client, options.pick_ups).await?);
        }
        None => {
            let served = TestServer::api(&client, Access::Tokens).await?;
            figures.per_second.push(drain_over_http(&served, options.jobs).await?);
        }
        Some((_, command)) => {
            let served = TestServer::api(&client, Access::Tokens).await?;
            let (lines, mut process) = start(command, &served)?;
            figures.per_second.push(watch_drain(&client, options.jobs, &mut process).await?);
            figures.pick_up.push(pick_ups(&client, options.pick_ups, lines).await?);
            stop(process).await?;
        }
    }
    Ok(())
}

// ---- draining ----------------------------------------------------------------

/// Claims and settles in batches of 100, without handlers.
async fn drain_with_library(client: &Client, jobs: u64) -> Result<f64> {
    let mut claimer = Claimer::register(client, Some(vec![KIND.into()]), 100, ClaimCursor::default()).await?;
    let started = Instant::now();
    let mut done = 0;
    while done < jobs {
        done += claimer.round().await?.jobs;
    }
    Ok(report::rate(jobs, started.elapsed()))
}

/// One connection that leases 100 jobs and settles the last 100 in each call.
async fn drain_over_http(served: &TestServer, jobs: u64) -> Result<f64> {
    let mut connection = Connection::open(served.address).await?;
    let token = served.token.clone().unwrap_or_default();
    let mut request = json!({ "name": "bench", "kinds": [KIND], "limit": 100 });
    let started = Instant::now();
    let (mut leased, mut settled) = (0, 0);
    while settled < jobs {
        let response = connection.send(&post("/leases", &request, served.address, &token)).await?;
        let response: Value = serde_json::from_slice(response)?;
        settled += response["settled"].as_array().map_or(0, Vec::len) as u64;
        let ended: Vec<Value> = response["jobs"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|job| json!({ "id": job["id"], "lease_no": job["lease_no"], "outcome": "succeeded" }))
            .collect();
        leased += ended.len() as u64;
        if ended.is_empty() && settled < jobs && leased >= jobs {
            return Err(format!("{settled} of {jobs} jobs were settled, and no job is waiting").into());
        }
        request = json!({
            "worker_id": response["worker_id"], "kinds": [KIND], "limit": 100, "settle": ended,
        });
    }
    Ok(report::rate(jobs, started.elapsed()))
}

fn post(path: &str, body: &Value, address: SocketAddr, token: &str) -> Vec<u8> {
    let body = body.to_string();
    format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// How many jobs have succeeded.
async fn succeeded(client: &Client) -> Result<u64> {
    let counts = client.counts().await?;
    Ok(counts.iter().filter(|count| count.status == Status::Succeeded).map(|count| count.jobs).sum())
}

/// Jobs per second of a worker process, from its first success on.
async fn watch_drain(client: &Client, jobs: u64, process: &mut Child) -> Result<f64> {
    let launched = Instant::now();
    let mut first = None;
    loop {
        let done = succeeded(client).await?;
        let now = Instant::now();
        let (began, before) = if done == 0 { (now, 0) } else { *first.get_or_insert((now, done)) };
        if done >= jobs {
            return Ok(report::rate(jobs - before, now - began));
        }
        if let Some(status) = process.try_wait()? {
            return Err(format!("the worker ended early ({status}) after {done} jobs").into());
        }
        let limit = if done == 0 { MAX_START } else { MAX_DRAIN };
        if launched.elapsed() > limit {
            return Err(format!("the worker has done {done} of {jobs} jobs after {limit:?}").into());
        }
        tokio::time::sleep(POLL).await;
    }
}

// ---- pick-up -----------------------------------------------------------------

fn micros() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64
}

/// Enqueues jobs one by one, and reads from the lines how long each waited.
async fn pick_ups(client: &Client, jobs: u64, mut waits: mpsc::UnboundedReceiver<f64>) -> Result<(f64, f64)> {
    let mut samples = Vec::new();
    for _ in 0..jobs {
        client.enqueue(NewJob::new(PICK_UP, &json!({ "at": micros() }))).await?;
        let waited = tokio::time::timeout(MAX_START, waits.recv()).await?;
        samples.push((waited.ok_or("the worker has closed its output")? * 1000.0) as u64);
    }
    Ok((quantile(&samples, 0.5) / 1000.0, quantile(&samples, 0.95) / 1000.0))
}

/// The same with a worker of the library.
async fn pick_ups_of_library(client: &Client, jobs: u64) -> Result<(f64, f64)> {
    let (send, waits) = mpsc::unbounded_channel();
    let handler = move |payload: Value, _: Context| {
        let waited = micros().saturating_sub(payload["at"].as_u64().unwrap_or_default());
        let sent = send.send(waited as f64 / 1000.0);
        async move { sent.map_err(|_| Failure::permanent("nobody measures")) }
    };
    let worker = Worker::builder(client.clone()).function(PICK_UP, handler).build()?;
    let worker = worker.start().await?;
    let measured = pick_ups(client, jobs, waits).await;
    worker.stop().await;
    measured
}

// ---- processes ---------------------------------------------------------------

/// Starts a worker. The receiver gets each number that it prints.
fn start(command: &str, served: &TestServer) -> Result<(mpsc::UnboundedReceiver<f64>, Child)> {
    let mut process = Command::new("sh")
        .args(["-c", &format!("exec {command}")])
        .env("LONGSHORE_SERVER", format!("http://{}", served.address))
        .env("LONGSHORE_TOKEN", served.token.clone().unwrap_or_default())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let output = process.stdout.take().ok_or("the worker has no output")?;
    let (send, waits) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        use tokio::io::AsyncBufReadExt;
        let mut lines = tokio::io::BufReader::new(output).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            if let Ok(waited) = line.trim().parse::<f64>() {
                let _ = send.send(waited);
            }
        }
    });
    Ok((waits, process))
}

/// Ends a worker as an operator does, so that it signs off.
async fn stop(mut process: Child) -> Result<()> {
    if let Some(pid) = process.id() {
        Command::new("kill").args(["-TERM", &pid.to_string()]).status().await?;
    }
    if tokio::time::timeout(MAX_START, process.wait()).await.is_err() {
        process.kill().await?;
    }
    Ok(())
}

async fn run_peer(command: &str, jobs: u64) -> Result<f64> {
    let process = Command::new("sh")
        .args(["-c", &format!("exec {command}")])
        .env("BENCH_JOBS", jobs.to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(2 * MAX_DRAIN, process).await??;
    let printed = String::from_utf8_lossy(&output.stdout);
    let last = printed.lines().last().unwrap_or_default();
    last.trim().parse().map_err(|_| format!("`{command}` printed no number: {last}").into())
}

// ---- results -----------------------------------------------------------------

fn print(figures: &[Figures]) {
    let base = figures.iter().find(|one| one.name == "HTTP, in Rust").map(|one| one.per_second.clone());
    let row = |one: &Figures| {
        // The ratio of each round, so that a slow moment of the machine affects both sides.
        let ratios = base.iter().flatten().zip(&one.per_second).map(|(base, own)| own / base).collect();
        let milliseconds = |values: Vec<f64>| median(values).map_or("–".into(), |ms| format!("{ms:.2} ms"));
        [
            one.name.clone(),
            median(one.per_second.clone()).map_or("–".into(), thousands),
            median(ratios).map_or("–".into(), |ratio| format!("{ratio:.2}")),
            milliseconds(one.pick_up.iter().map(|(p50, _)| *p50).collect()),
            milliseconds(one.pick_up.iter().map(|(_, p95)| *p95).collect()),
        ]
    };
    let rows: Vec<[String; 5]> = figures.iter().map(row).collect();
    table(["worker", "jobs/s", "of HTTP in Rust", "pick-up p50", "pick-up p95"], &rows);
}
