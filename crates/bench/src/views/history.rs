//! What upkeep would have written about the month: the history of the charts, and groups of failures.

use longshore::Fingerprint;

use super::dataset::{DAY, ERROR, HOUR, KINDS, MINUTE};

/// Groups of failures without dead letters, for example of jobs that succeeded later.
const OLD_GROUPS: u64 = 2_000;

/// One row of `measures`.
pub(super) struct Measure {
    pub(super) minute: i64,
    pub(super) what: &'static str,
    pub(super) queue: &'static str,
    pub(super) kind: &'static str,
    pub(super) bucket: i16,
    pub(super) value: i64,
}

/// One row of `error_groups`.
pub(super) struct FailureGroup {
    pub(super) fingerprint: i64,
    pub(super) kind: &'static str,
    pub(super) attempts: i64,
    pub(super) last_seen: i64,
    pub(super) error: String,
}

/// The fingerprint of the error that all failed jobs of the dataset have.
pub(super) fn fingerprint(kind: &str, error: &str) -> i64 {
    let hex = Fingerprint::of(kind, error).to_string();
    u64::from_str_radix(&hex, 16).unwrap_or_default() as i64
}

/// Measures per minute for two hours, and per hour for a week.
pub(super) fn measures(now: i64) -> Vec<Measure> {
    let hour = now - now.rem_euclid(HOUR);
    let minutes = (0..120).map(|n| now - now.rem_euclid(MINUTE) - n * MINUTE);
    let hours = (2..7 * DAY / HOUR).map(|n| hour - n * HOUR);
    minutes.chain(hours).flat_map(of_period).collect()
}

/// Waiting times in twelve buckets and failed attempts of each kind, and the state of each queue.
fn of_period(minute: i64) -> Vec<Measure> {
    let mut measures = Vec::new();
    let mut queues = Vec::new();
    for (kind, queue, share) in KINDS {
        let value = share as i64;
        for bucket in (4..28).step_by(2) {
            measures.push(Measure { minute, what: "waited", queue, kind, bucket, value });
        }
        measures.push(Measure { minute, what: "failed", queue, kind, bucket: 0, value: 1 + value / 100 });
        if !queues.contains(&queue) {
            queues.push(queue);
        }
    }
    queues.push("");
    for queue in queues {
        let of_queue = |what, value| Measure { minute, what, queue, kind: "", bucket: 0, value };
        measures.extend([of_queue("depth", 20_000), of_queue("overdue", 90_000)]);
    }
    measures
}

/// A group for each kind, and many old ones.
pub(super) fn failure_groups(now: i64) -> Vec<FailureGroup> {
    let group = |kind: &'static str, error: String, last_seen: i64| FailureGroup {
        fingerprint: fingerprint(kind, &error),
        kind,
        attempts: 17,
        last_seen,
        error,
    };
    let current = KINDS.map(|(kind, _, _)| group(kind, ERROR.into(), now - HOUR));
    let old = (0..OLD_GROUPS).map(|n| {
        let (kind, _, _) = KINDS[n as usize % KINDS.len()];
        // Words, because numbers are not part of a fingerprint.
        let name: String =
            n.to_string().bytes().map(|digit| char::from(b'a' + digit.wrapping_sub(b'0') % 26)).collect();
        group(kind, format!("unexpected reply {name}"), now - DAY - n as i64 * MINUTE)
    });
    current.into_iter().chain(old).collect()
}
