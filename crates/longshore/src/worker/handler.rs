//! What users write: a typed [`Job`], a plain async function, a batch function, or an
//! [`Executor`] for kinds known only at run time; and [`Failure`], which says why an attempt
//! did not succeed.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::context::{Attempt, Context};
use crate::rules::enqueue::{DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, DEFAULT_TIMEOUT, NewJob, UniqueMode};
use crate::rules::lifecycle::PendingWait;
use crate::rules::retry::RetryPolicy;

/// A typed job: its payload, its defaults, and the work itself.
///
/// ```
/// use longshore::worker::{Context, Failure, Job};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct SendEmail { to: String }
///
/// struct App { sender: String }
///
/// impl Job for SendEmail {
///     const KIND: &'static str = "send_email";
///     const MAX_ATTEMPTS: u16 = 5;
///     type State = App;
///
///     async fn run(self, ctx: Context<App>) -> Result<(), Failure> {
///         if !self.to.contains('@') {
///             return Err(Failure::permanent(format!("`{}` is not an address", self.to)));
///         }
///         println!("{} writes to {}", ctx.state().sender, self.to);
///         Ok(())
///     }
/// }
/// ```
pub trait Job: Serialize + DeserializeOwned + Send + 'static {
    /// The kind under which the job is stored. Changing it orphans waiting jobs.
    const KIND: &'static str;
    /// The application state the handler needs; `()` for none.
    type State: Send + Sync + 'static;

    /// The default queue. Each enqueue can override it.
    const QUEUE: &'static str = DEFAULT_QUEUE;
    /// The default priority; higher runs first. Each enqueue can override it.
    const PRIORITY: i16 = 0;
    /// The default maximum number of attempts. Each enqueue can override it.
    const MAX_ATTEMPTS: u16 = DEFAULT_MAX_ATTEMPTS;
    /// The default timeout of one attempt; `None` for no limit. Each enqueue can override it.
    const TIMEOUT: Option<Duration> = Some(DEFAULT_TIMEOUT);

    /// The retry policy; `None` for the default policy.
    fn retry() -> Option<RetryPolicy> {
        None
    }

    /// Computes the delay after failed attempt number `attempt`. It takes precedence over the
    /// stored policy; `None` uses the policy.
    fn backoff(attempt: u16) -> Option<Duration> {
        let _ = attempt;
        None
    }

    /// A JSON schema of the payload. It is published when a worker starts, for people and
    /// programs that enqueue the job without this crate.
    ///
    /// ```
    /// # use longshore::{Context, Failure, Job};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct SendEmail { to: String }
    /// # impl Job for SendEmail {
    /// #     const KIND: &'static str = "send_email";
    /// #     type State = ();
    /// fn schema() -> Option<serde_json::Value> {
    ///     Some(serde_json::json!({
    ///         "type": "object",
    ///         "properties": { "to": { "type": "string" } },
    ///         "required": ["to"]
    ///     }))
    /// }
    /// #     async fn run(self, _: Context) -> Result<(), Failure> { Ok(()) }
    /// # }
    /// ```
    fn schema() -> Option<serde_json::Value> {
        None
    }

    /// The unique key and its mode; at most one live job may have the key.
    fn unique_key(&self) -> Option<(String, UniqueMode)> {
        None
    }

    /// Does the work. Any error fails the attempt, which is retried according to the policy; a
    /// [`Failure`] can request something else.
    fn run(self, ctx: Context<Self::State>) -> impl Future<Output = Result<(), Failure>> + Send;
}

impl<J: Job> From<J> for NewJob {
    fn from(job: J) -> NewJob {
        let mut new = NewJob::new(J::KIND, &job)
            .queue(J::QUEUE)
            .priority(J::PRIORITY.into())
            .max_attempts(J::MAX_ATTEMPTS.into())
            .timeout(J::TIMEOUT);
        if let Some(policy) = J::retry() {
            new = new.retry(policy);
        }
        match job.unique_key() {
            Some((key, mode)) => new.unique_key(key, mode),
            None => new,
        }
    }
}

/// Runs jobs of kinds that are known only at run time.
///
/// ```
/// use longshore::worker::{Context, Executor, Failure};
///
/// struct Echo;
///
/// #[async_trait::async_trait]
/// impl Executor for Echo {
///     async fn execute(&self, ctx: Context) -> Result<(), Failure> {
///         println!("{}: {}", ctx.job().kind(), ctx.job().payload());
///         Ok(())
///     }
/// }
/// ```
#[async_trait]
pub trait Executor: Send + Sync + 'static {
    /// Executes one attempt. The payload is in `ctx.job().payload()`.
    async fn execute(&self, ctx: Context) -> Result<(), Failure>;
}

// ---- failures ---------------------------------------------------------------

/// Why an attempt did not succeed, and what happens to the job next. `?` converts any error
/// into a failed attempt that is retried according to the job's policy.
pub struct Failure(pub(super) Verdict);

pub(super) enum Verdict {
    Retry {
        error: String,
        after: Option<Duration>,
    },
    Permanent {
        error: String,
    },
    Snooze {
        delay: Duration,
    },
    Cancelled {
        reason: Option<String>,
    },
    /// The handler was dropped, because it waits for these. Only the runner returns it.
    Suspended {
        waits: Vec<PendingWait>,
    },
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

impl Failure {
    /// A failed attempt, retried according to the job's policy.
    pub fn retry(error: impl Into<AnyError>) -> Self {
        Failure(Verdict::Retry { error: with_causes(&*error.into()), after: None })
    }

    /// A failed attempt, retried after exactly this delay; for example from `Retry-After`.
    pub fn retry_after(delay: Duration, error: impl Into<AnyError>) -> Self {
        Failure(Verdict::Retry { error: with_causes(&*error.into()), after: Some(delay) })
    }

    /// A permanent failure, regardless of the attempts left.
    pub fn permanent(error: impl Into<AnyError>) -> Self {
        Failure(Verdict::Permanent { error: with_causes(&*error.into()) })
    }

    /// A snooze: the job runs again after this delay, and no attempt is charged.
    pub fn snooze(delay: Duration) -> Self {
        Failure(Verdict::Snooze { delay })
    }

    /// The job is no longer needed and ends as cancelled.
    pub fn cancelled(reason: impl Into<String>) -> Self {
        Failure(Verdict::Cancelled { reason: Some(reason.into()) })
    }
}

impl<E: Into<AnyError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Failure::retry(error)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Verdict::Retry { error, after: None } => write!(f, "retry: {error}"),
            Verdict::Retry { error, after: Some(delay) } => write!(f, "retry after {delay:?}: {error}"),
            Verdict::Permanent { error } => write!(f, "permanent: {error}"),
            Verdict::Snooze { delay } => write!(f, "snooze for {delay:?}"),
            Verdict::Cancelled { reason } => {
                write!(f, "cancelled: {}", reason.as_deref().unwrap_or("no reason given"))
            }
            Verdict::Suspended { waits } => write!(f, "suspended until {waits:?}"),
        }
    }
}

/// The error and its causes, in one line.
fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        let more = source.to_string();
        // Many errors already contain their cause's message.
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = source.source();
    }
    text
}

// ---- type erasure -----------------------------------------------------------

pub(super) type HandlerFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A handler with its types erased.
pub(super) trait Handler: Send + Sync {
    fn run(&self, attempt: Arc<Attempt>) -> HandlerFuture<Result<(), Failure>>;

    fn backoff(&self, _attempt: u16) -> Option<Duration> {
        None
    }
}

pub(super) struct Typed<J: Job> {
    state: Arc<J::State>,
    job: PhantomData<fn() -> J>,
}

impl<J: Job> Typed<J> {
    pub(super) fn new(state: Arc<J::State>) -> Self {
        Typed { state, job: PhantomData }
    }
}

impl<J: Job> Handler for Typed<J> {
    fn run(&self, attempt: Arc<Attempt>) -> HandlerFuture<Result<(), Failure>> {
        let ctx = Context::new(attempt, self.state.clone());
        Box::pin(async move { decode::<J>(&ctx)?.run(ctx).await })
    }

    fn backoff(&self, attempt: u16) -> Option<Duration> {
        J::backoff(attempt)
    }
}

pub(super) struct Function<P, S, F> {
    state: Arc<S>,
    function: Arc<F>,
    payload: PhantomData<fn() -> P>,
}

impl<P, S, F> Function<P, S, F> {
    pub(super) fn new(state: Arc<S>, function: F) -> Self {
        Function { state, function: Arc::new(function), payload: PhantomData }
    }
}

impl<P, S, F, Fut> Handler for Function<P, S, F>
where
    P: DeserializeOwned + Send + 'static,
    S: Send + Sync + 'static,
    F: Fn(P, Context<S>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), Failure>> + Send + 'static,
{
    fn run(&self, attempt: Arc<Attempt>) -> HandlerFuture<Result<(), Failure>> {
        let (ctx, function) = (Context::new(attempt, self.state.clone()), self.function.clone());
        Box::pin(async move { function(decode::<P>(&ctx)?, ctx).await })
    }
}

pub(super) struct Dynamic(pub(super) Arc<dyn Executor>);

impl Handler for Dynamic {
    fn run(&self, attempt: Arc<Attempt>) -> HandlerFuture<Result<(), Failure>> {
        let executor = self.0.clone();
        Box::pin(async move { executor.execute(Context::new(attempt, Arc::new(()))).await })
    }
}

/// One job of a batch: its payload and its own context.
pub struct Batched<P, S = ()> {
    /// The decoded payload.
    pub payload: P,
    /// This job's context.
    pub ctx: Context<S>,
}

/// A batch handler with its types erased: one call, one result per job.
pub(super) trait BatchHandler: Send + Sync {
    fn run(&self, attempts: Vec<Arc<Attempt>>) -> HandlerFuture<Vec<Result<(), Failure>>>;
}

pub(super) struct BatchFunction<P, S, F> {
    state: Arc<S>,
    function: Arc<F>,
    payload: PhantomData<fn() -> P>,
}

impl<P, S, F> BatchFunction<P, S, F> {
    pub(super) fn new(state: Arc<S>, function: F) -> Self {
        BatchFunction { state, function: Arc::new(function), payload: PhantomData }
    }
}

impl<P, S, F, Fut> BatchHandler for BatchFunction<P, S, F>
where
    P: DeserializeOwned + Send + 'static,
    S: Send + Sync + 'static,
    F: Fn(Vec<Batched<P, S>>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Vec<Result<(), Failure>>> + Send + 'static,
{
    fn run(&self, attempts: Vec<Arc<Attempt>>) -> HandlerFuture<Vec<Result<(), Failure>>> {
        let (state, function) = (self.state.clone(), self.function.clone());
        Box::pin(async move {
            let mut results: Vec<Option<Result<(), Failure>>> = Vec::with_capacity(attempts.len());
            let mut jobs = Vec::with_capacity(attempts.len());
            for attempt in attempts {
                let ctx = Context::new(attempt, state.clone());
                match decode::<P>(&ctx) {
                    Ok(payload) => {
                        jobs.push(Batched { payload, ctx });
                        results.push(None);
                    }
                    Err(failure) => results.push(Some(Err(failure))),
                }
            }
            let (passed, mut returned) = (jobs.len(), Vec::new());
            if passed > 0 {
                returned = function(jobs).await;
            }
            if returned.len() != passed {
                let found = returned.len();
                let mismatch = move || {
                    Failure::retry(format!(
                        "the batch handler returned {found} results for {passed} jobs; it must return one per job"
                    ))
                };
                return results.into_iter().map(|own| own.unwrap_or_else(|| Err(mismatch()))).collect();
            }
            let mut returned = returned.into_iter();
            results.into_iter().map(|own| own.or_else(|| returned.next()).unwrap_or(Ok(()))).collect()
        })
    }
}

/// Decodes the payload. A mismatch is permanent: another attempt would fail the same way.
fn decode<P: DeserializeOwned>(ctx: &Context<impl Send + Sync>) -> Result<P, Failure> {
    serde_json::from_str(ctx.job().payload()).map_err(|error| {
        let kind = ctx.job().kind();
        let why = without_values(&error.to_string());
        Failure::permanent(format!(
            "the payload does not fit the handler of `{kind}`: {why}; deploy a handler that accepts it, then retry the job"
        ))
    })
}

/// Removes quoted values from a parser's error. The message goes to the job's errors and to
/// logs, where no payload may appear.
pub(super) fn without_values(error: &str) -> String {
    const NAMES_ONLY: [&str; 3] = ["missing field", "duplicate field", "unknown field"];
    const NAMES_EXPECTED: [&str; 4] = ["invalid type", "invalid value", "invalid length", "unknown variant"];
    let starts_with_any = |prefixes: &[&str]| prefixes.iter().any(|prefix| error.starts_with(prefix));
    if starts_with_any(&NAMES_ONLY) {
        return error.into();
    }
    // The expected part comes last and names only the handler's own types. Other
    // messages may come from a library and may quote values anywhere.
    let expected = error.rfind(", expected").filter(|_| starts_with_any(&NAMES_EXPECTED));
    let (found, expected) = error.split_at(expected.unwrap_or(error.len()));
    let Some(start) = found.find(['"', '`']) else { return error.into() };
    let end =
        found.rfind(&found[start..=start]).filter(|end| *end > start).map_or(found.len(), |end| end + 1);
    format!("{}…{}{expected}", &found[..start], &found[end..])
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::net::IpAddr;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only deserialized")]
    struct Card {
        number: u64,
        colour: Option<Colour>,
        from: Option<IpAddr>,
        id: Option<uuid::Uuid>,
        limits: Option<HashMap<String, u8>>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Colour {
        Red,
    }

    fn decode_error(payload: &str) -> String {
        without_values(
            &serde_json::from_str::<Card>(payload).expect_err("the payload does not fit").to_string(),
        )
    }

    #[test]
    fn a_decode_error_names_the_field_and_the_expected_type_but_no_value() {
        assert_eq!(decode_error("{}"), "missing field `number` at line 1 column 2");
        assert!(
            decode_error(r#"{"nummer":1}"#).starts_with("unknown field `nummer`, expected one of `number`")
        );
        assert!(
            decode_error(r#"{"number":"4111 1111"}"#)
                .starts_with("invalid type: string …, expected u64 at line 1")
        );
        assert!(
            decode_error(r#"{"number":41.11}"#).starts_with("invalid type: floating point …, expected u64")
        );
        assert!(
            decode_error(r#"{"number":1,"colour":"secret"}"#)
                .starts_with("unknown variant …, expected `red`")
        );
        assert!(
            decode_error(r#"{"number":1,"limits":{"a":4111}}"#)
                .starts_with("invalid value: integer …, expected u8")
        );
    }

    #[test]
    fn no_quoting_style_leaks_a_value() {
        for value in [
            r#""secret""#,
            r#""\", expected secret""#,
            r#""`secret`, expected `""#,
            r#"["secret"]"#,
            r#"{"secret":"secret"}"#,
        ] {
            for field in ["number", "from", "id", "colour", "limits"] {
                let error = decode_error(&format!(r#"{{"{field}":{value}}}"#));
                assert!(!error.contains("secret"), "{field}: {value}: {error}");
            }
        }
        for message in
            [r#"cannot read "secret", expected "secret" here"#, "cannot read `secret", r#"bad "secret"#]
        {
            assert!(!without_values(message).contains("secret"), "{message}");
        }
        assert_eq!(without_values("must be positive"), "must be positive");
    }
}
