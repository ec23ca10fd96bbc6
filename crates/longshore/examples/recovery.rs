//! Recovery of a dead worker's job: a dry run reports what would be recovered, a sweep
//! recovers it.

use std::time::Duration;

use longshore::store::{ClaimCursor, ClaimRequest, NewWorker};
use longshore::{Client, NewJob, Status, SweepMode, SweepOptions};

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;
    let id = client.enqueue(NewJob::new("greet", "Ada")).await?.id;

    // A worker that claims a job and sends no heartbeat.
    let dead = NewWorker { stale_after: Duration::from_millis(50), ..NewWorker::new("dead") };
    client.store().register(&dead).await?;
    client.store().claim(&ClaimRequest::new(dead.id, 1), &mut ClaimCursor::default()).await?;
    tokio::time::sleep(Duration::from_millis(100)).await;

    let dry_run = SweepOptions { mode: SweepMode::DryRun, ..SweepOptions::default() };
    let report = client.sweep(&dry_run).await?;
    assert!(report.workers.contains(&dead.id));
    assert_eq!(client.sweep(&SweepOptions::default()).await?.recovered, 1);

    let job = client.get(id).await?;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Retrying, 0, 1));
    println!("{}", job.last_error.unwrap_or_default());
    Ok(())
}
