//! What a handler can leave behind: progress, a checkpoint for the next attempt,
//! a result, and follow-up jobs that exist only if it succeeds.

use std::time::Duration;

use longshore::{Client, Context, Failure, NewJob, RetryPolicy, Worker};
use serde_json::json;

async fn import(rows: u32, ctx: Context) -> Result<(), Failure> {
    let begun = ctx.checkpoint::<u32>().await?.unwrap_or(0);
    for row in begun..rows {
        if row == 3 && ctx.attempt() == 1 {
            return Err("the line went dead".into());
        }
        ctx.save_checkpoint(&(row + 1)).await?;
        ctx.progress(&json!({ "rows": row + 1, "of": rows }))?;
    }
    ctx.set_result(&json!({ "imported": rows, "begun_at": begun }))?;
    ctx.enqueue(NewJob::new("announce", &rows))?;
    Ok(())
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;
    let at_once = RetryPolicy::fixed(Duration::ZERO);
    let id = client.enqueue(NewJob::new("import", &5)).retry(at_once).await?.id;

    let worker = Worker::builder(client.clone()).function("import", import);
    let worker = worker.function("announce", |rows: u32, _: Context| async move {
        println!("{rows} rows are in");
        Ok(())
    });
    worker.build()?.drain().await?;

    let job = client.get(id).await?;
    assert_eq!(job.attempts, 2);
    let result: serde_json::Value = serde_json::from_str(job.result.expect("a result").get()).expect("JSON");
    assert_eq!(
        result,
        json!({ "imported": 5, "begun_at": 3 }),
        "the second attempt went on where the first fell"
    );
    Ok(())
}
