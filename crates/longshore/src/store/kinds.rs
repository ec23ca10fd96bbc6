//! Kinds of jobs: their JSON schemas and default options.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::enqueue::{check_json, check_name};
use crate::error::Result;

/// The longest schema or defaults of a kind, in bytes of JSON.
pub const MAX_SCHEMA: usize = 64 * 1024;

/// What somebody says about a kind of job.
#[derive(Clone, Debug)]
pub struct NewKind {
    /// Its name.
    pub name: String,
    /// A JSON schema of its payload; `None` says nothing about it.
    pub schema: Option<Box<RawValue>>,
    /// What an enqueue of it begins with, as JSON; `None` says nothing about it.
    pub defaults: Option<Box<RawValue>>,
}

impl NewKind {
    /// Says only that the kind exists.
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

/// What is said about each kind, by name: one order for the rows to be locked
/// in. Of two words about the same thing the last one counts.
pub(crate) fn by_name(kinds: &[NewKind]) -> BTreeMap<&str, (Option<&str>, Option<&str>)> {
    let mut said = BTreeMap::<&str, (Option<&str>, Option<&str>)>::new();
    for kind in kinds {
        let (schema, defaults) = said.entry(&kind.name).or_default();
        *schema = kind.schema.as_deref().map(RawValue::get).or(*schema);
        *defaults = kind.defaults.as_deref().map(RawValue::get).or(*defaults);
    }
    said
}

/// A kind of job as it is known.
#[derive(Clone, Debug, Serialize)]
pub struct KindRecord {
    /// Its name.
    pub name: String,
    /// A JSON schema of its payload.
    pub schema: Option<Box<RawValue>>,
    /// What an enqueue of it begins with.
    pub defaults: Option<Box<RawValue>>,
    /// When somebody last said something about it.
    pub updated_at: DateTime<Utc>,
}
