//! Handlers without a type: a function, a batch, and an executor for the rest.

use longshore::worker::{Batched, Executor};
use longshore::{Client, Context, Failure, NewJob, Worker};

async fn greet(name: String, ctx: Context) -> Result<(), Failure> {
    println!("hello, {name} (job {})", ctx.id());
    Ok(())
}

/// One call for up to a hundred jobs; an answer for each, in order.
async fn index(documents: Vec<Batched<u64>>) -> Vec<Result<(), Failure>> {
    println!("indexing {} documents at once", documents.len());
    let index = |document: &Batched<u64>| match document.payload {
        0 => Err(Failure::permanent("there is no document 0")),
        _ => Ok(()),
    };
    documents.iter().map(index).collect()
}

/// Takes every kind that has no handler of its own.
struct Anything;

#[async_trait::async_trait]
impl Executor for Anything {
    async fn execute(&self, ctx: Context) -> Result<(), Failure> {
        println!("{} says {}", ctx.job().kind(), ctx.job().payload());
        Ok(())
    }
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;
    client.enqueue(NewJob::new("greet", "Ada")).await?;
    client.enqueue(NewJob::new("parrot", "pieces of eight")).await?;
    client.enqueue_many((0..250_u64).map(|id| NewJob::new("index", &id))).await?;

    let worker =
        Worker::builder(client).function("greet", greet).batch("index", 100, index).executor(Anything);
    let done = worker.build()?.drain().await?;
    assert_eq!((done.succeeded, done.failed_permanent), (251, 1));
    Ok(())
}
