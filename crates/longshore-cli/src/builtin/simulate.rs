//! The simulator: built-in kinds that pretend. Each attempt takes its kind's
//! steps, reports progress, and may fail at a step; whether it does follows from
//! the job's id, the attempt and the step alone, so that a demonstration or a
//! test can be repeated. From the third attempt on nothing fails: a job with the
//! usual budget shows fail, retry, succeed.

use std::time::Duration;

use longshore::JobId;
use longshore::worker::{Builder, Context, Failure, StopReason};
use serde_json::{Value, json};

use super::{Kind, ResizeImage, SendEmail, SummarizeText, WebhookDelivery, described};

/// How long a step takes.
const STEP: Duration = Duration::from_millis(60);
/// Of a hundred steps of the first attempt, and of the second, so many fail.
const FAILING: [u64; 2] = [25, 10];

/// Registers the built-in kinds as simulations.
pub(crate) fn simulate(builder: Builder) -> Builder {
    described(builder)
        .function(SendEmail::NAME, rehearse::<SendEmail>)
        .function(ResizeImage::NAME, rehearse::<ResizeImage>)
        .function(SummarizeText::NAME, rehearse::<SummarizeText>)
        .function(WebhookDelivery::NAME, rehearse::<WebhookDelivery>)
}

/// A kind that can be rehearsed.
trait Rehearsal: Kind {
    /// Each with what may go wrong there.
    const STEPS: &'static [(&'static str, &'static str)];

    /// What is kept of a success, beside that it was simulated.
    fn result(&self) -> Value;
}

async fn rehearse<K: Rehearsal>(payload: K, ctx: Context) -> Result<(), Failure> {
    // It will be as wrong the next time.
    payload.check().map_err(Failure::permanent)?;
    for (nth, (step, trouble)) in K::STEPS.iter().enumerate() {
        ctx.progress(&json!({ "step": nth + 1, "of": K::STEPS.len(), "doing": step }))?;
        if let Err(reason) = ctx.until_stopped(tokio::time::sleep(STEP)).await {
            tracing::info!(step, ?reason, "stopped");
            return Err(match reason {
                StopReason::Cancelled => Failure::cancelled(format!("cancelled at step `{step}`")),
                _ => Failure::retry(format!("stopped at step `{step}`: {reason:?}")),
            });
        }
        if fails(ctx.id(), ctx.attempt(), nth) {
            return Err(Failure::retry(format!("simulated failure at step `{step}`: {trouble}")));
        }
    }
    let mut result = payload.result();
    result["simulated"] = true.into();
    ctx.set_result(&result)?;
    Ok(())
}

/// Whether this attempt of this job fails at this step.
fn fails(id: JobId, attempt: u16, step: usize) -> bool {
    let Some(percent) = FAILING.get(usize::from(attempt).saturating_sub(1)) else { return false };
    let words = [u64::from(attempt), step as u64].map(u64::to_le_bytes);
    hash(id.0.as_bytes().iter().chain(words.as_flattened())) % 100 < *percent
}

/// FNV-1a with a last stir, because its low bits follow the last byte too
/// closely. Written out, so that no release of anything changes it.
fn hash<'a>(bytes: impl Iterator<Item = &'a u8>) -> u64 {
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 33)
}

impl Rehearsal for SendEmail {
    const STEPS: &'static [(&'static str, &'static str)] =
        &[("connect", "the mail server does not answer"), ("send", "the mail server says 451, try later")];

    fn result(&self) -> Value {
        json!({ "to": self.to, "bytes": self.subject.len() + self.body.len() })
    }
}

impl Rehearsal for ResizeImage {
    const STEPS: &'static [(&'static str, &'static str)] = &[
        ("fetch", "the source answers 503"),
        ("resize", "out of memory for a moment"),
        ("write", "the disk is busy"),
    ];

    fn result(&self) -> Value {
        json!({ "source_url": self.source_url, "width": self.width, "height": self.height })
    }
}

impl Rehearsal for SummarizeText {
    const STEPS: &'static [(&'static str, &'static str)] =
        &[("read", "the text is locked"), ("summarize", "the model is busy")];

    fn result(&self) -> Value {
        let words: Vec<&str> = self.text.split_whitespace().take(self.most_words()).collect();
        json!({ "summary": words.join(" "), "words": words.len() })
    }
}

impl Rehearsal for WebhookDelivery {
    const STEPS: &'static [(&'static str, &'static str)] =
        &[("sign", "the signing key is being rotated"), ("deliver", "the receiver answers 502")];

    fn result(&self) -> Value {
        json!({ "url": self.url, "status": 200, "bytes": self.body.get().len() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use longshore::worker::Worker;
    use longshore::{Client, NewJob, RetryPolicy, Status};

    use super::*;

    /// The first attempt of this job fails and the second does not.
    const FAILS_ONCE: &str = "01990000-0000-7000-8000-000000000001";

    fn first_failure(id: JobId, attempt: u16) -> Option<usize> {
        (0..2).find(|step| fails(id, attempt, *step))
    }

    #[test]
    fn the_same_job_fails_at_the_same_place_for_ever() {
        let failed: Vec<Option<usize>> = (0..12)
            .map(|n| format!("01990000-0000-7000-8000-{n:012x}").parse().unwrap())
            .map(|id| first_failure(id, 1))
            .collect();
        assert_eq!(
            failed,
            [None, Some(1), None, Some(0), None, None, Some(1), Some(1), None, None, None, None]
        );
    }

    #[test]
    fn about_the_stated_share_of_first_attempts_fails_and_no_third() {
        let ids: Vec<JobId> = (0..4000).map(|_| JobId::new()).collect();
        for (attempt, least, most) in [(1, 0.40, 0.48), (2, 0.15, 0.23), (3, 0.0, 0.0), (9, 0.0, 0.0)] {
            let failed = ids.iter().filter(|id| first_failure(**id, attempt).is_some()).count();
            let share = failed as f64 / ids.len() as f64;
            assert!((least..=most).contains(&share), "attempt {attempt}: {share}");
        }
    }

    #[tokio::test]
    async fn a_job_fails_is_retried_and_leaves_a_result() {
        let client = Client::connect("sqlite::memory:").await.unwrap();
        client.migrate().await.unwrap();
        let payload = json!({ "text": "one two three four", "max_words": 3 });
        let job = NewJob::new(SummarizeText::NAME, &payload)
            .id(FAILS_ONCE.parse().unwrap())
            .retry(RetryPolicy::fixed(Duration::ZERO));
        let id = client.enqueue(job).await.unwrap().id;
        let wrong =
            client.enqueue(NewJob::new(SendEmail::NAME, &json!({ "to": "nobody" }))).await.unwrap().id;

        let done = simulate(Worker::builder(client.clone())).build().unwrap().drain().await.unwrap();
        assert_eq!((done.succeeded, done.retrying, done.failed_permanent), (1, 1, 1));
        let job = client.get(id).await.unwrap();
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 2));
        assert!(job.last_error.unwrap().starts_with("simulated failure at step `"));
        let result: Value = serde_json::from_str(job.result.unwrap().get()).unwrap();
        assert_eq!(result, json!({ "summary": "one two three", "words": 3, "simulated": true }));
        let wrong = client.get(wrong).await.unwrap();
        assert_eq!((wrong.status, wrong.attempts), (Status::FailedPermanent, 1));
        assert!(wrong.last_error.unwrap().contains("missing field `subject`"));
    }
}
