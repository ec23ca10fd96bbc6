//! What a worker counts, by the `metrics` facade: whoever installs a recorder
//! before the worker starts sees it, and otherwise it costs next to nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use super::Summary;
use crate::job::Status;
use crate::store::Count;

/// Handles are looked up once per kind, not once per job.
#[derive(Default)]
pub(super) struct Metrics {
    kinds: RwLock<HashMap<String, Arc<Kind>>>,
    ends: [AtomicU64; OUTCOMES.len()],
}

struct Kind {
    started: Counter,
    /// In the order of [`OUTCOMES`].
    completed: Vec<(Counter, Histogram)>,
}

const OUTCOMES: [&str; 8] =
    ["succeeded", "retrying", "failed_permanent", "cancelled", "snoozed", "released", "lease_lost", "error"];

impl Kind {
    fn new(kind: &str) -> Self {
        let handles = |outcome: &'static str| {
            let counted =
                counter!("worker_jobs_completed_total", "kind" => kind.to_owned(), "outcome" => outcome);
            let timed =
                histogram!("worker_job_duration_seconds", "kind" => kind.to_owned(), "outcome" => outcome);
            (counted, timed)
        };
        Kind {
            started: counter!("worker_jobs_started_total", "kind" => kind.to_owned()),
            completed: OUTCOMES.into_iter().map(handles).collect(),
        }
    }
}

impl Metrics {
    fn kind(&self, kind: &str) -> Arc<Kind> {
        if let Some(known) = self.kinds.read().unwrap_or_else(PoisonError::into_inner).get(kind) {
            return known.clone();
        }
        let fresh = Arc::new(Kind::new(kind));
        self.kinds.write().unwrap_or_else(PoisonError::into_inner).insert(kind.to_owned(), fresh.clone());
        fresh
    }

    pub(super) fn started(&self, kind: &str) {
        self.kind(kind).started.increment(1);
    }

    /// `ran` is absent for an attempt whose handler was never called.
    pub(super) fn completed(&self, kind: &str, outcome: &'static str, ran: Option<Duration>) {
        let Some(nth) = OUTCOMES.iter().position(|word| *word == outcome) else { return };
        self.ends[nth].fetch_add(1, Ordering::Relaxed);
        let kind = self.kind(kind);
        let (counted, timed) = &kind.completed[nth];
        counted.increment(1);
        if let Some(ran) = ran {
            timed.record(ran);
        }
    }

    pub(super) fn summary(&self) -> Summary {
        let [succeeded, retrying, failed_permanent, cancelled, snoozed, released, ..] =
            std::array::from_fn::<u64, { OUTCOMES.len() }, _>(|nth| self.ends[nth].load(Ordering::Relaxed));
        Summary { succeeded, retrying, failed_permanent, cancelled, put_back: snoozed + released }
    }

    pub(super) fn claimed(&self, jobs: usize, took: Duration) {
        histogram!("longshore_claim_batch_jobs").record(jobs as f64);
        histogram!("longshore_claim_seconds").record(took);
    }

    pub(super) fn settled(&self, jobs: usize, took: Duration) {
        histogram!("longshore_settle_batch_jobs").record(jobs as f64);
        histogram!("longshore_settle_seconds").record(took);
    }

    pub(super) fn recovered(&self, jobs: u64) {
        counter!("longshore_recovered_jobs_total").increment(jobs);
    }

    /// How many jobs wait or run, by queue.
    pub(super) fn depth(&self, counts: &[Count]) {
        let live = counts
            .iter()
            .filter(|count| matches!(count.status, Status::Queued | Status::Retrying | Status::Running));
        let mut queues = HashMap::<(&str, &'static str), u64>::new();
        for count in live {
            *queues.entry((&count.queue, count.status.as_str())).or_default() += count.jobs;
        }
        for ((queue, status), jobs) in queues {
            depth_of(queue, status).set(jobs as f64);
        }
    }
}

fn depth_of(queue: &str, status: &'static str) -> Gauge {
    gauge!("longshore_queue_jobs", "queue" => queue.to_owned(), "status" => status)
}
