//! `bench endurance`: a long run in fast motion. Jobs pass through the queue at a constant
//! rate with a short retention time, while upkeep runs as in production. Once retention
//! removes as many jobs as end, the sizes of the tables, the number of tallies and the time
//! that the numbers of `GET /stats` take must stay the same.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use longshore::worker::{Context, Failure, Settings, Worker};
use longshore::{Client, Retention};
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::postgres_server::Admin;
use crate::report::{self, median, rate, table, thousands};
use crate::sqlite_files::{File, Files, blocking};
use crate::{Engine, Result, ServerOptions, library, raw_sqlite};

const SCHEMA: &str = "bench_endurance";
const CONCURRENCY: u32 = 24;
/// Jobs that are enqueued in one call.
const BATCH: u64 = 500;
/// The producer waits while more jobs than this are enqueued and not run.
const MAX_BACKLOG: u64 = 20_000;
/// Every hundredth job fails permanently, so that there is a history to remove.
const FAILS_EVERY: u64 = 100;
/// Upkeep runs this often within one retention time. By default a worker looks every minute
/// for jobs that are kept for a week, so this is not in its favour.
const TURNS_PER_RETENTION: u32 = 12;

/// Options of `bench endurance`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// The engine to measure.
    #[arg(long, value_enum, default_value = "postgres")]
    engine: Engine,
    /// Jobs to enqueue and run.
    #[arg(long, default_value_t = 2_000_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1000..))]
    jobs: u64,
    /// How long finished jobs are kept.
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    retention: u64,
    /// The length of the run: jobs are enqueued at a constant rate, or as fast as they are
    /// run if that is slower.
    #[arg(long, default_value_t = 240, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(10..))]
    seconds: u64,
    /// The file to write the figures to.
    #[arg(long, value_name = "FILE", default_value = "target/bench/endurance.json")]
    json: PathBuf,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let mut runs = Vec::new();
    if options.engine != Engine::Sqlite {
        let mut admin = Admin::connect(options.server.url()?).await?;
        if admin.check_durability() {
            let client = admin.fresh_schema(SCHEMA).await?;
            let probe = Probe::Postgres(admin.raw_connection().await?);
            runs.push(process_jobs("postgres", client, admin.client(SCHEMA).await?, probe, options).await?);
            admin.drop_schema(SCHEMA).await?;
        }
    }
    if options.engine != Engine::Postgres {
        let mut files = Files::new("endurance")?;
        files.print_durability()?;
        let file = files.fresh().await?;
        let (client, observer) = (file.client().await?, file.client().await?);
        runs.push(process_jobs("sqlite", client, observer, Probe::Sqlite(file), options).await?);
    }
    let figures = json!({
        "taken_at": chrono::Utc::now().to_rfc3339(),
        "machine": report::machine(),
        "jobs": options.jobs,
        "retention_seconds": options.retention,
        "runs": runs,
    });
    report::write(&options.json, &figures)
}

/// What the tables look like at one moment.
#[derive(Default)]
struct Tables {
    /// The total size of the tables and their indexes.
    bytes: u64,
    finished_bytes: u64,
    jobs_bytes: u64,
    tallies_bytes: u64,
    /// Finished jobs that are kept.
    finished: u64,
    /// Rows that vacuum has not removed yet, as the server estimates them.
    dead: u64,
    /// All tallies. Each minute adds a row per group, for two hours; then they become hours.
    tallies: u64,
    /// Tallies that are not folded yet. On SQLite, batches update the row of their minute.
    unfolded: u64,
}

struct Sample {
    at: Duration,
    /// Jobs run since the sample before, per second.
    rate: f64,
    waiting: u64,
    tables: Tables,
    /// How long the queries of `GET /stats` take.
    stats: Duration,
}

async fn process_jobs(
    engine: &str,
    client: Client,
    observer: Client,
    mut probe: Probe,
    options: &Options,
) -> Result<Value> {
    let retention = Duration::from_secs(options.retention);
    let settings = Settings {
        concurrency: CONCURRENCY,
        retention: Retention {
            succeeded: Some(retention),
            cancelled: Some(retention),
            failed_permanent: Some(retention),
        },
        retention_interval: retention / TURNS_PER_RETENTION,
        ..Settings::default()
    };
    let run = Arc::new(AtomicU64::new(0));
    let count = run.clone();
    let handler = move |_: serde_json::Value, _: Context| {
        let nth = count.fetch_add(1, Ordering::Relaxed);
        async move {
            if nth.is_multiple_of(FAILS_EVERY) {
                Err(Failure::permanent("every hundredth fails"))
            } else {
                Ok(())
            }
        }
    };
    let worker = Worker::builder(client.clone()).function(library::KIND, handler).settings(settings);
    let worker = worker.build()?.start().await?;

    let started = Instant::now();
    let mut producer = tokio::spawn(produce(client, run.clone(), options.jobs, options.seconds));
    let mut is_produced = false;
    let interval = Duration::from_secs_f64((options.seconds as f64 / 60.0).max(0.5));
    let mut samples: Vec<Sample> = Vec::new();
    let (mut last_at, mut last_run) = (Duration::ZERO, 0);
    while run.load(Ordering::Relaxed) < options.jobs {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            produced = &mut producer, if !is_produced => {
                produced??;
                is_produced = true;
                continue;
            }
        }
        let (at, done) = (started.elapsed(), run.load(Ordering::Relaxed));
        let (stats, waiting) = time_stats(&observer).await?;
        let tables = probe.tables().await?;
        samples.push(Sample { at, rate: rate(done - last_run, at - last_at), waiting, tables, stats });
        (last_at, last_run) = (at, done);
    }
    let took = started.elapsed();
    worker.stop().await;
    print_samples(engine, &samples);
    println!(
        "\n{engine}: {} jobs in {:.0} s, {} jobs/s",
        thousands(options.jobs as f64),
        took.as_secs_f64(),
        thousands(rate(options.jobs, took))
    );
    let quarters = print_quarters(&samples);
    Ok(json!({
        "engine": engine,
        "seconds": took.as_secs_f64(),
        "samples": samples.iter().map(Sample::figures).collect::<Vec<_>>(),
        "last_quarter_to_third": quarters,
    }))
}

/// Enqueues jobs at a constant rate. Jobs that could not be enqueued in time follow as soon
/// as the backlog is small enough.
async fn produce(client: Client, run: Arc<AtomicU64>, jobs: u64, seconds: u64) -> Result<()> {
    let (started, per_second) = (Instant::now(), jobs as f64 / seconds as f64);
    let mut enqueued = 0;
    while enqueued < jobs {
        let due = (started.elapsed().as_secs_f64() * per_second) as u64;
        let backlog = enqueued.saturating_sub(run.load(Ordering::Relaxed));
        if due < enqueued + BATCH.min(jobs - enqueued) || backlog > MAX_BACKLOG {
            tokio::time::sleep(Duration::from_millis(2)).await;
            continue;
        }
        let end = jobs.min(enqueued + BATCH);
        client.enqueue_many((enqueued..end).map(library::job)).await?;
        enqueued = end;
    }
    Ok(())
}

/// Runs the queries of `GET /stats`; returns the median time of three and the waiting jobs.
async fn time_stats(client: &Client) -> Result<(Duration, u64)> {
    let mut times = Vec::new();
    let mut waiting = 0;
    for _ in 0..3 {
        let started = Instant::now();
        let now = client.now().await?;
        let counts = client.counts().await?;
        client.tallied(now - chrono::Duration::minutes(60)).await?;
        client.tallied(now - chrono::Duration::minutes(5)).await?;
        times.push(started.elapsed());
        let is_waiting = |count: &&longshore::Count| {
            matches!(count.status, longshore::Status::Queued | longshore::Status::Retrying)
        };
        waiting = counts.iter().filter(is_waiting).map(|count| count.jobs).sum();
    }
    times.sort();
    Ok((times[1], waiting))
}

/// Reads the sizes of the tables, outside the library.
enum Probe {
    Postgres(PgConnection),
    Sqlite(File),
}

const TABLES: &str = "
    select sum(pg_total_relation_size(s.relid))::int8,
           sum(pg_total_relation_size(s.relid)) filter (where s.relname = 'finished')::int8,
           sum(pg_total_relation_size(s.relid)) filter (where s.relname = 'jobs')::int8,
           sum(pg_total_relation_size(s.relid)) filter (where s.relname = 'tallies')::int8,
           sum(s.n_dead_tup)::int8,
           (select count(*) from bench_endurance.finished),
           (select count(*) from bench_endurance.tallies),
           (select count(*) from bench_endurance.tallies where level = 0)
      from pg_stat_user_tables s
     where s.schemaname = 'bench_endurance'";

impl Probe {
    async fn tables(&mut self) -> Result<Tables> {
        match self {
            Probe::Postgres(connection) => {
                let (bytes, finished_bytes, jobs_bytes, tallies_bytes, dead, finished, tallies, unfolded): (
                    i64,
                    i64,
                    i64,
                    i64,
                    i64,
                    i64,
                    i64,
                    i64,
                ) = sqlx::query_as(TABLES).fetch_one(connection).await?;
                Ok(Tables {
                    bytes: bytes as u64,
                    finished_bytes: finished_bytes as u64,
                    jobs_bytes: jobs_bytes as u64,
                    tallies_bytes: tallies_bytes as u64,
                    finished: finished as u64,
                    dead: dead as u64,
                    tallies: tallies as u64,
                    unfolded: unfolded as u64,
                })
            }
            Probe::Sqlite(file) => {
                let path = file.path.clone();
                blocking(move || {
                    let connection = raw_sqlite::open(&path)?;
                    let number =
                        |sql| connection.query_row(sql, [], |row| row.get::<_, i64>(0)).map(|n| n as u64);
                    Ok(Tables {
                        bytes: number(
                            "select page_count * page_size from pragma_page_count, pragma_page_size",
                        )?,
                        finished: number("select count(*) from finished")?,
                        tallies: number("select count(*) from tallies")?,
                        ..Tables::default()
                    })
                })
                .await
            }
        }
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1024.0 / 1024.0)
}

fn print_samples(engine: &str, samples: &[Sample]) {
    println!("\n{engine}");
    let row = |sample: &Sample| {
        let tables = &sample.tables;
        [
            format!("{:.0}", sample.at.as_secs_f64()),
            thousands(sample.rate),
            thousands(sample.waiting as f64),
            mebibytes(tables.bytes),
            mebibytes(tables.jobs_bytes),
            mebibytes(tables.finished_bytes),
            mebibytes(tables.tallies_bytes),
            thousands(tables.finished as f64),
            thousands(tables.dead as f64),
            thousands(tables.tallies as f64),
            thousands(tables.unfolded as f64),
            report::millis(sample.stats),
        ]
    };
    let head = [
        "second",
        "jobs/s",
        "waiting",
        "MiB",
        "jobs",
        "finished",
        "tallies",
        "kept",
        "dead rows",
        "tally rows",
        "unfolded",
        "stats",
    ];
    table(head, &samples.iter().map(row).collect::<Vec<_>>());
}

/// Compares the medians of the last two quarters of the run.
fn print_quarters(samples: &[Sample]) -> Value {
    type Figure = fn(&Sample) -> f64;
    let figures: [(&str, Figure); 7] = [
        ("jobs/s", |sample| sample.rate),
        ("bytes of all tables", |sample| sample.tables.bytes as f64),
        ("finished jobs kept", |sample| sample.tables.finished as f64),
        ("dead rows", |sample| sample.tables.dead as f64),
        ("tally rows not folded", |sample| sample.tables.unfolded as f64),
        ("tally rows per minute", |sample| {
            sample.tables.tallies as f64 / (sample.at.as_secs_f64() / 60.0).ceil()
        }),
        ("milliseconds of stats", |sample| sample.stats.as_secs_f64() * 1000.0),
    ];
    let quarter = |nth: usize| &samples[samples.len() * nth / 4..samples.len() * (nth + 1) / 4];
    let mut rows = Vec::new();
    let mut ratios = serde_json::Map::new();
    for (name, figure) in figures {
        let of = |nth| median(quarter(nth).iter().map(figure).collect()).unwrap_or(0.0);
        let (third, last) = (of(2), of(3));
        let ratio = if third > 0.0 { last / third } else { 1.0 };
        rows.push([name.to_owned(), format!("{third:.1}"), format!("{last:.1}"), format!("{ratio:.2}")]);
        ratios.insert(name.to_owned(), json!(ratio));
    }
    println!();
    table(["median", "third quarter", "last quarter", "ratio"], &rows);
    Value::Object(ratios)
}

impl Sample {
    fn figures(&self) -> Value {
        json!({
            "second": self.at.as_secs_f64(),
            "jobs_per_second": self.rate,
            "waiting": self.waiting,
            "bytes": self.tables.bytes,
            "jobs_bytes": self.tables.jobs_bytes,
            "finished_bytes": self.tables.finished_bytes,
            "tallies_bytes": self.tables.tallies_bytes,
            "finished": self.tables.finished,
            "dead_rows": self.tables.dead,
            "tally_rows": self.tables.tallies,
            "tally_rows_not_folded": self.tables.unfolded,
            "stats_ms": self.stats.as_secs_f64() * 1000.0,
        })
    }
}
