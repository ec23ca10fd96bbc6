//! Fast and slow kinds in one backlog, drained by two workers: whether both stay busy until
//! the end, and how long urgent jobs wait behind slow ones.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use longshore::worker::{Context, Failure, RunningWorker, Worker};
use longshore::{Client, NewJob};

use crate::Result;
use crate::report::{Limit, median};

const CONCURRENCY: u32 = 24;
const FAST: u64 = 20_000;
const SLOW: u64 = 960;
const SLOW_TIME: Duration = Duration::from_millis(100);
/// Urgent jobs are enqueued one by one while slow jobs run.
const URGENT: u64 = 20;
const URGENT_PRIORITY: i64 = 1000;

/// What happened in one drain.
#[derive(Default)]
struct Log {
    /// When each worker ended its last job.
    last_end: [Option<Instant>; 2],
    /// The slow jobs that each worker ran.
    slow: [u64; 2],
    urgent_waits: Vec<Duration>,
}

type SharedLog = Arc<Mutex<Log>>;

/// The figures of all rounds. Each round drains one backlog in new tables.
#[derive(Default)]
pub(super) struct Mixed {
    /// The drain's time divided by the time that the slow jobs alone need on all slots.
    slowdowns: Vec<f64>,
    /// How long before the end the other worker ended its last job.
    idle_at_the_end: Vec<f64>,
    /// The smaller worker's part of the slow jobs.
    smaller_shares: Vec<f64>,
    urgent_waits: Vec<f64>,
}

impl Mixed {
    pub(super) async fn round(&mut self, client: &Client) -> Result<()> {
        let fast = || (0..FAST / 2).map(|n| NewJob::new("fast", &n));
        let slow = (0..SLOW).map(|n| NewJob::new("slow", &n));
        client.enqueue_many(fast()).await?;
        client.enqueue_many(slow).await?;
        client.enqueue_many(fast()).await?;

        let log = SharedLog::default();
        let started = Instant::now();
        let workers = [start(client, &log, 0, started).await?, start(client, &log, 1, started).await?];
        for _ in 0..URGENT {
            tokio::time::sleep(SLOW_TIME * 3 / 4).await;
            client.enqueue(urgent(started)).await?;
        }
        let all = FAST + SLOW + URGENT;
        while workers.iter().map(|worker| worker.summary().succeeded).sum::<u64>() < all {
            if started.elapsed() > Duration::from_secs(120) {
                return Err("the mixed backlog was not drained within two minutes".into());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        for worker in workers {
            worker.stop().await;
        }

        let log = log.lock().unwrap_or_else(PoisonError::into_inner);
        let [Some(first), Some(second)] = log.last_end else { return Err("one worker ran no job".into()) };
        let took = first.max(second) - started;
        let ideal = SLOW_TIME.as_secs_f64() * SLOW as f64 / f64::from(2 * CONCURRENCY);
        self.slowdowns.push(took.as_secs_f64() / ideal);
        let gap = first.max(second) - first.min(second);
        self.idle_at_the_end.push(gap.as_secs_f64() * 1000.0);
        self.smaller_shares.push(*log.slow.iter().min().unwrap_or(&0) as f64 / SLOW as f64);
        self.urgent_waits.extend(log.urgent_waits.iter().map(|wait| wait.as_secs_f64() * 1000.0));
        Ok(())
    }

    pub(super) fn limits(self) -> Vec<Limit> {
        let largest_wait = self
            .urgent_waits
            .iter()
            .copied()
            .fold(None, |max: Option<f64>, wait| Some(max.map_or(wait, |max| max.max(wait))));
        let limit = |name: &str, value: Option<f64>, target: Option<f64>| {
            value.map(|value| Limit::new(format!("mixed drain, two workers, {name}"), value, target))
        };
        [
            limit("time / time of the slow jobs alone", median(self.slowdowns), Some(1.5)),
            limit("ms one worker is idle before the end", median(self.idle_at_the_end), Some(250.0)),
            limit("smaller share of the slow jobs", median(self.smaller_shares), None),
            limit("urgent job's wait in ms, median", median(self.urgent_waits), None),
            limit("urgent job's wait in ms, longest", largest_wait, Some(350.0)),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// An urgent job knows when it was enqueued, in microseconds after `started`.
fn urgent(started: Instant) -> NewJob {
    NewJob::new("urgent", &(started.elapsed().as_micros() as u64)).priority(URGENT_PRIORITY)
}

async fn start(client: &Client, log: &SharedLog, worker: usize, started: Instant) -> Result<RunningWorker> {
    let end = |log: &SharedLog| {
        let log = log.clone();
        move || log.lock().unwrap_or_else(PoisonError::into_inner).last_end[worker] = Some(Instant::now())
    };
    let (fast_end, slow_end, slow_log, urgent_log) = (end(log), end(log), log.clone(), log.clone());
    let fast = move |_: u64, _: Context| {
        fast_end();
        async { Ok::<(), Failure>(()) }
    };
    let slow = move |_: u64, _: Context| {
        let (end, log) = (slow_end.clone(), slow_log.clone());
        async move {
            tokio::time::sleep(SLOW_TIME).await;
            log.lock().unwrap_or_else(PoisonError::into_inner).slow[worker] += 1;
            end();
            Ok::<(), Failure>(())
        }
    };
    let urgent = move |enqueued: u64, _: Context| {
        let wait = started.elapsed().saturating_sub(Duration::from_micros(enqueued));
        urgent_log.lock().unwrap_or_else(PoisonError::into_inner).urgent_waits.push(wait);
        async { Ok::<(), Failure>(()) }
    };
    let builder = Worker::builder(client.clone())
        .function("fast", fast)
        .function("slow", slow)
        .function("urgent", urgent)
        .concurrency(CONCURRENCY);
    Ok(builder.build()?.start().await?)
}
