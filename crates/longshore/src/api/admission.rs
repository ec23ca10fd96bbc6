//! How much is let in: requests of one caller in a second, and jobs that wait in
//! one queue. What is too much is told when to come back.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderValue, header};
use uuid::Uuid;

use super::auth::Caller;
use super::problem::{Answer, Problem, Slug};
use crate::client::Client;

/// How old the depths may be that are gone by.
const DEPTHS_FOR: Duration = Duration::from_secs(1);
/// How long a caller is told to wait for a queue to become shorter.
const COME_BACK: Duration = Duration::from_secs(5);

/// What is let in; without limits, everything.
#[derive(Clone, Debug, Default)]
pub struct Admission {
    /// Requests of one token in a second, with as many at once. All callers
    /// without one share one share.
    pub requests_per_second: Option<u32>,
    /// How many jobs may wait in a queue before no more are taken.
    pub waiting_jobs: Option<u64>,
}

/// Keeps count.
#[derive(Debug)]
pub(super) struct Gate {
    admission: Admission,
    /// What each caller has left, and since when.
    left: Mutex<HashMap<Option<Uuid>, (f64, Instant)>>,
    depths: Mutex<Option<(Instant, HashMap<String, u64>)>>,
}

impl Gate {
    pub(super) fn new(admission: Admission) -> Self {
        Gate { admission, left: Mutex::default(), depths: Mutex::default() }
    }

    /// One request more of this caller.
    pub(super) fn count(&self, caller: &Caller) -> Answer<()> {
        let Some(rate) = self.admission.requests_per_second.map(|rate| f64::from(rate.max(1))) else {
            return Ok(());
        };
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        // Whoever has a full share again is not worth remembering.
        left.retain(|_, (share, since)| *share + now.duration_since(*since).as_secs_f64() * rate < rate);
        let (share, since) = left.entry(caller.token()).or_insert((rate, now));
        *share = (*share + now.duration_since(*since).as_secs_f64() * rate).min(rate);
        *since = now;
        if *share < 1.0 {
            let wait = Duration::from_secs_f64((1.0 - *share) / rate);
            return Err(later(format!("more than {rate} requests in a second; slow down"), wait));
        }
        *share -= 1.0;
        Ok(())
    }

    /// One job more in this queue.
    pub(super) async fn enqueue(&self, client: &Client, queue: &str) -> Answer<()> {
        let Some(most) = self.admission.waiting_jobs else { return Ok(()) };
        let known = {
            let depths = self.depths.lock().unwrap_or_else(PoisonError::into_inner);
            depths
                .as_ref()
                .filter(|(at, _)| at.elapsed() < DEPTHS_FOR)
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
        match waiting >= most {
            true => Err(later(
                format!("queue: {waiting} jobs wait in it, and no more than {most} may; come back later"),
                COME_BACK,
            )),
            false => Ok(()),
        }
    }
}

fn later(message: String, wait: Duration) -> Problem {
    let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
    Problem::new(Slug::RateLimited, message).with_header(header::RETRY_AFTER, HeaderValue::from(seconds))
}
