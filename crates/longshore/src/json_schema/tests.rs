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
        assert!(
            schema.verdict(&json!(1), 1_000_000).is_ok() && schema.verdict(&json!("1"), 1_000_000).is_err(),
            "{reference}"
        );
    }
}

#[test]
fn the_budget_decides_which_payloads_are_checked() {
    let schema = json!({ "type": "array", "items": { "type": "integer" } }).to_string();
    let budget = Budget { steps: 100, steps_per_byte: 0, inline: 10, details: 10 };
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
    let Err(Refusal::Payload { reason, .. }) = schema.verdict(&nested(24), 1_000_000) else {
        panic!("not refused")
    };
    assert!(reason.contains("too large to say where"), "{reason}");
    let Err(Refusal::Payload { at, reason }) = schema.verdict(&json!({}), 1_000_000) else {
        panic!("not refused")
    };
    assert!(at.is_empty() && !reason.contains("too large"), "{reason}");
}

#[tokio::test]
async fn a_large_payload_may_take_longer() {
    let budget = Budget { steps: 100, steps_per_byte: 10, inline: 10, details: 10 };
    let checked = async |schema: Value, value: Value| {
        Arc::new(JsonSchema::build(&schema.to_string(), budget).expect("a schema")).check(value).await
    };
    let integers = json!({ "type": "array", "items": { "type": "integer" } });
    assert!(checked(integers.clone(), json!(vec![1; 1_000])).await.is_ok());
    let mut last_wrong = vec![json!(1); 1_000];
    last_wrong.push(json!("1"));
    let Err(Refusal::Payload { at, .. }) = checked(integers, json!(last_wrong)).await else {
        panic!("not refused")
    };
    assert_eq!(at, "/1000");
    // What grows faster than the payload is still refused.
    let many = json!({ "items": { "allOf": vec![json!({ "type": "integer", "minimum": 0 }); 30] } });
    let Err(Refusal::Cost(reason)) = checked(many, json!(vec![1; 1_000])).await else {
        panic!("not refused")
    };
    assert!(reason.contains("more than 20010 steps"), "{reason}");
}

#[tokio::test]
async fn a_long_text_is_not_matched_against_a_heavy_pattern() {
    let checked = async |pattern: &str| {
        let schema = compiled(&json!({ "pattern": pattern })).expect("a schema");
        Arc::new(schema).check(json!("ab".repeat(500_000))).await
    };
    // Takes 2 s.
    assert!(matches!(checked("[ab]*a[ab]{600}c").await, Err(Refusal::Cost(_))));
    assert!(checked("^[a-z]+$").await.is_ok());
}

#[test]
fn items_whose_hashes_can_collide_are_counted_as_compared_with_each_other() {
    let schema = compiled(&json!({ "uniqueItems": true })).expect("a schema");
    let steps = |items: Vec<Value>| {
        let cost = schema.outline.measure(&json!(items), u64::MAX, Repeated::Once);
        cost.expect("a cost").steps
    };
    let each = |item: fn(u32) -> Value| (0..1_000).map(item).collect::<Vec<_>>();
    // All of these have the hash of `n` or of no number at all.
    assert!(steps(each(|n| json!([n]))) > 900_000);
    assert!(steps(each(|n| json!({ "a": n }))) > 900_000);
    assert!(steps([each(|n| json!(n)), vec![json!([1])]].concat()) > 400_000);
    assert!(steps(each(|n| json!((1_u64 << 63) + u64::from(n)))) > 400_000);
    let items: [fn(u32) -> Value; 3] =
        [|n| json!(n), |n| json!(n.to_string()), |n| json!(f64::from(n) + 0.5)];
    for item in items {
        assert!(steps(each(item)) < 2_000);
    }
}

#[test]
fn a_pattern_that_is_translated_again_and_again_is_refused() {
    for (escape, many, some) in
        [(r"\cA", 6_600, 300), (r"\d", 6_600, 300), (r"\w", 6_600, 200), (r"\s", 500, 40)]
    {
        refused(&json!({ "pattern": escape.repeat(many) }), "regular expressions");
        refused(&json!({ "patternProperties": { escape.repeat(many): {} } }), "regular expressions");
        assert!(compiled(&json!({ "pattern": escape.repeat(some) })).is_ok(), "{escape}");
    }
    // This has backslashes, and no escapes of letters.
    assert!(compiled(&json!({ "pattern": r"\\d".repeat(500) })).is_ok());
}

#[test]
fn ordinary_patterns_are_within_the_limits() {
    for pattern in [
        r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})$",
        r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
        r"^[^@\s]+@[^@\s]+\.[^@\s]+$",
        r"^.{1,255}$",
        r"^[\w.-]{1,255}$",
        r"^\p{L}[\p{L} '-]*$",
    ] {
        let schema = compiled(&json!({ "pattern": pattern }));
        assert!(schema.is_ok(), "{pattern}: {}", schema.err().unwrap_or_default());
    }
}

#[test]
fn the_size_of_patterns_is_limited() {
    let patterns = |n: usize| (0..n).map(|i| json!({ "pattern": format!("^a+{i}") })).collect::<Vec<_>>();
    refused(&json!({ "prefixItems": patterns(600) }), "600 different regular expressions");
    let classes = |n: usize| (0..n).map(|i| json!({ "pattern": format!(r"\p{{L}}{i}") })).collect::<Vec<_>>();
    refused(&json!({ "prefixItems": classes(120) }), "120 different regular expressions");
    let repeated = [patterns(400), patterns(400)].concat();
    let schema = compiled(&json!({ "prefixItems": repeated })).expect("400 patterns");
    assert!(schema.kept(crate::rules::enqueue::MAX_SCHEMA) <= MAX_COMPILED, "it can be kept");
}

#[tokio::test]
async fn patterns_count_as_what_they_may_take() {
    let schemas = JsonSchemas::default();
    let schema = |n: usize| {
        let patterns: Vec<Value> = (0..300).map(|i| json!({ "pattern": format!("^a+{i}") })).collect();
        json!({ "prefixItems": patterns, "title": n.to_string() }).to_string()
    };
    for n in 0..5 {
        assert!(schemas.check(&schema(n), json!(["a0"])).await.is_ok());
    }
    let kept = schemas.0.lock().expect("a lock");
    assert_eq!(kept.schemas.len(), 3);
    assert_eq!(kept.size, kept.schemas.values().map(|entry| entry.size).sum::<usize>());
    assert!(kept.size <= MAX_COMPILED && kept.size >= 3 * 300 * 2 * MAX_MATCHES, "{}", kept.size);
    assert!((2..5).all(|n| kept.schemas.contains_key(schema(n).as_str())));
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
