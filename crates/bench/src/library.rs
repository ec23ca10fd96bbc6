//! Longshore's side of the comparisons: what a program that uses the library does. The
//! other side is in `raw_postgres` and `raw_sqlite`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use longshore::store::{ClaimCursor, ClaimRequest, Claimed, Claims, Fenced, NewWorker};
use longshore::{Client, Ending, NewJob, Report};
use serde_json::json;

use crate::Result;

/// The kind of every job that is claimed.
pub(crate) const KIND: &str = "bench";

/// A payload of about 60 bytes of JSON, the same on both sides.
pub(crate) fn payload(n: u64) -> serde_json::Value {
    json!({ "to": "somebody@example.com", "template": "welcome", "n": n })
}

pub(crate) fn job(n: u64) -> NewJob {
    NewJob::new(KIND, &payload(n))
}

/// Enqueues `jobs` jobs, `step` in each call.
pub(crate) async fn enqueue_bulk(client: &Client, jobs: u64, step: u64) -> Result<()> {
    enqueue_bulk_of(client, jobs, step, job).await
}

/// The same, with jobs that `job` makes.
pub(crate) async fn enqueue_bulk_of(
    client: &Client,
    jobs: u64,
    step: u64,
    job: impl Fn(u64) -> NewJob,
) -> Result<()> {
    let mut next = 0;
    while next < jobs {
        let end = jobs.min(next + step);
        client.enqueue_many((next..end).map(&job)).await?;
        next = end;
    }
    Ok(())
}

/// Enqueues one job after another until the given time; returns how many.
pub(crate) async fn enqueue_singly(client: Client, until: Instant) -> Result<u64> {
    let mut n = 0;
    while Instant::now() < until {
        client.enqueue(job(n)).await?;
        n += 1;
    }
    Ok(n)
}

/// A registered worker that claims and settles jobs without running a handler.
pub(crate) struct Claimer {
    client: Client,
    request: ClaimRequest,
    cursor: ClaimCursor,
}

/// The result of one claim and settle.
pub(crate) struct Round {
    pub(crate) jobs: u64,
    /// Whether another claim may find more.
    pub(crate) more: bool,
    pub(crate) claim: Duration,
    pub(crate) settle: Duration,
}

impl Claimer {
    pub(crate) async fn register(
        client: &Client,
        kinds: Option<Vec<String>>,
        batch: u32,
        cursor: ClaimCursor,
    ) -> Result<Self> {
        let worker = NewWorker { kinds: kinds.clone(), ..NewWorker::new("bench") };
        client.store().register(&worker).await?;
        let request = ClaimRequest { kinds, ..ClaimRequest::new(worker.id, batch) };
        Ok(Claimer { client: client.clone(), request, cursor })
    }

    pub(crate) fn request(&self) -> &ClaimRequest {
        &self.request
    }

    /// Claims a batch and settles it.
    pub(crate) async fn round(&mut self) -> Result<Round> {
        let started = Instant::now();
        let claims = self.claim().await?;
        let claimed = Instant::now();
        self.settle(&claims.jobs).await?;
        Ok(Round {
            jobs: claims.jobs.len() as u64,
            more: claims.more,
            claim: claimed - started,
            settle: claimed.elapsed(),
        })
    }

    /// Claims a batch.
    pub(crate) async fn claim(&mut self) -> Result<Claims> {
        Ok(self.client.store().claim(&self.request, &mut self.cursor).await?)
    }

    /// Settles claimed jobs as succeeded.
    pub(crate) async fn settle(&self, jobs: &[Claimed]) -> Result<()> {
        let succeeded = |claimed| Report {
            claimed,
            ending: Ending::Succeeded { result: None },
            follow_ups: Vec::new(),
            has_progressed: false,
        };
        jobs.iter().for_each(|job| {
            black_box(job.payload());
        });
        let reports: Vec<Report<'_>> = jobs.iter().map(succeeded).collect();
        if !reports.is_empty() {
            let results = self.client.settle(reports).await?;
            if results.iter().any(|result| *result != Fenced::Held) {
                return Err("a settle lost its lease although no other worker is running".into());
            }
        }
        Ok(())
    }

    /// Claims and settles until no jobs are left; returns how many.
    pub(crate) async fn drain(mut self) -> Result<u64> {
        let mut jobs = 0;
        loop {
            let round = self.round().await?;
            jobs += round.jobs;
            if round.jobs == 0 && !round.more {
                return Ok(jobs);
            }
        }
    }
}
