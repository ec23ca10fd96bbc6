//! The OpenAPI document is kept in `docs/openapi.json`, so that a change of the API shows
//! in a diff. It must also be usable by programs that generate clients.

use std::collections::BTreeSet;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use longshore::Client;
use longshore::api::{Access, Api};
use serde_json::Value;
use tower::ServiceExt;

/// The document that a server sends, as text.
async fn served(prefix: &str) -> String {
    let client = Client::connect("sqlite::memory:").await.expect("connect");
    client.migrate().await.expect("migrate");
    let api =
        Api::new(client).access(Access::Tokens).public(longshore::api::Public::Docs).metrics(String::new);
    let router = match prefix {
        "" => api.router(),
        prefix => Router::new().nest(prefix, api.router()),
    };
    let request =
        Request::get(format!("{prefix}/api-docs/openapi.json")).body(Body::empty()).expect("a request");
    let response = router.oneshot(request).await.expect("a response");
    assert_eq!(response.status(), 200);
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body");
    String::from_utf8(bytes.to_vec()).expect("text")
}

async fn document() -> Value {
    serde_json::from_str(&served("").await).expect("JSON")
}

/// The operations: method, path and contents.
fn operations(document: &Value) -> Vec<(&str, &str, &Value)> {
    let paths = document["paths"].as_object().expect("paths");
    paths
        .iter()
        .flat_map(|(path, item)| {
            let methods = item.as_object().expect("methods");
            methods.iter().map(move |(method, operation)| (method.as_str(), path.as_str(), operation))
        })
        .collect()
}

#[tokio::test]
async fn the_served_document_equals_the_one_in_docs() {
    let served = format!("{}\n", served("").await);
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

#[tokio::test]
async fn operation_ids_are_unique_and_make_good_method_names() {
    let document = document().await;
    let mut seen = BTreeSet::new();
    for (method, path, operation) in operations(&document) {
        let id = operation["operationId"].as_str().unwrap_or_else(|| panic!("{method} {path} has no id"));
        let is_word = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase());
        assert!(id.split('_').all(is_word) && id.contains('_'), "{id} is not a verb and an object");
        assert!(seen.insert(id), "{id} is used twice");
    }
    assert!(seen.contains("enqueue_job") && seen.contains("list_jobs"), "{seen:?}");
}

/// Generators invent names such as `BatchItemType1` for objects without a name, and many do
/// not support `allOf`.
#[tokio::test]
async fn every_object_in_a_request_or_a_response_has_a_name() {
    fn check(place: &str, schema: &Value) {
        match schema {
            Value::Object(fields) => {
                assert!(!fields.contains_key("allOf"), "{place}: allOf");
                assert!(!fields.contains_key("properties"), "{place}: an object without a name");
                for (name, part) in fields.iter().filter(|(name, _)| *name != "example") {
                    check(&format!("{place}.{name}"), part);
                }
            }
            Value::Array(parts) => parts.iter().for_each(|part| check(place, part)),
            _ => {}
        }
    }
    let document = document().await;
    for (method, path, operation) in operations(&document) {
        check(&format!("{method} {path}"), operation);
    }
    for (name, schema) in document["components"]["schemas"].as_object().expect("schemas") {
        for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
            check(&format!("{name}.{field}"), schema);
        }
        check(name, &schema["oneOf"]);
    }
}

#[tokio::test]
async fn every_request_body_has_an_example() {
    let document = document().await;
    let bodies =
        operations(&document).into_iter().filter(|(_, _, operation)| operation["requestBody"].is_object());
    let mut checked = 0;
    for (method, path, operation) in bodies {
        for (kind, content) in operation["requestBody"]["content"].as_object().expect("contents") {
            assert!(content.get("example").is_some(), "{method} {path}: {kind} has no example");
            checked += 1;
        }
    }
    assert!(checked > 10, "{checked}");
}

#[tokio::test]
async fn the_server_in_the_document_is_the_one_that_sent_it() {
    for (prefix, url) in [("", "/"), ("/queue", "/queue"), ("/a/b", "/a/b")] {
        let document: Value = serde_json::from_str(&served(prefix).await).expect("JSON");
        assert_eq!(document["servers"][0]["url"], url);
        assert!(document["components"]["securitySchemes"]["token"]["scheme"] == "bearer");
    }
}
