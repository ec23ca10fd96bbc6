//! A schedule declared in code: one job per tick, regardless of the number of workers.

use std::collections::BTreeSet;

use longshore::{Client, Context, Failure, NewJob, NewSchedule, Worker};

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;

    let (sender, mut beats) = tokio::sync::mpsc::unbounded_channel();
    let mut running = Vec::new();
    for _ in 0..3 {
        let pulse = NewSchedule::new("pulse", "* * * * * *", NewJob::new("pulse", "thump"));
        let sender = sender.clone();
        let beat = move |sound: String, ctx: Context| {
            println!("{sound} {}", ctx.job().run_at());
            let _ = sender.send(ctx.job().run_at());
            async { Ok::<(), Failure>(()) }
        };
        running.push(
            Worker::builder(client.clone()).cron(pulse).function("pulse", beat).build()?.start().await?,
        );
    }
    let mut seconds = BTreeSet::new();
    while let Some(second) = beats.recv().await {
        assert!(seconds.insert(second), "three workers together run one job per second: {second} came twice");
        if seconds.len() == 3 {
            break;
        }
    }
    for worker in running {
        worker.stop().await;
    }
    Ok(())
}
