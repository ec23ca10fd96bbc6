//! A handler that waits on its stop token. A cancel notifies the worker, which fires the
//! token at once.
//! When the worker stops, running jobs finish within the grace period or are released.

use std::time::Duration;

use longshore::worker::{Settings, StopReason};
use longshore::{Client, Context, Failure, NewJob, Status, Worker};

async fn slow(_: String, ctx: Context) -> Result<(), Failure> {
    match ctx.until_stopped(tokio::time::sleep(Duration::from_secs(3600))).await {
        Ok(()) => Ok(()),
        Err(reason) => {
            println!("job {} stops: {reason:?}", ctx.id());
            assert!(matches!(reason, StopReason::Cancelled | StopReason::Shutdown));
            Err("stopped early".into())
        }
    }
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;
    let cancelled = client.enqueue(NewJob::new("slow", "first")).await?.id;
    let released = client.enqueue(NewJob::new("slow", "second")).await?.id;

    let settings = Settings { shutdown_grace: Duration::from_millis(200), ..Settings::default() };
    let worker = Worker::builder(client.clone()).settings(settings).function("slow", slow).build()?;
    let running = worker.start().await?;
    wait_for(&client, released, Status::Running).await?;
    client.cancel(cancelled).await?;
    wait_for(&client, cancelled, Status::Cancelled).await?;

    running.stop().await;
    let job = client.get(released).await?;
    assert_eq!((job.status, job.attempts), (Status::Queued, 0), "released to the queue, uncharged");
    Ok(())
}

async fn wait_for(client: &Client, id: longshore::JobId, status: Status) -> longshore::Result<()> {
    while client.get(id).await?.status != status {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}
