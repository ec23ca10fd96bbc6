//! Keys and tokens: the keys of a token that covers only some queues are in a namespace of their queue, and a token
//! without the scope `read` learns nothing about jobs that existed before its call.

use longshore::api::{Access, Api};
use longshore::{JobId, NewJob, Scope, Status, UniqueMode, UnknownKinds};
use serde_json::{Value, json};

use super::auth::{token, token_with, with_tokens_required};
use super::client::{HttpClient, Response};
use crate::fixture::{DAY, Fixture, failed_permanently, job};

cases! {
    a_limited_token_takes_no_idempotency_key_of_another_queue,
    a_limited_token_takes_no_unique_key_of_another_queue,
    a_limited_token_replaces_jobs_that_its_own_unique_keys_hold,
    every_job_of_a_batch_has_the_namespace_of_its_queue,
    the_key_of_a_request_that_was_merged_is_in_the_namespace,
    follow_ups_of_a_limited_worker_take_no_keys_of_other_queues,
    a_limited_token_takes_no_key_of_a_flow_of_another_queue,
    a_part_of_a_limited_token_is_not_that_of_another_caller,
    jobs_with_one_key_are_listed_in_pages,
    a_list_by_key_shows_no_job_of_another_queue,
    a_key_of_a_namespace_cannot_be_written_by_hand,
    the_name_of_the_queue_counts_for_the_length_of_a_key,
    a_token_that_may_only_enqueue_does_not_read_an_existing_job_by_its_key,
    a_token_that_may_only_enqueue_sees_the_whole_job_that_it_has_created,
    a_token_that_may_only_enqueue_does_not_read_an_existing_flow_or_event,
    a_token_that_may_only_operate_does_not_read_what_it_changes,
    a_refused_retry_names_no_job_of_another_queue,
}

/// A caller that may enqueue and read jobs of these queues; of all queues without a list.
async fn producer(http: &HttpClient, fixture: &Fixture, queues: Option<&[&str]>) -> HttpClient {
    let (_, secret) = token_with(fixture, &[Scope::Enqueue, Scope::Read], queues).await;
    http.with_token(&secret)
}

fn in_queue(queue: &str, more: Value) -> Value {
    let mut body = json!({ "kind": "greet", "payload": queue, "queue": queue });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn id_of(response: &Response) -> String {
    response.json()["id"].as_str().expect("an id").to_owned()
}

/// Sends the same request twice: the second one returns the job of the first. Returns its id.
async fn enqueue_twice(http: &HttpClient, body: &Value) -> String {
    let first = http.post("/jobs", body).await.expect_status(201);
    let second = http.post("/jobs", body).await.expect_status(200);
    assert_eq!(second.header("enqueued-as"), "existing");
    for response in [&first, &second] {
        for key in ["idempotency_key", "unique_key"] {
            assert_eq!(response.json()[key], body[key], "the key as the caller wrote it");
        }
        assert_eq!(response.json()["id"], first.json()["id"]);
    }
    id_of(&first)
}

async fn a_limited_token_takes_no_idempotency_key_of_another_queue(fixture: Fixture) {
    keys_do_not_meet(&fixture, "idempotency_key").await;
}

async fn a_limited_token_takes_no_unique_key_of_another_queue(fixture: Fixture) {
    keys_do_not_meet(&fixture, "unique_key").await;
}

async fn keys_do_not_meet(fixture: &Fixture, name: &str) {
    let http = with_tokens_required(fixture);
    let alpha = producer(&http, fixture, Some(&["alpha"])).await;
    let both = producer(&http, fixture, Some(&["alpha", "beta"])).await;
    let all = producer(&http, fixture, None).await;
    let keyed = |queue: &str| in_queue(queue, json!({ name: "invoice-7" }));
    let of_alpha = enqueue_twice(&alpha, &keyed("alpha")).await;
    let of_beta = enqueue_twice(&both, &keyed("beta")).await;
    let of_all = enqueue_twice(&all, &keyed("beta")).await;
    assert!(of_alpha != of_beta && of_beta != of_all && of_alpha != of_all);
    // Tokens share the namespace of a queue that they cover.
    let shared = both.post("/jobs", &keyed("alpha")).await.expect_status(200);
    assert_eq!(id_of(&shared), of_alpha);
    // Callers without limits share one set of keys for all queues.
    assert_eq!(id_of(&all.post("/jobs", &keyed("alpha")).await.expect_status(200)), of_all);
    let list = async |queue: &str| {
        let page = all.get(&format!("/jobs?{name}=invoice-7{queue}")).await.expect_status(200).json();
        let mut ids: Vec<String> = page
            .as_array()
            .expect("a list")
            .iter()
            .map(|job| job["id"].as_str().expect("id").into())
            .collect();
        ids.sort_unstable();
        ids
    };
    let sorted = |mut ids: Vec<String>| {
        ids.sort_unstable();
        ids
    };
    assert_eq!(list("").await, std::slice::from_ref(&of_all));
    assert_eq!(list("&queue=alpha").await, std::slice::from_ref(&of_alpha));
    assert_eq!(list("&queue=beta").await, sorted(vec![of_beta, of_all]));
}

async fn a_limited_token_replaces_jobs_that_its_own_unique_keys_hold(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let theirs = NewJob::new("greet", "theirs").queue("mail").unique_key("digest", UniqueMode::Dedupe);
    let theirs = fixture.add(theirs).await;
    let http = producer(&http, &fixture, Some(&["mail"])).await;
    let replacing = |payload: u32| {
        in_queue("mail", json!({ "payload": payload, "unique_key": "digest", "unique_mode": "replace" }))
    };
    let mine = id_of(&http.post("/jobs", &replacing(1)).await.expect_status(201));
    let replaced = http.post("/jobs", &replacing(2)).await.expect_status(200);
    assert_eq!(replaced.header("enqueued-as"), "replaced");
    assert_eq!((id_of(&replaced), &replaced.json()["payload"]), (mine, &json!(2)));
    assert_eq!(fixture.job(theirs).await.payload.get(), r#""theirs""#);
}

async fn every_job_of_a_batch_has_the_namespace_of_its_queue(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let limited = producer(&http, &fixture, Some(&["alpha", "beta"])).await;
    let all = producer(&http, &fixture, None).await;
    let keyed = |queue: &str| in_queue(queue, json!({ "idempotency_key": "i", "unique_key": "u" }));
    let batch = json!([keyed("alpha"), keyed("beta"), keyed("alpha")]);
    let outcomes = async |http: &HttpClient| {
        let items = http.post("/jobs/batch", &batch).await.expect_status(200).json()["items"].clone();
        let outcomes = items.as_array().expect("items").iter();
        outcomes.map(|item| item["outcome"].as_str().expect("an outcome").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(outcomes(&limited).await, ["created", "created", "existing"]);
    assert_eq!(outcomes(&all).await, ["created", "existing", "existing"]);
    assert_eq!(outcomes(&limited).await, ["existing"; 3]);
}

async fn the_key_of_a_request_that_was_merged_is_in_the_namespace(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let limited = producer(&http, &fixture, Some(&["mail"])).await;
    let keyed = |key: &str| in_queue("mail", json!({ "idempotency_key": key, "unique_key": "digest" }));
    let first = id_of(&limited.post("/jobs", &keyed("first")).await.expect_status(201));
    let merged = limited.post("/jobs", &keyed("second")).await.expect_status(200);
    assert_eq!(id_of(&merged), first);
    let again = in_queue("mail", json!({ "idempotency_key": "second" }));
    assert_eq!(id_of(&limited.post("/jobs", &again).await.expect_status(200)), first);
    let all = producer(&http, &fixture, None).await;
    let other = id_of(&all.post("/jobs", &again).await.expect_status(201));
    assert_ne!(other, first);
    let page = limited.get("/jobs?idempotency_key=second&queue=mail").await.expect_status(200).json();
    assert_eq!((&page[0]["id"], &page[1]["id"]), (&json!(other), &json!(first)));
}

async fn follow_ups_of_a_limited_worker_take_no_keys_of_other_queues(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let (_, secret) = token_with(&fixture, &[Scope::Work, Scope::Enqueue], Some(&["mail"])).await;
    let worker = http.with_token(&secret);
    fixture.add(job("greet").queue("mail")).await;
    let leased = worker.post("/leases", &json!({ "kinds": ["greet"], "queues": ["mail"] })).await;
    let leased = leased.expect_status(200).json();
    let follow_up = in_queue("mail", json!({ "kind": "next", "idempotency_key": "i", "unique_key": "u" }));
    let item = json!({
        "id": leased["jobs"][0]["id"], "lease_no": 1, "outcome": "succeeded", "follow_ups": [follow_up],
    });
    let settle = json!({ "worker_id": leased["worker_id"], "items": [item] });
    let settled = worker.post("/leases/settle", &settle).await.expect_status(200).json();
    assert_eq!(settled["items"][0]["settled"], "stored");
    let all = producer(&http, &fixture, None).await;
    let next = all.get("/jobs?kind=next&queue=mail").await.expect_status(200).json();
    assert_eq!((&next[0]["idempotency_key"], &next[0]["unique_key"]), (&json!("i"), &json!("u")));
    for key in ["idempotency_key", "unique_key"] {
        let theirs = in_queue("other", json!({ key: next[0][key] }));
        all.post("/jobs", &theirs).await.expect_status(201);
    }
}

fn flow(queues: &[&str]) -> Value {
    let task = |queue: &&str| json!({ "task": queue, "kind": "greet", "payload": 1, "queue": queue });
    json!({ "name": "import", "tasks": queues.iter().map(task).collect::<Vec<_>>(), "idempotency_key": "import-7" })
}

async fn a_limited_token_takes_no_key_of_a_flow_of_another_queue(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let alpha = producer(&http, &fixture, Some(&["alpha"])).await;
    let both = producer(&http, &fixture, Some(&["alpha", "beta"])).await;
    let all = producer(&http, &fixture, None).await;
    let mut ids = Vec::new();
    for (http, queues) in [(&alpha, &["alpha"][..]), (&both, &["beta", "alpha"]), (&all, &["beta"])] {
        let first = http.post("/flows", &flow(queues)).await.expect_status(201);
        let second = http.post("/flows", &flow(queues)).await.expect_status(200);
        assert_eq!(first.json(), second.json());
        assert_eq!(first.json()["idempotency_key"], "import-7");
        ids.push(id_of(&first));
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3);
    let flows = all.get("/flows").await.expect_status(200).json();
    assert!(
        flows.as_array().expect("flows").iter().all(|flow| flow["idempotency_key"] == "import-7"),
        "{flows}"
    );
}

async fn a_part_of_a_limited_token_is_not_that_of_another_caller(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let limited = producer(&http, &fixture, Some(&["mail"])).await;
    let all = producer(&http, &fixture, None).await;
    let open = json!({ "name": "import", "sealed": false,
                       "tasks": [{ "kind": "greet", "payload": 1, "queue": "mail" }] });
    let path = format!("/flows/{}/jobs", id_of(&all.post("/flows", &open).await.expect_status(201)));
    let headers = [("content-type", "application/json"), ("idempotency-key", "part-1")];
    let part = json!({ "jobs": [{ "kind": "greet", "payload": 2, "queue": "mail" }] }).to_string();
    for (http, members) in [(&limited, 2), (&limited, 2), (&all, 3), (&all, 3), (&limited, 3)] {
        let added = http.send("POST", &path, &headers, &part).await.expect_status(200).json();
        assert_eq!(added["members"], members);
    }
}

async fn jobs_with_one_key_are_listed_in_pages(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let limited = producer(&http, &fixture, Some(&["mail"])).await;
    let keyed = in_queue("mail", json!({ "idempotency_key": "invoice-7" }));
    let older = id_of(&limited.post("/jobs", &keyed).await.expect_status(201));
    let newer = fixture.add(job("greet").queue("mail").idempotency_key("invoice-7")).await.to_string();
    let first = limited.get("/jobs?idempotency_key=invoice-7&queue=mail&limit=1").await.expect_status(200);
    assert_eq!((first.json().as_array().map(Vec::len), &first.json()[0]["id"]), (Some(1), &json!(newer)));
    let link = first.header("link");
    let next = link.strip_prefix('<').and_then(|link| link.split('>').next()).expect("a next page");
    let second = limited.get(next).await.expect_status(200);
    assert_eq!((second.json().as_array().map(Vec::len), &second.json()[0]["id"]), (Some(1), &json!(older)));
    assert_eq!(second.header("link"), "");
}

async fn a_list_by_key_shows_no_job_of_another_queue(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let limited = producer(&http, &fixture, Some(&["mail"])).await;
    let all = producer(&http, &fixture, None).await;
    let keyed = |queue: &str| in_queue(queue, json!({ "idempotency_key": "k" }));
    let mine = id_of(&limited.post("/jobs", &keyed("mail")).await.expect_status(201));
    let theirs = id_of(&all.post("/jobs", &keyed("other")).await.expect_status(201));
    let page = limited.get("/jobs?idempotency_key=k&queue=mail").await.expect_status(200);
    assert!(!page.text.contains(&theirs));
    assert_eq!((page.json().as_array().map(Vec::len), &page.json()[0]["id"]), (Some(1), &json!(mine)));
}

async fn a_key_of_a_namespace_cannot_be_written_by_hand(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let limited = producer(&http, &fixture, Some(&["mail"])).await;
    let all = producer(&http, &fixture, None).await;
    for name in ["idempotency_key", "unique_key"] {
        let forged = in_queue("mail", json!({ name: "\u{1f}4:mailinvoice-7" }));
        for http in [&limited, &all] {
            http.post("/jobs", &forged).await.expect_problem(422, "validation", name);
            let batch = http.post("/jobs/batch", &json!([forged])).await.expect_status(200).json();
            assert_eq!(batch["items"][0]["outcome"], "refused");
        }
        let found = all.get(&format!("/jobs?{name}=%1f4:mailinvoice-7")).await.expect_status(200);
        assert_eq!(found.json(), json!([]));
    }
    let mut forged = flow(&["mail"]);
    forged["idempotency_key"] = json!("\u{1f}4:mailimport-7");
    all.post("/flows", &forged).await.expect_problem(422, "validation", "idempotency_key");
    let error = fixture.enqueue(NewJob::new("greet", &1).unique_key("\u{1f}k", UniqueMode::Dedupe)).await;
    assert_eq!(error.expect_err("refused").field(), Some("unique_key"));
}

async fn the_name_of_the_queue_counts_for_the_length_of_a_key(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let queue = "q".repeat(128);
    let limited = producer(&http, &fixture, Some(&[&queue])).await;
    let all = producer(&http, &fixture, None).await;
    for name in ["idempotency_key", "unique_key"] {
        let keyed = |length: usize| in_queue(&queue, json!({ name: "k".repeat(length) }));
        enqueue_twice(&limited, &keyed(379)).await;
        limited.post("/jobs", &keyed(380)).await.expect_problem(422, "validation", "use at most 379");
        enqueue_twice(&all, &keyed(512)).await;
    }
}

/// A job with a secret in every text that a caller could read.
async fn secret_job(fixture: &Fixture, queue: &str) -> JobId {
    let secret = NewJob::new("greet", "secret-payload").queue(queue).delay(DAY).context("secret-context");
    let secret = secret.tags(["secret-tag"]).group("secret-group");
    fixture.add(secret.idempotency_key("key").unique_key("unique", UniqueMode::Dedupe)).await
}

fn assert_reference(response: &Response, id: JobId, status: &str, enqueued_as: Option<&str>) {
    let mut expected = json!({ "id": id, "status": status });
    if let Some(enqueued_as) = enqueued_as {
        expected["enqueued_as"] = json!(enqueued_as);
    }
    assert_eq!(response.json(), expected);
}

async fn a_token_that_may_only_enqueue_does_not_read_an_existing_job_by_its_key(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let id = secret_job(&fixture, "mail").await;
    let (_, secret) = token(&fixture, Scope::Enqueue, None).await;
    let http = http.with_token(&secret);
    for key in [json!({ "idempotency_key": "key" }), json!({ "unique_key": "unique" }), json!({ "id": id })] {
        let existing = http.post("/jobs", &in_queue("mail", key.clone())).await.expect_status(200);
        assert_reference(&existing, id, "queued", Some("existing"));
        assert_eq!(existing.header("enqueued-as"), "existing");
        let batch = http.post("/jobs/batch", &json!([in_queue("mail", key)])).await.expect_status(200);
        assert!(!batch.text.contains("secret"), "{batch:?}");
        assert_eq!(batch.json()["items"], json!([{ "outcome": "existing", "id": id }]));
    }
    let replace = in_queue("mail", json!({ "unique_key": "unique", "unique_mode": "replace" }));
    let replaced = http.post("/jobs", &replace).await.expect_status(200);
    assert_reference(&replaced, id, "queued", Some("replaced"));
    // With the scope, the whole job.
    let (_, secret) = token_with(&fixture, &[Scope::Enqueue, Scope::Read], None).await;
    let reader = http.with_token(&secret);
    let again = in_queue("mail", json!({ "idempotency_key": "key" }));
    let whole = reader.post("/jobs", &again).await.expect_status(200).json();
    assert_eq!(whole, reader.get(&format!("/jobs/{id}")).await.expect_status(200).json());
}

async fn a_token_that_may_only_enqueue_sees_the_whole_job_that_it_has_created(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let (_, secret) = token(&fixture, Scope::Enqueue, None).await;
    let body = in_queue("mail", json!({ "idempotency_key": "mine", "unique_key": "mine-too" }));
    let created = http.with_token(&secret).post("/jobs", &body).await.expect_status(201).json();
    assert_eq!((&created["payload"], &created["unique_key"]), (&json!("mail"), &json!("mine-too")));
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let id = created["id"].as_str().expect("an id");
    let read = http.with_token(&secret).get(&format!("/jobs/{id}")).await.expect_status(200).json();
    assert_eq!(created, read);
}

async fn a_token_that_may_only_enqueue_does_not_read_an_existing_flow_or_event(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let (_, secret) = token(&fixture, Scope::Enqueue, None).await;
    let enqueuer = http.with_token(&secret);
    let created = enqueuer.post("/flows", &flow(&["mail"])).await.expect_status(201).json();
    assert_eq!(created["name"], "import");
    let existing = enqueuer.post("/flows", &flow(&["mail"])).await.expect_status(200).json();
    assert_eq!(existing, json!({ "id": created["id"], "status": "running", "enqueued_as": "existing" }));
    let reader = producer(&http, &fixture, None).await;
    assert_eq!(reader.post("/flows", &flow(&["mail"])).await.expect_status(200).json(), created);
    // Nor when it adds jobs or seals it.
    let mut growing = flow(&["mail"]);
    (growing["idempotency_key"], growing["sealed"]) = (json!("secret-key"), json!(false));
    let growing = reader.post("/flows", &growing).await.expect_status(201).json();
    let path = format!("/flows/{}", growing["id"].as_str().expect("an id"));
    let part = json!({ "jobs": [{ "kind": "greet", "payload": 1, "queue": "mail" }] });
    let expected = json!({ "id": growing["id"], "status": "running" });
    assert_eq!(enqueuer.post(&format!("{path}/jobs"), &part).await.expect_status(200).json(), expected);
    assert_eq!(reader.post(&format!("{path}/jobs"), &part).await.expect_status(200).json()["members"], 3);
    let seal = format!("{path}/seal");
    assert_eq!(enqueuer.send("POST", &seal, &[], "").await.expect_status(200).json(), expected);
    assert_eq!(reader.send("POST", &seal, &[], "").await.expect_status(200).json()["sealed"], true);

    let event = |payload: &str| json!({ "name": "approved", "payload": payload });
    reader.post("/events", &event("secret")).await.expect_status(201);
    let repeated = enqueuer.post("/events", &event("mine")).await.expect_status(200);
    assert!(!repeated.text.contains("secret"), "{repeated:?}");
    assert_eq!(repeated.json()["name"], "approved");
    assert_eq!(reader.post("/events", &event("mine")).await.expect_status(200).json()["payload"], "secret");
}

async fn a_token_that_may_only_operate_does_not_read_what_it_changes(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    let id = secret_job(&fixture, "mail").await;
    let path = format!("/jobs/{id}");
    let (_, secret) = token(&fixture, Scope::Operate, None).await;
    let operator = http.with_token(&secret);
    let (_, secret) = token_with(&fixture, &[Scope::Operate, Scope::Read], None).await;
    let reader = http.with_token(&secret);
    let edit = json!({ "priority": 7 });
    assert_reference(&operator.json("PATCH", &path, &edit).await.expect_status(200), id, "queued", None);
    let whole = reader.json("PATCH", &path, &edit).await.expect_status(200).json();
    assert_eq!((&whole["priority"], &whole["payload"]), (&json!(7), &json!("secret-payload")));
    for body in [json!({}), json!({ "delay_seconds": 60 })] {
        let retried = operator.post(&format!("{path}/retry"), &body).await.expect_status(200);
        assert_reference(&retried, id, "queued", None);
    }
    let cancelled = operator.send("POST", &format!("{path}/cancel"), &[], "").await.expect_status(200);
    assert_eq!(cancelled.json(), json!({ "status": "cancelled", "job_id": id }));

    let dead =
        fixture.ended(job("greet").context("secret-context"), longshore::Outcome::FailedPermanent).await;
    let redriven = operator.send("POST", &format!("/dead-letters/{dead}/redrive"), &[], "").await;
    assert_reference(&redriven.expect_status(200), dead, "queued", None);
    assert_eq!(fixture.status(dead).await, Status::Queued);

    let schedule = json!({ "cron": "0 3 * * *", "job": { "kind": "greet", "payload": "secret-payload" } });
    let stored = operator.json("PUT", "/cron/nightly", &schedule).await.expect_status(200).json();
    assert_eq!(stored["job"]["payload"], "secret-payload", "its own contents");
    for change in ["pause", "resume"] {
        let path = format!("/cron/nightly/{change}");
        let changed = operator.send("POST", &path, &[], "").await.expect_status(200);
        assert!(!changed.text.contains("secret"), "{changed:?}");
        assert_eq!(changed.json()["paused"], change == "pause");
        let changed = reader.send("POST", &path, &[], "").await.expect_status(200).json();
        assert_eq!(changed["job"]["payload"], "secret-payload");
    }
    // A server without tokens has no scopes.
    let open = HttpClient::for_api(
        Api::new(fixture.client()).access(Access::Open).unknown_kinds(UnknownKinds::Allow),
    );
    let whole = open.post("/jobs", &in_queue("mail", json!({ "idempotency_key": "key" }))).await;
    assert_eq!(whole.expect_status(200).json()["payload"], "secret-payload");
}

async fn a_refused_retry_names_no_job_of_another_queue(fixture: Fixture) {
    let keyed = |queue: &str| job("greet").queue(queue).unique_key("account", UniqueMode::Dedupe);
    let mine = fixture.add(keyed("mail")).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_from("mail", worker, 1).await.remove(0);
    fixture.must_finish(&claimed, failed_permanently()).await;
    let theirs = fixture.add(keyed("other")).await;
    let http = with_tokens_required(&fixture);
    let (_, secret) = token(&fixture, Scope::Operate, Some(&["mail"])).await;
    let (_, unlimited) = token(&fixture, Scope::Operate, None).await;
    for path in [format!("/jobs/{mine}/retry"), format!("/dead-letters/{mine}/redrive")] {
        let refused = http.with_token(&secret).send("POST", &path, &[], "").await;
        let refused = refused.expect_problem(409, "conflict", "a job of another queue");
        assert!(!refused.text.contains(&theirs.to_string()), "{refused:?}");
        assert_eq!(refused.json()["job_status"], "failed_permanent");
        let refused = http.with_token(&unlimited).send("POST", &path, &[], "").await;
        refused.expect_problem(409, "conflict", &theirs.to_string());
    }
}
