//! What goes wrong around a lease call with reports: jobs that are locked, full queues, large jobs, slow bodies, and
//! several calls of one worker.

use std::time::{Duration, Instant};

use longshore::api::{Admission, Api, Limits};
use longshore::{NewJob, Status, UnknownKinds};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{HttpClient, before_timeout, parse};
use super::exchange::{Holder, id_of, leases, with};
use super::leases::{ended, settle, worker};
use crate::fixture::*;
use crate::locks::{blocked_for, in_time, open_transaction, roll_back};
use crate::worker::until;

cases! {
    a_response_with_large_jobs_is_bounded_and_releases_the_rest,
    checkpoints_count_in_the_size_of_a_response,
    a_full_queue_does_not_reject_a_report,
    a_repeated_report_is_stored_although_its_queue_is_full_now,
    a_lease_of_another_call_is_kept_although_a_body_arrives_slowly,
    two_calls_that_wait_do_not_end_each_others_waits_at_once,
    a_call_that_waits_for_its_turn_waits_no_longer_than_it_may,
    two_reports_about_one_step_store_the_first,
    two_ends_of_one_attempt_store_the_first,
}

cases! {
    only on postgres:
    a_locked_job_delays_only_its_own_reports,
    a_job_with_unsaved_steps_does_not_end,
    a_locked_lease_that_is_not_listed_does_not_fail_the_call,
    a_call_that_arrives_while_its_worker_signs_off_leases_nothing,
}

/// A payload that fits 16 times into a response.
fn large() -> String {
    "x".repeat(1_000_000)
}

/// What a worker got from calls, until it has this many jobs.
async fn lease_all(http: &HttpClient, worker_id: &str, count: usize) -> Vec<Value> {
    let mut all = Vec::new();
    while all.len() < count {
        let body = json!({ "worker_id": worker_id, "limit": count, "wait_seconds": 20 });
        all.extend(leases(&in_time(http.post("/leases", &body)).await.expect_status(200)));
    }
    all
}

async fn a_response_with_large_jobs_is_bounded_and_releases_the_rest(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for n in 0..20 {
        fixture.add(NewJob::new("greet", &json!([n, large()]))).await;
    }
    let first = http.post("/leases", &json!({ "limit": 20 })).await.expect_status(200);
    assert!(first.text.len() < 17 << 20, "{} bytes", first.text.len());
    let (first, worker_id) = (leases(&first), worker(&first));
    assert_eq!(first.len(), 16);
    until("the rest waits", || async { fixture.count(Status::Queued).await == 4 }).await;
    // They wait as before, and are not charged.
    let rest = lease_all(&http, &worker_id, 4).await;
    let mut all: Vec<String> = first.iter().chain(&rest).map(|lease| id_of(lease).to_string()).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 20);
    for lease in &rest {
        let job = fixture.job(id_of(lease)).await;
        assert_eq!((job.attempts, job.errors.len()), (1, 0));
    }
}

async fn checkpoints_count_in_the_size_of_a_response(fixture: Fixture) {
    let holder = Holder::new(&fixture, 18).await;
    for part in holder.leases.chunks(9) {
        let checkpoints: Vec<Value> =
            part.iter().map(|lease| with(lease, "checkpoint", json!(large()))).collect();
        let released: Vec<Value> = part.iter().map(|lease| ended(lease, "released", json!({}))).collect();
        let stored = holder.call(json!({ "limit": 0, "checkpoints": checkpoints, "settle": released })).await;
        assert_eq!(stored["settled"][8]["settled"], "stored");
    }
    let mut sizes = Vec::new();
    while sizes.iter().sum::<usize>() < 18 {
        let body = json!({ "worker_id": holder.worker, "limit": 18, "wait_seconds": 20 });
        let response = in_time(holder.http.post("/leases", &body)).await.expect_status(200);
        assert!(response.text.len() < 17 << 20, "{} bytes", response.text.len());
        for job in response.json()["jobs"].as_array().expect("jobs") {
            assert_eq!(job["checkpoint"].as_str().map(str::len), Some(1_000_000));
        }
        sizes.push(leases(&response).len());
    }
    assert!(sizes.len() > 1, "{sizes:?}");
}

/// A server whose queues are full with one waiting job.
fn with_short_queues(fixture: &Fixture) -> HttpClient {
    let short = Admission { waiting_jobs: Some(1), ..Admission::default() };
    HttpClient::for_api(Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).admission(short))
}

fn with_follow_up(lease: &Value, queue: &str) -> Value {
    ended(lease, "succeeded", json!({ "follow_ups": [{ "kind": "next", "payload": 1, "queue": queue }] }))
}

async fn a_full_queue_does_not_reject_a_report(fixture: Fixture) {
    let holder = Holder::of(&fixture, with_short_queues(&fixture), 2).await;
    fixture.add(job("greet").queue("full")).await;
    let settle =
        [with_follow_up(&holder.leases[0], "full"), ended(&holder.leases[1], "succeeded", json!({}))];
    let response = holder.call(json!({ "limit": 0, "held": [], "settle": settle })).await;
    assert_eq!(response["settled"][0]["settled"], "unavailable", "it may be stored later: {response}");
    assert!(response["settled"][0]["message"].as_str().expect("a message").contains("full"), "{response}");
    assert_eq!(response["settled"][1]["settled"], "stored");
    assert_eq!(fixture.status(id_of(&holder.leases[0])).await, Status::Running);
    let later = json!({ "limit": 0, "settle": [with_follow_up(&holder.leases[0], "empty")] });
    assert_eq!(holder.call(later).await["settled"][0]["settled"], "stored");
}

async fn a_repeated_report_is_stored_although_its_queue_is_full_now(fixture: Fixture) {
    let holder = Holder::of(&fixture, with_short_queues(&fixture), 1).await;
    let report = json!({ "limit": 0, "settle": [with_follow_up(&holder.leases[0], "next")] });
    for _ in 0..2 {
        assert_eq!(holder.call(report.clone()).await["settled"][0]["settled"], "stored");
    }
    assert_eq!(settle(&holder.http, &holder.worker, report["settle"][0].clone()).await, "stored");
}

/// The worker composed its list of leases before the first byte of the body, and another call leased a job since then.
async fn a_lease_of_another_call_is_kept_although_a_body_arrives_slowly(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let registered = http.post("/leases", &json!({ "limit": 0 })).await.expect_status(200);
    let body = json!({ "worker_id": worker(&registered), "limit": 0, "held": [] }).to_string();
    let mut slow = TcpStream::connect(http.address()).await.expect("connect");
    let head = format!(
        "POST /leases HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nexpect: 100-continue\r\n\r\n",
        http.address(),
        body.len()
    );
    slow.write_all(head.as_bytes()).await.expect("write");
    // The server sends this when the call has arrived.
    let mut interim = [0; "HTTP/1.1 100 Continue\r\n\r\n".len()];
    slow.read_exact(&mut interim).await.expect("an interim response");
    let arrived = Instant::now();
    let id = fixture.add(job("greet")).await;
    let leased = http.post("/leases", &json!({ "worker_id": worker(&registered) })).await.expect_status(200);
    assert_eq!(leases(&leased).len(), 1);
    // Older than a call may be in delivery, but younger than this one.
    fixture.advance(2 * SECOND + SECOND / 5).await;
    while arrived.elapsed() < SECOND / 2 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    slow.write_all(body.as_bytes()).await.expect("write");
    let mut response = Vec::new();
    slow.read_to_end(&mut response).await.expect("a response");
    parse(&response).expect_status(200);
    assert_eq!(fixture.status(id).await, Status::Running);
}

/// Version 1.0 let a second call of a worker wait for the first one. A worker of that version with several threads
/// would otherwise repeat its calls without a pause.
async fn two_calls_that_wait_do_not_end_each_others_waits_at_once(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    let began = Instant::now();
    let first = holder.start(json!({ "held": holder.leases }));
    let second = holder.start(json!({ "held": holder.leases }));
    tokio::select! {
        response = first => assert_eq!(response.expect("a response")["jobs"], json!([])),
        response = second => assert_eq!(response.expect("a response")["jobs"], json!([])),
    }
    assert!(began.elapsed() >= SECOND, "it waited for {:?}", began.elapsed());
}

/// The first call may wait for a second before another one ends its wait. The second call does not have that time.
async fn a_call_that_waits_for_its_turn_waits_no_longer_than_it_may(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    let first_round = Instant::now();
    // If a round takes longer than that second, it shows nothing.
    while first_round.elapsed() < MAX_WAIT {
        fixture.advance(SECOND).await;
        let began = Instant::now();
        let waiting = holder.start(json!({ "held": holder.leases }));
        holder.until_heartbeat(&fixture).await;
        let short = holder.call(json!({ "held": holder.leases, "wait_seconds": 0.05 })).await;
        assert_eq!(short["jobs"], json!([]));
        let took = began.elapsed();
        if took < SECOND {
            return assert!(!waiting.is_finished(), "the short call ended the wait after {took:?}");
        }
        before_timeout(waiting).await.expect("a response");
    }
    panic!("the short call always waited for its turn");
}

async fn two_reports_about_one_step_store_the_first(fixture: Fixture) {
    let holder = Holder::new(&fixture, 2).await;
    let [a, b] = [&holder.leases[0], &holder.leases[1]];
    let step = |lease: &Value, value: u32| with(lease, "steps", json!([{ "name": "s", "value": value }]));
    let stale = json!({ "id": a["id"], "lease_no": 7 });
    let steps = [step(a, 1), step(b, 2), step(a, 3), step(&stale, 1), step(a, 1)];
    let response = holder.call(json!({ "limit": 0, "steps": steps })).await;
    let saved: Vec<&Value> =
        response["saved_steps"].as_array().expect("results").iter().map(|result| &result["saved"]).collect();
    assert_eq!(saved, ["stored", "stored", "rejected", "lease_lost", "stored"]);
    for (lease, value) in [(a, "1"), (b, "2")] {
        let steps = fixture.steps(id_of(lease)).await.expect("steps");
        assert_eq!(steps.len(), 1);
        assert!(format!("{:?}", steps[0].state).contains(value), "{:?}", steps[0]);
    }
}

async fn two_ends_of_one_attempt_store_the_first(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    let lease = &holder.leases[0];
    let items = [ended(lease, "succeeded", json!({ "result": 1 })), ended(lease, "cancelled", json!({}))];
    let response = holder.call(json!({ "limit": 0, "settle": items })).await;
    assert_eq!(response["settled"][0]["settled"], "stored");
    assert_eq!(response["settled"][1]["settled"], "lease_lost");
    assert_eq!(fixture.status(id_of(lease)).await, Status::Succeeded);
}

/// A transaction of another client that has locked the lease of a job.
async fn lock(fixture: &Fixture, lease: &Value) -> sqlx::PgConnection {
    open_transaction(fixture, &format!("select 1 from running where id = '{}' for update", id_of(lease)))
        .await
}

async fn a_locked_job_delays_only_its_own_reports(fixture: Fixture) {
    let holder = Holder::new(&fixture, 3).await;
    let [a, locked, c] = [0, 1, 2].map(|i| &holder.leases[i]);
    let next = fixture.add(job("greet")).await;
    let other = lock(&fixture, locked).await;
    let all = |field: &str, value: Value| -> Vec<Value> {
        [a, locked, c].iter().map(|lease| with(lease, field, value.clone())).collect()
    };
    let saved = |response: &Value, list: &str, field: &str| -> Vec<Value> {
        response[list].as_array().expect("results").iter().map(|result| result[field].clone()).collect()
    };
    let expected = ["stored", "unavailable", "stored"];
    for (list, results, body) in [
        ("steps", "saved_steps", all("steps", json!([{ "name": "s", "value": 1 }]))),
        ("checkpoints", "saved_checkpoints", all("checkpoint", json!(1))),
        ("progress", "saved_progress", all("progress", json!(1))),
    ] {
        let response = holder.call(json!({ "limit": 0, list: body })).await;
        assert_eq!(saved(&response, results, "saved"), expected, "{list}");
        let message = response[results][1]["message"].as_str().expect("a message");
        assert!(!message.is_empty() && !message.contains("running"), "{message}");
    }
    let settle: Vec<Value> =
        [a, locked, c].iter().map(|lease| ended(lease, "succeeded", json!({}))).collect();
    let response = holder.call(json!({ "settle": settle })).await;
    assert_eq!(saved(&response, "settled", "settled"), expected);
    assert_eq!(response["jobs"][0]["id"], next.to_string(), "the worker gets its next job");
    roll_back(other).await;
    let response = holder.call(json!({ "limit": 0, "settle": settle })).await;
    assert_eq!(saved(&response, "settled", "settled"), ["stored"; 3]);
}

async fn a_job_with_unsaved_steps_does_not_end(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    let lease = &holder.leases[0];
    // It does not block the end of the attempt.
    let step = format!(
        "insert into steps (job, name, lease_no, saved_at, value) values ('{}', 's', 1, now(), '1')",
        id_of(lease)
    );
    let mut other = open_transaction(&fixture, &step).await;
    let body = json!({
        "limit": 0,
        "steps": [with(lease, "steps", json!([{ "name": "s", "value": 1 }]))],
        "settle": [ended(lease, "released", json!({}))],
    });
    for (result, status) in [("unavailable", Status::Running), ("stored", Status::Queued)] {
        let response = holder.call(body.clone()).await;
        assert_eq!(response["saved_steps"][0]["saved"], result, "{response}");
        assert_eq!(response["settled"][0]["settled"], result, "{response}");
        assert_eq!(fixture.status(id_of(lease)).await, status);
        if status == Status::Running {
            sqlx::raw_sql("rollback").execute(&mut other).await.expect("rollback");
        }
    }
    assert_eq!(fixture.steps(id_of(lease)).await.expect("steps").len(), 1);
}

async fn a_locked_lease_that_is_not_listed_does_not_fail_the_call(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    fixture.advance(MINUTE / 2).await;
    let next = fixture.add(job("greet")).await;
    let other = lock(&fixture, &holder.leases[0]).await;
    let response = holder.call(json!({ "held": [] })).await;
    assert_eq!(response["jobs"][0]["id"], next.to_string());
    assert_eq!(fixture.status(id_of(&holder.leases[0])).await, Status::Running);
    roll_back(other).await;
    holder.call(json!({ "limit": 0, "held": leases_of(&response) })).await;
    assert_eq!(fixture.status(id_of(&holder.leases[0])).await, Status::Queued, "a later call releases it");
}

fn leases_of(response: &Value) -> Vec<Value> {
    let jobs = response["jobs"].as_array().expect("jobs").iter();
    jobs.map(|job| json!({ "id": job["id"], "lease_no": job["lease_no"] })).collect()
}

async fn a_call_that_arrives_while_its_worker_signs_off_leases_nothing(fixture: Fixture) {
    let holder = Holder::new(&fixture, 1).await;
    let id = fixture.add(job("greet")).await;
    let other = lock(&fixture, &holder.leases[0]).await;
    let (http, path) = (holder.http.clone(), format!("/leases/{}", holder.worker));
    // The call would return meanwhile if it did not wait. Signing off waits for the lock for two seconds at most.
    let sign_off = async move { http.send("DELETE", &path, &[], "").await };
    let (signing_off, ended) = blocked_for(&fixture, other, SECOND, sign_off).await;
    let response = in_time(holder.http.post("/leases", &json!({ "worker_id": holder.worker }))).await;
    in_time(signing_off).await.expect("a response").expect_status(204);
    ended.await.expect("task");
    response.expect_status(409);
    assert_eq!(fixture.status(id).await, Status::Queued);
    assert_eq!(fixture.count(Status::Running).await, 0);
}
