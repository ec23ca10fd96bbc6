//! A workflow: fetch two documents in parallel, merge them, then publish and archive the result. If the
//! merge fails, an alert is sent instead.
//!
//!     cargo run --example workflow

use longshore::{
    Client, Condition, Context, Failure, Flow, FlowStatus, NewJob, Status, Worker, fan_out, task,
};

async fn fetch(document: String, ctx: Context) -> Result<(), Failure> {
    Ok(ctx.set_result(&format!("text of {document}"))?)
}

async fn merge(is_broken: bool, ctx: Context) -> Result<(), Failure> {
    if is_broken {
        return Err(Failure::permanent("the documents do not fit together"));
    }
    let mut texts: Vec<(String, String)> = ctx.inputs().await?;
    texts.sort();
    Ok(ctx.set_result(&texts.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join(" + "))?)
}

async fn publish(place: String, ctx: Context) -> Result<(), Failure> {
    let merged: String = ctx.input("merge").await?;
    println!("{place}: {merged}");
    Ok(())
}

async fn alert(text: String, _: Context) -> Result<(), Failure> {
    println!("{text}");
    Ok(())
}

fn flow(is_broken: bool) -> Flow {
    fan_out(["report", "appendix"].map(|name| task(name, NewJob::new("fetch", name))))
        .then(task("merge", NewJob::new("merge", &is_broken)))
        .then_all(["web", "archive"].map(|place| task(place, NewJob::new("publish", place))))
        .task(
            task("alert", NewJob::new("alert", "the merge failed"))
                .after_condition("merge", Condition::Failed),
        )
        .name("report")
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;
    let (good, broken) = (client.enqueue_flow(flow(false)).await?, client.enqueue_flow(flow(true)).await?);

    let worker = Worker::builder(client.clone()).function("fetch", fetch).function("merge", merge);
    worker.function("publish", publish).function("alert", alert).build()?.drain().await?;

    assert_eq!(client.flow(good.id).await?.status, FlowStatus::Succeeded);
    assert_eq!(client.flow(broken.id).await?.status, FlowStatus::Failed);
    for (id, expected) in [
        (good.id, [("web", Status::Succeeded), ("archive", Status::Succeeded), ("alert", Status::Cancelled)]),
        (
            broken.id,
            [("web", Status::Cancelled), ("archive", Status::Cancelled), ("alert", Status::Succeeded)],
        ),
    ] {
        for task in client.tasks(id, None, 100).await? {
            let name = task.task.as_deref().unwrap_or_default();
            if let Some((_, status)) = expected.iter().find(|(expected, _)| *expected == name) {
                assert_eq!(task.status, *status, "{name}");
            }
        }
    }
    Ok(())
}
