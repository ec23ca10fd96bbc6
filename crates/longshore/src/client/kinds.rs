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
use crate::enqueue::ValidJob;
use crate::error::{Error, Result};
use crate::json_schema::JsonSchema;
use crate::nearest::nearest;
use crate::store::{ExistingKinds, KindRecord, NewKind, Store};

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
        self.store_kinds(kinds, ExistingKinds::Update).await
    }

    /// As [`put_kinds`](Self::put_kinds). `existing` says whether kinds that exist are updated.
    pub(crate) async fn store_kinds(&self, kinds: &[NewKind], existing: ExistingKinds) -> Result<()> {
        self.store.put_kinds(kinds, existing).await?;
        self.kind_rules.invalidate();
        Ok(())
    }

    /// All registered kinds, by name.
    pub async fn kinds(&self) -> Result<Vec<KindRecord>> {
        self.store.kinds().await
    }

    /// Removes a kind. Returns whether it was registered. Its jobs stay.
    pub async fn remove_kind(&self, name: &str) -> Result<bool> {
        let removed = self.store.remove_kind(name).await?;
        self.kind_rules.invalidate();
        Ok(removed)
    }

    /// Checks the kind and the payload of a job before it is stored.
    /// Returns the registered kind, if there is one.
    pub(crate) async fn check_job(&self, kind: &str, payload: &str) -> Result<Option<Arc<Kind>>> {
        self.kind_rules.check(&*self.store, kind, payload).await
    }

    /// Checks jobs as [`check_job`](Self::check_job) does.
    pub(super) async fn check_jobs(&self, jobs: &[ValidJob]) -> Result<()> {
        for (i, job) in jobs.iter().enumerate() {
            self.check_job(&job.kind, &job.payload).await.map_err(|error| error.in_item("jobs", i))?;
        }
        Ok(())
    }
}

/// The rules that new jobs are checked against: built-in checks and registered kinds.
#[derive(Default)]
pub(crate) struct KindRules {
    builtin: Option<Arc<CheckPayload>>,
    unknown: UnknownKinds,
    cache: Mutex<Option<(Instant, KindMap)>>,
}

type KindMap = HashMap<String, Arc<Kind>>;

impl fmt::Debug for KindRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KindRules").field("unknown", &self.unknown).finish_non_exhaustive()
    }
}

impl KindRules {
    fn without_cache(&self) -> Self {
        KindRules { builtin: self.builtin.clone(), unknown: self.unknown, cache: Mutex::default() }
    }

    /// A payload must pass the built-in check of its kind, if there is one, and match
    /// the schema of the registered kind, if there is one. A kind that is neither built
    /// in nor registered is refused, unless unknown kinds are allowed.
    async fn check(&self, store: &dyn Store, kind: &str, payload: &str) -> Result<Option<Arc<Kind>>> {
        let builtin = self.builtin.as_ref().and_then(|check| check(kind, payload));
        let registered = self.registered(store, kind).await?;
        match (builtin, registered) {
            (Some(Err(reason)), _) => Err(Error::invalid("payload", format!("payload: {reason}"))),
            (_, Some(registered)) => registered.check_payload(kind, payload).map(|()| Some(registered)),
            (Some(Ok(())), None) => Ok(None),
            (None, None) if self.unknown == UnknownKinds::Allow => Ok(None),
            (None, None) => Err(Error::invalid(
                "kind",
                format!(
                    "kind: `{}` is not registered{}; start a worker that handles it, register it with \
                     `longshore kinds put` or PUT /kinds/{{kind}}, or allow unknown kinds \
                     (`Client::unknown_kinds`, `--allow-unknown-kinds`)",
                    truncated(kind),
                    self.suggestion(kind)
                ),
            )),
        }
    }

    /// The registered kind of this name.
    async fn registered(&self, store: &dyn Store, kind: &str) -> Result<Option<Arc<Kind>>> {
        if let Some(cached) = self.cached(kind) {
            return Ok(cached);
        }
        let kinds = match Box::pin(load(store)).await {
            Ok(kinds) => kinds,
            // Here the registered kinds are optional. If the database is unreachable,
            // storing the job fails with that error.
            Err(error) if self.unknown == UnknownKinds::Allow => {
                tracing::warn!(%error, kind, "could not read the registered kinds; payloads are not checked against their schemas");
                KindMap::new()
            }
            Err(error) => return Err(error),
        };
        let found = kinds.get(kind).cloned();
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), kinds));
        Ok(found)
    }

    /// What the cache says about a kind; `None` if the cache is too old.
    fn cached(&self, kind: &str) -> Option<Option<Arc<Kind>>> {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, kinds) = cache.as_ref().filter(|(loaded_at, _)| loaded_at.elapsed() < CACHE_TTL)?;
        Some(kinds.get(kind).cloned())
    }

    /// The registered kind that is spelt almost like this one, for a message. The cache
    /// was read just before.
    fn suggestion(&self, kind: &str) -> String {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known: Vec<&str> =
            cache.iter().flat_map(|(_, kinds)| kinds.keys().map(String::as_str)).collect();
        known.sort_unstable();
        match nearest(kind, known) {
            Some(found) => format!(" (did you mean `{found}`?)"),
            None => String::new(),
        }
    }

    /// Empties the cache, after this client has changed a kind.
    fn invalidate(&self) {
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

async fn load(store: &dyn Store) -> Result<KindMap> {
    Ok(store
        .kinds()
        .await?
        .into_iter()
        .map(|record| (record.name.clone(), Arc::new(Kind::new(record))))
        .collect())
}

/// A registered kind.
pub(crate) struct Kind {
    schema: Schema,
    /// What an enqueue over HTTP starts from, as JSON.
    #[cfg_attr(not(feature = "api"), expect(dead_code, reason = "the API reads it"))]
    pub(crate) defaults: Option<Box<RawValue>>,
}

/// The JSON Schema that payloads must match.
enum Schema {
    None,
    Usable(JsonSchema),
    /// What is stored is not a valid schema. A worker's schema is stored without a
    /// check.
    Unusable,
}

impl Kind {
    fn new(record: KindRecord) -> Self {
        let schema = match record.schema.as_deref().map(|schema| JsonSchema::compile(schema.get())) {
            None => Schema::None,
            Some(Ok(schema)) => Schema::Usable(schema),
            Some(Err(error)) => {
                tracing::error!(
                    kind = record.name,
                    error,
                    "the stored schema of a kind is invalid; its jobs are refused until a valid one is stored"
                );
                Schema::Unusable
            }
        };
        Kind { schema, defaults: record.defaults }
    }

    /// Checks a payload against the schema. `name` is the kind, for messages.
    fn check_payload(&self, name: &str, payload: &str) -> Result<()> {
        let schema = match &self.schema {
            Schema::None => return Ok(()),
            Schema::Usable(schema) => schema,
            // Fail closed: an unchecked payload could be wrong.
            Schema::Unusable => {
                return Err(Error::invalid(
                    "kind",
                    format!(
                        "kind: the stored schema of `{name}` is invalid, so payloads cannot be checked; store a \
                         valid one with `longshore kinds put` or PUT /kinds/{{kind}}"
                    ),
                ));
            }
        };
        let invalid = |message: String| Error::invalid("payload", message);
        let payload = serde_json::from_str(payload)
            .map_err(|error| invalid(format!("payload: not valid JSON: {error}")))?;
        schema
            .check(&payload)
            .map_err(|(path, reason)| invalid(format!("payload{path}: {}", truncated(&reason))))
    }
}

/// The first 200 bytes of a text.
fn truncated(text: &str) -> &str {
    &text[..text.floor_char_boundary(200)]
}
