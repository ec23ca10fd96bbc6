//! A typed job with application state, enqueued with different options.

use std::time::Duration;

use longshore::{Client, Context, Failure, Job, UniqueMode, Worker};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct SendEmail {
    to: String,
}

struct App {
    sender: String,
}

impl Job for SendEmail {
    const KIND: &'static str = "send_email";
    const QUEUE: &'static str = "mail";
    type State = App;

    async fn run(self, ctx: Context<App>) -> Result<(), Failure> {
        println!("{} sends an email to {}", ctx.state().sender, self.to);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;

    client.enqueue(SendEmail { to: "ada@example.com".into() }).await?;
    client.enqueue(SendEmail { to: "bob@example.com".into() }).priority(10).await?;
    client
        .enqueue(SendEmail { to: "eve@example.com".into() })
        .delay(Duration::from_secs(3600))
        .unique_key("reminder-eve", UniqueMode::Replace)
        .await?;

    let worker = Worker::builder(client)
        .queues(["mail"])
        .state(App { sender: "the harbour".into() })
        .register::<SendEmail>()
        .build()?;
    let done = worker.drain().await?;
    assert_eq!(done.succeeded, 2, "the third job is due in an hour");
    Ok(())
}
