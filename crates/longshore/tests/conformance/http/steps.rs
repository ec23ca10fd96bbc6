//! Events that jobs wait for, and the steps of a job.

use longshore::Ending;
use longshore::rules::lifecycle::PendingWait;
use longshore::store::{NewStep, NewWorker};
use serde_json::{Value, json};

use super::client::HttpClient;
use crate::fixture::*;

cases! {
    an_event_is_emitted_once_and_shown,
    a_bad_event_is_refused_by_field,
    an_event_over_http_wakes_the_job,
    the_steps_of_a_job_are_listed,
    explain_says_what_a_suspended_job_waits_for,
}

async fn an_event_is_emitted_once_and_shown(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    http.get("/events/approved:42").await.expect_status(404);
    let first: Value = http
        .post("/events", &json!({ "name": "approved:42", "payload": { "by": "ada" } }))
        .await
        .expect_status(201)
        .json();
    assert_eq!((&first["name"], &first["payload"]), (&json!("approved:42"), &json!({ "by": "ada" })));
    let second: Value =
        http.post("/events", &json!({ "name": "approved:42", "payload": 2 })).await.expect_status(200).json();
    assert_eq!(second, first);
    assert_eq!(http.get("/events/approved:42").await.expect_status(200).json(), first);
    let bare: Value = http.post("/events", &json!({ "name": "bare" })).await.expect_status(201).json();
    assert_eq!(bare["payload"], json!(null));
}

async fn a_bad_event_is_refused_by_field(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for (body, field) in [
        (json!({ "name": "" }), "name"),
        (json!({ "name": "x".repeat(129) }), "name"),
        (json!({ "name": "a", "payload": "x".repeat(64 * 1024) }), "payload"),
        (json!({ "payload": 1 }), "name"),
        (json!({ "name": "a", "paylaod": 1 }), "paylaod"),
    ] {
        let problem: Value = http.post("/events", &body).await.expect_status(422).json();
        assert!(problem["message"].as_str().expect("message").contains(field), "{problem}");
    }
    assert_eq!(fixture.query_number("select count(*) from events", None).await, 0);
}

/// Suspends a job that has done one step and waits for the event `b`.
async fn suspended(fixture: &Fixture) -> longshore::JobId {
    let claimed = fixture.running(job("order")).await;
    let step = NewStep { lease: claimed.lease(), name: "a".into(), value: raw("9223372036854775808") };
    fixture.save_steps(&[step]).await.expect("save");
    let until = Some(start() + DAY);
    let waits = vec![PendingWait { step: "event:b".into(), until, events: vec!["b".into()] }];
    fixture.must_finish(&claimed, Ending::Suspended { waits }).await;
    claimed.lease().id
}

async fn an_event_over_http_wakes_the_job(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = suspended(&fixture).await;
    http.post("/events", &json!({ "name": "b" })).await.expect_status(201);
    assert_eq!(fixture.job(id).await.run_at, start());
}

async fn the_steps_of_a_job_are_listed(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = suspended(&fixture).await;
    let response = http.get(&format!("/jobs/{id}/steps")).await.expect_status(200);
    assert!(response.text.contains("9223372036854775808"), "numbers are exact");
    let steps: Value = response.json();
    let brief: Vec<_> =
        steps.as_array().expect("list").iter().map(|step| (&step["name"], &step["status"])).collect();
    assert_eq!(brief, [(&json!("a"), &json!("done")), (&json!("event:b"), &json!("waiting"))]);
    assert_eq!(steps[1]["until"], json!("2031-05-07T07:08:09Z"));
    http.get(&format!("/jobs/{}/steps", longshore::JobId::new())).await.expect_status(404);
}

async fn explain_says_what_a_suspended_job_waits_for(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = suspended(&fixture).await;
    fixture.store().register(&NewWorker::new("w")).await.expect("register");
    let explained: Value = http.get(&format!("/jobs/{id}/explain")).await.expect_status(200).json();
    assert_eq!(explained["reason"], "suspended");
    let message = explained["message"].as_str().expect("message");
    assert!(message.contains("for the event `b` until 2031-05-07"), "{message}");
}
