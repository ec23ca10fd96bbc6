//! `longshore kinds`: lists, registers and removes kinds of jobs.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use super::enqueue::read_json;
use crate::args::{Kinds, PutKind};
use crate::endpoint::{Endpoint, Reply};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, RawObject, Table};

#[derive(Deserialize)]
struct Kind {
    name: String,
    queue: Option<String>,
    has_schema: bool,
    defaults: Option<Box<RawValue>>,
    updated_at: DateTime<Utc>,
}

/// The registration of a kind, in the API's format.
#[derive(Serialize)]
struct NewKind {
    #[serde(skip_serializing_if = "Option::is_none")]
    schema: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    defaults: Option<Box<RawValue>>,
}

pub(super) async fn run(endpoint: &Endpoint, command: Kinds, out: &Out) -> Outcome {
    match command {
        Kinds::List { schemas } => list(endpoint, schemas, out).await,
        Kinds::Put(args) => put(endpoint, &args, out).await,
        Kinds::Remove { kind } => {
            endpoint.delete(&["kinds", &kind]).send().await?;
            if out.json {
                out.document(&json!({ "removed": kind }));
            } else {
                out.line(format_args!("removed {kind}"));
            }
            Ok(Code::Done)
        }
    }
}

/// The registered kinds, of all pages.
pub(super) async fn all(endpoint: &Endpoint, schemas: bool) -> Result<Reply, Failure> {
    let get = async |cursor: Option<String>| {
        let request = endpoint.get(&["kinds"]).query("limit", Some(1000)).query("cursor", cursor);
        request.query("schemas", schemas.then_some(true)).send().await
    };
    let mut reply = get(None).await?;
    let mut next = reply.cursor.take();
    while let Some(cursor) = next {
        let mut page = get(Some(cursor)).await?;
        next = page.cursor.take();
        reply.append(page)?;
    }
    Ok(reply)
}

async fn list(endpoint: &Endpoint, schemas: bool, out: &Out) -> Outcome {
    let reply = all(endpoint, schemas).await?;
    if out.json {
        out.document(&reply.read::<Vec<RawObject>>()?);
    } else {
        out.table(
            &table(&reply.read::<Vec<Kind>>()?, out),
            "no kinds; a worker registers its kinds when it starts, or use `longshore kinds put`",
        );
    }
    Ok(Code::Done)
}

async fn put(endpoint: &Endpoint, args: &PutKind, out: &Out) -> Outcome {
    let read =
        |field, argument: &Option<String>| argument.as_ref().map(|text| read_json(field, text)).transpose();
    let kind = NewKind { schema: read("schema", &args.schema)?, defaults: read("defaults", &args.defaults)? };
    let reply = endpoint.put(&["kinds", &args.kind]).body(&kind).send().await?;
    if out.json {
        out.document(&reply.read::<RawObject>()?);
    } else {
        out.table(&table(&[reply.read()?], out), "");
    }
    Ok(Code::Done)
}

fn table(kinds: &[Kind], out: &Out) -> Table {
    let mut table = Table::new([
        ("kind", Fit::Cut),
        ("queue", Fit::CutOrOmitted),
        ("schema", Fit::Whole),
        ("updated", Fit::WholeOrOmitted),
        ("defaults", Fit::CutOrOmitted),
    ]);
    for kind in kinds {
        table.row([
            kind.name.clone(),
            kind.queue.clone().unwrap_or_else(|| "all".into()),
            if kind.has_schema { "yes" } else { "-" }.to_owned(),
            out.time(kind.updated_at),
            kind.defaults.as_ref().map_or_else(|| "-".into(), |defaults| defaults.get().to_owned()),
        ]);
    }
    table
}
