//! Tokens of the HTTP API as the engine stores them: lookup by hash, revocation,
//! expiry. `http/auth.rs` tests what a token allows.

use chrono::{DateTime, Utc};
use longshore::{NewToken, TokenRecord};
use uuid::Uuid;

use crate::fixture::*;

cases! {
    a_token_is_found_by_its_hash_with_every_field,
    several_tokens_are_found_in_the_order_of_their_hashes,
    a_token_record_does_not_contain_the_hash,
    a_revoked_token_is_not_found_but_stays_listed,
    revoking_a_token_again_keeps_the_first_time,
    a_token_is_valid_until_the_instant_it_expires,
    tokens_are_listed_newest_first,
    putting_the_same_token_again_changes_nothing,
    the_id_or_the_hash_of_another_token_is_a_conflict,
    an_invalid_token_is_refused_by_field,
}

/// A token whose hash is `byte` repeated.
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

async fn find(fixture: &Fixture, token: &NewToken) -> Option<TokenRecord> {
    fixture.client().token(&token.hash).await.expect("token")
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

async fn a_token_is_found_by_its_hash_with_every_field(fixture: Fixture) {
    let narrow = NewToken { expires_at: Some(start() + DAY), ..token(1) };
    let wide = NewToken { queues: None, scopes: vec!["admin".into()], ..token(2) };
    for token in [&narrow, &wide] {
        put(&fixture, token).await;
    }
    for token in [&narrow, &wide] {
        assert_eq!(find(&fixture, token).await, Some(record(token, start())));
    }
    assert_eq!(find(&fixture, &token(3)).await, None);
    let mut similar = narrow.hash;
    similar[31] ^= 1;
    assert_eq!(fixture.client().token(&similar).await.expect("token"), None);
}

async fn several_tokens_are_found_in_the_order_of_their_hashes(fixture: Fixture) {
    let (first, second, revoked) = (token(1), token(2), token(3));
    for token in [&first, &second, &revoked] {
        put(&fixture, token).await;
    }
    assert!(fixture.store().revoke_token(revoked.id).await.expect("revoke"));
    let hashes = [second.hash, [9; 32], revoked.hash, first.hash, second.hash];
    let found = fixture.store().tokens_by_hash(&hashes).await.expect("tokens_by_hash");
    let (first, second) = (record(&first, start()), record(&second, start()));
    assert_eq!(found, [Some(second.clone()), None, None, Some(first), Some(second)]);
    assert_eq!(fixture.store().tokens_by_hash(&[]).await.expect("tokens_by_hash"), []);
}

async fn a_token_record_does_not_contain_the_hash(fixture: Fixture) {
    let token = NewToken { hash: *b"0123456789abcdef0123456789abcdef", ..token(1) };
    put(&fixture, &token).await;
    let json = serde_json::to_string(&tokens(&fixture).await).expect("JSON");
    let bytes = format!("{:?}", token.hash).replace(' ', "");
    assert!(!json.contains("hash") && !json.contains(&bytes), "{json}");
}

async fn a_revoked_token_is_not_found_but_stays_listed(fixture: Fixture) {
    let (revoked, other) = (token(1), token(2));
    put(&fixture, &revoked).await;
    put(&fixture, &other).await;
    fixture.advance(HOUR).await;
    assert!(fixture.store().revoke_token(revoked.id).await.expect("revoke"));
    assert_eq!(find(&fixture, &revoked).await, None);
    assert_eq!(find(&fixture, &other).await, Some(record(&other, start())));
    let expected = TokenRecord { revoked_at: Some(start() + HOUR), ..record(&revoked, start()) };
    assert!(tokens(&fixture).await.contains(&expected));
}

async fn revoking_a_token_again_keeps_the_first_time(fixture: Fixture) {
    let token = token(1);
    put(&fixture, &token).await;
    for _ in 0..2 {
        assert!(fixture.store().revoke_token(token.id).await.expect("revoke"));
        assert_eq!(tokens(&fixture).await[0].revoked_at, Some(start()));
        fixture.advance(MINUTE).await;
    }
    assert!(!fixture.store().revoke_token(Uuid::now_v7()).await.expect("revoke"), "no token has this id");
}

async fn a_token_is_valid_until_the_instant_it_expires(fixture: Fixture) {
    let token = NewToken { expires_at: Some(start() + HOUR), ..token(1) };
    put(&fixture, &token).await;
    fixture.advance(HOUR - SECOND).await;
    assert!(find(&fixture, &token).await.is_some());
    fixture.advance(SECOND).await;
    assert_eq!(find(&fixture, &token).await, None);
    assert_eq!(tokens(&fixture).await, [record(&token, start())]);
}

async fn tokens_are_listed_newest_first(fixture: Fixture) {
    let mut expected = Vec::new();
    for byte in 1..=3 {
        let token = token(byte);
        put(&fixture, &token).await;
        expected.push(record(&token, fixture.now().await));
        fixture.advance(SECOND).await;
    }
    expected.reverse();
    assert_eq!(tokens(&fixture).await, expected);
}

async fn putting_the_same_token_again_changes_nothing(fixture: Fixture) {
    let token = token(1);
    put(&fixture, &token).await;
    fixture.advance(MINUTE).await;
    put(&fixture, &token).await;
    assert_eq!(tokens(&fixture).await, [record(&token, start())]);
    fixture.store().revoke_token(token.id).await.expect("revoke");
    put(&fixture, &token).await;
    assert_eq!(find(&fixture, &token).await, None, "putting a token again must not undo its revocation");
}

async fn the_id_or_the_hash_of_another_token_is_a_conflict(fixture: Fixture) {
    let first = token(1);
    put(&fixture, &first).await;
    for second in [NewToken { id: first.id, ..token(2) }, NewToken { hash: first.hash, ..token(2) }] {
        let error = fixture.store().put_token(&second).await.expect_err("a conflict");
        assert!(error.is_conflict(), "{error:?}");
        assert!(error.to_string().contains(&second.name), "{error}");
    }
    assert_eq!(tokens(&fixture).await, [record(&first, start())]);
}

async fn an_invalid_token_is_refused_by_field(fixture: Fixture) {
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
    let scopes = longshore::Scope::ALL.map(|scope| scope.as_str().to_owned()).to_vec();
    put(&fixture, &NewToken { name: "x".repeat(128), scopes, ..token(1) }).await;
}
