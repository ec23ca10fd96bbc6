//! `longshore groups`: lists, pauses, resumes and limits the groups of a queue.

use longshore::Rate;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::find::unknown_queue;
use super::queues::{self, shown_rate};
use super::repeat::repeat;
use crate::args::{GroupSettings, Groups};
use crate::endpoint::Endpoint;
use crate::failure::{Code, Outcome};
use crate::output::{Fit, Out, RawObject, Table};

#[derive(Deserialize)]
struct Group {
    name: String,
    paused: bool,
    limit: Option<u32>,
    rate: Option<Rate>,
    waiting: u64,
    waiting_or_more: bool,
    running: u64,
}

pub(super) async fn run(endpoint: &Endpoint, command: Groups, out: &Out) -> Outcome {
    let (queue, group, change) = match command {
        Groups::List { queue, after, limit, every } => {
            return repeat(&every, out, async |out| {
                list(endpoint, &queue, after.as_deref(), limit, out).await
            })
            .await;
        }
        Groups::Default { queue, settings } => {
            let request = endpoint.patch(&["queues", &queue, "group-defaults"]).body(&change(&settings));
            let warning = unknown_queue(endpoint, &queue, out).await;
            let shown = queues::show(&request.send().await?, out);
            warn(warning, out);
            return shown;
        }
        Groups::Pause(args) => (args.queue, args.group, json!({ "paused": true })),
        Groups::Resume(args) => (args.queue, args.group, json!({ "paused": false })),
        Groups::Set { queue, group, settings } => (queue, group, change(&settings)),
    };
    let warning = unknown_queue(endpoint, &queue, out).await;
    let reply = endpoint.patch(&["queues", &queue, "groups", &group]).body(&change).send().await?;
    if out.json {
        out.document(&reply.read::<RawObject>()?);
    } else {
        out.table(&table(&[reply.read()?]), "");
    }
    warn(warning, out);
    Ok(Code::Done)
}

/// What the settings change, in the API's format.
fn change(settings: &GroupSettings) -> Value {
    let mut change = Map::new();
    if let Some(limit) = settings.limit {
        change.insert("limit".into(), json!(limit.0));
    }
    if let Some(rate) = settings.rate() {
        change.insert("rate".into(), json!(rate));
    }
    Value::Object(change)
}

fn warn(warning: Option<String>, out: &Out) {
    if let Some(warning) = warning {
        out.note(format_args!("warning: {warning}"));
    }
}

async fn list(endpoint: &Endpoint, queue: &str, after: Option<&str>, limit: u32, out: &Out) -> Outcome {
    let request =
        endpoint.get(&["queues", queue, "groups"]).query("limit", Some(limit)).query("after", after);
    let reply = request.send().await?;
    if out.json {
        out.document(&reply.read::<Vec<RawObject>>()?);
        return Ok(Code::Done);
    }
    let groups: Vec<Group> = reply.read()?;
    out.table(&table(&groups), "no group of this queue has settings, waiting jobs or running jobs");
    if let Some(last) = groups.last().filter(|_| groups.len() == limit as usize) {
        out.note(format_args!("there may be more: --after {}", last.name));
    }
    Ok(Code::Done)
}

fn table(groups: &[Group]) -> Table {
    let mut table = Table::new([
        ("group", Fit::Cut),
        ("state", Fit::Whole),
        ("limit", Fit::Whole),
        ("rate", Fit::Whole),
        ("waiting", Fit::Whole),
        ("running", Fit::Whole),
    ]);
    for group in groups {
        let more = if group.waiting_or_more { "+" } else { "" };
        table.row([
            group.name.clone(),
            if group.paused { "paused" } else { "active" }.to_owned(),
            group.limit.map_or_else(|| "-".into(), |limit| limit.to_string()),
            shown_rate(group.rate),
            format!("{}{more}", group.waiting),
            group.running.to_string(),
        ]);
    }
    table
}
