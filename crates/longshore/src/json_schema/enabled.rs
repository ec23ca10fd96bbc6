//! JSON Schemas of payloads.

use serde_json::Value;

/// A compiled JSON Schema.
pub(crate) struct JsonSchema(Box<jsonschema::Validator>);

impl JsonSchema {
    /// Compiles a schema, or returns what is wrong with it.
    pub(crate) fn compile(schema: &str) -> Result<Self, String> {
        let schema: Value = serde_json::from_str(schema).map_err(|error| error.to_string())?;
        // This regex engine runs in linear time. Patterns that it does not support are
        // refused.
        let patterns = jsonschema::PatternOptions::regex();
        let validator = jsonschema::options().with_pattern_options(patterns).build(&schema);
        validator.map(|validator| JsonSchema(Box::new(validator))).map_err(|error| error.to_string())
    }

    /// Checks a value. The error is where the value is wrong, as a JSON pointer, and
    /// what is wrong with it.
    pub(crate) fn check(&self, value: &Value) -> Result<(), (String, String)> {
        // Most payloads are valid, and `is_valid` is faster than collecting errors.
        if self.0.is_valid(value) {
            return Ok(());
        }
        match self.0.iter_errors(value).next() {
            None => Ok(()),
            // Masked: the message must not repeat the payload.
            Some(error) => Err((error.instance_path.to_string(), error.masked().to_string())),
        }
    }
}
