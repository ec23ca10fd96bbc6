//! Who may do what.

use longshore::api::{Access, Api, Public, UnknownKinds, hash_token};
use longshore::store::{NewToken, Scope};
use longshore::{Outcome, Status};
use serde_json::{Value, json};
use uuid::Uuid;

use super::web::Web;
use crate::bench::{Bench, MINUTE, job};

cases! {
    every_route_asks_for_the_scope_that_its_document_names,
    a_token_that_is_wrong_revoked_or_expired_opens_nothing,
    a_token_for_some_queues_reaches_no_others,
    a_token_for_some_queues_looks_into_no_others_and_orders_nothing_there,
    a_key_of_another_queue_tells_a_limited_token_nothing,
    a_token_for_some_queues_reads_no_counts_of_all,
    follow_ups_take_the_scope_to_enqueue,
}

fn guarded(bench: &Bench) -> Web {
    Web::of(
        Api::new(bench.handle())
            .access(Access::Tokens)
            .unknown_kinds(UnknownKinds::Allow)
            .metrics(String::new),
    )
}

pub(super) async fn token(bench: &Bench, scope: Scope, queues: Option<&[&str]>) -> (Uuid, String) {
    let (id, secret) = (Uuid::now_v7(), format!("secret-{}", Uuid::now_v7()));
    let token = NewToken {
        id,
        name: scope.as_str().into(),
        hash: hash_token(&secret),
        scopes: vec![scope.as_str().into()],
        queues: queues.map(|queues| queues.iter().map(|queue| (*queue).to_owned()).collect()),
        expires_at: None,
    };
    bench.store().put_token(&token).await.expect("a token");
    (id, secret)
}

/// Every operation of the document with the scope that it names.
async fn operations(web: &Web) -> Vec<(String, String, Option<String>)> {
    let document: Value = web.get("/api-docs/openapi.json").await.is(200).json();
    let mut operations = Vec::new();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            let scope = operation["security"][0]["token"][0].as_str().map(str::to_owned);
            let path = path.replace("{id}", "01990000-0000-7000-8000-000000000000");
            let path = path.replace("{worker_id}", "01990000-0000-7000-8000-000000000000");
            let path =
                path.replace("{name}", "nobody").replace("{kind}", "nobody").replace("{file}", "nothing");
            operations.push((method.to_uppercase(), path, scope));
        }
    }
    assert!(operations.len() > 25, "{operations:?}");
    operations
}

async fn every_route_asks_for_the_scope_that_its_document_names(bench: Bench) {
    let web = guarded(&bench);
    let (_, admin) = token(&bench, Scope::Admin, None).await;
    let admin = web.with_token(&admin);
    let operations = operations(&admin).await;
    for (method, path, scope) in &operations {
        let open = web.send(method, path, &[], "").await;
        match scope {
            None => {
                assert_eq!(path, "/health", "only /health is for everybody");
                open.is(200);
            }
            Some(_) => {
                let refused = open.is_problem(401, "unauthorized", "Bearer");
                assert!(refused.header("www-authenticate").starts_with("Bearer"), "{method} {path}");
            }
        }
        assert!(![401, 403].contains(&admin.send(method, path, &[], "").await.status), "{method} {path}");
    }
    for scope in Scope::ALL {
        let (_, secret) = token(&bench, scope, None).await;
        let web = web.with_token(&secret);
        for (method, path, needed) in operations.iter().filter(|(_, _, needed)| needed.is_some()) {
            let answer = web.send(method, path, &[], "").await;
            let may = scope == Scope::Admin || needed.as_deref() == Some(scope.as_str());
            match may {
                true => {
                    assert!(![401, 403].contains(&answer.status), "{method} {path} by {scope:?}: {answer:?}")
                }
                false => drop(answer.is_problem(403, "forbidden", needed.as_deref().expect("a scope"))),
            }
        }
    }
}

async fn a_token_that_is_wrong_revoked_or_expired_opens_nothing(bench: Bench) {
    let web = guarded(&bench);
    for header in ["", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "Bearer nobody", "bearer"] {
        web.send("GET", "/jobs", &[("authorization", header)], "").await.is_problem(401, "unauthorized", "");
    }
    let (id, secret) = token(&bench, Scope::Read, None).await;
    guarded(&bench).with_token(&secret).get("/jobs").await.is(200);
    web.send("GET", "/jobs", &[("authorization", &format!("bearer {secret}"))], "").await.is(200);
    let twice = [("authorization", "Bearer nobody"), ("authorization", "Bearer nobody either")];
    web.send("GET", "/jobs", &twice, "").await.is_problem(401, "unauthorized", "");
    // Never in a URL.
    web.get(&format!("/jobs?token={secret}")).await.is_problem(401, "unauthorized", "");
    assert!(bench.store().revoke_token(id).await.expect("revoke"));
    // A server that has not seen it yet; one that has forgets within seconds.
    guarded(&bench).with_token(&secret).get("/jobs").await.is_problem(401, "unauthorized", "revoked");

    let secret = "short-lived";
    let expires_at = Some(bench.now().await + MINUTE);
    let token = NewToken {
        id: Uuid::now_v7(),
        name: "soon over".into(),
        hash: hash_token(secret),
        scopes: vec!["read".into()],
        queues: None,
        expires_at,
    };
    bench.store().put_token(&token).await.expect("a token");
    guarded(&bench).with_token(secret).get("/jobs").await.is(200);
    bench.advance(MINUTE).await;
    guarded(&bench).with_token(secret).get("/jobs").await.is_problem(401, "unauthorized", "expired");
}

async fn a_token_for_some_queues_reaches_no_others(bench: Bench) {
    let web = guarded(&bench);
    let (_, secret) = token(&bench, Scope::Admin, Some(&["mail"])).await;
    let web = web.with_token(&secret);
    let job_in = |queue: &str| json!({ "kind": "greet", "payload": 1, "queue": queue });
    let mine = web.post("/jobs", &job_in("mail")).await.is(201).json();
    web.post("/jobs", &job_in("other")).await.is_problem(403, "forbidden", "mail");
    web.post("/jobs", &json!({ "kind": "greet", "payload": 1 })).await.is_problem(
        403,
        "forbidden",
        "default",
    );
    web.get(&format!("/jobs/{}", mine["id"].as_str().expect("an id"))).await.is(200);
    let theirs = bench.add(job("greet")).await;
    let path = format!("/jobs/{theirs}");
    let told = web.get(&path).await.is_problem(403, "forbidden", "another queue");
    assert!(!told.text.contains("default"), "which queue it is in is not told: {told:?}");
    web.get(&format!("{path}/explain")).await.is_problem(403, "forbidden", "another queue");
    web.send("POST", &format!("{path}/cancel"), &[], "").await.is_problem(403, "forbidden", "");
    web.send("POST", &format!("{path}/retry"), &[], "").await.is_problem(403, "forbidden", "");
    web.json("PATCH", &path, &json!({ "priority": 1 })).await.is_problem(403, "forbidden", "");
    web.send("DELETE", &path, &[], "").await.is_problem(403, "forbidden", "");
    web.get("/jobs").await.is_problem(403, "forbidden", "queue");
    web.get("/jobs?queue=default").await.is_problem(403, "forbidden", "");
    web.get("/jobs?queue=mail").await.is(200);
    web.send("POST", "/queues/default/pause", &[], "").await.is_problem(403, "forbidden", "");
    web.post("/leases", &json!({ "queues": ["default"] })).await.is_problem(403, "forbidden", "");
    web.send("POST", "/sweep", &[], "").await.is_problem(403, "forbidden", "");
    // A worker of another queue, whose id has become known.
    let worker = bench.worker().await;
    let body = json!({ "worker_id": worker.to_string(), "items": [] });
    web.post("/leases/settle", &body).await.is_problem(403, "forbidden", "another queue");
    web.post("/leases/renew", &json!({ "worker_id": worker.to_string() })).await.is_problem(
        403,
        "forbidden",
        "",
    );
    web.post("/leases", &json!({ "worker_id": worker.to_string(), "queues": ["mail"] })).await.is_problem(
        403,
        "forbidden",
        "",
    );
    web.send("DELETE", &format!("/leases/{worker}"), &[], "").await.is_problem(403, "forbidden", "");
    let batch = web.post("/jobs/batch", &json!([job_in("mail"), job_in("other")])).await.is(200).json();
    assert_eq!((&batch["created"], &batch["refused"]), (&json!(1), &json!(1)));
}

async fn a_token_for_some_queues_looks_into_no_others_and_orders_nothing_there(bench: Bench) {
    let (_, secret) = token(&bench, Scope::Admin, Some(&["mail"])).await;
    let web = guarded(&bench).with_token(&secret);
    let theirs = bench.ended(job("greet"), Outcome::FailedPermanent).await;
    bench.add(job("greet")).await;
    let mine = bench.add(job("greet").queue("mail")).await;
    web.get(&format!("/jobs/{mine}/explain")).await.is(200);
    web.get(&format!("/jobs/{theirs}/explain")).await.is_problem(403, "forbidden", "another queue");
    web.get("/dead-letters").await.is_problem(403, "forbidden", "queue");
    web.get("/dead-letters?queue=default").await.is_problem(403, "forbidden", "default");
    web.get("/workers").await.is_problem(403, "forbidden", "mail");
    web.get("/cron").await.is_problem(403, "forbidden", "mail");
    let queues = web.get("/queues").await.is(200).json();
    assert_eq!((queues.as_array().map(Vec::len), &queues[0]["name"]), (Some(1), &json!("mail")));

    let retry = |filter: Value| json!({ "action": "retry", "filter": filter });
    for filter in [json!({ "queue": "default" }), json!({ "kind": "greet" })] {
        web.post("/jobs/bulk", &retry(filter)).await.is_problem(403, "forbidden", "mail");
    }
    for body in [json!({ "queue": "default" }), json!({})] {
        web.post("/dead-letters/redrive", &body).await.is_problem(403, "forbidden", "mail");
    }
    web.send("POST", &format!("/dead-letters/{theirs}/redrive"), &[], "").await.is_problem(
        403,
        "forbidden",
        "another queue",
    );
    assert_eq!(bench.status(theirs).await, Status::FailedPermanent);
    let own = web.post("/jobs/bulk", &retry(json!({ "queue": "mail" }))).await.is(200).json();
    assert_eq!(own["changed"], 1);
}

async fn a_key_of_another_queue_tells_a_limited_token_nothing(bench: Bench) {
    let web = guarded(&bench);
    bench.add(job("greet").idempotency_key("theirs")).await;
    let (_, secret) = token(&bench, Scope::Enqueue, Some(&["mail"])).await;
    let body = json!({ "kind": "greet", "payload": 1, "queue": "mail", "idempotency_key": "theirs" });
    let web = web.with_token(&secret);
    web.post("/jobs", &body).await.is_problem(403, "forbidden", "");
    let batch = web.post("/jobs/batch", &json!([body])).await.is(200).json();
    assert_eq!((&batch["refused"], &batch["items"][0]["id"]), (&json!(1), &Value::Null));
    let replace = json!({ "kind": "a", "payload": 1, "queue": "mail", "unique_key": "theirs", "unique_mode": "replace" });
    web.post("/jobs", &replace).await.is_problem(403, "forbidden", "unique_mode");
    assert_eq!(web.post("/jobs/batch", &json!([replace])).await.is(200).json()["refused"], 1);
}

async fn a_token_for_some_queues_reads_no_counts_of_all(bench: Bench) {
    let (_, secret) = token(&bench, Scope::Read, Some(&["mail"])).await;
    let web = guarded(&bench).with_token(&secret);
    web.get("/metrics").await.is_problem(403, "forbidden", "mail");
    web.get("/stats").await.is_problem(403, "forbidden", "queue");
    web.get("/stats?queue=mail").await.is(200);
    web.get("/kinds").await.is(200);
    let (_, secret) = token(&bench, Scope::Read, None).await;
    web.with_token(&secret).get("/metrics").await.is(200);
    let open = Api::new(bench.handle()).access(Access::Tokens).metrics(String::new).public(Public::Metrics);
    Web::of(open).get("/metrics").await.is(200);
}

async fn follow_ups_take_the_scope_to_enqueue(bench: Bench) {
    let web = guarded(&bench);
    let (_, secret) = token(&bench, Scope::Work, None).await;
    let web = web.with_token(&secret);
    bench.add(job("greet")).await;
    let leased = web.post("/leases", &json!({ "kinds": ["greet"] })).await.is(200).json();
    let settle = |follow_ups: serde_json::Value| {
        let item = json!({
            "id": leased["jobs"][0]["id"], "lease_no": 1, "outcome": "succeeded", "follow_ups": follow_ups,
        });
        json!({ "worker_id": leased["worker_id"], "items": [item] })
    };
    let more = settle(json!([{ "kind": "greet", "payload": {} }]));
    web.post("/leases/settle", &more).await.is_problem(403, "forbidden", "`enqueue`");
    web.post("/leases/settle", &settle(json!([]))).await.is(200);
}
