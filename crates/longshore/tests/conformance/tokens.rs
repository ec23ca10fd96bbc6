//! Tokens of the HTTP API as the engine stores them: lookup by hash, revocation,
//! expiry. `http/auth.rs` tests what a token allows.

use chrono::{DateTime, Utc};
use longshore::store::{NewToken, TokenRecord};
use uuid::Uuid;

use crate::fixture::*;

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
}

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

async fn put(fixture: &Fixture, token: &NewToken) {
    fixture.store().put_token(token).await.expect("put_token");
}

async fn live(fixture: &Fixture, token: &NewToken) -> Option<TokenRecord> {
    fixture.store().token(&token.hash).await.expect("token")
}

async fn tokens(fixture: &Fixture) -> Vec<TokenRecord> {
    fixture.store().tokens().await.expect("tokens")
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

async fn a_token_is_found_by_its_hash_as_it_was_given(fixture: Fixture) {
    let narrow = NewToken { expires_at: Some(start() + DAY), ..token(1) };
    let wide = NewToken { queues: None, scopes: vec!["admin".into()], ..token(2) };
    for token in [&narrow, &wide] {
        put(&fixture, token).await;
    }
    for token in [&narrow, &wide] {
        assert_eq!(live(&fixture, token).await, Some(record(token, start())));
    }
    assert_eq!(live(&fixture, &token(3)).await, None);
    let mut near = narrow.hash;
    near[31] ^= 1;
    assert_eq!(fixture.store().token(&near).await.expect("token"), None);
}

async fn a_token_never_shows_its_hash(fixture: Fixture) {
    let token = NewToken { hash: *b"a hash that nobody else may see!", ..token(1) };
    put(&fixture, &token).await;
    let shown = serde_json::to_string(&tokens(&fixture).await).expect("JSON");
    let bytes = format!("{:?}", token.hash).replace(' ', "");
    assert!(!shown.contains("hash") && !shown.contains(&bytes), "{shown}");
}

async fn a_revoked_token_is_dead_and_stays_listed(fixture: Fixture) {
    let (revoked, other) = (token(1), token(2));
    put(&fixture, &revoked).await;
    put(&fixture, &other).await;
    fixture.advance(HOUR).await;
    assert!(fixture.store().revoke_token(revoked.id).await.expect("revoke"));
    assert_eq!(live(&fixture, &revoked).await, None);
    assert_eq!(live(&fixture, &other).await, Some(record(&other, start())));
    let dead = TokenRecord { revoked_at: Some(start() + HOUR), ..record(&revoked, start()) };
    assert!(tokens(&fixture).await.contains(&dead));
}

async fn a_token_revoked_again_stays_revoked_since_the_first_time(fixture: Fixture) {
    let token = token(1);
    put(&fixture, &token).await;
    for _ in 0..2 {
        assert!(fixture.store().revoke_token(token.id).await.expect("revoke"));
        assert_eq!(tokens(&fixture).await[0].revoked_at, Some(start()));
        fixture.advance(MINUTE).await;
    }
    assert!(!fixture.store().revoke_token(Uuid::now_v7()).await.expect("revoke"), "nobody has that id");
}

async fn a_token_is_good_until_the_instant_it_expires(fixture: Fixture) {
    let token = NewToken { expires_at: Some(start() + HOUR), ..token(1) };
    put(&fixture, &token).await;
    fixture.advance(HOUR - SECOND).await;
    assert!(live(&fixture, &token).await.is_some());
    fixture.advance(SECOND).await;
    assert_eq!(live(&fixture, &token).await, None);
    assert_eq!(tokens(&fixture).await, [record(&token, start())]);
}

async fn tokens_are_listed_newest_first(fixture: Fixture) {
    let mut given = Vec::new();
    for byte in 1..=3 {
        let token = token(byte);
        put(&fixture, &token).await;
        given.push(record(&token, fixture.now().await));
        fixture.advance(SECOND).await;
    }
    given.reverse();
    assert_eq!(tokens(&fixture).await, given);
}

async fn the_same_token_again_changes_nothing(fixture: Fixture) {
    let token = token(1);
    put(&fixture, &token).await;
    fixture.advance(MINUTE).await;
    put(&fixture, &token).await;
    assert_eq!(tokens(&fixture).await, [record(&token, start())]);
    fixture.store().revoke_token(token.id).await.expect("revoke");
    put(&fixture, &token).await;
    assert_eq!(live(&fixture, &token).await, None, "a repeated put must not revive it");
}

async fn an_id_or_a_hash_of_another_token_is_a_conflict(fixture: Fixture) {
    let first = token(1);
    put(&fixture, &first).await;
    for second in [NewToken { id: first.id, ..token(2) }, NewToken { hash: first.hash, ..token(2) }] {
        let error = fixture.store().put_token(&second).await.expect_err("a conflict");
        assert!(error.is_conflict(), "{error:?}");
        assert!(error.to_string().contains(&second.name), "{error}");
    }
    assert_eq!(tokens(&fixture).await, [record(&first, start())]);
}

async fn a_bad_token_is_refused_by_name(fixture: Fixture) {
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
        let error = fixture.store().put_token(&token).await.expect_err(field);
        assert_eq!(error.field(), Some(field), "{error:?}");
    }
    assert_eq!(tokens(&fixture).await, []);
    let scopes = longshore::store::Scope::ALL.map(|scope| scope.as_str().to_owned()).to_vec();
    put(&fixture, &NewToken { name: "x".repeat(128), scopes, ..token(1) }).await;
}
