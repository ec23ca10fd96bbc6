//! `longshore events emit` and `show`: the events that jobs wait for.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::enqueue::read_json;
use crate::args::Events;
use crate::endpoint::Endpoint;
use crate::failure::{Code, Outcome};
use crate::output::{Out, RawObject};

#[derive(Serialize)]
struct NewEvent {
    name: String,
    payload: Box<RawValue>,
}

#[derive(Deserialize)]
struct Event {
    name: String,
    payload: Box<RawValue>,
    emitted_at: DateTime<Utc>,
}

pub(super) async fn run(endpoint: &Endpoint, command: Events, out: &Out) -> Outcome {
    let reply = match command {
        Events::Emit { name, payload } => {
            let event = NewEvent { name, payload: read_json("payload", &payload)? };
            let reply = endpoint.post(&["events"]).body(&event).send().await?;
            if !is_same(&event.payload, &reply.read::<Event>()?.payload) {
                out.note("an event with this name exists already; it stays as it is");
            }
            reply
        }
        Events::Show { name } => endpoint.get(&["events", &name]).send().await?,
    };
    if out.json {
        out.document(&reply.read::<RawObject>()?);
        return Ok(Code::Done);
    }
    let event: Event = reply.read()?;
    let fields = [
        ("event", event.name),
        ("emitted", out.time(event.emitted_at)),
        ("payload", event.payload.get().to_owned()),
    ];
    for (name, value) in fields {
        out.line(format_args!("{name:<11}{value}"));
    }
    Ok(Code::Done)
}

/// Whether two texts are the same JSON.
fn is_same(a: &RawValue, b: &RawValue) -> bool {
    let value = |json: &RawValue| serde_json::from_str::<serde_json::Value>(json.get()).ok();
    value(a) == value(b)
}
