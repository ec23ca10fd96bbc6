//! `longshore dead`: jobs that failed for good.

use longshore::store::{DeadFilter, ListFilter};
use longshore::{Client, Status};
use serde_json::json;

use super::jobs::{each, next_page, page_of, print_page};
use crate::args::{Dead, DeadList, Redrive};
use crate::failure::{Code, Outcome};
use crate::output::Out;

pub(super) async fn run(client: &Client, command: Dead, out: Out) -> Outcome {
    match command {
        Dead::List(args) => list(client, args, out).await,
        Dead::Redrive(args) if args.ids.is_empty() => redrive_all(client, args, out).await,
        Dead::Redrive(args) => {
            each(&args.ids, out, async |id| client.redrive(id).await.map(|()| "queued")).await
        }
    }
}

async fn list(client: &Client, args: DeadList, out: Out) -> Outcome {
    let filter = ListFilter {
        status: Some(Status::FailedPermanent),
        kind: args.kind,
        queue: args.queue,
        ..page_of(&args.page)?
    };
    let page = client.list(&filter).await?;
    print_page(&page, &next_page("longshore dead list", &filter), "no dead letters match", out);
    Ok(Code::Done)
}

async fn redrive_all(client: &Client, args: Redrive, out: Out) -> Outcome {
    let filter =
        DeadFilter { kind: args.kind, queue: args.queue, after: None, limit: args.limit.unwrap_or(u32::MAX) };
    let redriven = client.redrive_all(&filter).await?;
    match out.json {
        true => out.document(&json!({ "redriven": redriven })),
        false => out.line(format_args!("redriven: {redriven}")),
    }
    Ok(Code::Done)
}
