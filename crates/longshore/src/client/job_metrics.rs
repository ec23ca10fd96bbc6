//! The metrics of attempts, which the worker runtime and the API share, and the descriptions of
//! all metrics of this crate. `worker::metrics`, `api::attempt_metrics` and `recovery` count.

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge};

use crate::client::settle::Kept;
use crate::job::{AttemptEnd, Outcome};
use crate::rules::lifecycle::Leave;
use crate::store::FlowStatus;

pub(crate) const STARTED: &str = "worker_jobs_started_total";
pub(crate) const COMPLETED: &str = "worker_jobs_completed_total";
const RECOVERED: &str = "longshore_recovered_jobs_total";
pub(crate) const DURATION: &str = "worker_job_duration_seconds";
const STEPS_STORED: &str = "longshore_steps_stored_total";
const STEPS_REPLAYED: &str = "longshore_steps_replayed_total";
const WAITS_TIMED_OUT: &str = "longshore_waits_timed_out_total";
const EVENTS_EMITTED: &str = "longshore_events_emitted_total";
const EVENTS_DELIVERED: &str = "longshore_events_delivered_total";
const FLOWS_ENDED: &str = "longshore_flows_ended_total";

/// The values of the label `outcome`.
pub(crate) const OUTCOMES: [&str; 9] = [
    "succeeded",
    "retrying",
    "failed_permanent",
    "cancelled",
    "snoozed",
    "suspended",
    "released",
    "lease_lost",
    "error",
];

/// The label `outcome` for what was stored.
pub(crate) fn outcome_label(kept: Kept) -> &'static str {
    match kept {
        Kept::Finished(Outcome::Succeeded) => "succeeded",
        Kept::Finished(Outcome::FailedPermanent) => "failed_permanent",
        Kept::Finished(Outcome::Cancelled) => "cancelled",
        Kept::Requeued { history: Some(AttemptEnd::Snoozed), .. } => "snoozed",
        Kept::Requeued { history: Some(AttemptEnd::Failed), .. } => "retrying",
        Kept::Requeued { .. } => "released",
        Kept::Suspended => "suspended",
        Kept::LeaseLost => "lease_lost",
    }
}

/// Counts a job that this process recovered, and its outcome if recovery ended it. As for workers
/// that call the API, that attempt counts as started and completed at once: the process that
/// started it can no longer complete it.
pub(crate) fn count_recovered(kind: &str, leave: &Leave) {
    counter!(RECOVERED).increment(1);
    if let Leave::Finish(finish) = leave {
        let outcome = outcome_label(Kept::Finished(finish.outcome));
        counter!(STARTED, "kind" => kind.to_owned()).increment(1);
        counter!(COMPLETED, "kind" => kind.to_owned(), "outcome" => outcome).increment(1);
    }
}

/// Counts steps that this process stored.
pub(crate) fn count_stored_steps(steps: usize) {
    counter!(STEPS_STORED).increment(steps as u64);
}

/// Counts a step that is not repeated, because an earlier attempt has stored it.
pub(crate) fn count_replayed_step() {
    counter!(STEPS_REPLAYED).increment(1);
}

/// Counts a wait for events that ended at its deadline.
pub(crate) fn count_timed_out_wait() {
    counter!(WAITS_TIMED_OUT).increment(1);
}

/// Counts an event that this process emitted.
pub(crate) fn count_emitted_event() {
    counter!(EVENTS_EMITTED).increment(1);
}

/// Counts the jobs that events woke.
pub(crate) fn count_delivered_events(jobs: usize) {
    counter!(EVENTS_DELIVERED).increment(jobs as u64);
}

/// Counts flows that ended, by status.
pub(crate) fn count_ended_flows(ended: &[FlowStatus]) {
    for status in ended {
        counter!(FLOWS_ENDED, "status" => status.as_str()).increment(1);
    }
}

/// Creates the counters of a kind at zero, for every outcome. A counter that appeared with its
/// first event would hide that event from rates, and so from alerts.
pub(crate) fn register_kind(kind: &str) {
    counter!(STARTED, "kind" => kind.to_owned()).increment(0);
    for outcome in OUTCOMES {
        counter!(COMPLETED, "kind" => kind.to_owned(), "outcome" => outcome).increment(0);
    }
}

/// Describes every metric of this crate to the recorder. Recorders ignore repetitions.
pub(crate) fn describe() {
    describe_counter!(STARTED, "Attempts started, by kind.");
    describe_counter!(COMPLETED, "Attempts completed, by kind and outcome.");
    describe_histogram!(DURATION, Unit::Seconds, "Duration of attempts, by kind and outcome.");
    describe_counter!(RECOVERED, "Jobs recovered from dead workers and hung handlers.");
    describe_counter!(STEPS_STORED, "Durable steps stored.");
    describe_counter!(
        STEPS_REPLAYED,
        "Durable steps not repeated, because an earlier attempt had stored them."
    );
    describe_counter!(WAITS_TIMED_OUT, "Waits for events that ended at their deadline.");
    describe_counter!(EVENTS_EMITTED, "Events emitted by this process.");
    describe_counter!(EVENTS_DELIVERED, "Jobs woken by events.");
    describe_counter!(FLOWS_ENDED, "Flows whose end this process stored, by status.");
    for status in FlowStatus::ALL.into_iter().filter(|status| *status != FlowStatus::Running) {
        counter!(FLOWS_ENDED, "status" => status.as_str()).increment(0);
    }
    for name in [RECOVERED, STEPS_STORED, STEPS_REPLAYED, WAITS_TIMED_OUT, EVENTS_EMITTED, EVENTS_DELIVERED] {
        counter!(name).increment(0);
    }
    describe_histogram!("longshore_claim_seconds", Unit::Seconds, "Duration of claims.");
    describe_histogram!("longshore_claim_batch_jobs", Unit::Count, "Jobs per claim.");
    describe_histogram!("longshore_settle_seconds", Unit::Seconds, "Duration of settles.");
    describe_histogram!("longshore_settle_batch_jobs", Unit::Count, "Jobs per settle.");
    describe_gauge!(
        "longshore_queue_jobs",
        "Waiting and running jobs of the whole queue, by queue and status."
    );
    describe_gauge!(
        "longshore_queue_oldest_ready_seconds",
        Unit::Seconds,
        "Age of the oldest due job, by queue."
    );
    describe_gauge!("longshore_pool_connections_in_use", "Connections to Postgres in use by this process.");
    describe_gauge!("longshore_pool_connections_max", "Maximum number of connections to Postgres.");
    describe_counter!("http_requests_total", "API requests, by method, path and status.");
    describe_histogram!(
        "http_request_duration_seconds",
        Unit::Seconds,
        "Duration of API requests, by method, path and status."
    );
    describe_counter!(
        "longshore_http_connections_closed_total",
        "Connections that the server closed, by reason."
    );
    describe_counter!("longshore_auth_failures_total", "API requests refused for their token, by reason.");
    describe_gauge!("longshore_build_info", "Always 1; the labels describe this build.");
    gauge!("longshore_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
}
