//! `longshore cron`: look at schedules, put, pause, resume, run and remove them.

use longshore::store::Schedule;
use longshore::{Client, NewJob, NewSchedule};
use serde_json::json;

use super::enqueue::{self, read_payload};
use crate::args::{Cron, CronAdd};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, Table, instant};

pub(super) async fn run(client: &Client, command: Cron, out: Out) -> Outcome {
    match command {
        Cron::List => list(client, out).await,
        Cron::Add(args) => {
            let stored = add(client, *args).await?;
            tell(&[stored], out)
        }
        Cron::Pause(args) => {
            client.pause_schedule(&args.name).await?;
            show(client, &args.name, out).await
        }
        Cron::Resume(args) => {
            client.resume_schedule(&args.name).await?;
            show(client, &args.name, out).await
        }
        Cron::Run(args) => {
            let job = client.run_schedule_now(&args.name).await?;
            // As after an enqueue: this process may be gone before the hint is.
            client.flush().await;
            enqueue::tell(&job, out);
            Ok(Code::Done)
        }
        Cron::Remove(args) => {
            client.remove_schedule(&args.name).await?;
            match out.json {
                true => out.document(&json!({ "removed": args.name })),
                false => out.line(format_args!("removed {}", args.name)),
            }
            Ok(Code::Done)
        }
    }
}

async fn add(client: &Client, args: CronAdd) -> Result<Schedule, Failure> {
    let mut job =
        NewJob::from_json(args.kind, &read_payload(&args.payload)?).queue(args.queue).priority(args.priority);
    if let Some(max_attempts) = args.max_attempts {
        job = job.max_attempts(max_attempts);
    }
    let schedule = NewSchedule::new(args.name, args.line, job).zone(args.zone).missed(args.missed);
    Ok(client.put_schedule(schedule).await?)
}

async fn list(client: &Client, out: Out) -> Outcome {
    let schedules = client.schedules().await?;
    match out.json {
        true => out.document(&schedules),
        false => {
            out.table(&table(&schedules), "no schedules; `longshore cron add --help` shows how to put one")
        }
    }
    Ok(Code::Done)
}

/// How the schedule stands after the change.
async fn show(client: &Client, name: &str, out: Out) -> Outcome {
    let mut schedules = client.schedules().await?;
    schedules.retain(|schedule| schedule.name == name);
    tell(&schedules, out)
}

fn tell(schedules: &[Schedule], out: Out) -> Outcome {
    match schedules.first() {
        Some(schedule) if out.json => out.document(schedule),
        _ => out.table(&table(schedules), "the schedule is gone"),
    }
    Ok(Code::Done)
}

fn table(schedules: &[Schedule]) -> Table {
    let mut table = Table::new([
        ("schedule", Fit::Cut),
        ("line", Fit::Cut),
        ("zone", Fit::Cut),
        ("missed", Fit::Whole),
        ("state", Fit::Whole),
        ("next", Fit::Whole),
        ("last", Fit::Whole),
    ]);
    for schedule in schedules {
        table.row([
            schedule.name.clone(),
            schedule.expression.clone(),
            schedule.zone.clone(),
            schedule.missed.clone(),
            if schedule.paused { "paused" } else { "active" }.to_owned(),
            instant(schedule.next_at),
            instant(schedule.last_at),
        ]);
    }
    table
}
