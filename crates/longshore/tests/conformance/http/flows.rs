//! Flows over HTTP: graphs of jobs, the errors that refuse them, and what `explain` says of their jobs.

use longshore::api::{Access, Api};
use longshore::store::NewWorker;
use longshore::{Context, Ending, Failure, Flow, JobId, NewJob, Scope, Status, UnknownKinds, task};
use serde_json::{Value, json};
use sqlx::Connection;

use super::auth::{token, with_tokens_required};
use super::client::HttpClient;
use crate::fixture::*;
use crate::worker::{drain, worker};

cases! {
    a_flow_is_enqueued_listed_and_shown,
    a_second_request_with_the_same_key_or_id_returns_the_first_flow,
    the_defaults_of_a_kind_apply_to_tasks,
    bad_flows_are_refused_by_task_and_store_nothing,
    callbacks_are_one_job_or_several,
    a_flow_is_cancelled_once,
    the_failed_part_of_a_flow_is_retried,
    jobs_are_added_in_parts_until_the_flow_is_sealed,
    a_repeated_part_with_a_key_is_added_once,
    jobs_of_a_part_with_a_key_have_the_time_of_the_part,
    a_large_part_with_a_key_is_added_in_time,
    flows_and_tasks_are_listed_in_pages,
    a_token_limited_to_queues_uses_only_flows_of_its_queues,
    a_leased_job_names_its_flow,
    explain_names_the_tasks_that_a_job_waits_for,
    explain_and_pages_do_not_name_tasks_and_flows_of_other_queues,
    explain_says_that_a_callback_waits_for_its_flow,
    explain_says_that_a_job_waits_for_its_children,
}

cases! {
    only on postgres:
    access_to_a_flow_is_checked_without_reading_its_tasks,
}

fn greet(name: &str) -> Value {
    json!({ "task": name, "kind": "greet", "payload": name })
}

fn greet_after(name: &str, after: Value) -> Value {
    json!({ "task": name, "kind": "greet", "payload": name, "after": after })
}

/// `fetch`, then `parse` and `count`, then `store`.
fn diamond() -> Value {
    json!({
        "name": "import",
        "tasks": [
            greet("fetch"),
            greet_after("parse", json!(["fetch"])),
            greet_after("count", json!([{ "task": "fetch", "condition": "ended" }])),
            greet_after("store", json!(["parse", { "task": "count" }])),
        ],
    })
}

async fn create(http: &HttpClient, flow: &Value) -> Value {
    http.post("/flows", flow).await.expect_status(201).json()
}

fn id_of(record: &Value) -> &str {
    record["id"].as_str().expect("an id")
}

async fn tasks(http: &HttpClient, flow: &Value) -> Vec<Value> {
    let page = http.get(&format!("/flows/{}/tasks", id_of(flow))).await.expect_status(200).json();
    page.as_array().expect("a list").clone()
}

/// The task with this name.
async fn task_named(http: &HttpClient, flow: &Value, name: &str) -> Value {
    tasks(http, flow).await.into_iter().find(|task| task["task"] == name).expect("the task")
}

fn job_id(record: &Value) -> JobId {
    id_of(record).parse().expect("an id")
}

/// Runs every due job once with this ending, and follows the ends.
async fn run_due(fixture: &Fixture, ending: Ending) -> usize {
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 100).await;
    for job in &claimed {
        fixture.must_finish(job, ending.clone()).await;
    }
    fixture.advance_flows().await.expect("advance");
    claimed.len()
}

async fn a_flow_is_enqueued_listed_and_shown(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let response = http.post("/flows", &diamond()).await.expect_status(201);
    let flow = response.json();
    let path = format!("/flows/{}", id_of(&flow));
    assert_eq!((response.header("location"), response.header("enqueued-as")), (path.as_str(), "created"));
    assert_eq!(
        [&flow["name"], &flow["status"], &flow["members"], &flow["open"], &flow["failed"], &flow["sealed"]],
        [&json!("import"), &json!("running"), &json!(4), &json!(4), &json!(0), &json!(true)]
    );
    assert_eq!(http.get(&path).await.expect_status(200).json(), flow);
    assert_eq!(http.get("/flows?name=import&open=true").await.expect_status(200).json(), json!([flow]));
    for other in ["/flows?name=export", "/flows?open=false"] {
        assert_eq!(http.get(other).await.expect_status(200).json(), json!([]));
    }
    let store = task_named(&http, &flow, "store").await;
    assert_eq!(
        (&store["status"], &store["held"], &store["skipped"]),
        (&json!("queued"), &json!(true), &json!(false))
    );
    let after: Vec<_> = store["after"].as_array().expect("links").iter().map(|link| &link["task"]).collect();
    assert_eq!(after, ["parse", "count"]);
    let count = task_named(&http, &flow, "count").await;
    assert_eq!((&count["after"][0]["condition"], &count["after"][0]["met"]), (&json!("ended"), &Value::Null));
    let job = http.get(&format!("/jobs/{}", id_of(&store))).await.expect_status(200).json();
    assert_eq!((&job["flow"], &job["task"]), (&flow["id"], &json!("store")));

    assert_eq!(run_due(&fixture, done()).await, 1);
    assert_eq!(task_named(&http, &flow, "count").await["after"][0]["met"], true);
    assert_eq!(run_due(&fixture, done()).await, 2);
    assert_eq!(run_due(&fixture, done()).await, 1);
    let ended = http.get(&path).await.json();
    assert_eq!((&ended["status"], &ended["open"]), (&json!("succeeded"), &json!(0)));
    assert!(ended["ended_at"].is_string(), "{ended}");
    let unknown = "/flows/01990000-0000-7000-8000-000000000000";
    for path in [unknown.to_owned(), format!("{unknown}/tasks")] {
        http.get(&path).await.expect_problem(404, "not_found", "does not exist");
    }
    http.get("/flows/17").await.expect_problem(400, "bad_request", "not the id of a flow");
}

async fn a_second_request_with_the_same_key_or_id_returns_the_first_flow(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let mut body = diamond();
    body["idempotency_key"] = json!("import 7");
    let first = create(&http, &body).await;
    assert_eq!(first["idempotency_key"], "import 7");
    let again = http.post("/flows", &body).await.expect_status(200);
    assert_eq!((again.json(), again.header("enqueued-as")), (first.clone(), "existing"));
    let headers = [("content-type", "application/json"), ("idempotency-key", "import 8")];
    let other = http.send("POST", "/flows", &headers, &body.to_string()).await.expect_status(201).json();
    assert_eq!(other["idempotency_key"], "import 8", "the header overrides the field");

    let id = uuid::Uuid::now_v7();
    let mut body = diamond();
    body["id"] = json!(id);
    assert_eq!(create(&http, &body).await["id"], json!(id));
    assert_eq!(http.post("/flows", &body).await.expect_status(200).json()["id"], json!(id));
    body["id"] = json!(fixture.add(job("greet")).await);
    http.post("/flows", &body).await.expect_problem(409, "conflict", "id: a job has the id");
    body["id"] = json!("6b1f2a34-0000-4000-8000-000000000000");
    http.post("/flows", &body).await.expect_problem(422, "validation", "id: ");
    assert_eq!(http.get("/flows").await.json().as_array().map(Vec::len), Some(3));
}

async fn the_defaults_of_a_kind_apply_to_tasks(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let kind = json!({
        "schema": { "type": "object", "required": ["name"] },
        "defaults": { "queue": "greetings", "max_attempts": 5 },
    });
    http.json("PUT", "/kinds/polite", &kind).await.expect_status(200);
    let task = |payload: Value| json!({ "task": "hello", "kind": "polite", "payload": payload });
    let flow = json!({ "name": "f", "tasks": [task(json!({ "name": "Ada" }))] });
    let flow = create(&http, &flow).await;
    let job = fixture.job(job_id(&tasks(&http, &flow).await[0])).await;
    assert_eq!((job.queue.as_str(), job.max_attempts), ("greetings", 5));
    http.post("/flows", &json!({ "name": "f", "tasks": [task(json!({}))] })).await.expect_problem(
        422,
        "validation",
        "task `hello`: payload: ",
    );
}

async fn bad_flows_are_refused_by_task_and_store_nothing(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let with = |name: &str, field: &str, value: Value| {
        let mut task = greet(name);
        task[field] = value;
        json!([greet("a"), task])
    };
    let cases = [
        (with("b", "after", json!(["c"])), "task `b`: after: there is no task `c`"),
        (with("b", "after", json!(["b"])), "`b` → `b`"),
        (
            json!([greet_after("a", json!(["b"])), greet_after("b", json!(["a"]))]),
            "these tasks wait for each other",
        ),
        (json!([greet("a"), greet("a")]), "task `a`: the name is used twice"),
        (with("b", "after", json!("a")), "task `b`: after: not a list"),
        (with("b", "after", json!([1])), "task `b`: after[0]: neither a name nor an object"),
        (
            with("b", "after", json!(["a", { "task": "a", "condition": "done" }])),
            "task `b`: after[1].condition: unknown variant `done`",
        ),
        (with("b", "after", json!([{ "name": "a" }])), "task `b`: after[0]: unknown field `name`"),
        (with("b", "after", json!(["a", { "task": "a", "condition": "ended" }])), "in two ways"),
        (with("b", "colour", json!("red")), "task `b`: unknown field `colour`"),
        (with("b", "max_attempts", json!(0)), "task `b`: max_attempts: "),
        (with("b", "priority", json!("high")), "task `b`: priority: invalid type"),
        (with("b", "unique_key", json!("k")), "task `b`: unique_key: jobs of a flow cannot have keys"),
        (
            with("b", "idempotency_key", json!("k")),
            "task `b`: idempotency_key: jobs of a flow cannot have keys",
        ),
        (with("b", "delay_seconds", json!(-1)), "task `b`: delay_seconds: "),
        (json!([{ "kind": "greet" }]), "tasks[0]: missing field `payload`"),
        (json!([greet("a"), 7]), "tasks[1]: the job is not an object"),
        (json!([greet("")]), "task: "),
        (json!([]), "tasks: the flow has none"),
    ];
    for (tasks, part) in cases {
        let response = http.post("/flows", &json!({ "name": "f", "tasks": tasks })).await;
        response.expect_problem(422, "validation", part);
    }
    let fields = [
        ("name", json!(""), "name: "),
        ("deadline_seconds", json!(0), "deadline_seconds: "),
        ("deadline_seconds", json!(-1), "deadline_seconds: "),
        ("idempotency_key", json!(""), "idempotency_key: "),
        ("on_end", json!({ "kind": "greet" }), "on_end: missing field `payload`"),
        (
            "on_failure",
            json!([{ "kind": "greet", "payload": 1, "task": "a" }]),
            "on_failure[0]: unknown field `task`",
        ),
        ("on_success", json!("greet"), "on_success: the job is not an object"),
        ("on_succes", json!({}), "unknown field `on_succes`"),
        ("sealed", json!("no"), "sealed: invalid type"),
    ];
    for (field, value, part) in fields {
        let mut flow = diamond();
        flow[field] = value;
        http.post("/flows", &flow).await.expect_problem(422, "validation", part);
    }
    // 317 × 316 links, which is more than 100,000.
    let parents: Vec<String> = (0..317).map(|n| format!("p{n}")).collect();
    let children = (0..316).map(|n| greet_after(&format!("c{n}"), json!(parents)));
    let many: Vec<Value> = parents.iter().map(|name| greet(name)).chain(children).collect();
    http.post("/flows", &json!({ "name": "f", "tasks": many })).await.expect_problem(
        422,
        "validation",
        "100172 links",
    );
    let many: Vec<Value> = (0..10_001).map(|_| json!({ "kind": "greet", "payload": 1 })).collect();
    http.post("/flows", &json!({ "name": "f", "tasks": many })).await.expect_problem(
        413,
        "too_large",
        "10001",
    );
    let text = [("content-type", "text/plain")];
    http.send("POST", "/flows", &text, "{}").await.expect_problem(415, "unsupported_media_type", "");
    assert_eq!(http.get("/flows").await.json(), json!([]));
    assert_eq!(http.get("/jobs").await.json(), json!([]));
}

async fn callbacks_are_one_job_or_several(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let job = |kind: &str| json!({ "kind": kind, "payload": null });
    let flow = json!({
        "name": "f",
        "tasks": [greet("only")],
        "on_success": [job("praise"), job("report")],
        "on_failure": job("alert"),
        "on_end": job("clean"),
    });
    let flow = create(&http, &flow).await;
    assert_eq!(flow["members"], 1, "callbacks are not members");
    run_due(&fixture, done()).await;
    let status = async |kind: &str| http.get(&format!("/jobs?kind={kind}")).await.json()[0]["status"].clone();
    for (kind, expected) in
        [("praise", "queued"), ("report", "queued"), ("clean", "queued"), ("alert", "cancelled")]
    {
        assert_eq!(status(kind).await, expected, "{kind}");
    }
    assert_eq!(run_due(&fixture, done()).await, 3);
}

async fn a_flow_is_cancelled_once(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let flow = create(&http, &diamond()).await;
    let path = format!("/flows/{}", id_of(&flow));
    let worker = fixture.worker().await;
    let running = fixture.claim_one(worker).await;
    let cancelled = http.send("POST", &format!("{path}/cancel"), &[], "").await.expect_status(200).json();
    assert_eq!(cancelled, json!({ "cancelled": 3, "requested": 1 }));
    fixture.must_finish(&running, observed_cancel()).await;
    fixture.advance_flows().await.expect("advance");
    let ended = http.get(&path).await.json();
    assert_eq!(
        (&ended["status"], &ended["cancelled"], &ended["open"]),
        (&json!("cancelled"), &json!(true), &json!(0))
    );
    http.send("POST", &format!("{path}/cancel"), &[], "").await.expect_problem(
        409,
        "conflict",
        "already ended",
    );
    for action in ["cancel", "retry", "seal"] {
        let path = format!("/flows/{}/{action}", JobId::new());
        http.send("POST", &path, &[], "").await.expect_problem(404, "not_found", "does not exist");
    }
}

async fn the_failed_part_of_a_flow_is_retried(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let flow = create(&http, &diamond()).await;
    let path = format!("/flows/{}", id_of(&flow));
    run_due(&fixture, failed_permanently()).await;
    // `count` needs only the end of `fetch`.
    run_due(&fixture, done()).await;
    let ended = http.get(&path).await.json();
    assert_eq!((&ended["status"], &ended["failed"]), (&json!("failed"), &json!(1)));
    assert_eq!(task_named(&http, &flow, "store").await["skipped"], true);
    let retried = http.send("POST", &format!("{path}/retry"), &[], "").await.expect_status(200).json();
    assert_eq!(retried, json!({ "reopened": 3 }), "all but `count`, which succeeded");
    let cancelled = http.send("POST", &format!("{path}/cancel"), &[], "").await.expect_status(200).json();
    assert_eq!(cancelled, json!({ "cancelled": 3, "requested": 0 }), "although it had ended a moment ago");
    fixture.advance_flows().await.expect("advance");
    let retried = http.send("POST", &format!("{path}/retry"), &[], "").await.expect_status(200).json();
    assert_eq!(retried, json!({ "reopened": 3 }));
    fixture.advance_flows().await.expect("advance");
    assert_eq!(http.get(&path).await.json()["status"], "running");
    for _ in 0..3 {
        assert_eq!(run_due(&fixture, done()).await, 1);
    }
    assert_eq!(http.get(&path).await.json()["status"], "succeeded");
    let nothing = http.send("POST", &format!("{path}/retry"), &[], "").await.expect_status(200).json();
    assert_eq!(nothing, json!({ "reopened": 0 }));
}

async fn jobs_are_added_in_parts_until_the_flow_is_sealed(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let flow = create(&http, &json!({ "name": "batch", "sealed": false })).await;
    assert_eq!((&flow["members"], &flow["sealed"]), (&json!(0), &json!(false)));
    let path = format!("/flows/{}", id_of(&flow));
    let jobs = |n: u64| -> Value { (0..n).map(|i| json!({ "kind": "send", "payload": i })).collect() };
    let added =
        http.post(&format!("{path}/jobs"), &json!({ "jobs": jobs(3) })).await.expect_status(200).json();
    assert_eq!(added["members"], 3);
    let part = json!({ "jobs": [{ "kind": "send", "payload": 1, "priority": 99_999 }] });
    for (part, expected) in [
        (part, "jobs[0]: "),
        (json!({ "jobs": [{ "kind": "send", "payload": 1, "task": "a" }] }), "jobs[0]: unknown field `task`"),
        (json!({ "jobs": [{ "kind": "send", "payload": 1, "unique_key": "a" }] }), "jobs[0]: unique_key: "),
        (json!({ "jobs": [] }), "jobs: the list is empty"),
        (json!({}), "missing field `jobs`"),
    ] {
        http.post(&format!("{path}/jobs"), &part).await.expect_problem(422, "validation", expected);
    }
    let many = json!({ "jobs": jobs(10_001) });
    http.post(&format!("{path}/jobs"), &many).await.expect_problem(413, "too_large", "10001");
    assert_eq!(run_due(&fixture, done()).await, 3);
    assert_eq!(http.get(&path).await.json()["status"], "running", "it is not sealed");
    let sealed = http.send("POST", &format!("{path}/seal"), &[], "").await.expect_status(200).json();
    assert_eq!(sealed["sealed"], true);
    fixture.advance_flows().await.expect("advance");
    assert_eq!(http.get(&path).await.json()["status"], "succeeded");
    http.send("POST", &format!("{path}/seal"), &[], "").await.expect_status(200);
    http.post(&format!("{path}/jobs"), &json!({ "jobs": jobs(1) })).await.expect_problem(
        409,
        "conflict",
        "is sealed",
    );
    let unknown = format!("/flows/{}/jobs", JobId::new());
    http.post(&unknown, &json!({ "jobs": jobs(1) })).await.expect_problem(404, "not_found", "");
}

async fn a_repeated_part_with_a_key_is_added_once(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let flow = create(&http, &json!({ "name": "batch", "sealed": false })).await;
    let path = format!("/flows/{}/jobs", id_of(&flow));
    let part = |first: u32| -> String {
        let jobs: Vec<Value> = (first..first + 3).map(|i| json!({ "kind": "send", "payload": i })).collect();
        json!({ "jobs": jobs }).to_string()
    };
    for (key, part, members) in
        [("1", part(0), 3), ("1", part(0), 3), ("2", part(0), 6), ("2", part(3), 9), ("1", part(0), 9)]
    {
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        let added = http.send("POST", &path, &headers, &part).await.expect_status(200).json();
        assert_eq!(added["members"], members, "part {key}");
    }
    // Jobs of one part are in the order of the request.
    let mut payloads = Vec::new();
    for task in tasks(&http, &flow).await {
        payloads.push(fixture.job(job_id(&task)).await.payload.get().to_owned());
    }
    assert!(payloads.chunks(3).all(|part| part.is_sorted()), "{payloads:?}");
}

async fn jobs_of_a_part_with_a_key_have_the_time_of_the_part(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let long_ago = uuid::Builder::from_unix_timestamp_millis(1_500_000_000_000, &[7; 10]).into_uuid();
    let flow = create(&http, &json!({ "id": long_ago, "name": "batch", "sealed": false })).await;
    let before = JobId::new();
    let path = format!("/flows/{long_ago}/jobs");
    let part = json!({ "jobs": [{ "kind": "send", "payload": 1 }] }).to_string();
    let headers = [("content-type", "application/json"), ("idempotency-key", "1")];
    for _ in 0..2 {
        http.send("POST", &path, &headers, &part).await.expect_status(200);
    }
    let jobs: Vec<JobId> = tasks(&http, &flow).await.iter().map(job_id).collect();
    assert_eq!(jobs.len(), 1);
    assert!(jobs[0] > before, "{} has the time of the flow", jobs[0]);
}

/// The time must not grow with the product of the number of jobs and the size of the request.
async fn a_large_part_with_a_key_is_added_in_time(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let flow = create(&http, &json!({ "name": "batch", "sealed": false })).await;
    let path = format!("/flows/{}/jobs", id_of(&flow));
    let text = "x".repeat(1500);
    let jobs: Vec<Value> = (0..10_000).map(|_| json!({ "kind": "send", "payload": text })).collect();
    let part = json!({ "jobs": jobs }).to_string();
    let added = tokio::spawn(async move {
        let headers = [("content-type", "application/json"), ("idempotency-key", "1")];
        http.send("POST", &path, &headers, &part).await
    });
    let added = tokio::time::timeout(MAX_WAIT, added).await.expect("not within a minute").expect("task");
    assert_eq!(added.expect_status(200).json()["members"], 10_000);
}

async fn flows_and_tasks_are_listed_in_pages(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let mut ids = Vec::new();
    for n in 0..3 {
        let tasks: Vec<Value> = (0..=n).map(|i| greet(&format!("t{i}"))).collect();
        ids.push(id_of(&create(&http, &json!({ "name": "paged", "tasks": tasks })).await).to_owned());
    }
    let page = http.get("/flows?name=paged&limit=2").await.expect_status(200);
    let link = format!("</flows?name=paged&limit=2&cursor={}>; rel=\"next\"", ids[1]);
    assert_eq!(page.header("link"), link);
    let listed = |page: &Value| -> Vec<String> {
        page.as_array().expect("a list").iter().map(|flow| id_of(flow).to_owned()).collect()
    };
    assert_eq!(listed(&page.json()), [ids[2].clone(), ids[1].clone()]);
    let rest = http.get(&format!("/flows?name=paged&limit=2&cursor={}", ids[1])).await.expect_status(200);
    assert_eq!((listed(&rest.json()), rest.header("link")), (vec![ids[0].clone()], ""));

    let path = format!("/flows/{}/tasks", ids[2]);
    let page = http.get(&format!("{path}?limit=2")).await.expect_status(200);
    let last = page.json()[1]["id"].as_str().expect("an id").to_owned();
    assert_eq!(page.header("link"), format!("<{path}?limit=2&cursor={last}>; rel=\"next\""));
    let rest = http.get(&format!("{path}?limit=2&cursor={last}")).await.expect_status(200);
    assert_eq!((rest.json().as_array().map(Vec::len), rest.header("link")), (Some(1), ""));
    for (path, part) in [
        ("/flows?open=maybe", "query string"),
        ("/flows?cursor=7", "query string"),
        ("/flows?nmae=a", "did you mean `name`"),
        ("/flows?name=a%00", "NUL"),
        ("/flows?limit=many", "query string"),
    ] {
        http.get(path).await.expect_problem(400, "bad_request", part);
    }
}

async fn a_token_limited_to_queues_uses_only_flows_of_its_queues(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let (_, limited) = token(&fixture, Scope::Admin, Some(&["mail"])).await;
    let (_, all) = token(&fixture, Scope::Admin, None).await;
    let (limited, all) = (http.with_token(&limited), http.with_token(&all));
    let in_queue =
        |name: &str, queue: &str| json!({ "task": name, "kind": "greet", "payload": 1, "queue": queue });
    let flow = |tasks: Value| json!({ "name": "f", "sealed": false, "tasks": tasks });
    let mine = create(&limited, &flow(json!([in_queue("a", "mail")]))).await;
    let mixed = flow(json!([in_queue("a", "mail"), in_queue("b", "other")]));
    limited.post("/flows", &mixed).await.expect_problem(403, "forbidden", "task `b`: queue");
    let mut with_callback = flow(json!([in_queue("a", "mail")]));
    with_callback["on_end"] = json!({ "kind": "greet", "payload": 1, "queue": "other" });
    limited.post("/flows", &with_callback).await.expect_problem(403, "forbidden", "callback: queue");
    limited.post("/flows", &flow(json!([]))).await.expect_problem(403, "forbidden", "tasks: ");
    limited.get("/flows").await.expect_problem(403, "forbidden", "mail");

    let path = format!("/flows/{}", id_of(&mine));
    limited.get(&path).await.expect_status(200);
    limited.get(&format!("{path}/tasks")).await.expect_status(200);
    let part = |queue: &str| json!({ "jobs": [{ "kind": "greet", "payload": 1, "queue": queue }] });
    limited.post(&format!("{path}/jobs"), &part("other")).await.expect_problem(
        403,
        "forbidden",
        "jobs[0]: queue",
    );
    limited.post(&format!("{path}/jobs"), &part("mail")).await.expect_status(200);
    limited.send("POST", &format!("{path}/seal"), &[], "").await.expect_status(200);
    limited.send("POST", &format!("{path}/retry"), &[], "").await.expect_status(200);
    limited.send("POST", &format!("{path}/cancel"), &[], "").await.expect_status(200);

    // Flows with jobs of other queues, without jobs, or whose jobs are gone.
    let mut theirs = mixed.clone();
    theirs["idempotency_key"] = json!("theirs");
    let theirs = create(&all, &theirs).await;
    let empty = create(&all, &flow(json!([]))).await;
    let gone =
        create(&all, &json!({ "name": "f", "tasks": [in_queue("a", "mail"), in_queue("b", "other")] })).await;
    all.send("POST", &format!("/flows/{}/cancel", id_of(&gone)), &[], "").await.expect_status(200);
    fixture.advance_flows().await.expect("advance");
    let other = task_named(&all, &gone, "b").await;
    all.send("DELETE", &format!("/jobs/{}", id_of(&other)), &[], "").await.expect_status(204);
    for flow in [&theirs, &empty, &gone] {
        let path = format!("/flows/{}", id_of(flow));
        let refused = limited.get(&path).await.expect_problem(403, "forbidden", "jobs of other queues");
        assert!(!refused.text.contains("`other`"), "{refused:?}");
        limited.get(&format!("{path}/tasks")).await.expect_problem(403, "forbidden", "mail");
        limited.post(&format!("{path}/jobs"), &part("mail")).await.expect_problem(403, "forbidden", "mail");
        for action in ["seal", "cancel", "retry"] {
            let path = format!("{path}/{action}");
            limited.send("POST", &path, &[], "").await.expect_problem(403, "forbidden", "mail");
        }
    }
    // A key or an id of a flow of other queues reveals nothing about it.
    let mut probe = flow(json!([in_queue("a", "mail")]));
    probe["idempotency_key"] = json!("theirs");
    limited.post("/flows", &probe).await.expect_status(201);
    let mut probe = flow(json!([in_queue("a", "mail")]));
    probe["id"] = theirs["id"].clone();
    limited.post("/flows", &probe).await.expect_problem(403, "forbidden", "jobs of other queues");
}

async fn access_to_a_flow_is_checked_without_reading_its_tasks(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let (_, limited) = token(&fixture, Scope::Read, Some(&["mail"])).await;
    let limited = http.with_token(&limited);
    let in_queue = |name: &str| task(name, job("greet").queue("mail"));
    let flow = Flow::new("letters").task(in_queue("a")).task(in_queue("b").after("a"));
    let flow = fixture.enqueue_flow(flow).await.expect("a flow");
    let mut other = fixture.postgres().await;
    let mut held = other.begin().await.expect("begin");
    // Reading the tasks with their states and links would wait for these locks.
    sqlx::raw_sql("lock table links, ready, finished").execute(&mut *held).await.expect("lock");
    let found = limited.get(&format!("/flows/{}", flow.id)).await.expect_status(200).json();
    assert_eq!(found["members"], 2);
    held.rollback().await.expect("rollback");
}

async fn a_leased_job_names_its_flow(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let flow = create(&http, &diamond()).await;
    let leased = http.post("/leases", &json!({ "limit": 10 })).await.expect_status(200).json();
    assert_eq!(leased["jobs"].as_array().map(Vec::len), Some(1), "the others wait");
    assert_eq!(leased["jobs"][0]["flow"], flow["id"]);
    let lease = json!({ "id": leased["jobs"][0]["id"], "lease_no": 1, "outcome": "succeeded" });
    let settle = json!({ "worker_id": leased["worker_id"], "items": [lease] });
    http.post("/leases/settle", &settle).await.expect_status(200);
}

async fn explain(http: &HttpClient, job: &Value) -> (String, String) {
    let explained = http.get(&format!("/jobs/{}/explain", id_of(job))).await.expect_status(200).json();
    let text = |field: &str| explained[field].as_str().expect("text").to_owned();
    assert_eq!(explained["estimated_seconds"], Value::Null, "{explained}");
    (text("reason"), text("message"))
}

async fn explain_names_the_tasks_that_a_job_waits_for(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let worker = NewWorker { concurrency: 50, stale_after: HOUR, ..NewWorker::new("worker") };
    fixture.store().register(&worker).await.expect("register");
    let flow = create(&http, &diamond()).await;
    let store = task_named(&http, &flow, "store").await;
    let of_flow = format!("of flow `import` ({})", id_of(&flow));
    let (reason, message) = explain(&http, &store).await;
    assert_eq!(reason, "waits_for_tasks");
    assert_eq!(message, format!("it waits for tasks `parse`, `count` {of_flow}"));
    let (_, message) = explain(&http, &task_named(&http, &flow, "parse").await).await;
    assert_eq!(message, format!("it waits for task `fetch` {of_flow}"));
    fixture.pause("default").await.expect("pause");
    let (reason, message) = explain(&http, &store).await;
    assert_eq!(reason, "waits_for_tasks");
    assert!(message.contains("; and queue `default` is paused"), "{message}");
    fixture.resume("default").await.expect("resume");

    let parents: Vec<String> = (1..=8).map(|n| format!("p{n}")).collect();
    let mut many: Vec<Value> = parents.iter().map(|name| greet(name)).collect();
    many.push(greet_after("last", json!(parents)));
    let flow = create(&http, &json!({ "name": "wide", "tasks": many })).await;
    let (_, message) = explain(&http, &task_named(&http, &flow, "last").await).await;
    assert!(
        message.starts_with("it waits for tasks `p1`, `p2`, `p3`, `p4`, `p5` and 3 more of flow"),
        "{message}"
    );
    // A job of the far future waits for nothing else.
    let late = fixture.add(job("greet").run_at("9999-12-31T23:59:59Z".parse().expect("a time"))).await;
    let explained = http.get(&format!("/jobs/{late}/explain")).await.expect_status(200).json();
    assert_eq!(explained["reason"], "not_due");
}

async fn explain_and_pages_do_not_name_tasks_and_flows_of_other_queues(fixture: Fixture) {
    let api = Api::new(fixture.client()).access(Access::Tokens).unknown_kinds(UnknownKinds::Allow);
    #[cfg(feature = "dashboard")]
    let api = api.dashboard(longshore::api::Dashboard::new());
    let http = HttpClient::for_api(api);
    let (_, limited) = token(&fixture, Scope::Admin, Some(&["mail"])).await;
    let (_, all) = token(&fixture, Scope::Admin, None).await;
    let (limited, all) = (http.with_token(&limited), http.with_token(&all));
    let in_queue = |name: &str, queue: &str| task(name, job("greet").queue(queue));
    let secret = Flow::new("secret-flow")
        .task(in_queue("secret-task", "bank"))
        .task(in_queue("mine", "mail").after("secret-task"))
        .on_end(job("greet").queue("mail").tags(["callback"]));
    let secret = fixture.enqueue_flow(secret).await.expect("a flow");
    let own =
        Flow::new("own-flow").task(in_queue("first", "mail")).task(in_queue("second", "mail").after("first"));
    let own = fixture.enqueue_flow(own).await.expect("a flow");
    let waiting = task_named(&all, &json!({ "id": secret.id }), "mine").await;
    let callback = all.get("/jobs?tag=callback").await.json()[0].clone();
    for (waiting, message) in
        [(&waiting, "it waits for other tasks of its flow"), (&callback, "it waits for the end of a flow")]
    {
        let id = id_of(waiting);
        // Pages keep what they read for a second: those of another caller must not be shown.
        for (http, is_named) in [(&all, true), (&limited, false), (&all, true)] {
            let explained = http.get(&format!("/jobs/{id}/explain")).await.expect_status(200);
            assert_eq!(explained.text.contains("secret-flow"), is_named, "{explained:?}");
            assert_eq!(explained.text.contains(message), !is_named, "{explained:?}");
            if cfg!(feature = "dashboard") {
                let page = http.get(&format!("/ui/jobs/{id}")).await.expect_status(200);
                assert_eq!(page.text.contains("secret-flow"), is_named, "{}", page.text);
                assert!(is_named || !page.text.contains("secret-task"), "{}", page.text);
            }
        }
    }
    let second = task_named(&all, &json!({ "id": own.id }), "second").await;
    let (_, message) = explain(&limited, &second).await;
    assert!(message.contains("task `first` of flow `own-flow`"), "{message}");
}

async fn explain_says_that_a_callback_waits_for_its_flow(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let worker = NewWorker { concurrency: 50, stale_after: HOUR, ..NewWorker::new("worker") };
    fixture.store().register(&worker).await.expect("register");
    let flow = Flow::new("import").task(task("fetch", job("greet"))).on_end(job("alert"));
    let flow = fixture.enqueue_flow(flow).await.expect("a flow");
    let callback = http.get("/jobs?kind=alert").await.json()[0].clone();
    let (reason, message) = explain(&http, &callback).await;
    assert_eq!(reason, "waits_for_tasks");
    assert_eq!(message, format!("it waits for the end of flow `import` ({})", flow.id));
    run_due(&fixture, done()).await;
    assert_eq!(fixture.status(job_id(&callback)).await, Status::Queued);
    let explained = http.get(&format!("/jobs/{}/explain", id_of(&callback))).await.json();
    assert_eq!(explained["reason"], "waits_its_turn");
}

async fn explain_says_that_a_job_waits_for_its_children(fixture: Fixture) {
    async fn ship(_: Value, ctx: Context) -> Result<(), Failure> {
        ctx.spawn("parcels", (1..=3).map(|n| NewJob::new("parcel", &n))).await?;
        ctx.join("all shipped").await.map(drop)
    }

    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("ship")).await;
    drain(worker(&fixture).function("ship", ship)).await;
    let live = NewWorker { concurrency: 50, stale_after: HOUR, ..NewWorker::new("worker") };
    fixture.store().register(&live).await.expect("register");
    let (reason, message) = explain(&http, &json!({ "id": id })).await;
    assert_eq!(reason, "suspended");
    assert!(message.starts_with("it waits for its 3 children, of which 3 have not ended; "), "{message}");
    assert!(message.contains(&format!("longshore flows show {id}")), "{message}");
    let children = http.get(&format!("/flows/{id}/tasks")).await.expect_status(200).json();
    assert_eq!((children.as_array().map(Vec::len), &children[0]["task"]), (Some(3), &json!("parcels")));
}
