//! Calls that wait for the end of a job.

use longshore::api::Api;
use longshore::{JobId, Scope};
use serde_json::{Value, json};

use super::auth::{token, with_tokens_required};
use super::client::{HttpClient, before_timeout};
use super::leases::{ended, held, settle, worker};
use crate::fixture::*;

cases! {
    a_call_waits_for_the_end_of_a_job,
    a_call_waits_for_an_end_that_another_process_stores,
    a_call_that_waits_in_vain_returns_the_job_as_it_is,
    a_job_that_has_ended_is_returned_at_once,
    a_wait_ends_when_the_server_stops,
    a_wait_needs_an_existing_job_of_an_allowed_queue,
}

fn wait(http: &HttpClient, id: JobId) -> tokio::task::JoinHandle<Value> {
    let (http, path) = (http.clone(), format!("/jobs/{id}?wait_seconds=20"));
    tokio::spawn(async move { http.get(&path).await.expect_status(200).json() })
}

async fn a_call_waits_for_the_end_of_a_job(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let waiting = [wait(&http, id), wait(&http, id)];
    let leased = http.post("/leases", &json!({})).await.expect_status(200);
    assert!(waiting.iter().all(|call| !call.is_finished()));
    let item = ended(&held(&leased), "succeeded", json!({ "result": { "page": 7 } }));
    assert_eq!(settle(&http, &worker(&leased), item).await, "stored");
    for call in waiting {
        let job = before_timeout(call).await.expect("a response");
        assert_eq!((&job["status"], &job["result"]), (&json!("succeeded"), &json!({ "page": 7 })));
    }
}

async fn a_call_waits_for_an_end_that_another_process_stores(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let [succeeds, cancelled] =
        [fixture.add(job("greet")).await, fixture.add(job("greet").queue("other")).await];
    let (first, second) = (wait(&http, succeeds), wait(&http, cancelled));
    let claimed = fixture.claim(fixture.worker().await, 1).await.remove(0);
    fixture.must_finish(&claimed, done()).await;
    assert_eq!(before_timeout(first).await.expect("a response")["status"], "succeeded");
    assert!(!second.is_finished(), "the other job waits");
    fixture.second_client().await.cancel(cancelled).await.expect("cancel");
    assert_eq!(before_timeout(second).await.expect("a response")["status"], "cancelled");
}

async fn a_call_that_waits_in_vain_returns_the_job_as_it_is(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let response =
        before_timeout(http.get(&format!("/jobs/{id}?wait_seconds=0.05"))).await.expect_status(200);
    assert_eq!(response.json()["status"], "queued");
    for bad in ["-1", "soon", "NaN", "20.5"] {
        http.get(&format!("/jobs/{id}?wait_seconds={bad}")).await.expect_problem(400, "bad_request", "");
    }
}

async fn a_job_that_has_ended_is_returned_at_once(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    fixture.cancel(id).await.expect("cancel");
    assert_eq!(before_timeout(wait(&http, id)).await.expect("a response")["status"], "cancelled");
    // A retry starts another run, and the next call waits for its end.
    fixture.retry(id).await.expect("retry");
    let waiting = wait(&http, id);
    let claimed = fixture.claim(fixture.worker().await, 1).await.remove(0);
    fixture.must_finish(&claimed, done()).await;
    assert_eq!(before_timeout(waiting).await.expect("a response")["status"], "succeeded");
}

async fn a_wait_ends_when_the_server_stops(fixture: Fixture) {
    let ending = tokio::sync::watch::Sender::new(false);
    let http = HttpClient::for_api(Api::new(fixture.client()).ending(ending.subscribe()));
    let waiting = wait(&http, fixture.add(job("greet")).await);
    ending.send_replace(true);
    assert_eq!(before_timeout(waiting).await.expect("a response")["status"], "queued");
}

async fn a_wait_needs_an_existing_job_of_an_allowed_queue(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let path = |id: JobId| format!("/jobs/{id}?wait_seconds=20");
    before_timeout(http.get(&path(JobId::new()))).await.expect_problem(404, "not_found", "");
    let (_, secret) = token(&fixture, Scope::Read, Some(&["mail"])).await;
    let theirs = fixture.add(job("greet")).await;
    let limited = with_tokens_required(&fixture).with_token(&secret);
    before_timeout(limited.get(&path(theirs))).await.expect_problem(403, "forbidden", "another queue");
}
