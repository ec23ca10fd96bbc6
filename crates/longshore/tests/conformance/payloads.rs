//! The client checks the kind and the payload of every new job, whichever way it is
//! enqueued, and before it looks up a key.

use longshore::{Edit, Error, NewJob, NewKind, NewSchedule, Status, UnknownKinds};

use crate::fixture::*;

cases! {
    a_payload_must_match_the_schema_of_its_kind_on_every_path,
    a_payload_is_checked_before_its_key_is_looked_up,
    an_edited_payload_must_match_the_schema_of_its_kind,
    a_schema_put_by_another_client_takes_effect,
    a_kind_without_a_valid_schema_refuses_its_jobs,
    a_schema_that_would_never_end_refuses_only_the_jobs_of_its_kind,
    a_recursive_schema_checks_a_payload_nested_24_deep,
    a_payload_that_takes_too_long_to_check_is_refused,
    an_unknown_kind_is_allowed_unless_the_client_refuses_it,
    a_built_in_check_applies_to_its_kind_only,
}

/// Registers the kind `mail`, whose payload must be an object with a string `to`.
async fn register_mail(fixture: &Fixture) {
    let schema = raw(r#"{"type":"object","required":["to"],"properties":{"to":{"type":"string"}}}"#);
    let kind = NewKind { schema: Some(schema), ..NewKind::new("mail") };
    fixture.put_kinds(&[kind]).await.expect("put_kinds");
}

fn good() -> NewJob {
    NewJob::new("mail", &serde_json::json!({ "to": "ada" }))
}

fn bad() -> NewJob {
    NewJob::new("mail", &serde_json::json!({ "to": 7 }))
}

fn is_about(error: &Error, field: &str, text: &str) {
    assert_eq!(error.field(), Some(field), "{error}");
    assert!(error.to_string().contains(text), "{error}");
}

async fn a_payload_must_match_the_schema_of_its_kind_on_every_path(fixture: Fixture) {
    register_mail(&fixture).await;
    is_about(&fixture.enqueue(bad()).await.expect_err("one"), "payload", "payload/to: ");
    let many = fixture.enqueue_many([good(), bad()]).await.expect_err("many");
    is_about(&many, "jobs[1].payload", "jobs[1]: payload/to: ");
    let schedule = NewSchedule::new("nightly", "0 2 * * *", bad());
    is_about(&fixture.put_schedule(schedule).await.expect_err("schedule"), "payload", "payload/to: ");
    let in_transaction = match fixture.engine() {
        Engine::Postgres => {
            let mut connection = fixture.postgres().await;
            fixture.enqueue_in(&mut connection, [bad()]).await
        }
        Engine::Sqlite => tokio::task::block_in_place(|| {
            let connection = rusqlite::Connection::open(fixture.file()).expect("open");
            tokio::runtime::Handle::current().block_on(fixture.enqueue_in(&connection, [bad()]))
        }),
    };
    is_about(&in_transaction.expect_err("transaction"), "jobs[0].payload", "payload/to: ");
    assert_eq!(fixture.count(Status::Queued).await, 0, "nothing was stored");
    fixture.add(good()).await;
    fixture.put_schedule(NewSchedule::new("nightly", "0 2 * * *", good())).await.expect("put_schedule");
}

async fn a_payload_is_checked_before_its_key_is_looked_up(fixture: Fixture) {
    register_mail(&fixture).await;
    fixture.add(good().idempotency_key("once")).await;
    let repeated = fixture.enqueue(bad().idempotency_key("once")).await;
    is_about(&repeated.expect_err("invalid"), "payload", "payload/to: ");
}

async fn an_edited_payload_must_match_the_schema_of_its_kind(fixture: Fixture) {
    register_mail(&fixture).await;
    let id = fixture.add(good()).await;
    let edited = fixture.edit(id, Edit::default().payload(r#"{"to":7}"#)).await;
    is_about(&edited.expect_err("invalid"), "payload", "payload/to: ");
    assert_eq!(fixture.job(id).await.payload.get(), r#"{"to":"ada"}"#);
    fixture.edit(id, Edit::default().payload(r#"{"to":"grace"}"#)).await.expect("edit");
}

async fn a_schema_put_by_another_client_takes_effect(fixture: Fixture) {
    fixture.add(bad()).await;
    let other = fixture.second_client().await;
    let kind = NewKind { schema: Some(raw("false")), ..NewKind::new("mail") };
    other.put_kinds(&[kind]).await.expect("put_kinds");
    crate::worker::until("the schema applies", || async { fixture.enqueue(bad()).await.is_err() }).await;
}

async fn a_kind_without_a_valid_schema_refuses_its_jobs(fixture: Fixture) {
    let kind = NewKind { schema: Some(raw(r#"{"type":"nonsense"}"#)), ..NewKind::new("mail") };
    fixture.put_kinds(&[kind]).await.expect("put_kinds");
    is_about(&fixture.enqueue(good()).await.expect_err("unusable"), "kind", "schema of `mail` is invalid");
    fixture.add(job("sms")).await;
}

/// Schemas whose check of any payload takes forever, or all memory.
pub(crate) fn endless_schemas() -> [serde_json::Value; 3] {
    let next = |n: u32| serde_json::json!({ "$ref": format!("#/$defs/l{}", n + 1) });
    let mut levels: serde_json::Map<_, _> =
        (0..30).map(|n| (format!("l{n}"), serde_json::json!({ "allOf": [next(n), next(n)] }))).collect();
    levels.insert("l30".into(), serde_json::json!({}));
    [
        serde_json::json!({ "not": { "$ref": "#" } }),
        serde_json::json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } }),
        serde_json::json!({ "$ref": "#/$defs/l0", "$defs": levels }),
    ]
}

async fn a_schema_that_would_never_end_refuses_only_the_jobs_of_its_kind(fixture: Fixture) {
    for (n, schema) in endless_schemas().into_iter().enumerate() {
        let schema = raw(&schema.to_string());
        let name = format!("endless-{n}");
        fixture
            .put_kinds(&[NewKind { schema: Some(schema), ..NewKind::new(&name) }])
            .await
            .expect("put_kinds");
        // Also in a process that starts later.
        for client in [fixture.client(), fixture.second_client().await] {
            for payload in [serde_json::json!(1), serde_json::json!({ "a": {} })] {
                let refused = client.enqueue(NewJob::new(&name, &payload)).await.expect_err("endless");
                is_about(&refused, "kind", &format!("schema of `{name}` is invalid"));
                is_about(&refused, "kind", "PUT /kinds/{kind}");
            }
            client.enqueue(job("sms")).await.expect("another kind");
        }
        let usable = NewKind { schema: Some(raw("{}")), ..NewKind::new(&name) };
        fixture.put_kinds(&[usable]).await.expect("put_kinds");
        fixture.enqueue(NewJob::new(&name, &1)).await.expect("until the schema changes");
    }
}

/// An object in an object, and so on.
fn nested(levels: u32, leaf: serde_json::Value) -> serde_json::Value {
    (0..levels).fold(leaf, |inner, _| serde_json::json!({ "inner": inner }))
}

async fn a_recursive_schema_checks_a_payload_nested_24_deep(fixture: Fixture) {
    // Every branch visits what is inside before it can fail.
    let branch = |member: &str| {
        let inner = serde_json::json!({ "inner": { "$ref": "#/$defs/node" } });
        serde_json::json!({ "type": "object", "properties": inner, "required": [member] })
    };
    let schema = serde_json::json!({
        "$ref": "#/$defs/node",
        "$defs": { "node": { "anyOf": [
            branch("zip"), branch("zap"), branch("zop"), branch("inner"), { "type": "integer" },
        ] } },
    });
    let kind = NewKind { schema: Some(raw(&schema.to_string())), ..NewKind::new("tree") };
    fixture.put_kinds(&[kind]).await.expect("put_kinds");
    let tree = |leaf| NewJob::new("tree", &nested(24, leaf));
    fixture.enqueue(tree(serde_json::json!(1))).await.expect("valid");
    let refused = fixture.enqueue(tree(serde_json::json!("x"))).await.expect_err("invalid");
    is_about(&refused, "payload", "does not match the schema");
    let linked = r##"{"type":"object","properties":{"inner":{"$ref":"#"}}}"##;
    let kind = NewKind { schema: Some(raw(linked)), ..NewKind::new("list") };
    fixture.put_kinds(&[kind]).await.expect("put_kinds");
    let list = |leaf| NewJob::new("list", &nested(24, leaf));
    fixture.enqueue(list(serde_json::json!({}))).await.expect("valid");
    let refused = fixture.enqueue(list(serde_json::json!(1))).await.expect_err("invalid");
    is_about(&refused, "payload", &format!("payload{}: ", "/inner".repeat(24)));
}

async fn a_payload_that_takes_too_long_to_check_is_refused(fixture: Fixture) {
    // Two definitions that refer to each other several times: each level multiplies the work.
    let branches = |other: &str| {
        let branch = serde_json::json!({ "properties": { "inner": { "$ref": other } }, "required": ["x"] });
        serde_json::json!({ "anyOf": [branch, branch, branch, true] })
    };
    let schema = serde_json::json!({
        "$ref": "#/$defs/a", "$defs": { "a": branches("#/$defs/b"), "b": branches("#/$defs/a") },
    });
    let kind = NewKind { schema: Some(raw(&schema.to_string())), ..NewKind::new("twins") };
    fixture.put_kinds(&[kind]).await.expect("put_kinds");
    let twins = |levels| NewJob::new("twins", &nested(levels, serde_json::json!(1)));
    let refused = fixture.enqueue(twins(40)).await.expect_err("too much");
    is_about(&refused, "payload", "steps to check against the schema of kind `twins`");
    fixture.enqueue(twins(5)).await.expect("smaller payloads of the kind are still checked");
}

async fn an_unknown_kind_is_allowed_unless_the_client_refuses_it(fixture: Fixture) {
    fixture.add(job("greet")).await;
    let strict = fixture.client().unknown_kinds(UnknownKinds::Refuse);
    let refused = strict.enqueue(job("greet")).await.expect_err("unknown");
    is_about(&refused, "kind", "`greet` is not registered");
    strict.put_kinds(&[NewKind::new("greet")]).await.expect("put_kinds");
    strict.enqueue(job("greet")).await.expect("registered now");
    let mistyped = strict.enqueue(job("gret")).await.expect_err("unknown");
    is_about(&mistyped, "kind", "`gret` is not registered (did you mean `greet`?); start a worker");
    let unlike = strict.enqueue(job("report")).await.expect_err("unknown");
    assert!(!unlike.to_string().contains("did you mean"), "{unlike}");
}

async fn a_built_in_check_applies_to_its_kind_only(fixture: Fixture) {
    let client = fixture.client().unknown_kinds(UnknownKinds::Refuse).check_payloads(|kind, payload| {
        let check = || if payload == "1" { Ok(()) } else { Err("must be 1".into()) };
        (kind == "one").then(check)
    });
    client.enqueue(NewJob::new("one", &1)).await.expect("valid");
    is_about(
        &client.enqueue(NewJob::new("one", &2)).await.expect_err("invalid"),
        "payload",
        "payload: must be 1",
    );
    is_about(&client.enqueue(NewJob::new("two", &1)).await.expect_err("unknown"), "kind", "`two`");
}
