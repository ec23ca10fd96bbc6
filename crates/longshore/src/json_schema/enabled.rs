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

use cost::{Excess, MAX_MATCHES, MAX_PATTERN, Outline, Repeated};

/// The maximum size of the schemas that are kept compiled, in bytes of memory as they are estimated.
const MAX_COMPILED: usize = 64 * 1024 * 1024;
/// What a byte of a schema is counted as, compiled. That leaves out its regular expressions.
const KEPT_PER_BYTE: usize = 64;
/// The depth up to which a check runs on the caller's thread.
const INLINE_DEPTH: usize = 64;

/// What one check may cost. A step is about the check of one keyword, a few dozen nanoseconds.
#[derive(Clone, Copy)]
struct Budget {
    /// All of it, for a small payload.
    steps: u64,
    /// All of it per byte of a large payload.
    steps_per_byte: u64,
    /// What runs on the caller's thread.
    inline: u64,
    /// Finding out what is wrong, if that collects the errors of several branches.
    details: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Budget { steps: 1_000_000, steps_per_byte: 10, inline: 10_000, details: 50_000 }
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
    /// The check cannot run now, for this reason.
    Unavailable(String),
}

impl From<threads::Failed> for Refusal {
    fn from(failed: threads::Failed) -> Self {
        if failed.panicked { Refusal::Cost(failed.reason) } else { Refusal::Unavailable(failed.reason) }
    }
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
        threads::run(move || Self::build(&schema, Budget::default())).await.map_err(|failed| failed.reason)?
    }

    fn build(text: &str, budget: Budget) -> Result<Self, String> {
        let schema: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let outline = Outline::of(text, &schema)?;
        // This regex engine runs in linear time. Patterns that it does not support are
        // refused.
        let patterns =
            jsonschema::PatternOptions::regex().size_limit(MAX_PATTERN).dfa_size_limit(MAX_MATCHES);
        let validator = jsonschema::options().with_pattern_options(patterns).build(&schema);
        let validator = validator.map_err(|error| error.to_string())?;
        Ok(JsonSchema { outline, validator, budget })
    }

    /// What it takes to keep it, in bytes, if its text has this length.
    fn kept(&self, text: usize) -> usize {
        text * KEPT_PER_BYTE + self.outline.patterns
    }

    /// Checks a value.
    async fn check(self: Arc<Self>, value: Value) -> Result<(), Refusal> {
        let steps = self.budget.steps;
        match self.outline.measure(&value, steps, Repeated::Once) {
            Ok(cost) if cost.steps <= self.budget.inline && cost.depth <= INLINE_DEPTH => {
                self.verdict(&value, steps)
            }
            Ok(_) => threads::run(move || self.verdict(&value, steps)).await.map_err(Refusal::from)?,
            Err(Excess::Depth) => Err(Refusal::Cost("nests too deeply to check".into())),
            // It may be as long as this because the payload is.
            Err(Excess::Steps) => {
                threads::run(move || self.check_large(&value)).await.map_err(Refusal::from)?
            }
        }
    }

    fn check_large(&self, value: &Value) -> Result<(), Refusal> {
        let steps = self.budget.steps.max(self.budget.steps_per_byte.saturating_mul(json_size(value)));
        match self.outline.measure(value, steps, Repeated::Once) {
            Ok(_) => self.verdict(value, steps),
            Err(Excess::Depth) => Err(Refusal::Cost("nests too deeply to check".into())),
            Err(Excess::Steps) => Err(Refusal::Cost(format!("takes more than {steps} steps to check"))),
        }
    }

    /// Checks a value that was measured. `steps` is what it may cost.
    fn verdict(&self, value: &Value, steps: u64) -> Result<(), Refusal> {
        // Most payloads are valid, and `is_valid` is faster than collecting errors.
        if self.validator.is_valid(value) {
            return Ok(());
        }
        // `jsonschema` visits a failing branch again on every level above it, and keeps all errors.
        let max_steps = if self.outline.collects { self.budget.details } else { steps };
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

/// The length of a value as JSON without spaces.
fn json_size(value: &Value) -> u64 {
    struct Counter(u64);
    impl std::io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len() as u64;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter(0);
    // Writing to it cannot fail. If it did, the value would count as shorter, so it would be allowed less.
    let _ = serde_json::to_writer(&mut counter, value);
    counter.0
}

/// Schemas that are compiled when they are first used, by their text.
#[derive(Default)]
pub(crate) struct JsonSchemas(Mutex<Compiled>);

#[derive(Default)]
struct Compiled {
    schemas: HashMap<Arc<str>, Entry>,
    /// What all of them take.
    size: usize,
    uses: u64,
}

struct Entry {
    cell: Cell,
    /// The number of the use at which it was used last.
    used: u64,
    /// What it takes. Its regular expressions are added when they are known.
    size: usize,
}

type Cell = Arc<OnceCell<Result<Arc<JsonSchema>, String>>>;

impl Compiled {
    /// Removes what was used longest ago, until there is room for this size.
    fn make_room(&mut self, size: usize) {
        while self.size + size > MAX_COMPILED {
            let oldest = self.schemas.iter().min_by_key(|(_, entry)| entry.used);
            let Some(oldest) = oldest.map(|(text, _)| text.clone()) else { break };
            self.remove(&oldest);
        }
    }

    fn remove(&mut self, text: &str) -> Option<(Arc<str>, Entry)> {
        let (text, entry) = self.schemas.remove_entry(text)?;
        self.size -= entry.size;
        Some((text, entry))
    }

    fn insert(&mut self, text: Arc<str>, entry: Entry) {
        self.make_room(entry.size);
        self.size += entry.size;
        self.schemas.insert(text, entry);
    }
}

impl JsonSchemas {
    /// Checks a value against a schema.
    pub(crate) async fn check(&self, schema: &str, value: Value) -> Result<(), Refusal> {
        let cell = self.cell(schema);
        let compile = || async {
            let text = schema.to_owned();
            let built = threads::run(move || JsonSchema::build(&text, Budget::default())).await?;
            Ok::<_, threads::Failed>(built.map(Arc::new))
        };
        // That a schema is wrong is remembered, and that the threads are busy is not.
        let compiled = cell.get_or_try_init(compile).await.map_err(Refusal::from)?;
        let compiled = compiled.clone().map_err(Refusal::Schema)?;
        self.resize(schema, compiled.kept(schema.len()));
        compiled.check(value).await
    }

    fn cell(&self, schema: &str) -> Cell {
        let mut compiled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        compiled.uses += 1;
        let uses = compiled.uses;
        if let Some(entry) = compiled.schemas.get_mut(schema) {
            entry.used = uses;
            return entry.cell.clone();
        }
        let cell = Cell::default();
        let size = schema.len() * KEPT_PER_BYTE;
        compiled.insert(schema.into(), Entry { cell: cell.clone(), used: uses, size });
        cell
    }

    /// Sets what a schema takes, now that it is compiled.
    fn resize(&self, schema: &str, size: usize) {
        let mut compiled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if compiled.schemas.get(schema).is_none_or(|entry| entry.size == size) {
            return;
        }
        if let Some((text, entry)) = compiled.remove(schema) {
            compiled.insert(text, Entry { size, ..entry });
        }
    }
}

#[cfg(test)]
mod tests;
