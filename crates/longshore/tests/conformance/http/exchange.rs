//! Reports in a lease call, and what a leased job carries: protocol 1.1 of workers in any language.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use longshore::api::{Api, Limits};
use longshore::{Client, RetryPolicy, Status, UnknownKinds};
use serde_json::{Value, json};
use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::client::{HttpClient, Response, before_timeout};
use super::leases::{ended, held, settle, worker};
use crate::fixture::*;
use crate::worker::until;

cases! {
    one_call_stores_reports_and_leases_the_next_job,
    an_invalid_report_is_rejected_and_does_not_affect_the_others,
    reports_that_are_repeated_after_a_lost_response_are_stored_once,
    a_stale_lease_reports_nothing,
    a_call_with_reports_needs_a_worker_and_does_not_wait,
    a_call_without_claims_waits_for_a_cancel_and_not_for_jobs,
    the_loss_of_a_lease_ends_the_wait_of_one_call,
    a_call_that_claims_ends_the_wait_of_an_earlier_one,
    a_call_that_claims_nothing_ends_no_wait,
    signing_off_ends_the_waits_of_the_worker,
    the_largest_limit_is_a_thousand,
    a_lease_that_a_report_names_is_not_released,
    a_leased_job_carries_metadata_context_checkpoint_and_steps,
    steps_that_are_too_large_for_a_response_are_left_out,
    a_job_that_was_not_started_waits_as_before,
    the_first_call_describes_the_worker,
    ends_of_leases_that_another_server_granted_are_stored,
    a_step_that_another_server_stored_counts_in_a_settle,
    a_result_of_a_dead_worker_is_not_stored_twice,
}

cases! {
    only on postgres:
    a_busy_worker_needs_three_statements_per_call,
    steps_of_several_jobs_share_a_commit,
}

/// A worker that holds jobs.
pub(super) struct Holder {
    pub(super) http: HttpClient,
    pub(super) worker: String,
    pub(super) leases: Vec<Value>,
}

impl Holder {
    pub(super) async fn new(fixture: &Fixture, jobs: usize) -> Self {
        Holder::of(fixture, HttpClient::new(fixture), jobs).await
    }

    pub(super) async fn of(fixture: &Fixture, http: HttpClient, jobs: usize) -> Self {
        for _ in 0..jobs {
            fixture.add(job("greet")).await;
        }
        // No heartbeat finds a cancel while a call waits.
        let body = json!({ "limit": jobs, "stale_after_seconds": 3600 });
        let leased = http.post("/leases", &body).await.expect_status(200);
        let holder = Holder { worker: worker(&leased), leases: leases(&leased), http };
        assert_eq!(holder.leases.len(), jobs);
        holder
    }

    /// Calls with these fields.
    pub(super) async fn call(&self, fields: Value) -> Value {
        self.send(fields).await.expect_status(200).json()
    }

    pub(super) async fn send(&self, fields: Value) -> Response {
        self.http.post("/leases", &self.body(fields)).await
    }

    fn body(&self, mut fields: Value) -> Value {
        fields["worker_id"] = json!(self.worker);
        fields
    }

    /// Starts a call that waits.
    pub(super) fn start(&self, fields: Value) -> tokio::task::JoinHandle<Value> {
        let (http, mut body) = (self.http.clone(), self.body(fields));
        body["wait_seconds"] = json!(20);
        tokio::spawn(async move { http.post("/leases", &body).await.expect_status(200).json() })
    }

    /// Waits until a call that was started after the clock was moved has sent its heartbeat.
    pub(super) async fn until_heartbeat(&self, fixture: &Fixture) {
        let now = fixture.now().await;
        let has_called = || async {
            let workers = fixture.workers(None).await.expect("workers");
            workers.iter().any(|known| known.id.to_string() == self.worker && known.heartbeat_at == now)
        };
        until("a heartbeat", has_called).await;
    }
}

pub(super) fn leases(response: &Response) -> Vec<Value> {
    let jobs = response.json()["jobs"].clone();
    let jobs = jobs.as_array().expect("jobs").iter();
    jobs.map(|job| json!({ "id": job["id"], "lease_no": job["lease_no"] })).collect()
}

pub(super) fn with(lease: &Value, field: &str, value: Value) -> Value {
    let mut item = lease.clone();
    item[field] = value;
    item
}

pub(super) fn id_of(lease: &Value) -> longshore::JobId {
    lease["id"].as_str().expect("an id").parse().expect("an id")
}

async fn one_call_stores_reports_and_leases_the_next_job(fixture: Fixture) {
    let holder = Holder::new(&fixture, 2).await;
    let [done, open] = [&holder.leases[0], &holder.leases[1]];
    let next = fixture.add(job("greet")).await;
    let response = holder
        .call(json!({
            "held": holder.leases,
            "settle": [ended(done, "succeeded", json!({ "result": 7 }))],
            "steps": [with(done, "steps", json!([{ "name": "a", "value": 1 }])),
                      with(open, "steps", json!([{ "name": "b", "value": 2 }]))],
            "checkpoints": [with(open, "checkpoint", json!(null))],
            "progress": [with(open, "progress", json!({ "page": 3 }))],
        }))
        .await;
    assert_eq!(response["protocol"], "1.1");
    let stored = |lease: &Value, field: &str| {
        let mut result = with(lease, field, json!("stored"));
        result["message"] = json!(null);
        result
    };
    assert_eq!(response["settled"], json!([stored(done, "settled")]));
    assert_eq!(response["saved_steps"], json!([stored(done, "saved"), stored(open, "saved")]));
    assert_eq!(response["saved_checkpoints"], json!([stored(open, "saved")]));
    assert_eq!(response["saved_progress"], json!([stored(open, "saved")]));
    assert_eq!((&response["lost"], &response["cancel"]), (&json!([]), &json!([])));
    assert_eq!(response["jobs"][0]["id"], next.to_string());

    let first = fixture.job(id_of(done)).await;
    assert_eq!((first.status, first.result.expect("a result").get()), (Status::Succeeded, "7"));
    let second = fixture.get(id_of(open)).await.expect("get");
    assert_eq!(second.progress.expect("progress").get(), r#"{"page":3}"#);
    assert_eq!(fixture.checkpoint(id_of(open)).await.expect("read").expect("a checkpoint").get(), "null");
    assert_eq!(fixture.steps(id_of(open)).await.expect("steps")[0].name, "b");
    // A plain call has the same fields.
    let plain = holder.call(json!({ "queues": ["none"] })).await;
    for field in ["jobs", "cancel", "lost", "settled", "saved_steps", "saved_checkpoints", "saved_progress"] {
        assert_eq!(plain[field], json!([]), "{field}");
    }
}

async fn an_invalid_report_is_rejected_and_does_not_affect_the_others(fixture: Fixture) {
    let holder = Holder::new(&fixture, 4).await;
    let [a, b, c, d] = [0, 1, 2, 3].map(|i| &holder.leases[i]);
    let large = "x".repeat(1024 * 1024);
    let response = holder
        .call(json!({
            "limit": 0,
            "settle": [
                ended(a, "snoozed", json!({})),
                ended(b, "succeeded", json!({ "result": large })),
                ended(c, "succeeded", json!({ "follow_ups": [{ "kind": "", "payload": 1 }] })),
                ended(d, "succeeded", json!({})),
            ],
            "steps": [
                with(a, "steps", json!([{ "name": "a", "value": 1 }, { "name": "a", "value": 1 }])),
                with(b, "steps", json!([{ "name": "b", "value": 1 }])),
            ],
            "checkpoints": [with(a, "checkpoint", json!(large)), with(b, "checkpoint", json!(1))],
            "progress": [with(a, "progress", json!("x".repeat(64 * 1024))), with(b, "progress", json!(1))],
        }))
        .await;
    let brief = |list: &str, field: &str| -> Vec<(String, String)> {
        let items = response[list].as_array().expect(list).iter();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        items.map(|item| (text(&item[field]), text(&item["message"]))).collect()
    };
    let assert_rejected = |result: &(String, String), part: &str| {
        assert!(result.0 == "rejected" && result.1.contains(part), "{result:?} does not contain {part:?}");
    };
    let stored = ("stored".to_owned(), String::new());
    let settled = brief("settled", "settled");
    assert_rejected(&settled[0], "delay_seconds");
    assert_rejected(&settled[1], "result");
    assert_rejected(&settled[2], "kind");
    assert_eq!(settled[3], stored);
    for (list, part) in
        [("saved_steps", "used twice"), ("saved_checkpoints", "checkpoint"), ("saved_progress", "progress")]
    {
        let saved = brief(list, "saved");
        assert_rejected(&saved[0], part);
        assert_eq!(saved[1], stored, "{list}");
    }
    let statuses = [a, b, c, d].map(|lease| fixture.status(id_of(lease)));
    let [a, b, c, d] = statuses;
    assert_eq!(
        (a.await, b.await, c.await, d.await),
        (Status::Running, Status::Running, Status::Running, Status::Succeeded)
    );
}

async fn reports_that_are_repeated_after_a_lost_response_are_stored_once(fixture: Fixture) {
    let holder = Holder::new(&fixture, 2).await;
    let [first, second] = [&holder.leases[0], &holder.leases[1]];
    let follow_up = json!({ "follow_ups": [{ "kind": "next", "payload": 1, "queue": "other" }] });
    let reports = json!({
        "limit": 0,
        "settle": [ended(first, "succeeded", follow_up), ended(second, "failed", json!({ "error": "no paper" }))],
    });
    let steps =
        json!({ "limit": 0, "steps": [with(first, "steps", json!([{ "name": "a", "value": { "b": 1 } }]))] });
    let elsewhere =
        Holder { http: HttpClient::new(&fixture), worker: holder.worker.clone(), leases: Vec::new() };
    for server in [&holder, &holder, &elsewhere] {
        assert_eq!(server.call(steps.clone()).await["saved_steps"][0]["saved"], "stored");
    }
    for server in [&holder, &holder, &elsewhere] {
        let response = server.call(reports.clone()).await;
        assert_eq!(response["settled"][0]["settled"], "stored");
        assert_eq!(response["settled"][1]["settled"], "stored");
    }
    assert_eq!(fixture.job(id_of(second)).await.errors.len(), 1);
    assert_eq!(fixture.claim_from("other", fixture.worker().await, 9).await.len(), 1, "one follow-up");
    // Another value is another step.
    let third = Holder::new(&fixture, 1).await;
    let step = |value: u32| json!({ "limit": 0, "steps": [with(&third.leases[0], "steps", json!([{ "name": "a", "value": value }]))] });
    assert_eq!(third.call(step(1)).await["saved_steps"][0]["saved"], "stored");
    let other = third.call(step(2)).await["saved_steps"][0].clone();
    assert_eq!(other["saved"], "rejected");
    assert!(other["message"].as_str().expect("a message").contains("another value"), "{other}");
}

async fn a_stale_lease_reports_nothing(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    let stale = json!({ "id": holder.leases[0]["id"], "lease_no": 7 });
    let response = holder
        .call(json!({
            "limit": 0,
            "held": [holder.leases[0], stale],
            "settle": [ended(&stale, "succeeded", json!({})), ended(&stale, "not_started", json!({}))],
            "steps": [with(&stale, "steps", json!([{ "name": "a", "value": 1 }]))],
            "checkpoints": [with(&stale, "checkpoint", json!(1))],
            "progress": [with(&stale, "progress", json!(1))],
        }))
        .await;
    for (list, field) in [
        ("settled", "settled"),
        ("saved_steps", "saved"),
        ("saved_checkpoints", "saved"),
        ("saved_progress", "saved"),
    ] {
        for item in response[list].as_array().expect(list) {
            assert_eq!(item[field], "lease_lost", "{list}");
        }
    }
    let id = id_of(&stale);
    assert_eq!(fixture.status(id).await, Status::Running);
    assert_eq!(fixture.steps(id).await.expect("steps").len(), 0);
    assert!(fixture.checkpoint(id).await.expect("read").is_none());
}

async fn a_call_with_reports_needs_a_worker_and_does_not_wait(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    let settle = json!([ended(&holder.leases[0], "succeeded", json!({}))]);
    let refused = holder.http.post("/leases", &json!({ "settle": settle })).await;
    refused.expect_problem(422, "validation", "worker_id");
    let too_many = vec![holder.leases[0].clone(); 1001];
    let too_many: Vec<Value> = too_many.iter().map(|lease| with(lease, "progress", json!(1))).collect();
    holder.send(json!({ "progress": too_many })).await.expect_problem(422, "validation", "progress");
    let response = before_timeout(holder.call(json!({ "settle": settle, "wait_seconds": 20 }))).await;
    assert_eq!((&response["settled"][0]["settled"], &response["jobs"]), (&json!("stored"), &json!([])));
}

async fn a_call_without_claims_waits_for_a_cancel_and_not_for_jobs(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    fixture.advance(SECOND).await;
    let waiting = holder.start(json!({ "limit": 0, "held": holder.leases }));
    holder.until_heartbeat(&fixture).await;
    let due = fixture.add(job("greet")).await;
    // Another worker gets the job, so the wake-up has been sent.
    let other = holder.http.post("/leases", &json!({ "wait_seconds": 20 })).await.expect_status(200);
    assert_eq!(held(&other)["id"], due.to_string());
    assert!(!waiting.is_finished(), "it waits for no jobs");
    fixture.cancel(id_of(&holder.leases[0])).await.expect("cancel");
    let response = before_timeout(waiting).await.expect("a response");
    assert_eq!((&response["cancel"], &response["jobs"]), (&json!(holder.leases), &json!([])));
}

async fn the_loss_of_a_lease_ends_the_wait_of_one_call(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("greet")).await;
    // A waiting call sends a heartbeat every 0.75 seconds.
    let leased = http.post("/leases", &json!({ "stale_after_seconds": 3 })).await.expect_status(200);
    let holder = Holder { worker: worker(&leased), leases: leases(&leased), http };
    fixture.advance(SECOND).await;
    let waiting = holder.start(json!({ "limit": 0, "held": holder.leases }));
    holder.until_heartbeat(&fixture).await;
    // The worker settles the job through another server, so that this one does not know.
    let elsewhere = HttpClient::new(&fixture);
    let item = ended(&holder.leases[0], "succeeded", json!({}));
    assert_eq!(settle(&elsewhere, &holder.worker, item).await, "stored");
    let response = before_timeout(waiting).await.expect("a response");
    assert_eq!(response["lost"], json!(holder.leases));
    // The next call still lists it, and waits.
    fixture.advance(SECOND).await;
    let waiting = holder.start(json!({ "held": holder.leases }));
    holder.until_heartbeat(&fixture).await;
    let id = fixture.add(job("greet")).await;
    let response = before_timeout(waiting).await.expect("a response");
    assert_eq!(
        (&response["lost"], &response["jobs"][0]["id"]),
        (&json!(holder.leases), &json!(id.to_string()))
    );
}

async fn a_call_that_claims_ends_the_wait_of_an_earlier_one(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    fixture.advance(SECOND).await;
    let waiting = holder.start(json!({ "limit": 5, "held": holder.leases }));
    holder.until_heartbeat(&fixture).await;
    let second = holder.call(json!({ "limit": 1, "held": holder.leases })).await;
    assert_eq!(second["jobs"], json!([]));
    assert_eq!(before_timeout(waiting).await.expect("a response")["jobs"], json!([]), "it returns no jobs");
    // Only the newest call waits, and it gets the next job.
    fixture.advance(SECOND).await;
    let first = holder.start(json!({ "held": holder.leases }));
    holder.until_heartbeat(&fixture).await;
    let newest = holder.start(json!({ "held": holder.leases }));
    assert_eq!(before_timeout(first).await.expect("a response")["jobs"], json!([]));
    let id = fixture.add(job("greet")).await;
    assert_eq!(before_timeout(newest).await.expect("a response")["jobs"][0]["id"], id.to_string());
}

async fn a_call_that_claims_nothing_ends_no_wait(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    fixture.advance(SECOND).await;
    let waiting = holder.start(json!({ "held": holder.leases }));
    holder.until_heartbeat(&fixture).await;
    let item = ended(&holder.leases[0], "succeeded", json!({}));
    assert_eq!(holder.call(json!({ "limit": 0, "settle": [item] })).await["settled"][0]["settled"], "stored");
    holder.call(json!({ "limit": 0 })).await;
    assert!(!waiting.is_finished(), "it still waits");
    let id = fixture.add(job("greet")).await;
    assert_eq!(before_timeout(waiting).await.expect("a response")["jobs"][0]["id"], id.to_string());
}

async fn signing_off_ends_the_waits_of_the_worker(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    fixture.advance(SECOND).await;
    let claims = holder.start(json!({ "held": holder.leases }));
    holder.until_heartbeat(&fixture).await;
    fixture.advance(SECOND).await;
    let watches = holder.start(json!({ "limit": 0, "held": holder.leases }));
    holder.until_heartbeat(&fixture).await;
    holder.http.send("DELETE", &format!("/leases/{}", holder.worker), &[], "").await.expect_status(204);
    for waiting in [claims, watches] {
        assert_eq!(before_timeout(waiting).await.expect("a response")["jobs"], json!([]));
    }
    holder.send(json!({})).await.expect_status(409);
}

async fn the_largest_limit_is_a_thousand(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.enqueue_many((0..1001).map(|_| job("greet"))).await.expect("enqueue");
    http.post("/leases", &json!({ "limit": 1001 })).await.expect_problem(422, "validation", "limit");
    let leased = http.post("/leases", &json!({ "limit": 1000 })).await.expect_status(200);
    assert_eq!(leases(&leased).len(), 1000);
    let none = http.post("/leases", &json!({ "limit": 0 })).await.expect_status(200);
    assert_eq!(none.json()["jobs"], json!([]));
}

/// The end of an attempt may be rejected. Then the worker still holds the lease, although it no longer lists it.
async fn a_lease_that_a_report_names_is_not_released(fixture: Fixture) {
    let holder = Holder::new(&fixture, 2).await;
    fixture.advance(MINUTE / 2).await;
    let rejected = ended(&holder.leases[0], "snoozed", json!({}));
    holder.call(json!({ "limit": 0, "held": [], "settle": [rejected] })).await;
    assert_eq!(fixture.status(id_of(&holder.leases[0])).await, Status::Running);
    assert_eq!(fixture.status(id_of(&holder.leases[1])).await, Status::Queued, "nothing names this one");
}

async fn a_leased_job_carries_metadata_context_checkpoint_and_steps(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let retry = RetryPolicy::fixed(SECOND);
    let id = fixture
        .add(job("greet").retry(retry).context("an order").tags(["vip"]).metadata(raw(r#"{"shop":7}"#)))
        .await;
    let first = http.post("/leases", &json!({})).await.expect_status(200);
    let leased = first.json()["jobs"][0].clone();
    assert_eq!((&leased["metadata"], &leased["context"]), (&json!({ "shop": 7 }), &json!("an order")));
    assert_eq!((&leased["checkpoint"], &leased["steps"]), (&json!(null), &json!([])));
    let (lease, worker_id) = (held(&first), worker(&first));
    let reports = json!({
        "worker_id": worker_id, "limit": 0,
        "steps": [with(&lease, "steps", json!([{ "name": "b", "value": 2 }, { "name": "a", "value": { "c": 1 } }]))],
        "checkpoints": [with(&lease, "checkpoint", json!({ "page": 9 }))],
        "settle": [ended(&lease, "failed", json!({ "error": "no paper" }))],
    });
    http.post("/leases", &reports).await.expect_status(200);
    // A job without saved work, in the same response.
    let other = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({ "worker_id": worker_id })).await.expect_status(200);
    let item = ended(&held(&leased), "not_started", json!({}));
    assert_eq!(settle(&http, &worker_id, item).await, "stored");
    fixture.advance(2 * SECOND).await;
    let request = json!({ "worker_id": worker_id, "wait_seconds": 20, "limit": 2 });
    let mut jobs = Vec::new();
    while jobs.len() < 2 {
        let response = before_timeout(http.post("/leases", &request)).await.expect_status(200).json();
        jobs.extend(response["jobs"].as_array().expect("jobs").clone());
    }
    let of = |id: longshore::JobId| jobs.iter().find(|job| job["id"] == id.to_string()).expect("the job");
    let again = of(id);
    assert_eq!((&again["lease_no"], &again["checkpoint"]), (&json!(2), &json!({ "page": 9 })));
    let brief: Vec<_> = again["steps"]
        .as_array()
        .expect("steps")
        .iter()
        .map(|step| (step["name"].clone(), step["status"].clone(), step["value"].clone()))
        .collect();
    let done = || json!("done");
    assert_eq!(brief, [(json!("a"), done(), json!({ "c": 1 })), (json!("b"), done(), json!(2))]);
    assert_eq!((&of(other)["checkpoint"], &of(other)["steps"]), (&json!(null), &json!([])));
}

async fn steps_that_are_too_large_for_a_response_are_left_out(fixture: Fixture) {
    let holder = Holder::new(&fixture, 3).await;
    let value = "x".repeat(600 * 1024);
    for (lease, value) in holder.leases.iter().zip([json!(value), json!(value), json!(null)]) {
        let steps = if value.is_null() { json!([]) } else { json!([{ "name": "a", "value": value }]) };
        let mut report = json!({ "limit": 0, "settle": [ended(lease, "released", json!({}))] });
        if steps != json!([]) {
            report["steps"] = json!([with(lease, "steps", steps)]);
        }
        holder.call(report).await;
    }
    let mut jobs = Vec::new();
    // The first look may start behind them.
    while jobs.len() < 3 {
        let leased = before_timeout(holder.call(json!({ "limit": 3, "wait_seconds": 20 }))).await;
        jobs = leased["jobs"].as_array().expect("jobs").clone();
        let is_complete = jobs.len() == 3;
        for job in jobs.iter().filter(|_| !is_complete) {
            let lease = json!({ "id": job["id"], "lease_no": job["lease_no"] });
            holder.call(json!({ "limit": 0, "settle": [ended(&lease, "not_started", json!({}))] })).await;
        }
    }
    let steps: Vec<_> = jobs.iter().map(|job| job["steps"].as_array().map(Vec::len)).collect();
    assert_eq!(steps, [Some(1), None, Some(0)]);
    let mut journal = json!({ "id": jobs[1]["id"], "lease_no": jobs[1]["lease_no"] });
    journal["worker_id"] = json!(holder.worker);
    let journal = holder.http.post("/leases/journal", &journal).await.expect_status(200);
    assert_eq!(journal.json()["steps"].as_array().map(Vec::len), Some(1));
}

async fn a_job_that_was_not_started_waits_as_before(fixture: Fixture) {
    let holder = Holder::new(&fixture, 2).await;
    let before = fixture.job(id_of(&holder.leases[0])).await.run_at;
    fixture.advance(MINUTE).await;
    let items: Vec<Value> =
        holder.leases.iter().map(|lease| ended(lease, "not_started", json!({}))).collect();
    let response = holder.call(json!({ "limit": 0, "settle": [items[0]] })).await;
    assert_eq!(response["settled"][0]["settled"], "stored");
    assert_eq!(settle(&holder.http, &holder.worker, items[1].clone()).await, "stored");
    for lease in &holder.leases {
        let job = fixture.job(id_of(lease)).await;
        assert_eq!((job.status, job.attempts, job.errors.len()), (Status::Queued, 0, 0));
        assert_eq!(job.run_at, before, "it keeps its place in the queue");
    }
    // A release leaves no row to find.
    let again = holder.call(json!({ "limit": 0, "settle": [items[0]] })).await;
    assert_eq!(again["settled"][0]["settled"], "lease_lost");
}

async fn the_first_call_describes_the_worker(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let body = json!({ "name": "py", "host": "web-3", "pid": 4711, "version": "longshore-python 0.1.0", "limit": 0 });
    http.post("/leases", &body).await.expect_status(200);
    let known = fixture.workers(None).await.expect("workers").remove(0);
    assert_eq!((known.host.as_deref(), known.pid), (Some("web-3"), Some(4711)));
    assert_eq!((known.version.as_deref(), known.concurrency), (Some("longshore-python 0.1.0"), 1));
    for field in ["host", "version"] {
        let body = json!({ field: "x".repeat(256) });
        http.post("/leases", &body).await.expect_problem(422, "validation", field);
        http.post("/leases", &json!({ field: "" })).await.expect_problem(422, "validation", field);
    }
}

async fn ends_of_leases_that_another_server_granted_are_stored(fixture: Fixture) {
    let holder = Holder::new(&fixture, 3).await;
    let elsewhere = HttpClient::new(&fixture);
    for (lease, outcome, more, status) in [
        (&holder.leases[0], "succeeded", json!({ "result": 1 }), Status::Succeeded),
        (&holder.leases[1], "failed", json!({ "error": "no paper" }), Status::Retrying),
        (&holder.leases[2], "not_started", json!({}), Status::Queued),
    ] {
        assert_eq!(settle(&elsewhere, &holder.worker, ended(lease, outcome, more)).await, "stored");
        assert_eq!(fixture.status(id_of(lease)).await, status);
        // The first server still keeps the claim, but the lease has ended.
        assert_eq!(
            settle(&holder.http, &holder.worker, ended(lease, "cancelled", json!({}))).await,
            "lease_lost"
        );
        assert_eq!(fixture.status(id_of(lease)).await, status);
    }
}

/// Attempts count since the last step. The server that granted the lease does not learn of a step that another one stores.
async fn a_step_that_another_server_stored_counts_in_a_settle(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet").max_attempts(2).retry(RetryPolicy::fixed(SECOND))).await;
    let worker_id = worker(&http.post("/leases", &json!({ "limit": 0 })).await.expect_status(200));
    let request = json!({ "worker_id": worker_id, "wait_seconds": 20 });
    let failed = json!({ "error": "no paper" });
    for attempt in 1..=4 {
        let lease = held(&before_timeout(http.post("/leases", &request)).await.expect_status(200));
        if attempt == 2 {
            let steps = json!({ "worker_id": worker_id, "limit": 0, "steps": [with(&lease, "steps", json!([{ "name": "a" }]))] });
            let stored = HttpClient::new(&fixture).post("/leases", &steps).await.expect_status(200);
            assert_eq!(stored.json()["saved_steps"][0]["saved"], "stored");
        }
        assert_eq!(settle(&http, &worker_id, ended(&lease, "failed", failed.clone())).await, "stored");
        // Without the step, the second failure would be the last.
        let status = if attempt < 3 { Status::Retrying } else { Status::FailedPermanent };
        assert_eq!(fixture.status(id).await, status, "attempt {attempt}");
        if status == Status::FailedPermanent {
            return;
        }
        fixture.advance(2 * SECOND).await;
    }
}

async fn a_result_of_a_dead_worker_is_not_stored_twice(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({ "stale_after_seconds": 10 })).await.expect_status(200);
    let holder = Holder { worker: worker(&leased), leases: leases(&leased), http };
    fixture.advance(11 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    let settle = json!([ended(&holder.leases[0], "succeeded", json!({}))]);
    holder.send(json!({ "settle": settle })).await.expect_problem(409, "conflict", "register again");
    assert_eq!(fixture.status(id).await, Status::Retrying);
}

// ---- statements --------------------------------------------------------------

/// A proxy to Postgres that counts statements.
struct Counter {
    url: String,
    statements: Arc<AtomicUsize>,
}

impl Counter {
    async fn start(fixture: &Fixture) -> Self {
        let options = PgConnectOptions::from_str(&database_url()).expect("a URL");
        let server = format!("{}:{}", options.get_host(), options.get_port());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let proxy = listener.local_addr().expect("address").to_string();
        let statements = Arc::new(AtomicUsize::new(0));
        let url = with_parameter(&fixture.url().replacen(&server, &proxy, 1), "sslmode=disable");
        let counter = Counter { url, statements: statements.clone() };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&server).await.expect("connect");
                tokio::spawn(forward(client, server, statements.clone()));
            }
        });
        counter
    }

    /// How many statements the work takes.
    async fn count<T>(&self, work: impl Future<Output = T>) -> (usize, T) {
        let before = self.statements.load(Ordering::SeqCst);
        let done = work.await;
        (self.statements.load(Ordering::SeqCst) - before, done)
    }
}

/// Forwards the messages of a client one by one, and counts those that execute a statement.
async fn forward(client: TcpStream, server: TcpStream, statements: Arc<AtomicUsize>) -> std::io::Result<()> {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
    // The first message has no type.
    let mut has_type = false;
    loop {
        let kind = if has_type { from_client.read_u8().await? } else { 0 };
        let length = from_client.read_i32().await?;
        let mut rest = vec![0; length as usize - 4];
        from_client.read_exact(&mut rest).await?;
        if kind == b'E' || kind == b'Q' {
            statements.fetch_add(1, Ordering::SeqCst);
        }
        if has_type {
            to_server.write_u8(kind).await?;
        }
        to_server.write_i32(length).await?;
        to_server.write_all(&rest).await?;
        has_type = true;
    }
}

async fn a_busy_worker_needs_three_statements_per_call(fixture: Fixture) {
    let counter = Counter::start(&fixture).await;
    let client = Client::connect(&counter.url).await.expect("connect through the proxy");
    let http = HttpClient::for_api(Api::new(client).unknown_kinds(UnknownKinds::Allow));
    let http = http.listening(Limits::default()).await;
    fixture.enqueue_many((0..100).map(|_| job("greet"))).await.expect("enqueue");
    let first = http.post("/leases", &json!({ "limit": 10 })).await.expect_status(200);
    let mut holder = Holder { worker: worker(&first), leases: leases(&first), http };
    let (mut lease_only, mut exchange, mut settle_only) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..3 {
        let held = json!({ "limit": 5, "held": holder.leases });
        let (statements, response) = counter.count(holder.send(held)).await;
        lease_only.push(statements);
        holder.leases.extend(leases(&response.expect_status(200)));
        let settle: Vec<Value> =
            holder.leases.drain(..5).map(|lease| ended(&lease, "succeeded", json!({}))).collect();
        let body = json!({ "limit": 5, "held": holder.leases, "settle": settle });
        let (statements, response) = counter.count(holder.send(body)).await;
        exchange.push(statements);
        holder.leases.extend(leases(&response.expect_status(200)));
        let items: Vec<Value> =
            holder.leases.drain(..5).map(|lease| ended(&lease, "succeeded", json!({}))).collect();
        let body = json!({ "worker_id": holder.worker, "items": items });
        let (statements, response) = counter.count(holder.http.post("/leases/settle", &body)).await;
        settle_only.push(statements);
        response.expect_status(200);
    }
    // A background task may add statements to one of the rounds.
    let fewest = |counts: Vec<usize>| counts.into_iter().min().expect("rounds");
    assert_eq!(
        (fewest(lease_only), fewest(settle_only), fewest(exchange)),
        (2, 1, 3),
        "a heartbeat and a claim; a settle; all three"
    );
}

async fn steps_of_several_jobs_share_a_commit(fixture: Fixture) {
    let counter = Counter::start(&fixture).await;
    let client = Client::connect(&counter.url).await.expect("connect through the proxy");
    let http = HttpClient::for_api(Api::new(client).unknown_kinds(UnknownKinds::Allow));
    let holder = Holder::of(&fixture, http.listening(Limits::default()).await, 5).await;
    let mut counts = Vec::new();
    for round in 0..3 {
        let steps = |lease| with(lease, "steps", json!([{ "name": format!("a{round}"), "value": 1 }]));
        let body = json!({ "limit": 0, "steps": holder.leases.iter().map(steps).collect::<Vec<_>>() });
        let (statements, response) = counter.count(holder.call(body)).await;
        counts.push(statements);
        assert_eq!(response["saved_steps"][4]["saved"], "stored");
    }
    // A background task may add statements to one of the rounds.
    assert_eq!(counts.into_iter().min(), Some(2 * 5 + 2), "two reads per job; the steps; a heartbeat");
}
