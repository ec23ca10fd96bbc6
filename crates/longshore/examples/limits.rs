//! Customers share a queue: each is a group, so a large import of one customer delays nobody, and no
//! customer makes more than two calls at once.
//!
//!     cargo run --example limits

use std::collections::BTreeMap;
use std::sync::Mutex;

use longshore::{Client, Context, Failure, GroupChange, NewJob, Rate, Worker};

/// Per customer: how many calls run now, the most that ran at once, and how many have ended.
static CALLS: Mutex<BTreeMap<String, [usize; 3]>> = Mutex::new(BTreeMap::new());
/// In which order the customers' calls ended.
static ORDER: Mutex<Vec<String>> = Mutex::new(Vec::new());

async fn call(_: u32, ctx: Context) -> Result<(), Failure> {
    let customer = ctx.job().group().unwrap_or_default().to_owned();
    let count = |change: &dyn Fn(&mut [usize; 3])| {
        change(CALLS.lock().expect("no call panics").entry(customer.clone()).or_default());
    };
    count(&|[running, most, _]| {
        *running += 1;
        *most = (*most).max(*running);
    });
    tokio::time::sleep(std::time::Duration::from_millis(2)).await; // the call
    count(&|[running, _, ended]| {
        *running -= 1;
        *ended += 1;
    });
    ORDER.lock().expect("no call panics").push(customer);
    Ok(())
}

#[tokio::main]
async fn main() -> longshore::Result<()> {
    let client = Client::connect("sqlite::memory:").await?;
    client.migrate().await?;

    // Two calls at once for each customer, four for acme, and at most 1000 calls start per second.
    client.group_defaults("default", Some(2), None).await?;
    let change = GroupChange { limit: Some(Some(4)), ..GroupChange::default() };
    client.set_group("default", "acme", change).await?;
    client.rate("default", Some(Rate::per_second(1000).burst(50))).await?;

    client.enqueue_many((0..200).map(|n| NewJob::new("call", &n).group("globex"))).await?;
    client.enqueue_many((0..40).map(|n| NewJob::new("call", &n).group("acme"))).await?;
    client.enqueue(NewJob::new("call", &0).group("initech")).await?;

    Worker::builder(client).function("call", call).build()?.drain().await?;

    let calls = CALLS.lock().expect("no call panics");
    for (customer, [_, most, ended]) in &*calls {
        println!("{customer}: {ended} calls, {most} at once");
    }
    assert!(calls["globex"][1] <= 2 && calls["acme"][1] <= 4, "{calls:?}");
    // The last in line did not wait for the 240 calls before it.
    let place = ORDER
        .lock()
        .expect("no call panics")
        .iter()
        .position(|customer| customer == "initech")
        .expect("initech was called");
    assert!(place < 60, "initech was number {place}");
    Ok(())
}
