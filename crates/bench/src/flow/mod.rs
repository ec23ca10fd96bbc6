//! `bench flow`: what groups, limits, rates, flows and suspended jobs cost, compared with plain jobs
//! in the same run.
//!
//! Each scenario is a file. It gets the engine's tables and returns figures with their bars. A new
//! scenario is a file, a [`Scenario`] and a line in [`measure`].

use std::future::Future;
use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use longshore::{Client, NewJob};
use serde_json::{Value, json};

use crate::postgres_server::Admin;
use crate::report::{self, Sample, client_cpu, median, table, thousands};
use crate::sqlite_files::{File, Files};
use crate::{Engine, Result, ServerOptions, library};

mod claims;
mod fairness;
mod graph;
mod held;
mod rate;
mod sleeping;
mod throttled;

const DATABASE: &str = "bench_flow";
/// The tables of a scenario.
const SCHEMA: &str = "bench_ours";
/// The queue of every job.
const QUEUE: &str = "default";
/// The groups of [`grouped_job`].
const GROUPS: u64 = 100;
const BULK: u64 = 10_000;

/// What to measure, in this order.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Resident memory of a worker before and after it suspends many jobs in a durable sleep.
    // First: a process does not return memory that other scenarios have used.
    Sleeping,
    /// Claim + settle of jobs in 100 groups, against jobs without a group.
    Claims,
    /// Pick-up latency behind a million jobs of a group at its limit, against an empty queue.
    Throttled,
    /// How evenly groups with very different backlogs are served.
    Fairness,
    /// A group with a rate: the busiest second, and the rate that is reached.
    Rate,
    /// A flow of 10,000 tasks, and how long a task starts after the one before it.
    Graph,
    /// Throughput of groups while an open transaction prevents vacuum; Postgres only.
    Held,
}

/// Options of `bench flow`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// How often each side is measured, in alternating rounds.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The engines to measure.
    #[arg(long, value_enum, default_value = "postgres")]
    engine: Engine,
    /// Only these scenarios, such as `claims,rate`.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SCENARIOS")]
    only: Vec<Scenario>,
    /// The file to write the figures to.
    #[arg(long, value_name = "FILE", default_value = "target/bench/flow.json")]
    json: PathBuf,
    /// Use fewer jobs: good for experiments, too noisy to publish.
    #[arg(long)]
    quick: bool,
}

impl Options {
    fn wants(&self, scenario: Scenario) -> bool {
        self.only.is_empty() || self.only.contains(&scenario)
    }

    /// A number of jobs, which `--quick` divides by ten.
    fn jobs(&self, jobs: u64) -> u64 {
        if self.quick { jobs / 10 } else { jobs }
    }
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let mut engines = Vec::new();
    if options.engine != Engine::Sqlite {
        let mut server = Admin::connect(options.server.url()?).await?;
        if server.check_durability() {
            let facts = server.settings_json();
            let admin = Admin::connect(&server.fresh_database(DATABASE).await?).await?;
            let mut backend = Backend::Postgres(admin);
            let measured = measure(options, &mut backend).await;
            // Drop the database even if a measurement failed.
            drop(backend);
            server.drop_database(DATABASE).await?;
            engines.push(print("Postgres", facts, &measured?));
        }
    }
    if options.engine != Engine::Postgres {
        let files = Files::new("flow")?;
        let facts = files.print_durability()?;
        let figures = measure(options, &mut Backend::Sqlite(files)).await?;
        engines.push(print("SQLite", facts, &figures));
    }
    let figures = json!({
        "taken_at": chrono::Utc::now().to_rfc3339(),
        "machine": report::machine(),
        "rounds": options.rounds,
        "quick": options.quick,
        "engines": engines,
    });
    report::write(&options.json, &figures)
}

async fn measure(options: &Options, backend: &mut Backend) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for scenario in Scenario::value_variants().iter().copied().filter(|scenario| options.wants(*scenario)) {
        let name = scenario.to_possible_value().map_or(String::new(), |name| name.get_name().to_owned());
        eprintln!("measuring: {}, {name}", backend.name());
        let measured = match scenario {
            Scenario::Sleeping => sleeping::measure(options, backend).await?,
            Scenario::Claims => claims::measure(options, backend).await?,
            Scenario::Throttled => throttled::measure(options, backend).await?,
            Scenario::Fairness => fairness::measure(options, backend).await?,
            Scenario::Rate => rate::measure(options, backend).await?,
            Scenario::Graph => graph::measure(options, backend).await?,
            Scenario::Held => held::measure(options, backend).await?,
        };
        figures.extend(measured.into_iter().map(|figure| Figure { scenario: name.clone(), ..figure }));
    }
    Ok(figures)
}

/// A job of one of [`GROUPS`] groups.
fn grouped_job(n: u64) -> NewJob {
    library::job(n).group(format!("customer-{}", n % GROUPS))
}

// ---- the databases to measure on -------------------------------------------

enum Backend {
    /// A separate database.
    Postgres(Admin),
    Sqlite(Files),
}

/// A client for new tables. The SQLite file is removed when this is dropped.
struct Tables {
    client: Client,
    _file: Option<File>,
}

impl Backend {
    fn name(&self) -> &'static str {
        match self {
            Backend::Postgres(_) => "Postgres",
            Backend::Sqlite(_) => "SQLite",
        }
    }

    /// Creates empty tables.
    async fn fresh(&mut self, schema: &str) -> Result<Tables> {
        match self {
            Backend::Postgres(admin) => Ok(Tables { client: admin.fresh_schema(schema).await?, _file: None }),
            Backend::Sqlite(files) => {
                let file = files.fresh().await?;
                Ok(Tables { client: file.client().await?, _file: Some(file) })
            }
        }
    }

    /// Does what the server would have done after a while with tables that were just filled.
    async fn vacuum(&mut self, schema: &str) -> Result<()> {
        match self {
            Backend::Postgres(admin) => admin.vacuum_analyze(schema).await,
            Backend::Sqlite(_) => Ok(()),
        }
    }

    async fn timed(&mut self, work: impl Future<Output = Result<u64>>) -> Result<Sample> {
        match self {
            Backend::Postgres(admin) => admin.timed(work).await,
            Backend::Sqlite(_) => {
                let (cpu, started) = (client_cpu(), Instant::now());
                let sample = Sample::since(started, work.await?);
                let client_cpu = client_cpu().zip(cpu).map(|(after, before)| after - before);
                Ok(Sample { took: started.elapsed(), client_cpu, ..sample })
            }
        }
    }
}

// ---- figures ---------------------------------------------------------------

/// A value, and the bar that it should meet.
struct Figure {
    /// Filled in by [`measure`].
    scenario: String,
    name: String,
    value: f64,
    /// A figure without a bar explains another one.
    bar: Option<Bar>,
    /// What the value was computed from, for the reader of the table.
    note: String,
    details: Value,
}

#[derive(Clone, Copy)]
enum Bar {
    AtLeast(f64),
    AtMost(f64),
}

impl Figure {
    fn new(name: impl Into<String>, value: f64, bar: impl Into<Option<Bar>>) -> Self {
        Figure {
            scenario: String::new(),
            name: name.into(),
            value,
            bar: bar.into(),
            note: String::new(),
            details: Value::Null,
        }
    }

    /// The median of a value of each round.
    fn median(name: impl Into<String>, rounds: &[f64], bar: impl Into<Option<Bar>>) -> Self {
        let value = median(rounds.to_vec()).unwrap_or(0.0);
        Figure::new(name, value, bar).details(json!({ "rounds": rounds }))
    }

    fn note(self, note: impl Into<String>) -> Self {
        Figure { note: note.into(), ..self }
    }

    fn details(self, details: Value) -> Self {
        Figure { details, ..self }
    }

    fn is_met(&self) -> Option<bool> {
        self.bar.map(|bar| match bar {
            Bar::AtLeast(bar) => self.value >= bar,
            Bar::AtMost(bar) => self.value <= bar,
        })
    }

    fn row(&self) -> [String; 5] {
        let bar = match (self.bar, self.is_met()) {
            (None, _) | (_, None) => String::new(),
            (Some(bar), Some(met)) => {
                let (sign, bar) = match bar {
                    Bar::AtLeast(bar) => ("≥", bar),
                    Bar::AtMost(bar) => ("≤", bar),
                };
                format!("{sign} {} {}", short(bar), if met { "met" } else { "MISSED" })
            }
        };
        [self.scenario.clone(), self.name.clone(), short(self.value), bar, self.note.clone()]
    }

    fn json(&self) -> Value {
        let bar = match self.bar {
            None => Value::Null,
            Some(Bar::AtLeast(bar)) => json!({ "at_least": bar }),
            Some(Bar::AtMost(bar)) => json!({ "at_most": bar }),
        };
        json!({
            "scenario": self.scenario,
            "figure": self.name,
            "value": self.value,
            "bar": bar,
            "met": self.is_met(),
            "note": self.note,
            "details": self.details,
        })
    }
}

/// Formats a number with as many digits as are of interest.
fn short(number: f64) -> String {
    match number.abs() {
        size if size >= 1000.0 => thousands(number),
        size if size >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.3}"),
    }
}

/// Prints an engine's figures as a table and returns them as JSON.
fn print(engine: &str, facts: Value, figures: &[Figure]) -> Value {
    println!("\n{engine} (medians of the rounds)");
    let rows: Vec<[String; 5]> = figures.iter().map(Figure::row).collect();
    table(["scenario", "figure", "value", "bar", "from"], &rows);
    json!({
        "engine": engine,
        "facts": facts,
        "figures": figures.iter().map(Figure::json).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_meets_a_bar_that_it_equals() {
        let verdict = |value, bar| Figure::new("", value, bar).is_met();
        assert_eq!(verdict(0.3, Some(Bar::AtLeast(0.3))), Some(true));
        assert_eq!(verdict(0.2, Some(Bar::AtLeast(0.3))), Some(false));
        assert_eq!(verdict(109.0, Some(Bar::AtMost(109.0))), Some(true));
        assert_eq!(verdict(110.0, Some(Bar::AtMost(109.0))), Some(false));
        assert_eq!(verdict(1.0, None), None);
    }
}
