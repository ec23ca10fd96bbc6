//! The login page: it exchanges a token for a session. The script does this with `POST /session`; without a
//! script, the browser sends the form to the page itself.

use axum::Json;
use axum::extract::{OriginalUri, Query, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};
use serde::Deserialize;

use super::{assets, failure, layout};
use crate::api::extract::Form;
use crate::api::problem::Slug;
use crate::api::{Server, session};

/// The page to open after the login.
#[derive(Default, Deserialize)]
pub(super) struct Destination {
    next: Option<String>,
}

impl Destination {
    /// Its URL. Only a page of this dashboard is opened: a link to the login page must not lead to another site.
    fn url(&self, base: &str) -> String {
        let home = format!("{base}/ui");
        let is_ours = |next: &&String| {
            next.strip_prefix(&home).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?']))
                && next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\')
        };
        self.next.as_ref().filter(is_ours).cloned().unwrap_or(home)
    }
}

/// The form of the page.
#[derive(Deserialize)]
pub(super) struct Login {
    token: String,
}

pub(super) async fn page(
    State(server): State<Server>,
    OriginalUri(original): OriginalUri,
    uri: Uri,
) -> Response {
    let Some(state) = &server.dashboard else { return StatusCode::NOT_FOUND.into_response() };
    let base = state.dashboard.base_of(&original, &uri);
    if !server.guard.requires_tokens() {
        return (StatusCode::SEE_OTHER, [(header::LOCATION, format!("{base}/ui"))]).into_response();
    }
    let query = uri.query().unwrap_or_default();
    super::html(StatusCode::OK, layout::bare(&base, "Log in", render(&base, query, "")))
}

/// Whether the request belongs to a session. The script of the login page asks this: a browser sends no cookie with a
/// link from another site, so a reader who is logged in may see the login page.
pub(super) async fn state(State(server): State<Server>, headers: HeaderMap) -> Json<serde_json::Value> {
    let is_valid = server.guard.identify(&headers).await.is_ok();
    Json(serde_json::json!({ "logged_in": is_valid }))
}

/// Logs in a browser without a script.
pub(super) async fn submit(
    State(server): State<Server>,
    OriginalUri(original): OriginalUri,
    uri: Uri,
    headers: HeaderMap,
    Form(login): Form<Login>,
) -> Response {
    let Some(state) = &server.dashboard else { return StatusCode::NOT_FOUND.into_response() };
    let base = state.dashboard.base_of(&original, &uri);
    let destination = Query::<Destination>::try_from_uri(&uri).map(|query| query.0).unwrap_or_default();
    let opened = (StatusCode::SEE_OTHER, [(header::LOCATION, destination.url(&base))]).into_response();
    if !server.guard.requires_tokens() {
        return opened;
    }
    match session::log_in_with(&server, &headers, &login.token, opened).await {
        Ok(response) => response,
        Err(problem) if problem.slug() == Slug::Unauthorized => {
            let query = uri.query().unwrap_or_default();
            let page = render(&base, query, "The token is unknown, expired or revoked.");
            super::html(StatusCode::UNAUTHORIZED, layout::bare(&base, "Log in", page))
        }
        Err(problem) => failure::as_page(problem.into_response(), &base, &uri).await,
    }
}

/// The page to open afterwards is in the query.
fn render(base: &str, query: &str, error: &str) -> Markup {
    let action =
        if query.is_empty() { format!("{base}/ui/login") } else { format!("{base}/ui/login?{query}") };
    html! {
        form #login .card method="post" action=(action) data-api=(format!("{base}/session")) data-state=(format!("{base}/ui/session")) data-home=(format!("{base}/ui")) {
            img src=(format!("{base}{}", assets::ICON.path)) width="40" height="40" alt="";
            h1 { "Log in to Longshore" }
            label { span { "Token" }
                input name="token" type="password" required autofocus autocomplete="current-password" spellcheck="false";
            }
            p #login-error .error role="alert" { (error) }
            button .button .primary { "Log in" }
            p .faint { "An administrator creates tokens with " code { "longshore tokens create" } ". "
                "A token with the scope " code { "read" } " can look at everything; " code { "operate" } " can also act." }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::HOSTILE;
    use super::*;

    #[test]
    fn the_form_calls_the_api_under_the_prefix() {
        let page = render("/q", "next=%2Fq%2Fui%2Fjobs", "").0;
        assert!(page.contains("data-api=\"/q/session\"") && page.contains("data-home=\"/q/ui\""), "{page}");
        assert!(page.contains("action=\"/q/ui/login?next=%2Fq%2Fui%2Fjobs\""), "{page}");
        let page = render("/q", HOSTILE, HOSTILE).0;
        assert!(
            page.contains("alert(1)") && !page.contains("<script>") && !page.contains("<img src=x"),
            "{page}"
        );
    }

    #[test]
    fn only_pages_of_the_dashboard_are_opened_after_the_login() {
        let url = |next: &str| Destination { next: Some(next.into()) }.url("/q");
        for own in ["/q/ui", "/q/ui/jobs?status=queued", "/q/ui?range=day"] {
            assert_eq!(url(own), own);
        }
        for other in
            ["https://evil.example", "//evil.example", "/q/uievil", "/jobs", "", "/q/ui/\\x", "/q/ui/a\nb"]
        {
            assert_eq!(url(other), "/q/ui", "{other:?}");
        }
        assert_eq!(Destination::default().url(""), "/ui");
    }
}
