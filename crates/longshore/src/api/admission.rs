//! Limits on what the API accepts: requests per second of one token, and waiting
//! jobs per queue. A refused request gets 429 with `Retry-After`.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderValue, header};
use uuid::Uuid;

use super::auth::Caller;
use super::problem::{ApiResult, Problem, Slug};
use crate::client::Client;

/// How long a count of a queue's waiting jobs is used while the queue has room.
const DEPTH_TTL: Duration = Duration::from_secs(1);
/// The same for a queue that seems to be full: its workers may have made room.
const FULL_DEPTH_TTL: Duration = Duration::from_millis(25);
/// A count is used for at least this many times as long as it took, so that counting takes
/// at most a twentieth of one connection per queue, whatever the limit.
const DEPTH_TTL_PER_COUNT: u32 = 20;
/// A count that takes longer was probably abandoned, and another request counts.
const MAX_COUNT_TIME: Duration = Duration::from_secs(5);
/// Above this number of queues, old counts are dropped.
const MAX_DEPTHS: usize = 1000;
/// The `Retry-After` of a job for a full queue.
const FULL_QUEUE_RETRY_AFTER: Duration = Duration::from_secs(5);

/// Limits on what the API accepts. By default there are none.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// Requests per second of one token, which is also the largest burst. All
    /// callers without a token share one allowance.
    pub requests_per_second: Option<u32>,
    /// How many jobs may wait in a queue before new ones are refused. The server counts
    /// a queue once per second while jobs arrive for it, more often while it seems to be
    /// full, and less often if a count takes long. It adds the jobs that it accepts in
    /// between. Jobs that are enqueued elsewhere are noticed with the next count.
    pub waiting_jobs: Option<u64>,
}

/// Enforces an [`Admission`].
#[derive(Debug)]
pub(super) struct Limiter {
    admission: Admission,
    /// A token bucket per caller: requests left, and when that was computed.
    buckets: Mutex<HashMap<Option<Uuid>, (f64, Instant)>>,
    depths: Mutex<HashMap<String, Depth>>,
}

/// What is known about the number of a queue's waiting jobs.
#[derive(Debug)]
struct Depth {
    counted_at: Instant,
    /// How long the count took.
    took: Duration,
    /// The jobs counted, and those accepted since the count began.
    waiting: u64,
    /// Jobs accepted since the newest count began. They may or may not be in it.
    accepted: u64,
    /// Set while a request counts; meanwhile, others use the old number. If that request was
    /// abandoned, the next one after this time counts.
    counting_until: Option<Instant>,
}

impl Depth {
    fn is_counting(&self, now: Instant) -> bool {
        self.counting_until.is_some_and(|until| now < until)
    }

    /// Whether the number is too old to decide with.
    fn is_stale(&self, limit: u64, now: Instant) -> bool {
        let ttl = if self.waiting < limit { DEPTH_TTL } else { FULL_DEPTH_TTL };
        now.duration_since(self.counted_at) >= ttl.max(self.took * DEPTH_TTL_PER_COUNT)
    }

    /// Accepts one more job if there is room; otherwise returns how many wait.
    fn accept(&mut self, limit: u64) -> Result<(), u64> {
        if self.waiting >= limit {
            return Err(self.waiting);
        }
        self.waiting += 1;
        self.accepted += 1;
        Ok(())
    }
}

impl Limiter {
    pub(super) fn new(admission: Admission) -> Self {
        Limiter { admission, buckets: Mutex::default(), depths: Mutex::default() }
    }

    /// Counts a request of this caller; refuses it above the rate.
    pub(super) fn check_rate(&self, caller: &Caller) -> ApiResult<()> {
        let Some(rate) = self.admission.requests_per_second.map(|rate| f64::from(rate.max(1))) else {
            return Ok(());
        };
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // A full bucket need not be stored.
        buckets.retain(|_, (tokens, since)| *tokens + now.duration_since(*since).as_secs_f64() * rate < rate);
        let (tokens, since) = buckets.entry(caller.token()).or_insert((rate, now));
        *tokens = (*tokens + now.duration_since(*since).as_secs_f64() * rate).min(rate);
        *since = now;
        if *tokens < 1.0 {
            let wait = Duration::from_secs_f64((1.0 - *tokens) / rate);
            return Err(rate_limited(format!("more than {rate} requests per second; slow down"), wait));
        }
        *tokens -= 1.0;
        Ok(())
    }

    /// Refuses a new job for this queue if the queue is full.
    pub(super) async fn check_depth(&self, client: &Client, queue: &str) -> ApiResult<()> {
        let Some(limit) = self.admission.waiting_jobs else { return Ok(()) };
        let known = self.accept(queue, limit);
        let accepted = match known {
            Some(accepted) => accepted,
            None => {
                let started = Instant::now();
                let counted = client.depth(queue, limit).await;
                let took = started.elapsed();
                let mut depths = self.depths();
                if depths.len() >= MAX_DEPTHS {
                    depths.retain(|_, depth| depth.counted_at.elapsed() < DEPTH_TTL);
                }
                if counted.is_err() {
                    depths.remove(queue);
                }
                let counted = counted?;
                let accepted = depths.get(queue).map_or(0, |depth| depth.accepted);
                let mut depth = Depth {
                    counted_at: Instant::now(),
                    took,
                    waiting: counted.saturating_add(accepted),
                    // When nothing is known yet, several requests count at once. The counts
                    // that end later may have begun before these jobs were stored.
                    accepted,
                    counting_until: None,
                };
                let result = depth.accept(limit);
                depths.insert(queue.to_owned(), depth);
                result
            }
        };
        accepted.map_err(|waiting| {
            rate_limited(
                format!(
                    "queue: `{queue}` is full: {waiting} jobs wait and the limit is {limit}; try again later"
                ),
                FULL_QUEUE_RETRY_AFTER,
            )
        })
    }

    /// Decides with what is known about the queue; `None` if the caller must count first.
    fn accept(&self, queue: &str, limit: u64) -> Option<Result<(), u64>> {
        let mut depths = self.depths();
        let depth = depths.get_mut(queue)?;
        let now = Instant::now();
        if depth.is_counting(now) || !depth.is_stale(limit, now) {
            return Some(depth.accept(limit));
        }
        depth.counting_until = Some(now + MAX_COUNT_TIME);
        depth.accepted = 0;
        None
    }

    fn depths(&self) -> MutexGuard<'_, HashMap<String, Depth>> {
        self.depths.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn rate_limited(message: String, wait: Duration) -> Problem {
    let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
    Problem::new(Slug::RateLimited, message).with_header(header::RETRY_AFTER, HeaderValue::from(seconds))
}
