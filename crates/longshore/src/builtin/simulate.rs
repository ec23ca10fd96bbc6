//! The simulator: built-in kinds whose handlers only pretend to work. Each attempt goes
//! through the steps of its kind, reports progress, and may fail at a step. Whether it
//! fails depends only on the job's id, the attempt and the step, so demos and tests are
//! reproducible. The third and later attempts never fail, so a job with the default
//! number of attempts can fail, is retried and succeeds.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Kind, ResizeImage, SendEmail, SummarizeText, WebhookDelivery, describe_kinds};
use crate::job::JobId;
use crate::worker::{Builder, Context, Failure, StopReason};

const STEP_DURATION: Duration = Duration::from_millis(60);
/// The percentage of steps that fail in the first attempt and in the second.
const FAILURE_PERCENT: [u64; 2] = [25, 10];

/// Registers the built-in kinds as simulations: they do short steps and nothing else, and some
/// first attempts fail. The job's id determines which, so a run can be repeated exactly.
pub fn simulate(builder: Builder) -> Builder {
    describe_kinds(builder)
        .function(SendEmail::NAME, run_simulation::<SendEmail>)
        .function(ResizeImage::NAME, run_simulation::<ResizeImage>)
        .function(SummarizeText::NAME, run_simulation::<SummarizeText>)
        .function(WebhookDelivery::NAME, run_simulation::<WebhookDelivery>)
}

/// A kind that can be simulated.
trait Simulation: Kind {
    /// Each step with its error message.
    const STEPS: &'static [(&'static str, &'static str)];

    /// The result of a success, without the field `simulated`.
    fn result(&self) -> Value;
}

async fn run_simulation<K: Simulation>(payload: K, ctx: Context) -> Result<(), Failure> {
    // An invalid payload stays invalid, so a retry would be useless.
    payload.check().map_err(Failure::permanent)?;
    for (index, (step, error)) in K::STEPS.iter().enumerate() {
        ctx.progress(&json!({ "step": index + 1, "of": K::STEPS.len(), "doing": step }))?;
        let step_done = ctx.until_stopped(tokio::time::sleep(STEP_DURATION)).await;
        // The steps are short. Asking the database makes the simulation see every cancel
        // that was accepted before the end of its last step.
        let step_done = if ctx.is_cancelled().await { Err(StopReason::Cancelled) } else { step_done };
        if let Err(reason) = step_done {
            tracing::info!(step, ?reason, "simulation stopped");
            return Err(match reason {
                StopReason::Cancelled => Failure::cancelled(format!("cancelled at step `{step}`")),
                _ => Failure::retry(format!("stopped at step `{step}`: {reason:?}")),
            });
        }
        if fails(ctx.id(), ctx.attempt(), index) {
            return Err(Failure::retry(format!("simulated failure at step `{step}`: {error}")));
        }
    }
    let mut result = payload.result();
    result["simulated"] = true.into();
    ctx.set_result(&result)?;
    Ok(())
}

/// Whether this attempt of this job fails at this step.
fn fails(id: JobId, attempt: u16, step: usize) -> bool {
    let Some(percent) = FAILURE_PERCENT.get(usize::from(attempt).saturating_sub(1)) else { return false };
    let numbers = [u64::from(attempt), step as u64].map(u64::to_le_bytes);
    hash(id.0.as_bytes().iter().chain(numbers.as_flattened())) % 100 < *percent
}

/// FNV-1a with a final mixing step, because its low bits depend too much on the last
/// byte. Implemented here, so that no update of a dependency can change the results.
fn hash<'a>(bytes: impl Iterator<Item = &'a u8>) -> u64 {
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

impl Simulation for SendEmail {
    const STEPS: &'static [(&'static str, &'static str)] = &[
        ("connect", "the mail server does not respond"),
        ("send", "the mail server replied 451, try later"),
    ];

    fn result(&self) -> Value {
        json!({ "to": self.to, "bytes": self.subject.len() + self.body.len() })
    }
}

impl Simulation for ResizeImage {
    const STEPS: &'static [(&'static str, &'static str)] = &[
        ("fetch", "the source responded 503"),
        ("resize", "temporarily out of memory"),
        ("write", "the disk is busy"),
    ];

    fn result(&self) -> Value {
        json!({ "source_url": self.source_url, "width": self.width, "height": self.height })
    }
}

impl Simulation for SummarizeText {
    const STEPS: &'static [(&'static str, &'static str)] =
        &[("read", "the text is locked"), ("summarize", "the model is busy")];

    fn result(&self) -> Value {
        let words: Vec<&str> = self.text.split_whitespace().take(self.max_words()).collect();
        json!({ "summary": words.join(" "), "words": words.len() })
    }
}

impl Simulation for WebhookDelivery {
    const STEPS: &'static [(&'static str, &'static str)] =
        &[("sign", "the signing key is being rotated"), ("deliver", "the receiver responded 502")];

    fn result(&self) -> Value {
        json!({ "url": self.url, "status": 200, "bytes": self.body.get().len() })
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;
    use crate::worker::{Settings, Worker};
    use crate::{Cancelled, Client, NewJob, RetryPolicy, Status};

    /// The first attempt of this job fails and the second does not.
    const FAILS_ONCE: &str = "01990000-0000-7000-8000-000000000001";

    fn first_failed_step(id: JobId, attempt: u16) -> Option<usize> {
        (0..2).find(|step| fails(id, attempt, *step))
    }

    #[test]
    fn the_same_job_always_fails_at_the_same_step() {
        let failed_steps: Vec<Option<usize>> = (0..12)
            .map(|n| format!("01990000-0000-7000-8000-{n:012x}").parse().unwrap())
            .map(|id| first_failed_step(id, 1))
            .collect();
        assert_eq!(
            failed_steps,
            [None, Some(1), None, Some(0), None, None, Some(1), Some(1), None, None, None, None]
        );
    }

    #[test]
    fn the_expected_share_of_attempts_fails_and_third_attempts_never_fail() {
        let ids: Vec<JobId> = (0..4000).map(|_| JobId::new()).collect();
        for (attempt, min, max) in [(1, 0.40, 0.48), (2, 0.15, 0.23), (3, 0.0, 0.0), (9, 0.0, 0.0)] {
            let failed = ids.iter().filter(|id| first_failed_step(**id, attempt).is_some()).count();
            let share = failed as f64 / ids.len() as f64;
            assert!((min..=max).contains(&share), "attempt {attempt}: {share}");
        }
    }

    #[tokio::test]
    async fn a_simulated_job_fails_is_retried_and_has_a_result() {
        let client = Client::connect("sqlite::memory:").await.unwrap();
        client.migrate().await.unwrap();
        let payload = json!({ "text": "one two three four", "max_words": 3 });
        let job = NewJob::new(SummarizeText::NAME, &payload)
            .id(FAILS_ONCE.parse().unwrap())
            .retry(RetryPolicy::fixed(Duration::ZERO));
        let id = client.enqueue(job).await.unwrap().id;
        let invalid =
            client.enqueue(NewJob::new(SendEmail::NAME, &json!({ "to": "nobody" }))).await.unwrap().id;

        let drained = simulate(Worker::builder(client.clone())).build().unwrap().drain().await.unwrap();
        assert_eq!((drained.succeeded, drained.retrying, drained.failed_permanent), (1, 1, 1));
        let job = client.get(id).await.unwrap();
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 2));
        assert!(job.last_error.unwrap().starts_with("simulated failure at step `"));
        let result: Value = serde_json::from_str(job.result.unwrap().get()).unwrap();
        assert_eq!(result, json!({ "summary": "one two three", "words": 3, "simulated": true }));
        let invalid = client.get(invalid).await.unwrap();
        assert_eq!((invalid.status, invalid.attempts), (Status::FailedPermanent, 1));
        assert!(invalid.last_error.unwrap().contains("missing field `subject`"));
    }
    #[tokio::test]
    async fn a_cancelled_simulation_stops_before_its_next_step() {
        let client = Client::connect("sqlite::memory:").await.unwrap();
        client.migrate().await.unwrap();
        // Only a heartbeat after an hour could deliver the cancel otherwise.
        let hour = Duration::from_secs(3600);
        let settings = Settings { heartbeat_interval: hour, stale_after: 24 * hour, ..Settings::default() };
        let worker = simulate(Worker::builder(client.clone()).settings(settings));
        let running = worker.build().unwrap().start().await.unwrap();
        let payload = json!({ "source_url": "https://example.com/a.png", "width": 8, "height": 8 });
        // A busy machine may cancel some of them too late.
        for _ in 0..20 {
            let id = client.enqueue(NewJob::new(ResizeImage::NAME, &payload)).await.unwrap().id;
            let status = async |id| client.get(id).await.unwrap().status;
            while status(id).await == Status::Queued {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if !matches!(client.cancel(id).await, Ok(Cancelled::Pending)) {
                continue;
            }
            while status(id).await == Status::Running {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if status(id).await == Status::Cancelled {
                let error = client.get(id).await.unwrap().last_error.unwrap();
                assert!(error.starts_with("cancelled at step `"), "{error}");
                running.stop().await;
                return;
            }
        }
        panic!("no cancel was seen");
    }
}
