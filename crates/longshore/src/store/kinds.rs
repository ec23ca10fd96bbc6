//! Kinds of jobs: their JSON schemas and default options.
//!
//! A kind applies to jobs of all queues, or of one queue: a worker with a token that is limited to queues describes
//! kinds for these queues only, because anybody else's jobs must not depend on it.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::enqueue::{check_json, check_name};
use crate::error::{Error, Result};

/// The maximum size of a kind's schema and of its defaults, in bytes of JSON.
pub const MAX_SCHEMA: usize = 64 * 1024;

/// The limits of the kinds that apply to single queues, counted once per queue: every process that enqueues keeps them in memory.
pub(crate) const QUEUE_KINDS: KindLimits = KindLimits {
    of_token: KindUse { kinds: 2_000, bytes: 1024 * 1024 },
    in_all: KindUse { kinds: 10_000, bytes: 8 * 1024 * 1024 },
};

/// The field of the error about too many kinds.
pub(crate) const TOO_MANY_KINDS: &str = "kinds";

/// How many kinds there may be.
#[derive(Clone, Copy)]
pub(crate) struct KindLimits {
    /// In the queues of one token.
    of_token: KindUse,
    in_all: KindUse,
}

/// A number of kinds, and the bytes of their names, schemas and defaults.
#[derive(Clone, Copy)]
pub(crate) struct KindUse {
    pub(crate) kinds: i64,
    pub(crate) bytes: i64,
}

impl KindLimits {
    /// Refuses more kinds than there may be.
    pub(crate) fn check(&self, of_token: KindUse, in_all: KindUse) -> Result<()> {
        let check = |found: KindUse, limit: KindUse, of: &str| {
            if found.kinds <= limit.kinds && found.bytes <= limit.bytes {
                return Ok(());
            }
            Err(Error::invalid(
                TOO_MANY_KINDS,
                format!(
                    "kinds: {of} would have {} kinds with {} bytes, counted once per queue; the limit is {} kinds \
                     with {} bytes. Remove some with `longshore kinds remove` or DELETE /kinds/{{kind}}, or start the \
                     worker with a token for all queues",
                    found.kinds, found.bytes, limit.kinds, limit.bytes
                ),
            ))
        };
        check(of_token, self.of_token, "the queues of this token")?;
        check(in_all, self.in_all, "all tokens that are limited to queues")
    }
}

/// A kind of job to create or update.
#[derive(Clone, Debug)]
pub struct NewKind {
    /// Its name.
    pub name: String,
    /// The JSON schema of its payload; `None` leaves the stored one unchanged.
    pub schema: Option<Box<RawValue>>,
    /// Default options for its jobs, as JSON; `None` leaves the stored ones unchanged.
    pub defaults: Option<Box<RawValue>>,
}

impl NewKind {
    /// A kind without a schema or defaults.
    pub fn new(name: impl Into<String>) -> Self {
        NewKind { name: name.into(), schema: None, defaults: None }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        if let Some(schema) = &self.schema {
            check_json("schema", schema.get(), MAX_SCHEMA)?;
        }
        if let Some(defaults) = &self.defaults {
            check_json("defaults", defaults.get(), MAX_SCHEMA)?;
        }
        Ok(())
    }
}

/// The jobs that stored kinds apply to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KindQueues {
    /// Those of all queues. Replaces kinds of the same name that apply to single queues.
    All,
    /// Those of these queues. Changes nothing if a kind of this name applies to all queues.
    Only(Vec<String>),
}

/// Which kinds to list.
#[derive(Clone, Debug)]
pub struct KindFilter {
    /// Only kinds after this name and queue.
    pub after: Option<(String, String)>,
    /// The maximum number of kinds; all by default.
    pub limit: Option<u32>,
    /// Besides those that apply to all queues, only kinds of these queues; those of every queue by default.
    pub queues: Option<Vec<String>>,
    /// Whether the schemas are read; they are by default.
    pub schemas: Schemas,
}

impl Default for KindFilter {
    fn default() -> Self {
        KindFilter { after: None, limit: None, queues: None, schemas: Schemas::Include }
    }
}

/// Whether schemas are read with the kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schemas {
    /// With their schemas.
    Include,
    /// Only whether there is one.
    Omit,
}

/// Merges kinds by name: if one is given twice, its last schema and its last defaults
/// win. Sorted, so that every process locks the rows in the same order.
pub(crate) fn by_name(kinds: &[NewKind]) -> BTreeMap<&str, (Option<&str>, Option<&str>)> {
    let mut merged = BTreeMap::<&str, (Option<&str>, Option<&str>)>::new();
    for kind in kinds {
        let (schema, defaults) = merged.entry(&kind.name).or_default();
        *schema = kind.schema.as_deref().map(RawValue::get).or(*schema);
        *defaults = kind.defaults.as_deref().map(RawValue::get).or(*defaults);
    }
    merged
}

/// A stored kind of job.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct KindRecord {
    /// Its name.
    pub name: String,
    /// The queue to whose jobs it applies; `None` for jobs of all queues.
    pub queue: Option<String>,
    /// Whether it has a schema.
    pub has_schema: bool,
    /// The JSON schema of its payload, if it was asked for.
    pub schema: Option<Box<RawValue>>,
    /// Default options for its jobs.
    pub defaults: Option<Box<RawValue>>,
    /// When it was last updated.
    pub updated_at: DateTime<Utc>,
}
