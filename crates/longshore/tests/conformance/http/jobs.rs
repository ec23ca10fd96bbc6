//! Jobs over HTTP: every row of the contract, in this process and by a socket.

use std::collections::BTreeSet;

use longshore::api::{Api, Limits};
use longshore::{NewJob, Status};
use serde_json::{Value, json};

use super::web::{Answer, Web};
use crate::bench::{Bench, job};

cases! {
    a_posted_job_is_created_and_can_be_read,
    everything_a_request_says_reaches_the_job,
    one_key_is_one_job_and_the_header_beats_the_body,
    a_replaced_job_is_told_as_such,
    ten_posts_with_one_key_at_once_make_one_job,
    what_is_wrong_with_a_job_is_refused_by_name,
    a_job_that_is_not_there_is_not_found,
    a_cancel_answers_by_where_the_job_stands,
    a_list_is_newest_first_filtered_and_paged,
    a_job_is_changed_retried_and_deleted,
    a_batch_stores_the_good_and_names_the_bad,
    two_idempotency_keys_are_refused,
    the_largest_batch_is_stored,
    a_kind_that_nobody_has_announced_is_refused,
    a_job_on_the_wire_has_the_fields_that_the_document_names,
}

/// Runs a case in this process and then by a socket.
macro_rules! both_ways {
    ($bench:ident, $case:expr) => {
        $case($bench.clone(), Web::new(&$bench)).await;
        $case($bench.clone(), Web::new(&$bench).listening(Limits::default()).await).await;
    };
}

fn greet() -> Value {
    json!({ "kind": "greet", "payload": { "name": "Ada" } })
}

fn id(answer: &Answer) -> String {
    answer.json()["id"].as_str().expect("an id").to_owned()
}

async fn a_posted_job_is_created_and_can_be_read(bench: Bench) {
    both_ways!(bench, |_, web: Web| async move {
        let posted = web.post("/jobs", &greet()).await.is(201);
        let body = posted.json();
        assert_eq!(body["status"], "queued");
        assert_eq!((&body["created"], &body["how"]), (&json!(true), &json!("created")));
        assert_eq!((&body["queue"], &body["max_attempts"]), (&json!("default"), &json!(3)));
        assert_eq!(posted.header("location"), format!("/jobs/{}", id(&posted)));
        let read = web.get(&format!("/jobs/{}", id(&posted))).await.is(200).json();
        assert_eq!(read["payload"], json!({ "name": "Ada" }));
        assert_eq!(read["errors"], json!([]));
    });
}

async fn everything_a_request_says_reaches_the_job(bench: Bench) {
    let web = Web::new(&bench);
    let asked = json!({
        "kind": "greet", "payload": [1, "two"], "max_attempts": 7, "idempotency_key": "idem-1",
        "queue": "mail", "priority": -5, "run_at": "2030-01-31T09:00:00Z", "unique_key": "account-7",
        "unique_mode": "replace", "timeout_seconds": 90.5, "retry": { "policy": "fixed", "delay_ms": 1500 },
        "tags": ["nightly"], "flags": ["gpu"], "context": "by hand", "metadata": { "team": "blue" },
    });
    let posted = web.post("/jobs", &asked).await.is(201);
    let read = web.get(&format!("/jobs/{}", id(&posted))).await.is(200).json();
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
        assert_eq!(read[field], asked[field], "{field}");
    }
    let endless = json!({ "kind": "greet", "payload": 1, "timeout_seconds": "none" });
    let posted = web.post("/jobs", &endless).await.is(201);
    assert_eq!(web.get(&format!("/jobs/{}", id(&posted))).await.json()["timeout_seconds"], Value::Null);
}

async fn one_key_is_one_job_and_the_header_beats_the_body(bench: Bench) {
    both_ways!(bench, |bench: Bench, web: Web| async move {
        let (by_header, by_body) =
            (format!("h-{}", uuid::Uuid::now_v7()), format!("b-{}", uuid::Uuid::now_v7()));
        let mut body = greet();
        body["idempotency_key"] = json!(by_body);
        let headers = [("content-type", "application/json"), ("idempotency-key", by_header.as_str())];
        let first = web.send("POST", "/jobs", &headers, &body.to_string()).await.is(201);
        assert_eq!(first.json()["idempotency_key"], by_header);
        // Whatever the second body says, the first is never overwritten.
        body["payload"] = json!({ "name": "Grace" });
        let second = web.send("POST", "/jobs", &headers, &body.to_string()).await.is(200);
        assert_eq!((id(&second), second.json()["created"].clone()), (id(&first), json!(false)));
        assert_eq!(second.json()["how"], "existing");
        let other = web.post("/jobs", &body).await.is(201);
        assert_ne!(id(&other), id(&first));
        let stored = bench.get(id(&first).parse().expect("an id")).await.expect("get");
        assert_eq!(stored.payload.get(), r#"{"name":"Ada"}"#);
    });
}

async fn a_replaced_job_is_told_as_such(bench: Bench) {
    let web = Web::new(&bench);
    let keyed = |priority: i32| json!({ "kind": "greet", "payload": 1, "unique_key": "doc 7", "unique_mode": "replace", "priority": priority });
    let first = web.post("/jobs", &keyed(1)).await.is(201);
    let second = web.post("/jobs", &keyed(2)).await.is(200);
    let told = second.json();
    assert_eq!((id(&second), &told["how"], &told["priority"]), (id(&first), &json!("replaced"), &json!(2)));
}

async fn ten_posts_with_one_key_at_once_make_one_job(bench: Bench) {
    let web = Web::new(&bench).listening(Limits::default()).await;
    let posts = (0..10).map(|i| {
        let web = web.clone();
        tokio::spawn(async move {
            let body = json!({ "kind": "greet", "payload": i, "idempotency_key": "all of us" });
            let answer = web.post("/jobs", &body).await;
            (answer.status, id(&answer))
        })
    });
    let posts: Vec<_> = posts.collect();
    let (mut statuses, mut ids) = (Vec::new(), BTreeSet::new());
    for post in posts {
        let (status, id) = post.await.expect("posted");
        statuses.push(status);
        ids.insert(id);
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 200, 200, 200, 200, 201]);
    assert_eq!(ids.len(), 1);
}

async fn what_is_wrong_with_a_job_is_refused_by_name(bench: Bench) {
    both_ways!(bench, |bench: Bench, web: Web| async move {
        let raw =
            |body: &'static str| web.send("POST", "/jobs", &[("content-type", "application/json")], body);
        raw("{oops").await.is_problem(400, "bad_request", "not JSON");
        raw("").await.is_problem(400, "bad_request", "not JSON");
        raw(r#"{"kind":"greet"}"#).await.is_problem(422, "validation", "payload");
        raw(r#"{"payload":1}"#).await.is_problem(422, "validation", "kind");
        raw(r#"{"kind":"greet","payload":1,"colour":"red"}"#).await.is_problem(422, "validation", "colour");
        raw(r#"{"kind":"greet","payload":1,"priority":"high"}"#).await.is_problem(422, "validation", "high");
        raw(r#"{"kind":"greet","payload":1,"priority":40000}"#).await.is_problem(
            422,
            "validation",
            "priority",
        );
        raw(r#"{"kind":"","payload":1}"#).await.is_problem(422, "validation", "kind");
        raw(r#"{"kind":"greet","payload":1,"max_attempts":0}"#).await.is_problem(
            422,
            "validation",
            "max_attempts",
        );
        raw(r#"{"kind":"greet","payload":1,"delay_seconds":-1}"#).await.is_problem(
            422,
            "validation",
            "delay_seconds",
        );
        raw(r#"{"kind":"greet","payload":1,"delay_seconds":1,"run_at":"2030-01-01T00:00:00Z"}"#)
            .await
            .is_problem(422, "validation", "run_at");
        raw(r#"{"kind":"greet","payload":1,"unique_mode":"replace"}"#).await.is_problem(
            422,
            "validation",
            "unique_key",
        );
        raw(r#"{"kind":"greet","payload":"a\u0000b"}"#).await.is_problem(422, "validation", "NUL");
        raw(r#"{"kind":"a\u0000b","payload":1}"#).await.is_problem(422, "validation", "NUL");
        raw(r#"{"kind":"greet","payload":"\ud800"}"#).await.is_problem(422, "validation", "surrogate");
        raw(r#"{"kind":"\ud800","payload":1}"#).await.is_problem(422, "validation", "surrogate");
        let deep = format!(r#"{{"kind":"greet","payload":{}{}}}"#, "[".repeat(65), "]".repeat(65));
        web.send("POST", "/jobs", &[("content-type", "application/json")], &deep).await.is_problem(
            422,
            "validation",
            "deep",
        );
        let typed = async |kind: &str| {
            web.send("POST", "/jobs", &[("content-type", kind)], r#"{"kind":"greet","payload":1}"#).await
        };
        typed("text/plain").await.is_problem(415, "unsupported_media_type", "application/json");
        typed("application/json; charset=utf-8").await.is(201);
        let large = |n: usize| json!({ "kind": "greet", "payload": "p".repeat(n) });
        web.post("/jobs", &large(1024 * 1024)).await.is_problem(413, "too_large", "payload");
        web.post("/jobs", &large(1024 * 1024 - 2)).await.is(201);
        web.post("/jobs", &large(2 * 1024 * 1024)).await.is_problem(413, "too_large", "larger than");
        let stored = bench.list(&longshore::store::ListFilter::default()).await.expect("list").jobs.len();
        assert!(stored == 2 || stored == 4, "{stored}");
    });
}

async fn a_job_that_is_not_there_is_not_found(bench: Bench) {
    both_ways!(bench, |_, web: Web| async move {
        let nobody = "/jobs/01990000-0000-7000-8000-000000000000";
        web.get(nobody).await.is_problem(404, "not_found", "01990000");
        web.post(&format!("{nobody}/cancel"), &json!({})).await.is_problem(404, "not_found", "");
        web.post(&format!("{nobody}/retry"), &json!({})).await.is_problem(404, "not_found", "");
        web.json("PATCH", nobody, &json!({ "priority": 1 })).await.is_problem(404, "not_found", "");
        web.send("DELETE", nobody, &[], "").await.is_problem(404, "not_found", "");
        web.get("/jobs/seven").await.is_problem(400, "bad_request", "seven");
    });
}

async fn a_cancel_answers_by_where_the_job_stands(bench: Bench) {
    both_ways!(bench, |bench: Bench, web: Web| async move {
        let waiting = bench.add(job("greet")).await;
        let answer = web.send("POST", &format!("/jobs/{waiting}/cancel"), &[], "").await.is(200);
        assert_eq!(answer.json(), json!({ "status": "cancelled", "job_id": waiting.to_string() }));
        web.send("POST", &format!("/jobs/{waiting}/cancel"), &[], "").await.is_problem(
            409,
            "conflict",
            "cancelled",
        );

        let running = bench.add(job("greet")).await;
        let worker = bench.worker().await;
        let claimed = bench.claim_one(worker).await;
        assert_eq!(claimed.lease().id, running);
        let answer = web.send("POST", &format!("/jobs/{running}/cancel"), &[], "").await.is(202);
        assert_eq!(answer.json(), json!({ "status": "pending", "job_id": running.to_string() }));
        assert_eq!(web.get(&format!("/jobs/{running}")).await.json()["cancel_requested"], true);
    });
}

async fn a_list_is_newest_first_filtered_and_paged(bench: Bench) {
    let web = Web::new(&bench).listening(Limits::default()).await;
    let mut ids = Vec::new();
    for i in 0..5 {
        let queue = if i % 2 == 0 { "even" } else { "odd" };
        ids.push(bench.add(NewJob::new("greet", &i).queue(queue)).await.to_string());
    }
    ids.reverse();
    let listed = |answer: &Answer| -> Vec<String> {
        let jobs = answer.json();
        jobs.as_array()
            .expect("an array")
            .iter()
            .map(|job| job["id"].as_str().expect("an id").into())
            .collect()
    };
    assert_eq!(listed(&web.get("/jobs").await.is(200)), ids);
    assert_eq!(listed(&web.get("/jobs?queue=odd").await.is(200)), [ids[1].clone(), ids[3].clone()]);
    assert_eq!(listed(&web.get("/jobs?status=running").await.is(200)), Vec::<String>::new());
    assert_eq!(listed(&web.get("/jobs?limit=2&offset=1").await.is(200)), ids[1..3]);
    // Out of bounds is clamped, as the contract says.
    assert_eq!(listed(&web.get("/jobs?limit=0").await.is(200)).len(), 1);
    assert_eq!(listed(&web.get("/jobs?limit=-7").await.is(200)).len(), 1);
    assert_eq!(listed(&web.get("/jobs?limit=1000").await.is(200)).len(), 5);
    let mut seen = Vec::new();
    let mut next = Some("/jobs?kind=greet&limit=2".to_owned());
    while let Some(page) = next {
        let answer = web.get(&page).await.is(200);
        seen.extend(listed(&answer));
        let link = answer.header("link");
        next =
            link.strip_suffix(">; rel=\"next\"").and_then(|link| link.strip_prefix('<')).map(str::to_owned);
        assert!(next.as_ref().is_none_or(|next| next.contains("kind=greet")), "{link}");
    }
    assert_eq!(seen, ids);
    web.get("/jobs?offset=10000").await.is(200);
    web.get("/jobs?offset=10001").await.is_problem(400, "bad_request", "cursor");
    web.get("/jobs?offset=99999999999").await.is_problem(400, "bad_request", "cursor");
    web.get("/jobs?status=asleep").await.is_problem(400, "bad_request", "asleep");
    web.get("/jobs?colour=red").await.is_problem(400, "bad_request", "colour");
    web.get("/jobs?limit=many").await.is_problem(400, "bad_request", "");
    web.get("/jobs?cursor=seven").await.is_problem(400, "bad_request", "");
    web.get("/jobs?kind=a%00b").await.is_problem(400, "bad_request", "NUL");
}

async fn a_job_is_changed_retried_and_deleted(bench: Bench) {
    both_ways!(bench, |bench: Bench, web: Web| async move {
        let id = bench.add(job("greet")).await;
        let path = format!("/jobs/{id}");
        let edited =
            web.json("PATCH", &path, &json!({ "priority": 9, "payload": { "name": "Grace" } })).await.is(200);
        assert_eq!(
            (&edited.json()["priority"], &edited.json()["payload"]),
            (&json!(9), &json!({ "name": "Grace" }))
        );
        web.json("PATCH", &path, &json!({ "priority": 99_999 })).await.is_problem(
            422,
            "validation",
            "priority",
        );
        web.json("PATCH", &path, &json!({ "kind": "other" })).await.is_problem(422, "validation", "kind");
        web.send("DELETE", &path, &[], "").await.is_problem(409, "conflict", "");
        bench.cancel(id).await.expect("cancel");
        web.json("PATCH", &path, &json!({ "priority": 1 })).await.is_problem(409, "conflict", "");
        let again = web.send("POST", &format!("{path}/retry"), &[], "").await.is(200);
        assert_eq!(again.json()["status"], Status::Queued.as_str());
        bench.cancel(id).await.expect("cancel");
        assert_eq!(web.send("DELETE", &path, &[], "").await.is(204).text, "");
        web.get(&path).await.is_problem(404, "not_found", "");
    });
}

async fn a_batch_stores_the_good_and_names_the_bad(bench: Bench) {
    both_ways!(bench, |bench: Bench, web: Web| async move {
        let key = uuid::Uuid::now_v7().to_string();
        let items = [
            json!({ "kind": "greet", "payload": 1, "idempotency_key": key }),
            json!({ "kind": "greet", "payload": 2, "priority": 99_999 }),
            json!({ "kind": "greet", "payload": 3, "idempotency_key": key }),
            json!({ "kind": "greet" }),
            json!({ "kind": "greet", "payload": 4 }),
        ];
        let answer = web.post("/jobs/batch", &json!(items)).await.is(200).json();
        assert_eq!(
            (&answer["created"], &answer["existing"], &answer["refused"]),
            (&json!(2), &json!(1), &json!(2))
        );
        let outcome = |i: usize| answer["items"][i]["outcome"].as_str().expect("an outcome").to_owned();
        assert_eq!([0, 1, 2, 3, 4].map(outcome), ["created", "refused", "existing", "refused", "created"]);
        assert_eq!(answer["items"][2]["id"], answer["items"][0]["id"]);
        assert!(answer["items"][1]["message"].as_str().expect("a message").contains("priority"));

        let lines = "{\"kind\":\"greet\",\"payload\":1}\n\n\n{oops\n{\"kind\":\"greet\",\"payload\":2}\n\
                     [7]\n{\"kind\":\"greet\"}\n{\"kind\":\"greet\",\"payload\":3,\"priority\":99999}\n";
        let answer =
            web.send("POST", "/jobs/batch", &[("content-type", "application/x-ndjson")], lines).await.is(200);
        let answer = answer.json();
        assert_eq!((&answer["created"], &answer["refused"]), (&json!(2), &json!(4)));
        let told = [
            (1, "line 4: the job is not JSON: key must be a string at column 2"),
            (3, "line 6: the job is not an object"),
            (4, "line 7: missing field `payload`"),
            (5, "line 8: priority"),
        ];
        for (item, told_so) in told {
            let message = answer["items"][item]["message"].as_str().expect("a message");
            assert!(message.starts_with(told_so), "{message}");
        }
        let listed = web.post("/jobs/batch", &json!([7])).await.is(200).json();
        let message = listed["items"][0]["message"].as_str().expect("a message");
        assert!(message.starts_with("the job is not an object"), "{message}");

        let many = |n: usize| json!(vec![json!({ "kind": "greet", "payload": 1 }); n]);
        web.post("/jobs/batch", &many(10_001)).await.is_problem(413, "too_large", "10000");
        web.post("/jobs/batch", &json!({ "kind": "greet" })).await.is_problem(422, "validation", "");
        web.post("/jobs/batch", &json!([])).await.is(200);
        let _ = bench;
    });
}

async fn two_idempotency_keys_are_refused(bench: Bench) {
    let web = Web::new(&bench);
    let keys = [("content-type", "application/json"), ("idempotency-key", "a"), ("idempotency-key", "b")];
    let body = greet().to_string();
    web.send("POST", "/jobs", &keys, &body).await.is_problem(400, "bad_request", "Idempotency-Key");
    web.send("POST", "/jobs", &keys[..2], &body).await.is(201);
}

async fn the_largest_batch_is_stored(bench: Bench) {
    let web = Web::new(&bench).listening(Limits::default()).await;
    let jobs: Vec<Value> = (0..10_000).map(|i| json!({ "kind": "greet", "payload": i })).collect();
    let answer = web.post("/jobs/batch", &json!(jobs)).await.is(200).json();
    assert_eq!(answer["created"], 10_000);
}

async fn a_kind_that_nobody_has_announced_is_refused(bench: Bench) {
    let web = Web::of(Api::new(bench.handle()));
    web.post("/jobs", &greet()).await.is_problem(422, "validation", "greet");
    let schema = json!({
        "type": "object", "required": ["name"], "additionalProperties": false,
        "properties": { "name": { "type": "string" } },
    });
    let defaults = json!({ "queue": "mail", "priority": 4, "max_attempts": 9, "timeout_seconds": 30 });
    web.json("PUT", "/kinds/greet", &json!({ "schema": schema, "defaults": defaults })).await.is(200);
    let posted = web.post("/jobs", &greet()).await.is(201).json();
    assert_eq!(
        (&posted["queue"], &posted["priority"], &posted["max_attempts"]),
        (&json!("mail"), &json!(4), &json!(9))
    );
    let wrong = json!({ "kind": "greet", "payload": { "name": 7 } });
    web.post("/jobs", &wrong).await.is_problem(422, "validation", "/name");
    let explicit = json!({ "kind": "greet", "payload": { "name": "Ada" }, "queue": "other" });
    assert_eq!(web.post("/jobs", &explicit).await.is(201).json()["queue"], "other");
    web.json("PUT", "/kinds/greet", &json!({ "schema": { "type": "moon" } })).await.is_problem(
        422,
        "validation",
        "schema",
    );
    web.json("PUT", "/kinds/greet", &json!({ "defaults": { "priority": 99_999 } })).await.is_problem(
        422,
        "validation",
        "priority",
    );
    assert_eq!(web.get("/kinds").await.is(200).json()[0]["schema"], schema);
    web.send("DELETE", "/kinds/greet", &[], "").await.is(204);
    web.post("/jobs", &greet()).await.is_problem(422, "validation", "greet");
}

async fn a_job_on_the_wire_has_the_fields_that_the_document_names(bench: Bench) {
    let web = Web::new(&bench);
    let id = bench.add(job("greet")).await;
    let fields = |value: &Value| -> BTreeSet<String> {
        value.as_object().expect("an object").keys().cloned().collect()
    };
    let document = web.get("/api-docs/openapi.json").await.is(200).json();
    let documented = |name: &str| fields(&document["components"]["schemas"][name]["properties"]);
    assert_eq!(fields(&web.get(&format!("/jobs/{id}")).await.json()), documented("Job"));
    bench.pause("default").await.expect("pause");
    assert_eq!(fields(&web.get("/queues").await.json()[0]), documented("Queue"));
    bench.worker().await;
    assert_eq!(fields(&web.get("/workers").await.json()[0]), documented("Worker"));
}
