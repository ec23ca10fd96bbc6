//! `bench held`: throughput while another transaction stays open, so that vacuum cannot
//! remove dead rows. With the claim cursor the rate should stay constant. Runs that
//! always claim from the head of the index show what the cursor saves.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use longshore::NewJob;
use longshore::store::ClaimCursor;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::postgres_server::Admin;
use crate::report::{self, rate, table, thousands};
use crate::{Result, ServerOptions, library};

const SCHEMA: &str = "bench_held";
/// Jobs that are always waiting, so that every claim is full.
const BACKLOG: u64 = 5_000;
/// Jobs that are enqueued in one call, then claimed and settled in batches.
const ROUND: u64 = 2_500;
const BATCH: u32 = 500;

/// Options of `bench held`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// Jobs to enqueue, claim and settle in each run.
    #[arg(long, default_value_t = 500_000, value_parser = clap::value_parser!(u64).range(25_000..))]
    jobs: u64,
    /// Jobs in the run that is expected to be slow: snapshot held, no cursor
    /// [default: a fifth of --jobs].
    #[arg(long, value_name = "JOBS")]
    crawl: Option<u64>,
    /// Stop a run that takes longer, and report how many jobs it completed.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    limit: u64,
    /// The file to write the figures to.
    #[arg(long, value_name = "FILE", default_value = "target/bench/held.json")]
    json: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Snapshot {
    None,
    Held,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claims {
    FromCursor,
    FromHead,
}

/// The jobs of a run.
#[derive(Clone, Copy)]
pub(crate) struct Workload {
    pub(crate) jobs: u64,
    pub(crate) job: fn(u64) -> NewJob,
    /// The limit of each group, if the jobs have groups.
    pub(crate) group_limit: Option<u32>,
    /// Stop a run that takes longer.
    pub(crate) limit: Duration,
}

pub(crate) struct Run {
    snapshot: Snapshot,
    claims: Claims,
    requested: u64,
    done: u64,
    took: Duration,
    /// Jobs/s in each completed tenth of the run.
    pub(crate) tenths: Vec<f64>,
}

impl Run {
    fn name(&self) -> String {
        let snapshot = if self.snapshot == Snapshot::Held { "snapshot held" } else { "no snapshot" };
        let claims = if self.claims == Claims::FromCursor { "cursor" } else { "always head" };
        format!("{snapshot}, {claims}")
    }

    pub(crate) fn rate(&self) -> f64 {
        rate(self.done, self.took)
    }

    pub(crate) fn last_to_first(&self) -> Option<f64> {
        Some(self.tenths.last()? / self.tenths.first()?).filter(|_| self.tenths.len() > 1)
    }
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let mut admin = Admin::connect(options.server.url()?).await?;
    if !admin.check_durability() {
        return Ok(());
    }
    let mut runs: Vec<Run> = Vec::new();
    for claims in [Claims::FromCursor, Claims::FromHead] {
        for snapshot in [Snapshot::None, Snapshot::Held] {
            let is_slow = (snapshot, claims) == (Snapshot::Held, Claims::FromHead);
            let jobs = if is_slow { options.crawl.unwrap_or(options.jobs / 5) } else { options.jobs };
            let workload = Workload {
                jobs,
                job: library::job,
                group_limit: None,
                limit: Duration::from_secs(options.limit),
            };
            let run = process_jobs(&mut admin, SCHEMA, snapshot, claims, workload).await?;
            eprintln!("measured: {}, {} jobs in {:.1} s", run.name(), run.done, run.took.as_secs_f64());
            runs.push(run);
        }
    }
    admin.drop_schema(SCHEMA).await?;
    let figures: Vec<Value> = runs.iter().map(|run| figures(run, &runs)).collect();
    print_table(&runs);
    let figures = json!({
        "taken_at": chrono::Utc::now().to_rfc3339(),
        "machine": report::machine(),
        "postgres": admin.settings_json(),
        "runs": figures,
    });
    report::write(&options.json, &figures)
}

/// Enqueues, claims and settles the jobs of a workload in new tables.
pub(crate) async fn process_jobs(
    admin: &mut Admin,
    schema: &str,
    snapshot: Snapshot,
    claims: Claims,
    workload: Workload,
) -> Result<Run> {
    let Workload { jobs, job, group_limit, limit } = workload;
    let client = admin.fresh_schema(schema).await?;
    if group_limit.is_some() {
        client.group_defaults("default", group_limit, None).await?;
    }
    let cursor = match claims {
        Claims::FromCursor => ClaimCursor::default(),
        Claims::FromHead => ClaimCursor::always_head(),
    };
    let mut claimer = library::Claimer::register(&client, None, BATCH, cursor).await?;
    library::enqueue_bulk_of(&client, BACKLOG, ROUND, job).await?;
    admin.vacuum_analyze(schema).await?;
    let holder = match snapshot {
        Snapshot::None => None,
        Snapshot::Held => Some(hold_snapshot(admin.raw_connection().await?, schema).await?),
    };

    let mut run =
        Run { snapshot, claims, requested: jobs, done: 0, took: Duration::ZERO, tenths: Vec::new() };
    let (started, mut tenth_started, mut tenth_done) = (Instant::now(), Instant::now(), 0);
    while run.done < jobs && started.elapsed() < limit {
        client.enqueue_many((run.done..run.done + ROUND).map(job)).await?;
        let mut settled = 0;
        while settled < ROUND {
            settled += claimer.round().await?.jobs;
        }
        run.done += settled;
        if run.done >= jobs * (run.tenths.len() as u64 + 1) / 10 {
            run.tenths.push(rate(run.done - tenth_done, tenth_started.elapsed()));
            (tenth_started, tenth_done) = (Instant::now(), run.done);
        }
    }
    run.took = started.elapsed();
    if let Some(holder) = holder {
        holder.close().await?;
    }
    Ok(run)
}

/// Opens a transaction that keeps a snapshot of the tables until it is closed.
async fn hold_snapshot(mut connection: PgConnection, schema: &str) -> Result<PgConnection> {
    sqlx::query("begin isolation level repeatable read").execute(&mut connection).await?;
    let read = AssertSqlSafe(format!("select 1 from {schema}.jobs"));
    sqlx::query(read).fetch_all(&mut connection).await?;
    Ok(connection)
}

/// The ratio of a run's rate to the same run without a snapshot.
fn ratio_without_snapshot(run: &Run, runs: &[Run]) -> Option<f64> {
    let unheld = runs.iter().find(|other| other.claims == run.claims && other.snapshot == Snapshot::None)?;
    Some(run.rate() / unheld.rate()).filter(|_| run.snapshot == Snapshot::Held)
}

fn print_table(runs: &[Run]) {
    let ratio = |ratio: Option<f64>| ratio.map_or(String::new(), |ratio| format!("{ratio:.2}"));
    let with_target = |ratio: Option<f64>, target: f64, run: &Run| match ratio {
        Some(ratio) if run.claims == Claims::FromCursor && run.snapshot == Snapshot::Held => {
            format!("{ratio:.2} (≥ {target} {})", if ratio >= target { "met" } else { "MISSED" })
        }
        Some(ratio) => format!("{ratio:.2}"),
        None => String::new(),
    };
    let row = |run: &Run| {
        let stopped = if run.done < run.requested { " (stopped at the limit)" } else { "" };
        [
            run.name(),
            format!("{}{stopped}", thousands(run.done as f64)),
            thousands(run.rate()),
            with_target(run.last_to_first(), 0.9, run),
            with_target(ratio_without_snapshot(run, runs), 0.8, run),
        ]
    };
    println!();
    let rows: Vec<[String; 5]> = runs.iter().map(row).collect();
    table(["run", "jobs", "jobs/s", "last / first tenth", "rate / without snapshot"], &rows);
    println!("\njobs/s in each tenth");
    for run in runs {
        let tenths: Vec<String> = run.tenths.iter().map(|tenth| thousands(*tenth)).collect();
        println!("{}: {}", run.name(), tenths.join(" "));
    }
    let slow = runs.iter().find(|run| run.claims == Claims::FromHead && run.snapshot == Snapshot::Held);
    if let Some(slow) = slow {
        println!(
            "without the cursor and with a snapshot held, the last tenth runs at {} of the rate of the first",
            ratio(slow.last_to_first())
        );
    }
}

fn figures(run: &Run, runs: &[Run]) -> Value {
    json!({
        "run": run.name(),
        "jobs": run.done,
        "jobs_asked": run.requested,
        "seconds": run.took.as_secs_f64(),
        "jobs_per_second": run.rate(),
        "tenths": run.tenths,
        "last_to_first": run.last_to_first(),
        "to_run_without_snapshot": ratio_without_snapshot(run, runs),
    })
}
