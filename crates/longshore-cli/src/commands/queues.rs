//! `longshore queues`: lists, pauses, resumes and limits queues, and sets their rates.

use std::time::Duration;

use longshore::Rate;
use serde::Deserialize;
use serde_json::json;

use super::find::unknown_queue;
use super::repeat::repeat;
use crate::args::Queues;
use crate::endpoint::{Endpoint, Reply};
use crate::failure::{Code, Outcome};
use crate::output::{Fit, Out, RawObject, Table};

#[derive(Deserialize)]
pub(super) struct Queue {
    pub(super) name: String,
    pub(super) paused: bool,
    pub(super) limit: Option<u32>,
    #[serde(default)]
    rate: Option<Rate>,
    pub(super) waiting: u64,
    waiting_estimated: bool,
    pub(super) running: u64,
}

pub(super) async fn run(endpoint: &Endpoint, command: Queues, out: &Out) -> Outcome {
    let (queue, request) = match command {
        Queues::List(every) => {
            return repeat(&every, out, async |out| list(endpoint, out).await).await;
        }
        Queues::Pause(args) => {
            let request = endpoint.post(&["queues", &args.queue, "pause"]);
            (args.queue, request)
        }
        Queues::Resume(args) => {
            let request = endpoint.post(&["queues", &args.queue, "resume"]);
            (args.queue, request)
        }
        Queues::Limit { queue, limit } => {
            let request = endpoint.put(&["queues", &queue, "limit"]).body(&json!({ "limit": limit.0 }));
            (queue, request)
        }
        Queues::Rate { queue, rate } => {
            let request = endpoint.put(&["queues", &queue, "rate"]).body(&json!({ "rate": rate.rate() }));
            (queue, request)
        }
    };
    // The change itself makes the queue known.
    let warning = unknown_queue(endpoint, &queue, out).await;
    let shown = show(&request.send().await?, out);
    if let Some(warning) = warning {
        out.note(format_args!("warning: {warning}"));
    }
    shown
}

async fn list(endpoint: &Endpoint, out: &Out) -> Outcome {
    let reply = endpoint.get(&["queues"]).send().await?;
    if out.json {
        out.document(&reply.read::<Vec<RawObject>>()?);
    } else {
        out.table(
            &table(&reply.read::<Vec<Queue>>()?),
            "no queues have settings, waiting jobs or running jobs",
        );
    }
    Ok(Code::Done)
}

/// Prints the queue after a change.
pub(super) fn show(reply: &Reply, out: &Out) -> Outcome {
    if out.json {
        out.document(&reply.read::<RawObject>()?);
    } else {
        out.table(&table(&[reply.read()?]), "");
    }
    Ok(Code::Done)
}

fn table(queues: &[Queue]) -> Table {
    let mut table = Table::new([
        ("queue", Fit::Cut),
        ("state", Fit::Whole),
        ("limit", Fit::Whole),
        ("rate", Fit::Whole),
        ("waiting", Fit::Whole),
        ("running", Fit::Whole),
    ]);
    for queue in queues {
        let about = if queue.waiting_estimated { "~" } else { "" };
        table.row([
            queue.name.clone(),
            if queue.paused { "paused" } else { "active" }.to_owned(),
            queue.limit.map_or_else(|| "-".into(), |limit| limit.to_string()),
            shown_rate(queue.rate),
            format!("{about}{}", queue.waiting),
            queue.running.to_string(),
        ]);
    }
    table
}

/// A rate as it is written: `100/s`, with its burst unless that is the default.
pub(super) fn shown_rate(rate: Option<Rate>) -> String {
    let Some(Rate { starts, period_ms, burst }) = rate else { return "-".into() };
    const UNITS: [(u64, &str); 5] =
        [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")];
    let (ms, unit) = UNITS.into_iter().find(|(ms, _)| period_ms % ms == 0).unwrap_or((1, "ms"));
    let count = match period_ms / ms {
        1 => String::new(),
        count => count.to_string(),
    };
    let default = Rate::per(starts, Duration::from_millis(period_ms));
    let burst = if burst == default.burst { String::new() } else { format!(" +{burst}") };
    format!("{starts}/{count}{unit}{burst}")
}
