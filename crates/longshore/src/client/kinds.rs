//! Kinds of jobs: registering them, and checking every new job against them.
//!
//! The check is the same for the library, the API and the command, because all of them
//! enqueue through the client. It runs before any key is looked up.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::value::RawValue;

use super::Client;
use crate::error::{Error, Result};
use crate::json_schema::{JsonSchemas, Refusal};
use crate::nearest::nearest;
use crate::rules::enqueue::{DEFAULT_QUEUE, ValidJob};
use crate::store::{KindFilter, KindQueues, KindRecord, NewKind, Store};

/// How long the registered kinds are cached. A change made by another process takes
/// effect within this time.
const CACHE_TTL: Duration = Duration::from_secs(2);

/// Checks the payload of a kind that is built into the program. Takes the kind and the
/// payload. Returns `None` for a kind it does not know, and otherwise whether the payload
/// is valid or what is wrong with it.
pub type CheckPayload = dyn Fn(&str, &str) -> Option<Result<(), String>> + Send + Sync;

/// What happens to new jobs of a kind that is not registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownKinds {
    /// They are accepted and wait until a worker handles the kind. The default of a
    /// client: the first deployment enqueues before any worker has registered.
    #[default]
    Allow,
    /// They are refused, because a job with a misspelt kind would wait forever. The
    /// default of the API.
    Refuse,
}

impl Client {
    /// Sets what happens to new jobs of a kind that is not registered.
    pub fn unknown_kinds(self, unknown: UnknownKinds) -> Self {
        let rules = KindRules { unknown, ..self.kind_rules.without_cache() };
        Client { kind_rules: Arc::new(rules), ..self }
    }

    /// Checks the payloads of kinds that are built into this program.
    ///
    /// ```
    /// # use longshore::{Client, NewJob};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let client = client.check_payloads(|kind, payload| {
    ///     (kind == "greet").then(|| if payload == "\"\"" { Err("name somebody".into()) } else { Ok(()) })
    /// });
    /// assert!(client.enqueue(NewJob::new("greet", "Ada")).await.is_ok());
    /// assert_eq!(client.enqueue(NewJob::new("greet", "")).await.unwrap_err().field(), Some("payload"));
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn check_payloads(
        self,
        check: impl Fn(&str, &str) -> Option<Result<(), String>> + Send + Sync + 'static,
    ) -> Self {
        let rules = KindRules { builtin: Some(Arc::new(check)), ..self.kind_rules.without_cache() };
        Client { kind_rules: Arc::new(rules), ..self }
    }

    /// Registers kinds of jobs. A schema or defaults that are left out stay as they are.
    ///
    /// ```
    /// # use longshore::{Client, store::NewKind};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let schema = serde_json::value::to_raw_value(&serde_json::json!({ "type": "object" })).unwrap();
    /// client.put_kinds(&[NewKind { schema: Some(schema), ..NewKind::new("mail") }]).await?;
    /// client.put_kinds(&[NewKind::new("mail")]).await?;
    /// assert!(client.kinds().await?[0].schema.is_some());
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn put_kinds(&self, kinds: &[NewKind]) -> Result<()> {
        self.store_kinds(kinds, &KindQueues::All).await
    }

    /// As [`put_kinds`](Self::put_kinds), for jobs of these queues.
    pub(crate) async fn store_kinds(&self, kinds: &[NewKind], queues: &KindQueues) -> Result<()> {
        self.store.put_kinds(kinds, queues).await?;
        self.kind_rules.invalidate();
        Ok(())
    }

    /// All registered kinds with their schemas, by name.
    pub async fn kinds(&self) -> Result<Vec<KindRecord>> {
        self.store.kinds(&KindFilter::default()).await
    }

    /// Some of the registered kinds, by name and queue.
    #[cfg_attr(not(feature = "api"), expect(dead_code, reason = "the API lists pages"))]
    pub(crate) async fn kinds_page(&self, filter: &KindFilter) -> Result<Vec<KindRecord>> {
        self.store.kinds(filter).await
    }

    /// Removes a kind. Returns whether it was registered. Its jobs stay.
    pub async fn remove_kind(&self, name: &str) -> Result<bool> {
        let removed = self.store.remove_kind(name).await?;
        self.kind_rules.invalidate();
        Ok(removed)
    }

    /// Checks the kind and the payload of a job before it is stored. `queue` is the one that the caller names.
    /// Returns the registered kind, if there is one.
    pub(crate) async fn check_job(
        &self,
        kind: &str,
        queue: Option<&str>,
        payload: &str,
    ) -> Result<Option<Arc<Kind>>> {
        self.kind_rules.check(&*self.store, kind, queue.unwrap_or(DEFAULT_QUEUE), payload).await
    }

    /// Checks jobs as [`check_job`](Self::check_job) does.
    pub(super) async fn check_jobs(&self, jobs: &[ValidJob]) -> Result<()> {
        for (i, job) in jobs.iter().enumerate() {
            let checked = self.check_job(&job.kind, Some(&job.queue), &job.payload).await;
            checked.map_err(|error| error.in_item("jobs", i))?;
        }
        Ok(())
    }
}

/// The rules that new jobs are checked against: built-in checks and registered kinds.
#[derive(Default)]
pub(crate) struct KindRules {
    builtin: Option<Arc<CheckPayload>>,
    unknown: UnknownKinds,
    cache: Mutex<Option<(Instant, Arc<Kinds>)>>,
    schemas: Arc<JsonSchemas>,
}

impl fmt::Debug for KindRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KindRules").field("unknown", &self.unknown).finish_non_exhaustive()
    }
}

impl KindRules {
    fn without_cache(&self) -> Self {
        KindRules {
            builtin: self.builtin.clone(),
            unknown: self.unknown,
            cache: Mutex::default(),
            schemas: self.schemas.clone(),
        }
    }

    /// A payload must pass the built-in check of its kind, if there is one, and match
    /// the schema of the registered kind, if there is one. A kind that is neither built
    /// in nor registered is refused, unless unknown kinds are allowed.
    async fn check(
        &self,
        store: &dyn Store,
        kind: &str,
        queue: &str,
        payload: &str,
    ) -> Result<Option<Arc<Kind>>> {
        let builtin = self.builtin.as_ref().and_then(|check| check(kind, payload));
        let kinds = self.kinds(store, kind).await?;
        match (builtin, kinds.find(kind, queue)) {
            (Some(Err(reason)), _) => Err(Error::invalid("payload", format!("payload: {reason}"))),
            (_, Some(registered)) => {
                if let Some(schema) = &registered.schema {
                    // Boxed, because most kinds have no schema, and the futures of callers should stay small.
                    Box::pin(self.check_payload(kind, schema, payload)).await?;
                }
                Ok(Some(registered.clone()))
            }
            (Some(Ok(())), None) => Ok(None),
            (None, None) if self.unknown == UnknownKinds::Allow => Ok(None),
            (None, None) => Err(Error::invalid(
                "kind",
                format!(
                    "kind: `{}` is not registered{}; start a worker that handles it, register it with \
                     `longshore kinds put` or PUT /kinds/{{kind}}, or allow unknown kinds \
                     (`Client::unknown_kinds`, `--allow-unknown-kinds`)",
                    truncated(kind),
                    kinds.suggestion(kind, queue)
                ),
            )),
        }
    }

    /// The registered kinds.
    async fn kinds(&self, store: &dyn Store, kind: &str) -> Result<Arc<Kinds>> {
        if let Some(cached) = self.cached() {
            return Ok(cached);
        }
        let kinds = match Box::pin(store.kinds(&KindFilter::default())).await {
            Ok(records) => Kinds::new(records),
            // Here the registered kinds are optional. If the database is unreachable,
            // storing the job fails with that error.
            Err(error) if self.unknown == UnknownKinds::Allow => {
                tracing::warn!(%error, kind, "could not read the registered kinds; payloads are not checked against their schemas");
                Kinds::default()
            }
            Err(error) => return Err(error),
        };
        let kinds = Arc::new(kinds);
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), kinds.clone()));
        Ok(kinds)
    }

    /// What the cache has; `None` if it is too old.
    fn cached(&self) -> Option<Arc<Kinds>> {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, kinds) = cache.as_ref().filter(|(loaded_at, _)| loaded_at.elapsed() < CACHE_TTL)?;
        Some(kinds.clone())
    }

    /// Empties the cache, after this client has changed a kind.
    fn invalidate(&self) {
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Checks a payload against the schema of a kind. Fails closed: an unchecked payload could be wrong.
    async fn check_payload(&self, kind: &str, schema: &RawValue, payload: &str) -> Result<()> {
        let invalid = |message: String| Error::invalid("payload", message);
        let payload = serde_json::from_str(payload)
            .map_err(|error| invalid(format!("payload: not valid JSON: {error}")))?;
        self.schemas.check(schema.get(), payload).await.map_err(|refusal| match refusal {
            Refusal::Payload { at, reason } => invalid(format!("payload{at}: {}", truncated(&reason))),
            Refusal::Cost(reason) => invalid(format!(
                "payload: {reason} against the schema of kind `{kind}`; send a smaller payload, or register a \
                 simpler schema"
            )),
            Refusal::Unavailable(reason) => Error::unavailable(reason),
            Refusal::Schema(reason) => Error::invalid(
                "kind",
                format!(
                    "kind: the stored schema of `{kind}` is invalid, so payloads cannot be checked; store a valid \
                     one with `longshore kinds put` or PUT /kinds/{{kind}}. What is wrong: {}",
                    truncated(&reason)
                ),
            ),
        })
    }
}

/// The registered kinds by name.
#[derive(Default)]
struct Kinds(HashMap<String, Named>);

/// The kinds of one name.
#[derive(Default)]
struct Named {
    all_queues: Option<Arc<Kind>>,
    of_queue: HashMap<String, Arc<Kind>>,
}

/// A registered kind.
pub(crate) struct Kind {
    /// The queue that it is limited to.
    #[cfg_attr(not(feature = "api"), expect(dead_code, reason = "the API reads it"))]
    pub(crate) queue: Option<String>,
    /// The JSON Schema that payloads must match. A worker's schema is stored without a check.
    schema: Option<Box<RawValue>>,
    /// The default options of a job that is enqueued over HTTP, as JSON.
    #[cfg_attr(not(feature = "api"), expect(dead_code, reason = "the API reads it"))]
    pub(crate) defaults: Option<Box<RawValue>>,
}

impl Kinds {
    fn new(records: Vec<KindRecord>) -> Self {
        let mut kinds = HashMap::<String, Named>::new();
        for KindRecord { name, queue, schema, defaults, .. } in records {
            let named = kinds.entry(name).or_default();
            let kind = Arc::new(Kind { queue: queue.clone(), schema, defaults });
            match queue {
                None => named.all_queues = Some(kind),
                Some(queue) => drop(named.of_queue.insert(queue, kind)),
            }
        }
        Kinds(kinds)
    }

    /// The kind for jobs of this queue. One that applies to all queues comes first.
    fn find(&self, kind: &str, queue: &str) -> Option<&Arc<Kind>> {
        let named = self.0.get(kind)?;
        named.all_queues.as_ref().or_else(|| named.of_queue.get(queue))
    }

    /// The hint in the error about a kind that is not registered: a kind with a similar name, or that this
    /// one is registered for other queues. Does not name the queues: the caller may not see them.
    fn suggestion(&self, kind: &str, queue: &str) -> String {
        if self.0.contains_key(kind) {
            return format!(
                " for queue `{}`, only for others; name the queue of its workers in `queue`",
                truncated(queue)
            );
        }
        let known = self.0.keys().map(String::as_str);
        let mut known: Vec<&str> = known.filter(|known| self.find(known, queue).is_some()).collect();
        known.sort_unstable();
        match nearest(kind, known) {
            Some(found) => format!(" (did you mean `{found}`?)"),
            None => String::new(),
        }
    }
}

/// The first 200 bytes of a text.
fn truncated(text: &str) -> &str {
    &text[..text.floor_char_boundary(200)]
}
