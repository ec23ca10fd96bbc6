//! Which handler runs which kind. Everything is checked when the worker is
//! built, so that nothing is missing when the first job comes.

use std::any::{Any, TypeId, type_name};
use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;
use serde_json::value::to_raw_value;

use super::handler::{BatchHandler, Handler};
use crate::enqueue::check_name;
use crate::error::{Error, Result};
use crate::store::NewKind;

/// How a kind is run.
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
    any: Option<Arc<dyn Handler>>,
    /// What is told to the world of the kinds that have a handler of their own.
    published: Vec<NewKind>,
}

impl Registry {
    pub(super) fn route(&self, kind: &str) -> Option<Route> {
        self.routes.get(kind).cloned().or_else(|| self.any.clone().map(Route::One))
    }

    /// How many jobs a slot can take at once: of a worker that has nothing but
    /// batch handlers. Others could be handed more than they have slots for.
    pub(super) fn batch(&self) -> usize {
        let sizes = self.routes.values().map(|route| match route {
            Route::One(_) => 1,
            Route::Batch { size, .. } => *size,
        });
        if self.any.is_some() { 1 } else { sizes.min().unwrap_or(1).max(1) }
    }

    /// What to tell of the kinds that have a handler of their own.
    pub(super) fn published(&self) -> &[NewKind] {
        &self.published
    }

    /// What to claim: `None` means any kind.
    pub(super) fn kinds(&self) -> Option<Vec<String>> {
        match self.any {
            Some(_) => None,
            None => Some(self.routes.keys().cloned().collect()),
        }
    }
}

/// The application's state, one value of each type.
pub(super) struct States(HashMap<TypeId, Arc<dyn Any + Send + Sync>>);

impl Default for States {
    fn default() -> Self {
        let nothing: Arc<dyn Any + Send + Sync> = Arc::new(());
        States(HashMap::from([(TypeId::of::<()>(), nothing)]))
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
                    "job kind `{kind}` needs state of type `{name}`; give it to the builder with .state(…)"
                ),
            )
        })
    }
}

type Entry = Box<dyn FnOnce(&States) -> Result<Route> + Send>;

/// Handlers as they are registered, before the state is complete.
#[derive(Default)]
pub(super) struct Entries {
    entries: Vec<(String, Option<Value>, Entry)>,
    any: Vec<Arc<dyn Handler>>,
    described: Vec<(String, Value)>,
    /// There shall be none.
    none_wanted: bool,
}

impl Entries {
    pub(super) fn want_none(&mut self) {
        self.none_wanted = true;
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
        self.described.push((kind.to_owned(), schema));
    }

    pub(super) fn add_any(&mut self, handler: Arc<dyn Handler>) {
        self.any.push(handler);
    }

    pub(super) fn build(mut self, states: &States) -> Result<Registry> {
        for (kind, schema) in self.described {
            let Some((_, described, _)) = self.entries.iter_mut().find(|(handled, ..)| *handled == kind)
            else {
                return Err(Error::invalid(
                    "kind",
                    format!("job kind `{kind}` is described and has no handler here; register one"),
                ));
            };
            *described = Some(schema);
        }
        let (mut routes, mut published) = (BTreeMap::new(), Vec::new());
        for (kind, schema, entry) in self.entries {
            check_name("kind", &kind)?;
            published.push(publication(&kind, schema)?);
            if routes.insert(kind.clone(), entry(states)?).is_some() {
                return Err(Error::invalid(
                    "kind",
                    format!(
                        "job kind `{kind}` is registered twice; a kind has one handler, remove the other"
                    ),
                ));
            }
        }
        if self.any.len() > 1 {
            return Err(Error::invalid(
                "executor",
                "executor: two catch-all executors are registered; remove one",
            ));
        }
        let any = self.any.into_iter().next();
        if self.none_wanted && !(routes.is_empty() && any.is_none()) {
            return Err(Error::invalid(
                "upkeep_only",
                "upkeep_only: a handler is registered as well; leave one of the two out",
            ));
        }
        if routes.is_empty() && any.is_none() && !self.none_wanted {
            return Err(Error::invalid(
                "kind",
                "worker: no handler is registered, so it would never claim; register a job first, \
                 or say that it is for upkeep only",
            ));
        }
        Ok(Registry { routes, any, published })
    }
}

fn publication(kind: &str, schema: Option<Value>) -> Result<NewKind> {
    let wrong =
        |error: &dyn std::fmt::Display| Error::invalid("schema", format!("job kind `{kind}`: {error}"));
    let schema = schema.map(|schema| to_raw_value(&schema)).transpose().map_err(|error| wrong(&error))?;
    let publication = NewKind { schema, ..NewKind::new(kind) };
    publication.validate().map_err(|error| wrong(&error))?;
    Ok(publication)
}
