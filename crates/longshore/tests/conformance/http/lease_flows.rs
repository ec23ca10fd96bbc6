//! Flows of workers in any language: inputs, and children that a leased job spawns and joins.

use longshore::{Flow, FlowId, JobId, NewJob, Scope, Status, task};
use serde_json::{Value, json};

use super::auth::{token, with_tokens_required};
use super::client::{HttpClient, Response};
use super::leases::{ended, held, settle, worker};
use crate::fixture::*;
use crate::flows::put;
use crate::locks::in_time;
use crate::worker::until;

cases! {
    a_leased_task_reads_the_results_of_the_tasks_before_it,
    a_leased_job_spawns_children_and_joins_them,
    a_spawn_or_join_that_is_repeated_after_a_lost_response_changes_nothing,
    a_join_names_the_children_that_failed,
    the_children_of_a_join_come_in_pages,
    a_join_returns_the_same_children_to_a_later_attempt,
    a_spawn_or_join_that_cannot_be_done_is_refused_with_a_reason,
    a_stale_lease_neither_spawns_nor_joins,
    a_spawn_needs_the_scope_and_the_queues_of_its_jobs,
    a_task_reads_what_its_flow_hands_it_whatever_the_queues,
    a_job_with_the_id_of_a_flow_reads_none_of_its_results,
}

/// A worker that holds one job.
struct Parent {
    http: HttpClient,
    worker: String,
    lease: Value,
}

impl Parent {
    async fn new(fixture: &Fixture) -> Self {
        fixture.add(job("order")).await;
        Parent::of(HttpClient::new(fixture)).await
    }

    async fn of(http: HttpClient) -> Self {
        let body = json!({ "kinds": ["order"], "stale_after_seconds": 3600 });
        let leased = http.post("/leases", &body).await.expect_status(200);
        Parent { worker: worker(&leased), lease: held(&leased), http }
    }

    fn id(&self) -> JobId {
        self.lease["id"].as_str().expect("an id").parse().expect("an id")
    }

    async fn lease_again(&mut self) {
        let body = json!({ "worker_id": self.worker, "kinds": ["order"], "wait_seconds": 20 });
        self.lease = held(&in_time(self.http.post("/leases", &body)).await.expect_status(200));
    }

    async fn send(&self, path: &str, mut fields: Value) -> Response {
        fields["worker_id"] = json!(self.worker);
        fields["id"] = self.lease["id"].clone();
        fields["lease_no"] = self.lease["lease_no"].clone();
        self.http.post(path, &fields).await
    }

    async fn spawn(&self, name: &str, children: impl IntoIterator<Item = u32>) -> Value {
        let jobs: Vec<Value> = children
            .into_iter()
            .map(|n| json!({ "kind": "child", "payload": n, "queue": "children" }))
            .collect();
        self.send("/leases/spawn", json!({ "name": name, "jobs": jobs })).await.expect_status(200).json()["status"].clone()
    }

    async fn join(&self, name: &str) -> Value {
        self.send("/leases/join", json!({ "name": name })).await.expect_status(200).json()
    }

    /// Runs the children: each returns ten times its payload, and 13 fails.
    async fn run_children(&self, fixture: &Fixture) {
        let body = json!({ "queues": ["children"], "limit": 100, "wait_seconds": 20 });
        let leased = in_time(self.http.post("/leases", &body)).await.expect_status(200);
        let items: Vec<Value> = leased.json()["jobs"]
            .as_array()
            .expect("jobs")
            .iter()
            .map(|child| {
                let lease = json!({ "id": child["id"], "lease_no": child["lease_no"] });
                match child["payload"].as_u64() {
                    Some(13) => ended(&lease, "failed", json!({ "error": "bad luck", "permanent": true })),
                    Some(n) => ended(&lease, "succeeded", json!({ "result": n * 10 })),
                    None => panic!("{child}"),
                }
            })
            .collect();
        let body = json!({ "worker_id": worker(&leased), "limit": 0, "settle": items });
        self.http.post("/leases", &body).await.expect_status(200);
        let flow = FlowId(self.id().0);
        until("the flow has followed", || async {
            fixture.flow(flow).await.expect("flow").ended_at.is_some()
        })
        .await;
    }
}

fn results(response: &Value) -> Vec<Value> {
    response["children"].as_array().expect("children").iter().map(|child| child["result"].clone()).collect()
}

async fn a_leased_task_reads_the_results_of_the_tasks_before_it(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let flow = Flow::new("import")
        .task(task("fetch", NewJob::new("fetch", &1)))
        .task(task("count", NewJob::new("fetch", &2)))
        .task(task("parse", NewJob::new("parse", &3)).after("fetch").after_end("count"));
    put(&fixture, flow).await;
    let leased = http.post("/leases", &json!({ "kinds": ["fetch"], "limit": 2 })).await.expect_status(200);
    let (worker_id, jobs) = (worker(&leased), leased.json()["jobs"].clone());
    let lease = |i: usize| json!({ "id": jobs[i]["id"], "lease_no": 1 });
    let read = async |lease: &Value| {
        let body = json!({ "worker_id": worker_id, "id": lease["id"], "lease_no": lease["lease_no"] });
        http.post("/leases/inputs", &body).await
    };
    assert_eq!(read(&lease(0)).await.expect_status(200).json(), json!({ "inputs": [] }));
    let items = [
        ended(&lease(0), "succeeded", json!({ "result": ["row"] })),
        ended(&lease(1), "failed", json!({ "error": "no", "permanent": true })),
    ];
    for item in items {
        assert_eq!(settle(&http, &worker_id, item).await, "stored");
    }
    let body = json!({ "worker_id": worker_id, "kinds": ["parse"], "wait_seconds": 20 });
    let parse = held(&in_time(http.post("/leases", &body)).await.expect_status(200));
    let inputs = read(&parse).await.expect_status(200).json()["inputs"].clone();
    let fetch = json!({ "task": "fetch", "id": jobs[0]["id"], "outcome": "succeeded", "result": ["row"] });
    let count =
        json!({ "task": "count", "id": jobs[1]["id"], "outcome": "failed_permanent", "result": null });
    assert_eq!(inputs, json!([fetch, count]));
    let stale = json!({ "id": parse["id"], "lease_no": 9 });
    read(&stale).await.expect_problem(409, "conflict", "lost");
}

async fn a_leased_job_spawns_children_and_joins_them(fixture: Fixture) {
    let mut parent = Parent::new(&fixture).await;
    assert_eq!(parent.spawn("small", [1, 2, 3]).await, "stored");
    let waiting = parent.join("first").await;
    assert_eq!(waiting, json!({ "status": "suspended", "children": [], "next": null }));
    assert_eq!(fixture.status(parent.id()).await, Status::Queued);
    parent.run_children(&fixture).await;
    parent.lease_again().await;
    // The worker repeats the handler from its start.
    assert_eq!(parent.spawn("small", [1, 2, 3]).await, "stored");
    let first = parent.join("first").await;
    assert_eq!(
        (&first["status"], results(&first)),
        (&json!("continue"), vec![json!(10), json!(20), json!(30)])
    );
    let child = &first["children"][0];
    assert_eq!(
        (&child["task"], &child["outcome"], &child["error"]),
        (&json!("small"), &json!("succeeded"), &json!(null))
    );
    assert_eq!(parent.spawn("large", [10]).await, "stored");
    assert_eq!(parent.join("second").await["status"], "suspended");
    parent.run_children(&fixture).await;
    parent.lease_again().await;
    assert_eq!(results(&parent.join("second").await).len(), 4);
    assert_eq!(results(&parent.join("first").await).len(), 3, "it returns the same children as before");
    let members = fixture.flow(FlowId(parent.id().0)).await.expect("flow").members;
    assert_eq!(members, 4);
    let item = ended(&parent.lease, "succeeded", json!({}));
    assert_eq!(settle(&parent.http, &parent.worker, item).await, "stored");
}

async fn a_spawn_or_join_that_is_repeated_after_a_lost_response_changes_nothing(fixture: Fixture) {
    let mut parent = Parent::new(&fixture).await;
    for _ in 0..3 {
        assert_eq!(parent.spawn("small", [1, 2]).await, "stored");
    }
    assert_eq!(fixture.flow(FlowId(parent.id().0)).await.expect("flow").members, 2);
    for _ in 0..2 {
        assert_eq!(parent.join("all").await["status"], "suspended");
    }
    parent.run_children(&fixture).await;
    parent.lease_again().await;
    let first = parent.join("all").await;
    assert_eq!(parent.join("all").await, first);
    assert_eq!(results(&first), [json!(10), json!(20)]);
}

async fn a_join_names_the_children_that_failed(fixture: Fixture) {
    let mut parent = Parent::new(&fixture).await;
    parent.spawn("parcels", [1, 13]).await;
    parent.join("all").await;
    parent.run_children(&fixture).await;
    parent.lease_again().await;
    let joined = parent.join("all").await;
    let failed = &joined["children"][1];
    assert_eq!(
        (&failed["outcome"], &failed["result"], &failed["error"]),
        (&json!("failed_permanent"), &json!(null), &json!("bad luck"))
    );
}

async fn the_children_of_a_join_come_in_pages(fixture: Fixture) {
    let mut parent = Parent::new(&fixture).await;
    parent.spawn("parcels", 1..=5).await;
    parent.join("all").await;
    parent.run_children(&fixture).await;
    parent.lease_again().await;
    let (mut found, mut after, mut pages) = (Vec::new(), json!(null), 0);
    loop {
        let body = json!({ "name": "all", "after": after, "limit": 2 });
        let page = parent.send("/leases/join", body).await.expect_status(200).json();
        assert_eq!(page["status"], "continue");
        found.extend(results(&page));
        pages += 1;
        after = page["next"].clone();
        if after.is_null() {
            break;
        }
    }
    assert_eq!((found, pages), ((1..=5).map(|n| json!(n * 10)).collect(), 3));
    for limit in [0, 1001] {
        let refused = parent.send("/leases/join", json!({ "name": "all", "limit": limit })).await;
        refused.expect_problem(422, "validation", "limit");
    }
}

async fn a_join_returns_the_same_children_to_a_later_attempt(fixture: Fixture) {
    let mut parent = Parent::new(&fixture).await;
    parent.spawn("parcels", [1, 2]).await;
    parent.join("all").await;
    parent.run_children(&fixture).await;
    parent.lease_again().await;
    let joined = parent.join("all").await;
    let failed = ended(&parent.lease, "failed", json!({ "retry_after_seconds": 0 }));
    assert_eq!(settle(&parent.http, &parent.worker, failed).await, "stored");
    parent.lease_again().await;
    assert_eq!(parent.join("all").await, joined);
    // The results of a child that was deleted are unknown.
    let child: JobId = joined["children"][0]["id"].as_str().expect("an id").parse().expect("an id");
    fixture.delete(child).await.expect("delete");
    let refused = parent.send("/leases/join", json!({ "name": "all" })).await;
    refused.expect_problem(409, "conflict", "1 of the 2 children of spawn `parcels` were deleted");
}

async fn a_spawn_or_join_that_cannot_be_done_is_refused_with_a_reason(fixture: Fixture) {
    let parent = Parent::new(&fixture).await;
    let refused = parent.send("/leases/join", json!({ "name": "all" })).await;
    refused.expect_problem(409, "conflict", "this job has no children");
    let mut steps = json!({ "worker_id": parent.worker, "steps": [{ "name": "charge", "value": 7 }] });
    steps["id"] = parent.lease["id"].clone();
    steps["lease_no"] = parent.lease["lease_no"].clone();
    parent.http.post("/leases/steps", &steps).await.expect_status(200);
    for (path, body) in [
        ("/leases/spawn", json!({ "name": "charge", "jobs": [] })),
        ("/leases/join", json!({ "name": "charge" })),
    ] {
        parent.send(path, body).await.expect_problem(409, "conflict", "belongs to another step");
    }
    for (jobs, part) in [
        (json!([{ "kind": "", "payload": 1 }]), "jobs[0]"),
        (json!([{ "kind": "a", "payload": 1 }, { "kind": "a", "payload": 1, "unique_key": "k" }]), "jobs[1]"),
        (json!([{ "kind": "a", "payload": 1, "id": "01990000-0000-7000-8000-000000000000" }]), "jobs[0]"),
    ] {
        let refused = parent.send("/leases/spawn", json!({ "name": "parcels", "jobs": jobs })).await;
        refused.expect_problem(422, "validation", part);
    }
    parent.send("/leases/spawn", json!({ "name": "", "jobs": [] })).await.expect_problem(
        422,
        "validation",
        "name",
    );
    assert_eq!(parent.spawn("parcels", [1]).await, "stored");
    fixture.cancel_flow(FlowId(parent.id().0)).await.expect("cancel");
    let refused = parent.send("/leases/spawn", json!({ "name": "more", "jobs": [] })).await;
    refused.expect_problem(409, "conflict", "the children of this job were cancelled; retry them");
}

async fn a_stale_lease_neither_spawns_nor_joins(fixture: Fixture) {
    let mut parent = Parent::new(&fixture).await;
    parent.spawn("parcels", [1]).await;
    parent.lease["lease_no"] = json!(7);
    assert_eq!(parent.spawn("more", [2]).await, "lease_lost");
    assert_eq!(parent.join("all").await["status"], "lease_lost");
    assert_eq!(fixture.flow(FlowId(parent.id().0)).await.expect("flow").members, 1);
    let unknown = Parent { worker: JobId::new().to_string(), ..parent };
    for path in ["/leases/spawn", "/leases/join", "/leases/inputs"] {
        let mut body = json!({ "name": "all" });
        if path == "/leases/spawn" {
            body["jobs"] = json!([]);
        }
        if path == "/leases/inputs" {
            body = json!({});
        }
        unknown.send(path, body).await.expect_problem(409, "conflict", "register again");
    }
}

async fn a_spawn_needs_the_scope_and_the_queues_of_its_jobs(fixture: Fixture) {
    fixture.add(job("order")).await;
    let (_, secret) = token(&fixture, Scope::Work, None).await;
    let parent = Parent::of(with_tokens_required(&fixture).with_token(&secret)).await;
    let refused = parent.send("/leases/spawn", json!({ "name": "parcels", "jobs": [] })).await;
    refused.expect_problem(403, "forbidden", "`enqueue`");
    fixture.add(job("order").queue("mail")).await;
    let (_, secret) = token(&fixture, Scope::Admin, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture).with_token(&secret);
    let leased = http.post("/leases", &json!({ "queues": ["mail"] })).await.expect_status(200);
    let limited = Parent { worker: worker(&leased), lease: held(&leased), http };
    let spawn = |queue: &str| json!({ "name": "parcels", "jobs": [{ "kind": "child", "payload": 1, "queue": queue }] });
    limited.send("/leases/spawn", spawn("children")).await.expect_problem(403, "forbidden", "jobs[0]");
    limited.send("/leases/spawn", spawn("mail")).await.expect_status(200);
    // The id of a worker of another queue.
    let foreign =
        Parent { worker: parent.worker.clone(), lease: parent.lease.clone(), http: limited.http.clone() };
    for (path, body) in [
        ("/leases/spawn", spawn("mail")),
        ("/leases/join", json!({ "name": "all" })),
        ("/leases/inputs", json!({})),
    ] {
        foreign.send(path, body).await.expect_problem(403, "forbidden", "another queue");
    }
}

/// The producer of the flow has decided that the task gets these results. So a worker needs only the queue of the
/// task.
async fn a_task_reads_what_its_flow_hands_it_whatever_the_queues(fixture: Fixture) {
    let (_, all) = token(&fixture, Scope::Work, None).await;
    let (_, limited) = token(&fixture, Scope::Work, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture);
    let (all, limited) = (http.with_token(&all), http.with_token(&limited));
    let flow = Flow::new("import")
        .task(task("fetch", NewJob::new("fetch", &1).queue("bank")))
        .task(task("other", NewJob::new("fetch", &2).queue("bank")))
        .task(task("parse", NewJob::new("parse", &3).queue("mail").priority(1)).after("fetch"));
    put(&fixture, flow).await;
    let leased = all.post("/leases", &json!({ "queues": ["bank"], "limit": 2 })).await.expect_status(200);
    let (worker_id, jobs) = (worker(&leased), leased.json()["jobs"].clone());
    for job in jobs.as_array().expect("jobs") {
        let lease = json!({ "id": job["id"], "lease_no": job["lease_no"] });
        let end = ended(&lease, "succeeded", json!({ "result": "row" }));
        assert_eq!(settle(&all, &worker_id, end).await, "stored");
    }
    let body = json!({ "queues": ["mail"], "wait_seconds": 20 });
    let leased = in_time(limited.post("/leases", &body)).await.expect_status(200);
    let parse = held(&leased);
    let body = json!({ "worker_id": worker(&leased), "id": parse["id"], "lease_no": parse["lease_no"] });
    let inputs = limited.post("/leases/inputs", &body).await.expect_status(200).json()["inputs"].clone();
    assert_eq!(inputs.as_array().map(Vec::len), Some(1), "only what it waited for: {inputs}");
    assert_eq!((&inputs[0]["task"], &inputs[0]["result"]), (&json!("fetch"), &json!("row")));
}

/// A worker can store steps that look like those of a spawn and of a join.
async fn a_job_with_the_id_of_a_flow_reads_none_of_its_results(fixture: Fixture) {
    let (_, limited) = token(&fixture, Scope::Admin, Some(&["mail"])).await;
    let limited = with_tokens_required(&fixture).with_token(&limited);
    let flow =
        put(&fixture, Flow::new("payroll").task(task("pay", NewJob::new("pay", &1).queue("bank")))).await;
    fixture.cancel_flow(flow.id).await.expect("cancel");
    fixture.advance_flows().await.expect("advance");
    let job = json!({ "id": flow.id, "kind": "order", "payload": 1, "queue": "mail" });
    limited.post("/jobs", &job).await.expect_status(201);
    let leased = limited.post("/leases", &json!({ "queues": ["mail"] })).await.expect_status(200);
    let thief = Parent { worker: worker(&leased), lease: held(&leased), http: limited };
    let spawned = json!({
        "spawned": 1,
        "first": "00000000-0000-0000-0000-000000000000",
        "last": "ffffffff-ffff-ffff-ffff-ffffffffffff",
    });
    let steps = json!([
        { "name": "pay", "value": spawned },
        { "name": "joined", "value": { "spawned": ["pay"] } },
    ]);
    thief.send("/leases/steps", json!({ "steps": steps })).await.expect_status(200);
    for name in ["joined", "all"] {
        let refused = thief.send("/leases/join", json!({ "name": name })).await;
        refused.expect_problem(409, "conflict", "this job has no children");
    }
}
