//! Limits and fairness over HTTP: groups, rates and defaults, and what `explain` says of them.

use longshore::store::NewWorker;
use longshore::{GroupChange, JobId, Rate, Scope, Status};
use serde_json::{Value, json};

use super::auth::{token, with_tokens_required};
use super::client::HttpClient;
use crate::fixture::*;

cases! {
    a_group_is_changed_shown_and_listed,
    groups_of_all_queues_are_found_by_name,
    a_token_for_some_queues_finds_only_their_groups,
    the_rate_and_the_group_defaults_of_a_queue_are_set,
    bad_settings_are_refused_by_field,
    a_job_is_enqueued_into_a_group,
    explain_says_what_a_job_of_a_group_waits_for,
    a_schedule_keeps_the_group_of_its_jobs,
}

async fn a_group_is_changed_shown_and_listed(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    http.get("/queues/mail/groups/acme").await.expect_status(404);
    let change = json!({ "limit": 5, "rate": { "starts": 100, "burst": 10 } });
    let changed: Value =
        http.json("PATCH", "/queues/mail/groups/acme", &change).await.expect_status(200).json();
    let expected = json!({
        "queue": "mail", "name": "acme", "paused": false, "limit": 5,
        "rate": { "starts": 100, "period_ms": 1000, "burst": 10 },
        "waiting": 0, "waiting_or_more": false, "running": 0, "next_start_at": null,
    });
    assert_eq!(changed, expected);
    let paused: Value = http
        .json("PATCH", "/queues/mail/groups/acme", &json!({ "paused": true, "limit": null }))
        .await
        .expect_status(200)
        .json();
    assert_eq!(
        (&paused["paused"], &paused["limit"], &paused["rate"]["starts"]),
        (&json!(true), &json!(null), &json!(100))
    );
    assert_eq!(http.get("/queues/mail/groups/acme").await.expect_status(200).json(), paused);
    http.json("PATCH", "/queues/mail/groups/a%2Fb%20c", &json!({ "limit": 2 })).await.expect_status(200);
    let page = http.get("/queues/mail/groups?limit=1").await;
    assert_eq!(page.header("link"), "</queues/mail/groups?after=a%2Fb%20c&limit=1>; rel=\"next\"");
    let names = |groups: Value| -> Vec<String> {
        groups
            .as_array()
            .expect("list")
            .iter()
            .map(|group| group["name"].as_str().expect("name").to_owned())
            .collect()
    };
    assert_eq!(names(page.expect_status(200).json()), ["a/b c"]);
    let rest = http.get("/queues/mail/groups?after=a%2Fb%20c&limit=1").await.expect_status(200).json();
    assert_eq!(names(rest), ["acme"]);
}

async fn groups_of_all_queues_are_found_by_name(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("work").queue("mail").group("acme")).await;
    http.json("PATCH", "/queues/images/groups/acme%20inc", &json!({ "paused": true }))
        .await
        .expect_status(200);
    let found: Value = http.get("/groups?name=acme").await.expect_status(200).json();
    let expected = json!([
        { "queue": "mail", "name": "acme", "paused": false },
        { "queue": "images", "name": "acme inc", "paused": true },
    ]);
    assert_eq!(found, expected);
    let one: Value = http.get("/groups?name=ACME&limit=1").await.expect_status(200).json();
    assert_eq!(one, json!([expected[0]]));
    http.get("/groups?name=").await.expect_status(400);
    http.get("/groups").await.expect_status(400);
}

async fn a_token_for_some_queues_finds_only_their_groups(fixture: Fixture) {
    for queue in ["mail", "images"] {
        fixture.add(job("work").queue(queue).group("acme")).await;
    }
    let (_, secret) = token(&fixture, Scope::Read, Some(&["images"])).await;
    let http = with_tokens_required(&fixture).with_token(&secret);
    let found: Value = http.get("/groups?name=acme").await.expect_status(200).json();
    assert_eq!(found, json!([{ "queue": "images", "name": "acme", "paused": false }]));
}

async fn the_rate_and_the_group_defaults_of_a_queue_are_set(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let rate = json!({ "starts": 5, "period_ms": 60000, "burst": 2 });
    let queue: Value =
        http.json("PUT", "/queues/mail/rate", &json!({ "rate": rate })).await.expect_status(200).json();
    assert_eq!(queue["rate"], rate);
    let queue: Value = http
        .json("PATCH", "/queues/mail/group-defaults", &json!({ "limit": 4, "rate": rate }))
        .await
        .expect_status(200)
        .json();
    assert_eq!((&queue["rate"], &queue["group_limit"], &queue["group_rate"]), (&rate, &json!(4), &rate));
    let queue: Value =
        http.json("PUT", "/queues/mail/rate", &json!({ "rate": null })).await.expect_status(200).json();
    assert_eq!((&queue["rate"], &queue["group_limit"]), (&json!(null), &json!(4)));
    assert_eq!(http.get("/queues").await.expect_status(200).json()[0], queue);
}

async fn bad_settings_are_refused_by_field(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let group = "/queues/mail/groups/acme";
    for (body, part) in [
        (json!({ "limit": 0 }), "limit: 0"),
        (json!({ "rate": { "starts": 0 } }), "rate.starts: 0"),
        (json!({ "rate": { "starts": 1, "burst": 0 } }), "rate.burst: 0"),
        (json!({ "rate": { "starts": 1, "period_ms": 0 } }), "rate.period_ms: 0"),
        (json!({ "rate": { "burst": 1 } }), "starts"),
        (json!({ "weight": 1 }), "weight"),
    ] {
        let problem: Value = http.json("PATCH", group, &body).await.expect_status(422).json();
        assert!(problem["message"].as_str().expect("message").contains(part), "{problem}");
    }
    http.json("PUT", "/queues/mail/rate", &json!({})).await.expect_status(422);
    http.json("PATCH", "/queues/mail/group-defaults", &json!({ "limit": 0 })).await.expect_status(422);
    let typo = json!({ "rate": { "starts": 5, "period": 60000 } });
    http.json("PATCH", group, &typo).await.expect_status(422);
    let long = "x".repeat(129);
    http.json("PATCH", &format!("/queues/mail/groups/{long}"), &json!({ "limit": 1 }))
        .await
        .expect_status(422);
    assert_eq!(http.get("/queues").await.expect_status(200).json(), json!([]));
}

async fn a_job_is_enqueued_into_a_group(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let body = |group: &str| json!({ "kind": "greet", "payload": {}, "group": group });
    let job: Value = http.post("/jobs", &body("acme")).await.expect_status(201).json();
    assert_eq!(job["group"], "acme");
    let problem: Value = http.post("/jobs", &body(&"x".repeat(129))).await.expect_status(422).json();
    assert!(problem["message"].as_str().expect("message").starts_with("group: "), "{problem}");
    assert_eq!(fixture.group("default", "acme").await.expect("group").expect("group").waiting, 1);
}

async fn explain_says_what_a_job_of_a_group_waits_for(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let worker = NewWorker { concurrency: 50, stale_after: HOUR, ..NewWorker::new("worker") };
    fixture.store().register(&worker).await.expect("register");
    let explain = async |id: JobId| -> (String, String) {
        let explained: Value = http.get(&format!("/jobs/{id}/explain")).await.expect_status(200).json();
        let text = |field: &str| explained[field].as_str().expect("text").to_owned();
        (text("reason"), text("message"))
    };
    let set = async |change| fixture.set_group("default", "acme", change).await.expect("set_group");
    for group in ["globex", "initech", "acme"] {
        fixture.add(job("greet").group(group)).await;
    }
    let id = fixture.add(job("greet").group("acme")).await;
    let (reason, message) = explain(id).await;
    assert_eq!(reason, "waits_its_turn");
    assert!(message.contains("group `acme` is 3rd of 3 groups in line"), "{message}");
    set(GroupChange { limit: Some(Some(1)), ..GroupChange::default() }).await;
    assert_eq!(fixture.claim(worker.id, 9).await.len(), 3);
    let (reason, message) = explain(id).await;
    assert_eq!(reason, "group_limit");
    assert!(message.starts_with("group `acme`: 1 of 1 running"), "{message}");
    let rate = Some(Some(Rate::per_second(1)));
    set(GroupChange { limit: Some(None), rate, ..GroupChange::default() }).await;
    fixture.add(job("greet").group("acme")).await;
    assert_eq!(fixture.claim(worker.id, 9).await.len(), 1);
    let id = fixture.add(job("greet").group("acme")).await;
    fixture.advance(SECOND / 2).await;
    let (reason, message) = explain(id).await;
    assert_eq!(reason, "rate_limit");
    assert!(message.starts_with("group `acme`: next start in 0.5 s (rate limit"), "{message}");
    set(GroupChange { paused: Some(true), ..GroupChange::default() }).await;
    let (reason, message) = explain(id).await;
    assert_eq!(reason, "group_paused");
    assert!(message.contains("longshore groups resume default acme"), "{message}");
    fixture.rate("default", Some(Rate::per(1, MINUTE))).await.expect("rate");
    let id = fixture.add(job("greet").group("globex")).await;
    fixture.advance(SECOND).await;
    assert_eq!(fixture.claim(worker.id, 1).await.len(), 1);
    let id = if fixture.job(id).await.status == Status::Running {
        fixture.add(job("greet").group("globex")).await
    } else {
        id
    };
    let (reason, message) = explain(id).await;
    assert_eq!(reason, "rate_limit");
    assert!(
        message.starts_with("queue `default`: next start in 60.0 s (rate limit: 1 per 60 s)"),
        "{message}"
    );
}

async fn a_schedule_keeps_the_group_of_its_jobs(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let body = json!({
        "cron": "0 2 * * *",
        "job": { "kind": "greet", "payload": {}, "group": "acme" },
    });
    let schedule: Value = http.json("PUT", "/cron/nightly", &body).await.expect_status(200).json();
    assert_eq!(schedule["job"]["group"], "acme", "{schedule}");
    http.post("/cron/nightly/run", &json!({})).await;
    assert_eq!(fixture.group("default", "acme").await.expect("group").expect("group").waiting, 1);
}
