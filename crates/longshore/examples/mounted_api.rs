//! The HTTP API under a prefix of somebody's own web service.

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::get;
use longshore::Client;
use longshore::api::{Api, UnknownKinds};
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

    let (status, _, body) = ask(&app, "GET", "/", "").await?;
    assert_eq!((status, body.as_str()), (StatusCode::OK, "our shop"));

    let (status, place, body) =
        ask(&app, "POST", "/queue/jobs", r#"{"kind":"greet","payload":"Ada"}"#).await?;
    assert_eq!(status, StatusCode::CREATED, "{body}");
    println!("the job is at {place}");
    assert!(place.starts_with("/queue/jobs/"), "with the prefix: {place}");
    let (status, _, body) = ask(&app, "GET", &place, "").await?;
    assert_eq!(status, StatusCode::OK);
    println!("{body}");
    Ok(())
}

/// A visitor: one request; its status, where it points to, and its body.
async fn ask(
    app: &Router,
    method: &str,
    path: &str,
    body: &'static str,
) -> Result<(StatusCode, String, String), Box<dyn std::error::Error>> {
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    let answer = app.clone().oneshot(request.body(Body::from(body))?).await?;
    let place = answer.headers().get("location").map(|place| place.to_str().map(str::to_owned));
    let (status, place) = (answer.status(), place.transpose()?.unwrap_or_default());
    let body = axum::body::to_bytes(answer.into_body(), usize::MAX).await?;
    Ok((status, place, String::from_utf8(body.into())?))
}
