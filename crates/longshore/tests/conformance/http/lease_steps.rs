//! Durable steps and waits of workers in any language.

use longshore::api::{Access, Api};
use longshore::{Scope, Status, UnknownKinds};
use serde_json::{Value, json};

use super::auth::token;
use super::client::{HttpClient, Response};
use super::leases::{ended, held, settle, worker};
use crate::fixture::*;

cases! {
    a_step_of_an_http_worker_is_stored_once,
    a_job_of_an_http_worker_sleeps_without_a_lease,
    a_job_of_an_http_worker_waits_for_the_first_event,
    an_event_that_was_emitted_before_does_not_suspend_an_http_worker,
    a_wait_that_an_http_worker_repeats_after_a_lost_response_stays_suspended,
    a_stale_lease_of_an_http_worker_journals_nothing,
    bad_steps_and_waits_of_an_http_worker_are_refused_and_store_nothing,
    the_limits_of_a_journal_hold_for_http_workers,
    a_token_limited_to_queues_waits_for_no_events,
    a_cancel_wins_over_the_wait_of_an_http_worker,
}

/// A worker that holds one job.
struct Holder {
    http: HttpClient,
    worker: String,
    lease: Value,
}

impl Holder {
    async fn new(fixture: &Fixture) -> Self {
        fixture.add(job("order")).await;
        Holder::of(HttpClient::new(fixture)).await
    }

    async fn of(http: HttpClient) -> Self {
        let leased = http.post("/leases", &json!({ "stale_after_seconds": 3600 })).await.expect_status(200);
        Holder { worker: worker(&leased), lease: held(&leased), http }
    }

    /// Leases the same job again. The first look may start behind it.
    async fn lease_again(&mut self) {
        let leased = self
            .http
            .post("/leases", &json!({ "worker_id": self.worker, "wait_seconds": 20 }))
            .await
            .expect_status(200);
        self.lease = held(&leased);
    }

    fn id(&self) -> longshore::JobId {
        self.lease["id"].as_str().expect("an id").parse().expect("an id")
    }

    async fn call(&self, path: &str, field: &str, items: Value) -> Response {
        let mut body = self.lease.clone();
        body["worker_id"] = json!(self.worker);
        body[field] = items;
        self.http.post(path, &body).await
    }

    async fn save(&self, steps: Value) -> Response {
        self.call("/leases/steps", "steps", steps).await
    }

    async fn wait(&self, waits: Value) -> Value {
        self.call("/leases/wait", "waits", waits).await.expect_status(200).json()
    }

    async fn journal(&self) -> Response {
        let mut body = self.lease.clone();
        body["worker_id"] = json!(self.worker);
        self.http.post("/leases/journal", &body).await
    }
}

async fn rows(fixture: &Fixture, table: &str) -> i64 {
    fixture.query_number(&format!("select count(*) from {table}"), None).await
}

async fn a_step_of_an_http_worker_is_stored_once(fixture: Fixture) {
    let mut holder = Holder::new(&fixture).await;
    assert_eq!(holder.journal().await.expect_status(200).json(), json!({ "steps": [] }));
    let steps = json!([{ "name": "charge", "value": { "receipt": 17 } }, { "name": "notify" }]);
    // The second response may be the first that arrives.
    for _ in 0..2 {
        assert_eq!(holder.save(steps.clone()).await.expect_status(200).json(), json!({ "saved": "stored" }));
    }
    let refused = holder.save(json!([{ "name": "new" }, { "name": "charge", "value": 18 }])).await;
    refused.expect_problem(409, "conflict", "steps[1]: name: step `charge` is stored with another value");
    let item = ended(&holder.lease, "failed", json!({ "retry_after_seconds": 0 }));
    assert_eq!(settle(&holder.http, &holder.worker, item).await, "stored");
    holder.lease_again().await;
    let steps = holder.journal().await.expect_status(200).json()["steps"].clone();
    let brief: Vec<_> = steps
        .as_array()
        .expect("steps")
        .iter()
        .map(|step| (&step["name"], &step["status"], &step["value"]))
        .collect();
    let done = json!("done");
    assert_eq!(
        brief,
        [(&json!("charge"), &done, &json!({ "receipt": 17 })), (&json!("notify"), &done, &json!(null)),]
    );
    // The attempts count since the last step.
    assert_eq!(holder.save(json!([{ "name": "ship" }])).await.expect_status(200).json()["saved"], "stored");
    assert_eq!(fixture.job(holder.id()).await.attempts, 1);
}

async fn a_job_of_an_http_worker_sleeps_without_a_lease(fixture: Fixture) {
    let mut holder = Holder::new(&fixture).await;
    let nap = json!([{ "name": "nap", "within_seconds": 259_200 }]);
    assert_eq!(holder.wait(nap.clone()).await, json!({ "status": "suspended", "done": [] }));
    let job = fixture.job(holder.id()).await;
    assert_eq!((job.status, job.run_at, job.attempts), (Status::Queued, start() + 3 * DAY, 0));
    assert_eq!((rows(&fixture, "running").await, job.errors.len()), (0, 0));
    // An operator runs it early: it sleeps on, until the first deadline.
    fixture.advance(MINUTE).await;
    fixture.retry(holder.id()).await.expect("run now");
    holder.lease_again().await;
    assert_eq!(holder.wait(nap.clone()).await["status"], "suspended");
    assert_eq!(fixture.job(holder.id()).await.run_at, start() + 3 * DAY);
    fixture.advance(3 * DAY).await;
    let again = Holder::of(holder.http.clone()).await;
    let over = json!({ "status": "continue", "done": [{ "name": "nap", "event": null, "payload": null }] });
    for _ in 0..2 {
        assert_eq!(again.wait(nap.clone()).await, over);
    }
    assert_eq!(
        settle(&again.http, &again.worker, ended(&again.lease, "succeeded", json!({}))).await,
        "stored"
    );
}

async fn a_job_of_an_http_worker_waits_for_the_first_event(fixture: Fixture) {
    let mut holder = Holder::new(&fixture).await;
    let waits = json!([
        { "name": "decision", "events": ["approved", "rejected"], "within_seconds": 86_400 },
        { "name": "nap", "within_seconds": 172_800 },
    ]);
    assert_eq!(holder.wait(waits.clone()).await["status"], "suspended");
    assert_eq!(fixture.job(holder.id()).await.run_at, start() + DAY);
    fixture.emit("rejected", &json!({ "by": "ada" })).await.expect("emit");
    fixture.advance(SECOND).await;
    fixture.emit("approved", &1).await.expect("emit");
    holder.lease_again().await;
    let first = json!({ "name": "decision", "event": "rejected", "payload": { "by": "ada" } });
    let over = json!({ "status": "continue", "done": [first] });
    assert_eq!(holder.wait(waits.clone()).await, over);
    assert_eq!(holder.journal().await.json()["steps"][0]["status"], "done");
    // Another order of the events does not change what came first.
    let reordered = json!([{ "name": "decision", "events": ["rejected", "approved"] }]);
    assert_eq!(holder.wait(reordered).await, over);
    assert_eq!(holder.wait(json!([waits[1]])).await["status"], "suspended");
    assert_eq!(fixture.job(holder.id()).await.run_at, start() + 2 * DAY);
}

async fn an_event_that_was_emitted_before_does_not_suspend_an_http_worker(fixture: Fixture) {
    fixture.emit("approved", &json!(null)).await.expect("emit");
    let holder = Holder::new(&fixture).await;
    let done = json!([{ "name": "approval", "event": "approved", "payload": null }]);
    let waited = holder.wait(json!([{ "name": "approval", "events": ["approved"] }])).await;
    assert_eq!(waited, json!({ "status": "continue", "done": done }));
    assert_eq!(fixture.status(holder.id()).await, Status::Running);
}

async fn a_wait_that_an_http_worker_repeats_after_a_lost_response_stays_suspended(fixture: Fixture) {
    let holder = Holder::new(&fixture).await;
    for _ in 0..2 {
        let waited = holder.wait(json!([{ "name": "approval", "events": ["approved"] }])).await;
        assert_eq!(waited["status"], "suspended");
    }
    assert_eq!(rows(&fixture, "waits").await, 1);
}

async fn a_stale_lease_of_an_http_worker_journals_nothing(fixture: Fixture) {
    let mut holder = Holder::new(&fixture).await;
    let id = holder.id();
    let item = ended(&holder.lease, "released", json!({}));
    assert_eq!(settle(&holder.http, &holder.worker, item).await, "stored");
    let stale = holder.lease.clone();
    holder.lease_again().await;
    holder.lease = stale;
    assert_eq!(holder.save(json!([{ "name": "a" }])).await.expect_status(200).json()["saved"], "lease_lost");
    let waited = holder.wait(json!([{ "name": "nap", "within_seconds": 60 }])).await;
    assert_eq!(waited, json!({ "status": "lease_lost", "done": [] }));
    holder.journal().await.expect_problem(409, "conflict", "is lost");
    assert_eq!((rows(&fixture, "steps").await, fixture.status(id).await), (0, Status::Running));
    // A worker that was declared dead.
    fixture.advance(2 * HOUR).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    holder.save(json!([{ "name": "a" }])).await.expect_problem(409, "conflict", "declared dead");
}

async fn bad_steps_and_waits_of_an_http_worker_are_refused_and_store_nothing(fixture: Fixture) {
    let holder = Holder::new(&fixture).await;
    let large = "x".repeat(1024 * 1024);
    for (steps, message) in [
        (json!([{ "name": "" }]), "steps[0]: name: is empty; use 1 to 128 bytes"),
        (
            json!([{ "name": "a" }, { "name": "x".repeat(257) }]),
            "steps[1]: name: has 257 bytes; use at most 128",
        ),
        (json!([{ "name": "a", "value": large }]), "steps[0]: value: 1048578 bytes of JSON exceed the limit"),
        (json!([{ "name": "a" }, { "name": "a", "value": 2 }]), "steps[1]: name: `a` is used twice"),
        (json!([{ "name": "a", "valeu": 2 }]), "valeu"),
    ] {
        holder.save(steps).await.expect_problem(422, "validation", message);
    }
    for (waits, message) in [
        (json!([]), "waits: is empty"),
        (json!([{ "name": "a" }]), "waits[0]: events: is empty; name an event, or set within_seconds"),
        (json!([{ "name": "x".repeat(257), "within_seconds": 1 }]), "waits[0]: name: has 257 bytes"),
        (
            json!([{ "name": "a", "events": ["x".repeat(129)] }]),
            "waits[0]: events: has 129 bytes; use at most 128",
        ),
        (json!([{ "name": "a", "events": [""] }]), "waits[0]: events: is empty"),
        (json!([{ "name": "a", "within_seconds": -1 }]), "waits[0]: within_seconds"),
        (json!([{ "name": "a", "within_seconds": 4e8 }]), "at most ten years"),
        (
            json!([{ "name": "a", "events": ["e"] }, { "name": "a", "events": ["f"] }]),
            "waits[1]: name: `a` is used twice",
        ),
    ] {
        holder.call("/leases/wait", "waits", waits).await.expect_problem(422, "validation", message);
    }
    assert_eq!((rows(&fixture, "steps").await, rows(&fixture, "waits").await), (0, 0));
    // A name belongs to a step or to a wait.
    holder.save(json!([{ "name": "step", "value": 1 }])).await.expect_status(200);
    let refused = holder.call("/leases/wait", "waits", json!([{ "name": "step", "events": ["e"] }])).await;
    refused.expect_problem(409, "conflict", "waits[0]: name: `step` is the name of a step");
    assert_eq!(fixture.status(holder.id()).await, Status::Running);
}

async fn the_limits_of_a_journal_hold_for_http_workers(fixture: Fixture) {
    let holder = Holder::new(&fixture).await;
    let large = "x".repeat(1024 * 1024 - 2);
    for n in 0..16 {
        let step = json!([{ "name": format!("step {n}"), "value": large }]);
        holder.save(step).await.expect_status(200);
    }
    let one_more = json!([{ "name": "step 16", "value": 1 }]);
    holder.save(one_more).await.expect_problem(
        422,
        "validation",
        "steps: the values of the job's steps exceed",
    );
    // A repetition adds nothing.
    holder.save(json!([{ "name": "step 3", "value": large }])).await.expect_status(200);
    assert_eq!(rows(&fixture, "steps").await, 16);
}

async fn a_token_limited_to_queues_waits_for_no_events(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Work, Some(&["default"])).await;
    fixture.add(job("order")).await;
    let api = Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).access(Access::Tokens);
    let holder = Holder::of(HttpClient::for_api(api).with_token(&secret)).await;
    let waits = json!([{ "name": "a", "events": ["e"] }]);
    holder.call("/leases/wait", "waits", waits).await.expect_problem(403, "forbidden", "");
    assert_eq!(holder.wait(json!([{ "name": "a", "within_seconds": 1 }])).await["status"], "suspended");
}

async fn a_cancel_wins_over_the_wait_of_an_http_worker(fixture: Fixture) {
    let holder = Holder::new(&fixture).await;
    fixture.cancel(holder.id()).await.expect("cancel");
    assert_eq!(holder.wait(json!([{ "name": "a", "events": ["e"] }])).await["status"], "suspended");
    assert_eq!((fixture.status(holder.id()).await, rows(&fixture, "waits").await), (Status::Cancelled, 0));
}
