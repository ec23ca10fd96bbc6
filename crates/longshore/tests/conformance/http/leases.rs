//! The lease routes, which workers in any language use.

use std::time::Duration;

use longshore::api::Api;
use longshore::{RetryPolicy, Scope, Status};
use serde_json::{Value, json};

use super::auth::{token, with_tokens_required};
use super::client::{HttpClient, Response, before_timeout};
use crate::fixture::{Engine, Fixture, MINUTE, SECOND, job};
use crate::worker::until;

cases! {
    a_job_can_be_leased_renewed_and_settled,
    every_outcome_has_the_same_effect_as_for_rust_workers,
    an_invalid_settle_or_lease_request_is_refused_by_field,
    follow_ups_are_stored_only_with_their_success,
    a_silent_worker_is_declared_dead_and_can_change_nothing,
    every_call_is_a_heartbeat,
    a_cancel_reaches_a_worker_with_its_next_renewal,
    a_cancel_ends_the_long_poll_of_its_worker,
    a_cancel_by_another_client_ends_a_long_poll,
    a_cancel_before_a_long_poll_is_in_its_response,
    a_reported_cancel_does_not_end_the_next_long_poll,
    an_expensive_head_is_not_scanned_by_every_call,
    a_long_poll_waits_for_work,
    a_long_poll_keeps_its_worker_alive,
    the_renewal_interval_is_fixed_when_the_worker_registers,
    concurrent_calls_of_one_worker_get_one_suspect_in_total,
    a_worker_that_signs_off_releases_its_leases,
    suspects_are_leased_one_at_a_time_across_servers,
    a_worker_can_change_its_queues_and_kinds,
    a_lease_of_a_worker_that_changed_its_queues_is_closed_to_limited_tokens,
    suspects_are_leased_one_at_a_time,
    a_long_poll_ends_when_the_server_stops,
}

pub(super) fn worker(response: &Response) -> String {
    response.json()["worker_id"].as_str().expect("a worker").to_owned()
}

/// The only job of a response, as renew and settle name it.
pub(super) fn held(response: &Response) -> Value {
    let jobs = response.json()["jobs"].clone();
    assert_eq!(jobs.as_array().expect("jobs").len(), 1, "{response:?}");
    json!({ "id": jobs[0]["id"], "lease_no": jobs[0]["lease_no"] })
}

pub(super) fn ended(lease: &Value, outcome: &str, more: Value) -> Value {
    let mut item = lease.clone();
    item["outcome"] = json!(outcome);
    for (field, value) in more.as_object().expect("an object") {
        item[field] = value.clone();
    }
    item
}

pub(super) async fn settle(http: &HttpClient, worker: &str, item: Value) -> String {
    let response = http
        .post("/leases/settle", &json!({ "worker_id": worker, "items": [item] }))
        .await
        .expect_status(200);
    response.json()["items"][0]["settled"].as_str().expect("settled").to_owned()
}

/// Waits until the first call has registered its worker.
pub(super) async fn until_registered(fixture: &Fixture) {
    until("a worker", || async { !fixture.workers(None).await.expect("workers").is_empty() }).await;
}

/// Waits until a worker has called since the clock was moved.
pub(super) async fn until_heartbeat(fixture: &Fixture) {
    let now = fixture.now().await;
    let has_called = || async {
        fixture.workers(None).await.expect("workers").iter().any(|worker| worker.heartbeat_at == now)
    };
    until("a heartbeat", has_called).await;
}

async fn a_job_can_be_leased_renewed_and_settled(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet").priority(7).tags(["nightly"]).flags(["gpu"])).await;
    let leased =
        http.post("/leases", &json!({ "name": "python", "kinds": ["greet"] })).await.expect_status(200);
    let job = leased.json()["jobs"][0].clone();
    assert_eq!(job["id"], id.to_string());
    assert_eq!(
        (&job["attempt"], &job["payload"], &job["priority"]),
        (&json!(1), &json!({ "for": "greet" }), &json!(7))
    );
    assert_eq!((&job["tags"], &job["flags"]), (&json!(["nightly"]), &json!(["gpu"])));
    let (worker_id, lease) = (worker(&leased), held(&leased));
    assert_eq!(fixture.workers(None).await.expect("workers")[0].name, "python");

    let progress = [json!({ "id": lease["id"], "lease_no": lease["lease_no"], "progress": { "pages": 3 } })];
    let renewed = http
        .post("/leases/renew", &json!({ "worker_id": worker_id, "leases": [lease], "progress": progress }))
        .await
        .expect_status(200);
    assert_eq!(renewed.json(), json!({ "lost": [], "cancel": [] }));
    assert_eq!(fixture.get(id).await.expect("get").progress.expect("progress").get(), r#"{"pages":3}"#);

    let item = ended(&lease, "succeeded", json!({ "result": { "pages": 9 } }));
    assert_eq!(settle(&http, &worker_id, item.clone()).await, "stored");
    let done = fixture.get(id).await.expect("get");
    assert_eq!((done.status, done.result.expect("a result").get()), (Status::Succeeded, r#"{"pages":9}"#));
    // The response may have been lost.
    assert_eq!(settle(&http, &worker_id, item).await, "stored");
    assert_eq!(settle(&http, &worker_id, ended(&lease, "failed", json!({}))).await, "lease_lost");
    assert_eq!(fixture.status(id).await, Status::Succeeded);
    http.send("DELETE", &format!("/leases/{worker_id}"), &[], "").await.expect_status(204);
    assert!(fixture.workers(None).await.expect("workers").is_empty());
}

async fn every_outcome_has_the_same_effect_as_for_rust_workers(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let first = http.post("/leases", &json!({})).await.expect_status(200);
    let worker_id = worker(&first);
    let policy = RetryPolicy::fixed(3 * SECOND);
    let cases = [
        ("failed", json!({ "error": "no paper" }), Status::Retrying, 1, 3),
        ("failed", json!({ "error": "no paper", "retry_after_seconds": 40 }), Status::Retrying, 1, 40),
        ("failed", json!({ "error": "no paper", "permanent": true }), Status::FailedPermanent, 1, 0),
        ("cancelled", json!({ "error": "not wanted" }), Status::Cancelled, 1, 0),
        ("snoozed", json!({ "delay_seconds": 50 }), Status::Queued, 0, 50),
        ("released", json!({}), Status::Queued, 0, 0),
    ];
    for (outcome, more, status, attempts, delay) in cases {
        let id = fixture.add(job("greet").retry(policy.clone())).await;
        let leased = http.post("/leases", &json!({ "worker_id": worker_id })).await.expect_status(200);
        let item = ended(&held(&leased), outcome, more);
        assert_eq!(settle(&http, &worker_id, item).await, "stored", "{outcome}");
        let job = fixture.get(id).await.expect("get");
        assert_eq!((job.status, job.attempts), (status, attempts), "{outcome}");
        if delay > 0 {
            assert_eq!(job.run_at, fixture.now().await + Duration::from_secs(delay), "{outcome}");
        }
        if outcome == "failed" {
            assert_eq!(job.last_error.as_deref(), Some("no paper"));
        }
        if !matches!(job.status, Status::FailedPermanent | Status::Cancelled) {
            fixture.cancel(id).await.expect("cancel");
        }
    }
}

async fn an_invalid_settle_or_lease_request_is_refused_by_field(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let (worker_id, lease) = (worker(&leased), held(&leased));
    let assert_refused = |item: Value, part: &'static str| {
        let (http, worker_id) = (http.clone(), worker_id.clone());
        async move {
            let body = json!({ "worker_id": worker_id, "items": [item] });
            http.post("/leases/settle", &body).await.expect_problem(422, "validation", part);
        }
    };
    assert_refused(ended(&lease, "asleep", json!({})), "asleep").await;
    assert_refused(ended(&lease, "snoozed", json!({})), "delay_seconds").await;
    assert_refused(ended(&lease, "released", json!({ "result": 1 })), "result").await;
    assert_refused(
        ended(&lease, "failed", json!({ "permanent": true, "retry_after_seconds": 1 })),
        "permanent",
    )
    .await;
    assert_refused(
        ended(&lease, "failed", json!({ "follow_ups": [{ "kind": "a", "payload": 1 }] })),
        "follow_ups",
    )
    .await;
    assert_refused(
        ended(&lease, "succeeded", json!({ "follow_ups": [{ "kind": "", "payload": 1 }] })),
        "items[0]",
    )
    .await;
    http.post("/leases", &json!({ "limit": -1 })).await.expect_problem(422, "validation", "");
    http.post("/leases", &json!({ "queues": [] })).await.expect_problem(422, "validation", "queues");
    http.post("/leases", &json!({ "queues": [""] })).await.expect_problem(422, "validation", "queues");
    http.post("/leases", &json!({ "stale_after_seconds": 1 })).await.expect_problem(
        422,
        "validation",
        "stale_after_seconds",
    );
    for wait in [-1.0, 20.5, 32768.0, 1e300] {
        http.post("/leases", &json!({ "wait_seconds": wait })).await.expect_problem(
            422,
            "validation",
            "wait_seconds",
        );
    }
    http.send("DELETE", "/leases/seven", &[], "").await.expect_problem(400, "bad_request", "worker_id");
    assert_eq!(settle(&http, &worker_id, ended(&lease, "released", json!({}))).await, "stored");
}

async fn follow_ups_are_stored_only_with_their_success(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let (worker_id, lease) = (worker(&leased), held(&leased));
    let more = json!({ "follow_ups": [{ "kind": "next", "payload": 1, "queue": "other" }] });
    let stale = json!({ "id": lease["id"], "lease_no": 99 });
    assert_eq!(settle(&http, &worker_id, ended(&stale, "succeeded", more.clone())).await, "lease_lost");
    assert!(fixture.claim_from("other", fixture.worker().await, 1).await.is_empty());
    assert_eq!(settle(&http, &worker_id, ended(&lease, "succeeded", more)).await, "stored");
    assert_eq!(fixture.claim_from("other", fixture.worker().await, 1).await.len(), 1);
}

async fn a_silent_worker_is_declared_dead_and_can_change_nothing(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({ "stale_after_seconds": 10 })).await.expect_status(200);
    let (worker_id, lease) = (worker(&leased), held(&leased));
    fixture.advance(11 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    assert_eq!(fixture.status(id).await, Status::Retrying);
    assert_eq!(settle(&http, &worker_id, ended(&lease, "succeeded", json!({}))).await, "lease_lost");
    http.post("/leases/renew", &json!({ "worker_id": worker_id, "leases": [lease] }))
        .await
        .expect_problem(409, "conflict", "dead");
    http.post("/leases", &json!({ "worker_id": worker_id })).await.expect_problem(
        409,
        "conflict",
        "register again",
    );
    fixture.advance(MINUTE).await;
    let again = http.post("/leases", &json!({})).await.expect_status(200);
    assert_eq!(again.json()["jobs"][0]["interruptions"], 1);
    assert_eq!(again.json()["jobs"][0]["lease_no"], 2);
}

async fn every_call_is_a_heartbeat(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({ "stale_after_seconds": 10 })).await.expect_status(200);
    let (worker_id, lease) = (worker(&leased), held(&leased));
    for _ in 0..3 {
        fixture.advance(8 * SECOND).await;
        http.post("/leases/renew", &json!({ "worker_id": worker_id, "leases": [lease] }))
            .await
            .expect_status(200);
        fixture.advance(8 * SECOND).await;
        http.post("/leases", &json!({ "worker_id": worker_id })).await.expect_status(200);
        assert_eq!(fixture.sweep_now().await.recovered, 0);
    }
}

async fn a_cancel_reaches_a_worker_with_its_next_renewal(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let (worker_id, lease) = (worker(&leased), held(&leased));
    http.send("POST", &format!("/jobs/{id}/cancel"), &[], "").await.expect_status(202);
    let stale = json!({ "id": lease["id"], "lease_no": 7 });
    let renewed = http
        .post("/leases/renew", &json!({ "worker_id": worker_id, "leases": [lease, stale] }))
        .await
        .expect_status(200);
    assert_eq!(renewed.json(), json!({ "lost": [stale], "cancel": [lease] }));
    // From now on every ending except success ends the job as cancelled.
    assert_eq!(settle(&http, &worker_id, ended(&lease, "failed", json!({}))).await, "stored");
    assert_eq!(fixture.status(id).await, Status::Cancelled);
}

/// Starts a long poll of a worker that holds a lease.
fn long_poll(http: &HttpClient, worker_id: &str, lease: &Value) -> tokio::task::JoinHandle<Response> {
    let http = http.clone();
    let body = json!({ "worker_id": worker_id, "held": [lease], "wait_seconds": 20, "kinds": ["none"] });
    tokio::spawn(async move { http.post("/leases", &body).await.expect_status(200) })
}

/// A worker that holds one job. No heartbeat finds a cancel while a call of it waits.
async fn holder(fixture: &Fixture, http: &HttpClient) -> (String, Value) {
    fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({ "stale_after_seconds": 3600 })).await.expect_status(200);
    assert_eq!(leased.json()["cancel"], json!([]));
    (worker(&leased), held(&leased))
}

/// Waits until the long poll of this worker has registered its kinds, shortly before it
/// waits.
async fn until_polling(fixture: &Fixture, worker_id: &str) {
    let polls = || async {
        let workers = fixture.workers(None).await.expect("workers");
        workers.iter().any(|known| known.id.to_string() == worker_id && known.kinds.is_some())
    };
    until("a long poll", polls).await;
}

fn id_of(lease: &Value) -> longshore::JobId {
    lease["id"].as_str().expect("an id").parse().expect("an id")
}

async fn a_cancel_ends_the_long_poll_of_its_worker(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let (mine, lease) = holder(&fixture, &http).await;
    let (other, other_lease) = holder(&fixture, &http).await;
    let polls = [long_poll(&http, &mine, &lease), long_poll(&http, &other, &other_lease)];
    until_polling(&fixture, &mine).await;
    until_polling(&fixture, &other).await;
    fixture.cancel(id_of(&lease)).await.expect("cancel");
    let [poll, other_poll] = polls;
    let response = before_timeout(poll).await.expect("a response").json();
    assert_eq!((&response["cancel"], &response["jobs"]), (&json!([lease]), &json!([])));
    assert!(!other_poll.is_finished(), "the other worker still waits");
    fixture.cancel(id_of(&other_lease)).await.expect("cancel");
    assert_eq!(before_timeout(other_poll).await.expect("a response").json()["cancel"], json!([other_lease]));
    for (worker_id, lease) in [(mine, lease), (other, other_lease)] {
        assert_eq!(settle(&http, &worker_id, ended(&lease, "cancelled", json!({}))).await, "stored");
        assert_eq!(fixture.status(id_of(&lease)).await, Status::Cancelled);
    }
}

async fn a_cancel_by_another_client_ends_a_long_poll(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let (worker_id, lease) = holder(&fixture, &http).await;
    let poll = long_poll(&http, &worker_id, &lease);
    until_polling(&fixture, &worker_id).await;
    fixture.second_client().await.cancel(id_of(&lease)).await.expect("cancel");
    assert_eq!(before_timeout(poll).await.expect("a response").json()["cancel"], json!([lease]));
}

async fn a_cancel_before_a_long_poll_is_in_its_response(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let (worker_id, lease) = holder(&fixture, &http).await;
    fixture.cancel(id_of(&lease)).await.expect("cancel");
    assert_eq!(
        before_timeout(long_poll(&http, &worker_id, &lease)).await.expect("a response").json()["cancel"],
        json!([lease])
    );
    // Another server does not know that.
    let elsewhere = HttpClient::new(&fixture);
    let response = elsewhere.post("/leases", &json!({ "worker_id": worker_id })).await.expect_status(200);
    assert_eq!(response.json()["cancel"], json!([lease]));
}

/// A worker that stops its job slowly can wait for other jobs meanwhile.
async fn a_reported_cancel_does_not_end_the_next_long_poll(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("greet")).await;
    // A waiting call sends a heartbeat every 0.75 seconds.
    let leased = http.post("/leases", &json!({ "stale_after_seconds": 3 })).await.expect_status(200);
    let (worker_id, lease) = (worker(&leased), held(&leased));
    fixture.cancel(id_of(&lease)).await.expect("cancel");
    before_timeout(long_poll(&http, &worker_id, &lease)).await.expect("a response");
    let poll = long_poll(&http, &worker_id, &lease);
    for _ in 0..3 {
        fixture.advance(SECOND).await;
        until_heartbeat(&fixture).await;
    }
    let id = fixture.add(job("none")).await;
    let response = before_timeout(poll).await.expect("a response").json();
    assert_eq!(response["jobs"][0]["id"], id.to_string(), "the call waited for the job");
    assert_eq!(response["cancel"], json!([lease]), "it is listed until it is settled");
}

/// Makes 100,000 copies of the only job.
async fn copy_waiting_job(fixture: &Fixture) {
    let (numbers, new_id) = match fixture.engine() {
        Engine::Postgres => ("select generate_series(1, 100000)", "gen_random_uuid()"),
        Engine::Sqlite => ("select 1 union all select n + 1 from numbers where n < 100000", "randomblob(16)"),
    };
    let copy = format!(
        "with recursive numbers(n) as ({numbers})
         insert into jobs (id, created_at, run_at, priority, max_attempts, kind, queue, payload)
         select {new_id}, created_at, run_at, priority, max_attempts, kind, queue, payload
           from jobs
          cross join numbers;
         insert into ready
                (id, run_at, since, lease_no, priority, attempt, max_attempts, interruptions, keyed, kind, queue)
         select j.id, j.run_at, j.created_at, 0, j.priority, 0, j.max_attempts, 0, w.keyed, j.kind, j.queue
           from jobs j
          cross join ready w
          where j.id <> w.id"
    );
    fixture.sql(&copy, None).await;
}

/// The queue has many jobs that the worker does not handle. A job that arrives behind the
/// worker's position is found by a scan of all of them, which happens only now and then.
async fn an_expensive_head_is_not_scanned_by_every_call(fixture: Fixture) {
    fixture.add(job("other")).await;
    copy_waiting_job(&fixture).await;
    fixture.advance(SECOND).await;
    let http = HttpClient::new(&fixture);
    let poll = async |worker_id: Option<&str>| {
        http.post("/leases", &json!({ "worker_id": worker_id, "kinds": ["greet"] })).await.expect_status(200)
    };
    let worker_id = worker(&poll(None).await);
    let mut rounds = 0;
    loop {
        rounds += 1;
        // If this call takes longer than the pause after the last scan, try again.
        assert!(rounds <= 10, "every call scanned the head");
        poll(Some(&worker_id)).await;
        let behind = fixture.add(job("greet").run_at(crate::fixture::start())).await;
        let found = || async { poll(Some(&worker_id)).await.json()["jobs"][0]["id"] == behind.to_string() };
        let at_once = found().await;
        if !at_once {
            until("a scan of the head", found).await;
            return;
        }
    }
}

async fn a_long_poll_waits_for_work(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let waiting = tokio::spawn({
        let http = http.clone();
        async move { http.post("/leases", &json!({ "wait_seconds": 20 })).await.expect_status(200) }
    });
    until_registered(&fixture).await;
    let id = fixture.add(job("greet")).await;
    assert_eq!(waiting.await.expect("a response").json()["jobs"][0]["id"], id.to_string());
}

async fn a_long_poll_keeps_its_worker_alive(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let waiting = tokio::spawn({
        let http = http.clone();
        let body = json!({ "wait_seconds": 20, "stale_after_seconds": 3 });
        async move { http.post("/leases", &body).await.expect_status(200) }
    });
    until_registered(&fixture).await;
    fixture.advance(2 * SECOND).await;
    let now = fixture.now().await;
    let has_called = || async { fixture.workers(None).await.expect("workers")[0].heartbeat_at == now };
    until("another heartbeat", has_called).await;
    assert!(!waiting.is_finished(), "the call must still wait");
    let id = fixture.add(job("greet")).await;
    assert_eq!(waiting.await.expect("a response").json()["jobs"][0]["id"], id.to_string());
}

async fn the_renewal_interval_is_fixed_when_the_worker_registers(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let first = http.post("/leases", &json!({ "stale_after_seconds": 12 })).await.expect_status(200);
    let worker_id = worker(&first);
    let other_server = HttpClient::new(&fixture);
    for (server, body) in [
        (&http, json!({ "worker_id": worker_id })),
        (&http, json!({ "worker_id": worker_id, "queues": ["other"], "stale_after_seconds": 40 })),
        (&other_server, json!({ "worker_id": worker_id })),
    ] {
        let response = server.post("/leases", &body).await.expect_status(200);
        assert_eq!(response.json()["renew_within_seconds"], 3.0, "{body}");
    }
    assert_eq!(first.json()["renew_within_seconds"], 3.0);
}

async fn concurrent_calls_of_one_worker_get_one_suspect_in_total(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for _ in 0..2 {
        fixture.add(job("greet")).await;
    }
    let dead = fixture.worker_with(10 * SECOND).await;
    assert_eq!(fixture.claim(dead, 2).await.len(), 2);
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    let worker_id = worker(&http.post("/leases", &json!({ "limit": 0 })).await.expect_status(200));
    // The calls wait for each other, and none waits for work.
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let (http, body) = (http.clone(), json!({ "worker_id": worker_id, "limit": 10 }));
            tokio::spawn(async move { http.post("/leases", &body).await.expect_status(200) })
        })
        .collect();
    let mut suspects = 0;
    for call in calls {
        suspects += call.await.expect("a response").json()["jobs"].as_array().expect("jobs").len();
    }
    assert_eq!(suspects, 1);
    let request = json!({ "worker_id": worker_id, "limit": 10, "wait_seconds": 20 });
    let id = fixture.add(job("greet")).await;
    assert_eq!(held(&http.post("/leases", &request).await.expect_status(200))["id"], id.to_string());
}

async fn a_worker_that_signs_off_releases_its_leases(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.suspect(job("greet")).await;
    for _ in 0..3 {
        let leased = http.post("/leases", &json!({})).await.expect_status(200);
        let (worker_id, lease) = (worker(&leased), held(&leased));
        http.send("DELETE", &format!("/leases/{worker_id}"), &[], "").await.expect_status(204);
        let job = fixture.job(id).await;
        assert_eq!(
            (job.status, job.attempts, job.interruptions),
            (Status::Retrying, 0, 1),
            "the interruption must not be counted"
        );
        assert_eq!(settle(&http, &worker_id, ended(&lease, "succeeded", json!({}))).await, "lease_lost");
    }
}

async fn suspects_are_leased_one_at_a_time_across_servers(fixture: Fixture) {
    let (http, other) = (HttpClient::new(&fixture), HttpClient::new(&fixture));
    for _ in 0..2 {
        fixture.add(job("greet")).await;
    }
    let dead = fixture.worker_with(10 * SECOND).await;
    assert_eq!(fixture.claim(dead, 2).await.len(), 2);
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    let worker_id = worker(&other.post("/leases", &json!({ "queues": ["other"] })).await.expect_status(200));
    let lease =
        held(&http.post("/leases", &json!({ "worker_id": worker_id, "limit": 10 })).await.expect_status(200));
    let none =
        other.post("/leases", &json!({ "worker_id": worker_id, "limit": 10 })).await.expect_status(200);
    assert_eq!(none.json()["jobs"], json!([]));
    assert_eq!(settle(&http, &worker_id, ended(&lease, "succeeded", json!({}))).await, "stored");
    let request = json!({ "worker_id": worker_id, "limit": 10, "wait_seconds": 20 });
    held(&other.post("/leases", &request).await.expect_status(200));
}

async fn a_worker_can_change_its_queues_and_kinds(fixture: Fixture) {
    let http = HttpClient::for_api(Api::new(fixture.client()));
    let worker_id = worker(
        &http.post("/leases", &json!({ "queues": ["mail"], "kinds": ["letter"] })).await.expect_status(200),
    );
    let sms = json!({ "kind": "sms", "queue": "phones", "payload": {} });
    http.post("/jobs", &sms).await.expect_problem(422, "validation", "sms");
    let request = json!({ "worker_id": worker_id, "queues": ["phones"], "kinds": ["sms"] });
    http.post("/leases", &request).await.expect_status(200);
    let record = &fixture.workers(None).await.expect("workers")[0];
    assert_eq!(
        (record.queues.clone(), record.kinds.clone()),
        (vec!["phones".into()], Some(vec!["sms".into()]))
    );
    http.post("/jobs", &sms).await.expect_status(201);
    held(&http.post("/leases", &request).await.expect_status(200));
}

/// The worker of another token has changed its queues and still holds a job of the old one.
async fn a_lease_of_a_worker_that_changed_its_queues_is_closed_to_limited_tokens(fixture: Fixture) {
    let (_, all) = token(&fixture, Scope::Work, None).await;
    let (_, limited) = token(&fixture, Scope::Work, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture);
    let (http, limited) = (http.with_token(&all), http.with_token(&limited));
    let id = fixture.add(job("pay").queue("bank")).await;
    let leased = http.post("/leases", &json!({ "queues": ["bank"] })).await.expect_status(200);
    let (worker, lease) = (worker(&leased), held(&leased));
    let moved = json!({ "worker_id": worker, "queues": ["mail"], "held": [lease] });
    http.post("/leases", &moved).await.expect_status(200);
    let settle =
        json!({ "worker_id": worker, "items": [{ "id": id, "lease_no": 1, "outcome": "succeeded" }] });
    let of_lease = json!({ "worker_id": worker, "id": id, "lease_no": 1 });
    for (path, body) in [
        ("/leases", &json!({ "worker_id": worker, "queues": ["mail"], "held": [] })),
        ("/leases/renew", &json!({ "worker_id": worker, "leases": [] })),
        ("/leases/settle", &settle),
        ("/leases/inputs", &of_lease),
    ] {
        limited.post(path, body).await.expect_problem(403, "forbidden", "another queue");
    }
    let path = format!("/leases/{worker}");
    limited.send("DELETE", &path, &[], "").await.expect_problem(403, "forbidden", "another queue");
    assert_eq!(fixture.status(id).await, Status::Running);
    // Without the job it is a worker of `mail` like any other.
    http.post("/leases/settle", &settle).await.expect_status(200);
    limited.post("/leases", &json!({ "worker_id": worker, "queues": ["mail"] })).await.expect_status(200);
}

async fn suspects_are_leased_one_at_a_time(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for _ in 0..2 {
        fixture.add(job("greet")).await;
    }
    let dead = fixture.worker_with(10 * SECOND).await;
    assert_eq!(fixture.claim(dead, 2).await.len(), 2);
    fixture.advance(11 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, 2);
    fixture.advance(MINUTE).await;
    let first = http.post("/leases", &json!({ "limit": 10 })).await.expect_status(200);
    let (worker_id, lease) = (worker(&first), held(&first));
    let none = http.post("/leases", &json!({ "worker_id": worker_id, "limit": 10 })).await.expect_status(200);
    assert_eq!(none.json()["jobs"], json!([]));
    assert_eq!(settle(&http, &worker_id, ended(&lease, "succeeded", json!({}))).await, "stored");
    let request = json!({ "worker_id": worker_id, "limit": 10, "wait_seconds": 20 });
    held(&http.post("/leases", &request).await.expect_status(200));
}

async fn a_long_poll_ends_when_the_server_stops(fixture: Fixture) {
    let ending = tokio::sync::watch::Sender::new(false);
    let http = HttpClient::for_api(Api::new(fixture.client()).ending(ending.subscribe()));
    let waiting =
        tokio::spawn(
            async move { http.post("/leases", &json!({ "wait_seconds": 20 })).await.expect_status(200) },
        );
    until_registered(&fixture).await;
    ending.send_replace(true);
    let response = before_timeout(waiting).await.expect("a response");
    assert_eq!(response.json()["jobs"], json!([]));
}
