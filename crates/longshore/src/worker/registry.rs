//! Which handler runs which kind. Everything is checked when the worker is built, so that no
//! handler or state is missing when the first job arrives.

use std::any::{Any, TypeId, type_name};
use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;
use serde_json::value::to_raw_value;

use super::handler::{BatchHandler, Handler};
use crate::error::{Error, Result};
use crate::rules::enqueue::check_name;
use crate::store::NewKind;

/// How jobs of a kind are run.
#[derive(Clone)]
pub(super) enum Route {
    One(Arc<dyn Handler>),
    /// Up to `size` jobs in one call.
    Batch {
        handler: Arc<dyn BatchHandler>,
        size: usize,
    },
}

/// The handlers of a worker.
pub(super) struct Registry {
    routes: BTreeMap<String, Route>,
    catch_all: Option<Arc<dyn Handler>>,
    /// The published description of each kind that has its own handler.
    published: Vec<NewKind>,
}

impl Registry {
    pub(super) fn route(&self, kind: &str) -> Option<Route> {
        self.routes.get(kind).cloned().or_else(|| self.catch_all.clone().map(Route::One))
    }

    /// How many jobs to claim per free slot: the smallest batch size if every handler takes
    /// batches, otherwise 1, because each single job needs its own slot.
    pub(super) fn jobs_per_slot(&self) -> usize {
        let sizes = self.routes.values().map(|route| match route {
            Route::One(_) => 1,
            Route::Batch { size, .. } => *size,
        });
        if self.catch_all.is_some() { 1 } else { sizes.min().unwrap_or(1).max(1) }
    }

    /// The descriptions to publish, one per kind that has its own handler.
    pub(super) fn published(&self) -> &[NewKind] {
        &self.published
    }

    /// The kinds to claim; `None` means any kind.
    pub(super) fn kinds(&self) -> Option<Vec<String>> {
        match self.catch_all {
            Some(_) => None,
            None => Some(self.routes.keys().cloned().collect()),
        }
    }
}

/// The application's state: one value per type.
pub(super) struct States(HashMap<TypeId, Arc<dyn Any + Send + Sync>>);

impl Default for States {
    fn default() -> Self {
        let unit: Arc<dyn Any + Send + Sync> = Arc::new(());
        States(HashMap::from([(TypeId::of::<()>(), unit)]))
    }
}

impl States {
    pub(super) fn put<S: Send + Sync + 'static>(&mut self, state: Arc<S>) {
        self.0.insert(TypeId::of::<S>(), state);
    }

    pub(super) fn get<S: Send + Sync + 'static>(&self, kind: &str) -> Result<Arc<S>> {
        let found = self.0.get(&TypeId::of::<S>()).cloned().and_then(|state| state.downcast::<S>().ok());
        found.ok_or_else(|| {
            let name = type_name::<S>();
            Error::invalid(
                "state",
                format!(
                    "job kind `{kind}` needs state of type `{name}`; pass it to the builder with .state(…)"
                ),
            )
        })
    }
}

type Entry = Box<dyn FnOnce(&States) -> Result<Route> + Send>;

/// Handlers as registered. They are built once the state is complete.
#[derive(Default)]
pub(super) struct Entries {
    entries: Vec<(String, Option<Value>, Entry)>,
    catch_all: Vec<Arc<dyn Handler>>,
    schemas: Vec<(String, Value)>,
    upkeep_only: bool,
}

impl Entries {
    pub(super) fn upkeep_only(&mut self) {
        self.upkeep_only = true;
    }

    pub(super) fn add(
        &mut self,
        kind: &str,
        schema: Option<Value>,
        entry: impl FnOnce(&States) -> Result<Route> + Send + 'static,
    ) {
        self.entries.push((kind.to_owned(), schema, Box::new(entry)));
    }

    pub(super) fn describe(&mut self, kind: &str, schema: Value) {
        self.schemas.push((kind.to_owned(), schema));
    }

    pub(super) fn add_catch_all(&mut self, handler: Arc<dyn Handler>) {
        self.catch_all.push(handler);
    }

    pub(super) fn build(mut self, states: &States) -> Result<Registry> {
        for (kind, schema) in self.schemas {
            let Some((_, entry_schema, _)) = self.entries.iter_mut().find(|(handled, ..)| *handled == kind)
            else {
                return Err(Error::invalid(
                    "kind",
                    format!("job kind `{kind}` is described but has no handler in this worker; register one"),
                ));
            };
            *entry_schema = Some(schema);
        }
        let (mut routes, mut published) = (BTreeMap::new(), Vec::new());
        for (kind, schema, entry) in self.entries {
            check_name("kind", &kind)?;
            published.push(publication(&kind, schema)?);
            if routes.insert(kind.clone(), entry(states)?).is_some() {
                return Err(Error::invalid(
                    "kind",
                    format!(
                        "job kind `{kind}` is registered twice; a kind has one handler, so remove the other"
                    ),
                ));
            }
        }
        if self.catch_all.len() > 1 {
            return Err(Error::invalid(
                "executor",
                "executor: two catch-all executors are registered; remove one",
            ));
        }
        let catch_all = self.catch_all.into_iter().next();
        if self.upkeep_only && !(routes.is_empty() && catch_all.is_none()) {
            return Err(Error::invalid(
                "upkeep_only",
                "upkeep_only: a handler is registered too; remove the handler or upkeep_only",
            ));
        }
        if routes.is_empty() && catch_all.is_none() && !self.upkeep_only {
            return Err(Error::invalid(
                "kind",
                "worker: no handler is registered, so it would never claim; register a handler, \
                 or call upkeep_only",
            ));
        }
        Ok(Registry { routes, catch_all, published })
    }
}

fn publication(kind: &str, schema: Option<Value>) -> Result<NewKind> {
    let invalid =
        |error: &dyn std::fmt::Display| Error::invalid("schema", format!("job kind `{kind}`: {error}"));
    let schema = schema.map(|schema| to_raw_value(&schema)).transpose().map_err(|error| invalid(&error))?;
    let publication = NewKind { schema, ..NewKind::new(kind) };
    publication.validate().map_err(|error| invalid(&error))?;
    Ok(publication)
}
