//! Workers in any language.

use std::task::Poll;
use std::time::Duration;

use longshore::api::{Api, Limits};
use longshore::lifecycle::State;
use longshore::{NewJob, RetryPolicy, Status};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::client::{HttpClient, Response};
use crate::fixture::{Fixture, MINUTE, SECOND, job};
use crate::worker::until;

cases! {
    a_leased_job_is_run_renewed_and_settled,
    every_outcome_is_what_it_is_for_workers_in_rust,
    what_cannot_be_settled_is_refused_by_name,
    follow_ups_exist_only_with_the_success_that_names_them,
    a_worker_that_fell_silent_is_dead_and_powerless,
    a_call_is_a_sign_of_life,
    a_cancel_reaches_a_worker_with_its_next_renewal,
    a_call_waits_for_work,
    a_call_that_waits_keeps_its_worker_alive,
    a_worker_renews_as_often_as_it_said_when_it_registered,
    leases_whose_answer_was_lost_are_given_back,
    a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost,
    a_full_list_of_leases_gives_nothing_back,
    a_caller_that_goes_leaves_nothing_leased,
    two_calls_of_one_worker_share_nothing,
    two_calls_of_one_worker_get_one_suspect_between_them,
    a_worker_that_signs_off_gives_back_what_it_holds,
    suspects_are_leased_one_at_a_time_by_all_servers_together,
    a_call_cut_off_at_any_moment_leaves_nothing_leased,
    a_call_cut_off_when_its_job_counts_as_begun_leaves_nothing_leased,
    a_worker_may_take_other_jobs_than_at_first,
    suspects_are_leased_one_at_a_time,
    a_call_that_waits_is_answered_when_the_server_ends,
}

fn worker(answer: &Response) -> String {
    answer.json()["worker_id"].as_str().expect("a worker").to_owned()
}

/// The one job of an answer, as renew and settle name it.
fn held(answer: &Response) -> Value {
    let jobs = answer.json()["jobs"].clone();
    assert_eq!(jobs.as_array().expect("jobs").len(), 1, "{answer:?}");
    json!({ "id": jobs[0]["id"], "lease_no": jobs[0]["lease_no"] })
}

fn ended(lease: &Value, outcome: &str, more: Value) -> Value {
    let mut item = lease.clone();
    item["outcome"] = json!(outcome);
    for (field, value) in more.as_object().expect("an object") {
        item[field] = value.clone();
    }
    item
}

async fn settle(http: &HttpClient, worker: &str, item: Value) -> String {
    let answer = http
        .post("/leases/settle", &json!({ "worker_id": worker, "items": [item] }))
        .await
        .expect_status(200);
    answer.json()["items"][0]["settled"].as_str().expect("settled").to_owned()
}

/// Registered means that a first call has begun.
async fn until_it_has_begun(fixture: &Fixture) {
    until("a worker", || async { !fixture.workers(None).await.expect("workers").is_empty() }).await;
}

/// A worker has called since the clock was moved on.
async fn until_one_is_heard(fixture: &Fixture) {
    let now = fixture.now().await;
    let is_heard = || async {
        fixture.workers(None).await.expect("workers").iter().any(|worker| worker.heartbeat_at == now)
    };
    until("a sign of life", is_heard).await;
}

async fn a_leased_job_is_run_renewed_and_settled(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet").priority(7).tags(["nightly"]).flags(["gpu"])).await;
    let leased =
        http.post("/leases", &json!({ "name": "python", "kinds": ["greet"] })).await.expect_status(200);
    let given = leased.json()["jobs"][0].clone();
    assert_eq!(given["id"], id.to_string());
    assert_eq!(
        (&given["attempt"], &given["payload"], &given["priority"]),
        (&json!(1), &json!({ "for": "greet" }), &json!(7))
    );
    assert_eq!((&given["tags"], &given["flags"]), (&json!(["nightly"]), &json!(["gpu"])));
    let (me, lease) = (worker(&leased), held(&leased));
    assert_eq!(fixture.workers(None).await.expect("workers")[0].name, "python");

    let progress = [json!({ "id": lease["id"], "lease_no": lease["lease_no"], "progress": { "pages": 3 } })];
    let renewed = http
        .post("/leases/renew", &json!({ "worker_id": me, "leases": [lease], "progress": progress }))
        .await
        .expect_status(200);
    assert_eq!(renewed.json(), json!({ "lost": [], "cancel": [] }));
    assert_eq!(fixture.get(id).await.expect("get").progress.expect("progress").get(), r#"{"pages":3}"#);

    let item = ended(&lease, "succeeded", json!({ "result": { "pages": 9 } }));
    assert_eq!(settle(&http, &me, item.clone()).await, "stored");
    let done = fixture.get(id).await.expect("get");
    assert_eq!((done.status, done.result.expect("a result").get()), (Status::Succeeded, r#"{"pages":9}"#));
    // The answer may have been lost.
    assert_eq!(settle(&http, &me, item).await, "stored");
    assert_eq!(settle(&http, &me, ended(&lease, "failed", json!({}))).await, "lease_lost");
    assert_eq!(fixture.status(id).await, Status::Succeeded);
    http.send("DELETE", &format!("/leases/{me}"), &[], "").await.expect_status(204);
    assert!(fixture.workers(None).await.expect("workers").is_empty());
}

async fn every_outcome_is_what_it_is_for_workers_in_rust(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let first = http.post("/leases", &json!({})).await.expect_status(200);
    let me = worker(&first);
    let policy = RetryPolicy::fixed(3 * SECOND);
    let cases = [
        ("failed", json!({ "error": "no paper" }), Status::Retrying, 1, 3),
        ("failed", json!({ "error": "no paper", "retry_after_seconds": 40 }), Status::Retrying, 1, 40),
        ("failed", json!({ "error": "no paper", "permanent": true }), Status::FailedPermanent, 1, 0),
        ("cancelled", json!({ "error": "not wanted" }), Status::Cancelled, 1, 0),
        ("snoozed", json!({ "delay_seconds": 50 }), Status::Queued, 0, 50),
        ("released", json!({}), Status::Queued, 0, 0),
    ];
    for (outcome, more, status, attempts, later) in cases {
        let id = fixture.add(job("greet").retry(policy.clone())).await;
        let leased = http.post("/leases", &json!({ "worker_id": me })).await.expect_status(200);
        let item = ended(&held(&leased), outcome, more);
        assert_eq!(settle(&http, &me, item).await, "stored", "{outcome}");
        let job = fixture.get(id).await.expect("get");
        assert_eq!((job.status, job.attempts), (status, attempts), "{outcome}");
        if later > 0 {
            assert_eq!(job.run_at, fixture.now().await + Duration::from_secs(later), "{outcome}");
        }
        if outcome == "failed" {
            assert_eq!(job.last_error.as_deref(), Some("no paper"));
        }
        if !matches!(job.status, Status::FailedPermanent | Status::Cancelled) {
            fixture.cancel(id).await.expect("cancel");
        }
    }
}

async fn what_cannot_be_settled_is_refused_by_name(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let (me, lease) = (worker(&leased), held(&leased));
    let refuse = |item: Value, part: &'static str| {
        let (http, me) = (http.clone(), me.clone());
        async move {
            let body = json!({ "worker_id": me, "items": [item] });
            http.post("/leases/settle", &body).await.expect_problem(422, "validation", part);
        }
    };
    refuse(ended(&lease, "asleep", json!({})), "asleep").await;
    refuse(ended(&lease, "snoozed", json!({})), "delay_seconds").await;
    refuse(ended(&lease, "released", json!({ "result": 1 })), "result").await;
    refuse(ended(&lease, "failed", json!({ "permanent": true, "retry_after_seconds": 1 })), "permanent")
        .await;
    refuse(ended(&lease, "failed", json!({ "follow_ups": [{ "kind": "a", "payload": 1 }] })), "follow_ups")
        .await;
    refuse(ended(&lease, "succeeded", json!({ "follow_ups": [{ "kind": "", "payload": 1 }] })), "items[0]")
        .await;
    http.post("/leases", &json!({ "limit": 0 })).await.expect_problem(422, "validation", "limit");
    http.post("/leases", &json!({ "limit": 101 })).await.expect_problem(422, "validation", "limit");
    http.post("/leases", &json!({ "queues": [] })).await.expect_problem(422, "validation", "queues");
    http.post("/leases", &json!({ "queues": [""] })).await.expect_problem(422, "validation", "queues");
    http.post("/leases", &json!({ "stale_after_seconds": 1 })).await.expect_problem(
        422,
        "validation",
        "stale_after_seconds",
    );
    http.post("/leases", &json!({ "wait_seconds": -1 })).await.expect_problem(
        422,
        "validation",
        "wait_seconds",
    );
    http.send("DELETE", "/leases/seven", &[], "").await.expect_problem(400, "bad_request", "worker_id");
    assert_eq!(settle(&http, &me, ended(&lease, "released", json!({}))).await, "stored");
}

async fn follow_ups_exist_only_with_the_success_that_names_them(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let (me, lease) = (worker(&leased), held(&leased));
    let more = json!({ "follow_ups": [{ "kind": "next", "payload": 1, "queue": "other" }] });
    let stale = json!({ "id": lease["id"], "lease_no": 99 });
    assert_eq!(settle(&http, &me, ended(&stale, "succeeded", more.clone())).await, "lease_lost");
    assert!(fixture.claim_from("other", fixture.worker().await, 1).await.is_empty());
    assert_eq!(settle(&http, &me, ended(&lease, "succeeded", more)).await, "stored");
    assert_eq!(fixture.claim_from("other", fixture.worker().await, 1).await.len(), 1);
}

async fn a_worker_that_fell_silent_is_dead_and_powerless(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({ "stale_after_seconds": 10 })).await.expect_status(200);
    let (me, lease) = (worker(&leased), held(&leased));
    fixture.advance(11 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    assert_eq!(fixture.status(id).await, Status::Retrying);
    assert_eq!(settle(&http, &me, ended(&lease, "succeeded", json!({}))).await, "lease_lost");
    http.post("/leases/renew", &json!({ "worker_id": me, "leases": [lease] }))
        .await
        .expect_problem(409, "conflict", "dead");
    http.post("/leases", &json!({ "worker_id": me })).await.expect_problem(409, "conflict", "anew");
    fixture.advance(MINUTE).await;
    let anew = http.post("/leases", &json!({})).await.expect_status(200);
    assert_eq!(anew.json()["jobs"][0]["interruptions"], 1);
    assert_eq!(anew.json()["jobs"][0]["lease_no"], 2);
}

async fn a_call_is_a_sign_of_life(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({ "stale_after_seconds": 10 })).await.expect_status(200);
    let (me, lease) = (worker(&leased), held(&leased));
    for _ in 0..3 {
        fixture.advance(8 * SECOND).await;
        http.post("/leases/renew", &json!({ "worker_id": me, "leases": [lease] })).await.expect_status(200);
        fixture.advance(8 * SECOND).await;
        http.post("/leases", &json!({ "worker_id": me })).await.expect_status(200);
        assert_eq!(fixture.sweep_now().await.recovered, 0);
    }
}

async fn a_cancel_reaches_a_worker_with_its_next_renewal(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let (me, lease) = (worker(&leased), held(&leased));
    http.send("POST", &format!("/jobs/{id}/cancel"), &[], "").await.expect_status(202);
    let stale = json!({ "id": lease["id"], "lease_no": 7 });
    let renewed = http
        .post("/leases/renew", &json!({ "worker_id": me, "leases": [lease, stale] }))
        .await
        .expect_status(200);
    assert_eq!(renewed.json(), json!({ "lost": [stale], "cancel": [lease] }));
    // From then on every end but success is a cancel.
    assert_eq!(settle(&http, &me, ended(&lease, "failed", json!({}))).await, "stored");
    assert_eq!(fixture.status(id).await, Status::Cancelled);
}

async fn a_call_waits_for_work(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let waiting = tokio::spawn({
        let http = http.clone();
        async move { http.post("/leases", &json!({ "wait_seconds": 20 })).await.expect_status(200) }
    });
    until_it_has_begun(&fixture).await;
    let id = fixture.add(job("greet")).await;
    assert_eq!(waiting.await.expect("answered").json()["jobs"][0]["id"], id.to_string());
}

async fn a_call_that_waits_keeps_its_worker_alive(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let waiting = tokio::spawn({
        let http = http.clone();
        let body = json!({ "wait_seconds": 20, "stale_after_seconds": 3 });
        async move { http.post("/leases", &body).await.expect_status(200) }
    });
    until_it_has_begun(&fixture).await;
    fixture.advance(2 * SECOND).await;
    let now = fixture.now().await;
    let beaten = || async { fixture.workers(None).await.expect("workers")[0].heartbeat_at == now };
    until("another sign of life", beaten).await;
    assert!(!waiting.is_finished(), "the call still waits");
    let id = fixture.add(job("greet")).await;
    assert_eq!(waiting.await.expect("answered").json()["jobs"][0]["id"], id.to_string());
}

async fn a_worker_renews_as_often_as_it_said_when_it_registered(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let first = http.post("/leases", &json!({ "stale_after_seconds": 12 })).await.expect_status(200);
    let me = worker(&first);
    let elsewhere = HttpClient::new(&fixture);
    for (server, body) in [
        (&http, json!({ "worker_id": me })),
        (&http, json!({ "worker_id": me, "queues": ["other"], "stale_after_seconds": 40 })),
        (&elsewhere, json!({ "worker_id": me })),
    ] {
        let answer = server.post("/leases", &body).await.expect_status(200);
        assert_eq!(answer.json()["renew_within_seconds"], 3.0, "{body}");
    }
    assert_eq!(first.json()["renew_within_seconds"], 3.0);
}

async fn leases_whose_answer_was_lost_are_given_back(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let me = worker(&leased);
    // As if that answer had never come. It may still be on its way at first.
    let again =
        async || http.post("/leases", &json!({ "worker_id": me, "held": [] })).await.expect_status(200);
    assert_eq!(again().await.json()["jobs"], json!([]));
    fixture.advance(3 * SECOND).await;
    let again = again().await;
    assert_eq!(again.json()["jobs"][0]["id"], id.to_string());
    assert_eq!(again.json()["jobs"][0]["lease_no"], 2);
    assert_eq!(again.json()["jobs"][0]["attempt"], 1, "not charged");
}

async fn a_renewal_that_leaves_a_lease_out_gives_it_back_once_its_answer_is_lost(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let first = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let (me, known) = (worker(&leased), held(&leased));
    let second = fixture.add(job("greet")).await;
    // As if this answer had never come.
    held(&http.post("/leases", &json!({ "worker_id": me })).await.expect_status(200));
    let renew = async |leases: Value| {
        let body = json!({ "worker_id": me, "leases": leases });
        http.post("/leases/renew", &body).await.expect_status(200);
        (fixture.status(first).await, fixture.status(second).await)
    };
    fixture.advance(29 * SECOND).await;
    assert_eq!(renew(json!([known])).await, (Status::Running, Status::Running), "it may still be coming");
    fixture.advance(SECOND).await;
    assert_eq!(renew(json!(null)).await, (Status::Running, Status::Running), "nothing was said of leases");
    assert_eq!(renew(json!([known])).await, (Status::Running, Status::Queued));
    let job = fixture.job(second).await;
    assert_eq!((job.attempts, job.interruptions), (0, 0), "neither charged nor counted");
}

async fn a_full_list_of_leases_gives_nothing_back(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let jobs: Vec<NewJob> = (0..1001).map(|_| job("greet")).collect();
    fixture.enqueue_many(jobs).await.expect("enqueued");
    let me = worker(&http.post("/leases", &json!({ "queues": ["elsewhere"] })).await.expect_status(200));
    let mut leases = Vec::new();
    while leases.len() < 1001 {
        let leased =
            http.post("/leases", &json!({ "worker_id": me, "limit": 100 })).await.expect_status(200).json();
        let given = leased["jobs"].as_array().expect("jobs");
        assert!(!given.is_empty(), "{} were given", leases.len());
        leases.extend(given.iter().map(|job| json!({ "id": job["id"], "lease_no": job["lease_no"] })));
    }
    fixture.advance(31 * SECOND).await;
    let renew = async |named: usize| {
        let body = json!({ "worker_id": me, "leases": leases[..named] });
        http.post("/leases/renew", &body).await.expect_status(200);
        fixture.count(Status::Running).await
    };
    assert_eq!(renew(1000).await, 1001, "no more can be named");
    let ask = async |named: usize| {
        let body = json!({ "worker_id": me, "queues": ["elsewhere"], "held": leases[..named] });
        http.post("/leases", &body).await.expect_status(200);
        fixture.count(Status::Running).await
    };
    assert_eq!(ask(1000).await, 1001, "nor here");
    assert_eq!(ask(999).await, 999);
    assert_eq!(renew(998).await, 998);
}

async fn a_caller_that_goes_leaves_nothing_leased(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let mut caller = TcpStream::connect(http.address()).await.expect("it listens");
    let body = json!({ "wait_seconds": 20 }).to_string();
    let head = "POST /leases HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n";
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    caller.write_all(request.as_bytes()).await.expect("sent");
    until_it_has_begun(&fixture).await;
    let me = fixture.workers(None).await.expect("workers")[0].id;
    drop(caller);
    // A worker's calls come one after another: what it takes changes after that one.
    until("the first is over", || async {
        let asked = json!({ "worker_id": me, "queues": ["next"] });
        http.post("/leases", &asked).await.expect_status(200);
        fixture.workers(None).await.expect("workers")[0].queues == ["next"]
    })
    .await;
    let id = fixture.add(job("greet")).await;
    let other = http.post("/leases", &json!({ "wait_seconds": 20 })).await.expect_status(200);
    assert_eq!(other.json()["jobs"][0]["id"], id.to_string());
}

async fn two_calls_of_one_worker_share_nothing(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let me = worker(&http.post("/leases", &json!({})).await.expect_status(200));
    let call = |held: Value| {
        let (http, body) = (http.clone(), json!({ "worker_id": me, "held": held, "wait_seconds": 20 }));
        tokio::spawn(async move { http.post("/leases", &body).await.expect_status(200) })
    };
    let (mut one, mut other) = (call(json!([])), call(json!([])));
    // Who asks for no wait gets none, whoever else of the worker waits.
    let beside = http.post("/leases", &json!({ "worker_id": me })).await.expect_status(200);
    assert_eq!(beside.json()["jobs"], json!([]));
    let id = fixture.add(job("greet")).await;
    let (first, left) = tokio::select! {
        answer = &mut one => (answer, other),
        answer = &mut other => (answer, one),
    };
    assert_eq!(held(&first.expect("answered")), json!({ "id": id.to_string(), "lease_no": 1 }));
    // Its `held` was written before that answer came, and gives nothing back.
    let next = fixture.add(job("greet")).await;
    let second = left.await.expect("answered");
    assert_eq!(held(&second), json!({ "id": next.to_string(), "lease_no": 1 }));
    let third = http.post("/leases", &json!({ "worker_id": me, "held": [] })).await.expect_status(200);
    assert_eq!(third.json()["jobs"], json!([]));
    assert_eq!(fixture.job(id).await.lease_no, 1);
}

async fn two_calls_of_one_worker_get_one_suspect_between_them(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for _ in 0..2 {
        fixture.add(job("greet")).await;
    }
    let dead = fixture.worker_with(10 * SECOND).await;
    assert_eq!(fixture.claim(dead, 2).await.len(), 2);
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    fixture.pause("default").await.expect("pause");
    let me = worker(&http.post("/leases", &json!({})).await.expect_status(200));
    let call = || {
        let (http, body) = (http.clone(), json!({ "worker_id": me, "limit": 10, "wait_seconds": 20 }));
        tokio::spawn(async move { http.post("/leases", &body).await.expect_status(200) })
    };
    fixture.advance(SECOND).await;
    let one = call();
    until_one_is_heard(&fixture).await;
    fixture.advance(SECOND).await;
    let other = call();
    until_one_is_heard(&fixture).await;
    // What it takes to answer this, those before it have behind them.
    http.post("/leases", &json!({ "worker_id": me })).await.expect_status(200);
    fixture.resume("default").await.expect("resume");
    let suspect = one.await.expect("answered");
    assert_eq!((held(&suspect)["lease_no"].clone(), other.is_finished()), (json!(2), false));
    let id = fixture.add(job("greet")).await;
    assert_eq!(held(&other.await.expect("answered"))["id"], id.to_string());
}

async fn a_worker_that_signs_off_gives_back_what_it_holds(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.suspect(job("greet")).await;
    for _ in 0..3 {
        let leased = http.post("/leases", &json!({})).await.expect_status(200);
        let (me, lease) = (worker(&leased), held(&leased));
        http.send("DELETE", &format!("/leases/{me}"), &[], "").await.expect_status(204);
        let job = fixture.job(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Retrying, 0, 1), "not counted");
        assert_eq!(settle(&http, &me, ended(&lease, "succeeded", json!({}))).await, "lease_lost");
    }
}

async fn suspects_are_leased_one_at_a_time_by_all_servers_together(fixture: Fixture) {
    let (http, other) = (HttpClient::new(&fixture), HttpClient::new(&fixture));
    for _ in 0..2 {
        fixture.add(job("greet")).await;
    }
    let dead = fixture.worker_with(10 * SECOND).await;
    assert_eq!(fixture.claim(dead, 2).await.len(), 2);
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    let me = worker(&other.post("/leases", &json!({ "queues": ["elsewhere"] })).await.expect_status(200));
    let lease =
        held(&http.post("/leases", &json!({ "worker_id": me, "limit": 10 })).await.expect_status(200));
    let none = other.post("/leases", &json!({ "worker_id": me, "limit": 10 })).await.expect_status(200);
    assert_eq!(none.json()["jobs"], json!([]));
    assert_eq!(settle(&http, &me, ended(&lease, "succeeded", json!({}))).await, "stored");
    held(&other.post("/leases", &json!({ "worker_id": me, "limit": 10 })).await.expect_status(200));
}

/// Polls so often and no more.
async fn cut_off_after<T>(steps: u32, call: impl Future<Output = T>) -> Option<T> {
    let (mut call, mut left) = (std::pin::pin!(call), steps);
    std::future::poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        call.as_mut().poll(context).map(Some)
    })
    .await
}

async fn a_call_cut_off_at_any_moment_leaves_nothing_leased(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    // With an interruption behind it there is more to do between claim and answer.
    let id = fixture.suspect(job("greet")).await;
    let me = worker(&http.post("/leases", &json!({ "queues": ["elsewhere"] })).await.expect_status(200));
    let asked = json!({ "worker_id": me });
    let mut given = 0;
    for steps in 0..40 {
        if let Some(answer) = cut_off_after(steps, http.post("/leases", &asked)).await
            // What an earlier round had begun may end only now.
            && answer.json()["jobs"] != json!([])
        {
            let lease = held(&answer.expect_status(200));
            assert_eq!(settle(&http, &me, ended(&lease, "released", json!({}))).await, "stored");
            given += 1;
        }
        until("given back", || async { fixture.status(id).await != Status::Running }).await;
    }
    assert!(
        (1..40).contains(&given),
        "{given} answers: the later rounds have time enough, the first has none"
    );
    assert_eq!(fixture.job(id).await.interruptions, 1, "not counted");
}

/// Polls until `over`, which is asked before each further poll.
async fn cut_off_when<T, F: Future<Output = bool>>(
    mut over: impl FnMut() -> F,
    call: impl Future<Output = T>,
) -> Option<T> {
    let mut call = std::pin::pin!(call);
    loop {
        let answer = cut_off_after(1, call.as_mut()).await;
        if answer.is_some() || over().await {
            return answer;
        }
    }
}

async fn a_call_cut_off_when_its_job_counts_as_begun_leaves_nothing_leased(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.suspect(job("greet")).await;
    let me = worker(&http.post("/leases", &json!({ "queues": ["elsewhere"] })).await.expect_status(200));
    // Between claim and answer one that was interrupted before is marked as begun.
    let begun = || async { matches!(fixture.state(id).await, State::Running(running) if running.started) };
    while let Some(answer) = cut_off_when(begun, http.post("/leases", &json!({ "worker_id": me }))).await {
        // It was answered between two looks.
        let lease = held(&answer.expect_status(200));
        assert_eq!(settle(&http, &me, ended(&lease, "released", json!({}))).await, "stored");
    }
    until("given back", || async { fixture.status(id).await != Status::Running }).await;
    assert_eq!(fixture.job(id).await.interruptions, 1, "not counted");
}

async fn a_worker_may_take_other_jobs_than_at_first(fixture: Fixture) {
    let http = HttpClient::of(Api::new(fixture.client()));
    let me = worker(
        &http.post("/leases", &json!({ "queues": ["mail"], "kinds": ["letter"] })).await.expect_status(200),
    );
    let ship = json!({ "kind": "ship", "queue": "harbour", "payload": {} });
    http.post("/jobs", &ship).await.expect_problem(422, "validation", "ship");
    let asked = json!({ "worker_id": me, "queues": ["harbour"], "kinds": ["ship"] });
    http.post("/leases", &asked).await.expect_status(200);
    let shown = &fixture.workers(None).await.expect("workers")[0];
    assert_eq!(
        (shown.queues.clone(), shown.kinds.clone()),
        (vec!["harbour".into()], Some(vec!["ship".into()]))
    );
    http.post("/jobs", &ship).await.expect_status(201);
    held(&http.post("/leases", &asked).await.expect_status(200));
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
    let (me, lease) = (worker(&first), held(&first));
    let none = http.post("/leases", &json!({ "worker_id": me, "limit": 10 })).await.expect_status(200);
    assert_eq!(none.json()["jobs"], json!([]));
    assert_eq!(settle(&http, &me, ended(&lease, "succeeded", json!({}))).await, "stored");
    held(&http.post("/leases", &json!({ "worker_id": me, "limit": 10 })).await.expect_status(200));
}

async fn a_call_that_waits_is_answered_when_the_server_ends(fixture: Fixture) {
    let ending = tokio::sync::watch::Sender::new(false);
    let http = HttpClient::of(Api::new(fixture.client()).ending(ending.subscribe()));
    let waiting =
        tokio::spawn(
            async move { http.post("/leases", &json!({ "wait_seconds": 20 })).await.expect_status(200) },
        );
    until_it_has_begun(&fixture).await;
    ending.send_replace(true);
    let answer = tokio::time::timeout(10 * SECOND, waiting).await.expect("at once").expect("answered");
    assert_eq!(answer.json()["jobs"], json!([]));
}
