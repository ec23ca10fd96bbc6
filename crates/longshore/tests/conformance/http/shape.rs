//! What a body looks like: what serde, or a habit of clients, would let through
//! without a word.

use longshore::api::{Admission, Api, UnknownKinds};
use longshore::store::NewKind;
use serde_json::json;

use super::web::Web;
use crate::bench::{Bench, MINUTE, job, raw};

cases! {
    a_list_of_values_is_no_object_anywhere,
    a_mistake_within_is_told_by_its_name,
    a_delay_of_more_than_ten_years_is_refused,
    a_payload_is_changed_to_null_but_not_to_too_much,
    a_batch_refuses_a_key_for_all_of_it,
    a_worker_names_at_most_a_thousand_kinds_and_leases,
    a_kind_whose_schema_cannot_be_used_takes_nothing,
    follow_ups_wait_for_room_as_other_jobs_do,
    a_rate_is_over_the_same_time_however_short_the_series,
}

async fn a_list_of_values_is_no_object_anywhere(bench: Bench) {
    let web = Web::new(&bench);
    let nobody = "01990000-0000-7000-8000-000000000000";
    let leased = web.post("/leases", &json!({})).await.is(200).json();
    let me = &leased["worker_id"];
    for (method, path, body) in [
        ("POST", "/jobs", json!(["greet", 1])),
        ("POST", "/jobs", json!({ "kind": "greet", "payload": 1, "retry": ["fixed", { "delay_ms": 1 }] })),
        ("POST", "/jobs/bulk", json!({ "action": "retry", "filter": ["queued"], "dry_run": true })),
        ("PUT", "/cron/tick", json!({ "cron": "* * * * *", "job": ["greet", 1] })),
        ("PUT", "/kinds/greet", json!({ "defaults": ["mail"] })),
        ("PUT", "/kinds/greet", json!({ "defaults": { "retry": ["none"] } })),
        ("POST", "/leases", json!({ "worker_id": me, "held": [[nobody, 1]] })),
        ("POST", "/leases/renew", json!({ "worker_id": me, "leases": [[nobody, 1]] })),
        ("POST", "/leases/renew", json!({ "worker_id": me, "progress": [[nobody, 1, 50]] })),
        ("POST", "/leases/settle", json!({ "worker_id": me, "items": [[nobody, 1, "released"]] })),
        (
            "POST",
            "/leases/settle",
            json!({ "worker_id": me, "items": [
                { "id": nobody, "lease_no": 1, "outcome": "succeeded", "follow_ups": [["greet", 1]] },
            ] }),
        ),
    ] {
        web.json(method, path, &body).await.is_problem(422, "validation", "object");
    }
    let batch = web.post("/jobs/batch", &json!([["greet", 1]])).await.is(200).json();
    assert_eq!(batch["refused"], 1);
    assert!(bench.list(&longshore::store::ListFilter::default()).await.expect("list").jobs.is_empty());
}

async fn a_mistake_within_is_told_by_its_name(bench: Bench) {
    let web = Web::new(&bench);
    let body = json!({ "kind": "greet", "payload": 1, "retry": { "policy": "fixed", "delay_ms": "soon" } });
    web.post("/jobs", &body).await.is_problem(422, "validation", "soon");
    let body = json!({ "action": "retry", "filter": { "colour": "red" } });
    web.post("/jobs/bulk", &body).await.is_problem(422, "validation", "colour");
    let none = json!({ "kind": "greet", "payload": 1, "retry": null });
    web.post("/jobs", &none).await.is(201);
}

async fn a_delay_of_more_than_ten_years_is_refused(bench: Bench) {
    let web = Web::new(&bench);
    let longest: u64 = 315_360_000_000;
    for (too_long, status) in [(longest, 201), (longest + 1, 422), (1 << 63, 422), (u64::MAX, 422)] {
        for retry in [
            json!({ "policy": "fixed", "delay_ms": too_long }),
            json!({ "policy": "exponential", "cap_ms": too_long }),
            json!({ "policy": "jitter", "base_ms": 1, "cap_ms": too_long }),
            json!({ "policy": "list", "delays_ms": [1, too_long, 2] }),
        ] {
            let answer = web.post("/jobs", &json!({ "kind": "greet", "payload": 1, "retry": retry })).await;
            assert_eq!(answer.status, status, "{retry}: {answer:?}");
            if status == 422 {
                answer.is_problem(422, "validation", "retry: ");
            }
        }
    }
}

async fn a_payload_is_changed_to_null_but_not_to_too_much(bench: Bench) {
    let web = Web::new(&bench);
    let path = format!("/jobs/{}", bench.add(job("greet")).await);
    let before = web.get(&path).await.is(200).json();
    let kept = web.json("PATCH", &path, &json!({ "priority": 3 })).await.is(200).json();
    assert_eq!(kept["payload"], before["payload"], "what is absent stays");
    assert!(!before["payload"].is_null());
    let edited = web.json("PATCH", &path, &json!({ "payload": null })).await.is(200).json();
    assert_eq!((&edited["payload"], &edited["priority"]), (&json!(null), &json!(3)));
    let large = |n: usize| json!({ "payload": "p".repeat(n) });
    web.json("PATCH", &path, &large(1024 * 1024)).await.is_problem(413, "too_large", "payload");
    web.json("PATCH", &path, &large(1024 * 1024 - 2)).await.is(200);
}

async fn a_batch_refuses_a_key_for_all_of_it(bench: Bench) {
    let web = Web::new(&bench);
    let headers = [("content-type", "application/json"), ("idempotency-key", "all of them")];
    let body = json!([{ "kind": "greet", "payload": 1 }, { "kind": "greet", "payload": 2 }]).to_string();
    let refused = web.send("POST", "/jobs/batch", &headers, &body).await;
    refused.is_problem(422, "validation", "idempotency_key");
    assert_eq!(web.get("/jobs").await.is(200).json(), json!([]));
}

async fn a_worker_names_at_most_a_thousand_kinds_and_leases(bench: Bench) {
    let web = Web::new(&bench);
    let kinds: Vec<String> = (0..1001).map(|i| format!("kind-{i}")).collect();
    web.post("/leases", &json!({ "kinds": kinds })).await.is_problem(422, "validation", "kinds: 1001");
    web.post("/leases", &json!({ "kinds": kinds[1..] })).await.is(200);
    let held = vec![json!({ "id": "01990000-0000-7000-8000-000000000000", "lease_no": 1 }); 1001];
    web.post("/leases", &json!({ "held": held })).await.is_problem(422, "validation", "held: 1001");
}

async fn a_kind_whose_schema_cannot_be_used_takes_nothing(bench: Bench) {
    // As a worker publishes it: nothing checks it there.
    let broken = NewKind { schema: Some(raw(r#"{"type":"moon"}"#)), ..NewKind::new("greet") };
    bench.put_kinds(&[broken, NewKind::new("wave")]).await.expect("stored");
    let web = Web::new(&bench);
    let greet = json!({ "kind": "greet", "payload": 1 });
    web.post("/jobs", &greet).await.is_problem(422, "validation", "PUT /kinds/{kind}");
    let batch = web.post("/jobs/batch", &json!([greet, { "kind": "wave", "payload": 1 }])).await.is(200);
    assert_eq!((&batch.json()["created"], &batch.json()["refused"]), (&json!(1), &json!(1)));
    web.json("PUT", "/kinds/greet", &json!({ "schema": { "type": "integer" } })).await.is(200);
    web.post("/jobs", &greet).await.is(201);
}

async fn follow_ups_wait_for_room_as_other_jobs_do(bench: Bench) {
    let short = Admission { waiting_jobs: Some(1), ..Admission::default() };
    let web = Web::of(Api::new(bench.handle()).unknown_kinds(UnknownKinds::Allow).admission(short));
    bench.add(job("greet").queue("here")).await;
    bench.add(job("greet").queue("full")).await;
    let leased = web.post("/leases", &json!({ "queues": ["here"] })).await.is(200).json();
    let settle = |queue: &str| {
        let lease = &leased["jobs"][0];
        json!({ "worker_id": leased["worker_id"], "items": [{
            "id": lease["id"], "lease_no": lease["lease_no"], "outcome": "succeeded",
            "follow_ups": [{ "kind": "next", "payload": 1, "queue": queue }],
        }] })
    };
    let refused = web.post("/leases/settle", &settle("full")).await;
    let refused = refused.is_problem(429, "rate_limited", "items[0]: queue");
    assert!(!refused.header("retry-after").is_empty(), "it says when to come back");
    let stored = web.post("/leases/settle", &settle("roomy")).await.is(200).json();
    assert_eq!(stored["items"][0]["settled"], "stored", "nothing was lost by the refusal");
}

async fn a_rate_is_over_the_same_time_however_short_the_series(bench: Bench) {
    let web = Web::new(&bench);
    for _ in 0..6 {
        bench.ended(job("greet"), longshore::Outcome::Succeeded).await;
    }
    bench.advance(2 * MINUTE).await;
    let (short, long) = (web.get("/stats?minutes=1").await, web.get("/stats?minutes=60").await);
    let (short, long) = (short.is(200).json(), long.is(200).json());
    assert_eq!(short["per_second"], long["per_second"]);
    assert_eq!(long["per_second"], json!(6.0 / 300.0));
    assert_eq!((&short["series"], long["series"].as_array().map(Vec::len)), (&json!([]), Some(1)));
}
