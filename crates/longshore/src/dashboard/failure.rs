//! What a browser gets when a page cannot be shown: a page with the reason, or the login page. The script
//! gets the problem of the API as it is.

use std::sync::Arc;

use axum::extract::{OriginalUri, Request};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use maud::{Markup, html};
use serde::Deserialize;

use super::url::Params;
use super::widgets::prose;
use super::{Dashboard, FRAGMENT, View, layout};
use crate::api::middleware::{REQUEST_ID, catch_panic};
use crate::api::problem::{ApiResult, Problem, Slug};

/// The largest problem that is shown.
const MAX_PROBLEM: usize = 64 * 1024;

/// Shows the problems of a page as pages.
pub(super) fn as_pages<S: Clone + Send + Sync + 'static>(
    page: MethodRouter<S>,
    dashboard: Arc<Dashboard>,
) -> MethodRouter<S> {
    page.layer(middleware::from_fn(move |request: Request, next: Next| {
        let dashboard = dashboard.clone();
        async move {
            let seen = request.uri().clone();
            let original = request.extensions().get::<OriginalUri>().map_or(&seen, |original| &original.0);
            let base = dashboard.base_of(original, &seen);
            let is_fragment = request.headers().contains_key(&FRAGMENT);
            // The API has set it.
            let id = request.headers().get(REQUEST_ID).cloned();
            let id = id.unwrap_or_else(|| HeaderValue::from_static("none"));
            let response = catch_panic(&id, next.run(request)).await.into_response();
            if is_fragment { response } else { as_page(response, &base, &seen).await }
        }
    }))
}

pub(super) async fn as_page(response: Response, base: &str, seen: &Uri) -> Response {
    match response.extensions().get::<Slug>() {
        None => response,
        Some(Slug::Unauthorized) => {
            let here = format!("{base}{}", seen.path_and_query().map_or("/ui", |path| path.as_str()));
            let login = Params::default().with("next", here).url(&format!("{base}/ui/login"));
            (StatusCode::SEE_OTHER, [(header::LOCATION, login)]).into_response()
        }
        Some(_) => {
            let (parts, body) = response.into_parts();
            let body = axum::body::to_bytes(body, MAX_PROBLEM).await.unwrap_or_default();
            let message = serde_json::from_slice::<Body>(&body).map(|body| body.message).unwrap_or_default();
            let mut page = super::html(parts.status, render(base, parts.status, &message));
            // The log shows the cause, and a client learns when to try again.
            *page.extensions_mut() = parts.extensions;
            if let Some(after) = parts.headers.get(header::RETRY_AFTER) {
                page.headers_mut().insert(header::RETRY_AFTER, after.clone());
            }
            page
        }
    }
}

#[derive(Deserialize)]
struct Body {
    message: String,
}

fn render(base: &str, status: StatusCode, message: &str) -> Markup {
    let title = match status {
        StatusCode::NOT_FOUND => "Not found",
        StatusCode::FORBIDDEN => "Not allowed",
        StatusCode::BAD_REQUEST => "This address is not valid",
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => "The database does not reply",
        _ => "Something went wrong",
    };
    layout::bare(
        base,
        title,
        html! {
            div .card {
                h1 { (title) }
                p { (prose(message)) }
                p { a .button href=(format!("{base}/ui")) { "Overview" } " " a .button href=(format!("{base}/ui/jobs")) { "Jobs" }
                    @if status == StatusCode::FORBIDDEN { " " a .button href=(format!("{base}/ui/login?again=1")) { "Log in with another token" } }
                }
            }
        },
    )
}

/// Any other path under `/ui`.
pub(super) async fn unknown(uri: Uri) -> Problem {
    Problem::new(Slug::NotFound, format!("there is no page {}", uri.path()))
}

/// Redirects `/ui/` to `/ui`.
pub(super) async fn without_slash(view: View) -> ApiResult<Response> {
    Ok((StatusCode::SEE_OTHER, [(header::LOCATION, view.frame.url("/ui"))]).into_response())
}

#[cfg(test)]
mod tests {
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    #[test]
    fn messages_are_escaped() {
        assert_escaped(&render("/q", StatusCode::NOT_FOUND, HOSTILE));
    }

    #[tokio::test]
    async fn a_browser_without_a_token_is_sent_to_the_login_page_and_back() {
        let problem = Problem::new(Slug::Unauthorized, "send a token").into_response();
        let page = as_page(problem, "/q", &"/ui/jobs?kind=a".parse().unwrap()).await;
        assert_eq!(page.status(), 303);
        assert_eq!(page.headers()["location"], "/q/ui/login?next=%2Fq%2Fui%2Fjobs%3Fkind%3Da");
    }

    async fn panicking() {
        panic!("the crane fell over");
    }

    #[tokio::test]
    async fn a_page_that_panics_is_a_page_with_the_request_id() {
        let page = as_pages(axum::routing::get(panicking), Arc::new(Dashboard::new()));
        let request =
            Request::get("/ui").header(REQUEST_ID, "req-7").body(axum::body::Body::empty()).unwrap();
        let page = tower::ServiceExt::oneshot(page, request).await.unwrap();
        assert_eq!(page.status(), 500);
        assert!(page.headers().contains_key("content-security-policy"));
        let body = axum::body::to_bytes(page.into_body(), 10_000).await.unwrap();
        let body = String::from_utf8_lossy(&body);
        assert!(body.contains("req-7") && !body.contains("crane"), "{body}");
    }

    #[tokio::test]
    async fn other_problems_are_pages_with_their_status() {
        let problem = Problem::new(Slug::NotFound, "job 7 does not exist").into_response();
        let page = as_page(problem, "", &"/ui/jobs/7".parse().unwrap()).await;
        assert_eq!(page.status(), 404);
        assert!(page.headers().contains_key("content-security-policy"));
        let body = axum::body::to_bytes(page.into_body(), 10_000).await.unwrap();
        assert!(String::from_utf8_lossy(&body).contains("Job 7 does not exist."));
    }
}
