//! The HTTP API under a prefix in your own web service.

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::get;
use longshore::api::Api;
use longshore::{Client, UnknownKinds};
use tower::ServiceExt;

fn app(jobs: Client) -> Router {
    let api = Api::new(jobs).unknown_kinds(UnknownKinds::Allow);
    Router::new().route("/", get(|| async { "our shop" })).nest("/queue", api.router())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let jobs = Client::connect("sqlite::memory:").await?;
    jobs.migrate().await?;
    let app = app(jobs);

    let (status, _, body) = send(&app, "GET", "/", "").await?;
    assert_eq!((status, body.as_str()), (StatusCode::OK, "our shop"));

    let (status, location, body) =
        send(&app, "POST", "/queue/jobs", r#"{"kind":"greet","payload":"Ada"}"#).await?;
    assert_eq!(status, StatusCode::CREATED, "{body}");
    println!("the job is at {location}");
    assert!(location.starts_with("/queue/jobs/"), "the location has the prefix: {location}");
    let (status, _, body) = send(&app, "GET", &location, "").await?;
    assert_eq!(status, StatusCode::OK);
    println!("{body}");
    Ok(())
}

/// Sends one request and returns the status, the `Location` header and the body.
async fn send(
    app: &Router,
    method: &str,
    path: &str,
    body: &'static str,
) -> Result<(StatusCode, String, String), Box<dyn std::error::Error>> {
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    let response = app.clone().oneshot(request.body(Body::from(body))?).await?;
    let location = response.headers().get("location").map(|value| value.to_str().map(str::to_owned));
    let (status, location) = (response.status(), location.transpose()?.unwrap_or_default());
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await?;
    Ok((status, location, String::from_utf8(body.into())?))
}
