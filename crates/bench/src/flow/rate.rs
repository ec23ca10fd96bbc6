//! `bench flow --only rate`: the starts of a group with a rate, with one worker and a backlog.
//!
//! A rate counts a claim as a start, so the bars are for the times of the claims by the database's
//! clock (`claimed_at`). The handlers start a moment later, and that moment varies; their busiest
//! second is reported too.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use longshore::worker::{Context, Failure, Worker};
use longshore::{GroupChange, Rate};
use serde_json::{Value, json};

use super::{BULK, Backend, Bar, Figure, Options, QUEUE, SCHEMA};
use crate::Result;
use crate::library::{self, KIND};
use crate::report::median;
use crate::worker::scenarios::CONCURRENCY;

const GROUP: &str = "paced";
const STARTS: u32 = 100;
const BURST: u32 = 10;
const SECOND: i64 = 1_000_000;

pub(super) async fn measure(options: &Options, backend: &mut Backend) -> Result<Vec<Figure>> {
    let time = Duration::from_secs(if options.quick { 5 } else { 20 });
    let mut rounds = Vec::new();
    for _ in 0..options.rounds {
        rounds.push(start_jobs(backend, time).await?);
    }
    let each = |figure: fn(&Starts) -> f64| rounds.iter().map(figure).collect::<Vec<f64>>();
    let worst = each(|starts| busiest_second(&starts.claimed) as f64);
    let handlers = each(|starts| busiest_second(&starts.handled) as f64);
    let sustained = each(|starts| per_second_after_burst(&starts.claimed));
    let allowed = f64::from(STARTS + BURST - 1);
    // Not the median: no second may have more.
    let most = worst.iter().copied().fold(0.0, f64::max);
    let note = format!("handlers: {}", median(handlers.clone()).unwrap_or(0.0));
    Ok(vec![
        Figure::new("starts in the busiest second (claimed_at)", most, Bar::AtMost(allowed))
            .note(note)
            .details(json!({ "rounds": worst, "by_handler_start": handlers })),
        Figure::median(
            format!("starts per second, of a rate of {STARTS}"),
            &sustained,
            Bar::AtLeast(0.98 * f64::from(STARTS)),
        ),
    ])
}

/// When jobs started, in microseconds and in order.
#[derive(Default)]
struct Starts {
    /// By the database's clock.
    claimed: Vec<i64>,
    /// When the handler was called.
    handled: Vec<i64>,
}

async fn start_jobs(backend: &mut Backend, time: Duration) -> Result<Starts> {
    let tables = backend.fresh(SCHEMA).await?;
    let rate = Rate::per_second(STARTS).burst(BURST);
    let change = GroupChange { rate: Some(Some(rate)), ..GroupChange::default() };
    tables.client.set_group(QUEUE, GROUP, change).await?;
    let jobs = u64::from(STARTS) * (time.as_secs() + 5);
    library::enqueue_bulk_of(&tables.client, jobs, BULK, |n| library::job(n).group(GROUP)).await?;
    backend.vacuum(SCHEMA).await?;

    let starts = Arc::new(Mutex::new(Starts::default()));
    let (seen, began) = (starts.clone(), Instant::now());
    let handler = move |_: Value, ctx: Context| {
        let handled = began.elapsed().as_micros() as i64;
        let result = seen.lock().map_err(|_| Failure::permanent("another handler panicked"));
        let result = result.map(|mut starts| {
            starts.claimed.push(ctx.job().claimed_at().timestamp_micros());
            starts.handled.push(handled);
        });
        async { result }
    };
    let worker = Worker::builder(tables.client.clone()).function(KIND, handler).concurrency(CONCURRENCY);
    let running = worker.build()?.start().await?;
    tokio::time::sleep(time).await;
    running.stop().await;
    let mut starts = std::mem::take(&mut *starts.lock().map_err(|_| "a handler panicked")?);
    starts.claimed.sort_unstable();
    starts.handled.sort_unstable();
    Ok(starts)
}

/// The largest number of starts within one second, wherever it begins.
fn busiest_second(starts: &[i64]) -> usize {
    let (mut first, mut most) = (0, 0);
    for (nth, at) in starts.iter().enumerate() {
        while at - starts[first] >= SECOND {
            first += 1;
        }
        most = most.max(nth + 1 - first);
    }
    most
}

/// The rate after the first second, which has the burst.
fn per_second_after_burst(starts: &[i64]) -> f64 {
    let Some((first, last)) = starts.first().zip(starts.last()) else { return 0.0 };
    let from = first + SECOND;
    let counted = starts.iter().filter(|at| **at > from).count();
    counted as f64 / ((last - from).max(1) as f64 / SECOND as f64)
}

#[cfg(test)]
mod tests {
    use super::{SECOND, busiest_second, per_second_after_burst};

    #[test]
    fn the_busiest_second_may_begin_at_any_start() {
        assert_eq!(busiest_second(&[0, 1, 2]), 3);
        assert_eq!(busiest_second(&[0, SECOND, SECOND + 1, 2 * SECOND - 1, 2 * SECOND]), 3);
        assert_eq!(busiest_second(&[]), 0);
    }

    #[test]
    fn the_sustained_rate_leaves_the_burst_out() {
        let burst = std::iter::repeat_n(0, 10);
        let starts: Vec<i64> = burst.chain((1..=400).map(|nth| nth * SECOND / 100)).collect();
        assert_eq!(per_second_after_burst(&starts), 100.0);
    }
}
