//! An order: charge the card, wait for an approval, ship ten parcels in parallel, notify the customer. Kill
//! the program at any moment and start it again: it continues. Its argument is a folder for its files.

use longshore::worker::RecoverySettings;
use longshore::{Client, Context, Failure, NewJob, Worker};
use std::{fs, path::Path, time::Duration};

/// Asks another company to do something. It knows the key, so a repeated request changes nothing.
async fn request(folder: String, key: String) -> Result<String, Failure> {
    fs::write(Path::new(&folder).join(&key), "done")?;
    println!("{key}");
    tokio::time::sleep(Duration::from_millis(20)).await;
    Ok(key)
}

async fn order(number: u32, ctx: Context<String>) -> Result<(), Failure> {
    let request = |what: &str| request(ctx.state().clone(), format!("{what}-{number}"));
    let charge: String = ctx.step("charge", || request("charge")).await?;
    let approval = ctx.event::<String>(&format!("approved:{number}"));
    let person = approval.within(Duration::from_secs(24 * 60 * 60)).await?;
    let person = person.ok_or(Failure::cancelled("nobody approved the order"))?;
    ctx.spawn("parcels", (0..10).map(|parcel| NewJob::new("parcel", &(parcel, number)))).await?;
    let shipped = ctx.join("shipped").await?;
    ctx.step("notify", || request("notify")).await?;
    ctx.set_result(&format!("{charge}, approved by {person}, {} parcels", shipped.len()))?;
    Ok(())
}

async fn parcel((parcel, order): (u32, u32), ctx: Context<String>) -> Result<(), Failure> {
    request(ctx.state().clone(), format!("parcel-{parcel}-{order}")).await.map(drop)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("name a folder")?;
    fs::create_dir_all(&folder)?;
    let client = Client::connect(&format!("sqlite:{folder}/queue.db")).await?;
    client.migrate().await?;
    let id = client.enqueue(NewJob::new("order", &42).idempotency_key("order-42")).await?.id;

    let ms = Duration::from_millis; // so that a restarted program continues soon
    let worker = Worker::builder(client.clone()).state(folder);
    let worker = worker.function("order", order).function("parcel", parcel);
    let worker = worker.heartbeat_interval(ms(100)).stale_after(ms(15_000)).sweep_interval(ms(100));
    let worker = worker.recovery(RecoverySettings { delay: ms(1), ..RecoverySettings::default() });
    let running = worker.build()?.start().await?;
    while client.get(id).await?.finished_at.is_none() {
        if !client.steps(id).await?.is_empty() {
            client.emit("approved:42", "ada").await?; // in real life, a person does this days later
        }
        tokio::time::sleep(ms(10)).await;
    }
    running.stop().await;
    assert_eq!(
        client.get(id).await?.result.ok_or("no result")?.get(),
        "\"charge-42, approved by ada, 10 parcels\""
    );
    Ok(())
}
