//! A say in what the worker does: veto an attempt, hear of failures.

use longshore::store::Claimed;
use longshore::worker::Hooks;
use longshore::{Client, Context, Failure, NewJob, Worker};

struct Ours;

#[async_trait::async_trait]
impl Hooks for Ours {
    async fn before_run(&self, job: &Claimed) -> Result<(), Failure> {
        match job.tags().iter().any(|tag| tag == "banned") {
            true => Err(Failure::permanent("this customer is banned")),
            false => Ok(()),
        }
    }

    async fn on_permanent_failure(&self, job: &Claimed, error: &str) {
        println!("{} {} is dead: {error}", job.kind(), job.lease().id);
    }
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;
    client.enqueue(NewJob::new("greet", "Ada")).await?;
    client.enqueue(NewJob::new("greet", "Blackbeard")).tags(["banned"]).await?;
    let greet = |name: String, _: Context| async move {
        println!("hello, {name}");
        Ok::<(), Failure>(())
    };
    let done = Worker::builder(client).hooks(Ours).function("greet", greet).build()?.drain().await?;
    assert_eq!((done.succeeded, done.failed_permanent), (1, 1));
    Ok(())
}
