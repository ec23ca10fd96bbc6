//! The login page: it exchanges a token for a session, through `POST /session`.

use axum::extract::{OriginalUri, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};

use super::{assets, layout};
use crate::api::Server;

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
    super::html(StatusCode::OK, layout::bare(&base, "Log in", render(&base)))
}

/// The page to open afterwards is in the URL, where the script finds it.
fn render(base: &str) -> Markup {
    html! {
        form #login .card method="post" action=(format!("{base}/session")) data-home=(format!("{base}/ui")) {
            img src=(format!("{base}{}", assets::ICON.path)) width="40" height="40" alt="";
            h1 { "Log in to Longshore" }
            label { span { "Token" }
                input name="token" type="password" required autofocus autocomplete="current-password" spellcheck="false";
            }
            p #login-error .error role="alert" {}
            button .button .primary { "Log in" }
            p .faint { "An administrator creates tokens with " code { "longshore tokens create" } ". "
                "A token with the scope " code { "read" } " can look at everything; " code { "operate" } " can also act." }
            noscript { p .notice .is-warning { "Logging in needs JavaScript." } }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_form_calls_the_api_under_the_prefix() {
        let page = super::render("/q").0;
        assert!(page.contains("action=\"/q/session\"") && page.contains("data-home=\"/q/ui\""), "{page}");
    }
}
