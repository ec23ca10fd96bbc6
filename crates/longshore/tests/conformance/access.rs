//! Who may call the server, and what is known of each kind of job.

use chrono::{DateTime, Utc};
use longshore::store::{KindRecord, NewKind, NewToken, TokenRecord};
use uuid::Uuid;

use crate::bench::*;

cases! {
    a_token_is_found_by_its_hash_as_it_was_given,
    a_token_never_shows_its_hash,
    a_revoked_token_is_dead_and_stays_listed,
    a_token_revoked_again_stays_revoked_since_the_first_time,
    a_token_is_good_until_the_instant_it_expires,
    tokens_are_listed_newest_first,
    the_same_token_again_changes_nothing,
    an_id_or_a_hash_of_another_token_is_a_conflict,
    a_bad_token_is_refused_by_name,
    kinds_are_kept_as_given_and_listed_by_name,
    a_kind_put_again_is_replaced,
    a_kind_put_without_a_schema_keeps_the_one_it_has,
    of_two_words_about_a_kind_in_one_call_the_last_counts,
    a_removed_kind_is_gone_and_says_so,
    a_bad_kind_is_refused_by_name_and_nothing_is_written,
    many_may_put_the_same_kinds_at_once,
}

// ---- tokens ------------------------------------------------------------------

/// A token whose secret's hash is `byte` over and over.
fn token(byte: u8) -> NewToken {
    NewToken {
        id: Uuid::now_v7(),
        name: format!("token {byte}"),
        hash: [byte; 32],
        scopes: vec!["read".into(), "enqueue".into()],
        queues: Some(vec!["mail".into(), "fax".into()]),
        expires_at: None,
    }
}

async fn put(bench: &Bench, token: &NewToken) {
    bench.store().put_token(token).await.expect("put_token");
}

async fn live(bench: &Bench, token: &NewToken) -> Option<TokenRecord> {
    bench.store().token(&token.hash).await.expect("token")
}

async fn tokens(bench: &Bench) -> Vec<TokenRecord> {
    bench.store().tokens().await.expect("tokens")
}

fn record(token: &NewToken, created_at: DateTime<Utc>) -> TokenRecord {
    TokenRecord {
        id: token.id,
        name: token.name.clone(),
        scopes: token.scopes.clone(),
        queues: token.queues.clone(),
        created_at,
        expires_at: token.expires_at,
        revoked_at: None,
    }
}

async fn a_token_is_found_by_its_hash_as_it_was_given(bench: Bench) {
    let narrow = NewToken { expires_at: Some(start() + DAY), ..token(1) };
    let wide = NewToken { queues: None, scopes: vec!["admin".into()], ..token(2) };
    for token in [&narrow, &wide] {
        put(&bench, token).await;
    }
    for token in [&narrow, &wide] {
        assert_eq!(live(&bench, token).await, Some(record(token, start())));
    }
    assert_eq!(live(&bench, &token(3)).await, None);
    let mut near = narrow.hash;
    near[31] ^= 1;
    assert_eq!(bench.store().token(&near).await.expect("token"), None);
}

async fn a_token_never_shows_its_hash(bench: Bench) {
    let token = NewToken { hash: *b"a hash that nobody else may see!", ..token(1) };
    put(&bench, &token).await;
    let shown = serde_json::to_string(&tokens(&bench).await).expect("JSON");
    let bytes = format!("{:?}", token.hash).replace(' ', "");
    assert!(!shown.contains("hash") && !shown.contains(&bytes), "{shown}");
}

async fn a_revoked_token_is_dead_and_stays_listed(bench: Bench) {
    let (revoked, other) = (token(1), token(2));
    put(&bench, &revoked).await;
    put(&bench, &other).await;
    bench.advance(HOUR).await;
    assert!(bench.store().revoke_token(revoked.id).await.expect("revoke"));
    assert_eq!(live(&bench, &revoked).await, None);
    assert_eq!(live(&bench, &other).await, Some(record(&other, start())));
    let dead = TokenRecord { revoked_at: Some(start() + HOUR), ..record(&revoked, start()) };
    assert!(tokens(&bench).await.contains(&dead));
}

async fn a_token_revoked_again_stays_revoked_since_the_first_time(bench: Bench) {
    let token = token(1);
    put(&bench, &token).await;
    for _ in 0..2 {
        assert!(bench.store().revoke_token(token.id).await.expect("revoke"));
        assert_eq!(tokens(&bench).await[0].revoked_at, Some(start()));
        bench.advance(MINUTE).await;
    }
    assert!(!bench.store().revoke_token(Uuid::now_v7()).await.expect("revoke"), "nobody has that id");
}

async fn a_token_is_good_until_the_instant_it_expires(bench: Bench) {
    let token = NewToken { expires_at: Some(start() + HOUR), ..token(1) };
    put(&bench, &token).await;
    bench.advance(HOUR - SECOND).await;
    assert!(live(&bench, &token).await.is_some());
    bench.advance(SECOND).await;
    assert_eq!(live(&bench, &token).await, None);
    assert_eq!(tokens(&bench).await, [record(&token, start())]);
}

async fn tokens_are_listed_newest_first(bench: Bench) {
    let mut given = Vec::new();
    for byte in 1..=3 {
        let token = token(byte);
        put(&bench, &token).await;
        given.push(record(&token, bench.now().await));
        bench.advance(SECOND).await;
    }
    given.reverse();
    assert_eq!(tokens(&bench).await, given);
}

async fn the_same_token_again_changes_nothing(bench: Bench) {
    let token = token(1);
    put(&bench, &token).await;
    bench.advance(MINUTE).await;
    put(&bench, &token).await;
    assert_eq!(tokens(&bench).await, [record(&token, start())]);
    bench.store().revoke_token(token.id).await.expect("revoke");
    put(&bench, &token).await;
    assert_eq!(live(&bench, &token).await, None, "a repeated put must not revive it");
}

async fn an_id_or_a_hash_of_another_token_is_a_conflict(bench: Bench) {
    let first = token(1);
    put(&bench, &first).await;
    for second in [NewToken { id: first.id, ..token(2) }, NewToken { hash: first.hash, ..token(2) }] {
        let error = bench.store().put_token(&second).await.expect_err("a conflict");
        assert!(error.is_conflict(), "{error:?}");
        assert!(error.to_string().contains(&second.name), "{error}");
    }
    assert_eq!(tokens(&bench).await, [record(&first, start())]);
}

async fn a_bad_token_is_refused_by_name(bench: Bench) {
    let bad = [
        ("name", NewToken { name: String::new(), ..token(1) }),
        ("name", NewToken { name: "x".repeat(129), ..token(1) }),
        ("name", NewToken { name: "a\0b".into(), ..token(1) }),
        ("scopes", NewToken { scopes: Vec::new(), ..token(1) }),
        ("scopes", NewToken { scopes: vec!["read".into(), "reed".into()], ..token(1) }),
        ("queues", NewToken { queues: Some(Vec::new()), ..token(1) }),
        ("queues", NewToken { queues: Some(vec![String::new()]), ..token(1) }),
        ("expires_at", NewToken { expires_at: Some(DateTime::<Utc>::MAX_UTC), ..token(1) }),
    ];
    for (field, token) in bad {
        let error = bench.store().put_token(&token).await.expect_err(field);
        assert_eq!(error.field(), Some(field), "{error:?}");
    }
    assert_eq!(tokens(&bench).await, []);
    let scopes = longshore::store::Scope::ALL.map(|scope| scope.as_str().to_owned()).to_vec();
    put(&bench, &NewToken { name: "x".repeat(128), scopes, ..token(1) }).await;
}

// ---- kinds -------------------------------------------------------------------

/// Name, schema, defaults and time, all as text.
fn shown(kind: &KindRecord) -> (&str, Option<&str>, Option<&str>, DateTime<Utc>) {
    (
        &kind.name,
        kind.schema.as_ref().map(|json| json.get()),
        kind.defaults.as_ref().map(|json| json.get()),
        kind.updated_at,
    )
}

async fn put_kinds(bench: &Bench, kinds: &[NewKind]) {
    bench.store().put_kinds(kinds).await.expect("put_kinds");
}

async fn kinds_of(bench: &Bench) -> Vec<KindRecord> {
    bench.store().kinds().await.expect("kinds")
}

async fn kinds_are_kept_as_given_and_listed_by_name(bench: Bench) {
    put_kinds(
        &bench,
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
    let kinds = kinds_of(&bench).await;
    let expected = [
        ("Zebra", None, Some("null"), start()),
        ("mail", None, None, start()),
        ("sms", Some(r#"{ "type": "object" }"#), Some(r#"{"priority":5}"#), start()),
    ];
    assert_eq!(kinds.iter().map(shown).collect::<Vec<_>>(), expected);
    put_kinds(&bench, &[]).await;
    assert_eq!(kinds_of(&bench).await.len(), 3);
}

async fn a_kind_put_again_is_replaced(bench: Bench) {
    let kind = |schema: &str, defaults: &str| NewKind {
        schema: Some(raw(schema)),
        defaults: Some(raw(defaults)),
        ..NewKind::new("mail")
    };
    put_kinds(&bench, &[kind("1", "2")]).await;
    bench.advance(MINUTE).await;
    put_kinds(&bench, &[kind("3", "4")]).await;
    let kinds = kinds_of(&bench).await;
    assert_eq!(shown(&kinds[0]), ("mail", Some("3"), Some("4"), start() + MINUTE));
    assert_eq!(kinds.len(), 1);
}

async fn a_kind_put_without_a_schema_keeps_the_one_it_has(bench: Bench) {
    put_kinds(
        &bench,
        &[NewKind { schema: Some(raw("1")), defaults: Some(raw("2")), ..NewKind::new("mail") }],
    )
    .await;
    bench.advance(MINUTE).await;
    put_kinds(&bench, &[NewKind::new("mail")]).await;
    assert_eq!(shown(&kinds_of(&bench).await[0]), ("mail", Some("1"), Some("2"), start() + MINUTE));
    put_kinds(&bench, &[NewKind { defaults: Some(raw("3")), ..NewKind::new("mail") }]).await;
    assert_eq!(shown(&kinds_of(&bench).await[0]), ("mail", Some("1"), Some("3"), start() + MINUTE));
}

async fn of_two_words_about_a_kind_in_one_call_the_last_counts(bench: Bench) {
    let kinds = [
        NewKind { schema: Some(raw("1")), ..NewKind::new("mail") },
        NewKind { schema: Some(raw("2")), defaults: Some(raw("3")), ..NewKind::new("mail") },
        NewKind::new("mail"),
    ];
    put_kinds(&bench, &kinds).await;
    assert_eq!(shown(&kinds_of(&bench).await[0]), ("mail", Some("2"), Some("3"), start()));
}

async fn a_removed_kind_is_gone_and_says_so(bench: Bench) {
    put_kinds(&bench, &[NewKind::new("mail"), NewKind::new("sms")]).await;
    assert!(bench.store().remove_kind("mail").await.expect("remove"));
    assert!(!bench.store().remove_kind("mail").await.expect("remove"), "it was gone");
    assert_eq!(kinds_of(&bench).await.iter().map(|kind| kind.name.as_str()).collect::<Vec<_>>(), ["sms"]);
}

async fn a_bad_kind_is_refused_by_name_and_nothing_is_written(bench: Bench) {
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
        let error = bench.store().put_kinds(&[NewKind::new("mail"), kind]).await.expect_err(field);
        assert_eq!(error.field(), Some(field), "{error:?}");
    }
    assert!(kinds_of(&bench).await.is_empty());
    let longest = raw(&format!("\"{}\"", "x".repeat(64 * 1024 - 2)));
    put_kinds(&bench, &[NewKind { schema: Some(longest), ..NewKind::new("x".repeat(128)) }]).await;
}

/// Many processes start at once and name their kinds in any order.
async fn many_may_put_the_same_kinds_at_once(bench: Bench) {
    let puts: Vec<_> = (0..8)
        .map(|n| {
            let client = bench.handle();
            tokio::spawn(async move {
                for _ in 0..10 {
                    let mut kinds: Vec<_> = (0..20).map(|k| NewKind::new(format!("kind-{k}"))).collect();
                    kinds.rotate_left(2 * n);
                    if n % 2 == 0 {
                        kinds.reverse();
                    }
                    client.store().put_kinds(&kinds).await?;
                }
                Ok::<(), longshore::Error>(())
            })
        })
        .collect();
    for put in puts {
        put.await.expect("task").expect("put_kinds");
    }
    assert_eq!(kinds_of(&bench).await.len(), 20);
}
