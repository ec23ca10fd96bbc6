//! Tokens and scopes: which requests a token allows. `tokens.rs` tests how tokens are
//! stored.

use longshore::api::{Access, Api, Public, hash_token};
use longshore::{JobId, NewToken, Outcome, Scope, Status, UnknownKinds};
use serde_json::{Value, json};
use sqlx::Connection;
use uuid::Uuid;

use super::client::{HttpClient, before_timeout};
use crate::fixture::{DAY, Fixture, MINUTE, job};
use crate::worker::until;

cases! {
    a_wrong_revoked_or_expired_token_is_refused,
    a_revoked_token_ends_the_calls_that_wait,
    a_token_limited_to_queues_cannot_use_other_queues,
    a_token_limited_to_queues_cannot_list_or_change_jobs_of_other_queues,
    a_limited_token_learns_nothing_from_ids_of_other_queues,
    a_token_limited_to_queues_cannot_read_counts_of_all_queues,
    follow_ups_require_the_enqueue_scope,
    a_token_that_was_refused_is_accepted_as_soon_as_it_exists,
}

cases! {
    only on postgres:
    unknown_tokens_share_one_connection,
    the_queues_of_a_worker_are_checked_without_listing_workers_and_leases,
}

pub(super) fn with_tokens_required(fixture: &Fixture) -> HttpClient {
    HttpClient::for_api(
        Api::new(fixture.client())
            .access(Access::Tokens)
            .unknown_kinds(UnknownKinds::Allow)
            .metrics(String::new),
    )
}

/// Stores a token and returns its id and its secret.
pub(super) async fn token(fixture: &Fixture, scope: Scope, queues: Option<&[&str]>) -> (Uuid, String) {
    token_with(fixture, &[scope], queues).await
}

/// As [`token`], with several scopes.
pub(super) async fn token_with(
    fixture: &Fixture,
    scopes: &[Scope],
    queues: Option<&[&str]>,
) -> (Uuid, String) {
    let scopes: Vec<String> = scopes.iter().map(|scope| scope.as_str().into()).collect();
    let (id, secret) = (Uuid::now_v7(), format!("secret-{}", Uuid::now_v7()));
    let token = NewToken {
        id,
        name: scopes.join(" and "),
        hash: hash_token(&secret),
        scopes,
        queues: queues.map(|queues| queues.iter().map(|queue| (*queue).to_owned()).collect()),
        expires_at: None,
    };
    fixture.store().put_token(&token).await.expect("a token");
    (id, secret)
}

async fn a_revoked_token_ends_the_calls_that_wait(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let id = fixture.add(job("greet").queue("later").delay(DAY)).await;
    let (worker, work) = token(&fixture, Scope::Work, None).await;
    let (reader, read) = token(&fixture, Scope::Read, None).await;
    let (work, read) = (http.with_token(&work), http.with_token(&read));
    let registered = work.post("/leases", &json!({})).await.expect_status(200).json();
    let claim = json!({ "worker_id": registered["worker_id"], "wait_seconds": 20 });
    let watch = json!({ "worker_id": registered["worker_id"], "limit": 0, "wait_seconds": 20 });
    let path = format!("/jobs/{id}?wait_seconds=20");
    // From now on, the server knows both tokens for a while. So each call is admitted when it is polled for the first
    // time, which is before the tokens are revoked. One that comes later is refused as well.
    read.get("/jobs").await.expect_status(200);
    let revoke = async {
        for id in [worker, reader] {
            assert!(fixture.revoke_token(id).await.expect("revoke"));
        }
    };
    let calls = async {
        tokio::join!(biased; work.post("/leases", &claim), work.post("/leases", &watch), read.get(&path), revoke)
    };
    let (claimed, watched, awaited, ()) = before_timeout(calls).await;
    for response in [claimed, watched, awaited] {
        response.expect_problem(401, "unauthorized", "revoked");
    }
}

async fn a_wrong_revoked_or_expired_token_is_refused(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    for header in ["", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "Bearer unknown", "bearer"] {
        http.send("GET", "/jobs", &[("authorization", header)], "").await.expect_problem(
            401,
            "unauthorized",
            "",
        );
    }
    let (id, secret) = token(&fixture, Scope::Read, None).await;
    with_tokens_required(&fixture).with_token(&secret).get("/jobs").await.expect_status(200);
    http.send("GET", "/jobs", &[("authorization", &format!("bearer {secret}"))], "").await.expect_status(200);
    let twice = [("authorization", "Bearer unknown"), ("authorization", "Bearer unknown-2")];
    http.send("GET", "/jobs", &twice, "").await.expect_problem(401, "unauthorized", "");
    // A token in the URL is not accepted.
    http.get(&format!("/jobs?token={secret}")).await.expect_problem(401, "unauthorized", "");
    assert!(fixture.store().revoke_token(id).await.expect("revoke"));
    // A new server, because one that has used the token caches it for seconds.
    with_tokens_required(&fixture).with_token(&secret).get("/jobs").await.expect_problem(
        401,
        "unauthorized",
        "revoked",
    );

    let secret = "short-lived";
    let expires_at = Some(fixture.now().await + MINUTE);
    let token = NewToken {
        id: Uuid::now_v7(),
        name: "short-lived".into(),
        hash: hash_token(secret),
        scopes: vec!["read".into()],
        queues: None,
        expires_at,
    };
    fixture.store().put_token(&token).await.expect("a token");
    with_tokens_required(&fixture).with_token(secret).get("/jobs").await.expect_status(200);
    fixture.advance(MINUTE).await;
    with_tokens_required(&fixture).with_token(secret).get("/jobs").await.expect_problem(
        401,
        "unauthorized",
        "expired",
    );
}

async fn a_token_limited_to_queues_cannot_use_other_queues(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let (_, secret) = token(&fixture, Scope::Admin, Some(&["mail"])).await;
    let http = http.with_token(&secret);
    let job_in = |queue: &str| json!({ "kind": "greet", "payload": 1, "queue": queue });
    let mine = http.post("/jobs", &job_in("mail")).await.expect_status(201).json();
    http.post("/jobs", &job_in("other")).await.expect_problem(403, "forbidden", "mail");
    http.post("/jobs", &json!({ "kind": "greet", "payload": 1 })).await.expect_problem(
        403,
        "forbidden",
        "default",
    );
    http.get(&format!("/jobs/{}", mine["id"].as_str().expect("an id"))).await.expect_status(200);
    let theirs = fixture.add(job("greet")).await;
    let path = format!("/jobs/{theirs}");
    let refused = http.get(&path).await.expect_problem(403, "forbidden", "another queue");
    assert!(!refused.text.contains("default"), "the response names the queue: {refused:?}");
    http.get(&format!("{path}/explain")).await.expect_problem(403, "forbidden", "another queue");
    http.send("POST", &format!("{path}/cancel"), &[], "").await.expect_problem(403, "forbidden", "");
    http.send("POST", &format!("{path}/retry"), &[], "").await.expect_problem(403, "forbidden", "");
    http.json("PATCH", &path, &json!({ "priority": 1 })).await.expect_problem(403, "forbidden", "");
    http.send("DELETE", &path, &[], "").await.expect_problem(403, "forbidden", "");
    http.get("/jobs").await.expect_problem(403, "forbidden", "queue");
    http.get("/jobs?queue=default").await.expect_problem(403, "forbidden", "");
    http.get("/jobs?queue=mail").await.expect_status(200);
    http.send("POST", "/queues/default/pause", &[], "").await.expect_problem(403, "forbidden", "");
    http.post("/leases", &json!({ "queues": ["default"] })).await.expect_problem(403, "forbidden", "");
    http.send("POST", "/sweep", &[], "").await.expect_problem(403, "forbidden", "");
    // The id of a worker of another queue.
    let worker = fixture.worker().await;
    let body = json!({ "worker_id": worker.to_string(), "items": [] });
    http.post("/leases/settle", &body).await.expect_problem(403, "forbidden", "another queue");
    http.post("/leases/renew", &json!({ "worker_id": worker.to_string() })).await.expect_problem(
        403,
        "forbidden",
        "",
    );
    http.post("/leases", &json!({ "worker_id": worker.to_string(), "queues": ["mail"] }))
        .await
        .expect_problem(403, "forbidden", "");
    let lease = json!({ "worker_id": worker.to_string(), "id": theirs, "lease_no": 1 });
    http.post("/leases/journal", &lease).await.expect_problem(403, "forbidden", "another queue");
    for (path, field, item) in [
        ("/leases/steps", "steps", json!({ "name": "a" })),
        ("/leases/wait", "waits", json!({ "name": "a", "within_seconds": 1 })),
        ("/leases/spawn", "jobs", json!({ "kind": "greet", "payload": 1, "queue": "mail" })),
    ] {
        let mut body = lease.clone();
        body[field] = json!([item]);
        if path == "/leases/spawn" {
            body["name"] = json!("a");
        }
        http.post(path, &body).await.expect_problem(403, "forbidden", "another queue");
    }
    http.post("/leases/inputs", &lease).await.expect_problem(403, "forbidden", "another queue");
    let mut join = lease.clone();
    join["name"] = json!("a");
    http.post("/leases/join", &join).await.expect_problem(403, "forbidden", "another queue");
    for (field, item) in [
        ("settle", json!({ "id": theirs, "lease_no": 1, "outcome": "succeeded" })),
        ("progress", json!({ "id": theirs, "lease_no": 1, "progress": 1 })),
        ("steps", json!({ "id": theirs, "lease_no": 1, "steps": [{ "name": "a" }] })),
        ("checkpoints", json!({ "id": theirs, "lease_no": 1, "checkpoint": 1 })),
    ] {
        let body = json!({ "worker_id": worker.to_string(), "limit": 0, field: [item] });
        http.post("/leases", &body).await.expect_problem(403, "forbidden", "another queue");
    }
    http.send("DELETE", &format!("/leases/{worker}"), &[], "").await.expect_problem(403, "forbidden", "");
    let batch =
        http.post("/jobs/batch", &json!([job_in("mail"), job_in("other")])).await.expect_status(200).json();
    assert_eq!((&batch["created"], &batch["refused"]), (&json!(1), &json!(1)));
}

async fn a_token_limited_to_queues_cannot_list_or_change_jobs_of_other_queues(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Admin, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture).with_token(&secret);
    let theirs = fixture.ended(job("greet"), Outcome::FailedPermanent).await;
    fixture.add(job("greet")).await;
    let mine = fixture.add(job("greet").queue("mail")).await;
    http.get(&format!("/jobs/{mine}/explain")).await.expect_status(200);
    http.get(&format!("/jobs/{theirs}/explain")).await.expect_problem(403, "forbidden", "another queue");
    http.get("/dead-letters").await.expect_problem(403, "forbidden", "queue");
    http.get("/dead-letters?queue=default").await.expect_problem(403, "forbidden", "default");
    http.get("/workers").await.expect_problem(403, "forbidden", "mail");
    http.get("/cron").await.expect_problem(403, "forbidden", "mail");
    let queues = http.get("/queues").await.expect_status(200).json();
    assert_eq!((queues.as_array().map(Vec::len), &queues[0]["name"]), (Some(1), &json!("mail")));

    let retry = |filter: Value| json!({ "action": "retry", "filter": filter });
    for filter in [json!({ "queue": "default" }), json!({ "kind": "greet" })] {
        http.post("/jobs/bulk", &retry(filter)).await.expect_problem(403, "forbidden", "mail");
    }
    for body in [json!({ "queue": "default" }), json!({})] {
        http.post("/dead-letters/redrive", &body).await.expect_problem(403, "forbidden", "mail");
    }
    http.send("POST", &format!("/dead-letters/{theirs}/redrive"), &[], "").await.expect_problem(
        403,
        "forbidden",
        "another queue",
    );
    assert_eq!(fixture.status(theirs).await, Status::FailedPermanent);
    let own = http.post("/jobs/bulk", &retry(json!({ "queue": "mail" }))).await.expect_status(200).json();
    assert_eq!(own["changed"], 1);
}

async fn a_limited_token_learns_nothing_from_ids_of_other_queues(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let theirs = JobId::new();
    fixture.add(job("greet").id(theirs)).await;
    let (_, secret) = token(&fixture, Scope::Enqueue, Some(&["mail"])).await;
    let body = json!({ "kind": "greet", "payload": 1, "queue": "mail", "id": theirs });
    let http = http.with_token(&secret);
    http.post("/jobs", &body).await.expect_problem(403, "forbidden", "");
    let batch = http.post("/jobs/batch", &json!([body])).await.expect_status(200).json();
    assert_eq!((&batch["refused"], &batch["items"][0]["id"]), (&json!(1), &Value::Null));
}

async fn a_token_limited_to_queues_cannot_read_counts_of_all_queues(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture).with_token(&secret);
    http.get("/metrics").await.expect_problem(403, "forbidden", "mail");
    http.get("/stats").await.expect_problem(403, "forbidden", "queue");
    http.get("/stats?queue=mail").await.expect_status(200);
    http.get("/kinds").await.expect_status(200);
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    http.with_token(&secret).get("/metrics").await.expect_status(200);
    let open = Api::new(fixture.client()).access(Access::Tokens).metrics(String::new).public(Public::Metrics);
    HttpClient::for_api(open).get("/metrics").await.expect_status(200);
}

async fn follow_ups_require_the_enqueue_scope(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let (_, secret) = token(&fixture, Scope::Work, None).await;
    let http = http.with_token(&secret);
    fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({ "kinds": ["greet"] })).await.expect_status(200).json();
    let settle = |follow_ups: serde_json::Value| {
        let item = json!({
            "id": leased["jobs"][0]["id"], "lease_no": 1, "outcome": "succeeded", "follow_ups": follow_ups,
        });
        json!({ "worker_id": leased["worker_id"], "items": [item] })
    };
    let with_follow_up = settle(json!([{ "kind": "greet", "payload": {} }]));
    http.post("/leases/settle", &with_follow_up).await.expect_problem(403, "forbidden", "`enqueue`");
    http.post("/leases/settle", &settle(json!([]))).await.expect_status(200);
}

async fn a_token_that_was_refused_is_accepted_as_soon_as_it_exists(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let secret = "early";
    http.with_token(secret).get("/jobs").await.expect_problem(401, "unauthorized", "unknown");
    let token = NewToken {
        id: Uuid::now_v7(),
        name: "early".into(),
        hash: hash_token(secret),
        scopes: vec!["read".into()],
        queues: None,
        expires_at: None,
    };
    fixture.store().put_token(&token).await.expect("a token");
    http.with_token(secret).get("/jobs").await.expect_status(200);
}

async fn unknown_tokens_share_one_connection(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let mut other = fixture.postgres().await;
    let mut held = other.begin().await.expect("begin");
    // Every lookup of a token waits for this lock.
    sqlx::raw_sql("lock table tokens").execute(&mut *held).await.expect("lock");
    let requests: Vec<_> = (0..50)
        .map(|i| {
            let http = http.with_token(&format!("invented-{i}"));
            tokio::spawn(
                async move { http.get("/jobs").await.expect_problem(401, "unauthorized", "unknown") },
            )
        })
        .collect();
    let waiting = "select count(*) from pg_locks where not granted and relation = 'tokens'::regclass";
    until("a lookup waits", || async { fixture.query_number(waiting, None).await > 0 }).await;
    // The others have arrived meanwhile. A lookup gives up after a few seconds.
    for _ in 0..5 {
        http.get("/health").await.expect_status(200);
    }
    assert_eq!(fixture.query_number(waiting, None).await, 1);
    held.rollback().await.expect("rollback");
    for request in requests {
        request.await.expect("a response");
    }
}

async fn the_queues_of_a_worker_are_checked_without_listing_workers_and_leases(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Work, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture).with_token(&secret);
    let worker = fixture.worker().await;
    let mut other = fixture.postgres().await;
    let mut held = other.begin().await.expect("begin");
    // Counting the leases of each worker would wait for this lock.
    sqlx::raw_sql("lock table running").execute(&mut *held).await.expect("lock");
    let body = json!({ "worker_id": worker.to_string(), "items": [] });
    http.post("/leases/settle", &body).await.expect_problem(403, "forbidden", "another queue");
    held.rollback().await.expect("rollback");
}
