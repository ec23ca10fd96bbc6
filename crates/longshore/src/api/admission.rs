//! How much is let in: requests of one caller in a second, and jobs that wait in
//! one queue. What is too much is told when to come back.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderValue, header};
use uuid::Uuid;

use super::auth::Caller;
use super::problem::{ApiResult, Problem, Slug};
use crate::client::Client;

/// How old the depths may be that are gone by.
const DEPTHS_TTL: Duration = Duration::from_secs(1);
/// How long a caller is told to wait for a queue to become shorter.
const FULL_QUEUE_RETRY_AFTER: Duration = Duration::from_secs(5);

/// What is let in; without limits, everything.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// Requests of one token in a second, with as many at once. All callers
    /// without one share one allowance.
    pub requests_per_second: Option<u32>,
    /// How many jobs may wait in a queue before no more are taken.
    pub waiting_jobs: Option<u64>,
}

/// Keeps count.
#[derive(Debug)]
pub(super) struct Limiter {
    admission: Admission,
    /// What each caller has left, and since when.
    buckets: Mutex<HashMap<Option<Uuid>, (f64, Instant)>>,
    depths: Mutex<Option<(Instant, HashMap<String, u64>)>>,
}

impl Limiter {
    pub(super) fn new(admission: Admission) -> Self {
        Limiter { admission, buckets: Mutex::default(), depths: Mutex::default() }
    }

    /// One request more of this caller.
    pub(super) fn check_rate(&self, caller: &Caller) -> ApiResult<()> {
        let Some(rate) = self.admission.requests_per_second.map(|rate| f64::from(rate.max(1))) else {
            return Ok(());
        };
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // Whoever has a full allowance again is not worth remembering.
        buckets.retain(|_, (tokens, since)| *tokens + now.duration_since(*since).as_secs_f64() * rate < rate);
        let (tokens, since) = buckets.entry(caller.token()).or_insert((rate, now));
        *tokens = (*tokens + now.duration_since(*since).as_secs_f64() * rate).min(rate);
        *since = now;
        if *tokens < 1.0 {
            let wait = Duration::from_secs_f64((1.0 - *tokens) / rate);
            return Err(rate_limited(format!("more than {rate} requests in a second; slow down"), wait));
        }
        *tokens -= 1.0;
        Ok(())
    }

    /// One job more in this queue.
    pub(super) async fn check_depth(&self, client: &Client, queue: &str) -> ApiResult<()> {
        let Some(most) = self.admission.waiting_jobs else { return Ok(()) };
        let known = {
            let depths = self.depths.lock().unwrap_or_else(PoisonError::into_inner);
            depths
                .as_ref()
                .filter(|(at, _)| at.elapsed() < DEPTHS_TTL)
                .map(|(_, depths)| depths.get(queue).copied().unwrap_or(0))
        };
        let waiting = match known {
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
        if waiting >= most {
            Err(rate_limited(
                format!("queue: {waiting} jobs wait in it, and no more than {most} may; come back later"),
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
