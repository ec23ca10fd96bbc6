//! `bench flat`: whether the cost of a claim, a lookup or a count depends on the number
//! of other jobs. Fills the tables with direct SQL, then measures.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use longshore::store::ClaimCursor;
use longshore::{Client, JobId, ListFilter, Status};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::library::{Claimer, KIND};
use crate::postgres_server::Admin;
use crate::report::{self, millis, table, thousands};
use crate::{Result, ServerOptions};

const SCHEMA: &str = "bench_flat";
const BATCH: u32 = 100;
/// Claims in a phase; together they claim 20,000 jobs.
const CLAIMS: usize = 200;
const LOOKUPS: usize = 200;

/// Options of `bench flat`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// Finished jobs in the tables.
    #[arg(long, default_value_t = 5_000_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1000..))]
    finished: u64,
    /// Waiting jobs that are due.
    #[arg(long, default_value_t = 100_000, value_name = "N", value_parser = clap::value_parser!(u64).range(30_000..))]
    waiting: u64,
    /// Jobs that a claim has to skip: due tomorrow at a higher priority, or of kinds
    /// that the worker does not handle.
    #[arg(long, default_value_t = 1_000_000, value_name = "N")]
    obstacles: u64,
    /// Print the whole plan of each explained claim, not only its totals.
    #[arg(long)]
    plans: bool,
    /// The file to write the figures to.
    #[arg(long, value_name = "FILE", default_value = "target/bench/flat.json")]
    json: PathBuf,
}

/// What claims cost with certain tables.
struct Phase {
    name: &'static str,
    first_claim: Duration,
    /// The mean of the claims after the first, including rare expensive ones.
    claim: Duration,
    /// The median, which is hardly affected by noise.
    median_claim: Duration,
    settle: Duration,
    slowest_claim: Duration,
    jobs_per_second: f64,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let mut admin = Admin::connect(options.server.url()?).await?;
    if !admin.check_durability() {
        return Ok(());
    }
    let client = admin.fresh_schema(SCHEMA).await?;
    let figures = measure(options, &mut admin, &client).await;
    drop(client);
    admin.drop_schema(SCHEMA).await?;
    let report = json!({
        "taken_at": chrono::Utc::now().to_rfc3339(),
        "machine": report::machine(),
        "postgres": admin.settings_json(),
        "finished": options.finished,
        "waiting": options.waiting,
        "obstacles": options.obstacles,
        "figures": figures?,
    });
    report::write(&options.json, &report)
}

async fn measure(options: &Options, admin: &mut Admin, client: &Client) -> Result<Value> {
    let mut tables = FilledTables { options, admin, client, next: 0 };
    let handles_any = None;
    let handles_bench = Some(vec![KIND.to_owned()]);
    let mut phases = Vec::new();

    tables.top_up().await?;
    phases.push(tables.claims("only waiting jobs", handles_any.clone()).await?);
    phases.push(tables.claims("only waiting jobs, kinds given", handles_bench.clone()).await?);

    tables.fill_finished().await?;
    tables.explain("many finished", handles_any.clone()).await?;
    phases.push(tables.claims("many finished", handles_any.clone()).await?);

    tables.add_obstacles(10, "interval '1 day'", KIND).await?;
    tables.explain("many due tomorrow, higher priority", handles_any.clone()).await?;
    phases.push(tables.claims("many due tomorrow, higher priority", handles_any).await?);
    tables.remove_future_jobs().await?;

    phases.push(tables.claims("many finished, kinds given", handles_bench.clone()).await?);
    tables.add_obstacles(0, "interval '-2 hours'", "unhandled").await?;
    tables.explain("many of other kinds at the head", handles_bench.clone()).await?;
    phases.push(tables.claims("many of other kinds at the head", handles_bench).await?);
    print_phases(&phases);

    let lookups = tables.lookups().await?;
    tables.check().await?;
    Ok(json!({ "claims": phases.iter().map(figures).collect::<Vec<_>>(), "lookups": lookups }))
}

// ---- filling the tables --------------------------------------------------

/// The tables while they are filled.
struct FilledTables<'a> {
    options: &'a Options,
    admin: &'a mut Admin,
    client: &'a Client,
    /// The number of the next job, so that ids are unique.
    next: u64,
}

/// SQL for an id like a UUIDv7 of the time `created`, with `number` for its random part.
fn id_at(created: &str, number: &str) -> String {
    format!(
        "(lpad(to_hex((date_part('epoch', {created}) * 1000)::int8), 12, '0') || '70008000'
          || lpad(to_hex({number}), 12, '0'))::uuid"
    )
}

impl FilledTables<'_> {
    /// Inserts waiting jobs, numbered from `self.next` and due `due` from now.
    async fn insert_waiting(&mut self, jobs: u64, priority: i16, due: &str, kind: &str) -> Result<()> {
        let (from, to) = (self.next, self.next + jobs);
        self.next = to;
        let id = id_at("now()", "n");
        let run_at = format!("now() + {due} - ({to} - n) * interval '1 microsecond'");
        self.admin
            .execute(&format!(
                "with fresh as (
                   select {id} as id, {run_at} as run_at, n
                     from generate_series({from}::int8, {to}::int8 - 1) as n),
                 requests as (
                   insert into {SCHEMA}.jobs
                          (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload)
                   select id, now(), run_at, 7200000, {priority}, 3, '{kind}', 'default',
                          json_build_object('to', 'somebody@example.com', 'template', 'welcome', 'n', n)
                     from fresh)
                 insert into {SCHEMA}.ready
                        (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
                         interruptions, keyed, kind, queue)
                 select id, run_at, now(), 7200000, 0, {priority}, 0, 3, 0, false, '{kind}', 'default'
                   from fresh"
            ))
            .await
    }

    /// Replaces the due jobs that have been claimed.
    async fn top_up(&mut self) -> Result<()> {
        let waiting: i64 = sqlx::query_scalar(
            "select count(*) from bench_flat.ready where kind = 'bench' and run_at <= now()",
        )
        .fetch_one(&mut self.admin.connection)
        .await?;
        let missing = self.options.waiting.saturating_sub(waiting as u64);
        self.insert_waiting(missing, 0, "interval '0'", KIND).await?;
        self.admin.vacuum_analyze(SCHEMA).await
    }

    /// Inserts jobs that finished over the last 30 days, with the tallies that upkeep
    /// would have written.
    async fn fill_finished(&mut self) -> Result<()> {
        let jobs = self.options.finished;
        eprintln!("inserting {} finished jobs", thousands(jobs as f64));
        let (from, to) = (self.next, self.next + jobs);
        self.next = to;
        let created = format!(
            "now() - interval '30 days' + (n - {from}) * (interval '29 days 23 hours' / {jobs}::float8)"
        );
        let id = id_at("created", "n");
        let kind = "(array['mail', 'resize', 'report', 'bench'])[1 + n % 4]";
        self.admin
            .execute(&format!(
                "create unlogged table {SCHEMA}.past as
                 select n, created, {id} as id, {kind} as kind
                   from (select n, {created} as created
                           from generate_series({from}::int8, {to}::int8 - 1) as n) as numbered"
            ))
            .await?;
        self.admin
            .execute(&format!(
                "insert into {SCHEMA}.jobs
                        (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload)
                 select id, created, created, 7200000, 0, 3, kind, 'default',
                        format('{{\"to\":\"somebody@example.com\",\"template\":\"welcome\",\"n\":%s}}', n)::json
                   from {SCHEMA}.past"
            ))
            .await?;
        self.admin
            .execute(&format!(
                "insert into {SCHEMA}.finished
                        (id, started_at, finished_at, finished_by, lease_no, outcome, attempts, max_attempts,
                         interruptions, last_error)
                 select id, created + interval '1 second', created + interval '2 seconds', id, 1,
                        (case when n % 50 = 0 then 'failed_permanent' when n % 101 = 0 then 'cancelled'
                         else 'succeeded' end)::{SCHEMA}.outcome,
                        1, 3, 0, case when n % 50 = 0 then 'the mail server refused the message' end
                   from {SCHEMA}.past"
            ))
            .await?;
        self.admin
            .execute(&format!(
                "insert into {SCHEMA}.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
                 select date_trunc('minute', f.finished_at), count(*), count(*), f.outcome,
                        {SCHEMA}.run_bucket(f.started_at, f.finished_at), 'default', p.kind
                   from {SCHEMA}.past p
                   join {SCHEMA}.finished f on f.id = p.id
                  group by 1, 4, 5, 7;
                 drop table {SCHEMA}.past"
            ))
            .await?;
        while self.client.store().fold_tallies(10_000).await? > 0 {}
        self.admin.vacuum_analyze(SCHEMA).await
    }

    /// Inserts jobs that a claim has to skip.
    async fn add_obstacles(&mut self, priority: i16, due: &str, kind: &str) -> Result<()> {
        eprintln!("inserting {} jobs that claims must skip", thousands(self.options.obstacles as f64));
        self.insert_waiting(self.options.obstacles, priority, due, kind).await?;
        self.admin.vacuum_analyze(SCHEMA).await
    }

    /// Removes the jobs that are due tomorrow.
    async fn remove_future_jobs(&mut self) -> Result<()> {
        self.admin
            .execute(&format!(
                "with gone as (
                   delete from {SCHEMA}.ready
                    where run_at > now() + interval '1 hour'
                   returning id)
                 delete from {SCHEMA}.jobs j
                  using gone
                  where j.id = gone.id"
            ))
            .await?;
        self.admin.vacuum_analyze(SCHEMA).await
    }

    /// Checks that the directly inserted rows are what the library would have written.
    async fn check(&mut self) -> Result<()> {
        let report = self.client.check().await;
        match report {
            Ok(report) if report.problems.is_empty() => {
                println!(
                    "\nchecked: {} jobs, each in exactly one state table",
                    thousands(report.jobs as f64)
                );
            }
            Ok(report) => {
                let problems: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
                println!("\nwarning: the tables are not consistent: {}", problems.join("; "))
            }
            Err(error) => println!("\nwarning: the tables could not be checked: {error}"),
        }
        Ok(())
    }
}

// ---- claims --------------------------------------------------------------

impl FilledTables<'_> {
    async fn claims(&mut self, name: &'static str, kinds: Option<Vec<String>>) -> Result<Phase> {
        self.top_up().await?;
        // Another claimer warms up the connection, so that this claimer's first claim
        // measures a new cursor and not a new connection.
        let mut warm_up =
            Claimer::register(self.client, kinds.clone(), BATCH, ClaimCursor::default()).await?;
        for _ in 0..8 {
            warm_up.round().await?;
        }
        let mut claimer = Claimer::register(self.client, kinds, BATCH, ClaimCursor::default()).await?;
        let first = claimer.round().await?;
        let (mut claims, mut settle, mut jobs) = (Vec::new(), Duration::ZERO, 0);
        for _ in 1..CLAIMS {
            let round = claimer.round().await?;
            claims.push(round.claim);
            settle += round.settle;
            jobs += round.jobs;
        }
        claims.sort();
        let claim: Duration = claims.iter().sum();
        if jobs < (CLAIMS as u64 - 1) * u64::from(BATCH) {
            println!("warning: {name}: claims were not full, {jobs} jobs in {} claims", CLAIMS - 1);
        }
        let rounds = CLAIMS as u32 - 1;
        Ok(Phase {
            name,
            first_claim: first.claim,
            claim: claim / rounds,
            settle: settle / rounds,
            median_claim: claims[claims.len() / 2],
            slowest_claim: claims[claims.len() - 1],
            jobs_per_second: report::rate(jobs, claim + settle),
        })
    }

    async fn explain(&mut self, name: &str, kinds: Option<Vec<String>>) -> Result<()> {
        let claimer = Claimer::register(self.client, kinds, BATCH, ClaimCursor::default()).await?;
        let store = self.client.store().as_postgres().ok_or("the store is not Postgres")?;
        let plan = store.explain_claim(claimer.request()).await?;
        println!("\nclaim of {BATCH} jobs from the head, {name}:");
        let shown = plan.lines().filter(|line| self.options.plans || is_total(line));
        shown.for_each(|line| println!("  {}", line.trim_end()));
        Ok(())
    }
}

/// Whether a line of a plan is about the plan as a whole.
fn is_total(line: &str) -> bool {
    let text = line.trim_start();
    let outer = line.len() - text.len() <= 2;
    (outer && text.starts_with("Buffers:"))
        || ["Planning Time:", "Execution Time:", "JIT:"].iter().any(|start| text.starts_with(start))
}

fn print_phases(phases: &[Phase]) {
    let named = |name: &str| phases.iter().find(|phase| phase.name == name);
    let ratio_to_baseline = |phase: &Phase| {
        let base = match phase.name {
            "many of other kinds at the head" => named("many finished, kinds given"),
            name if name.ends_with("kinds given") => named("only waiting jobs, kinds given"),
            _ => named("only waiting jobs"),
        };
        base.map_or(1.0, |base| phase.claim.as_secs_f64() / base.claim.as_secs_f64())
    };
    let row = |phase: &Phase| {
        let ratio = ratio_to_baseline(phase);
        let target = match phase.name {
            "many of other kinds at the head" => {
                format!("≤ 2 {}", if ratio <= 2.0 { "met" } else { "MISSED" })
            }
            _ => String::new(),
        };
        [
            phase.name.to_owned(),
            millis(phase.first_claim),
            millis(phase.claim),
            millis(phase.median_claim),
            millis(phase.slowest_claim),
            millis(phase.settle),
            thousands(phase.jobs_per_second),
            format!("{ratio:.2}"),
            target,
        ]
    };
    println!("\n{CLAIMS} claims and settles of {BATCH} jobs; the first claim is separate");
    let head = [
        "tables",
        "first claim",
        "mean claim",
        "median",
        "slowest",
        "mean settle",
        "jobs/s",
        "claim ratio",
        "target",
    ];
    table(head, &phases.iter().map(row).collect::<Vec<_>>());
}

fn figures(phase: &Phase) -> Value {
    json!({
        "with": phase.name,
        "first_claim_ms": phase.first_claim.as_secs_f64() * 1000.0,
        "claim_ms": phase.claim.as_secs_f64() * 1000.0,
        "median_claim_ms": phase.median_claim.as_secs_f64() * 1000.0,
        "slowest_claim_ms": phase.slowest_claim.as_secs_f64() * 1000.0,
        "settle_ms": phase.settle.as_secs_f64() * 1000.0,
        "jobs_per_second": phase.jobs_per_second,
    })
}

// ---- lookups -------------------------------------------------------------

impl FilledTables<'_> {
    async fn lookups(&mut self) -> Result<Vec<Value>> {
        let ids: Vec<Uuid> =
            sqlx::query_scalar("select id from bench_flat.jobs tablesample system (0.1) limit $1")
                .bind(LOOKUPS as i64)
                .fetch_all(&mut self.admin.connection)
                .await?;
        // A third of the way from the oldest: far from the newest, where lists start.
        let deep: Option<Uuid> = sqlx::query_scalar(
            "select f.id
               from bench_flat.finished f
              where f.id > (select id from bench_flat.finished order by id limit 1)
              order by f.id
             offset $1
              limit 1",
        )
        .bind((self.options.finished / 3) as i64)
        .fetch_optional(&mut self.admin.connection)
        .await?;
        let cursor = deep.map(JobId);
        let all = ListFilter::default;
        let status = |status| ListFilter { statuses: vec![status], ..all() };
        let filters = [
            ("list, newest", all()),
            ("list, succeeded", status(Status::Succeeded)),
            ("list, failed_permanent", status(Status::FailedPermanent)),
            ("list, queued", status(Status::Queued)),
            ("list, a kind", ListFilter { kind: Some("mail".into()), ..all() }),
            ("list, an unknown kind", ListFilter { kind: Some("unknown".into()), ..all() }),
            ("list, deep cursor", ListFilter { cursor, ..all() }),
            ("list, failed_permanent, deep cursor", ListFilter { cursor, ..status(Status::FailedPermanent) }),
        ];

        let mut rows = Vec::new();
        let mut times = Vec::new();
        for id in ids {
            let started = Instant::now();
            self.client.get(JobId(id)).await?;
            times.push(started.elapsed());
        }
        rows.push(Lookup::of("get", times));
        for (name, filter) in filters {
            let mut times = Vec::new();
            for _ in 0..LOOKUPS / 4 {
                let started = Instant::now();
                self.client.list(&filter).await?;
                times.push(started.elapsed());
            }
            rows.push(Lookup::of(name, times));
        }
        let mut times = Vec::new();
        for _ in 0..LOOKUPS / 4 {
            let started = Instant::now();
            self.client.counts().await?;
            times.push(started.elapsed());
        }
        rows.push(Lookup::of("counts", times));

        println!();
        let row = |lookup: &Lookup| [lookup.name.to_owned(), millis(lookup.p50), millis(lookup.p95)];
        table(["lookup", "p50", "p95"], &rows.iter().map(row).collect::<Vec<_>>());
        let figures = |lookup: &Lookup| {
            json!({
                "lookup": lookup.name,
                "p50_ms": lookup.p50.as_secs_f64() * 1000.0,
                "p95_ms": lookup.p95.as_secs_f64() * 1000.0,
            })
        };
        Ok(rows.iter().map(figures).collect())
    }
}

struct Lookup {
    name: &'static str,
    p50: Duration,
    p95: Duration,
}

impl Lookup {
    fn of(name: &'static str, mut times: Vec<Duration>) -> Self {
        times.sort();
        let at = |share: usize| times.get((times.len() * share / 100).min(times.len().max(1) - 1)).copied();
        Lookup { name, p50: at(50).unwrap_or_default(), p95: at(95).unwrap_or_default() }
    }
}
