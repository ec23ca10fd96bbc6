//! JSON Schemas of payloads.
//!
//! `cost` bounds the work, `threads` runs what is too long for the threads of the runtime. `jsonschema` decides what
//! matches.

mod cost;
mod threads;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use tokio::sync::OnceCell;

use cost::{Excess, Outline, Repeated};

/// The maximum size of the schemas that are kept compiled, in bytes of JSON. A compiled one takes up to about a hundred
/// times as much.
const MAX_COMPILED: usize = 1024 * 1024;
/// The maximum size of a regular expression, and of the cache of its matches.
const MAX_PATTERN: usize = 512 * 1024;
/// The depth up to which a check runs on the caller's thread.
const INLINE_DEPTH: usize = 64;

/// What one check may cost. A step is about the check of one keyword, a few dozen nanoseconds.
#[derive(Clone, Copy)]
struct Budget {
    /// All of it.
    steps: u64,
    /// What runs on the caller's thread.
    inline: u64,
    /// Finding out what is wrong, if that collects the errors of several branches.
    details: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { steps: 1_000_000, inline: 10_000, details: 50_000 }
    }
}

/// Why a payload is refused.
pub(crate) enum Refusal {
    /// The schema cannot be used, for this reason.
    Schema(String),
    /// The payload does not match.
    Payload {
        /// Where it is wrong, as a JSON pointer.
        at: String,
        reason: String,
    },
    /// The check takes too long, for this reason.
    Cost(String),
}

/// A compiled JSON Schema.
pub(crate) struct JsonSchema {
    outline: Outline,
    validator: jsonschema::Validator,
    budget: Budget,
}

impl JsonSchema {
    /// Compiles a schema, or returns what is wrong with it.
    pub(crate) async fn compile(schema: &str) -> Result<Self, String> {
        let schema = schema.to_owned();
        threads::run(move || Self::build(&schema, Budget::default())).await?
    }

    fn build(text: &str, budget: Budget) -> Result<Self, String> {
        let schema: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let outline = Outline::of(text, &schema)?;
        // This regex engine runs in linear time. Patterns that it does not support are
        // refused.
        let patterns =
            jsonschema::PatternOptions::regex().size_limit(MAX_PATTERN).dfa_size_limit(MAX_PATTERN);
        let validator = jsonschema::options().with_pattern_options(patterns).build(&schema);
        let validator = validator.map_err(|error| error.to_string())?;
        Ok(JsonSchema { outline, validator, budget })
    }

    /// Checks a value.
    async fn check(self: Arc<Self>, value: Value) -> Result<(), Refusal> {
        let cost = self.outline.measure(&value, self.budget.steps, Repeated::Once);
        let cost = cost.map_err(|excess| self.too_expensive(excess))?;
        if cost.steps <= self.budget.inline && cost.depth <= INLINE_DEPTH {
            return self.verdict(&value);
        }
        threads::run(move || self.verdict(&value)).await.map_err(Refusal::Cost)?
    }

    fn too_expensive(&self, excess: Excess) -> Refusal {
        Refusal::Cost(match excess {
            Excess::Steps => format!("takes more than {} steps to check", self.budget.steps),
            Excess::Depth => "nests too deeply to check".to_owned(),
        })
    }

    fn verdict(&self, value: &Value) -> Result<(), Refusal> {
        // Most payloads are valid, and `is_valid` is faster than collecting errors.
        if self.validator.is_valid(value) {
            return Ok(());
        }
        // `jsonschema` visits a failing branch again on every level above it, and keeps all errors.
        let max_steps = if self.outline.collects { self.budget.details } else { self.budget.steps };
        let is_cheap = self.outline.measure(value, max_steps, Repeated::Always).is_ok();
        match is_cheap.then(|| self.validator.validate(value).err()).flatten() {
            // Masked: the message must not repeat the payload.
            Some(error) => Err(Refusal::Payload {
                at: error.instance_path().to_string(),
                reason: error.masked().to_string(),
            }),
            None => Err(Refusal::Payload {
                at: String::new(),
                reason: "does not match the schema; it is too large to say where".into(),
            }),
        }
    }
}

/// Schemas that are compiled when they are first used, by their text.
#[derive(Default)]
pub(crate) struct JsonSchemas(Mutex<Compiled>);

#[derive(Default)]
struct Compiled {
    /// The schemas, and the number of the use at which each was used last.
    schemas: HashMap<Arc<str>, (Cell, u64)>,
    /// The size of their texts.
    size: usize,
    uses: u64,
}

type Cell = Arc<OnceCell<Result<Arc<JsonSchema>, String>>>;

impl JsonSchemas {
    /// Checks a value against a schema.
    pub(crate) async fn check(&self, schema: &str, value: Value) -> Result<(), Refusal> {
        let cell = self.cell(schema);
        let compiled = cell.get_or_init(|| async { JsonSchema::compile(schema).await.map(Arc::new) }).await;
        let compiled = compiled.clone().map_err(Refusal::Schema)?;
        compiled.check(value).await
    }

    fn cell(&self, schema: &str) -> Cell {
        let mut compiled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        compiled.uses += 1;
        let uses = compiled.uses;
        if let Some((cell, used)) = compiled.schemas.get_mut(schema) {
            *used = uses;
            return cell.clone();
        }
        while compiled.size + schema.len() > MAX_COMPILED {
            let oldest = compiled.schemas.iter().min_by_key(|(_, (_, used))| *used);
            let Some(oldest) = oldest.map(|(text, _)| text.clone()) else { break };
            compiled.size -= oldest.len();
            compiled.schemas.remove(&oldest);
        }
        let cell = Cell::default();
        compiled.size += schema.len();
        compiled.schemas.insert(schema.into(), (cell.clone(), uses));
        cell
    }
}

#[cfg(test)]
mod tests;
