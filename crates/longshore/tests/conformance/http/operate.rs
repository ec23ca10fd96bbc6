//! The routes for operators: queues, schedules, dead letters, sweeps and bulk operations.

use longshore::api::Api;
use longshore::{NewJob, Outcome, Scope, Status, SweepOptions};
use serde_json::{Value, json};

use super::client::HttpClient;
use crate::fixture::{Fixture, MINUTE, SECOND, job};

cases! {
    a_queue_can_be_paused_limited_and_resumed,
    a_schedule_can_be_put_paused_run_and_removed,
    a_schedule_can_be_stored_as_it_was_read,
    dead_letters_can_be_listed_and_redriven,
    a_redrive_continues_after_the_cursor_of_the_last_response,
    a_redrive_skips_a_job_whose_key_is_taken,
    a_sweep_can_be_tried_as_a_dry_run_and_executed,
    a_sweep_uses_the_resilient_flags_and_the_factor_of_the_server_or_the_request,
    a_bulk_operation_changes_every_job_that_matches_its_filter,
    a_dry_run_predicts_what_a_bulk_operation_skips,
    a_bulk_operation_over_several_pages_stops_at_its_limit,
    a_failed_job_is_retried_with_another_payload,
    tokens_are_listed_and_revoked,
}

async fn a_queue_can_be_paused_limited_and_resumed(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("greet").queue("mail")).await;
    assert_eq!(
        http.send("POST", "/queues/mail/pause", &[], "").await.expect_status(200).json()["paused"],
        true
    );
    let worker = fixture.worker().await;
    assert!(fixture.claim_from("mail", worker, 1).await.is_empty());
    assert_eq!(
        http.json("PUT", "/queues/mail/limit", &json!({ "limit": 3 })).await.expect_status(200).json()["limit"],
        3
    );
    assert_eq!(
        http.json("PUT", "/queues/mail/limit", &json!({ "limit": null })).await.expect_status(200).json()["limit"],
        Value::Null
    );
    http.json("PUT", "/queues/mail/limit", &json!({})).await.expect_problem(422, "validation", "limit");
    http.json("PUT", "/queues/mail/limit", &json!([7])).await.expect_problem(422, "validation", "object");
    http.json("PUT", "/queues/mail/limit", &json!({ "limit": 3_000_000_000_u32 })).await.expect_problem(
        422,
        "validation",
        "limit",
    );
    http.json("PUT", "/queues/mail/limit", &json!({ "limit": 0 })).await.expect_problem(
        422,
        "validation",
        "limit",
    );
    assert_eq!(
        http.send("POST", "/queues/mail/resume", &[], "").await.expect_status(200).json()["paused"],
        false
    );
    assert_eq!(fixture.claim_from("mail", worker, 1).await.len(), 1);
    assert_eq!(http.get("/queues").await.expect_status(200).json()[0]["name"], "mail");
    let long = "q".repeat(129);
    http.send("POST", &format!("/queues/{long}/pause"), &[], "").await.expect_problem(
        400,
        "bad_request",
        "128",
    );
}

async fn a_schedule_can_be_put_paused_run_and_removed(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let schedule = json!({
        "cron": "*/5 * * * *", "zone": "Europe/Berlin", "missed": "all:7",
        "job": { "kind": "report", "payload": { "pages": 3 }, "queue": "slow" },
    });
    let stored = http.json("PUT", "/cron/nightly", &schedule).await.expect_status(200).json();
    assert_eq!(
        (&stored["cron"], &stored["zone"], &stored["missed"]),
        (&schedule["cron"], &schedule["zone"], &schedule["missed"])
    );
    assert_eq!(http.get("/cron").await.expect_status(200).json()[0]["name"], "nightly");
    assert_eq!(
        http.send("POST", "/cron/nightly/pause", &[], "").await.expect_status(200).json()["paused"],
        true
    );
    assert_eq!(
        http.send("POST", "/cron/nightly/resume", &[], "").await.expect_status(200).json()["paused"],
        false
    );
    let ran = http.send("POST", "/cron/nightly/run", &[], "").await.expect_status(201).json();
    assert_eq!(ran["how"], "created");
    let id = ran["job_id"].as_str().expect("an id").parse().expect("an id");
    assert_eq!(fixture.get(id).await.expect("get").queue, "slow");
    http.send("DELETE", "/cron/nightly", &[], "").await.expect_status(204);
    for (method, path) in [
        ("GET", "/cron/nightly"),
        ("DELETE", "/cron/nightly"),
        ("POST", "/cron/nightly/run"),
        ("POST", "/cron/nightly/pause"),
    ] {
        http.send(method, path, &[], "").await.expect_problem(404, "not_found", "");
    }
    let wrong = |field: &str, value: Value| {
        let mut body = schedule.clone();
        body[field] = value;
        body
    };
    http.json("PUT", "/cron/x", &wrong("cron", json!("every day"))).await.expect_problem(
        422,
        "validation",
        "",
    );
    http.json("PUT", "/cron/x", &wrong("zone", json!("Moon/Base"))).await.expect_problem(
        422,
        "validation",
        "Moon",
    );
    http.json("PUT", "/cron/x", &wrong("missed", json!("some"))).await.expect_problem(
        422,
        "validation",
        "missed",
    );
    http.json("PUT", "/cron/x", &wrong("job", json!({ "kind": "", "payload": 1 }))).await.expect_problem(
        422,
        "validation",
        "kind",
    );
}

async fn a_schedule_can_be_stored_as_it_was_read(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let all_fields = json!({
        "cron": "*/5 * * * *", "zone": "Europe/Berlin", "missed": "all:7",
        "job": {
            "kind": "report", "payload": { "pages": 3 }, "queue": "slow", "priority": -4, "max_attempts": 9,
            "unique_key": "report", "unique_mode": "replace", "timeout_seconds": 90.25,
            "retry": { "policy": "fixed", "delay_ms": 1500 }, "tags": ["paper"], "flags": ["big"],
            "context": "by hand", "metadata": { "team": "blue" },
        },
    });
    let stored = http.json("PUT", "/cron/all", &all_fields).await.expect_status(200).json();
    assert_eq!(stored["job"], all_fields["job"]);
    let no_timeout = json!({
        "cron": "0 3 * * *", "job": { "kind": "report", "payload": null, "timeout_seconds": "none" },
    });
    http.json("PUT", "/cron/short", &no_timeout).await.expect_status(200);
    http.send("POST", "/cron/short/pause", &[], "").await.expect_status(200);
    for name in ["all", "short"] {
        let path = format!("/cron/{name}");
        let read = http.get(&path).await.expect_status(200).json();
        assert_eq!(http.json("PUT", &path, &read).await.expect_status(200).json(), read);
        assert_eq!(http.get(&path).await.expect_status(200).json(), read);
        // Also after the schedule was removed, with its pause.
        http.send("DELETE", &path, &[], "").await.expect_status(204);
        assert_eq!(http.json("PUT", &path, &read).await.expect_status(200).json(), read);
        http.json("PUT", "/cron/other", &read).await.expect_problem(422, "validation", "name");
    }
    let resumed =
        json!({ "cron": "0 3 * * *", "paused": false, "job": { "kind": "report", "payload": null } });
    assert_eq!(http.json("PUT", "/cron/short", &resumed).await.expect_status(200).json()["paused"], false);
}

async fn dead_letters_can_be_listed_and_redriven(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let one = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let two = fixture.ended(job("other"), Outcome::FailedPermanent).await;
    let succeeded = fixture.ended(job("greet"), Outcome::Succeeded).await;
    assert_eq!(http.get("/dead-letters").await.expect_status(200).json().as_array().expect("jobs").len(), 2);
    assert_eq!(http.get("/dead-letters?kind=mail").await.expect_status(200).json()[0]["id"], one.to_string());
    http.send("POST", &format!("/dead-letters/{one}/redrive"), &[], "").await.expect_status(200);
    assert_eq!(fixture.status(one).await, Status::Queued);
    http.send("POST", &format!("/dead-letters/{succeeded}/redrive"), &[], "")
        .await
        .expect_problem(409, "conflict", "");
    assert_eq!(
        http.post("/dead-letters/redrive", &json!({ "kind": "mail" })).await.expect_status(200).json(),
        json!({ "redriven": 0, "skipped": 0, "next": null })
    );
    assert_eq!(http.post("/dead-letters/redrive", &json!({})).await.expect_status(200).json()["redriven"], 1);
    assert_eq!(fixture.status(two).await, Status::Queued);
}

async fn a_redrive_continues_after_the_cursor_of_the_last_response(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let mut dead = Vec::new();
    for _ in 0..3 {
        dead.push(fixture.ended(job("mail"), Outcome::FailedPermanent).await);
    }
    assert_eq!(
        http.get("/dead-letters?offset=2").await.expect_status(200).json()[0]["id"],
        dead[0].to_string()
    );
    http.get("/dead-letters?offset=10001").await.expect_problem(400, "bad_request", "cursor");

    let first = http.post("/dead-letters/redrive", &json!({ "limit": 2 })).await.expect_status(200).json();
    assert_eq!(first, json!({ "redriven": 2, "skipped": 0, "next": dead[1].to_string() }));
    let last = http.post("/dead-letters/redrive", &json!({ "limit": 2, "after": first["next"] })).await;
    assert_eq!(last.expect_status(200).json(), json!({ "redriven": 1, "skipped": 0, "next": null }));
    assert_eq!(fixture.status(dead[2]).await, Status::Queued);
}

async fn a_redrive_skips_a_job_whose_key_is_taken(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let keyed = || job("mail").unique_key("doc 7", longshore::UniqueMode::Dedupe);
    fixture.ended(keyed(), Outcome::FailedPermanent).await;
    fixture.add(keyed()).await;
    let response = http.post("/dead-letters/redrive", &json!({})).await.expect_status(200).json();
    assert_eq!(response, json!({ "redriven": 0, "skipped": 1, "next": null }));
}

async fn a_sweep_uses_the_resilient_flags_and_the_factor_of_the_server_or_the_request(fixture: Fixture) {
    let mut options = SweepOptions::default();
    options.scope.resilient_flags = vec!["slow_disks".into()];
    options.scope.resilient_factor = 2;
    let http = HttpClient::for_api(Api::new(fixture.client()).sweep(options));
    fixture.running(job("provision").flags(["slow_disks"])).await;
    let would_recover = async |body: serde_json::Value| {
        let report = http.post("/sweep", &body).await.expect_status(200).json();
        report["recovered"].as_u64().expect("a number")
    };
    fixture.advance(61 * SECOND).await;
    assert_eq!(would_recover(json!({ "dry_run": true })).await, 0);
    assert_eq!(would_recover(json!({ "dry_run": true, "resilient_flags": [] })).await, 1);
    assert_eq!(would_recover(json!({ "dry_run": true, "resilient_factor": 1 })).await, 1);
    fixture.advance(MINUTE).await;
    assert_eq!(would_recover(json!({ "dry_run": true, "resilient_factor": 3 })).await, 0);
    assert_eq!(would_recover(json!({ "dry_run": true })).await, 1);
    for (field, body) in [
        ("resilient_factor", json!({ "resilient_factor": 0 })),
        ("resilient_flags", json!({ "resilient_flags": [""] })),
    ] {
        http.post("/sweep", &body).await.expect_problem(422, "validation", field);
    }
}

async fn a_sweep_can_be_tried_as_a_dry_run_and_executed(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let dead = fixture.worker_with(10 * SECOND).await;
    fixture.claim_one(dead).await;
    fixture.advance(11 * SECOND).await;
    assert_eq!(http.get("/workers").await.expect_status(200).json()[0]["stale"], true);
    let planned = http.post("/sweep", &json!({ "dry_run": true })).await.expect_status(200).json();
    let expected = json!({ "workers": [dead.to_string()], "recovered": 1, "skipped": 0, "deferred": 0, "dry_run": true });
    assert_eq!(planned, expected);
    assert_eq!(fixture.status(id).await, Status::Running);
    http.post("/sweep", &json!({ "threshold_seconds": 60 })).await.expect_status(200);
    assert_eq!(fixture.status(id).await, Status::Running, "the requested threshold must apply");
    http.post("/sweep", &json!({ "threshold_seconds": -1 })).await.expect_problem(
        422,
        "validation",
        "threshold_seconds",
    );
    assert_eq!(http.send("POST", "/sweep", &[], "").await.expect_status(200).json()["recovered"], 1);
    assert_eq!(fixture.status(id).await, Status::Retrying);
}

async fn a_bulk_operation_changes_every_job_that_matches_its_filter(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for i in 0..5 {
        fixture.add(job("greet").tags(["nightly"]).priority(i)).await;
    }
    let other = fixture.add(job("other")).await;
    let bulk = |action: &str, more: Value| {
        let mut body = json!({ "action": action, "filter": { "tag": "nightly" } });
        for (field, value) in more.as_object().expect("an object") {
            body[field] = value.clone();
        }
        body
    };
    let counts = |response: &Value| {
        [&response["matched"], &response["changed"], &response["skipped"]].map(Value::as_u64)
    };
    let dry =
        http.post("/jobs/bulk", &bulk("cancel", json!({ "dry_run": true }))).await.expect_status(200).json();
    assert_eq!(counts(&dry), [5, 0, 0].map(Some));
    let part =
        http.post("/jobs/bulk", &bulk("cancel", json!({ "limit": 2 }))).await.expect_status(200).json();
    assert_eq!(counts(&part), [2, 2, 0].map(Some));
    let rest = http
        .post("/jobs/bulk", &bulk("cancel", json!({ "cursor": part["next"] })))
        .await
        .expect_status(200)
        .json();
    assert_eq!((counts(&rest), &rest["next"]), ([3, 3, 0].map(Some), &Value::Null));
    let again = http.post("/jobs/bulk", &bulk("cancel", json!({}))).await.expect_status(200).json();
    assert_eq!(counts(&again), [5, 0, 5].map(Some), "finished jobs cannot be cancelled");
    assert_eq!(
        counts(&http.post("/jobs/bulk", &bulk("retry", json!({}))).await.expect_status(200).json()),
        [5, 5, 0].map(Some)
    );
    assert_eq!(
        counts(&http.post("/jobs/bulk", &bulk("delete", json!({}))).await.expect_status(200).json()),
        [5, 0, 5].map(Some)
    );
    http.post("/jobs/bulk", &bulk("cancel", json!({}))).await.expect_status(200);
    assert_eq!(
        counts(&http.post("/jobs/bulk", &bulk("delete", json!({}))).await.expect_status(200).json()),
        [5, 5, 0].map(Some)
    );
    assert_eq!(fixture.status(other).await, Status::Queued);
    http.post("/jobs/bulk", &bulk("cancel", json!({ "filter": {} }))).await.expect_problem(
        422,
        "validation",
        "filter",
    );
    http.post("/jobs/bulk", &bulk("cancel", json!({ "limit": 0 }))).await.expect_problem(
        422,
        "validation",
        "limit",
    );
    http.post("/jobs/bulk", &bulk("explode", json!({}))).await.expect_problem(422, "validation", "explode");
}

async fn a_dry_run_predicts_what_a_bulk_operation_skips(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let bulk = |action: &str, status: &str, dry_run: bool| json!({ "action": action, "filter": { "status": status }, "dry_run": dry_run });
    // The number of jobs differs per status, so that mixed-up counts are visible.
    let expectations = [
        ("delete", "queued", [2, 0, 2]),
        ("retry", "running", [1, 0, 1]),
        ("delete", "running", [1, 0, 1]),
        ("cancel", "succeeded", [3, 0, 3]),
        ("cancel", "running", [1, 1, 0]),
        ("retry", "queued", [2, 2, 0]),
        ("cancel", "queued", [2, 2, 0]),
        ("delete", "succeeded", [3, 3, 0]),
        ("retry", "cancelled", [2, 2, 0]),
    ];
    for _ in 0..3 {
        fixture.ended(job("greet"), Outcome::Succeeded).await;
    }
    fixture.running(job("greet")).await;
    for _ in 0..2 {
        fixture.add(job("greet")).await;
    }
    let counts = |response: &Value| {
        ["matched", "changed", "skipped"].map(|field| response[field].as_u64().unwrap_or(99))
    };
    for (action, status, expected) in expectations {
        let [matched, _, skipped] = expected;
        let dry = http.post("/jobs/bulk", &bulk(action, status, true)).await.expect_status(200).json();
        assert_eq!(counts(&dry), [matched, 0, skipped], "dry run: {action} {status} jobs");
        let done = http.post("/jobs/bulk", &bulk(action, status, false)).await.expect_status(200).json();
        assert_eq!(counts(&done), expected, "{action} {status} jobs");
    }
}

async fn a_bulk_operation_over_several_pages_stops_at_its_limit(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let jobs: Vec<NewJob> = (0..230).map(|_| job("greet")).collect();
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let bulk = async |more: Value| {
        let mut body = json!({ "action": "cancel", "filter": { "kind": "greet" }, "limit": 215 });
        for (field, value) in more.as_object().expect("an object") {
            body[field] = value.clone();
        }
        let response = http.post("/jobs/bulk", &body).await.expect_status(200).json();
        let counts = ["matched", "changed", "skipped"].map(|field| response[field].as_u64().unwrap_or(99));
        (counts, response["next"].clone())
    };
    let (planned, _) = bulk(json!({ "dry_run": true })).await;
    assert_eq!((planned, fixture.count(Status::Cancelled).await), ([215, 0, 0], 0));
    let (done, next) = bulk(json!({})).await;
    assert_eq!((done, fixture.count(Status::Cancelled).await), ([215, 215, 0], 215));
    assert_eq!(bulk(json!({ "cursor": next })).await, ([15, 15, 0], Value::Null));
}

async fn a_failed_job_is_retried_with_another_payload(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let path = format!("/jobs/{id}/retry");
    let body = r#"{"payload": {"n": 9223372036854775808}, "priority": 3}"#;
    let retried =
        http.send("POST", &path, &[("content-type", "application/json")], body).await.expect_status(200);
    assert!(retried.text.contains("9223372036854775808"), "{}", retried.text);
    assert_eq!((&retried.json()["status"], &retried.json()["priority"]), (&json!("queued"), &json!(3)));
    http.post(&path, &json!({ "colour": 1 })).await.expect_problem(422, "validation", "colour");
    http.post(&path, &json!({ "priority": 99999 })).await.expect_problem(422, "validation", "priority");
    http.post(&path, &json!({})).await.expect_status(200);
}

async fn tokens_are_listed_and_revoked(fixture: Fixture) {
    let http = super::auth::with_tokens_required(&fixture);
    let (own, admin) = super::auth::token(&fixture, Scope::Admin, None).await;
    let (shop, secret) = super::auth::token(&fixture, Scope::Enqueue, Some(&["mail"])).await;
    let admin = http.with_token(&admin);
    admin.send("DELETE", &format!("/tokens/{own}"), &[], "").await.expect_problem(
        409,
        "conflict",
        "this request",
    );
    let listed = admin.get("/tokens").await.expect_status(200).json();
    let found = listed.as_array().expect("a list").iter().find(|token| token["id"] == shop.to_string());
    let found = found.expect("the token");
    assert_eq!((&found["scopes"], &found["queues"]), (&json!(["enqueue"]), &json!(["mail"])));
    assert!(!listed.to_string().contains(&secret) && found["revoked_at"].is_null(), "{listed}");
    http.with_token(&secret).get("/tokens").await.expect_problem(403, "forbidden", "admin");
    admin.send("DELETE", &format!("/tokens/{shop}"), &[], "").await.expect_status(204);
    assert!(
        !admin
            .get("/tokens")
            .await
            .json()
            .to_string()
            .contains("\"revoked_at\":null,\"scopes\":[\"enqueue\"]")
    );
    let unknown = format!("/tokens/{}", uuid::Uuid::nil());
    admin.send("DELETE", &unknown, &[], "").await.expect_problem(404, "not_found", "does not exist");
    admin.send("DELETE", "/tokens/x", &[], "").await.expect_problem(400, "bad_request", "GET /tokens");
}
