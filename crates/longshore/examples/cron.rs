//! A schedule declared in code: one job per tick, regardless of the number of workers.

use std::time::Duration;

use longshore::{Client, Context, Failure, NewJob, NewSchedule, Worker};

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;

    let mut running = Vec::new();
    for _ in 0..3 {
        let pulse = NewSchedule::new("pulse", "* * * * * *", NewJob::new("pulse", "thump"));
        let beat = |sound: String, ctx: Context| async move {
            println!("{sound} {}", ctx.job().run_at());
            Ok::<(), Failure>(())
        };
        running.push(
            Worker::builder(client.clone()).cron(pulse).function("pulse", beat).build()?.start().await?,
        );
    }
    tokio::time::sleep(Duration::from_millis(3200)).await;
    let mut done = 0;
    for worker in running {
        done += worker.stop().await.succeeded;
    }
    assert!((2..=4).contains(&done), "three workers together run one job per second: {done}");
    Ok(())
}
