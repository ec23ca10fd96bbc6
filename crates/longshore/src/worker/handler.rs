//! What users write: a typed [`Job`], a plain async function, a batch function,
//! or an [`Executor`] for kinds known only at run time. And how an attempt can
//! end other than well: [`Failure`].

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
use crate::enqueue::{DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, DEFAULT_TIMEOUT, NewJob, UniqueMode};
use crate::retry::RetryPolicy;

/// A typed job: what it carries, its defaults, and the work itself.
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
///             return Err(Failure::permanent(format!("`{}` is no address", self.to)));
///         }
///         println!("{} writes to {}", ctx.state().sender, self.to);
///         Ok(())
///     }
/// }
/// ```
pub trait Job: Serialize + DeserializeOwned + Send + 'static {
    /// The name under which it is stored. Changing it orphans waiting jobs.
    const KIND: &'static str;
    /// What of the application it needs; `()` for nothing.
    type State: Send + Sync + 'static;

    /// The queue it waits in unless an enqueue says otherwise.
    const QUEUE: &'static str = DEFAULT_QUEUE;
    /// Its priority unless an enqueue says otherwise; higher runs first.
    const PRIORITY: i16 = 0;
    /// How many attempts it may have unless an enqueue says otherwise.
    const MAX_ATTEMPTS: u16 = DEFAULT_MAX_ATTEMPTS;
    /// How long one attempt may take unless an enqueue says otherwise.
    const TIMEOUT: Option<Duration> = Some(DEFAULT_TIMEOUT);

    /// When failed attempts are tried again; `None` is the default policy.
    fn retry() -> Option<RetryPolicy> {
        None
    }

    /// A delay worked out in code after failed attempt number `attempt`, before
    /// the stored policy is asked; `None` leaves it to the policy.
    fn backoff(attempt: u16) -> Option<Duration> {
        let _ = attempt;
        None
    }

    /// A JSON schema of what it carries, published when a worker starts, for people
    /// and programs that enqueue it from elsewhere.
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

    /// A key of which at most one live job may exist.
    fn unique_key(&self) -> Option<(String, UniqueMode)> {
        None
    }

    /// Does the work. An error of any type is a failed attempt, which is tried
    /// again by policy; a [`Failure`] can say more.
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
    /// Does the work of one attempt. The payload is in `ctx.job().payload()`.
    async fn execute(&self, ctx: Context) -> Result<(), Failure>;
}

// ---- how an attempt ends other than well ----------------------------------

/// Why an attempt did not succeed, and what should become of the job. `?` makes
/// one of any error: a failed attempt, tried again by the job's policy.
pub struct Failure(pub(super) Verdict);

pub(super) enum Verdict {
    Retry { error: String, after: Option<Duration> },
    Permanent { error: String },
    Snooze { delay: Duration },
    Cancelled { reason: Option<String> },
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

impl Failure {
    /// A failed attempt, tried again by the job's policy.
    pub fn retry(error: impl Into<AnyError>) -> Self {
        Failure(Verdict::Retry { error: told(&*error.into()), after: None })
    }

    /// A failed attempt, tried again after exactly this long: for `Retry-After`.
    pub fn retry_after(delay: Duration, error: impl Into<AnyError>) -> Self {
        Failure(Verdict::Retry { error: told(&*error.into()), after: Some(delay) })
    }

    /// Failed for good, whatever attempts are left.
    pub fn permanent(error: impl Into<AnyError>) -> Self {
        Failure(Verdict::Permanent { error: told(&*error.into()) })
    }

    /// Not now: run it this much later, without charging an attempt.
    pub fn snooze(delay: Duration) -> Self {
        Failure(Verdict::Snooze { delay })
    }

    /// The job is not wanted any more.
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
        }
    }
}

/// The error and what caused it, in one line.
fn told(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        let more = source.to_string();
        // Many errors repeat their cause in their own words.
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = source.source();
    }
    text
}

// ---- erased ---------------------------------------------------------------

pub(super) type HandlerFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A handler without its types.
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
    /// What was asked.
    pub payload: P,
    /// This job's context.
    pub ctx: Context<S>,
}

/// A batch handler without its types: one call, an answer for each job.
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
            let mut answers: Vec<Option<Result<(), Failure>>> = Vec::with_capacity(attempts.len());
            let mut jobs = Vec::with_capacity(attempts.len());
            for attempt in attempts {
                let ctx = Context::new(attempt, state.clone());
                match decode::<P>(&ctx) {
                    Ok(payload) => {
                        jobs.push(Batched { payload, ctx });
                        answers.push(None);
                    }
                    Err(failure) => answers.push(Some(Err(failure))),
                }
            }
            let (asked, mut answered) = (jobs.len(), Vec::new());
            if asked > 0 {
                answered = function(jobs).await;
            }
            if answered.len() != asked {
                let found = answered.len();
                let wrong = move || {
                    Failure::retry(format!(
                        "the batch handler gave {found} answers for {asked} jobs; it must give one each"
                    ))
                };
                return answers.into_iter().map(|own| own.unwrap_or_else(|| Err(wrong()))).collect();
            }
            let mut answered = answered.into_iter();
            answers.into_iter().map(|own| own.or_else(|| answered.next()).unwrap_or(Ok(()))).collect()
        })
    }
}

/// A payload of another shape will not change by being tried again.
fn decode<P: DeserializeOwned>(ctx: &Context<impl Send + Sync>) -> Result<P, Failure> {
    serde_json::from_str(ctx.job().payload()).map_err(|error| {
        let kind = ctx.job().kind();
        let why = without_values(&error.to_string());
        Failure::permanent(format!(
            "the payload does not fit the handler of `{kind}`: {why}; deploy a handler that takes it, then retry the job"
        ))
    })
}

/// What was wrong without what stood there: the parser quotes values, this goes to
/// the job's errors and to logs, and payloads are nobody's business there.
pub(super) fn without_values(error: &str) -> String {
    const NAMES_ONLY: [&str; 3] = ["missing field", "duplicate field", "unknown field"];
    const AND_EXPECTED: [&str; 4] = ["invalid type", "invalid value", "invalid length", "unknown variant"];
    let begins = |with: &[&str]| with.iter().any(|with| error.starts_with(with));
    if begins(&NAMES_ONLY) {
        return error.into();
    }
    // What was expected is the handler's own, and comes last. Other words may be a
    // library's, which quote as they like.
    let expected = error.rfind(", expected").filter(|_| begins(&AND_EXPECTED));
    let (found, expected) = error.split_at(expected.unwrap_or(error.len()));
    let Some(begin) = found.find(['"', '`']) else { return error.into() };
    let end =
        found.rfind(&found[begin..=begin]).filter(|end| *end > begin).map_or(found.len(), |end| end + 1);
    format!("{}…{}{expected}", &found[..begin], &found[end..])
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::net::IpAddr;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only read")]
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

    fn told(payload: &str) -> String {
        without_values(&serde_json::from_str::<Card>(payload).expect_err("it does not fit").to_string())
    }

    #[test]
    fn an_error_names_the_field_and_what_was_expected_but_no_value() {
        assert_eq!(told("{}"), "missing field `number` at line 1 column 2");
        assert!(told(r#"{"nummer":1}"#).starts_with("unknown field `nummer`, expected one of `number`"));
        assert!(
            told(r#"{"number":"4111 1111"}"#).starts_with("invalid type: string …, expected u64 at line 1")
        );
        assert!(told(r#"{"number":41.11}"#).starts_with("invalid type: floating point …, expected u64"));
        assert!(told(r#"{"number":1,"colour":"secret"}"#).starts_with("unknown variant …, expected `red`"));
        assert!(
            told(r#"{"number":1,"limits":{"a":4111}}"#).starts_with("invalid value: integer …, expected u8")
        );
    }

    #[test]
    fn no_way_of_quoting_lets_a_value_through() {
        for value in [
            r#""secret""#,
            r#""\", expected secret""#,
            r#""`secret`, expected `""#,
            r#"["secret"]"#,
            r#"{"secret":"secret"}"#,
        ] {
            for field in ["number", "from", "id", "colour", "limits"] {
                let told = told(&format!(r#"{{"{field}":{value}}}"#));
                assert!(!told.contains("secret"), "{field}: {value}: {told}");
            }
        }
        for words in
            [r#"cannot read "secret", expected "secret" here"#, "cannot read `secret", r#"bad "secret"#]
        {
            assert!(!without_values(words).contains("secret"), "{words}");
        }
        assert_eq!(without_values("must be positive"), "must be positive");
    }
}
