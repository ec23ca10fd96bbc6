//! Hooks: veto an attempt before it runs, and observe permanent failures.

use longshore::store::Claimed;
use longshore::worker::Hooks;
use longshore::{Client, Context, Failure, NewJob, Worker};

struct CustomerHooks;

#[async_trait::async_trait]
impl Hooks for CustomerHooks {
    async fn before_run(&self, job: &Claimed) -> Result<(), Failure> {
        if job.tags().iter().any(|tag| tag == "banned") {
            return Err(Failure::permanent("this customer is banned"));
        }
        Ok(())
    }

    async fn on_permanent_failure(&self, job: &Claimed, error: &str) {
        println!("{} {} failed permanently: {error}", job.kind(), job.lease().id);
    }
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;
    client.enqueue(NewJob::new("greet", "Ada")).await?;
    client.enqueue(NewJob::new("greet", "Bob")).tags(["banned"]).await?;
    let greet = |name: String, _: Context| async move {
        println!("hello, {name}");
        Ok::<(), Failure>(())
    };
    let done = Worker::builder(client).hooks(CustomerHooks).function("greet", greet).build()?.drain().await?;
    assert_eq!((done.succeeded, done.failed_permanent), (1, 1));
    Ok(())
}
