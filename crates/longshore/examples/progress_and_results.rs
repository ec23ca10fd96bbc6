//! What a handler can store: progress, a checkpoint for the next attempt, a result,
//! and follow-up jobs that are stored only if the attempt succeeds.

use std::time::Duration;

use longshore::{Client, Context, Failure, NewJob, RetryPolicy, Worker};
use serde_json::json;

async fn import(rows: u32, ctx: Context) -> Result<(), Failure> {
    let first = ctx.checkpoint::<u32>().await?.unwrap_or(0);
    for row in first..rows {
        if row == 3 && ctx.attempt() == 1 {
            return Err("the connection was lost".into());
        }
        ctx.save_checkpoint(&(row + 1)).await?;
        ctx.progress(&json!({ "rows": row + 1, "of": rows }))?;
    }
    ctx.set_result(&json!({ "imported": rows, "first_row": first }))?;
    ctx.enqueue(NewJob::new("report", &rows))?;
    Ok(())
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;
    let without_delay = RetryPolicy::fixed(Duration::ZERO);
    let id = client.enqueue(NewJob::new("import", &5)).retry(without_delay).await?.id;

    let worker = Worker::builder(client.clone()).function("import", import);
    let worker = worker.function("report", |rows: u32, _: Context| async move {
        println!("imported {rows} rows");
        Ok(())
    });
    worker.build()?.drain().await?;

    let job = client.get(id).await?;
    assert_eq!(job.attempts, 2);
    let result: serde_json::Value = serde_json::from_str(job.result.expect("a result").get()).expect("JSON");
    assert_eq!(
        result,
        json!({ "imported": 5, "first_row": 3 }),
        "the second attempt continues where the first one failed"
    );
    Ok(())
}
