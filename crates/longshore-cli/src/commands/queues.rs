//! `longshore queues`: look at queues, pause, resume and limit them.

use longshore::Client;
use longshore::store::QueueRecord;

use crate::args::Queues;
use crate::failure::{Code, Outcome};
use crate::output::{Fit, Out, Table};

pub(super) async fn run(client: &Client, command: Queues, out: Out) -> Outcome {
    let queue = match command {
        Queues::List => return list(client, out).await,
        Queues::Pause(args) => {
            client.pause(&args.queue).await?;
            args.queue
        }
        Queues::Resume(args) => {
            client.resume(&args.queue).await?;
            args.queue
        }
        Queues::Limit { queue, limit } => {
            client.limit(&queue, limit.0).await?;
            queue
        }
    };
    show(client, &queue, out).await
}

async fn list(client: &Client, out: Out) -> Outcome {
    let queues = client.queues().await?;
    match out.json {
        true => out.document(&queues),
        false => out.table(&table(&queues), "no queues have settings, or jobs that wait or run"),
    }
    Ok(Code::Done)
}

/// How the queue stands after the change.
async fn show(client: &Client, name: &str, out: Out) -> Outcome {
    let mut queues = client.queues().await?;
    queues.retain(|queue| queue.name == name);
    match queues.first() {
        Some(queue) if out.json => out.document(queue),
        // A queue back to its defaults and without jobs need not be listed.
        None if out.json => out.document(&serde_json::json!(null)),
        _ => out.table(&table(&queues), "the queue has no settings left, and no jobs"),
    }
    Ok(Code::Done)
}

fn table(queues: &[QueueRecord]) -> Table {
    let mut table = Table::new([
        ("queue", Fit::Cut),
        ("state", Fit::Whole),
        ("limit", Fit::Whole),
        ("waiting", Fit::Whole),
        ("running", Fit::Whole),
    ]);
    for queue in queues {
        let about = if queue.waiting_estimated { "~" } else { "" };
        table.row([
            queue.name.clone(),
            if queue.paused { "paused" } else { "active" }.to_owned(),
            queue.limit.map_or_else(|| "-".into(), |limit| limit.to_string()),
            format!("{about}{}", queue.waiting),
            queue.running.to_string(),
        ]);
    }
    table
}
