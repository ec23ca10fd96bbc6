//! Kinds of jobs: their JSON schemas and default options.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::enqueue::{check_json, check_name};
use crate::error::Result;

/// The maximum size of a kind's schema and of its defaults, in bytes of JSON.
pub const MAX_SCHEMA: usize = 64 * 1024;

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

/// What happens to kinds that exist when kinds are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingKinds {
    /// They get the new schema and the new defaults.
    Update,
    /// They stay as they are.
    Keep,
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
    /// The JSON schema of its payload.
    pub schema: Option<Box<RawValue>>,
    /// Default options for its jobs.
    pub defaults: Option<Box<RawValue>>,
    /// When it was last updated.
    pub updated_at: DateTime<Utc>,
}
