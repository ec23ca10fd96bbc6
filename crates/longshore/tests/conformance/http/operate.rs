//! Queues, schedules, dead letters, workers and sweeps over HTTP.

use longshore::{NewJob, Outcome, Status};
use serde_json::{Value, json};

use super::web::Web;
use crate::bench::{Bench, SECOND, job};

cases! {
    a_queue_is_paused_limited_and_resumed,
    a_schedule_is_put_paused_run_and_removed,
    dead_letters_are_listed_and_redriven,
    a_redrive_goes_on_where_the_last_answer_ended,
    a_redrive_passes_over_who_lost_its_key,
    a_sweep_can_be_rehearsed_and_done,
    one_order_changes_whatever_a_filter_finds,
    a_dry_run_foresees_what_an_order_passes_over,
    an_order_of_several_pages_ends_at_its_limit,
}

async fn a_queue_is_paused_limited_and_resumed(bench: Bench) {
    let web = Web::new(&bench);
    bench.add(job("greet").queue("mail")).await;
    assert_eq!(web.send("POST", "/queues/mail/pause", &[], "").await.is(200).json()["paused"], true);
    let worker = bench.worker().await;
    assert!(bench.claim_from("mail", worker, 1).await.is_empty());
    assert_eq!(
        web.json("PUT", "/queues/mail/limit", &json!({ "limit": 3 })).await.is(200).json()["limit"],
        3
    );
    assert_eq!(
        web.json("PUT", "/queues/mail/limit", &json!({ "limit": null })).await.is(200).json()["limit"],
        Value::Null
    );
    web.json("PUT", "/queues/mail/limit", &json!({})).await.is_problem(422, "validation", "limit");
    web.json("PUT", "/queues/mail/limit", &json!([7])).await.is_problem(422, "validation", "object");
    web.json("PUT", "/queues/mail/limit", &json!({ "limit": 3_000_000_000_u32 })).await.is_problem(
        422,
        "validation",
        "limit",
    );
    web.json("PUT", "/queues/mail/limit", &json!({ "limit": 0 })).await.is_problem(
        422,
        "validation",
        "limit",
    );
    assert_eq!(web.send("POST", "/queues/mail/resume", &[], "").await.is(200).json()["paused"], false);
    assert_eq!(bench.claim_from("mail", worker, 1).await.len(), 1);
    assert_eq!(web.get("/queues").await.is(200).json()[0]["name"], "mail");
    let long = "q".repeat(129);
    web.send("POST", &format!("/queues/{long}/pause"), &[], "").await.is_problem(400, "bad_request", "128");
}

async fn a_schedule_is_put_paused_run_and_removed(bench: Bench) {
    let web = Web::new(&bench);
    let schedule = json!({
        "cron": "*/5 * * * *", "zone": "Europe/Berlin", "missed": "all:7",
        "job": { "kind": "report", "payload": { "pages": 3 }, "queue": "slow" },
    });
    let stored = web.json("PUT", "/cron/nightly", &schedule).await.is(200).json();
    assert_eq!(
        (&stored["cron"], &stored["zone"], &stored["missed"]),
        (&schedule["cron"], &schedule["zone"], &schedule["missed"])
    );
    assert_eq!(web.get("/cron").await.is(200).json()[0]["name"], "nightly");
    assert_eq!(web.send("POST", "/cron/nightly/pause", &[], "").await.is(200).json()["paused"], true);
    assert_eq!(web.send("POST", "/cron/nightly/resume", &[], "").await.is(200).json()["paused"], false);
    let ran = web.send("POST", "/cron/nightly/run", &[], "").await.is(201).json();
    assert_eq!(ran["how"], "created");
    let id = ran["job_id"].as_str().expect("an id").parse().expect("an id");
    assert_eq!(bench.get(id).await.expect("get").queue, "slow");
    web.send("DELETE", "/cron/nightly", &[], "").await.is(204);
    for (method, path) in [
        ("GET", "/cron/nightly"),
        ("DELETE", "/cron/nightly"),
        ("POST", "/cron/nightly/run"),
        ("POST", "/cron/nightly/pause"),
    ] {
        web.send(method, path, &[], "").await.is_problem(404, "not_found", "");
    }
    let wrong = |field: &str, value: Value| {
        let mut body = schedule.clone();
        body[field] = value;
        body
    };
    web.json("PUT", "/cron/x", &wrong("cron", json!("every day"))).await.is_problem(422, "validation", "");
    web.json("PUT", "/cron/x", &wrong("zone", json!("Moon/Base"))).await.is_problem(
        422,
        "validation",
        "Moon",
    );
    web.json("PUT", "/cron/x", &wrong("missed", json!("some"))).await.is_problem(422, "validation", "missed");
    web.json("PUT", "/cron/x", &wrong("job", json!({ "kind": "", "payload": 1 }))).await.is_problem(
        422,
        "validation",
        "kind",
    );
}

async fn dead_letters_are_listed_and_redriven(bench: Bench) {
    let web = Web::new(&bench);
    let one = bench.ended(job("mail"), Outcome::FailedPermanent).await;
    let two = bench.ended(job("other"), Outcome::FailedPermanent).await;
    let fine = bench.ended(job("greet"), Outcome::Succeeded).await;
    assert_eq!(web.get("/dead-letters").await.is(200).json().as_array().expect("jobs").len(), 2);
    assert_eq!(web.get("/dead-letters?kind=mail").await.is(200).json()[0]["id"], one.to_string());
    web.send("POST", &format!("/dead-letters/{one}/redrive"), &[], "").await.is(200);
    assert_eq!(bench.status(one).await, Status::Queued);
    web.send("POST", &format!("/dead-letters/{fine}/redrive"), &[], "").await.is_problem(409, "conflict", "");
    assert_eq!(
        web.post("/dead-letters/redrive", &json!({ "kind": "mail" })).await.is(200).json(),
        json!({ "redriven": 0, "skipped": 0, "next": null })
    );
    assert_eq!(web.post("/dead-letters/redrive", &json!({})).await.is(200).json()["redriven"], 1);
    assert_eq!(bench.status(two).await, Status::Queued);
}

async fn a_redrive_goes_on_where_the_last_answer_ended(bench: Bench) {
    let web = Web::new(&bench);
    let mut dead = Vec::new();
    for _ in 0..3 {
        dead.push(bench.ended(job("mail"), Outcome::FailedPermanent).await);
    }
    assert_eq!(web.get("/dead-letters?offset=2").await.is(200).json()[0]["id"], dead[0].to_string());
    web.get("/dead-letters?offset=10001").await.is_problem(400, "bad_request", "cursor");

    let first = web.post("/dead-letters/redrive", &json!({ "limit": 2 })).await.is(200).json();
    assert_eq!(first, json!({ "redriven": 2, "skipped": 0, "next": dead[1].to_string() }));
    let last = web.post("/dead-letters/redrive", &json!({ "limit": 2, "after": first["next"] })).await;
    assert_eq!(last.is(200).json(), json!({ "redriven": 1, "skipped": 0, "next": null }));
    assert_eq!(bench.status(dead[2]).await, Status::Queued);
}

async fn a_redrive_passes_over_who_lost_its_key(bench: Bench) {
    let web = Web::new(&bench);
    let keyed = || job("mail").unique_key("doc 7", longshore::UniqueMode::Dedupe);
    bench.ended(keyed(), Outcome::FailedPermanent).await;
    bench.add(keyed()).await;
    let answer = web.post("/dead-letters/redrive", &json!({})).await.is(200).json();
    assert_eq!(answer, json!({ "redriven": 0, "skipped": 1, "next": null }));
}

async fn a_sweep_can_be_rehearsed_and_done(bench: Bench) {
    let web = Web::new(&bench);
    let id = bench.add(job("greet")).await;
    let dead = bench.worker_with(10 * SECOND).await;
    bench.claim_one(dead).await;
    bench.advance(11 * SECOND).await;
    assert_eq!(web.get("/workers").await.is(200).json()[0]["stale"], true);
    let would = web.post("/sweep", &json!({ "dry_run": true })).await.is(200).json();
    let expected = json!({ "workers": [dead.to_string()], "recovered": 1, "skipped": 0, "dry_run": true });
    assert_eq!(would, expected);
    assert_eq!(bench.status(id).await, Status::Running);
    web.post("/sweep", &json!({ "threshold_seconds": 60 })).await.is(200);
    assert_eq!(bench.status(id).await, Status::Running, "the threshold is honoured");
    web.post("/sweep", &json!({ "threshold_seconds": -1 })).await.is_problem(
        422,
        "validation",
        "threshold_seconds",
    );
    assert_eq!(web.send("POST", "/sweep", &[], "").await.is(200).json()["recovered"], 1);
    assert_eq!(bench.status(id).await, Status::Retrying);
}

async fn one_order_changes_whatever_a_filter_finds(bench: Bench) {
    let web = Web::new(&bench);
    for i in 0..5 {
        bench.add(job("greet").tags(["nightly"]).priority(i)).await;
    }
    let other = bench.add(job("other")).await;
    let order = |action: &str, more: Value| {
        let mut body = json!({ "action": action, "filter": { "tag": "nightly" } });
        for (field, value) in more.as_object().expect("an object") {
            body[field] = value.clone();
        }
        body
    };
    let counts =
        |answer: &Value| [&answer["matched"], &answer["changed"], &answer["skipped"]].map(Value::as_u64);
    let dry = web.post("/jobs/bulk", &order("cancel", json!({ "dry_run": true }))).await.is(200).json();
    assert_eq!(counts(&dry), [5, 0, 0].map(Some));
    let part = web.post("/jobs/bulk", &order("cancel", json!({ "limit": 2 }))).await.is(200).json();
    assert_eq!(counts(&part), [2, 2, 0].map(Some));
    let rest =
        web.post("/jobs/bulk", &order("cancel", json!({ "cursor": part["next"] }))).await.is(200).json();
    assert_eq!((counts(&rest), &rest["next"]), ([3, 3, 0].map(Some), &Value::Null));
    let again = web.post("/jobs/bulk", &order("cancel", json!({}))).await.is(200).json();
    assert_eq!(counts(&again), [5, 0, 5].map(Some), "what has ended cannot be cancelled");
    assert_eq!(
        counts(&web.post("/jobs/bulk", &order("retry", json!({}))).await.is(200).json()),
        [5, 5, 0].map(Some)
    );
    assert_eq!(
        counts(&web.post("/jobs/bulk", &order("delete", json!({}))).await.is(200).json()),
        [5, 0, 5].map(Some)
    );
    web.post("/jobs/bulk", &order("cancel", json!({}))).await.is(200);
    assert_eq!(
        counts(&web.post("/jobs/bulk", &order("delete", json!({}))).await.is(200).json()),
        [5, 5, 0].map(Some)
    );
    assert_eq!(bench.status(other).await, Status::Queued);
    web.post("/jobs/bulk", &order("cancel", json!({ "filter": {} }))).await.is_problem(
        422,
        "validation",
        "filter",
    );
    web.post("/jobs/bulk", &order("cancel", json!({ "limit": 0 }))).await.is_problem(
        422,
        "validation",
        "limit",
    );
    web.post("/jobs/bulk", &order("dance", json!({}))).await.is_problem(422, "validation", "dance");
}

async fn a_dry_run_foresees_what_an_order_passes_over(bench: Bench) {
    let web = Web::new(&bench);
    let order = |action: &str, status: &str, dry_run: bool| json!({ "action": action, "filter": { "status": status }, "dry_run": dry_run });
    // How many of each status there are is how the counts are told apart.
    let foreseen = [
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
        bench.ended(job("greet"), Outcome::Succeeded).await;
    }
    bench.running(job("greet")).await;
    for _ in 0..2 {
        bench.add(job("greet")).await;
    }
    let counts =
        |answer: &Value| ["matched", "changed", "skipped"].map(|field| answer[field].as_u64().unwrap_or(99));
    for (action, status, expected) in foreseen {
        let [matched, _, skipped] = expected;
        let dry = web.post("/jobs/bulk", &order(action, status, true)).await.is(200).json();
        assert_eq!(counts(&dry), [matched, 0, skipped], "would {action} what is {status}");
        let done = web.post("/jobs/bulk", &order(action, status, false)).await.is(200).json();
        assert_eq!(counts(&done), expected, "{action} what is {status}");
    }
}

async fn an_order_of_several_pages_ends_at_its_limit(bench: Bench) {
    let web = Web::new(&bench);
    let jobs: Vec<NewJob> = (0..230).map(|_| job("greet")).collect();
    bench.enqueue_many(jobs).await.expect("enqueued");
    let order = async |more: Value| {
        let mut body = json!({ "action": "cancel", "filter": { "kind": "greet" }, "limit": 215 });
        for (field, value) in more.as_object().expect("an object") {
            body[field] = value.clone();
        }
        let answer = web.post("/jobs/bulk", &body).await.is(200).json();
        let counts = ["matched", "changed", "skipped"].map(|field| answer[field].as_u64().unwrap_or(99));
        (counts, answer["next"].clone())
    };
    let (would, _) = order(json!({ "dry_run": true })).await;
    assert_eq!((would, bench.counted(Status::Cancelled).await), ([215, 0, 0], 0));
    let (done, next) = order(json!({})).await;
    assert_eq!((done, bench.counted(Status::Cancelled).await), ([215, 215, 0], 215));
    assert_eq!(order(json!({ "cursor": next })).await, ([15, 15, 0], Value::Null));
}
