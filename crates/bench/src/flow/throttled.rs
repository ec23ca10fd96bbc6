//! `bench flow --only throttled`: the pick-up latency of single jobs while a large backlog of
//! another group, which is at its limit, is ahead in the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use longshore::worker::{Builder, Context, Worker};
use longshore::{Client, GroupChange, NewJob};
use serde_json::{Value, json};

use super::{BULK, Backend, Bar, Figure, Options, QUEUE, grouped_job};
use crate::report::{median, quantile, thousands};
use crate::worker::scenarios::pickup_of;
use crate::{Result, library};

const BACKLOG: u64 = 1_000_000;
const SAMPLES: u64 = 1000;
const GROUP: &str = "throttled";
/// The kind of the backlog. Its jobs run until the worker stops.
const KIND: &str = "endless";
const LIMIT: u32 = 5;
/// How much longer than with an empty queue, in milliseconds.
const BAR: f64 = 20.0;

/// The tables with the backlog are filled once and kept for all rounds.
const THROTTLED: &str = "bench_throttled";
const EMPTY: &str = "bench_empty";

pub(super) async fn measure(options: &Options, backend: &mut Backend) -> Result<Vec<Figure>> {
    let (backlog, samples) = (options.jobs(BACKLOG), if options.quick { 300 } else { SAMPLES });
    let throttled = backend.fresh(THROTTLED).await?;
    let limit = GroupChange { limit: Some(Some(LIMIT)), ..GroupChange::default() };
    throttled.client.set_group(QUEUE, GROUP, limit).await?;
    let endless = |n| NewJob::new(KIND, &library::payload(n)).group(GROUP);
    library::enqueue_bulk_of(&throttled.client, backlog, BULK, endless).await?;
    backend.vacuum(THROTTLED).await?;

    let (mut behind, mut alone, mut plain) =
        (Latencies::default(), Latencies::default(), Latencies::default());
    for _ in 0..options.rounds {
        let running = Arc::new(AtomicU32::new(0));
        let worker = worker(&throttled.client, running.clone());
        behind.push(&pickup_of(worker, &throttled.client, samples, grouped_job).await?);
        if running.load(Ordering::Relaxed) != LIMIT {
            return Err(format!("{running:?} jobs of the backlog ran, and not {LIMIT}").into());
        }
        for (latencies, job) in [(&mut alone, grouped_job as fn(u64) -> NewJob), (&mut plain, library::job)] {
            let empty = backend.fresh(EMPTY).await?;
            let worker = worker_alone(&empty.client);
            latencies.push(&pickup_of(worker, &empty.client, samples, job).await?);
        }
    }
    let longer: Vec<f64> = behind.p99.iter().zip(&alone.p99).map(|(behind, alone)| behind - alone).collect();
    let note = format!(
        "p50/p99 {} behind {} jobs, {} with an empty queue, {} without groups",
        behind.text(),
        thousands(backlog as f64),
        alone.text(),
        plain.text()
    );
    let details = json!({
        "longer_p99_ms": longer,
        "behind_backlog": behind.json(),
        "empty_queue": alone.json(),
        "without_groups": plain.json(),
    });
    let figure = Figure::median("pick-up p99, ms longer than with an empty queue", &longer, Bar::AtMost(BAR));
    Ok(vec![figure.note(note).details(details)])
}

fn worker_alone(client: &Client) -> Builder {
    Worker::builder(client.clone())
}

/// A worker that also takes the jobs of the backlog and counts them.
fn worker(client: &Client, running: Arc<AtomicU32>) -> Builder {
    let endless = move |_: Value, _: Context| {
        running.fetch_add(1, Ordering::Relaxed);
        std::future::pending()
    };
    worker_alone(client).function(KIND, endless).shutdown_grace(Duration::ZERO)
}

/// Quantiles of each round, in milliseconds.
#[derive(Default)]
struct Latencies {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Latencies {
    fn push(&mut self, micros: &[u64]) {
        self.p50.push(quantile(micros, 0.50) / 1000.0);
        self.p99.push(quantile(micros, 0.99) / 1000.0);
    }

    fn text(&self) -> String {
        let median = |rounds: &[f64]| median(rounds.to_vec()).unwrap_or(0.0);
        format!("{:.1}/{:.1} ms", median(&self.p50), median(&self.p99))
    }

    fn json(&self) -> Value {
        json!({ "p50_ms": self.p50, "p99_ms": self.p99 })
    }
}
