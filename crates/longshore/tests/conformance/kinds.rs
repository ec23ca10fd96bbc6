//! The kinds of job that the engine stores, with their payload schemas and defaults.

use chrono::{DateTime, Utc};
use longshore::store::{KindFilter, KindQueues, Schemas};
use longshore::{KindRecord, NewJob, NewKind, UnknownKinds};

use crate::fixture::*;

cases! {
    kinds_are_stored_exactly_and_listed_by_name,
    a_kind_put_again_is_replaced,
    a_kind_of_all_queues_is_not_changed_for_one_queue,
    a_kind_of_all_queues_replaces_those_of_single_queues,
    a_kind_of_a_queue_applies_only_to_jobs_of_that_queue,
    kinds_of_single_queues_are_limited_in_number_and_in_bytes,
    kinds_of_all_single_queues_together_are_limited_in_bytes,
    kinds_are_listed_in_pages_with_or_without_schemas,
    a_kind_put_without_a_schema_keeps_the_one_it_has,
    the_last_entry_of_a_kind_in_one_call_wins,
    removing_a_kind_returns_whether_it_existed,
    an_invalid_kind_is_refused_by_field_and_nothing_is_stored,
    concurrent_puts_of_the_same_kinds_all_succeed,
}

/// Name, schema, defaults and time of the last change.
fn fields(kind: &KindRecord) -> (&str, Option<&str>, Option<&str>, DateTime<Utc>) {
    (
        &kind.name,
        kind.schema.as_ref().map(|json| json.get()),
        kind.defaults.as_ref().map(|json| json.get()),
        kind.updated_at,
    )
}

async fn put_kinds(fixture: &Fixture, kinds: &[NewKind]) {
    fixture.put_kinds(kinds).await.expect("put_kinds");
}

async fn kinds_of(fixture: &Fixture) -> Vec<KindRecord> {
    fixture.store().kinds(&KindFilter::default()).await.expect("kinds")
}

async fn kinds_are_stored_exactly_and_listed_by_name(fixture: Fixture) {
    put_kinds(
        &fixture,
        &[
            NewKind {
                schema: Some(raw(r#"{ "type": "object" }"#)),
                defaults: Some(raw(r#"{"priority":5}"#)),
                ..NewKind::new("sms")
            },
            NewKind::new("mail"),
            NewKind { defaults: Some(raw("null")), ..NewKind::new("Zebra") },
        ],
    )
    .await;
    let kinds = kinds_of(&fixture).await;
    let expected = [
        ("Zebra", None, Some("null"), start()),
        ("mail", None, None, start()),
        ("sms", Some(r#"{ "type": "object" }"#), Some(r#"{"priority":5}"#), start()),
    ];
    assert_eq!(kinds.iter().map(fields).collect::<Vec<_>>(), expected);
    put_kinds(&fixture, &[]).await;
    assert_eq!(kinds_of(&fixture).await.len(), 3);
}

async fn a_kind_put_again_is_replaced(fixture: Fixture) {
    let kind = |schema: &str, defaults: &str| NewKind {
        schema: Some(raw(schema)),
        defaults: Some(raw(defaults)),
        ..NewKind::new("mail")
    };
    put_kinds(&fixture, &[kind("1", "2")]).await;
    fixture.advance(MINUTE).await;
    put_kinds(&fixture, &[kind("3", "4")]).await;
    let kinds = kinds_of(&fixture).await;
    assert_eq!(fields(&kinds[0]), ("mail", Some("3"), Some("4"), start() + MINUTE));
    assert_eq!(kinds.len(), 1);
}

/// Stores kinds for jobs of these queues only.
async fn put_for(fixture: &Fixture, queues: &[&str], kinds: &[NewKind]) -> longshore::Result<()> {
    let queues = KindQueues::Only(queues.iter().map(|queue| (*queue).to_owned()).collect());
    fixture.store().put_kinds(kinds, &queues).await
}

fn with_schema(name: &str, schema: &str) -> NewKind {
    NewKind { schema: Some(raw(schema)), ..NewKind::new(name) }
}

/// Name, queue and schema.
fn places(kinds: &[KindRecord]) -> Vec<(&str, Option<&str>, Option<&str>)> {
    let place = |kind: &KindRecord| kind.schema.as_ref().map(|json| json.get().to_owned());
    assert!(kinds.iter().all(|kind| kind.has_schema == place(kind).is_some()));
    kinds
        .iter()
        .map(|kind| (kind.name.as_str(), kind.queue.as_deref(), kind.schema.as_ref().map(|json| json.get())))
        .collect()
}

async fn a_kind_of_all_queues_is_not_changed_for_one_queue(fixture: Fixture) {
    put_kinds(&fixture, &[with_schema("mail", "1"), NewKind::new("sms")]).await;
    fixture.advance(MINUTE).await;
    let kinds = [with_schema("mail", "2"), with_schema("sms", "3"), with_schema("wave", "4")];
    put_for(&fixture, &["alpha", "beta"], &kinds).await.expect("put_kinds");
    // Only what is given changes, and the queue that is not named keeps what it has.
    let defaults = NewKind { defaults: Some(raw("5")), ..NewKind::new("wave") };
    put_for(&fixture, &["beta"], &[defaults]).await.expect("put_kinds");
    let kinds = kinds_of(&fixture).await;
    let expected = [
        ("mail", None, Some("1")),
        ("sms", None, None),
        ("wave", Some("alpha"), Some("4")),
        ("wave", Some("beta"), Some("4")),
    ];
    assert_eq!(places(&kinds), expected);
    let defaults: Vec<_> = kinds.iter().map(|kind| kind.defaults.as_ref().map(|json| json.get())).collect();
    assert_eq!(defaults, [None, None, None, Some("5")]);
    assert_eq!((kinds[0].updated_at, kinds[2].updated_at), (start(), start() + MINUTE));
}

async fn a_kind_of_all_queues_replaces_those_of_single_queues(fixture: Fixture) {
    put_for(&fixture, &["alpha"], &[with_schema("mail", "1"), with_schema("sms", "2")])
        .await
        .expect("put_kinds");
    put_kinds(&fixture, &[with_schema("mail", "3")]).await;
    assert_eq!(
        places(&kinds_of(&fixture).await),
        [("mail", None, Some("3")), ("sms", Some("alpha"), Some("2"))]
    );
    assert!(fixture.store().remove_kind("sms").await.expect("remove"));
    assert_eq!(kinds_of(&fixture).await.len(), 1);
}

async fn a_kind_of_a_queue_applies_only_to_jobs_of_that_queue(fixture: Fixture) {
    put_for(&fixture, &["alpha"], &[with_schema("mail", "false")]).await.expect("put_kinds");
    let strict = fixture.client().unknown_kinds(UnknownKinds::Refuse);
    let mail = |queue: &str| NewJob::new("mail", &1).queue(queue);
    let refused = strict.enqueue(mail("alpha")).await.expect_err("schema");
    assert_eq!(refused.field(), Some("payload"), "{refused}");
    let unknown = strict.enqueue(mail("beta")).await.expect_err("unknown");
    assert!(unknown.to_string().contains("`mail` is not registered for queue `beta`"), "{unknown}");
    assert!(!unknown.to_string().contains("alpha"), "{unknown}");
    fixture.enqueue(mail("beta")).await.expect("nobody else's schema applies");
    fixture.enqueue(NewJob::new("mail", &1)).await.expect("nor to jobs that name no queue");
    fixture.enqueue(mail("alpha")).await.expect_err("schema");
}

async fn kinds_of_single_queues_are_limited_in_number_and_in_bytes(fixture: Fixture) {
    let many: Vec<_> = (0..1000).map(|n| NewKind::new(format!("kind-{n}"))).collect();
    put_for(&fixture, &["alpha", "beta"], &many).await.expect("2,000");
    put_for(&fixture, &["alpha", "beta"], &many).await.expect("again");
    let one_more = put_for(&fixture, &["alpha", "beta"], &[NewKind::new("more")]).await.expect_err("2,002");
    assert_eq!(one_more.field(), Some("kinds"), "{one_more}");
    assert!(one_more.to_string().contains("2002 kinds"), "{one_more}");
    let schema = format!("\"{}\"", "x".repeat(60_000));
    let large: Vec<_> = (0..18).map(|n| with_schema(&format!("large-{n}"), &schema)).collect();
    put_for(&fixture, &["gamma"], &large).await.expect_err("1 MiB");
    put_for(&fixture, &["gamma"], &large[..17]).await.expect("less");
    assert_eq!(kinds_of(&fixture).await.len(), 2_017, "nothing is stored by a call that fails");
    // In all, 10,000.
    for queue in 0..7 {
        put_for(&fixture, &[&format!("queue-{queue}")], &many).await.expect("7,000");
    }
    put_for(&fixture, &["last"], &many).await.expect_err("10,017");
    put_for(&fixture, &["last"], &many[..983]).await.expect("10,000");
    put_kinds(&fixture, &many).await;
    assert_eq!(kinds_of(&fixture).await.len(), 1_017, "kinds of all queues are not counted");
}

async fn kinds_of_all_single_queues_together_are_limited_in_bytes(fixture: Fixture) {
    let schema = format!("\"{}\"", "x".repeat(60_000));
    let large: Vec<_> = (0..17).map(|n| with_schema(&format!("large-{n}"), &schema)).collect();
    for queue in 0..8 {
        put_for(&fixture, &[&format!("queue-{queue}")], &large).await.expect("less than 8 MiB");
    }
    let one_more = put_for(&fixture, &["last"], &large).await.expect_err("more than 8 MiB");
    assert!(one_more.to_string().contains("all tokens that are limited to queues"), "{one_more}");
    assert_eq!(kinds_of(&fixture).await.len(), 8 * 17, "nothing is stored by a call that fails");
}

async fn kinds_are_listed_in_pages_with_or_without_schemas(fixture: Fixture) {
    put_kinds(&fixture, &[with_schema("b", "1"), NewKind::new("d")]).await;
    put_for(&fixture, &["one", "two"], &[with_schema("a", "2"), NewKind::new("c")]).await.expect("put_kinds");
    let list = async |filter: &KindFilter| fixture.store().kinds(filter).await.expect("kinds");
    let mut filter = KindFilter { limit: Some(2), schemas: Schemas::Omit, ..KindFilter::default() };
    let mut pages = Vec::new();
    loop {
        let page = list(&filter).await;
        assert!(page.iter().all(|kind| kind.schema.is_none()));
        let Some(last) = page.last() else { break };
        filter.after = Some((last.name.clone(), last.queue.clone().unwrap_or_default()));
        pages.push(page.iter().map(|kind| (kind.name.clone(), kind.has_schema)).collect::<Vec<_>>());
    }
    let expected = [[("a", true), ("a", true)], [("b", true), ("c", false)], [("c", false), ("d", false)]];
    let expected = expected.map(|page| page.map(|(name, has_schema)| (name.to_owned(), has_schema)).to_vec());
    assert_eq!(pages, expected);
    let of_two = KindFilter { queues: Some(vec!["two".into()]), ..KindFilter::default() };
    let expected =
        [("a", Some("two"), Some("2")), ("b", None, Some("1")), ("c", Some("two"), None), ("d", None, None)];
    assert_eq!(places(&list(&of_two).await), expected);
}

async fn a_kind_put_without_a_schema_keeps_the_one_it_has(fixture: Fixture) {
    put_kinds(
        &fixture,
        &[NewKind { schema: Some(raw("1")), defaults: Some(raw("2")), ..NewKind::new("mail") }],
    )
    .await;
    fixture.advance(MINUTE).await;
    put_kinds(&fixture, &[NewKind::new("mail")]).await;
    assert_eq!(fields(&kinds_of(&fixture).await[0]), ("mail", Some("1"), Some("2"), start() + MINUTE));
    put_kinds(&fixture, &[NewKind { defaults: Some(raw("3")), ..NewKind::new("mail") }]).await;
    assert_eq!(fields(&kinds_of(&fixture).await[0]), ("mail", Some("1"), Some("3"), start() + MINUTE));
}

async fn the_last_entry_of_a_kind_in_one_call_wins(fixture: Fixture) {
    let kinds = [
        NewKind { schema: Some(raw("1")), ..NewKind::new("mail") },
        NewKind { schema: Some(raw("2")), defaults: Some(raw("3")), ..NewKind::new("mail") },
        NewKind::new("mail"),
    ];
    put_kinds(&fixture, &kinds).await;
    assert_eq!(fields(&kinds_of(&fixture).await[0]), ("mail", Some("2"), Some("3"), start()));
}

async fn removing_a_kind_returns_whether_it_existed(fixture: Fixture) {
    put_kinds(&fixture, &[NewKind::new("mail"), NewKind::new("sms")]).await;
    assert!(fixture.store().remove_kind("mail").await.expect("remove"));
    assert!(!fixture.store().remove_kind("mail").await.expect("remove"), "it was already removed");
    assert_eq!(kinds_of(&fixture).await.iter().map(|kind| kind.name.as_str()).collect::<Vec<_>>(), ["sms"]);
}

async fn an_invalid_kind_is_refused_by_field_and_nothing_is_stored(fixture: Fixture) {
    let long = raw(&format!("\"{}\"", "x".repeat(64 * 1024 - 1)));
    let bad = [
        ("name", NewKind::new("")),
        ("name", NewKind::new("x".repeat(129))),
        ("name", NewKind::new("a\0b")),
        ("schema", NewKind { schema: Some(long.clone()), ..NewKind::new("sms") }),
        ("schema", NewKind { schema: Some(raw(r#""\u0000""#)), ..NewKind::new("sms") }),
        ("defaults", NewKind { defaults: Some(long), ..NewKind::new("sms") }),
        ("defaults", NewKind { defaults: Some(raw(r#""\ud800""#)), ..NewKind::new("sms") }),
    ];
    for (field, kind) in bad {
        let error = fixture.put_kinds(&[NewKind::new("mail"), kind]).await.expect_err(field);
        assert_eq!(error.field(), Some(field), "{error:?}");
    }
    assert!(kinds_of(&fixture).await.is_empty());
    let longest = raw(&format!("\"{}\"", "x".repeat(64 * 1024 - 2)));
    put_kinds(&fixture, &[NewKind { schema: Some(longest), ..NewKind::new("x".repeat(128)) }]).await;
}

/// Many processes start at once and publish their kinds in any order.
async fn concurrent_puts_of_the_same_kinds_all_succeed(fixture: Fixture) {
    let puts: Vec<_> = (0..8)
        .map(|n| {
            let client = fixture.client();
            tokio::spawn(async move {
                for _ in 0..10 {
                    let mut kinds: Vec<_> = (0..20).map(|k| NewKind::new(format!("kind-{k}"))).collect();
                    kinds.rotate_left(2 * n);
                    if n % 2 == 0 {
                        kinds.reverse();
                    }
                    client.put_kinds(&kinds).await?;
                }
                Ok::<(), longshore::Error>(())
            })
        })
        .collect();
    for put in puts {
        put.await.expect("task").expect("put_kinds");
    }
    assert_eq!(kinds_of(&fixture).await.len(), 20);
}
