//! Leases whose response does not arrive: the next call of the worker releases them.

use std::task::Poll;

use longshore::api::Limits;
use longshore::rules::lifecycle::State;
use longshore::{NewJob, Status};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::client::HttpClient;
use super::leases::{ended, held, settle, until_heartbeat, until_registered, worker};
use crate::fixture::{Fixture, SECOND, job};
use crate::worker::until;

cases! {
    leases_whose_response_was_lost_are_released,
    a_renewal_releases_an_unnamed_lease_after_half_a_minute,
    a_full_list_of_leases_releases_nothing,
    a_disconnected_caller_leaves_nothing_leased,
    concurrent_calls_of_one_worker_do_not_release_each_others_leases,
    a_call_dropped_at_any_moment_leaves_nothing_leased,
    a_call_dropped_after_its_job_is_marked_started_leaves_nothing_leased,
}

async fn leases_whose_response_was_lost_are_released(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let worker_id = worker(&leased);
    // The worker did not receive that response. At first it may still be in flight.
    let again = async |wait: u64| {
        let request = json!({ "worker_id": worker_id, "held": [], "wait_seconds": wait });
        http.post("/leases", &request).await.expect_status(200)
    };
    assert_eq!(again(0).await.json()["jobs"], json!([]));
    // A call without a wait may find nothing, so look at the job too.
    assert_eq!(fixture.status(id).await, Status::Running);
    fixture.advance(30 * SECOND).await;
    let again = again(20).await;
    assert_eq!(again.json()["jobs"][0]["id"], id.to_string());
    assert_eq!(again.json()["jobs"][0]["lease_no"], 2);
    assert_eq!(again.json()["jobs"][0]["attempt"], 1, "the attempt must not be charged");
}

async fn a_renewal_releases_an_unnamed_lease_after_half_a_minute(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let first = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    let (worker_id, known) = (worker(&leased), held(&leased));
    let second = fixture.add(job("greet")).await;
    // The worker does not receive this response.
    held(&http.post("/leases", &json!({ "worker_id": worker_id })).await.expect_status(200));
    let renew = async |leases: Value| {
        let body = json!({ "worker_id": worker_id, "leases": leases });
        http.post("/leases/renew", &body).await.expect_status(200);
        (fixture.status(first).await, fixture.status(second).await)
    };
    fixture.advance(29 * SECOND).await;
    assert_eq!(
        renew(json!([known])).await,
        (Status::Running, Status::Running),
        "the response may still arrive"
    );
    fixture.advance(SECOND).await;
    assert_eq!(renew(json!(null)).await, (Status::Running, Status::Running), "this renewal names no leases");
    assert_eq!(renew(json!([known])).await, (Status::Running, Status::Queued));
    let job = fixture.job(second).await;
    assert_eq!(
        (job.attempts, job.interruptions),
        (0, 0),
        "neither an attempt nor an interruption may be counted"
    );
}

async fn a_full_list_of_leases_releases_nothing(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let jobs: Vec<NewJob> = (0..1001).map(|_| job("greet")).collect();
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let worker_id = worker(&http.post("/leases", &json!({ "queues": ["other"] })).await.expect_status(200));
    let mut leases = Vec::new();
    while leases.len() < 1001 {
        let leased = http
            .post("/leases", &json!({ "worker_id": worker_id, "limit": 100 }))
            .await
            .expect_status(200)
            .json();
        let jobs = leased["jobs"].as_array().expect("jobs");
        assert!(!jobs.is_empty(), "only {} jobs were leased", leases.len());
        leases.extend(jobs.iter().map(|job| json!({ "id": job["id"], "lease_no": job["lease_no"] })));
    }
    fixture.advance(31 * SECOND).await;
    let renew = async |named: usize| {
        let body = json!({ "worker_id": worker_id, "leases": leases[..named] });
        http.post("/leases/renew", &body).await.expect_status(200);
        fixture.count(Status::Running).await
    };
    assert_eq!(renew(1000).await, 1001, "more than 1000 leases cannot be named");
    let lease = async |named: usize| {
        let body = json!({ "worker_id": worker_id, "queues": ["other"], "held": leases[..named] });
        http.post("/leases", &body).await.expect_status(200);
        fixture.count(Status::Running).await
    };
    assert_eq!(lease(1000).await, 1001, "the same limit applies here");
    assert_eq!(lease(999).await, 999);
    assert_eq!(renew(998).await, 998);
}

async fn a_disconnected_caller_leaves_nothing_leased(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let mut caller = TcpStream::connect(http.address()).await.expect("connect");
    let body = json!({ "wait_seconds": 20 }).to_string();
    let head = "POST /leases HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n";
    let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    caller.write_all(request.as_bytes()).await.expect("write");
    until_registered(&fixture).await;
    let worker_id = fixture.workers(None).await.expect("workers")[0].id;
    drop(caller);
    // Calls of one worker run one after another, so its queues change after the first call.
    until("the first call has ended", || async {
        let request = json!({ "worker_id": worker_id, "queues": ["next"] });
        http.post("/leases", &request).await.expect_status(200);
        fixture.workers(None).await.expect("workers")[0].queues == ["next"]
    })
    .await;
    let id = fixture.add(job("greet")).await;
    let other = http.post("/leases", &json!({ "wait_seconds": 20 })).await.expect_status(200);
    assert_eq!(other.json()["jobs"][0]["id"], id.to_string());
}

async fn concurrent_calls_of_one_worker_do_not_release_each_others_leases(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let worker_id = worker(&http.post("/leases", &json!({})).await.expect_status(200));
    let call = |limit: u32| {
        let body = json!({ "worker_id": worker_id, "held": [], "wait_seconds": 20, "limit": limit });
        let http = http.clone();
        tokio::spawn(async move { http.post("/leases", &body).await.expect_status(200) })
    };
    fixture.advance(SECOND).await;
    let watching = call(0);
    until_heartbeat(&fixture).await;
    fixture.advance(SECOND).await;
    let claiming = call(1);
    until_heartbeat(&fixture).await;
    let id = fixture.add(job("greet")).await;
    let lease = json!({ "id": id.to_string(), "lease_no": 1 });
    assert_eq!(held(&claiming.await.expect("a response")), lease);
    // The `held` list of the first call is older than that response, and so is the one of a call that is sent now.
    let third = http.post("/leases", &json!({ "worker_id": worker_id, "held": [] })).await.expect_status(200);
    assert_eq!(third.json()["jobs"], json!([]));
    fixture.cancel(id).await.expect("cancel");
    assert_eq!(watching.await.expect("a response").json()["cancel"], json!([lease]));
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.lease_no), (Status::Running, 1));
}

/// Polls the call `steps` times, then drops it.
async fn drop_after<T>(steps: u32, call: impl Future<Output = T>) -> Option<T> {
    let (mut call, mut remaining) = (std::pin::pin!(call), steps);
    std::future::poll_fn(|context| {
        if remaining == 0 {
            return Poll::Ready(None);
        }
        remaining -= 1;
        call.as_mut().poll(context).map(Some)
    })
    .await
}

async fn a_call_dropped_at_any_moment_leaves_nothing_leased(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    // A suspect, because it needs more steps between claim and response.
    let id = fixture.suspect(job("greet")).await;
    let worker_id = worker(&http.post("/leases", &json!({ "queues": ["other"] })).await.expect_status(200));
    let request = json!({ "worker_id": worker_id });
    let mut completed = 0;
    for steps in 0..40 {
        if let Some(response) = drop_after(steps, http.post("/leases", &request)).await
            // A claim of an earlier round may still hold the job.
            && response.json()["jobs"] != json!([])
        {
            let lease = held(&response.expect_status(200));
            assert_eq!(settle(&http, &worker_id, ended(&lease, "released", json!({}))).await, "stored");
            completed += 1;
        }
        until("released", || async { fixture.status(id).await != Status::Running }).await;
    }
    assert!(
        (1..40).contains(&completed),
        "{completed} calls completed: the last rounds have enough polls, the first has none"
    );
    assert_eq!(fixture.job(id).await.interruptions, 1, "the interruption must not be counted");
}

/// Polls the call until it completes or `condition` holds, then drops it.
async fn drop_when<T, F: Future<Output = bool>>(
    mut condition: impl FnMut() -> F,
    call: impl Future<Output = T>,
) -> Option<T> {
    let mut call = std::pin::pin!(call);
    loop {
        let response = drop_after(1, call.as_mut()).await;
        if response.is_some() || condition().await {
            return response;
        }
    }
}

async fn a_call_dropped_after_its_job_is_marked_started_leaves_nothing_leased(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.suspect(job("greet")).await;
    let worker_id = worker(&http.post("/leases", &json!({ "queues": ["other"] })).await.expect_status(200));
    // A suspect is marked as started between claim and response.
    let started = || async { matches!(fixture.state(id).await, State::Running(running) if running.started) };
    let request = json!({ "worker_id": worker_id, "wait_seconds": 20 });
    while let Some(response) = drop_when(started, http.post("/leases", &request)).await {
        // The call completed before the condition was checked.
        let lease = held(&response.expect_status(200));
        assert_eq!(settle(&http, &worker_id, ended(&lease, "released", json!({}))).await, "stored");
    }
    until("released", || async { fixture.status(id).await != Status::Running }).await;
    assert_eq!(fixture.job(id).await.interruptions, 1, "the interruption must not be counted");
}
