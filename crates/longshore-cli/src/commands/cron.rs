//! `longshore cron`: lists, adds, pauses, resumes, runs and removes schedules.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::enqueue::{self, NewJob, read_json};
use super::repeat::repeat;
use crate::args::{Cron, CronAdd};
use crate::endpoint::{Endpoint, Reply};
use crate::failure::{Code, Outcome};
use crate::output::{Fit, Out, RawObject, Table};

#[derive(Deserialize)]
struct Schedule {
    name: String,
    cron: String,
    zone: String,
    missed: String,
    paused: bool,
    next_at: DateTime<Utc>,
    last_at: Option<DateTime<Utc>>,
    /// Null if it cannot be read.
    job: Option<Job>,
}

/// The job that each tick enqueues.
#[derive(Deserialize)]
struct Job {
    kind: String,
    queue: Option<String>,
}

#[derive(Serialize)]
struct NewSchedule {
    cron: String,
    zone: String,
    missed: String,
    job: NewJob,
}

pub(super) async fn run(endpoint: &Endpoint, command: Cron, out: &Out) -> Outcome {
    match command {
        Cron::List(every) => repeat(&every, out, async |out| list(endpoint, out).await).await,
        Cron::Show(args) => show(&endpoint.get(&["cron", &args.name]).send().await?, out),
        Cron::Add(args) => add(endpoint, *args, out).await,
        Cron::Pause(args) => show(&endpoint.post(&["cron", &args.name, "pause"]).send().await?, out),
        Cron::Resume(args) => show(&endpoint.post(&["cron", &args.name, "resume"]).send().await?, out),
        Cron::Run(args) => {
            let reply = endpoint.post(&["cron", &args.name, "run"]).send().await?;
            enqueue::print(&reply.read()?, out);
            Ok(Code::Done)
        }
        Cron::Remove(args) => {
            endpoint.delete(&["cron", &args.name]).send().await?;
            if out.json {
                out.document(&json!({ "removed": args.name }));
            } else {
                out.line(format_args!("removed {}", args.name));
            }
            Ok(Code::Done)
        }
    }
}

async fn add(endpoint: &Endpoint, args: CronAdd, out: &Out) -> Outcome {
    let mut job = NewJob::new(args.kind.clone(), read_json("payload", &args.payload)?);
    (job.queue, job.priority, job.max_attempts) = (args.queue, args.priority, args.max_attempts);
    job.group = args.group;
    let schedule = NewSchedule { cron: args.line, zone: args.zone, missed: args.missed.to_string(), job };
    let reply = endpoint.put(&["cron", &args.name]).body(&schedule).send().await?;
    enqueue::warn_if_unknown(endpoint, &args.kind, out).await;
    show(&reply, out)
}

async fn list(endpoint: &Endpoint, out: &Out) -> Outcome {
    let reply = endpoint.get(&["cron"]).send().await?;
    if out.json {
        out.document(&reply.read::<Vec<RawObject>>()?);
    } else {
        out.table(
            &table(&reply.read::<Vec<Schedule>>()?, out),
            "no schedules; `longshore cron add --help` shows how to add one",
        );
    }
    Ok(Code::Done)
}

/// Prints the schedule after a change.
fn show(reply: &Reply, out: &Out) -> Outcome {
    if out.json {
        out.document(&reply.read::<RawObject>()?);
    } else {
        out.table(&table(&[reply.read()?], out), "");
    }
    Ok(Code::Done)
}

fn table(schedules: &[Schedule], out: &Out) -> Table {
    let mut table = Table::new([
        ("schedule", Fit::Cut),
        ("state", Fit::Whole),
        ("next", Fit::Whole),
        ("cron", Fit::CutLast),
        ("kind", Fit::CutLast),
        ("queue", Fit::Cut),
        ("zone", Fit::CutOrOmitted),
        ("last", Fit::WholeOrOmitted),
        ("missed", Fit::WholeOrOmitted),
    ]);
    for schedule in schedules {
        let queue_of = |job: &Job| job.queue.clone().unwrap_or_else(|| longshore::DEFAULT_QUEUE.into());
        let (kind, queue) = match &schedule.job {
            Some(job) => (job.kind.clone(), queue_of(job)),
            None => ("-".into(), "-".into()),
        };
        table.row([
            schedule.name.clone(),
            if schedule.paused { "paused" } else { "active" }.to_owned(),
            // A paused schedule has no next tick.
            out.time((!schedule.paused).then_some(schedule.next_at)),
            schedule.cron.clone(),
            kind,
            queue,
            schedule.zone.clone(),
            out.time(schedule.last_at),
            schedule.missed.clone(),
        ]);
    }
    table
}
