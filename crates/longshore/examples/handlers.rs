//! Handlers without a job type: a function, a batch function, and an executor for all
//! other kinds.

use longshore::worker::{Batched, Executor};
use longshore::{Client, Context, Failure, NewJob, Worker};

async fn greet(name: String, ctx: Context) -> Result<(), Failure> {
    println!("hello, {name} (job {})", ctx.id());
    Ok(())
}

/// Handles up to a hundred jobs in one call, and returns one result per job, in order.
async fn index(documents: Vec<Batched<u64>>) -> Vec<Result<(), Failure>> {
    println!("indexing {} documents in one call", documents.len());
    let index_one = |document: &Batched<u64>| match document.payload {
        0 => Err(Failure::permanent("document 0 does not exist")),
        _ => Ok(()),
    };
    documents.iter().map(index_one).collect()
}

/// Handles every kind that has no other handler.
struct CatchAll;

#[async_trait::async_trait]
impl Executor for CatchAll {
    async fn execute(&self, ctx: Context) -> Result<(), Failure> {
        println!("kind {} with payload {}", ctx.job().kind(), ctx.job().payload());
        Ok(())
    }
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;
    client.enqueue(NewJob::new("greet", "Ada")).await?;
    client.enqueue(NewJob::new("unregistered", "any payload")).await?;
    client.enqueue_many((0..250_u64).map(|id| NewJob::new("index", &id))).await?;

    let worker =
        Worker::builder(client).function("greet", greet).batch("index", 100, index).executor(CatchAll);
    let done = worker.build()?.drain().await?;
    assert_eq!((done.succeeded, done.failed_permanent), (251, 1));
    Ok(())
}
