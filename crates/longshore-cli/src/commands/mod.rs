//! What each command does. Most commands call the API through an [`Endpoint`]; those that
//! create or run a queue use the database directly. This module dispatches to the commands
//! and owns `migrate` and `check`.

mod bench;
mod bulk;
mod complete;
mod config;
mod cron;
mod dead;
mod emitted;
mod enqueue;
mod events;
mod find;
mod flows;
mod groups;
mod jobs;
mod kinds;
mod long_running;
mod man;
mod operations;
mod queues;
mod repeat;
mod stats;
mod telemetry;
mod tokens;
mod workers;

use longshore::{Client, Problem, SCHEMA_VERSION};
use serde_json::json;
use tracing::Instrument;

use crate::args::{ApiCommand, Cli, Command, Migrate};
use crate::config::{Configuration, Error};
use crate::endpoint::{Endpoint, connect, file_of};
use crate::failure::{Code, Failure, Outcome};
use crate::output::Out;
use crate::traces::Traces;

use repeat::repeat;

/// Runs the command of this command line.
pub(crate) async fn run(cli: Cli, configuration: &Configuration, out: &Out) -> Result<Code, Error> {
    let traces = Traces::start(&cli)?;
    let ran = run_command(cli, configuration, traces.as_ref(), out).await;
    if let Some(traces) = traces {
        traces.flush().await;
    }
    ran
}

async fn run_command(
    cli: Cli,
    configuration: &Configuration,
    traces: Option<&Traces>,
    out: &Out,
) -> Result<Code, Error> {
    let Cli { target, command, .. } = cli;
    Ok(match command {
        // Uses its own database, not the target.
        Command::Dev(args) => long_running::dev(*args, traces, out).await?,
        Command::Completions { shell } => complete::print_script(shell, out),
        Command::Complete { words } => complete::print_candidates(&target, &words, out).await,
        Command::Man(args) => man::run(&args, out)?,
        Command::Config(command) => config::run(&command, configuration, out)?,
        Command::Serve(args) => {
            let url = target.database("serve")?;
            let client = if args.migrate {
                Client::connect(url).await.map_err(Failure::from)?
            } else {
                connect(url).await?
            };
            long_running::serve(client, *args, traces, out).await?
        }
        Command::Migrate(args) => migrate(target.database("migrate")?, &args, out).await?,
        Command::Worker(args) => {
            long_running::worker(connect(target.database("worker")?).await?, *args, traces, out).await?
        }
        Command::Tokens(command) => {
            tokens::run(&connect(target.database("tokens")?).await?, command, out).await?
        }
        Command::Check => check(&connect(target.database("check")?).await?, out).await?,
        Command::Api(command) => {
            if let Some(traces) = traces {
                traces.install();
            }
            run_api_command(&Endpoint::open(&target).await?, command, out).await?
        }
    })
}

/// Runs a command that uses only the API.
async fn run_api_command(endpoint: &Endpoint, command: ApiCommand, out: &Out) -> Outcome {
    let outcome = match command {
        ApiCommand::Enqueue(args) => {
            let span = tracing::info_span!("longshore enqueue", kind = args.kind);
            enqueue::enqueue(endpoint, *args, out).instrument(span).await
        }
        ApiCommand::EnqueueMany(args) => {
            let span = tracing::info_span!("longshore enqueue-many");
            enqueue::enqueue_many(endpoint, &args, out).instrument(span).await
        }
        ApiCommand::Jobs(command) => jobs::run(endpoint, command, out).await,
        ApiCommand::Flows(command) => flows::run(endpoint, command, out).await,
        ApiCommand::Operations(command) => operations::run(endpoint, command, out).await,
        ApiCommand::Queues(command) => queues::run(endpoint, command, out).await,
        ApiCommand::Groups(command) => groups::run(endpoint, command, out).await,
        ApiCommand::Dead(command) => dead::run(endpoint, command, out).await,
        ApiCommand::Cron(command) => cron::run(endpoint, command, out).await,
        ApiCommand::Workers(command) => workers::run(endpoint, command, out).await,
        ApiCommand::Sweep(args) => workers::sweep(endpoint, &args, out).await,
        ApiCommand::Kinds(command) => kinds::run(endpoint, command, out).await,
        ApiCommand::Counts(every) => {
            repeat(&every, out, async |out| stats::counts(endpoint, out).await).await
        }
        ApiCommand::Events { command: None } => events::run(endpoint, out).await,
        ApiCommand::Events { command: Some(command) } => emitted::run(endpoint, command, out).await,
        ApiCommand::Health => stats::health(endpoint, out).await,
        ApiCommand::Stats(args) => {
            repeat(&args.every, out, async |out| stats::stats(endpoint, &args, out).await).await
        }
        ApiCommand::Bench(args) => bench::run(endpoint, &args, out).await,
    };
    endpoint.flush().await;
    outcome
}

async fn migrate(url: &str, args: &Migrate, out: &Out) -> Outcome {
    // Connecting would create the file.
    if args.check && file_of(url).is_some_and(|file| matches!(file.try_exists(), Ok(false))) {
        return Ok(print_schema(0, out));
    }
    let client = Client::connect(url).await?;
    if args.check {
        return check_schema(&client, out).await;
    }
    let migrated = client.migrate().await?;
    if out.json {
        out.document(&migrated);
    } else if migrated.from == migrated.to {
        out.line(format_args!("already at schema version {}; nothing to do", migrated.to));
    } else {
        out.line(format_args!("migrated from schema version {} to {}", migrated.from, migrated.to));
    }
    Ok(Code::Done)
}

async fn check_schema(client: &Client, out: &Out) -> Outcome {
    let version = client.schema_version().await?;
    if version > SCHEMA_VERSION {
        return Err(Failure::new(
            Code::Schema,
            format_args!(
                "the database is at schema version {version}, newer than this program's {SCHEMA_VERSION}; \
                 use a newer longshore"
            ),
        ));
    }
    Ok(print_schema(version, out))
}

/// Fails if the tables are missing, too old or too new.
async fn require_schema(client: &Client) -> Result<(), Failure> {
    let version = client.schema_version().await?;
    if version == SCHEMA_VERSION {
        Ok(())
    } else {
        Err(Failure::new(
            Code::Schema,
            format_args!(
                "the database is at schema version {version}, but this program needs {SCHEMA_VERSION}; \
                 run `longshore migrate`, or pass --migrate"
            ),
        ))
    }
}

/// Fails if a crash of the database may lose stored jobs and the URL does not accept that.
async fn require_durability(client: &Client) -> Result<(), Failure> {
    let durability = client.durability().await?;
    durability.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    if durability.accepted {
        durability.risks.iter().for_each(|risk| tracing::warn!("{risk} (accepted by durability=relaxed)"));
    } else if !durability.risks.is_empty() {
        return Err(Failure::new(
            Code::Problem,
            format_args!(
                "{}; turn the setting on, or accept the risk with durability=relaxed in the database URL",
                durability.risks.join("; ")
            ),
        ));
    }
    Ok(())
}

fn print_schema(version: i64, out: &Out) -> Code {
    let pending = version < SCHEMA_VERSION;
    if out.json {
        out.document(&json!({ "version": version, "wanted": SCHEMA_VERSION, "pending": pending }));
    } else if pending {
        out.line(format_args!(
            "pending: schema version {version}, wanted {SCHEMA_VERSION}; run `longshore migrate`"
        ));
    } else {
        out.line(format_args!("up to date at schema version {version}"));
    }
    if pending { Code::Problem } else { Code::Done }
}

async fn check(client: &Client, out: &Out) -> Outcome {
    let report = client.check().await?;
    let durability = client.durability().await?;
    let mut warnings = durability.risks;
    warnings.extend(durability.warnings);
    if durability.accepted {
        warnings.clear();
    }
    if out.json {
        out.document(&json!({ "jobs": report.jobs, "problems": report.problems, "warnings": warnings }));
    } else {
        warnings.iter().for_each(|warning| out.note(format_args!("warning: {warning}")));
        report.problems.iter().for_each(|problem| print_problem(problem, out));
        match report.problems.len() {
            0 => out.line(format_args!("{} jobs checked; no problems found", report.jobs)),
            n => out.note(format_args!(
                "error: {} jobs checked; problems found: {n}. Check again after the remedies",
                report.jobs
            )),
        }
    }
    Ok(if report.problems.is_empty() { Code::Done } else { Code::Problem })
}

/// A problem with its remedy. The statements stand alone on their lines, to be copied.
fn print_problem(problem: &Problem, out: &Out) {
    out.line(problem);
    out.line(format_args!("  remedy: {}", problem.remedy));
    for line in problem.sql.iter().flat_map(|statement| statement.lines()) {
        out.line(format_args!("    {line}"));
    }
}
