//! Without the feature `schema`, payloads are not checked against JSON Schemas.

use serde_json::Value;

/// Why a payload is refused.
#[expect(dead_code, reason = "nothing is refused")]
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

/// A schema that accepts everything.
pub(crate) struct JsonSchema;

#[cfg_attr(not(feature = "api"), expect(dead_code, reason = "the API checks schemas"))]
impl JsonSchema {
    pub(crate) async fn compile(_: &str) -> Result<Self, String> {
        Ok(JsonSchema)
    }
}

/// Schemas that accept everything.
#[derive(Default)]
pub(crate) struct JsonSchemas;

impl JsonSchemas {
    pub(crate) async fn check(&self, _: &str, _: Value) -> Result<(), Refusal> {
        Ok(())
    }
}
