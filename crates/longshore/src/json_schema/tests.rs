use serde_json::json;

use super::*;

fn compiled(schema: &Value) -> Result<JsonSchema, String> {
    JsonSchema::build(&schema.to_string(), Budget::default())
}

fn refused(schema: &Value, part: &str) {
    let error = compiled(schema).err().unwrap_or_else(|| panic!("accepted: {part}"));
    assert!(error.contains(part), "{error}");
}

/// Definitions `d0` to `dn`, of which each one but the last comes from the reference to the next one.
fn chain(n: usize, link: impl Fn(Value) -> Value) -> Value {
    let mut defs: serde_json::Map<String, Value> =
        (0..n).map(|i| (format!("d{i}"), link(json!({ "$ref": format!("#/$defs/d{}", i + 1) })))).collect();
    defs.insert(format!("d{n}"), json!({ "type": "object" }));
    json!({ "$ref": "#/$defs/d0", "$defs": defs })
}

fn nested(levels: usize) -> Value {
    (0..levels).fold(json!({}), |inner, _| json!({ "x": inner }))
}

#[test]
fn loops_and_fan_out_are_refused() {
    refused(&json!({ "not": { "$ref": "#" } }), "leads back to itself");
    refused(
        &json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/a" } } }),
        "leads back to itself",
    );
    refused(&json!({ "$id": "T", "anyOf": [{ "$ref": "T" }] }), "leads back to itself");
    refused(
        &json!({ "properties": { "a": { "if": { "$ref": "#/properties/a" } } } }),
        "leads back to itself",
    );
    refused(&chain(30, |next| json!({ "allOf": [next, next] })), "apply to one value");
    refused(&chain(30, |next| json!({ "dependentSchemas": { "a": next, "b": next } })), "apply to one value");
    refused(&chain(70, |next| next), "nested subschemas");
    // Of an accepted one, the numbers are small.
    assert!(compiled(&chain(5, |next| json!({ "allOf": [next, next] }))).is_ok());
}

#[test]
fn what_compiles_to_much_more_than_its_text_is_refused() {
    refused(
        &chain(9, |next| json!({ "allOf": [next, next], "unevaluatedProperties": { "type": "string" } })),
        "unevaluatedProperties",
    );
    let ids = (0..6)
        .map(|i| (format!("r{i}"), json!({ "$id": format!("r{i}") })))
        .collect::<serde_json::Map<_, _>>();
    refused(&json!({ "$defs": ids }), "`$id`");
    refused(&json!({ "pattern": "((a{100}){100}){100}" }), "regular expressions");
    let refs: Vec<Value> = (0..1001).map(|_| json!({ "$ref": "#/$defs/a" })).collect();
    refused(&json!({ "prefixItems": refs, "$defs": { "a": {} } }), "use at most 1000");
    refused(&json!({ "title": "x".repeat(64 * 1024) }), "bytes");
}

#[test]
fn references_stay_within_the_schema() {
    for reference in ["https://json-schema.org/draft/2020-12/schema", "other.json", "#/$defs/b", "#b"] {
        refused(&json!({ "$ref": reference, "$defs": { "a": {} } }), "not in the schema");
    }
    refused(&json!({ "items": { "$dynamicRef": "#a" } }), "not supported");
    // In a constant it is data.
    assert!(compiled(&json!({ "const": { "$ref": "https://example.com" } })).is_ok());
    refused(&json!({ "$ref": "#/const", "const": { "$ref": "#/const/a", "a": {} } }), "in a value");
    let examples: Vec<Value> = (0..9).map(|n| json!({ "id": n.to_string() })).collect();
    let named =
        json!({ "properties": { "default": { "$ref": "#/$defs/a" }, "id": {} }, "$defs": { "a": {} } });
    assert!(compiled(&json!({ "examples": examples })).is_ok() && compiled(&named).is_ok());
    for reference in ["#/$defs/a", "#/%24defs/a", "#anchor", "urn:a"] {
        let a = json!({ "$id": "urn:a", "type": "integer" });
        let a = if reference == "#anchor" { json!({ "$anchor": "anchor", "type": "integer" }) } else { a };
        let schema = json!({ "$ref": reference, "$defs": { "a": a } });
        let schema = compiled(&schema).unwrap_or_else(|error| panic!("{reference}: {error}"));
        assert!(schema.verdict(&json!(1)).is_ok() && schema.verdict(&json!("1")).is_err(), "{reference}");
    }
}

#[test]
fn the_budget_decides_which_payloads_are_checked() {
    let schema = json!({ "type": "array", "items": { "type": "integer" } }).to_string();
    let budget = Budget { steps: 100, inline: 10, details: 10 };
    let schema = JsonSchema::build(&schema, budget).expect("a schema");
    let steps = |len: usize| {
        let value = json!(vec![1; len]);
        schema.outline.measure(&value, budget.steps, Repeated::Once).map(|cost| cost.steps)
    };
    assert!(steps(2).expect("few") <= 10 && (11..=100).contains(&steps(20).expect("some")));
    assert_eq!(steps(100), Err(Excess::Steps));
}

#[test]
fn the_result_of_a_recursive_reference_is_counted_once_per_value() {
    let branch = json!({ "properties": { "x": { "$ref": "#" } } });
    let schema = compiled(&json!({ "anyOf": [branch, branch, branch] })).expect("a schema");
    let cost = |levels, repeated| schema.outline.measure(&nested(levels), 1_000_000, repeated);
    assert!(cost(60, Repeated::Once).expect("grows with the payload").steps < 50_000);
    assert_eq!(cost(60, Repeated::Always).map(drop), Err(Excess::Steps));
    // If several definitions refer to each other, `jsonschema` does not remember all of their results.
    let branch = |to: &str| json!({ "properties": { "x": { "$ref": to } } });
    let twin = |to: &str| json!({ "anyOf": [branch(to), branch(to), branch(to)] });
    let twins = json!({ "$ref": "#/$defs/a", "$defs": { "a": twin("#/$defs/b"), "b": twin("#/$defs/a") } });
    let twins = compiled(&twins).expect("a schema");
    assert_eq!(twins.outline.measure(&nested(60), 1_000_000, Repeated::Once).map(drop), Err(Excess::Steps));
    assert!(twins.outline.measure(&nested(4), 1_000_000, Repeated::Once).is_ok());
}

#[test]
fn an_invalid_payload_of_many_branches_is_refused_without_collecting_all_errors() {
    let branch = |last: &str| json!({ "properties": { "x": { "$ref": "#" } }, "required": [last] });
    let schema = compiled(&json!({ "anyOf": [branch("a"), branch("b"), branch("c")] })).expect("a schema");
    let Err(Refusal::Payload { reason, .. }) = schema.verdict(&nested(24)) else { panic!("not refused") };
    assert!(reason.contains("too large to say where"), "{reason}");
    let Err(Refusal::Payload { at, reason }) = schema.verdict(&json!({})) else { panic!("not refused") };
    assert!(at.is_empty() && !reason.contains("too large"), "{reason}");
}

#[tokio::test]
async fn compiled_schemas_are_kept_up_to_a_size() {
    let schemas = JsonSchemas::default();
    let schema = |n: usize| json!({ "title": "x".repeat(60_000), "const": n }).to_string();
    for n in 0..30 {
        assert!(schemas.check(&schema(n), json!(n)).await.is_ok());
        assert!(schemas.check(&schema(0), json!(0)).await.is_ok(), "used often");
    }
    let kept = schemas.0.lock().expect("a lock");
    assert!(kept.size <= MAX_COMPILED && kept.schemas.len() == 17, "{}", kept.schemas.len());
    assert!(kept.schemas.contains_key(schema(0).as_str()) && kept.schemas.contains_key(schema(29).as_str()));
    assert!(!kept.schemas.contains_key(schema(1).as_str()));
}

#[tokio::test]
async fn a_check_that_panics_fails_and_its_thread_goes_on() {
    for _ in 0..5 {
        assert!(threads::run(|| panic!("on purpose")).await.is_err());
    }
    assert_eq!(threads::run(|| 7).await, Ok(7));
}
