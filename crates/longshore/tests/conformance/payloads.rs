//! The client checks the kind and the payload of every new job, whichever way it is
//! enqueued, and before it looks up a key.

use longshore::{Edit, Error, NewJob, NewKind, NewSchedule, Status, UnknownKinds};

use crate::fixture::*;

cases! {
    a_payload_must_match_the_schema_of_its_kind_on_every_path,
    a_payload_is_checked_before_its_key_is_looked_up,
    an_edited_payload_must_match_the_schema_of_its_kind,
    a_schema_put_by_another_client_takes_effect,
    a_kind_without_a_valid_schema_refuses_its_jobs,
    an_unknown_kind_is_allowed_unless_the_client_refuses_it,
    a_built_in_check_applies_to_its_kind_only,
}

/// Registers the kind `mail`, whose payload must be an object with a string `to`.
async fn register_mail(fixture: &Fixture) {
    let schema = raw(r#"{"type":"object","required":["to"],"properties":{"to":{"type":"string"}}}"#);
    let kind = NewKind { schema: Some(schema), ..NewKind::new("mail") };
    fixture.put_kinds(&[kind]).await.expect("put_kinds");
}

fn good() -> NewJob {
    NewJob::new("mail", &serde_json::json!({ "to": "ada" }))
}

fn bad() -> NewJob {
    NewJob::new("mail", &serde_json::json!({ "to": 7 }))
}

fn is_about(error: &Error, field: &str, text: &str) {
    assert_eq!(error.field(), Some(field), "{error}");
    assert!(error.to_string().contains(text), "{error}");
}

async fn a_payload_must_match_the_schema_of_its_kind_on_every_path(fixture: Fixture) {
    register_mail(&fixture).await;
    is_about(&fixture.enqueue(bad()).await.expect_err("one"), "payload", "payload/to: ");
    let many = fixture.enqueue_many([good(), bad()]).await.expect_err("many");
    is_about(&many, "jobs[1].payload", "jobs[1]: payload/to: ");
    let schedule = NewSchedule::new("nightly", "0 2 * * *", bad());
    is_about(&fixture.put_schedule(schedule).await.expect_err("schedule"), "payload", "payload/to: ");
    let in_transaction = match fixture.engine() {
        Engine::Postgres => {
            let mut connection = fixture.postgres().await;
            fixture.enqueue_in(&mut connection, [bad()]).await
        }
        Engine::Sqlite => tokio::task::block_in_place(|| {
            let connection = rusqlite::Connection::open(fixture.file()).expect("open");
            tokio::runtime::Handle::current().block_on(fixture.enqueue_in(&connection, [bad()]))
        }),
    };
    is_about(&in_transaction.expect_err("transaction"), "jobs[0].payload", "payload/to: ");
    assert_eq!(fixture.count(Status::Queued).await, 0, "nothing was stored");
    fixture.add(good()).await;
    fixture.put_schedule(NewSchedule::new("nightly", "0 2 * * *", good())).await.expect("put_schedule");
}

async fn a_payload_is_checked_before_its_key_is_looked_up(fixture: Fixture) {
    register_mail(&fixture).await;
    fixture.add(good().idempotency_key("once")).await;
    let repeated = fixture.enqueue(bad().idempotency_key("once")).await;
    is_about(&repeated.expect_err("invalid"), "payload", "payload/to: ");
}

async fn an_edited_payload_must_match_the_schema_of_its_kind(fixture: Fixture) {
    register_mail(&fixture).await;
    let id = fixture.add(good()).await;
    let edited = fixture.edit(id, Edit::default().payload(r#"{"to":7}"#)).await;
    is_about(&edited.expect_err("invalid"), "payload", "payload/to: ");
    assert_eq!(fixture.job(id).await.payload.get(), r#"{"to":"ada"}"#);
    fixture.edit(id, Edit::default().payload(r#"{"to":"grace"}"#)).await.expect("edit");
}

async fn a_schema_put_by_another_client_takes_effect(fixture: Fixture) {
    fixture.add(bad()).await;
    let other = fixture.second_client().await;
    let kind = NewKind { schema: Some(raw("false")), ..NewKind::new("mail") };
    other.put_kinds(&[kind]).await.expect("put_kinds");
    crate::worker::until("the schema applies", || async { fixture.enqueue(bad()).await.is_err() }).await;
}

async fn a_kind_without_a_valid_schema_refuses_its_jobs(fixture: Fixture) {
    let kind = NewKind { schema: Some(raw(r#"{"type":"nonsense"}"#)), ..NewKind::new("mail") };
    fixture.put_kinds(&[kind]).await.expect("put_kinds");
    is_about(&fixture.enqueue(good()).await.expect_err("unusable"), "kind", "schema of `mail` is invalid");
    fixture.add(job("sms")).await;
}

async fn an_unknown_kind_is_allowed_unless_the_client_refuses_it(fixture: Fixture) {
    fixture.add(job("greet")).await;
    let strict = fixture.client().unknown_kinds(UnknownKinds::Refuse);
    let refused = strict.enqueue(job("greet")).await.expect_err("unknown");
    is_about(&refused, "kind", "`greet` is not registered");
    strict.put_kinds(&[NewKind::new("greet")]).await.expect("put_kinds");
    strict.enqueue(job("greet")).await.expect("registered now");
    let mistyped = strict.enqueue(job("gret")).await.expect_err("unknown");
    is_about(&mistyped, "kind", "`gret` is not registered (did you mean `greet`?); start a worker");
    let unlike = strict.enqueue(job("report")).await.expect_err("unknown");
    assert!(!unlike.to_string().contains("did you mean"), "{unlike}");
}

async fn a_built_in_check_applies_to_its_kind_only(fixture: Fixture) {
    let client = fixture.client().unknown_kinds(UnknownKinds::Refuse).check_payloads(|kind, payload| {
        let check = || if payload == "1" { Ok(()) } else { Err("must be 1".into()) };
        (kind == "one").then(check)
    });
    client.enqueue(NewJob::new("one", &1)).await.expect("valid");
    is_about(
        &client.enqueue(NewJob::new("one", &2)).await.expect_err("invalid"),
        "payload",
        "payload: must be 1",
    );
    is_about(&client.enqueue(NewJob::new("two", &1)).await.expect_err("unknown"), "kind", "`two`");
}
