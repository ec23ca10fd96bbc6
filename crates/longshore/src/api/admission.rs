//! Limits on what the API accepts: requests per second of one token, and waiting
//! jobs per queue. A refused request gets 429 with `Retry-After`.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderValue, header};
use uuid::Uuid;

use super::auth::Caller;
use super::problem::{ApiResult, Problem, Slug};
use crate::client::Client;

/// How long the queue depths are cached.
const DEPTHS_TTL: Duration = Duration::from_secs(1);
/// The `Retry-After` of a job for a full queue.
const FULL_QUEUE_RETRY_AFTER: Duration = Duration::from_secs(5);

/// Limits on what the API accepts. By default there are none.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// Requests per second of one token, which is also the largest burst. All
    /// callers without a token share one allowance.
    pub requests_per_second: Option<u32>,
    /// How many jobs may wait in a queue before new ones are refused.
    pub waiting_jobs: Option<u64>,
}

/// Enforces an [`Admission`].
#[derive(Debug)]
pub(super) struct Limiter {
    admission: Admission,
    /// A token bucket per caller: requests left, and when that was computed.
    buckets: Mutex<HashMap<Option<Uuid>, (f64, Instant)>>,
    depths: Mutex<Option<(Instant, HashMap<String, u64>)>>,
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
        let cached = {
            let depths = self.depths.lock().unwrap_or_else(PoisonError::into_inner);
            depths
                .as_ref()
                .filter(|(at, _)| at.elapsed() < DEPTHS_TTL)
                .map(|(_, depths)| depths.get(queue).copied().unwrap_or(0))
        };
        let waiting = match cached {
            Some(waiting) => waiting,
            None => {
                let queues = client.queues().await?;
                let depths: HashMap<String, u64> =
                    queues.into_iter().map(|queue| (queue.name, queue.waiting)).collect();
                let waiting = depths.get(queue).copied().unwrap_or(0);
                *self.depths.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), depths));
                waiting
            }
        };
        if waiting >= limit {
            Err(rate_limited(
                format!(
                    "queue: `{queue}` is full: {waiting} jobs wait and the limit is {limit}; try again later"
                ),
                FULL_QUEUE_RETRY_AFTER,
            ))
        } else {
            Ok(())
        }
    }
}

fn rate_limited(message: String, wait: Duration) -> Problem {
    let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
    Problem::new(Slug::RateLimited, message).with_header(header::RETRY_AFTER, HeaderValue::from(seconds))
}
