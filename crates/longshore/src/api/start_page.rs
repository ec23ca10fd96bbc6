//! The page at `/`: what this server is, and where to go from here. Like the documentation, it
//! needs a token if the server requires tokens and does not make the documentation public.

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::Server;

/// The page has one style sheet inside itself, and nothing else.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'";

/// What this server is, and some of its addresses.
#[derive(Serialize, ToSchema)]
pub(super) struct StartPage {
    /// Always `longshore`.
    #[schema(example = "longshore")]
    name: &'static str,
    /// Null if the server requires tokens: an attacker could look up the faults of a version.
    #[schema(required)]
    version: Option<&'static str>,
    /// Whether the other routes require a token.
    requires_token: bool,
    links: Vec<Link>,
}

/// An address of this server.
#[derive(Serialize, ToSchema)]
pub(super) struct Link {
    #[schema(example = "/jobs")]
    href: String,
    /// What is there.
    title: &'static str,
}

/// Explains what this server is: a page for people, or JSON if `Accept` prefers that.
#[utoipa::path(
    get,
    path = "/",
    tag = "documentation",
    responses(
        (status = 200, description = "The page, or the same as JSON.", content(
            (String = "text/html"),
            (StartPage = "application/json"),
        )),
    ),
)]
pub(super) async fn start_page(
    State(server): State<Server>,
    OriginalUri(uri): OriginalUri,
    headers: HeaderMap,
) -> Response {
    // The router may be nested under a prefix.
    let prefix = uri.path().trim_end_matches('/');
    let page = start_page_of(&server, prefix);
    if wants_json(&headers) {
        return Json(page).into_response();
    }
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, html(&page)).into_response()
}

/// Whether the caller named JSON and not HTML.
fn wants_json(headers: &HeaderMap) -> bool {
    let accepts = |media_type: &str| {
        let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        accepted.flat_map(|value| value.split(',')).any(|range| {
            range.split(';').next().is_some_and(|range| range.trim().eq_ignore_ascii_case(media_type))
        })
    };
    accepts("application/json") && !accepts("text/html")
}

fn start_page_of(server: &Server, prefix: &str) -> StartPage {
    let mut links = Vec::new();
    let mut add = |path: &str, title| links.push(Link { href: format!("{prefix}{path}"), title });
    if cfg!(feature = "swagger") {
        add("/docs", "The API: read it and try it");
    }
    add("/api-docs/openapi.json", "The API as an OpenAPI document");
    add("/jobs", "Jobs, newest first");
    add("/queues", "Queues: waiting and running jobs, limits");
    add("/workers", "Worker processes");
    add("/stats", "Numbers of jobs, throughput and run times");
    if server.metrics.is_some() {
        add("/metrics", "Metrics for Prometheus");
    }
    add("/health", "Whether the database replies");
    let requires_token = server.guard.requires_tokens();
    let version = (!requires_token).then_some(env!("CARGO_PKG_VERSION"));
    StartPage { name: "longshore", version, requires_token, links }
}

fn html(page: &StartPage) -> String {
    let access = if page.requires_token {
        "<p>Most addresses require a token, sent as <code>Authorization: Bearer &lt;token&gt;</code>. \
         <code>longshore tokens create</code> creates one.</p>"
    } else {
        ""
    };
    let links: String = page
        .links
        .iter()
        .map(|Link { href, title }| {
            let href = escaped(href);
            format!("<li><a href=\"{href}\">{href}</a> {title}</li>\n")
        })
        .collect();
    format!(
        "<!doctype html>
<html lang=\"en\">
<meta charset=\"utf-8\">
<meta name=\"viewport\" content=\"width=device-width\">
<title>Longshore</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 42em; margin: 3em auto; padding: 0 1em; }}
a {{ display: inline-block; min-width: 13em; font-family: ui-monospace, monospace; }}
ul {{ list-style: none; padding: 0; }}
</style>
<h1>Longshore{version}</h1>
<p>This is the HTTP API of a background job queue. Programs enqueue jobs here, and workers run them.</p>
{access}<ul>
{links}</ul>
<p>The command <code>longshore</code> shows the same in a terminal: <code>longshore jobs list</code>,
<code>longshore stats</code>, <code>longshore --help</code>.</p>
</html>
",
        version = page.version.map(|version| format!(" {version}")).unwrap_or_default(),
    )
}

/// The prefix comes from the request's URL, which anybody can choose.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn a_browser_gets_the_page_and_a_program_can_ask_for_json() {
        for (accept, expected) in [
            (None, false),
            (Some("*/*"), false),
            (Some("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"), false),
            (Some("text/html, application/json"), false),
            (Some("application/json"), true),
            (Some("text/plain, Application/JSON;q=0.5"), true),
        ] {
            let mut headers = HeaderMap::new();
            headers.extend(accept.map(|accept| (header::ACCEPT, HeaderValue::from_static(accept))));
            assert_eq!(wants_json(&headers), expected, "{accept:?}");
        }
    }

    #[test]
    fn the_prefix_of_the_url_cannot_add_markup() {
        let link = Link { href: "/\"><script>&".into(), title: "t" };
        let page = StartPage { name: "longshore", version: None, requires_token: true, links: vec![link] };
        let html = html(&page);
        assert!(html.contains("href=\"/&quot;&gt;&lt;script&gt;&amp;\""), "{html}");
        assert!(!html.contains("<script"), "{html}");
        assert!(html.contains("longshore tokens create"), "{html}");
    }
}
