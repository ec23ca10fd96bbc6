//! A handler that listens: a cancel reaches it within a heartbeat, and a stop lets
//! running jobs finish or gives them back.

use std::time::Duration;

use longshore::worker::{Settings, StopReason};
use longshore::{Client, Context, Failure, NewJob, Status, Worker};

async fn watch(_: String, ctx: Context) -> Result<(), Failure> {
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
    let cancelled = client.enqueue(NewJob::new("watch", "the tide")).await?.id;
    let given_back = client.enqueue(NewJob::new("watch", "the moon")).await?.id;

    let settings = Settings {
        heartbeat_interval: Duration::from_millis(100),
        shutdown_grace: Duration::from_millis(200),
        ..Settings::default()
    };
    let worker = Worker::builder(client.clone()).settings(settings).function("watch", watch).build()?;
    let running = worker.start().await?;
    until(&client, given_back, Status::Running).await?;
    client.cancel(cancelled).await?;
    until(&client, cancelled, Status::Cancelled).await?;

    running.stop().await;
    let job = client.get(given_back).await?;
    assert_eq!((job.status, job.attempts), (Status::Queued, 0), "back in the queue, uncharged");
    Ok(())
}

async fn until(client: &Client, id: longshore::JobId, status: Status) -> longshore::Result<()> {
    while client.get(id).await?.status != status {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}
