//! The jobs of a queue that has been in use for a month: finished, waiting and running
//! jobs, and the tallies that upkeep would have written. Both engines get the same jobs.

use std::collections::BTreeMap;

use chrono::Utc;
use serde_json::json;
use uuid::Uuid;

use super::history::fingerprint;
use crate::Result;

pub(super) const MINUTE: i64 = 60 * 1_000_000;
pub(super) const HOUR: i64 = 60 * MINUTE;
pub(super) const DAY: i64 = 24 * HOUR;
pub(super) const ERROR: &str = "cannot reach the mail server: connection refused";

/// Kinds, their queues, and how many of a thousand jobs have each kind.
pub(super) const KINDS: [(&str, &str, u64); 8] = [
    ("send_email", "mail", 400),
    ("send_receipt", "mail", 150),
    ("resize_image", "images", 200),
    ("sync_contact", "default", 100),
    ("webhook", "default", 80),
    ("charge_card", "billing", 50),
    ("build_report", "reports", 19),
    ("import_file", "reports", 1),
];
/// A kind with about fifty jobs, the newest of them some days old.
pub(super) const RARE_KIND: &str = "close_the_books";

/// The number of jobs in each state.
#[derive(Clone, Copy)]
pub(super) struct JobCounts {
    pub(super) finished: u64,
    pub(super) waiting: u64,
    pub(super) running: u64,
}

impl JobCounts {
    pub(super) fn all(self) -> u64 {
        self.finished + self.waiting + self.running
    }
}

/// One job of the dataset. Times are in microseconds since 1970.
pub(super) struct Job {
    pub(super) id: Uuid,
    pub(super) created: i64,
    pub(super) kind: &'static str,
    pub(super) queue: &'static str,
    pub(super) priority: i16,
    pub(super) payload: String,
    /// The stored JSON, if the job has options.
    pub(super) options: Option<String>,
    pub(super) state: JobState,
    /// How often the job has failed.
    pub(super) failures: u16,
}

/// The state of a job, with the columns of its table.
pub(super) enum JobState {
    Finished { outcome: &'static str, started: i64, finished: i64 },
    Waiting { run_at: i64, interruptions: u16 },
    Running { claimed: i64 },
}

/// A month of jobs. Every job is computed from its number.
pub(super) struct Dataset {
    pub(super) counts: JobCounts,
    pub(super) now: i64,
}

impl Dataset {
    pub(super) fn new(counts: JobCounts) -> Self {
        Dataset { counts, now: Utc::now().timestamp_micros() }
    }

    /// The job with this number. Jobs are numbered from the oldest.
    pub(super) fn job(&self, n: u64) -> Job {
        let JobCounts { finished, waiting, .. } = self.counts;
        let created = if n < finished {
            self.now - 30 * DAY + (30 * DAY - HOUR) / finished.max(1) as i64 * n as i64
        } else {
            // Waiting jobs came in within the last hour, after all finished ones.
            self.now - HOUR + HOUR / self.counts.all() as i64 * (n - finished) as i64
        };
        let random = pseudo_random(n);
        let is_rare = n < finished * 9 / 10 && n % (finished / 50).max(1) == 7;
        let (kind, queue) = if is_rare { (RARE_KIND, "reports") } else { kind_of(random % 1000) };
        let random = pseudo_random(random);
        let options = random.is_multiple_of(10).then(|| {
            let customer = format!("customer:{}", random / 10 % 1000);
            json!({ "tags": [customer, if random.is_multiple_of(1000) { "vip" } else { "usual" }] })
                .to_string()
        });
        let random = pseudo_random(random);
        let (state, failures) = match n {
            n if n < finished => finished_state(created, random),
            n if n < finished + waiting => self.waiting(created, random),
            _ => (JobState::Running { claimed: self.now - (random % 60) as i64 * 1_000_000 }, 0),
        };
        Job {
            id: id_at(created, n),
            created,
            kind,
            queue,
            priority: if random.is_multiple_of(7) { 10 } else { 0 },
            payload: format!(r#"{{"to":"somebody@example.com","template":"welcome","n":{n}}}"#),
            options,
            state,
            failures,
        }
    }

    /// Most waiting jobs are due, some are due within a day, some wait for a retry, and a
    /// few were interrupted when their worker was lost.
    fn waiting(&self, created: i64, random: u64) -> (JobState, u16) {
        let later = self.now + (random / 100 % 86_400) as i64 * 1_000_000;
        match random % 100 {
            0..70 => (JobState::Waiting { run_at: created, interruptions: 0 }, 0),
            70..90 => (JobState::Waiting { run_at: later, interruptions: 0 }, 0),
            90..99 => (JobState::Waiting { run_at: later, interruptions: 0 }, 1),
            _ => (JobState::Waiting { run_at: created, interruptions: 1 }, 0),
        }
    }
}

fn finished_state(created: i64, random: u64) -> (JobState, u16) {
    // Run times from 5 to about 600 milliseconds.
    let run = 5_000 * 10_i64.pow((random % 3) as u32) + (random / 3 % 900_000) as i64 / 10;
    let started = created + 50_000;
    let (outcome, failures) = match random / 7 % 1000 {
        0 => ("failed_permanent", 3),
        1..4 => ("cancelled", 0),
        _ => ("succeeded", 0),
    };
    (JobState::Finished { outcome, started, finished: started + run }, failures)
}

fn kind_of(mut random: u64) -> (&'static str, &'static str) {
    for (kind, queue, share) in KINDS {
        if random < share {
            return (kind, queue);
        }
        random -= share;
    }
    (KINDS[0].0, KINDS[0].1)
}

/// A pseudo-random number that is the same in every run.
fn pseudo_random(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 20
}

/// An id like a UUIDv7 of that time, with `n` for its random part.
fn id_at(created: i64, n: u64) -> Uuid {
    Uuid::from_u128(((created / 1000) as u128) << 80 | 0x7000_8000_u128 << 48 | u128::from(n))
}

/// Writes jobs to the tables of an engine, from the oldest to the newest.
pub(super) trait TableWriter {
    async fn write(&mut self, job: &Job) -> Result<()>;
    /// Writes the tallies, the history and the groups of failures, after all jobs.
    async fn finish(self, tallies: &Tallies, now: i64) -> Result<()>;
}

/// Writes the whole dataset.
pub(super) async fn fill(dataset: &Dataset, mut writer: impl TableWriter) -> Result<()> {
    let mut tallies = Tallies::new(dataset.now);
    for n in 0..dataset.counts.all() {
        let job = dataset.job(n);
        tallies.count(&job);
        writer.write(&job).await?;
    }
    writer.finish(&tallies, dataset.now).await
}

/// Counts of finished jobs: per minute for two hours, per hour for a week, and one total
/// for everything before.
pub(super) struct Tallies {
    minutes_from: i64,
    hours_from: i64,
    sums: BTreeMap<TallyKey, i64>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TallyKey {
    pub(super) minute: i64,
    /// 1: a minute, 2: an hour, 3: everything before.
    pub(super) level: i16,
    pub(super) queue: &'static str,
    pub(super) kind: &'static str,
    pub(super) outcome: &'static str,
    pub(super) run_bucket: i32,
}

impl Tallies {
    fn new(now: i64) -> Self {
        let hour_of = |at: i64| at - at.rem_euclid(HOUR);
        Tallies {
            minutes_from: hour_of(now - 2 * HOUR),
            hours_from: hour_of(now - 7 * DAY),
            sums: BTreeMap::new(),
        }
    }

    fn count(&mut self, job: &Job) {
        let JobState::Finished { outcome, started, finished } = job.state else { return };
        let bucket = (4.0 * (1.0 + (finished - started) as f64 / 1000.0).log2()).floor() as i32;
        let (minute, level, run_bucket) = match finished {
            at if at >= self.minutes_from => (at - at.rem_euclid(MINUTE), 1, bucket),
            at if at >= self.hours_from => (at - at.rem_euclid(HOUR), 2, bucket),
            _ => (0, 3, 0),
        };
        let key = TallyKey { minute, level, queue: job.queue, kind: job.kind, outcome, run_bucket };
        *self.sums.entry(key).or_default() += 1;
    }

    /// Each tally with the number of jobs that ended then and the number that are kept.
    pub(super) fn rows(&self) -> impl Iterator<Item = (TallyKey, i64, i64)> {
        self.sums.iter().map(|(key, jobs)| (*key, if key.level == 3 { 0 } else { *jobs }, *jobs))
    }
}

/// The failed attempts of a job, as (lease number, started, ended, error).
pub(super) fn failed_attempts(job: &Job) -> impl Iterator<Item = (u16, i64, i64, &'static str)> {
    let created = job.created;
    (1..=job.failures).map(move |nth| (nth, created + i64::from(nth), created + 1000 * i64::from(nth), ERROR))
}

/// The fingerprint of a job that failed for good.
pub(super) fn failure(job: &Job) -> Option<i64> {
    matches!(job.state, JobState::Finished { outcome: "failed_permanent", .. })
        .then(|| fingerprint(job.kind, ERROR))
}

/// The error of the last failed attempt, if the job has failed.
pub(super) fn last_error(job: &Job) -> Option<&'static str> {
    (job.failures > 0).then_some(ERROR)
}
