//! `bench views`: the read-only lists of the API and the pages of the dashboard over HTTP, with
//! millions of finished and many waiting jobs. Each list should take at most 100 ms, each page at
//! most 200 ms. On Postgres it also compares what ten open tabs cost with what one costs.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use longshore::Client;
use longshore::api::Access;
use longshore::store::NewWorker;
use serde_json::{Value, json};

use self::dataset::{Dataset, JobCounts, RARE_KIND, fill};
use self::table_writers::{PostgresWriter, SqliteWriter};
use crate::api::TestServer;
use crate::api::load_generator::Connection;
use crate::postgres_server::Admin;
use crate::report::{self, millis, table, thousands};
use crate::sqlite_files::Files;
use crate::{Engine, Result, ServerOptions};

mod dataset;
mod history;
mod table_writers;

const SCHEMA: &str = "bench_views";
/// The target for the p95 of every list.
const LIST_TARGET: Duration = Duration::from_millis(100);
/// The target for the p95 of every page of the dashboard.
const PAGE_TARGET: Duration = Duration::from_millis(200);
/// How many tabs are open in the second half of the comparison, and how long each half takes.
const TABS: usize = 10;
const TABS_TIME: Duration = Duration::from_secs(15);

/// Options of `bench views`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// Finished jobs in the tables.
    #[arg(long, default_value_t = 5_000_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1000..))]
    finished: u64,
    /// Waiting jobs: due now, due later, or retrying.
    #[arg(long, default_value_t = 100_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1000..))]
    waiting: u64,
    /// Running jobs.
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    running: u64,
    /// How often each view is requested.
    #[arg(long, default_value_t = 60, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    calls: u64,
    /// The engines to measure.
    #[arg(long, value_enum, default_value = "both")]
    engine: Engine,
    /// Only views whose name contains this, such as `stats`.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Keep the tables for the next run, and reuse those of the last run.
    #[arg(long)]
    keep: bool,
    /// The file to write the figures to.
    #[arg(long, value_name = "FILE", default_value = "target/bench/views.json")]
    json: PathBuf,
}

impl Options {
    fn counts(&self) -> JobCounts {
        JobCounts { finished: self.finished, waiting: self.waiting, running: self.running }
    }
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let mut engines = Vec::new();
    if options.engine != Engine::Sqlite {
        let mut admin = Admin::connect(options.server.url()?).await?;
        if admin.check_durability() {
            let measured = on_postgres(options, &mut admin).await;
            if !options.keep {
                admin.drop_schema(SCHEMA).await?;
            }
            let (views, tabs) = measured?;
            let facts = admin.settings_json();
            engines.push(json!({ "engine": "Postgres", "facts": facts, "views": views, "tabs": tabs }));
        }
    }
    if options.engine != Engine::Postgres {
        let files = Files::new("views")?;
        let facts = files.print_durability()?;
        engines
            .push(json!({ "engine": "SQLite", "facts": facts, "views": on_sqlite(options, files).await? }));
    }
    let figures = json!({
        "taken_at": chrono::Utc::now().to_rfc3339(),
        "machine": report::machine(),
        "finished": options.finished,
        "waiting": options.waiting,
        "running": options.running,
        "calls": options.calls,
        "engines": engines,
    });
    report::write(&options.json, &figures)
}

async fn on_postgres(options: &Options, admin: &mut Admin) -> Result<(Value, Value)> {
    let kept = options.keep && admin.has_schema(SCHEMA).await?;
    let client = if kept { admin.client(SCHEMA).await? } else { admin.fresh_schema(SCHEMA).await? };
    let dataset = Dataset::new(options.counts());
    if !kept {
        let worker = register_workers(&client).await?;
        print_filling("Postgres", &dataset);
        fill(&dataset, PostgresWriter::new(admin.raw_connection().await?, SCHEMA, worker)).await?;
        admin.vacuum_analyze(SCHEMA).await?;
    }
    let views = measure("Postgres", options, &client).await?;
    let tabs = if options.only.is_none() { compare_tabs(&client, admin).await? } else { Value::Null };
    Ok((views, tabs))
}

async fn on_sqlite(options: &Options, mut files: Files) -> Result<Value> {
    let file = if options.keep { files.kept("views.db") } else { files.new_path() };
    let kept = file.path.exists();
    let client = file.client().await?;
    if !kept {
        client.migrate().await?;
        let worker = register_workers(&client).await?;
        let dataset = Dataset::new(options.counts());
        print_filling("SQLite", &dataset);
        fill(&dataset, SqliteWriter::open(&file.path, worker)?).await?;
    }
    let measured = measure("SQLite", options, &client).await;
    drop(client);
    if options.keep {
        file.keep();
    }
    measured
}

fn print_filling(engine: &str, dataset: &Dataset) {
    eprintln!("{engine}: inserting {} jobs", thousands(dataset.counts.all() as f64));
}

/// Registers some workers; returns the id of the one that owns all leases.
async fn register_workers(client: &Client) -> Result<uuid::Uuid> {
    let mut last = None;
    for n in 0..10 {
        let queues = ["default", "mail", "images", "billing", "reports"].map(str::to_owned).to_vec();
        let worker = NewWorker { queues, ..NewWorker::new(format!("worker-{n}")) };
        client.store().register(&worker).await?;
        last = Some(worker.id.0);
    }
    Ok(last.unwrap_or_default())
}

/// A list of the API, or a page of the dashboard.
struct View {
    name: String,
    /// Sent in turn.
    requests: Vec<String>,
    target: Duration,
}

impl View {
    fn new(name: &str, requests: Vec<String>) -> Self {
        View { name: name.into(), requests, target: LIST_TARGET }
    }

    fn get(name: &str, path: impl Into<String>) -> Self {
        View::new(name, vec![format!("GET {}", path.into())])
    }

    fn page(path: impl Into<String>) -> Self {
        let path = path.into();
        View { target: PAGE_TARGET, ..View::get(&format!("page {path}"), path) }
    }

    fn pages(name: &str, paths: impl Iterator<Item = String>) -> Self {
        let requests = paths.map(|path| format!("GET {path}")).collect();
        View { target: PAGE_TARGET, ..View::new(&format!("page {name}"), requests) }
    }
}

/// Ids of jobs to request.
struct SampleJobs {
    /// An old job, far from the newest, where lists start.
    deep: String,
    finished: Vec<String>,
    due: Vec<String>,
}

/// Reads ids from the API, which also works with tables of an earlier run.
async fn find_sample_jobs(http: &mut HttpClient, options: &Options) -> Result<SampleJobs> {
    let ids = |jobs: Value| -> Vec<String> {
        let jobs = jobs.as_array().cloned().unwrap_or_default();
        jobs.iter().filter_map(|job| job["id"].as_str().map(str::to_owned)).collect()
    };
    let finished = ids(http.json("GET /jobs?status=succeeded&limit=200").await?);
    let waiting = http.json("GET /jobs?status=queued&limit=200").await?;
    let is_due = |job: &Value| {
        let at = job["run_at"].as_str().and_then(|at| at.parse::<chrono::DateTime<chrono::Utc>>().ok());
        at.is_some_and(|at| at <= chrono::Utc::now())
    };
    let due: Vec<Value> =
        waiting.as_array().into_iter().flatten().filter(|job| is_due(job)).cloned().collect();
    // Two thirds of the way from the newest to the oldest. The job need not exist.
    let deep = Dataset::new(options.counts()).job(options.finished / 3);
    Ok(SampleJobs { deep: deep.id.to_string(), finished, due: ids(due.into()) })
}

fn views(sample_jobs: &SampleJobs) -> Vec<View> {
    let deep = &sample_jobs.deep;
    let mut views = vec![View::get("jobs", "/jobs"), View::get("jobs, 200 per page", "/jobs?limit=200")];
    for status in ["queued", "retrying", "running", "succeeded", "failed_permanent", "cancelled"] {
        views.push(View::get(&format!("jobs, {status}"), format!("/jobs?status={status}")));
    }
    views.extend([
        View::get("jobs, a common kind", "/jobs?kind=send_email"),
        View::get("jobs, an uncommon kind", "/jobs?kind=import_file"),
        View::get("jobs, a rare kind", format!("/jobs?kind={RARE_KIND}")),
        View::get("jobs, an unknown kind", "/jobs?kind=unknown"),
        View::get("jobs, a queue", "/jobs?queue=billing"),
        View::get("jobs, an unknown queue", "/jobs?queue=unknown"),
    ]);
    for status in ["queued", "retrying", "running", "succeeded", "failed_permanent", "cancelled"] {
        let name = format!("jobs, {status}, an unknown kind");
        views.push(View::get(&name, format!("/jobs?status={status}&kind=unknown")));
    }
    views.extend([
        View::get("jobs, queued, an uncommon kind", "/jobs?status=queued&kind=import_file"),
        View::get("jobs, succeeded, a common kind", "/jobs?status=succeeded&kind=send_email"),
        View::get("jobs, succeeded, an uncommon kind", "/jobs?status=succeeded&kind=import_file"),
        View::get("jobs, a tag", "/jobs?tag=usual"),
        View::get("jobs, a rare tag", "/jobs?tag=vip"),
        View::get("jobs, an unknown tag", "/jobs?tag=unknown"),
        View::get("jobs, succeeded, an unknown tag", "/jobs?status=succeeded&tag=unknown"),
        View::get("jobs, deep cursor", format!("/jobs?cursor={deep}")),
        View::get("jobs, succeeded, deep cursor", format!("/jobs?status=succeeded&cursor={deep}")),
        View::get(
            "jobs, failed_permanent, deep cursor",
            format!("/jobs?status=failed_permanent&cursor={deep}"),
        ),
        View::get("jobs, an unknown kind, deep cursor", format!("/jobs?kind=unknown&cursor={deep}")),
        View::get("jobs, offset 10,000", "/jobs?offset=10000"),
        View::get("jobs, a common kind, offset 10,000", "/jobs?kind=send_email&offset=10000"),
        View::get("jobs, succeeded, offset 10,000", "/jobs?status=succeeded&offset=10000"),
        View::get("dead letters", "/dead-letters"),
        View::get("dead letters, a kind", "/dead-letters?kind=charge_card"),
        View::get("stats, an hour", "/stats"),
        View::get("stats, a day", "/stats?minutes=1440"),
        View::get("stats, a day, one queue", "/stats?minutes=1440&queue=mail"),
        View::get("queues", "/queues"),
        View::get("workers", "/workers"),
        View::get("kinds", "/kinds"),
        View::get("metrics", "/metrics"),
        View::get("health", "/health"),
        View::new("a job", sample_jobs.finished.iter().map(|id| format!("GET /jobs/{id}")).collect()),
        View::new(
            "explain a job",
            sample_jobs.due.iter().map(|id| format!("GET /jobs/{id}/explain")).collect(),
        ),
        View::new("bulk, dry run, 1,000 of a kind", vec![dry_run(json!({ "kind": "send_email" }))]),
        View::new(
            "bulk, dry run, 1,000 dead letters",
            vec![dry_run(json!({ "status": "failed_permanent" }))],
        ),
    ]);
    views.extend(pages(sample_jobs));
    views
}

/// The pages of the dashboard. Requests have a header that makes the server read everything anew.
fn pages(sample_jobs: &SampleJobs) -> Vec<View> {
    let deep = &sample_jobs.deep;
    let mut pages = vec![
        View::page("/ui"),
        View::page("/ui?range=day"),
        View::page("/ui?range=week"),
        View::page("/ui/jobs"),
    ];
    for status in ["queued", "retrying", "running", "succeeded", "failed_permanent", "cancelled"] {
        pages.push(View::page(format!("/ui/jobs?status={status}")));
    }
    pages.extend([
        View::page("/ui/jobs?status=queued,retrying&kind=import_file"),
        View::page("/ui/jobs?kind=unknown"),
        View::page("/ui/jobs?queue=billing"),
        View::page("/ui/jobs?tag=unknown"),
        View::page("/ui/jobs?error=refused"),
        View::page("/ui/jobs?error=unknown"),
        View::pages("/ui/jobs, deep cursor", [format!("/ui/jobs?cursor={deep}")].into_iter()),
        View::pages("/ui/jobs/{id}, finished", ui_jobs(&sample_jobs.finished)),
        View::pages("/ui/jobs/{id}, waiting", ui_jobs(&sample_jobs.due)),
        View::page("/ui/queues"),
        View::page("/ui/queues/mail"),
        View::page("/ui/failures"),
        View::pages(
            "/ui/failures/{fingerprint}",
            [format!("/ui/failures/{}", longshore::Fingerprint::of("send_email", dataset::ERROR))]
                .into_iter(),
        ),
        View::page("/ui/kinds"),
        View::page("/ui/kinds/send_email"),
        View::page("/ui/workers"),
        View::page("/ui/cron"),
        View::page("/ui/flows"),
        View::page("/ui/settings"),
        View::page("/ui/new"),
    ]);
    pages
}

fn ui_jobs(ids: &[String]) -> impl Iterator<Item = String> {
    ids.iter().map(|id| format!("/ui/jobs/{id}"))
}

fn dry_run(filter: Value) -> String {
    let body = json!({ "action": "retry", "dry_run": true, "filter": filter });
    format!("POST /jobs/bulk {body}")
}

/// The response times of a view.
struct Latency {
    name: String,
    p50: Duration,
    p95: Duration,
    slowest: Duration,
    target: Duration,
}

impl Latency {
    fn of(view: &View, mut times: Vec<Duration>) -> Self {
        times.sort();
        let at = |share: usize| {
            times
                .get((times.len() * share / 100).min(times.len().saturating_sub(1)))
                .copied()
                .unwrap_or_default()
        };
        let View { name, target, .. } = view;
        Latency { name: name.clone(), p50: at(50), p95: at(95), slowest: at(100), target: *target }
    }

    fn row(&self) -> [String; 5] {
        let target = if self.p95 <= self.target { "met" } else { "MISSED" };
        let target = format!("{target} ({})", millis(self.target));
        [self.name.clone(), millis(self.p50), millis(self.p95), millis(self.slowest), target]
    }

    fn figures(&self) -> Value {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        json!({
            "view": self.name,
            "p50_ms": ms(self.p50),
            "p95_ms": ms(self.p95),
            "max_ms": ms(self.slowest),
            "target_ms": ms(self.target),
            "met": self.p95 <= self.target,
        })
    }
}

async fn measure(engine: &str, options: &Options, client: &Client) -> Result<Value> {
    let served = TestServer::api(client, Access::Tokens).await?;
    let mut http = HttpClient::open(&served).await?;
    let sample_jobs = find_sample_jobs(&mut http, options).await?;
    let mut measured = Vec::new();
    for view in views(&sample_jobs) {
        if options.only.as_deref().is_some_and(|only| !view.name.contains(only)) {
            continue;
        }
        eprintln!("measuring: {engine}, {}", view.name);
        let mut times = Vec::new();
        for request in view.requests.iter().cycle().take(options.calls as usize) {
            let started = Instant::now();
            http.send(request).await?;
            times.push(started.elapsed());
        }
        measured.push(Latency::of(&view, times));
    }
    println!(
        "\n{engine}: {} finished, {} waiting; {} calls each",
        thousands(options.finished as f64),
        thousands(options.waiting as f64),
        options.calls
    );
    let rows: Vec<[String; 5]> = measured.iter().map(Latency::row).collect();
    table(["view", "p50", "p95", "slowest", "target for p95"], &rows);
    Ok(measured.iter().map(Latency::figures).collect())
}

/// Counts the commits that the live pages of one open tab and of several cause. A live page is fetched
/// once per second.
async fn compare_tabs(client: &Client, admin: &mut Admin) -> Result<Value> {
    let served = TestServer::api(client, Access::Tokens).await?;
    let mut commits = Vec::new();
    for tabs in [1, TABS] {
        eprintln!("measuring: Postgres, {tabs} open tabs");
        // Sessions report their commits within a second.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let before = admin.commits_so_far().await?;
        let mut open = tokio::task::JoinSet::new();
        for n in 0..tabs {
            let mut http = HttpClient::open(&served).await?;
            http.age = Age::Kept;
            open.spawn(async move {
                // Tabs are not opened at the same moment.
                tokio::time::sleep(TABS_TIME / 15 * n as u32 / tabs as u32).await;
                let mut ticks = tokio::time::interval(Duration::from_secs(1));
                for _ in 0..TABS_TIME.as_secs() {
                    ticks.tick().await;
                    http.send("GET /ui").await.map_err(|error| error.to_string())?;
                }
                Ok::<(), String>(())
            });
        }
        while let Some(ended) = open.join_next().await {
            ended??;
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        commits.push(admin.commits_so_far().await? - before);
    }
    let ratio = commits[1] as f64 / commits[0].max(1) as f64;
    println!(
        "\nPostgres: the overview in 1 tab: {} commits; in {TABS} tabs: {} ({ratio:.2} times)",
        commits[0], commits[1]
    );
    Ok(json!({ "one": commits[0], "ten": commits[1], "ratio": ratio }))
}

/// Sends requests one after another on one connection.
struct HttpClient {
    connection: Connection,
    address: SocketAddr,
    token: String,
    age: Age,
}

/// Whether a page may show what another request has just read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Age {
    Fresh,
    Kept,
}

impl HttpClient {
    async fn open(served: &TestServer) -> Result<Self> {
        let token = served.token.clone().unwrap_or_default();
        let connection = Connection::open(served.address).await?;
        Ok(HttpClient { connection, address: served.address, token, age: Age::Fresh })
    }

    /// Sends a request such as `GET /jobs`, with an optional body after the path, and returns
    /// the body of the response.
    async fn send(&mut self, request: &str) -> Result<&[u8]> {
        let mut parts = request.splitn(3, ' ');
        let (method, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let body = parts.next().unwrap_or_default();
        let cache = if self.age == Age::Fresh { "cache-control: no-cache\r\n" } else { "" };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {}\r\n{cache}\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.address,
            self.token,
            body.len()
        );
        self.connection.send(request.as_bytes()).await
    }

    /// Like [`send`](Self::send), with the body parsed as JSON.
    async fn json(&mut self, request: &str) -> Result<Value> {
        Ok(serde_json::from_slice(self.send(request).await?)?)
    }
}
