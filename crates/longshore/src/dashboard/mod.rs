//! The dashboard: pages under `/ui` that show the queue to people.
//!
//! Each page is a function from data to HTML, next to the function that loads the data. Pages only read,
//! through [`Data`], which calls the client. Buttons are forms that call the routes of the API, and the API
//! checks the caller's scopes. Nothing here calls the store.
//!
//! | File | Owns |
//! |---|---|
//! | `layout`, `widgets`, `icons` | what all pages share |
//! | `overview`, `attention`, `chart` | the first page |
//! | `jobs`, `job_filter`, `job`, `timeline`, `why` | lists of jobs, one job |
//! | `failures` | failures in groups |
//! | `queues`, `workers`, `cron`, `kinds`, `new_job`, `flows`, `flow_graph`, `settings` | the other pages |
//! | `login`, `search`, `failure` | pages that lead elsewhere |
//! | `cache` | data that is kept for a second |
//! | `format`, `json`, `url`, `cron_words` | texts |
//! | `assets` | the stylesheet and the script |

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{FromRequestParts, OriginalUri, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use chrono::{DateTime, Utc};
use maud::Markup;

use crate::api::Server;
use crate::api::auth::Caller;
use crate::api::problem::{ApiResult, Problem, Slug};
use crate::api::route_table::RouteTable;
use crate::store::Scope;

mod assets;
mod attention;
mod cache;
mod chart;
mod cron;
mod cron_words;
mod failure;
mod failures;
mod flow_graph;
mod flows;
mod format;
mod icons;
mod job;
mod job_filter;
mod jobs;
mod json;
mod kinds;
mod layout;
mod login;
mod new_job;
mod overview;
mod queues;
mod search;
mod settings;
mod timeline;
mod url;
mod why;
mod widgets;
mod workers;

use cache::{Age, Cache, Data};
use layout::Section;
use url::Params;

/// The first segment of the paths of all pages.
const ROOT: &str = "/ui";
/// Sent by the script when it needs only the part of a page that changes.
const FRAGMENT: header::HeaderName = header::HeaderName::from_static("longshore-fragment");
/// Scripts, styles and requests only from this server; nothing inline, no frames.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// The settings of the dashboard: pages under `/ui` that show the queue.
///
/// ```
/// use longshore::api::{Api, Dashboard};
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let client = longshore::Client::connect("sqlite::memory:").await?;
/// # client.migrate().await?;
/// let dashboard = Dashboard::new().redact("send_email", ["password", "cards.*.number"]);
/// let app: axum::Router = axum::Router::new().nest("/queue", Api::new(client).dashboard(dashboard).router());
/// // The first page is at /queue/ui.
/// # Ok::<(), longshore::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, Default)]
pub struct Dashboard {
    base: Option<String>,
    redacted: BTreeMap<String, Vec<json::Path>>,
    hides_payloads: bool,
    configuration: Vec<(String, String)>,
}

impl Dashboard {
    /// A dashboard that shows everything to those who may read it.
    pub fn new() -> Self {
        Dashboard::default()
    }

    /// Shows `••••` instead of these values in the payloads, results and metadata of a kind. A path is
    /// a list of keys separated by dots; `*` stands for any key and for every item of an array.
    ///
    /// This concerns the pages only. The API still returns the values to everybody who may read jobs.
    pub fn redact<S: AsRef<str>>(
        mut self,
        kind: impl Into<String>,
        paths: impl IntoIterator<Item = S>,
    ) -> Self {
        let paths = paths.into_iter().map(|path| json::Path::new(path.as_ref()));
        self.redacted.entry(kind.into()).or_default().extend(paths);
        self
    }

    /// Shows no payloads, results, metadata and steps.
    ///
    /// This concerns the pages only. The API still returns them to everybody who may read jobs.
    pub fn hide_payloads(mut self) -> Self {
        self.hides_payloads = true;
        self
    }

    /// Adds settings of the program to the page Settings. They must contain no secrets.
    pub fn configuration<N: Into<String>, V: Into<String>>(
        mut self,
        settings: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        self.configuration.extend(settings.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    /// Sets the path under which browsers see the API, for example `/queue`. Needed only if a proxy
    /// removes a prefix before it forwards requests. The prefix of an Axum router is known.
    pub fn base_path(mut self, base: impl Into<String>) -> Self {
        let base = base.into();
        let trimmed = base.trim_matches('/');
        self.base = Some(if trimmed.is_empty() { String::new() } else { format!("/{trimmed}") });
        self
    }

    /// The hidden paths of a kind.
    fn redacted(&self, kind: &str) -> &[json::Path] {
        self.redacted.get(kind).map(Vec::as_slice).unwrap_or_default()
    }

    /// The path before `/ui`: what a router that this one is nested in has removed from the path.
    fn base_of(&self, original: &Uri, seen: &Uri) -> String {
        match &self.base {
            Some(base) => base.clone(),
            None => original.path().strip_suffix(seen.path()).unwrap_or_default().to_owned(),
        }
    }
}

/// The dashboard of one server.
pub(crate) struct State {
    dashboard: Arc<Dashboard>,
    cache: Arc<Cache>,
}

impl State {
    pub(crate) fn new(dashboard: Dashboard) -> Self {
        State { dashboard: Arc::new(dashboard), cache: Arc::default() }
    }
}

/// Adds the pages to the routes of the API.
pub(crate) fn add_routes(table: RouteTable, dashboard: &Dashboard) -> RouteTable {
    let dashboard = Arc::new(dashboard.clone());
    let pages: [(&str, MethodRouter<Server>); 19] = [
        ("/ui", get(overview::page)),
        ("/ui/jobs", get(jobs::page)),
        ("/ui/jobs/{id}", get(job::page)),
        ("/ui/queues", get(queues::page)),
        ("/ui/queues/{name}", get(queues::one)),
        ("/ui/failures", get(failures::page)),
        ("/ui/failures/{fingerprint}", get(failures::one)),
        ("/ui/workers", get(workers::page)),
        ("/ui/cron", get(cron::page)),
        ("/ui/kinds", get(kinds::page)),
        ("/ui/kinds/{name}", get(kinds::one)),
        ("/ui/flows", get(flows::page)),
        ("/ui/flows/{id}", get(flows::one)),
        ("/ui/settings", get(settings::page)),
        ("/ui/new", get(new_job::page)),
        ("/ui/search", get(search::page)),
        ("/ui/keys", get(search::keys)),
        ("/ui/", get(failure::without_slash)),
        ("/ui/{*path}", get(failure::unknown)),
    ];
    let table = pages.into_iter().fold(table, |table, (path, page)| {
        table.page(path, Some(Scope::Read), page, |page| failure::as_pages(page, dashboard.clone()))
    });
    // Without a scope: they are needed to log in, and contain nothing about the queue.
    let login = get(login::page).post(login::submit);
    table
        .page("/ui/login", None, login, |page| page)
        .page("/ui/session", None, get(login::state), |page| page)
        .page("/ui/assets/{file}", None, get(assets::file), |page| page)
}

/// What a page knows about the request and who sent it.
#[derive(Clone, Debug)]
struct Frame {
    /// The path before `/ui`.
    base: String,
    /// The path from `/ui` on.
    path: String,
    params: Params,
    rights: Rights,
    /// The database's clock.
    now: DateTime<Utc>,
    dashboard: Arc<Dashboard>,
}

/// What the caller may do. Decides which buttons a page has; the API decides again.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rights {
    enqueue: bool,
    operate: bool,
    admin: bool,
    /// The queues that the token covers; `None` means all.
    queues: Option<Vec<String>>,
    /// The name of the token; `None` without one.
    token: Option<String>,
}

impl Rights {
    fn of(caller: &Caller) -> Self {
        let has = |scope| caller.must_have(scope).is_ok();
        Rights {
            enqueue: has(Scope::Enqueue),
            operate: has(Scope::Operate),
            admin: has(Scope::Admin),
            queues: caller.queues().map(<[String]>::to_vec),
            token: match caller {
                Caller::Anonymous => None,
                Caller::Token(token) => Some(token.name.clone()),
            },
        }
    }

    fn covers(&self, queue: &str) -> bool {
        self.queues.as_ref().is_none_or(|queues| queues.iter().any(|covered| covered == queue))
    }

    fn covers_all(&self) -> bool {
        self.queues.is_none()
    }
}

impl Frame {
    /// The URL of a page or of a route of the API.
    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// The URL of this page with other parameters.
    fn here(&self, params: &Params) -> String {
        params.url(&self.url(&self.path))
    }
}

/// A request for a page.
struct View {
    frame: Frame,
    caller: Caller,
    data: Data,
    /// Whether only the part that changes is wanted.
    is_fragment: bool,
}

impl View {
    /// The response with this content.
    fn respond(&self, section: Section, title: &str, content: Markup) -> Response {
        if self.is_fragment {
            return html(StatusCode::OK, layout::main(section, self.frame.now, content));
        }
        html(StatusCode::OK, layout::whole(&self.frame, section, title, content))
    }
}

impl FromRequestParts<Server> for View {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, server: &Server) -> ApiResult<Self> {
        let state = server.dashboard.as_ref();
        let state = state.ok_or_else(|| Problem::new(Slug::NotFound, "the dashboard is off"))?;
        let caller = Caller::from_request_parts(parts, server).await?;
        let age = if wants_fresh(&parts.headers) { Age::Fresh } else { Age::Kept };
        let data = Data { client: server.client.clone(), cache: state.cache.clone(), age };
        let now = *data.now().await?;
        let frame = frame_of(parts, &state.dashboard, Rights::of(&caller), now);
        Ok(View { frame, caller, data, is_fragment: parts.headers.contains_key(&FRAGMENT) })
    }
}

fn frame_of(parts: &Parts, dashboard: &Arc<Dashboard>, rights: Rights, now: DateTime<Utc>) -> Frame {
    let original = parts.extensions.get::<OriginalUri>().map_or(&parts.uri, |original| &original.0);
    let query = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(&parts.uri);
    // Cannot fail: every query string is a list of pairs.
    let query = query.map(|query| query.0).unwrap_or_default();
    // No stored text contains NUL, and Postgres rejects it.
    let query = query.into_iter().map(|(key, value)| (key, value.replace('\0', ""))).collect();
    Frame {
        base: dashboard.base_of(original, &parts.uri),
        path: parts.uri.path().to_owned(),
        params: Params::new(query),
        rights,
        now,
        dashboard: dashboard.clone(),
    }
}

/// The script sends this after an action.
fn wants_fresh(headers: &HeaderMap) -> bool {
    headers.get(header::CACHE_CONTROL).is_some_and(|value| value.as_bytes() == b"no-cache")
}

/// A page with the headers that every page has.
fn html(status: StatusCode, page: Markup) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "same-origin"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (status, headers, page.into_string()).into_response()
}

/// Sends browsers that open the page at `/` to the first page of the dashboard.
pub(crate) fn redirect_browsers(page: MethodRouter<Server>, dashboard: &Dashboard) -> MethodRouter<Server> {
    let dashboard = Arc::new(dashboard.clone());
    page.layer(middleware::from_fn(move |request: Request, next: Next| {
        let dashboard = dashboard.clone();
        async move {
            let accepted = request.headers().get(header::ACCEPT).and_then(|accepted| accepted.to_str().ok());
            if !accepted.is_some_and(|accepted| accepted.contains("text/html")) {
                return next.run(request).await;
            }
            let original = request.extensions().get::<OriginalUri>();
            let path = original.map_or(request.uri().path(), |original| original.0.path());
            let base = dashboard.base.as_deref().unwrap_or(path.trim_end_matches('/'));
            (StatusCode::SEE_OTHER, [(header::LOCATION, format!("{base}{ROOT}"))]).into_response()
        }
    }))
}

/// Texts that would run as a script if a page did not escape them.
#[cfg(test)]
const HOSTILE: &str = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'&lt;";

/// Fails if a page contains a part of [`HOSTILE`] that a browser would interpret.
#[cfg(test)]
#[track_caller]
fn assert_escaped(page: &Markup) {
    let page = &page.0;
    assert!(page.contains("alert(1)"), "the text is not on the page: {page}");
    assert!(!page.contains("<script>alert") && !page.contains("<img"), "{page}");
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Frame {
        /// For tests of pages: an operator of all queues, with the API under `/q`.
        pub(super) fn of_operator(path: &str) -> Self {
            Frame {
                base: "/q".into(),
                path: path.into(),
                params: Params::default(),
                rights: Rights { enqueue: true, operate: true, admin: true, queues: None, token: None },
                now: "2031-05-06T07:08:09Z".parse().unwrap(),
                dashboard: Arc::default(),
            }
        }

        /// The same for somebody who may only read.
        pub(super) fn of_reader(path: &str) -> Self {
            let rights = Rights { enqueue: false, operate: false, admin: false, queues: None, token: None };
            Frame { rights, ..Frame::of_operator(path) }
        }
    }

    #[test]
    fn the_base_is_the_prefix_of_the_router_or_the_configured_one() {
        let (original, seen) = ("/a/b/ui/jobs".parse().unwrap(), "/ui/jobs".parse().unwrap());
        assert_eq!(Dashboard::new().base_of(&original, &seen), "/a/b");
        assert_eq!(Dashboard::new().base_of(&seen, &seen), "");
        assert_eq!(Dashboard::new().base_path("queue/").base_of(&seen, &seen), "/queue");
        assert_eq!(Dashboard::new().base_path("/").base_of(&original, &seen), "");
    }
}
