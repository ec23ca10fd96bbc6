//! The log lines about jobs: one for each end of an attempt, after it is stored.
//!
//! The worker runtime, the API (for workers that call it) and recovery write their lines here.
//! All lines have the target `longshore::job`. Under load, each level has at most [`MAX_LINES`]
//! lines per second; the others are counted, and one line per second has their number. Other
//! modules log everything that is not the end of an attempt. Payloads and results are never
//! logged.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::Utc;
use tracing::Level;

use crate::client::Client;
use crate::client::settle::Kept;
use crate::job::{AttemptEnd, JobId, Outcome, WorkerId};
use crate::rules::lifecycle::{Ending, INTERRUPTED, Leave, When};
use crate::store::{Claimed, Interrupted};

const TARGET: &str = "longshore::job";
/// The maximum number of lines per level and [`INTERVAL`].
const MAX_LINES: u32 = 20;
const INTERVAL: Duration = Duration::from_secs(1);
/// Longer errors are cut in the log, in bytes. The job keeps all of its error.
const MAX_ERROR: usize = 1000;

impl Client {
    /// Sets the level of the log lines about attempts that ended without a failure; `debug` by
    /// default. Failed attempts that will be retried are logged as `warn`, jobs that failed
    /// permanently as `error`.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> longshore::Result<()> {
    /// # use longshore::Client;
    /// let client = Client::connect("sqlite::memory:").await?.log_successes_at(tracing::Level::INFO);
    /// # Ok(()) }
    /// # #[cfg(not(feature = "sqlite"))] fn main() {}
    /// ```
    pub fn log_successes_at(mut self, level: Level) -> Self {
        self.job_log = Arc::new(JobLog::new(level));
        self
    }
}

/// Writes the lines of a client and its clones.
#[derive(Debug)]
pub(crate) struct JobLog {
    success: Level,
    /// In the order of [`Class`].
    limits: [Arc<Limit>; 3],
}

impl Default for JobLog {
    fn default() -> Self {
        JobLog::new(Level::DEBUG)
    }
}

/// Lines with a level and a limit of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// The attempt ended without a failure.
    Success,
    /// The job will run again although nobody intended it, or its lease was lost.
    Warning,
    /// The job is a dead letter.
    Dead,
}

/// What a line says.
struct Line<'a> {
    message: &'static str,
    outcome: &'static str,
    id: JobId,
    kind: &'a str,
    queue: &'a str,
    attempt: u16,
    max_attempts: u16,
    worker: WorkerId,
    ran: Option<Duration>,
    error: Option<&'a str>,
    next_run: Option<When>,
    trace_id: Option<&'a str>,
}

impl JobLog {
    pub(crate) fn new(success: Level) -> Self {
        JobLog { success, limits: [success, Level::WARN, Level::ERROR].map(Limit::new) }
    }

    /// Logs the stored end of an attempt. `ran` is `None` if its handler was never called.
    pub(crate) fn settled(
        &self,
        claimed: &Claimed,
        ending: &Ending,
        kept: Kept,
        ran: Option<Duration>,
        trace_id: Option<&str>,
    ) {
        let (class, outcome, message) = match kept {
            Kept::Finished(outcome) => finished(outcome),
            Kept::Requeued { history: Some(end), .. } => requeued(end),
            // Nothing happened to the job, or it continues later.
            Kept::Requeued { history: None, .. } | Kept::Suspended => return,
            // Repeated: nothing is lost.
            Kept::LeaseLost if matches!(ending, Ending::NotStarted { .. } | Ending::Suspended { .. }) => {
                return;
            }
            Kept::LeaseLost => (Class::Warning, "lease_lost", "lost the lease; another worker owns the job"),
        };
        if !self.admits(class) {
            return;
        }
        let lease = claimed.lease();
        self.write(
            class,
            &Line {
                message,
                outcome,
                id: lease.id,
                kind: claimed.kind(),
                queue: claimed.queue(),
                attempt: claimed.attempt(),
                max_attempts: claimed.max_attempts(),
                worker: lease.worker,
                ran,
                error: match ending {
                    Ending::Failed { error, .. } => Some(error),
                    Ending::Cancelled { reason } => reason.as_deref(),
                    Ending::Interrupted(_) => Some(INTERRUPTED),
                    _ => None,
                },
                next_run: match kept {
                    Kept::Requeued { when, .. } => Some(when),
                    Kept::Finished(_) | Kept::Suspended | Kept::LeaseLost => None,
                },
                trace_id,
            },
        );
    }

    /// Logs a job that was recovered from a dead worker or a hung handler.
    pub(crate) fn recovered(&self, job: &Interrupted, leave: &Leave) {
        let (class, outcome, message) = match leave {
            Leave::Finish(finish) => finished(finish.outcome),
            Leave::Requeue(_) => requeued(AttemptEnd::Interrupted),
        };
        if !self.admits(class) {
            return;
        }
        let (error, next_run) = match leave {
            Leave::Finish(finish) => (finish.error.as_deref(), None),
            Leave::Requeue(requeue) => (requeue.error.as_deref(), Some(requeue.when)),
        };
        self.write(
            class,
            &Line {
                message,
                outcome,
                id: job.id,
                kind: &job.kind,
                queue: &job.queue,
                attempt: job.running.attempt,
                max_attempts: job.running.max_attempts,
                worker: job.running.worker,
                ran: None,
                error,
                next_run,
                trace_id: None,
            },
        );
    }

    /// Writes the numbers of lines that were left out. For the end of a worker: the process may
    /// exit before they are due.
    #[cfg(feature = "worker")]
    pub(crate) fn flush(&self) {
        self.limits.iter().for_each(|limit| limit.report());
    }

    /// Whether to write a line. If the level is off, this is all that a job costs.
    fn admits(&self, class: Class) -> bool {
        is_enabled(self.level(class)) && self.limits[class as usize].admit()
    }

    fn level(&self, class: Class) -> Level {
        match class {
            Class::Success => self.success,
            Class::Warning => Level::WARN,
            Class::Dead => Level::ERROR,
        }
    }

    fn write(&self, class: Class, line: &Line<'_>) {
        let Line { message, outcome, kind, queue, attempt, max_attempts, trace_id, .. } = *line;
        let (job_id, worker_id) = (line.id, line.worker);
        let error = line.error.map(|error| &error[..error.floor_char_boundary(MAX_ERROR)]);
        let run_seconds = line.ran.map(seconds);
        let next_run_in_seconds = line.next_run.map(|when| seconds(delay(when)));
        macro_rules! write_at {
            ($level:expr) => {
                tracing::event!(
                    target: TARGET, $level, outcome, kind, %job_id, queue, attempt, max_attempts, run_seconds,
                    error, next_run_in_seconds, %worker_id, trace_id, "{message}"
                )
            };
        }
        match self.level(class) {
            Level::ERROR => write_at!(Level::ERROR),
            Level::WARN => write_at!(Level::WARN),
            Level::INFO => write_at!(Level::INFO),
            Level::DEBUG => write_at!(Level::DEBUG),
            Level::TRACE => write_at!(Level::TRACE),
        }
    }
}

fn finished(outcome: Outcome) -> (Class, &'static str, &'static str) {
    let message = match outcome {
        Outcome::Succeeded => "job succeeded",
        Outcome::Cancelled => "job cancelled",
        Outcome::FailedPermanent => return (Class::Dead, outcome.as_str(), "job failed permanently"),
    };
    (Class::Success, outcome.as_str(), message)
}

fn requeued(end: AttemptEnd) -> (Class, &'static str, &'static str) {
    match end {
        AttemptEnd::Failed => (Class::Warning, "retrying", "attempt failed; the job will be retried"),
        AttemptEnd::Interrupted => {
            (Class::Warning, "recovered", "attempt interrupted; the job was recovered and will run again")
        }
        AttemptEnd::Snoozed => (Class::Success, "snoozed", "job snoozed"),
        AttemptEnd::Released => (Class::Success, "released", "job released; it will run again"),
    }
}

fn is_enabled(level: Level) -> bool {
    match level {
        Level::ERROR => tracing::enabled!(target: TARGET, Level::ERROR),
        Level::WARN => tracing::enabled!(target: TARGET, Level::WARN),
        Level::INFO => tracing::enabled!(target: TARGET, Level::INFO),
        Level::DEBUG => tracing::enabled!(target: TARGET, Level::DEBUG),
        Level::TRACE => tracing::enabled!(target: TARGET, Level::TRACE),
    }
}

/// To the millisecond.
fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1000.0).round() / 1000.0
}

fn delay(when: When) -> Duration {
    match when {
        When::After(delay) => delay,
        When::At(at) => (at - Utc::now()).to_std().unwrap_or_default(),
    }
}

/// The trace id in a W3C `traceparent`, if it is valid.
pub(crate) fn trace_id(traceparent: &str) -> Option<&str> {
    let id = traceparent.split('-').nth(1)?;
    let is_valid =
        id.len() == 32 && id.bytes().all(|c| c.is_ascii_hexdigit()) && id.bytes().any(|c| c != b'0');
    is_valid.then_some(id)
}

/// Ends the interval when it is dropped: after the interval, or because its runtime ends.
struct EndOfInterval(Arc<Limit>);

impl Drop for EndOfInterval {
    fn drop(&mut self) {
        self.0.report();
    }
}

/// Limits the lines of one class.
#[derive(Debug)]
struct Limit {
    level: Level,
    written: Mutex<Written>,
    /// Whether further lines are left out until the interval ends.
    is_full: AtomicBool,
    left_out: AtomicU64,
}

/// The lines of the current interval.
#[derive(Debug)]
struct Written {
    since: Instant,
    lines: u32,
}

impl Limit {
    fn new(level: Level) -> Arc<Self> {
        Arc::new(Limit {
            level,
            written: Mutex::new(Written { since: Instant::now(), lines: 0 }),
            is_full: AtomicBool::new(false),
            left_out: AtomicU64::new(0),
        })
    }

    /// Whether one more line may be written. Counts those that may not.
    fn admit(self: &Arc<Self>) -> bool {
        // Without a lock or a look at the clock: this is the usual case under load.
        if self.is_full.load(Ordering::Acquire) {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if written.since.elapsed() >= INTERVAL {
            *written = Written { since: Instant::now(), lines: 0 };
        }
        if written.lines < MAX_LINES {
            written.lines += 1;
            return true;
        }
        // Without a runtime nothing would end the interval.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return true };
        self.left_out.fetch_add(1, Ordering::Relaxed);
        if !self.is_full.swap(true, Ordering::AcqRel) {
            let rest = INTERVAL.saturating_sub(written.since.elapsed());
            // A runtime that is shutting down drops the task at once, which needs the lock.
            drop(written);
            let end = EndOfInterval(self.clone());
            runtime.spawn(async move {
                tokio::time::sleep(rest).await;
                drop(end);
            });
        }
        false
    }

    /// Ends the interval and writes how many lines were left out.
    fn report(&self) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        *written = Written { since: Instant::now(), lines: 0 };
        self.is_full.store(false, Ordering::Release);
        drop(written);
        let suppressed = self.left_out.swap(0, Ordering::Relaxed);
        if suppressed == 0 {
            return;
        }
        macro_rules! write_at {
            ($level:expr) => {
                tracing::event!(target: TARGET, $level, suppressed, "{suppressed} more lines about jobs suppressed")
            };
        }
        match self.level {
            Level::ERROR => write_at!(Level::ERROR),
            Level::WARN => write_at!(Level::WARN),
            Level::INFO => write_at!(Level::INFO),
            Level::DEBUG => write_at!(Level::DEBUG),
            Level::TRACE => write_at!(Level::TRACE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn further_lines_are_counted_until_the_interval_ends() {
        let limit = Limit::new(Level::INFO);
        // On a machine so slow that this takes longer than the interval, the test must not fail.
        limit.written.lock().unwrap().since = Instant::now() + 60 * INTERVAL;
        let admitted = (0..MAX_LINES + 7).filter(|_| limit.admit()).count();
        assert_eq!((admitted, limit.left_out.load(Ordering::Relaxed)), (MAX_LINES as usize, 7));
        limit.report();
        assert_eq!(limit.left_out.load(Ordering::Relaxed), 0, "the number was written");
        assert!(limit.admit());
    }

    #[test]
    fn without_a_runtime_no_line_is_left_out() {
        let limit = Limit::new(Level::INFO);
        assert!((0..MAX_LINES + 7).all(|_| limit.admit()));
    }

    #[test]
    fn the_end_of_a_runtime_ends_the_interval() {
        let limit = Limit::new(Level::INFO);
        limit.written.lock().unwrap().since = Instant::now() + 60 * INTERVAL;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { while limit.admit() {} });
        drop(runtime);
        assert!(limit.admit());
    }

    #[test]
    fn only_a_valid_trace_id_is_logged() {
        let id = "0af7651916cd43dd8448eb211c80319c";
        assert_eq!(trace_id(&format!("00-{id}-b7ad6b7169203331-01")), Some(id));
        for invalid in ["", "00", "00-1-2-3", "00-00000000000000000000000000000000-b7ad6b7169203331-01"] {
            assert_eq!(trace_id(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn a_time_is_logged_as_the_delay_until_then() {
        assert_eq!(seconds(delay(When::After(Duration::from_millis(12_345)))), 12.345);
        assert_eq!(delay(When::At(chrono::DateTime::UNIX_EPOCH)), Duration::ZERO);
    }
}
