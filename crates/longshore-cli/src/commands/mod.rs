//! What each command does, through [`Client`] alone. Here: the way from the
//! command line to a command, and the commands about the queue as a whole.

mod config;
mod cron;
mod dead;
mod enqueue;
mod jobs;
mod process;
mod queues;
mod serve;
mod tokens;
mod worker;
mod workers;

use std::collections::BTreeMap;
use std::path::PathBuf;

use longshore::store::{Count, SCHEMA_VERSION};
use longshore::{Client, Status};
use serde_json::json;

use crate::args::{Cli, Command, Migrate};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, Table};

pub(crate) use config::run as config;

/// Runs what was typed.
pub(crate) async fn run(cli: Cli, out: Out) -> Outcome {
    let command = match cli.command {
        Command::Dev(args) => return serve::dev(*args, out).await,
        command => command,
    };
    let url = cli.database_url.as_deref().filter(|url| !url.is_empty()).ok_or_else(|| {
        Failure::usage(
            "no database given; set DATABASE_URL, pass --database-url or write url under [database] in \
             longshore.toml, as postgres://user@host/database or sqlite:./jobs.db",
        )
    })?;
    if let Some(file) = missing_file(url) {
        match &command {
            Command::Migrate(args) if args.check => return Ok(tell_schema(0, out)),
            Command::Migrate(_) => {}
            Command::Serve(args) if args.migrate => {}
            _ => {
                return Err(Failure::new(
                    Code::Schema,
                    format_args!(
                        "the database file `{}` does not exist; check the path, \
                         or run `longshore migrate` to make it",
                        file.display()
                    ),
                ));
            }
        }
    }
    let client = Client::connect(url).await?;
    match command {
        // They use no database, or one of their own.
        Command::Dev(_) | Command::Config(_) => unreachable!("answered above"),
        Command::Serve(args) => serve::serve(client, *args, out).await,
        Command::Migrate(args) => migrate(&client, &args, out).await,
        Command::Worker(args) => worker::run(client, *args, out).await,
        Command::Enqueue(args) => enqueue::enqueue(&client, *args, out).await,
        Command::Jobs(command) => jobs::run(&client, command, out).await,
        Command::Queues(command) => queues::run(&client, command, out).await,
        Command::Dead(command) => dead::run(&client, command, out).await,
        Command::Cron(command) => cron::run(&client, command, out).await,
        Command::Workers(command) => workers::run(&client, command, out).await,
        Command::Tokens(command) => tokens::run(&client, command, out).await,
        Command::Sweep(args) => workers::sweep(&client, &args, out).await,
        Command::Counts => counts(&client, out).await,
        Command::Check => check(&client, out).await,
    }
}

/// An SQLite file that is not there. Connecting would make it, and a mistyped
/// path should be told, not answered from an empty queue.
fn missing_file(url: &str) -> Option<PathBuf> {
    let path = url.strip_prefix("sqlite:")?;
    let path = path.strip_prefix("//").unwrap_or(path);
    let names_a_file = !path.is_empty() && path != ":memory:";
    names_a_file.then(|| PathBuf::from(path)).filter(|file| !file.exists())
}

async fn migrate(client: &Client, args: &Migrate, out: Out) -> Outcome {
    if args.check {
        return check_schema(client, out).await;
    }
    let migrated = client.migrate().await?;
    match migrated {
        _ if out.json => out.document(&migrated),
        _ if migrated.from == migrated.to => {
            out.line(format_args!("already at schema version {}; nothing to do", migrated.to));
        }
        _ => out.line(format_args!("migrated from schema version {} to {}", migrated.from, migrated.to)),
    }
    Ok(Code::Done)
}

async fn check_schema(client: &Client, out: Out) -> Outcome {
    let version = client.store().schema_version().await?;
    if version > SCHEMA_VERSION {
        return Err(Failure::new(
            Code::Schema,
            format_args!(
                "the database is at schema version {version}, this program knows {SCHEMA_VERSION}; \
                 use a newer longshore"
            ),
        ));
    }
    Ok(tell_schema(version, out))
}

/// Refuses tables that are missing, too old or too new, before anything relies on
/// them.
async fn expect_schema(client: &Client) -> Result<(), Failure> {
    let version = client.store().schema_version().await?;
    match version == SCHEMA_VERSION {
        true => Ok(()),
        false => Err(Failure::new(
            Code::Schema,
            format_args!(
                "the database is at schema version {version}, this program needs {SCHEMA_VERSION}; \
                 run `longshore migrate`, or start with --migrate"
            ),
        )),
    }
}

fn tell_schema(version: i64, out: Out) -> Code {
    let pending = version < SCHEMA_VERSION;
    match pending {
        _ if out.json => {
            out.document(&json!({ "version": version, "wanted": SCHEMA_VERSION, "pending": pending }));
        }
        true => out.line(format_args!(
            "pending: schema version {version}, wanted {SCHEMA_VERSION}; run `longshore migrate`"
        )),
        false => out.line(format_args!("up to date at schema version {version}")),
    }
    if pending { Code::Problem } else { Code::Done }
}

async fn counts(client: &Client, out: Out) -> Outcome {
    let counts = client.counts().await?;
    match out.json {
        true => out.document(&counts),
        false => out.table(&counts_table(&counts), "no jobs"),
    }
    Ok(Code::Done)
}

/// A row for each queue and kind, a column for each status.
fn counts_table(counts: &[Count]) -> Table {
    let mut rows: BTreeMap<(&str, &str), [String; Status::ALL.len()]> = BTreeMap::new();
    for count in counts {
        let row = rows.entry((&count.queue, &count.kind)).or_insert_with(|| Status::ALL.map(|_| "0".into()));
        let about = if count.estimated { "~" } else { "" };
        for (cell, status) in row.iter_mut().zip(Status::ALL) {
            if status == count.status {
                *cell = format!("{about}{}", count.jobs);
            }
        }
    }
    let statuses = Status::ALL.map(|status| (status.as_str(), Fit::Whole));
    let mut table = Table::new([("queue", Fit::Cut), ("kind", Fit::Cut)].into_iter().chain(statuses));
    for ((queue, kind), cells) in rows {
        table.row([queue.to_owned(), kind.to_owned()].into_iter().chain(cells));
    }
    table
}

async fn check(client: &Client, out: Out) -> Outcome {
    let report = client.check().await?;
    match out.json {
        true => out.document(&report),
        false => {
            report.problems.iter().for_each(|problem| out.line(problem));
            match report.problems.len() {
                0 => out.line(format_args!("{} jobs checked; all is well", report.jobs)),
                n => out.note(format_args!("error: {} jobs checked; problems found: {n}", report.jobs)),
            }
        }
    }
    Ok(if report.problems.is_empty() { Code::Done } else { Code::Problem })
}
