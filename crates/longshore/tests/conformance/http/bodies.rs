//! Request bodies that serde would accept silently, or that clients often get wrong.

use longshore::api::{Admission, Api, Limits};
use longshore::{NewKind, UnknownKinds};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{HttpClient, parse};
use crate::fixture::{Fixture, job, raw};

cases! {
    an_array_is_not_accepted_in_place_of_an_object,
    an_error_in_a_nested_field_names_it,
    a_delay_of_more_than_ten_years_is_refused,
    a_payload_can_be_edited_to_null_but_not_beyond_its_limit,
    a_batch_refuses_an_idempotency_key_header,
    a_worker_may_name_at_most_a_thousand_kinds_and_leases,
    a_kind_with_an_unusable_schema_refuses_jobs,
    follow_ups_are_subject_to_the_limit_on_waiting_jobs,
    each_job_of_a_batch_is_validated_like_a_single_job,
    a_compressed_body_is_refused_before_it_is_read,
    a_client_that_reads_after_sending_a_too_large_body_gets_the_refusal,
}

async fn an_array_is_not_accepted_in_place_of_an_object(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let unknown = "01990000-0000-7000-8000-000000000000";
    let leased = http.post("/leases", &json!({})).await.expect_status(200).json();
    let worker = &leased["worker_id"];
    for (method, path, body) in [
        ("POST", "/jobs", json!(["greet", 1])),
        ("POST", "/jobs", json!({ "kind": "greet", "payload": 1, "retry": ["fixed", { "delay_ms": 1 }] })),
        ("POST", "/jobs/bulk", json!({ "action": "retry", "filter": ["queued"], "dry_run": true })),
        ("PUT", "/cron/tick", json!({ "cron": "* * * * *", "job": ["greet", 1] })),
        ("PUT", "/kinds/greet", json!({ "defaults": ["mail"] })),
        ("PUT", "/kinds/greet", json!({ "defaults": { "retry": ["none"] } })),
        ("POST", "/leases", json!({ "worker_id": worker, "held": [[unknown, 1]] })),
        ("POST", "/leases/renew", json!({ "worker_id": worker, "leases": [[unknown, 1]] })),
        ("POST", "/leases/renew", json!({ "worker_id": worker, "progress": [[unknown, 1, 50]] })),
        ("POST", "/leases/settle", json!({ "worker_id": worker, "items": [[unknown, 1, "released"]] })),
        (
            "POST",
            "/leases/settle",
            json!({ "worker_id": worker, "items": [
                { "id": unknown, "lease_no": 1, "outcome": "succeeded", "follow_ups": [["greet", 1]] },
            ] }),
        ),
    ] {
        http.json(method, path, &body).await.expect_problem(422, "validation", "object");
    }
    let batch = http.post("/jobs/batch", &json!([["greet", 1]])).await.expect_status(200).json();
    assert_eq!(batch["refused"], 1);
    assert!(fixture.list(&longshore::ListFilter::default()).await.expect("list").jobs.is_empty());
}

async fn an_error_in_a_nested_field_names_it(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let body = json!({ "kind": "greet", "payload": 1, "retry": { "policy": "fixed", "delay_ms": "soon" } });
    http.post("/jobs", &body).await.expect_problem(422, "validation", "soon");
    let body = json!({ "action": "retry", "filter": { "colour": "red" } });
    http.post("/jobs/bulk", &body).await.expect_problem(422, "validation", "colour");
    let none = json!({ "kind": "greet", "payload": 1, "retry": null });
    http.post("/jobs", &none).await.expect_status(201);
}

async fn a_delay_of_more_than_ten_years_is_refused(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let longest: u64 = 315_360_000_000;
    for (delay, status) in [(longest, 201), (longest + 1, 422), (1 << 63, 422), (u64::MAX, 422)] {
        for retry in [
            json!({ "policy": "fixed", "delay_ms": delay }),
            json!({ "policy": "exponential", "cap_ms": delay }),
            json!({ "policy": "jitter", "base_ms": 1, "cap_ms": delay }),
            json!({ "policy": "list", "delays_ms": [1, delay, 2] }),
        ] {
            let response =
                http.post("/jobs", &json!({ "kind": "greet", "payload": 1, "retry": retry })).await;
            assert_eq!(response.status, status, "{retry}: {response:?}");
            if status == 422 {
                response.expect_problem(422, "validation", "retry: ");
            }
        }
    }
}

async fn a_payload_can_be_edited_to_null_but_not_beyond_its_limit(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let path = format!("/jobs/{}", fixture.add(job("greet")).await);
    let before = http.get(&path).await.expect_status(200).json();
    let kept = http.json("PATCH", &path, &json!({ "priority": 3 })).await.expect_status(200).json();
    assert_eq!(kept["payload"], before["payload"], "an absent field must not change");
    assert!(!before["payload"].is_null());
    let edited = http.json("PATCH", &path, &json!({ "payload": null })).await.expect_status(200).json();
    assert_eq!((&edited["payload"], &edited["priority"]), (&json!(null), &json!(3)));
    let large = |n: usize| json!({ "payload": "p".repeat(n) });
    http.json("PATCH", &path, &large(1024 * 1024)).await.expect_problem(413, "too_large", "payload");
    http.json("PATCH", &path, &large(1024 * 1024 - 2)).await.expect_status(200);
}

async fn a_batch_refuses_an_idempotency_key_header(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let headers = [("content-type", "application/json"), ("idempotency-key", "batch-7")];
    let body = json!([{ "kind": "greet", "payload": 1 }, { "kind": "greet", "payload": 2 }]).to_string();
    let refused = http.send("POST", "/jobs/batch", &headers, &body).await;
    refused.expect_problem(422, "validation", "idempotency_key");
    assert_eq!(http.get("/jobs").await.expect_status(200).json(), json!([]));
}

async fn a_worker_may_name_at_most_a_thousand_kinds_and_leases(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let kinds: Vec<String> = (0..1001).map(|i| format!("kind-{i}")).collect();
    http.post("/leases", &json!({ "kinds": kinds })).await.expect_problem(422, "validation", "kinds: 1001");
    http.post("/leases", &json!({ "kinds": kinds[1..] })).await.expect_status(200);
    let held = vec![json!({ "id": "01990000-0000-7000-8000-000000000000", "lease_no": 1 }); 1001];
    http.post("/leases", &json!({ "held": held })).await.expect_problem(422, "validation", "held: 1001");
}

async fn a_kind_with_an_unusable_schema_refuses_jobs(fixture: Fixture) {
    // Workers can publish a schema that was not checked.
    let broken = NewKind { schema: Some(raw(r#"{"type":"moon"}"#)), ..NewKind::new("greet") };
    fixture.put_kinds(&[broken, NewKind::new("wave")]).await.expect("put_kinds");
    let http = HttpClient::new(&fixture);
    let greet = json!({ "kind": "greet", "payload": 1 });
    http.post("/jobs", &greet).await.expect_problem(422, "validation", "PUT /kinds/{kind}");
    let batch =
        http.post("/jobs/batch", &json!([greet, { "kind": "wave", "payload": 1 }])).await.expect_status(200);
    assert_eq!((&batch.json()["created"], &batch.json()["refused"]), (&json!(1), &json!(1)));
    http.json("PUT", "/kinds/greet", &json!({ "schema": { "type": "integer" } })).await.expect_status(200);
    http.post("/jobs", &greet).await.expect_status(201);
}

async fn follow_ups_are_subject_to_the_limit_on_waiting_jobs(fixture: Fixture) {
    let short = Admission { waiting_jobs: Some(1), ..Admission::default() };
    let http =
        HttpClient::for_api(Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).admission(short));
    fixture.add(job("greet").queue("source")).await;
    fixture.add(job("greet").queue("full")).await;
    let leased = http.post("/leases", &json!({ "queues": ["source"] })).await.expect_status(200).json();
    let settle = |queue: &str| {
        let lease = &leased["jobs"][0];
        json!({ "worker_id": leased["worker_id"], "items": [{
            "id": lease["id"], "lease_no": lease["lease_no"], "outcome": "succeeded",
            "follow_ups": [{ "kind": "next", "payload": 1, "queue": queue }],
        }] })
    };
    let refused = http.post("/leases/settle", &settle("full")).await;
    let refused = refused.expect_problem(429, "rate_limited", "items[0]: queue");
    assert!(!refused.header("retry-after").is_empty(), "retry-after is missing");
    let stored = http.post("/leases/settle", &settle("empty")).await.expect_status(200).json();
    assert_eq!(stored["items"][0]["settled"], "stored", "the refused settle must not end the lease");
}

async fn each_job_of_a_batch_is_validated_like_a_single_job(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let large = json!({ "kind": "a", "payload": "p".repeat(1024 * 1024) });
    let items = json!([
        large,
        { "kind": "a", "payload": "a\u{0}b" },
        { "kind": "a", "payload": 1, "colour": "red" },
    ]);
    let response = http.post("/jobs/batch", &items).await.expect_status(200).json();
    let item =
        |i: usize| (response["items"][i]["error"].clone(), response["items"][i]["message"].to_string());
    for (i, slug, part) in
        [(0, "too_large", "payload"), (1, "validation", "NUL"), (2, "validation", "colour")]
    {
        let (error, message) = item(i);
        assert_eq!(error, slug, "{message}");
        assert!(message.contains(part), "{message}");
    }
}

async fn a_compressed_body_is_refused_before_it_is_read(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    for path in ["/jobs", "/jobs/batch", "/sweep", "/leases"] {
        let headers = [("content-type", "application/json"), ("content-encoding", "gzip")];
        let refused = http.send("POST", path, &headers, "\u{1f}\u{8b}").await;
        let refused = refused.expect_problem(415, "unsupported_media_type", "`gzip`");
        assert_eq!(refused.header("accept-encoding"), "identity");
    }
    let mut announced = TcpStream::connect(http.address()).await.expect("connect");
    let head = "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
                content-encoding: identity, br\r\ncontent-length: 9\r\n\r\n";
    announced.write_all(head.as_bytes()).await.expect("write");
    let mut response = vec![0; 4096];
    // The response arrives although no byte of the body was sent.
    let length = announced.read(&mut response).await.expect("a response");
    parse(&response[..length]).expect_problem(415, "unsupported_media_type", "`br`");
    let headers = [("content-type", "application/json"), ("content-encoding", "identity")];
    let body = json!({ "kind": "greet", "payload": 1 }).to_string();
    http.send("POST", "/jobs", &headers, &body).await.expect_status(201);
}

async fn a_client_that_reads_after_sending_a_too_large_body_gets_the_refusal(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    const MIB: usize = 1024 * 1024;
    for (path, mib) in [("/jobs", 16), ("/jobs/batch", 31)] {
        let chunked = format!("100000\r\n{}\r\n", " ".repeat(MIB)).into_bytes();
        for framing in [format!("content-length: {}", mib * MIB), "transfer-encoding: chunked".into()] {
            let mut stream = TcpStream::connect(http.address()).await.expect("connect");
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
            );
            stream.write_all(head.as_bytes()).await.expect("write");
            let is_chunked = framing.starts_with("transfer");
            for _ in 0..mib {
                let sent = if is_chunked { &chunked[..] } else { &chunked[8..8 + MIB] };
                stream.write_all(sent).await.unwrap_or_else(|error| panic!("{path} {framing}: {error}"));
            }
            if is_chunked {
                stream.write_all(b"0\r\n\r\n").await.expect("write");
            }
            // The connection still works, because the whole body was read.
            for (request, status) in [("", 413), ("GET /health HTTP/1.1\r\nhost: a\r\n\r\n", 200)] {
                stream.write_all(request.as_bytes()).await.expect("write");
                let mut response = vec![0; 4096];
                let length = stream.read(&mut response).await.expect("a response");
                parse(&response[..length]).expect_status(status);
            }
        }
    }
    // A client that asks first does not send the body.
    let mut asking = TcpStream::connect(http.address()).await.expect("connect");
    let head = format!(
        "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n\
         content-length: {}\r\n\r\n",
        8 * MIB
    );
    asking.write_all(head.as_bytes()).await.expect("write");
    let mut response = Vec::new();
    asking.read_to_end(&mut response).await.expect("the server closes the connection");
    parse(&response).expect_problem(413, "too_large", "larger than");
}
