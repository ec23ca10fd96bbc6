//! The routes under `/jobs` and `/kinds`, called in process and over a socket.

use std::collections::BTreeSet;

use longshore::api::{Api, Limits};
use longshore::{NewJob, Outcome, Status};
use serde_json::{Value, json};

use super::client::{HttpClient, Response};
use crate::fixture::{Fixture, job};

cases! {
    a_posted_job_is_created_and_can_be_read,
    every_field_of_a_request_is_stored,
    an_idempotency_key_returns_one_job_and_the_header_wins_over_the_body,
    the_response_says_that_a_job_was_replaced,
    the_response_to_a_post_is_the_job_that_get_returns,
    ten_concurrent_posts_with_one_key_create_one_job,
    an_invalid_job_is_refused_by_field,
    an_unknown_job_is_not_found,
    a_job_in_no_table_is_an_internal_error,
    the_response_to_a_cancel_depends_on_the_status_of_the_job,
    a_list_is_newest_first_filtered_and_paged,
    a_list_of_a_queue_finds_its_waiting_jobs_among_many_others,
    a_list_of_large_jobs_is_paged_by_size,
    payloads_can_be_left_out_of_lists,
    a_job_can_be_edited_retried_and_deleted,
    a_batch_stores_the_valid_jobs_and_names_the_errors_of_the_others,
    two_idempotency_key_headers_are_refused,
    the_largest_batch_is_stored,
    a_job_of_an_unknown_kind_is_refused,
    json_records_have_the_fields_that_the_document_names,
}

/// Runs a case in process and then over a socket.
macro_rules! both_ways {
    ($fixture:ident, $case:expr) => {
        $case($fixture.clone(), HttpClient::new(&$fixture)).await;
        $case($fixture.clone(), HttpClient::new(&$fixture).listening(Limits::default()).await).await;
    };
}

fn greet() -> Value {
    json!({ "kind": "greet", "payload": { "name": "Ada" } })
}

fn id(response: &Response) -> String {
    response.json()["id"].as_str().expect("an id").to_owned()
}

async fn a_posted_job_is_created_and_can_be_read(fixture: Fixture) {
    both_ways!(fixture, |_, http: HttpClient| async move {
        let posted = http.post("/jobs", &greet()).await.expect_status(201);
        let body = posted.json();
        assert_eq!(body["status"], "queued");
        assert_eq!(posted.header("enqueued-as"), "created");
        assert_eq!((&body["queue"], &body["max_attempts"]), (&json!("default"), &json!(3)));
        assert_eq!(posted.header("location"), format!("/jobs/{}", id(&posted)));
        let read = http.get(&format!("/jobs/{}", id(&posted))).await.expect_status(200).json();
        assert_eq!(read["payload"], json!({ "name": "Ada" }));
        assert_eq!(read["errors"], json!([]));
    });
}

async fn every_field_of_a_request_is_stored(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let request = json!({
        "kind": "greet", "payload": [1, "two"], "max_attempts": 7, "idempotency_key": "idem-1",
        "queue": "mail", "priority": -5, "run_at": "2030-01-31T09:00:00Z", "unique_key": "account-7",
        "unique_mode": "replace", "timeout_seconds": 90.5, "retry": { "policy": "fixed", "delay_ms": 1500 },
        "tags": ["nightly"], "flags": ["gpu"], "context": "by hand", "metadata": { "team": "blue" },
    });
    let posted = http.post("/jobs", &request).await.expect_status(201);
    let read = http.get(&format!("/jobs/{}", id(&posted))).await.expect_status(200).json();
    for field in [
        "kind",
        "payload",
        "max_attempts",
        "idempotency_key",
        "queue",
        "priority",
        "run_at",
        "unique_key",
        "timeout_seconds",
        "retry",
        "tags",
        "flags",
        "context",
        "metadata",
    ] {
        assert_eq!(read[field], request[field], "{field}");
    }
    let without_timeout = json!({ "kind": "greet", "payload": 1, "timeout_seconds": "none" });
    let posted = http.post("/jobs", &without_timeout).await.expect_status(201);
    assert_eq!(http.get(&format!("/jobs/{}", id(&posted))).await.json()["timeout_seconds"], Value::Null);
}

async fn an_idempotency_key_returns_one_job_and_the_header_wins_over_the_body(fixture: Fixture) {
    both_ways!(fixture, |fixture: Fixture, http: HttpClient| async move {
        let (by_header, by_body) =
            (format!("h-{}", uuid::Uuid::now_v7()), format!("b-{}", uuid::Uuid::now_v7()));
        let mut body = greet();
        body["idempotency_key"] = json!(by_body);
        let headers = [("content-type", "application/json"), ("idempotency-key", by_header.as_str())];
        let first = http.send("POST", "/jobs", &headers, &body.to_string()).await.expect_status(201);
        assert_eq!(first.json()["idempotency_key"], by_header);
        // The second body never overwrites the first.
        body["payload"] = json!({ "name": "Grace" });
        let second = http.send("POST", "/jobs", &headers, &body.to_string()).await.expect_status(200);
        assert_eq!((id(&second), second.header("enqueued-as")), (id(&first), "existing"));
        assert_eq!(second.json()["payload"], json!({ "name": "Ada" }));
        let other = http.post("/jobs", &body).await.expect_status(201);
        assert_ne!(id(&other), id(&first));
        let stored = fixture.get(id(&first).parse().expect("an id")).await.expect("get");
        assert_eq!(stored.payload.get(), r#"{"name":"Ada"}"#);
    });
}

async fn the_response_says_that_a_job_was_replaced(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let keyed = |priority: i32| json!({ "kind": "greet", "payload": 1, "unique_key": "doc 7", "unique_mode": "replace", "priority": priority });
    let first = http.post("/jobs", &keyed(1)).await.expect_status(201);
    let second = http.post("/jobs", &keyed(2)).await.expect_status(200);
    let body = second.json();
    assert_eq!((id(&second), &body["priority"]), (id(&first), &json!(2)));
    assert_eq!(second.header("enqueued-as"), "replaced");
}

async fn the_response_to_a_post_is_the_job_that_get_returns(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let all_fields = json!({
        "kind": "greet", "payload": [1, "two", 3.50], "max_attempts": 7, "idempotency_key": "idem-1",
        "queue": "mail", "priority": -5, "run_at": "2030-01-31T09:00:00.1234567Z", "unique_key": "account-7",
        "unique_mode": "replace", "timeout_seconds": 90.5, "retry": { "policy": "fixed", "delay_ms": 1500 },
        "tags": ["nightly"], "flags": ["gpu"], "context": "by hand", "metadata": { "team": "blue" },
    });
    let delayed =
        json!({ "kind": "greet", "payload": null, "delay_seconds": 0.5, "timeout_seconds": "none" });
    let keyed = json!({ "kind": "greet", "payload": 1, "unique_key": "account-9" });
    let replacing = json!({
        "kind": "greet", "payload": 2, "unique_key": "account-7", "unique_mode": "preserve_run_at",
    });
    for (request, status, enqueued_as) in [
        (greet(), 201, "created"),
        (all_fields.clone(), 201, "created"),
        (delayed, 201, "created"),
        (keyed.clone(), 201, "created"),
        // The same idempotency key, the same unique key, and a replacement.
        (all_fields, 200, "existing"),
        (keyed, 200, "existing"),
        (replacing, 200, "replaced"),
    ] {
        let posted = http.post("/jobs", &request).await.expect_status(status);
        assert_eq!(posted.header("enqueued-as"), enqueued_as, "{request}");
        assert_eq!(posted.header("location"), format!("/jobs/{}", id(&posted)));
        let read = http.get(&format!("/jobs/{}", id(&posted))).await.expect_status(200);
        assert_eq!(posted.text, read.text, "{request}");
    }
}

async fn ten_concurrent_posts_with_one_key_create_one_job(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let posts = (0..10).map(|i| {
        let http = http.clone();
        tokio::spawn(async move {
            let body = json!({ "kind": "greet", "payload": i, "idempotency_key": "order-17" });
            let response = http.post("/jobs", &body).await;
            (response.status, id(&response))
        })
    });
    let posts: Vec<_> = posts.collect();
    let (mut statuses, mut ids) = (Vec::new(), BTreeSet::new());
    for post in posts {
        let (status, id) = post.await.expect("task");
        statuses.push(status);
        ids.insert(id);
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 200, 200, 200, 200, 201]);
    assert_eq!(ids.len(), 1);
}

async fn an_invalid_job_is_refused_by_field(fixture: Fixture) {
    both_ways!(fixture, |fixture: Fixture, http: HttpClient| async move {
        let raw =
            |body: &'static str| http.send("POST", "/jobs", &[("content-type", "application/json")], body);
        raw("{oops").await.expect_problem(400, "bad_request", "not JSON");
        raw("").await.expect_problem(400, "bad_request", "not JSON");
        raw(r#"{"kind":"greet"}"#).await.expect_problem(422, "validation", "payload");
        raw(r#"{"payload":1}"#).await.expect_problem(422, "validation", "kind");
        raw(r#"{"kind":"greet","payload":1,"colour":"red"}"#).await.expect_problem(
            422,
            "validation",
            "colour",
        );
        raw(r#"{"kind":"greet","payload":1,"priority":"high"}"#).await.expect_problem(
            422,
            "validation",
            "high",
        );
        raw(r#"{"kind":"greet","payload":1,"priority":40000}"#).await.expect_problem(
            422,
            "validation",
            "priority",
        );
        raw(r#"{"kind":"","payload":1}"#).await.expect_problem(422, "validation", "kind");
        raw(r#"{"kind":"greet","payload":1,"max_attempts":0}"#).await.expect_problem(
            422,
            "validation",
            "max_attempts",
        );
        raw(r#"{"kind":"greet","payload":1,"delay_seconds":-1}"#).await.expect_problem(
            422,
            "validation",
            "delay_seconds",
        );
        raw(r#"{"kind":"greet","payload":1,"delay_seconds":1,"run_at":"2030-01-01T00:00:00Z"}"#)
            .await
            .expect_problem(422, "validation", "run_at");
        raw(r#"{"kind":"greet","payload":1,"unique_mode":"replace"}"#).await.expect_problem(
            422,
            "validation",
            "unique_key",
        );
        raw(r#"{"kind":"greet","payload":"a\u0000b"}"#).await.expect_problem(422, "validation", "NUL");
        raw(r#"{"kind":"a\u0000b","payload":1}"#).await.expect_problem(422, "validation", "NUL");
        raw(r#"{"kind":"greet","payload":"\ud800"}"#).await.expect_problem(422, "validation", "surrogate");
        raw(r#"{"kind":"\ud800","payload":1}"#).await.expect_problem(422, "validation", "surrogate");
        let deep = format!(r#"{{"kind":"greet","payload":{}{}}}"#, "[".repeat(65), "]".repeat(65));
        http.send("POST", "/jobs", &[("content-type", "application/json")], &deep).await.expect_problem(
            422,
            "validation",
            "deep",
        );
        let with_content_type = async |kind: &str| {
            http.send("POST", "/jobs", &[("content-type", kind)], r#"{"kind":"greet","payload":1}"#).await
        };
        with_content_type("text/plain").await.expect_problem(
            415,
            "unsupported_media_type",
            "application/json",
        );
        with_content_type("application/json; charset=utf-8").await.expect_status(201);
        let large = |n: usize| json!({ "kind": "greet", "payload": "p".repeat(n) });
        http.post("/jobs", &large(1024 * 1024)).await.expect_problem(413, "too_large", "payload");
        http.post("/jobs", &large(1024 * 1024 - 2)).await.expect_status(201);
        http.post("/jobs", &large(2 * 1024 * 1024)).await.expect_problem(413, "too_large", "larger than");
        let stored = fixture.list(&longshore::ListFilter::default()).await.expect("list").jobs.len();
        assert!(stored == 2 || stored == 4, "{stored}");
    });
}

async fn a_job_in_no_table_is_an_internal_error(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    fixture.sql("delete from ready", None).await;
    fixture.skip_final_check();
    for path in [format!("/jobs/{id}"), format!("/jobs/{id}/explain"), "/jobs".to_owned()] {
        http.get(&path).await.expect_problem(500, "internal", "");
    }
    for path in [format!("/jobs/{id}/cancel"), format!("/jobs/{id}/retry")] {
        http.post(&path, &json!({})).await.expect_problem(500, "internal", "");
    }
    http.json("PATCH", &format!("/jobs/{id}"), &json!({ "priority": 3 }))
        .await
        .expect_problem(500, "internal", "");
    http.json("DELETE", &format!("/jobs/{id}"), &json!({})).await.expect_problem(500, "internal", "");
}

async fn an_unknown_job_is_not_found(fixture: Fixture) {
    both_ways!(fixture, |_, http: HttpClient| async move {
        let unknown = "/jobs/01990000-0000-7000-8000-000000000000";
        http.get(unknown).await.expect_problem(404, "not_found", "01990000");
        http.post(&format!("{unknown}/cancel"), &json!({})).await.expect_problem(404, "not_found", "");
        http.post(&format!("{unknown}/retry"), &json!({})).await.expect_problem(404, "not_found", "");
        http.json("PATCH", unknown, &json!({ "priority": 1 })).await.expect_problem(404, "not_found", "");
        http.send("DELETE", unknown, &[], "").await.expect_problem(404, "not_found", "");
        http.get("/jobs/seven").await.expect_problem(400, "bad_request", "seven");
    });
}

async fn the_response_to_a_cancel_depends_on_the_status_of_the_job(fixture: Fixture) {
    both_ways!(fixture, |fixture: Fixture, http: HttpClient| async move {
        let waiting = fixture.add(job("greet")).await;
        let response =
            http.send("POST", &format!("/jobs/{waiting}/cancel"), &[], "").await.expect_status(200);
        assert_eq!(response.json(), json!({ "status": "cancelled", "job_id": waiting.to_string() }));
        let refused = http.send("POST", &format!("/jobs/{waiting}/cancel"), &[], "").await.expect_problem(
            409,
            "conflict",
            "cancelled",
        );
        assert_eq!(refused.json()["job_status"], "cancelled");

        let running = fixture.add(job("greet")).await;
        let worker = fixture.worker().await;
        let claimed = fixture.claim_one(worker).await;
        assert_eq!(claimed.lease().id, running);
        let response =
            http.send("POST", &format!("/jobs/{running}/cancel"), &[], "").await.expect_status(202);
        assert_eq!(response.json(), json!({ "status": "pending", "job_id": running.to_string() }));
        assert_eq!(http.get(&format!("/jobs/{running}")).await.json()["cancel_requested"], true);
    });
}

async fn a_list_is_newest_first_filtered_and_paged(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let mut ids = Vec::new();
    for i in 0..5 {
        let queue = if i % 2 == 0 { "even" } else { "odd" };
        ids.push(fixture.add(NewJob::new("greet", &i).queue(queue)).await.to_string());
    }
    ids.reverse();
    let listed = |response: &Response| -> Vec<String> {
        let jobs = response.json();
        jobs.as_array()
            .expect("an array")
            .iter()
            .map(|job| job["id"].as_str().expect("an id").into())
            .collect()
    };
    assert_eq!(listed(&http.get("/jobs").await.expect_status(200)), ids);
    assert_eq!(
        listed(&http.get("/jobs?queue=odd").await.expect_status(200)),
        [ids[1].clone(), ids[3].clone()]
    );
    assert_eq!(listed(&http.get("/jobs?status=running").await.expect_status(200)), Vec::<String>::new());
    assert_eq!(listed(&http.get("/jobs?limit=2&offset=1").await.expect_status(200)), ids[1..3]);
    // A limit out of range is clamped.
    assert_eq!(listed(&http.get("/jobs?limit=0").await.expect_status(200)).len(), 1);
    assert_eq!(listed(&http.get("/jobs?limit=-7").await.expect_status(200)).len(), 1);
    assert_eq!(listed(&http.get("/jobs?limit=2&offset=-7").await.expect_status(200)), ids[..2]);
    // Also beyond the range of any integer type.
    let far = "9".repeat(40);
    assert_eq!(listed(&http.get(&format!("/jobs?limit={far}&offset=-{far}")).await.expect_status(200)), ids);
    http.get(&format!("/jobs?offset={far}")).await.expect_problem(400, "bad_request", "above 10000");
    http.get(&format!("/dead-letters?offset=-{far}")).await.expect_status(200);
    http.get(&format!("/stats?minutes={far}")).await.expect_status(200);
    http.get("/jobs?limit=many").await.expect_problem(400, "bad_request", "limit");
    assert_eq!(listed(&http.get("/jobs?limit=1000").await.expect_status(200)).len(), 5);
    let mut seen = Vec::new();
    let mut next = Some("/jobs?kind=greet&limit=2".to_owned());
    while let Some(page) = next {
        let response = http.get(&page).await.expect_status(200);
        seen.extend(listed(&response));
        let link = response.header("link");
        next =
            link.strip_suffix(">; rel=\"next\"").and_then(|link| link.strip_prefix('<')).map(str::to_owned);
        assert!(next.as_ref().is_none_or(|next| next.contains("kind=greet")), "{link}");
    }
    assert_eq!(seen, ids);
    http.get("/jobs?offset=10000").await.expect_status(200);
    http.get("/jobs?offset=10001").await.expect_problem(400, "bad_request", "cursor");
    http.get("/jobs?offset=99999999999").await.expect_problem(400, "bad_request", "cursor");
    assert_eq!(listed(&http.get("/jobs?status=queued,retrying").await.expect_status(200)), ids);
    assert_eq!(
        listed(&http.get("/jobs?status=running,cancelled").await.expect_status(200)),
        Vec::<String>::new()
    );
    let nothing = [
        "group=acme",
        "error=timeout",
        "older_than=2001-01-01T00:00:00Z",
        "ended_after=2001-01-01T00:00:00Z",
    ];
    for filter in nothing {
        let found = http.get(&format!("/jobs?{filter}")).await.expect_status(200);
        assert_eq!(listed(&found), Vec::<String>::new(), "{filter}");
    }
    http.get("/jobs?status=queued,asleep").await.expect_problem(400, "bad_request", "asleep");
    assert_eq!(listed(&http.get("/jobs?status=").await.expect_status(200)), ids);
    http.get("/jobs?status=queued,").await.expect_problem(400, "bad_request", "status");
    http.get("/jobs?id=xyz").await.expect_problem(400, "bad_request", "`id`");
    http.get("/jobs?ended_after=yesterday").await.expect_problem(400, "bad_request", "");
    http.get("/jobs?error=a%00b").await.expect_problem(400, "bad_request", "NUL");
    http.get("/jobs?colour=red").await.expect_problem(400, "bad_request", "colour");
    http.get("/jobs?limit=many").await.expect_problem(400, "bad_request", "");
    http.get("/jobs?cursor=seven").await.expect_problem(400, "bad_request", "");
    http.get("/jobs?kind=a%00b").await.expect_problem(400, "bad_request", "NUL");
}

async fn a_job_can_be_edited_retried_and_deleted(fixture: Fixture) {
    both_ways!(fixture, |fixture: Fixture, http: HttpClient| async move {
        let id = fixture.add(job("greet")).await;
        let path = format!("/jobs/{id}");
        let edited = http
            .json("PATCH", &path, &json!({ "priority": 9, "payload": { "name": "Grace" } }))
            .await
            .expect_status(200);
        assert_eq!(
            (&edited.json()["priority"], &edited.json()["payload"]),
            (&json!(9), &json!({ "name": "Grace" }))
        );
        http.json("PATCH", &path, &json!({ "priority": 99_999 })).await.expect_problem(
            422,
            "validation",
            "priority",
        );
        http.json("PATCH", &path, &json!({ "kind": "other" })).await.expect_problem(
            422,
            "validation",
            "kind",
        );
        http.send("DELETE", &path, &[], "").await.expect_problem(409, "conflict", "");
        fixture.cancel(id).await.expect("cancel");
        http.json("PATCH", &path, &json!({ "priority": 1 })).await.expect_problem(409, "conflict", "");
        let again = http.send("POST", &format!("{path}/retry"), &[], "").await.expect_status(200);
        assert_eq!(again.json()["status"], Status::Queued.as_str());
        fixture.cancel(id).await.expect("cancel");
        assert_eq!(http.send("DELETE", &path, &[], "").await.expect_status(204).text, "");
        http.get(&path).await.expect_problem(404, "not_found", "");
    });
}

async fn a_batch_stores_the_valid_jobs_and_names_the_errors_of_the_others(fixture: Fixture) {
    both_ways!(fixture, |fixture: Fixture, http: HttpClient| async move {
        let key = uuid::Uuid::now_v7().to_string();
        let items = [
            json!({ "kind": "greet", "payload": 1, "idempotency_key": key }),
            json!({ "kind": "greet", "payload": 2, "priority": 99_999 }),
            json!({ "kind": "greet", "payload": 3, "idempotency_key": key }),
            json!({ "kind": "greet" }),
            json!({ "kind": "greet", "payload": 4 }),
        ];
        let response = http.post("/jobs/batch", &json!(items)).await.expect_status(200).json();
        assert_eq!(
            (&response["created"], &response["existing"], &response["refused"]),
            (&json!(2), &json!(1), &json!(2))
        );
        let outcome = |i: usize| response["items"][i]["outcome"].as_str().expect("an outcome").to_owned();
        assert_eq!([0, 1, 2, 3, 4].map(outcome), ["created", "refused", "existing", "refused", "created"]);
        assert_eq!(response["items"][2]["id"], response["items"][0]["id"]);
        assert!(response["items"][1]["message"].as_str().expect("a message").contains("priority"));

        let lines = "{\"kind\":\"greet\",\"payload\":1}\n\n\n{oops\n{\"kind\":\"greet\",\"payload\":2}\n\
                     [7]\n{\"kind\":\"greet\"}\n{\"kind\":\"greet\",\"payload\":3,\"priority\":99999}\n";
        let response = http
            .send("POST", "/jobs/batch", &[("content-type", "application/x-ndjson")], lines)
            .await
            .expect_status(200);
        let response = response.json();
        assert_eq!((&response["created"], &response["refused"]), (&json!(2), &json!(4)));
        let expected = [
            (1, "line 4: the job is not JSON: key must be a string at column 2"),
            (3, "line 6: the job is not an object"),
            (4, "line 7: missing field `payload`"),
            (5, "line 8: priority"),
        ];
        for (item, start) in expected {
            let message = response["items"][item]["message"].as_str().expect("a message");
            assert!(message.starts_with(start), "{message}");
        }
        let listed = http.post("/jobs/batch", &json!([7])).await.expect_status(200).json();
        let message = listed["items"][0]["message"].as_str().expect("a message");
        assert!(message.starts_with("the job is not an object"), "{message}");

        let many = |n: usize| json!(vec![json!({ "kind": "greet", "payload": 1 }); n]);
        http.post("/jobs/batch", &many(10_001)).await.expect_problem(413, "too_large", "10000");
        http.post("/jobs/batch", &json!({ "kind": "greet" })).await.expect_problem(422, "validation", "");
        http.post("/jobs/batch", &json!([])).await.expect_status(200);
        let _ = fixture;
    });
}

async fn two_idempotency_key_headers_are_refused(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let keys = [("content-type", "application/json"), ("idempotency-key", "a"), ("idempotency-key", "b")];
    let body = greet().to_string();
    http.send("POST", "/jobs", &keys, &body).await.expect_problem(400, "bad_request", "Idempotency-Key");
    http.send("POST", "/jobs", &keys[..2], &body).await.expect_status(201);
}

async fn the_largest_batch_is_stored(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let jobs: Vec<Value> = (0..10_000).map(|i| json!({ "kind": "greet", "payload": i })).collect();
    let response = http.post("/jobs/batch", &json!(jobs)).await.expect_status(200).json();
    assert_eq!(response["created"], 10_000);
}

async fn a_job_of_an_unknown_kind_is_refused(fixture: Fixture) {
    let http = HttpClient::for_api(Api::new(fixture.client()));
    http.post("/jobs", &greet()).await.expect_problem(422, "validation", "greet");
    let schema = json!({
        "type": "object", "required": ["name"], "additionalProperties": false,
        "properties": { "name": { "type": "string" } },
    });
    let defaults = json!({ "queue": "mail", "priority": 4, "max_attempts": 9, "timeout_seconds": 30 });
    http.json("PUT", "/kinds/greet", &json!({ "schema": schema, "defaults": defaults }))
        .await
        .expect_status(200);
    let posted = http.post("/jobs", &greet()).await.expect_status(201).json();
    assert_eq!(
        (&posted["queue"], &posted["priority"], &posted["max_attempts"]),
        (&json!("mail"), &json!(4), &json!(9))
    );
    let wrong = json!({ "kind": "greet", "payload": { "name": 7 } });
    http.post("/jobs", &wrong).await.expect_problem(422, "validation", "/name");
    let explicit = json!({ "kind": "greet", "payload": { "name": "Ada" }, "queue": "other" });
    assert_eq!(http.post("/jobs", &explicit).await.expect_status(201).json()["queue"], "other");
    http.json("PUT", "/kinds/greet", &json!({ "schema": { "type": "moon" } })).await.expect_problem(
        422,
        "validation",
        "schema",
    );
    http.json("PUT", "/kinds/greet", &json!({ "defaults": { "priority": 99_999 } })).await.expect_problem(
        422,
        "validation",
        "priority",
    );
    assert_eq!(http.get("/kinds?schemas=true").await.expect_status(200).json()[0]["schema"], schema);
    http.send("DELETE", "/kinds/greet", &[], "").await.expect_status(204);
    http.post("/jobs", &greet()).await.expect_problem(422, "validation", "greet");
}

async fn json_records_have_the_fields_that_the_document_names(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    let fields = |value: &Value| -> BTreeSet<String> {
        value.as_object().expect("an object").keys().cloned().collect()
    };
    let document = http.get("/api-docs/openapi.json").await.expect_status(200).json();
    let documented = |name: &str| fields(&document["components"]["schemas"][name]["properties"]);
    assert_eq!(fields(&http.get(&format!("/jobs/{id}")).await.json()), documented("Job"));
    fixture.pause("default").await.expect("pause");
    assert_eq!(fields(&http.get("/queues").await.json()[0]), documented("Queue"));
    fixture.worker().await;
    assert_eq!(fields(&http.get("/workers").await.json()[0]), documented("Worker"));
    let tasks = json!([
        { "task": "a", "kind": "greet", "payload": 1 },
        { "task": "b", "kind": "greet", "payload": 2, "after": ["a"] },
    ]);
    let flow = http.post("/flows", &json!({ "name": "f", "tasks": tasks })).await.expect_status(201).json();
    assert_eq!(fields(&flow), documented("Flow"));
    let path = format!("/flows/{}/tasks", flow["id"].as_str().expect("an id"));
    let tasks = http.get(&path).await.expect_status(200).json();
    assert_eq!(fields(&tasks[1]), documented("FlowTask"));
    assert_eq!(fields(&tasks[1]["after"][0]), documented("FlowLink"));
    let body = json!({ "action": "cancel", "filter": { "kind": "none" } });
    let operation = http.post("/operations", &body).await.expect_status(202).json();
    assert_eq!(fields(&operation), documented("Operation"));
}

async fn a_list_of_a_queue_finds_its_waiting_jobs_among_many_others(fixture: Fixture) {
    let id = fixture.add(job("mail").queue("letters")).await;
    fixture.enqueue_many((0..5500).map(|_| job("mail"))).await.expect("enqueue");
    let http = HttpClient::new(&fixture);
    let page = http.get("/jobs?queue=letters").await.expect_status(200);
    assert_eq!(page.json().as_array().map(Vec::len), Some(1), "{}", page.json());
    assert_eq!(page.json()[0]["id"], id.to_string());
    assert_eq!(page.header("link"), "", "the page is the last one");
}

async fn a_list_of_large_jobs_is_paged_by_size(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let mut expected = Vec::new();
    for i in 0..30 {
        expected.push(
            fixture.add(NewJob::new("greet", &format!("{i}{}", "p".repeat(1_000_000)))).await.to_string(),
        );
    }
    expected.reverse();
    let mut path = "/jobs?limit=200&kind=greet".to_owned();
    let mut found = Vec::new();
    loop {
        let page = http.get(&path).await.expect_status(200);
        assert!(page.text.len() < 5 * 1024 * 1024, "{} bytes", page.text.len());
        let jobs = page.json();
        found.extend(
            jobs.as_array()
                .expect("an array")
                .iter()
                .map(|job| job["id"].as_str().expect("an id").to_owned()),
        );
        let Some(link) = page.header("link").strip_prefix('<') else { break };
        path = link.split('>').next().expect("a link").to_owned();
    }
    assert_eq!(found, expected);
}

async fn payloads_can_be_left_out_of_lists(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    fixture.ended(job("greet"), Outcome::Succeeded).await;
    fixture.ended(job("greet").queue("default"), Outcome::FailedPermanent).await;
    for path in ["/jobs?limit=5", "/dead-letters?limit=5"] {
        let with = http.get(&format!("{path}&payload=true")).await.expect_status(200).json();
        assert_eq!(with[0]["payload"], json!({ "for": "greet" }));
        let without = http.get(&format!("{path}&payload=false")).await.expect_status(200).json();
        for job in without.as_array().expect("an array") {
            assert_eq!((&job["payload"], &job["result"]), (&Value::Null, &Value::Null));
            assert_eq!(job["kind"], "greet");
        }
        http.get(&format!("{path}&payload=maybe")).await.expect_problem(400, "bad_request", "payload");
    }
}
