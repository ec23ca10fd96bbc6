//! Ids that clients choose, so that an enqueue whose response was lost can be repeated.

use std::time::{Duration, SystemTime};

use longshore::{Scope, Status};
use serde_json::{Value, json};
use uuid::{Timestamp, Uuid};

use super::auth::{token, with_tokens_required};
use super::client::HttpClient;
use crate::fixture::*;

cases! {
    a_second_request_with_an_id_returns_the_first_job,
    ten_concurrent_requests_with_one_id_create_one_job,
    an_id_works_together_with_keys,
    a_batch_with_ids_can_be_repeated,
    an_id_that_would_break_the_order_of_jobs_is_refused,
    only_new_jobs_take_an_id,
    an_id_of_another_queue_is_refused_to_a_limited_token,
}

fn with_id(id: Uuid, more: Value) -> Value {
    let mut body = json!({ "kind": "greet", "payload": 1, "id": id });
    for (field, value) in more.as_object().expect("an object") {
        body[field] = value.clone();
    }
    body
}

async fn a_second_request_with_an_id_returns_the_first_job(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = Uuid::now_v7();
    let first = http.post("/jobs", &with_id(id, json!({}))).await.expect_status(201);
    assert_eq!((&first.json()["id"], first.header("enqueued-as")), (&json!(id), "created"));
    let others = json!({ "kind": "other", "payload": { "other": true }, "queue": "other", "priority": 9 });
    for more in [json!({}), others] {
        let second = http.post("/jobs", &with_id(id, more)).await.expect_status(200);
        assert_eq!((second.json(), second.header("enqueued-as")), (first.json(), "existing"));
    }
    // Also after its end.
    let claimed = fixture.claim(fixture.worker().await, 1).await.remove(0);
    fixture.must_finish(&claimed, done()).await;
    let last = http.post("/jobs", &with_id(id, json!({}))).await.expect_status(200);
    assert_eq!(last.json()["status"], "succeeded");
    assert_eq!(fixture.count(Status::Queued).await, 0);
}

async fn ten_concurrent_requests_with_one_id_create_one_job(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = Uuid::now_v7();
    let requests: Vec<_> = (0..10)
        .map(|n| {
            let (http, body) = (http.clone(), with_id(id, json!({ "payload": n })));
            tokio::spawn(async move { http.post("/jobs", &body).await })
        })
        .collect();
    let (mut created, mut payloads) = (0, Vec::new());
    for request in requests {
        let response = request.await.expect("a response");
        assert!([200, 201].contains(&response.status), "{response:?}");
        payloads.push(response.json()["payload"].clone());
        created += usize::from(response.status == 201);
    }
    assert_eq!(created, 1);
    payloads.dedup();
    assert_eq!(payloads.len(), 1, "all of them return the job that is stored");
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

async fn an_id_works_together_with_keys(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for key in [json!({ "idempotency_key": "k" }), json!({ "unique_key": "u" })] {
        let id = Uuid::now_v7();
        http.post("/jobs", &with_id(id, key.clone())).await.expect_status(201);
        let same = http.post("/jobs", &with_id(id, key.clone())).await.expect_status(200);
        assert_eq!(same.json()["id"], json!(id));
        // The key belongs to the first job, so another id returns that.
        let other = http.post("/jobs", &with_id(Uuid::now_v7(), key)).await.expect_status(200);
        assert_eq!(other.json()["id"], json!(id));
    }
    // A request that replaced a job returns it again, and does not replace it twice.
    let replace = |id: Uuid, payload: u32| {
        with_id(id, json!({ "payload": payload, "unique_key": "r", "unique_mode": "replace" }))
    };
    let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
    http.post("/jobs", &replace(first, 1)).await.expect_status(201);
    assert_eq!(http.post("/jobs", &replace(second, 2)).await.expect_status(200).json()["id"], json!(first));
    http.post("/jobs", &replace(Uuid::now_v7(), 3)).await.expect_status(200);
    let repeated = http.post("/jobs", &replace(second, 2)).await.expect_status(200).json();
    assert_eq!((&repeated["id"], &repeated["payload"]), (&json!(first), &json!(3)));
}

async fn a_batch_with_ids_can_be_repeated(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let [a, b, c] = [(); 3].map(|()| Uuid::now_v7());
    let body = |ids: &[Uuid]| Value::from_iter(ids.iter().map(|id| with_id(*id, json!({}))));
    let first = http.post("/jobs/batch", &body(&[a, b])).await.expect_status(200).json();
    assert_eq!((&first["created"], &first["existing"]), (&json!(2), &json!(0)));
    let second = http.post("/jobs/batch", &body(&[a, b, c])).await.expect_status(200).json();
    assert_eq!((&second["created"], &second["existing"]), (&json!(1), &json!(2)));
    assert_eq!(second["items"][2], json!({ "outcome": "created", "id": c }));
    let twice = http.post("/jobs/batch", &body(&[Uuid::now_v7(), a, a])).await.expect_status(200).json();
    assert_eq!((&twice["created"], &twice["existing"]), (&json!(1), &json!(2)));
    assert_eq!(fixture.count(Status::Queued).await, 4);
}

/// A UUID v7 with a time that is this far from now.
fn shifted(by: Duration, into_the_future: bool) -> Uuid {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a time");
    let at = if into_the_future { now + by } else { now - by };
    Uuid::new_v7(Timestamp::from_unix(uuid::NoContext, at.as_secs(), 0))
}

async fn an_id_that_would_break_the_order_of_jobs_is_refused(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let refused = [
        (json!("seven"), "id: `seven` is not a UUID"),
        (json!(Uuid::nil()), "not a UUID v7"),
        (json!(Uuid::max()), "not a UUID v7"),
        (json!("67e55044-10b1-426f-9247-bb680e5fe0c8"), "not a UUID v7"),
        (json!(shifted(DAY + MINUTE, true)), "more than a day"),
        (json!(shifted(DAY + MINUTE, false)), "more than a day"),
    ];
    for (id, part) in refused {
        let body = json!({ "kind": "greet", "payload": 1, "id": id });
        http.post("/jobs", &body).await.expect_problem(422, "validation", part);
        let batch = http.post("/jobs/batch", &json!([body])).await.expect_status(200).json();
        assert!(
            batch["items"][0]["message"].as_str().is_some_and(|message| message.contains(part)),
            "{batch}"
        );
    }
    for into_the_future in [true, false] {
        let id = shifted(DAY - HOUR, into_the_future);
        http.post("/jobs", &with_id(id, json!({}))).await.expect_status(201);
        http.get(&format!("/jobs/{id}")).await.expect_status(200);
    }
    assert_eq!(fixture.count(Status::Queued).await, 2);
}

async fn only_new_jobs_take_an_id(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let job = with_id(Uuid::now_v7(), json!({}));
    let schedule = json!({ "cron": "0 3 * * *", "job": job });
    http.json("PUT", "/cron/nightly", &schedule).await.expect_problem(422, "validation", "job: id");
    fixture.add(crate::fixture::job("greet")).await;
    let leased = http.post("/leases", &json!({})).await.expect_status(200).json();
    let item = json!({
        "id": leased["jobs"][0]["id"], "lease_no": 1, "outcome": "succeeded", "follow_ups": [job],
    });
    let settle = json!({ "worker_id": leased["worker_id"], "items": [item] });
    http.post("/leases/settle", &settle).await.expect_problem(422, "validation", "items[0]: id");
}

async fn an_id_of_another_queue_is_refused_to_a_limited_token(fixture: Fixture) {
    let theirs = fixture.add(job("greet")).await;
    let (_, secret) = token(&fixture, Scope::Enqueue, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture).with_token(&secret);
    let body = with_id(theirs.0, json!({ "queue": "mail" }));
    let refused = http.post("/jobs", &body).await.expect_problem(403, "forbidden", "another queue");
    assert!(!refused.text.contains("default"), "{refused:?}");
    let batch = http.post("/jobs/batch", &json!([body])).await.expect_status(200).json();
    assert_eq!((&batch["refused"], &batch["items"][0]["id"]), (&json!(1), &Value::Null));
}
