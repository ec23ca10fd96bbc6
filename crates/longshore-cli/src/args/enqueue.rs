//! The arguments of `longshore enqueue` and `longshore enqueue-many`, and the parsers of
//! times and retry policies.

use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::Args;
use longshore::{RetryPolicy, UniqueMode, When};

use super::values;
use crate::duration;

#[derive(Debug, Args)]
pub(crate) struct Enqueue {
    /// The kind of job, which selects the handler that runs it
    pub(crate) kind: String,

    /// The payload: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", default_value = "{}", allow_hyphen_values = true)]
    pub(crate) payload: String,

    /// The queue to wait in [default: the kind's default, else `default`]
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// The priority; higher runs first; -32768 to 32767 [default: the kind's default, else 0]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) priority: Option<i64>,

    /// How many attempts the job has [default: the kind's default, else 3]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) max_attempts: Option<i64>,

    #[command(flatten)]
    pub(crate) when: WhenArgs,

    /// A key that makes it safe to repeat the command: a second enqueue with the same key returns the
    /// first job, as long as that job is kept
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,

    /// A key that at most one unfinished job can have
    #[arg(long, value_name = "KEY")]
    pub(crate) unique_key: Option<String>,

    /// What to do if a job has the unique key already [default: dedupe]
    #[arg(long, value_name = "MODE", requires = "unique_key", value_parser = values::unique_mode())]
    pub(crate) unique_mode: Option<UniqueMode>,

    /// How long one attempt may take, like 90s, or none for no limit [default: the kind's default,
    /// else 2h]
    #[arg(long, value_name = "DURATION|none", value_parser = timeout)]
    pub(crate) timeout: Option<Timeout>,

    /// The delay before a failed attempt is retried: jitter (the default), exponential, fixed:10s,
    /// list:1s,5s or none
    #[arg(long, value_name = "POLICY", value_parser = retry_policy)]
    pub(crate) retry: Option<RetryPolicy>,

    /// A group of the queue, for example a customer; see `longshore groups --help`
    #[arg(long, value_name = "NAME")]
    pub(crate) group: Option<String>,

    /// A label to find jobs by; may be repeated
    #[arg(long = "tag", value_name = "TAG")]
    pub(crate) tags: Vec<String>,

    /// A label that changes how workers and recovery treat the job; may be repeated
    #[arg(long = "flag", value_name = "FLAG")]
    pub(crate) flags: Vec<String>,

    /// A note on why the job is enqueued
    #[arg(long, value_name = "TEXT")]
    pub(crate) context: Option<String>,

    /// Wait until the job has ended and print the result; --wait=5m stops waiting after five minutes.
    /// Exits 8 if the job did not succeed, 9 after a timeout
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true, default_missing_value = "none",
          value_parser = timeout)]
    pub(crate) wait: Option<Timeout>,

    /// Your own JSON data, stored with the job in addition to its payload
    #[arg(long, value_name = "JSON")]
    pub(crate) metadata: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct EnqueueMany {
    /// A file with one JSON object per line, or - for standard input
    #[arg(value_name = "FILE|-")]
    pub(crate) file: String,
}

/// When a job may start.
#[derive(Debug, Args)]
pub(crate) struct WhenArgs {
    /// Start the job no sooner than this long from now, like 500ms, 10s or 5m
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, conflicts_with = "run_at")]
    delay: Option<Duration>,

    /// Start the job no sooner than this time, like 2030-01-31T09:00:00Z
    #[arg(long, value_name = "RFC3339", value_parser = rfc3339)]
    run_at: Option<DateTime<Utc>>,
}

impl WhenArgs {
    /// The requested start, if any.
    pub(crate) fn when(&self) -> Option<When> {
        self.delay.map(When::After).or(self.run_at.map(When::At))
    }
}

/// A time limit; `None` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timeout(pub(crate) Option<Duration>);

fn timeout(text: &str) -> Result<Timeout, String> {
    duration::parse_or_none(text).map(Timeout)
}

pub(super) fn rfc3339(text: &str) -> Result<DateTime<Utc>, String> {
    DateTime::parse_from_rfc3339(text).map(|at| at.to_utc()).map_err(|_| {
        format!("`{text}` is not a time; write it as RFC 3339 with its zone, like 2030-01-31T09:00:00Z")
    })
}

fn retry_policy(text: &str) -> Result<RetryPolicy, String> {
    let policy = match text.split_once(':') {
        None if text == "jitter" => RetryPolicy::default(),
        None if text == "exponential" => RetryPolicy::exponential(),
        None if text == "none" => RetryPolicy::None,
        Some(("fixed", delay)) => RetryPolicy::fixed(duration::parse(delay)?),
        Some(("list", delays)) => {
            let delays: Result<Vec<_>, _> = delays.split(',').map(duration::parse).collect();
            RetryPolicy::list(delays?)
        }
        _ => {
            return Err(format!(
                "`{text}` is not a retry policy; use jitter, exponential, fixed:10s, list:1s,5s or none"
            ));
        }
    };
    Ok(policy)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn retry_policies_are_parsed() {
        let second = Duration::from_secs(1);
        assert_eq!(retry_policy("jitter").unwrap(), RetryPolicy::default());
        assert_eq!(retry_policy("exponential").unwrap(), RetryPolicy::exponential());
        assert_eq!(retry_policy("fixed:10s").unwrap(), RetryPolicy::fixed(10 * second));
        assert_eq!(retry_policy("list:1s,5s").unwrap(), RetryPolicy::list([second, 5 * second]));
        assert_eq!(retry_policy("none").unwrap(), RetryPolicy::None);
        for text in ["", "fixed", "linear", "jitter:1s", "none:"] {
            assert!(retry_policy(text).unwrap_err().contains("is not a retry policy; use jitter"), "{text}");
        }
        for text in ["fixed:", "fixed:10", "list:", "list:1s,,5s"] {
            assert!(retry_policy(text).unwrap_err().contains("is not a duration"), "{text}");
        }
    }
}
