//! The kinds of job that the engine stores, with their payload schemas and defaults.

use chrono::{DateTime, Utc};
use longshore::store::ExistingKinds;
use longshore::{KindRecord, NewKind};

use crate::fixture::*;

cases! {
    kinds_are_stored_exactly_and_listed_by_name,
    a_kind_put_again_is_replaced,
    a_kind_that_exists_can_be_kept,
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
    fixture.store().kinds().await.expect("kinds")
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

async fn a_kind_that_exists_can_be_kept(fixture: Fixture) {
    let kind = |name: &str, schema: &str| NewKind { schema: Some(raw(schema)), ..NewKind::new(name) };
    put_kinds(&fixture, &[kind("mail", "1"), NewKind::new("sms")]).await;
    fixture.advance(MINUTE).await;
    let kinds = [kind("mail", "2"), kind("sms", "3"), kind("wave", "4")];
    fixture.store().put_kinds(&kinds, ExistingKinds::Keep).await.expect("put_kinds");
    let kinds = kinds_of(&fixture).await;
    let expected = [
        ("mail", Some("1"), None, start()),
        ("sms", None, None, start()),
        ("wave", Some("4"), None, start() + MINUTE),
    ];
    assert_eq!(kinds.iter().map(fields).collect::<Vec<_>>(), expected);
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
