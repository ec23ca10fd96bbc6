//! JSON objects that are passed on unchanged in `--json` output: fields that this version
//! does not know are kept, and numbers keep their exact text.

use std::fmt;

use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

/// A JSON object whose values are kept as text, in their original order.
#[derive(Debug)]
pub(crate) struct RawObject(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for RawObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;

        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = RawObject;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawObject, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(RawObject(fields))
            }
        }

        deserializer.deserialize_map(FieldsVisitor)
    }
}

impl Serialize for RawObject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_written_exactly_as_it_was_read() {
        let text = r#"{"z":123456789012345678901234567890,"a":1.00,"new":{"b": [ 1 ]}}"#;
        let fields: RawObject = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&fields).unwrap(), text);
        assert!(serde_json::from_str::<RawObject>("[]").is_err());
    }
}
