//! The routes for operations. `../operations.rs` tests how operations are executed.

use longshore::api::{Access, Api, Operations};
use longshore::{JobId, NewJob, OperationFilter, Scope, Status, UnknownKinds};
use serde_json::{Value, json};
use uuid::Uuid;

use super::auth::token;
use super::client::HttpClient;
use crate::fixture::*;
use crate::worker::until;

cases! {
    a_server_without_workers_executes_an_operation,
    a_server_finds_operations_that_nobody_executes,
    an_operation_is_stopped_and_resumed_by_its_routes,
    a_list_of_ids_is_changed,
    operations_are_listed_in_pages,
    a_repeated_request_starts_one_operation,
    every_wrong_field_is_refused_by_name_and_nothing_is_stored,
    json_that_no_filter_can_hold_is_refused_by_name,
    a_limited_token_starts_operations_on_its_queues_only,
    a_limited_token_sees_operations_on_its_queues_only,
}

/// An API that leaves operations to others, so that they stay as they are.
fn idle(fixture: &Fixture) -> Api {
    Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).operations(Operations::Leave)
}

async fn operation(http: &HttpClient, id: &Value) -> Value {
    let path = format!("/operations/{}", id.as_str().expect("an id"));
    http.get(&path).await.expect_status(200).json()
}

async fn until_done(http: &HttpClient, id: &Value) -> Value {
    until("the operation is done", || async { operation(http, id).await["state"] == "done" }).await;
    operation(http, id).await
}

async fn send(http: &HttpClient, id: &Value, command: &str) -> super::client::Response {
    http.send("POST", &format!("/operations/{}/{command}", id.as_str().expect("an id")), &[], "").await
}

async fn a_server_without_workers_executes_an_operation(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let jobs: Vec<NewJob> = (0..230).map(|_| job("greet")).collect();
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let other = fixture.enqueue_kind("other").await;
    let body = json!({ "action": "cancel", "filter": { "kind": "greet", "status": ["queued", "retrying"] } });
    let started = http.post("/operations", &body).await.expect_status(202);
    let id = started.json()["id"].clone();
    assert_eq!(started.header("location"), format!("/operations/{}", id.as_str().expect("an id")));
    assert_eq!((&started.json()["filter"], &started.json()["expected"]), (&body["filter"], &json!(230)));
    let done = until_done(&http, &id).await;
    let counts = ["examined", "changed", "skipped"].map(|field| done[field].as_u64());
    assert_eq!(counts, [230, 230, 0].map(Some));
    assert_eq!(
        (&done["error"], &done["created_by"], &done["queues"]),
        (&json!(null), &json!(null), &json!(null))
    );
    assert_eq!(fixture.status(other).await, Status::Queued);
    assert_eq!(fixture.count(Status::Cancelled).await, 230);
}

async fn a_server_finds_operations_that_nobody_executes(fixture: Fixture) {
    fixture.enqueue_kind("greet").await;
    let idle = HttpClient::for_api(idle(&fixture));
    let body = json!({ "action": "cancel", "filter": { "kind": "greet" } });
    let id = idle.post("/operations", &body).await.expect_status(202).json()["id"].clone();
    // A restarted server receives no request about the operation.
    let restarted = HttpClient::new(&fixture);
    until_done(&idle, &id).await;
    drop(restarted);
}

async fn an_operation_is_stopped_and_resumed_by_its_routes(fixture: Fixture) {
    let idle = HttpClient::for_api(idle(&fixture));
    let http = HttpClient::new(&fixture);
    fixture.enqueue_kind("greet").await;
    let body = json!({ "action": "cancel", "filter": { "kind": "greet" } });
    let id = idle.post("/operations", &body).await.expect_status(202).json()["id"].clone();
    assert_eq!(send(&http, &id, "stop").await.expect_status(200).json()["state"], "stopped");
    assert_eq!(fixture.count(Status::Cancelled).await, 0);
    assert_eq!(send(&http, &id, "resume").await.expect_status(200).json()["state"], "running");
    assert_eq!(until_done(&http, &id).await["changed"], 1);
    send(&http, &id, "stop").await.expect_problem(409, "conflict", "done");
    send(&http, &id, "resume").await.expect_problem(409, "conflict", "start a new one");
    let unknown = json!(Uuid::now_v7());
    send(&http, &unknown, "stop").await.expect_problem(404, "not_found", "operation");
    send(&http, &unknown, "resume").await.expect_problem(404, "not_found", "operation");
    http.get("/operations/seven").await.expect_problem(400, "bad_request", "longshore operations list");
}

async fn a_list_of_ids_is_changed(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let (one, two) = (fixture.enqueue_kind("greet").await, fixture.enqueue_kind("greet").await);
    let body = json!({ "action": "cancel", "ids": [one, JobId::new(), one] });
    let started = http.post("/operations", &body).await.expect_status(202).json();
    assert_eq!((&started["expected"], &started["filter"]), (&json!(2), &json!(null)));
    let done = until_done(&http, &started["id"]).await;
    assert_eq!((&done["changed"], &done["skipped"]), (&json!(1), &json!(1)));
    assert_eq!((fixture.status(one).await, fixture.status(two).await), (Status::Cancelled, Status::Queued));
}

async fn operations_are_listed_in_pages(fixture: Fixture) {
    let http = HttpClient::for_api(idle(&fixture));
    let mut ids = Vec::new();
    for kind in ["a", "b", "c"] {
        let body = json!({ "action": "retry", "filter": { "kind": kind } });
        ids.push(http.post("/operations", &body).await.expect_status(202).json()["id"].clone());
        fixture.advance(SECOND).await;
    }
    send(&http, &ids[1], "stop").await.expect_status(200);
    let page = http.get("/operations?limit=2").await.expect_status(200);
    assert_eq!([&page.json()[0]["id"], &page.json()[1]["id"]], [&ids[2], &ids[1]]);
    let next = page.header("link").trim_start_matches('<').split('>').next().expect("a link").to_owned();
    let page = http.get(&next).await.expect_status(200);
    assert_eq!((page.json().as_array().map(Vec::len), &page.json()[0]["id"]), (Some(1), &ids[0]));
    assert_eq!(page.header("link"), "");
    let stopped = http.get("/operations?state=stopped").await.expect_status(200).json();
    assert_eq!((stopped.as_array().map(Vec::len), &stopped[0]["id"]), (Some(1), &ids[1]));
    http.get("/operations?state=asleep").await.expect_problem(400, "bad_request", "stopped");
    http.get("/operations?cursor=7").await.expect_problem(400, "bad_request", "cursor");
}

async fn a_repeated_request_starts_one_operation(fixture: Fixture) {
    let http = HttpClient::for_api(idle(&fixture));
    // A random id, as browsers create them.
    let id = json!("3f2504e0-4f89-41d3-9a0c-0305e82c3301");
    let body = json!({ "id": id, "action": "retry", "filter": { "status": ["failed_permanent"] } });
    let first = http.post("/operations", &body).await.expect_status(202).json();
    assert_eq!(first["id"], id);
    fixture.advance(SECOND).await;
    assert_eq!(http.post("/operations", &body).await.expect_status(202).json(), first);
    for other in [
        json!({ "id": id, "action": "delete", "filter": { "status": ["failed_permanent"] } }),
        json!({ "id": id, "action": "retry", "filter": { "status": ["cancelled"] } }),
        json!({ "id": id, "action": "retry", "ids": [id] }),
    ] {
        http.post("/operations", &other).await.expect_problem(409, "conflict", "id: another operation");
    }
    assert_eq!(http.get("/operations").await.expect_status(200).json().as_array().map(Vec::len), Some(1));
}

async fn every_wrong_field_is_refused_by_name_and_nothing_is_stored(fixture: Fixture) {
    let http = HttpClient::for_api(idle(&fixture));
    let with = |field: &str, value: Value| {
        let mut body = json!({ "action": "retry", "filter": { "kind": "greet" } });
        body[field] = value;
        body
    };
    let in_filter = |field: &str, value: Value| with("filter", json!({ field: value }));
    let id = JobId::new();
    for (body, part) in [
        (json!({ "filter": { "kind": "greet" } }), "action"),
        (with("action", json!("explode")), "action: \"explode\" is invalid; use cancel, retry or delete"),
        (with("action", json!(7)), "action"),
        (with("id", json!("seven")), "id: \"seven\" is invalid; give a UUID"),
        (with("colour", json!("red")), "colour"),
        (json!({ "action": "retry" }), "filter: is missing"),
        (with("ids", json!([id])), "ids: the request also has a `filter`"),
        (json!({ "action": "retry", "ids": [] }), "ids: 0 ids"),
        (json!({ "action": "retry", "ids": vec![id; 10_001] }), "ids: 10001 ids"),
        (json!({ "action": "retry", "ids": [id, "seven"] }), "ids[1]: `seven` is not a job id"),
        (json!({ "action": "retry", "ids": "all" }), "ids: expected a list"),
        (with("filter", json!({})), "filter: is empty and would match every job"),
        (with("filter", json!(["greet"])), "filter: expected an object"),
        (in_filter("status", json!([])), "filter: is empty"),
        (in_filter("status", json!(["asleep"])), "filter.status: unknown variant `asleep`"),
        (in_filter("status", json!("queued")), "filter.status"),
        (in_filter("kind", json!(7)), "filter.kind"),
        (in_filter("kind", json!("")), "filter.kind: is empty"),
        (in_filter("queue", json!("a\u{0}")), "filter.queue: contains a NUL"),
        (in_filter("group", json!("g".repeat(1025))), "filter.group: is longer"),
        (in_filter("id", json!("xyz")), "filter.id"),
        (in_filter("older_than", json!("soon")), "filter.older_than"),
        (in_filter("ended_after", json!(7)), "filter.ended_after"),
        (in_filter("limit", json!(7)), "filter.limit: unknown field `limit`"),
    ] {
        http.post("/operations", &body).await.expect_problem(422, "validation", part);
    }
    let everything = OperationFilter { limit: 10, ..OperationFilter::default() };
    assert!(fixture.operations(&everything).await.expect("list").is_empty());
}

/// A server that requires tokens, with one for the queue `mail`.
async fn limited(fixture: &Fixture, api: Api) -> (HttpClient, HttpClient) {
    let http = HttpClient::for_api(api.access(Access::Tokens));
    let (_, limited) = token(fixture, Scope::Admin, Some(&["mail", "letters"])).await;
    let (_, admin) = token(fixture, Scope::Admin, None).await;
    (http.with_token(&limited), http.with_token(&admin))
}

async fn json_that_no_filter_can_hold_is_refused_by_name(fixture: Fixture) {
    let http = HttpClient::for_api(idle(&fixture));
    for (filter, part) in [
        (r#"{"kind":1e400}"#, "filter.kind"),
        (r#"{"older_than":1e400}"#, "filter.older_than"),
        (r#"{"kind":"\ud800"}"#, "filter.kind"),
        (r#"{"status":["\udc00"]}"#, "filter.status"),
        (r#"{"colour":1e400}"#, "filter.colour"),
        (r#"{"\ud800":1}"#, "filter"),
    ] {
        let body = format!(r#"{{"action":"retry","filter":{filter}}}"#);
        let headers = [("content-type", "application/json")];
        http.send("POST", "/operations", &headers, &body).await.expect_problem(422, "validation", part);
    }
}

async fn a_limited_token_starts_operations_on_its_queues_only(fixture: Fixture) {
    let (http, _) = limited(&fixture, Api::new(fixture.client())).await;
    let theirs = fixture.enqueue_kind("greet").await;
    let mine = fixture.add(job("greet").queue("mail")).await;
    let spared = fixture.add(job("greet").queue("letters")).await;
    for filter in [json!({ "kind": "greet" }), json!({ "queue": "default" })] {
        let body = json!({ "action": "cancel", "filter": filter });
        http.post("/operations", &body).await.expect_problem(403, "forbidden", "mail");
    }
    let empty = json!({ "action": "cancel", "filter": {} });
    http.post("/operations", &empty).await.expect_problem(422, "validation", "filter");
    let body = json!({ "action": "cancel", "filter": { "queue": "letters", "tag": "none" } });
    let started = http.post("/operations", &body).await.expect_status(202).json();
    assert_eq!((&started["queues"], &started["created_by"]), (&json!(["letters"]), &json!("admin")));
    assert_eq!(until_done(&http, &started["id"]).await["examined"], 0);

    // A job of another queue is skipped like one that does not exist.
    let body = json!({ "action": "cancel", "ids": [theirs, mine, JobId::new()] });
    let started = http.post("/operations", &body).await.expect_status(202).json();
    let done = until_done(&http, &started["id"]).await;
    assert_eq!((&done["changed"], &done["skipped"]), (&json!(1), &json!(2)));
    assert_eq!(
        (fixture.status(theirs).await, fixture.status(mine).await),
        (Status::Queued, Status::Cancelled)
    );
    assert_eq!(fixture.status(spared).await, Status::Queued);
}

async fn a_limited_token_sees_operations_on_its_queues_only(fixture: Fixture) {
    let (http, admin) = limited(&fixture, idle(&fixture)).await;
    let start =
        async |body: Value| admin.post("/operations", &body).await.expect_status(202).json()["id"].clone();
    let mine = start(json!({ "action": "retry", "filter": { "queue": "mail" } })).await;
    let theirs = start(json!({ "action": "retry", "filter": { "queue": "default" } })).await;
    let listed = start(json!({ "action": "retry", "ids": [JobId::new()] })).await;
    let operations = http.get("/operations").await.expect_status(200).json();
    assert_eq!((operations.as_array().map(Vec::len), &operations[0]["id"]), (Some(1), &mine));
    operation(&http, &mine).await;
    for id in [&theirs, &listed] {
        let path = format!("/operations/{}", id.as_str().expect("an id"));
        http.get(&path).await.expect_problem(403, "forbidden", "mail, letters");
        send(&http, id, "stop").await.expect_problem(403, "forbidden", "other queues");
        send(&http, id, "resume").await.expect_problem(403, "forbidden", "other queues");
        assert_eq!(operation(&admin, id).await["state"], "running");
    }
    send(&http, &mine, "stop").await.expect_status(200);
}
