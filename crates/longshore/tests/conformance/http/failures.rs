//! Groups of failures over HTTP.

use longshore::{Fingerprint, Outcome, Scope};
use serde_json::json;

use super::auth::{token, with_tokens_required};
use super::client::HttpClient;
use crate::fixture::*;

cases! {
    groups_of_failures_are_listed_and_shown,
    groups_are_listed_in_pages_that_keep_the_filter,
    jobs_are_listed_by_group,
    bad_parameters_are_refused,
    a_token_for_some_queues_sees_no_groups,
}

async fn groups_of_failures_are_listed_and_shown(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    assert_eq!(http.get("/failures").await.expect_status(200).json(), json!([]));
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let listed = http.get("/failures").await.expect_status(200).json();
    let fingerprint = Fingerprint::of("mail", "no such mailbox").to_string();
    assert_eq!(
        listed,
        json!([{
            "fingerprint": fingerprint,
            "kind": "mail",
            "attempts": 1,
            "dead": 1,
            "dead_or_more": false,
            "first_seen": start(),
            "last_seen": start(),
            "job": id,
            "error": "no such mailbox",
        }])
    );
    let shown = http.get(&format!("/failures/{fingerprint}")).await.expect_status(200).json();
    assert_eq!(shown, listed[0]);
}

async fn groups_are_listed_in_pages_that_keep_the_filter(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    for kind in ["mail", "sms", "mail"] {
        for letter in ["a", "b"] {
            let claimed = fixture.running(job(kind)).await;
            let error = format!("reason {letter}");
            fixture.must_finish(&claimed, longshore::Ending::Failed { error, retry_in: None }).await;
        }
    }
    let first = http.get("/failures?kind=mail&limit=1").await.expect_status(200);
    let link = first.header("link").to_owned();
    let next = link.trim_start_matches('<').split('>').next().expect("a URL").to_owned();
    assert!(next.starts_with("/failures?kind=mail&limit=1&cursor="), "{next}");
    let second = http.get(&next).await.expect_status(200).json();
    assert_eq!((second[0]["kind"].as_str(), second[0]["attempts"].as_u64()), (Some("mail"), Some(2)));
    assert_ne!(second[0]["fingerprint"], first.json()[0]["fingerprint"]);
}

async fn jobs_are_listed_by_group(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    fixture.ended(job("sms"), Outcome::FailedPermanent).await;
    let fingerprint = Fingerprint::of("mail", "no such mailbox");
    let listed = http.get(&format!("/jobs?failure={fingerprint}")).await.expect_status(200).json();
    assert_eq!(listed.as_array().expect("jobs").len(), 1);
    assert_eq!(listed[0]["id"], json!(id));
}

async fn bad_parameters_are_refused(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    http.get("/failures?cursor=x").await.expect_problem(400, "bad_request", "cursor");
    http.get("/failures?cursor=-569079415675717826.06f70e3890ab79ad").await.expect_problem(
        400,
        "bad_request",
        "cursor",
    );
    http.get("/failures?cursor=9999999999999999999.0123456789abcdef").await.expect_problem(
        400,
        "bad_request",
        "cursor",
    );
    http.get("/failures?kind=%00").await.expect_problem(400, "bad_request", "NUL");
    http.get("/failures?queue=mail").await.expect_problem(400, "bad_request", "queue");
    http.get("/failures/xyz").await.expect_problem(400, "bad_request", "failure");
    http.get("/jobs?failure=12").await.expect_problem(400, "bad_request", "failure");
    http.get("/failures/0123456789abcdef").await.expect_problem(404, "not_found", "0123456789abcdef");
}

async fn a_token_for_some_queues_sees_no_groups(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture).with_token(&secret);
    http.get("/failures").await.expect_problem(403, "forbidden", "queue");
    http.get("/failures/0123456789abcdef").await.expect_problem(403, "forbidden", "queue");
}
