//! Kinds that workers describe in a lease call, and the lists of kinds.

use longshore::{NewKind, Scope};
use serde_json::{Value, json};

use super::auth::{token, with_tokens_required};
use super::client::HttpClient;
use crate::fixture::*;

cases! {
    a_worker_announces_its_kinds,
    a_worker_with_a_limited_token_works_although_there_are_too_many_kinds,
    a_token_limited_to_queues_announces_kinds_of_its_queues,
    a_schema_that_would_never_end_is_refused_when_it_is_registered,
    kinds_are_listed_in_pages_and_schemas_only_on_request,
}

async fn a_worker_announces_its_kinds(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Work, None).await;
    let http = with_tokens_required(&fixture).with_token(&secret);
    let announce = |kind: Value| {
        let (http, body) = (http.clone(), json!({ "kinds": ["greet", "wave"], "announce": [kind] }));
        async move { http.post("/leases", &body).await }
    };
    let schema = json!({ "type": "object", "required": ["name"] });
    announce(json!({ "name": "greet", "schema": schema, "defaults": { "max_attempts": 7 } }))
        .await
        .expect_status(200);
    let kinds = fixture.kinds().await.expect("kinds");
    assert_eq!(kinds.iter().map(|kind| kind.name.as_str()).collect::<Vec<_>>(), ["greet", "wave"]);
    assert!(kinds[0].schema.as_ref().is_some_and(|schema| schema.get().contains("required")));
    let (_, secret) = token(&fixture, Scope::Enqueue, None).await;
    let client = http.with_token(&secret);
    client.post("/jobs", &json!({ "kind": "greet", "payload": {} })).await.expect_problem(
        422,
        "validation",
        "name",
    );
    let job = client
        .post("/jobs", &json!({ "kind": "greet", "payload": { "name": "Ada" } }))
        .await
        .expect_status(201);
    assert_eq!(job.json()["max_attempts"], 7);
    // Null leaves what is stored, and another schema replaces it.
    announce(json!({ "name": "greet", "schema": null, "defaults": null })).await.expect_status(200);
    announce(json!({ "name": "greet", "schema": {} })).await.expect_status(200);
    client.post("/jobs", &json!({ "kind": "greet", "payload": {} })).await.expect_status(201);
    for (kind, part) in [
        (json!({ "name": "other" }), "announce[0]: name: `other`"),
        (json!({ "name": "" }), "announce[0]: name"),
        (json!({ "name": "greet", "schema": 7 }), "announce[0]: schema"),
        (
            json!({ "name": "greet", "schema": { "title": "x".repeat(256 * 1024) } }),
            "announce[0]: schema: has",
        ),
        (json!({ "name": "greet", "defaults": { "max_attempts": 0 } }), "announce[0]: defaults"),
        (json!({ "name": "greet", "defaults": { "colour": 1 } }), "announce[0]: defaults"),
    ] {
        announce(kind).await.expect_problem(422, "validation", part);
    }
    let twice = json!({ "announce": [{ "name": "greet" }, { "name": "greet" }] });
    http.post("/leases", &twice).await.expect_problem(
        422,
        "validation",
        "announce[1]: name: `greet` is described twice",
    );
}

async fn a_worker_with_a_limited_token_works_although_there_are_too_many_kinds(fixture: Fixture) {
    let open = with_tokens_required(&fixture);
    // The queue is named twice, as a script may do that collects queues.
    let (_, secret) = token(&fixture, Scope::Work, Some(&["mail", "mail"])).await;
    let http = open.with_token(&secret);
    for part in 0..3 {
        let kinds: Vec<String> = (0..1000).map(|i| format!("kind-{part}-{i}")).collect();
        http.post("/leases", &json!({ "queues": ["mail"], "kinds": kinds })).await.expect_status(200);
    }
    let id = fixture.add(job("kind-2-7").queue("mail")).await;
    let claim = json!({ "queues": ["mail"], "kinds": ["kind-2-7"] });
    let leased = http.post("/leases", &claim).await.expect_status(200).json();
    assert_eq!(leased["jobs"][0]["id"], json!(id));
    assert_eq!(fixture.kinds().await.expect("kinds").len(), 2000, "one token may have no more");
}

async fn a_token_limited_to_queues_announces_kinds_of_its_queues(fixture: Fixture) {
    let open = with_tokens_required(&fixture);
    let announce = async |secret: &str, name: &str, schema: &str, defaults: Value| {
        let kind = json!({ "name": name, "schema": { "type": schema }, "defaults": defaults });
        let body = json!({ "queues": ["mail"], "kinds": [name], "announce": [kind] });
        open.with_token(secret).post("/leases", &body).await
    };
    let (_, limited) = token(&fixture, Scope::Work, Some(&["mail", "post"])).await;
    fixture.put_kinds(&[NewKind::new("old")]).await.expect("put_kinds");
    announce(&limited, "old", "string", json!({ "priority": 3 })).await.expect_status(200);
    let greedy = json!({ "priority": 3, "queue": "mail" });
    announce(&limited, "new", "string", greedy).await.expect_status(200);
    announce(&limited, "other", "string", json!({ "queue": "default" })).await.expect_problem(
        403,
        "forbidden",
        "announce[0]: defaults",
    );
    let (_, secret) = token(&fixture, Scope::Enqueue, None).await;
    let client = open.with_token(&secret);
    let enqueue = async |body: Value| client.post("/jobs", &body).await;
    let old =
        enqueue(json!({ "kind": "old", "payload": 1, "queue": "mail" })).await.expect_status(201).json();
    assert_eq!(old["priority"], 0, "it was registered for all queues before");
    // Nobody else's jobs end up in this queue, or are checked against this schema.
    for (body, queue) in [
        (json!({ "kind": "new", "payload": 1 }), "default"),
        (json!({ "kind": "new", "payload": 1, "queue": "beta" }), "beta"),
    ] {
        let job = enqueue(body).await.expect_status(201).json();
        assert_eq!((&job["queue"], &job["priority"]), (&json!(queue), &json!(0)));
    }
    for queue in ["mail", "post"] {
        enqueue(json!({ "kind": "new", "payload": 1, "queue": queue })).await.expect_problem(
            422,
            "validation",
            "payload",
        );
        let job = enqueue(json!({ "kind": "new", "payload": "x", "queue": queue })).await.expect_status(201);
        assert_eq!((&job.json()["queue"], &job.json()["priority"]), (&json!(queue), &json!(3)));
    }
    // Another token for the same queues describes the same kind.
    let (_, rotated) = token(&fixture, Scope::Work, Some(&["mail", "post"])).await;
    announce(&rotated, "new", "integer", json!({ "priority": 4 })).await.expect_status(200);
    let job =
        enqueue(json!({ "kind": "new", "payload": 1, "queue": "post" })).await.expect_status(201).json();
    assert_eq!(job["priority"], 4);
    // A token for all queues replaces it.
    let (_, unlimited) = token(&fixture, Scope::Work, None).await;
    announce(&unlimited, "new", "boolean", json!({})).await.expect_status(200);
    announce(&limited, "new", "string", json!({ "priority": 5 })).await.expect_status(200);
    let job =
        enqueue(json!({ "kind": "new", "payload": true, "queue": "mail" })).await.expect_status(201).json();
    assert_eq!(job["priority"], 0);
    enqueue(json!({ "kind": "new", "payload": true })).await.expect_status(201);
}

async fn a_schema_that_would_never_end_is_refused_when_it_is_registered(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let (_, secret) = token(&fixture, Scope::Work, Some(&["mail"])).await;
    let worker = with_tokens_required(&fixture).with_token(&secret);
    for schema in crate::payloads::endless_schemas() {
        let put = http.json("PUT", "/kinds/endless", &json!({ "schema": schema })).await;
        put.expect_problem(422, "validation", "schema: ");
        let kind = json!({ "name": "endless", "schema": schema });
        let body = json!({ "queues": ["mail"], "kinds": ["endless"], "announce": [kind] });
        worker.post("/leases", &body).await.expect_problem(422, "validation", "announce[0]: schema: ");
    }
    let remote = json!({ "schema": { "$ref": "https://example.com/schema.json" } });
    http.json("PUT", "/kinds/remote", &remote).await.expect_problem(422, "validation", "copy it to `$defs`");
    assert!(fixture.kinds().await.expect("kinds").is_empty());
}

async fn kinds_are_listed_in_pages_and_schemas_only_on_request(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Work, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture);
    let kind = json!({ "name": "b", "schema": { "type": "string" } });
    let body = json!({ "queues": ["mail"], "kinds": ["b"], "announce": [kind] });
    http.with_token(&secret).post("/leases", &body).await.expect_status(200);
    fixture.put_kinds(&[NewKind::new("a"), NewKind::new("c\u{e4}&=")]).await.expect("put_kinds");
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let reader = http.with_token(&secret);
    let first = reader.get("/kinds?limit=2").await.expect_status(200);
    let kinds = first.json();
    assert_eq!((&kinds[0]["name"], &kinds[0]["queue"]), (&json!("a"), &Value::Null));
    assert_eq!((&kinds[1]["name"], &kinds[1]["queue"]), (&json!("b"), &json!("mail")));
    assert_eq!((&kinds[1]["has_schema"], kinds[1].get("schema")), (&json!(true), None));
    let link = first.header("link").to_owned();
    let next = link.trim_start_matches('<').split('>').next().expect("a URL").to_owned();
    let second = reader.get(&next).await.expect_status(200).json();
    assert_eq!((&second[0]["name"], second.as_array().map(Vec::len)), (&json!("c\u{e4}&="), Some(1)));
    let with_schemas = reader.get("/kinds?schemas=true").await.expect_status(200).json();
    assert_eq!(with_schemas[1]["schema"], json!({ "type": "string" }));
    assert_eq!(with_schemas[0]["schema"], Value::Null);
    reader.get("/kinds?cursor=7").await.expect_problem(400, "bad_request", "cursor");
    // A token for other queues does not see the kinds of this one.
    let (_, secret) = token(&fixture, Scope::Read, Some(&["post"])).await;
    let kinds = http.with_token(&secret).get("/kinds").await.expect_status(200).json();
    let names: Vec<_> = kinds.as_array().expect("a list").iter().map(|kind| &kind["name"]).collect();
    assert_eq!(names, ["a", "c\u{e4}&="]);
}
