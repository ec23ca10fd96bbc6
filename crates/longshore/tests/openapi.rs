//! The OpenAPI document is kept in `docs/openapi.json`, so that a change of the API shows
//! in a diff.

use axum::body::Body;
use axum::http::Request;
use longshore::Client;
use longshore::api::{Access, Api};
use tower::ServiceExt;

#[tokio::test]
async fn the_served_document_equals_the_one_in_docs() {
    let client = Client::connect("sqlite::memory:").await.expect("connect");
    client.migrate().await.expect("migrate");
    let api =
        Api::new(client).access(Access::Tokens).public(longshore::api::Public::Docs).metrics(String::new);
    let request = Request::get("/api-docs/openapi.json").body(Body::empty()).expect("a request");
    let response = api.router().oneshot(request).await.expect("a response");
    assert_eq!(response.status(), 200);
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body");
    let served = format!("{}\n", String::from_utf8(bytes.to_vec()).expect("text"));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    if std::env::var_os("LONGSHORE_UPDATE").is_some() {
        std::fs::write(path, &served).expect("write");
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        stored == served,
        "the API differs from docs/openapi.json; if the change is intended, run \
         `LONGSHORE_UPDATE=1 cargo test -p longshore --all-features --test openapi` and commit the file"
    );
}
