//! The dashboard: every page on both engines, its headers, prefixes, and who sees what. What the pages
//! contain is tested next to them.

use std::time::Instant;

use axum::body::Body;
use axum::http::Request;
use longshore::api::{Access, Api, Dashboard};
use longshore::{Edit, Flow, NewSchedule, Outcome, Scope, Status, UnknownKinds, task};
use serde_json::json;
use tower::ServiceExt;

use super::auth::token;
use super::client::{HttpClient, Response};
use crate::fixture::{Fixture, SECOND, job};

cases! {
    every_page_is_served_with_its_security_headers,
    pages_work_under_the_prefix_of_another_router,
    a_token_that_may_only_read_sees_no_buttons_and_is_refused,
    a_browser_without_a_token_is_sent_to_the_login_page,
    a_token_limited_to_queues_sees_nothing_of_other_queues,
    hostile_texts_are_escaped_on_every_page,
    a_fragment_is_the_part_that_changes_and_shows_the_effect_of_an_action,
    a_page_that_cannot_be_shown_says_why,
    browsers_are_sent_from_the_root_to_the_dashboard,
    a_browser_without_a_script_can_log_in,
    files_may_be_kept_forever_and_have_no_scope,
    search_opens_what_the_text_means,
    payloads_can_be_hidden_and_redacted,
}

/// Texts that would run as a script, and that are valid names.
const HOSTILE: &str = "\"><script>alert(1)</script><img src=x onerror=alert(1)>";
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
                      connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

fn api(fixture: &Fixture) -> Api {
    Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).dashboard(Dashboard::new())
}

fn open(fixture: &Fixture) -> HttpClient {
    HttpClient::for_api(api(fixture))
}

fn with_tokens(fixture: &Fixture) -> HttpClient {
    HttpClient::for_api(api(fixture).access(Access::Tokens))
}

/// Stores a job of each status, a flow and a schedule, with these texts, and returns the paths of all
/// pages.
async fn fill(fixture: &Fixture, name: &str) -> Vec<String> {
    let named = || job(name).queue(name).group(name).tags([name]).context(name).idempotency_key(name);
    let ids = [
        fixture.add(named()).await,
        fixture.ended(job(name), Outcome::Succeeded).await,
        fixture.ended(job(name), Outcome::FailedPermanent).await,
        fixture.running(job(name)).await.lease().id,
    ];
    let client = fixture.client();
    let flow =
        Flow::new(name).task(task(name, job(name).queue(name))).task(task("then", job(name)).after(name));
    let flow = client.enqueue_flow(flow).await.expect("a flow");
    client.put_schedule(NewSchedule::new(name, "0 3 * * *", job(name))).await.expect("a schedule");
    let encoded = encoded(name);
    let mut paths = vec![
        "/ui".to_owned(),
        "/ui?range=week".into(),
        "/ui/jobs".into(),
        format!("/ui/jobs?kind={encoded}&queue={encoded}&error={encoded}&tag={encoded}&operation={encoded}"),
        "/ui/queues".into(),
        format!("/ui/queues/{encoded}"),
        "/ui/workers".into(),
        "/ui/cron".into(),
        "/ui/kinds".into(),
        format!("/ui/kinds/{encoded}"),
        "/ui/flows".into(),
        format!("/ui/flows/{}", flow.id),
        "/ui/settings".into(),
        format!("/ui/new?kind={encoded}"),
        format!("/ui/new?from={}", ids[0]),
        "/ui/keys".into(),
    ];
    paths.extend(ids.map(|id| format!("/ui/jobs/{id}")));
    paths
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

#[track_caller]
fn assert_page(page: &Response, path: &str) {
    assert_eq!(page.status, 200, "{path}: {}", page.text);
    assert_eq!(page.header("content-security-policy"), POLICY, "{path}");
    assert_eq!(page.header("x-content-type-options"), "nosniff", "{path}");
    assert_eq!(page.header("content-type"), "text/html; charset=utf-8", "{path}");
    assert_eq!(page.header("cache-control"), "no-store", "{path}");
    assert_eq!(page.text.matches("<script").count(), 1, "{path}: only the module");
    assert!(!page.text.contains("<style") && !page.text.contains(" style="), "{path}: {}", page.text);
}

async fn every_page_is_served_with_its_security_headers(fixture: Fixture) {
    let http = open(&fixture);
    for path in ["/ui", "/ui/jobs", "/ui/queues", "/ui/workers", "/ui/cron", "/ui/kinds", "/ui/flows"] {
        assert_page(&http.get(path).await, path);
    }
    for path in fill(&fixture, "mail").await {
        let page = http.get(&path).await;
        assert_page(&page, &path);
        assert!(page.text.contains("</html>"), "{path}");
    }
}

async fn pages_work_under_the_prefix_of_another_router(fixture: Fixture) {
    let paths = fill(&fixture, "mail").await;
    let router = axum::Router::new().nest("/a/queue", api(&fixture).router());
    for path in paths {
        let request = Request::get(format!("/a/queue{path}")).body(Body::empty()).expect("a request");
        let response = router.clone().oneshot(request).await.expect("infallible");
        assert_eq!(response.status(), 200, "{path}");
        let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body");
        let text = String::from_utf8_lossy(&bytes);
        for attribute in ["href=\"/", "action=\"/", "src=\"/", "data-then=\"/"] {
            for (at, _) in text.match_indices(attribute) {
                let url = &text[at + attribute.len() - 1..][..10.min(text.len() - at)];
                assert!(url.starts_with("/a/queue/"), "{path}: {attribute}{url}");
            }
        }
        assert!(text.contains("data-base=\"/a/queue\""), "{path}");
    }
    // Behind a proxy that removes the prefix, it is configured.
    let proxied = Api::new(fixture.client()).dashboard(Dashboard::new().base_path("/b"));
    let page = HttpClient::for_api(proxied).get("/ui/jobs").await.expect_status(200);
    assert!(page.text.contains("href=\"/b/ui/queues\""), "{}", page.text);
}

async fn a_token_that_may_only_read_sees_no_buttons_and_is_refused(fixture: Fixture) {
    let paths = fill(&fixture, "mail").await;
    let (_, read) = token(&fixture, Scope::Read, None).await;
    let (_, operate) = token(&fixture, Scope::Admin, None).await;
    let (reader, operator) =
        (with_tokens(&fixture).with_token(&read), with_tokens(&fixture).with_token(&operate));
    let mut actions = 0;
    for path in paths.iter().filter(|path| !path.starts_with("/ui/new")) {
        let page = reader.get(path).await.expect_status(200);
        assert!(
            !page.text.contains("method=\"post\"") && !page.text.contains("<textarea"),
            "{path}: {}",
            page.text
        );
        assert!(!page.text.contains("/ui/new"), "{path}");
        actions += operator.get(path).await.expect_status(200).text.matches("method=\"post\"").count();
    }
    assert!(actions > 10, "an operator has buttons: {actions}");
    reader.get("/ui/new").await.expect_status(403);
    let id = fixture.add(job("mail")).await;
    reader.post(&format!("/jobs/{id}/cancel"), &json!({})).await.expect_problem(403, "forbidden", "operate");
    assert_eq!(fixture.job(id).await.status, Status::Queued);
}

async fn a_browser_without_a_token_is_sent_to_the_login_page(fixture: Fixture) {
    let http = with_tokens(&fixture);
    let page = http.get("/ui/jobs?kind=mail").await.expect_status(303);
    assert_eq!(page.header("location"), "/ui/login?next=%2Fui%2Fjobs%3Fkind%3Dmail");
    let login = http.get("/ui/login").await;
    assert_page(&login, "/ui/login");
    assert!(login.text.contains("data-api=\"/session\""), "{}", login.text);
    // The script gets the problem, and goes there itself.
    http.send("GET", "/ui/jobs", &[("longshore-fragment", "1")], "").await.expect_problem(
        401,
        "unauthorized",
        "send",
    );
    let open = open(&fixture).get("/ui/login").await.expect_status(303);
    assert_eq!(open.header("location"), "/ui", "an open server needs no login");
}

async fn a_token_limited_to_queues_sees_nothing_of_other_queues(fixture: Fixture) {
    let hidden = fixture.add(job("secret_kind").queue("secret-queue")).await;
    let visible = fixture.add(job("mail").queue("mail")).await;
    let (_, limited) = token(&fixture, Scope::Read, Some(&["mail"])).await;
    let http = with_tokens(&fixture).with_token(&limited);
    for path in ["/ui", "/ui/jobs", "/ui/queues", "/ui/kinds", "/ui/settings", "/ui/queues/mail"] {
        let page = http.get(path).await.expect_status(200);
        assert!(!page.text.contains("secret"), "{path}: {}", page.text);
    }
    assert!(http.get("/ui/jobs").await.text.contains(&visible.to_string()));
    for path in
        ["/ui/workers", "/ui/cron", "/ui/flows", "/ui/queues/secret-queue", "/ui/jobs?queue=secret-queue"]
    {
        http.get(path).await.expect_status(403);
    }
    http.get(&format!("/ui/jobs/{hidden}")).await.expect_status(403);
    let found = http.get(&format!("/ui/search?q={hidden}")).await.expect_status(303);
    assert!(!found.header("location").contains(&format!("/ui/jobs/{hidden}")));
}

async fn hostile_texts_are_escaped_on_every_page(fixture: Fixture) {
    let http = open(&fixture);
    let mut seen = 0;
    for path in fill(&fixture, HOSTILE).await {
        let page = http.get(&path).await;
        assert_page(&page, &path);
        assert!(
            !page.text.contains("<script>") && !page.text.contains("<img src=x"),
            "{path}: {}",
            page.text
        );
        seen += usize::from(page.text.contains("&lt;script&gt;alert(1)"));
    }
    assert!(seen > 12, "most pages show the text: {seen}");
    let missing = http.get(&format!("/ui/{}", encoded(HOSTILE))).await.expect_status(404);
    assert!(!missing.text.contains("<script>"), "{}", missing.text);
}

async fn a_fragment_is_the_part_that_changes_and_shows_the_effect_of_an_action(fixture: Fixture) {
    let http = open(&fixture);
    let id = fixture.add(job("mail")).await;
    let path = format!("/ui/jobs/{id}");
    let get = async |headers: &[(&str, &str)]| http.send("GET", &path, headers, "").await.expect_status(200);
    let began = Instant::now();
    let fragment = get(&[("longshore-fragment", "1")]).await;
    assert!(fragment.text.starts_with("<main id=\"main\""), "{}", fragment.text);
    assert_eq!(fragment.header("content-security-policy"), POLICY);
    fixture.edit(id, Edit::default().priority(77)).await.expect("edit");
    let kept = get(&[("longshore-fragment", "1")]).await;
    let is_kept = !kept.text.contains("<dd>77</dd>");
    assert!(is_kept || began.elapsed() >= SECOND, "data is kept for a second");
    let fresh = get(&[("longshore-fragment", "1"), ("cache-control", "no-cache")]).await;
    assert!(fresh.text.contains("<dd>77</dd>"), "{}", fresh.text);
}

async fn a_page_that_cannot_be_shown_says_why(fixture: Fixture) {
    let http = open(&fixture);
    for (path, status, text) in [
        ("/ui/jobs/01990000-0000-7000-8000-000000000000", 404, "does not exist"),
        ("/ui/jobs/x", 400, "is not a job id"),
        ("/ui/flows/x", 400, "is not the id of a flow"),
        ("/ui/nothing/here", 404, "There is no page"),
    ] {
        let page = http.get(path).await.expect_status(status);
        assert!(page.text.contains(text), "{path}: {}", page.text);
        assert_eq!(page.header("content-security-policy"), POLICY, "{path}");
    }
    let page = http.get("/ui/jobs?status=done&older_than=soon&cursor=x").await.expect_status(200);
    assert!(page.text.contains("does not exist") && page.text.contains("is not a time"), "{}", page.text);
    http.get("/ui/jobs?kind=%00&error=%00a").await.expect_status(200);
}

async fn browsers_are_sent_from_the_root_to_the_dashboard(fixture: Fixture) {
    let http = open(&fixture);
    let browser = [("accept", "text/html,application/xhtml+xml,*/*;q=0.8")];
    let page = http.send("GET", "/", &browser, "").await.expect_status(303);
    assert_eq!(page.header("location"), "/ui");
    http.get("/").await.expect_status(200);
    let json = http.send("GET", "/", &[("accept", "application/json")], "").await.expect_status(200);
    assert_eq!(json.json()["name"], "longshore");
    let page = with_tokens(&fixture).send("GET", "/", &browser, "").await.expect_status(303);
    assert_eq!(page.header("location"), "/ui", "the dashboard shows the login page");
    with_tokens(&fixture).get("/").await.expect_status(401);
    HttpClient::new(&fixture).send("GET", "/", &browser, "").await.expect_status(200);
    HttpClient::new(&fixture).get("/ui").await.expect_status(404);
    assert_eq!(http.get("/ui/").await.expect_status(303).header("location"), "/ui");
}

async fn a_browser_without_a_script_can_log_in(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let http = with_tokens(&fixture);
    let submit = async |query: &str, token: &str| {
        let form = [("content-type", "application/x-www-form-urlencoded")];
        http.send("POST", &format!("/ui/login{query}"), &form, &format!("token={token}")).await
    };
    let page = submit("?next=%2Fui%2Fjobs%3Fstatus%3Dqueued", &secret).await.expect_status(303);
    assert_eq!(page.header("location"), "/ui/jobs?status=queued");
    let cookie = page.header("set-cookie").split(';').next().expect("a cookie").to_owned();
    http.send("GET", "/ui/jobs", &[("cookie", &cookie)], "").await.expect_status(200);
    let elsewhere = submit("?next=https%3A%2F%2Fevil.example", &secret).await.expect_status(303);
    assert_eq!(elsewhere.header("location"), "/ui");
    let refused = submit("", "wrong").await.expect_status(401);
    assert!(
        refused.text.contains("unknown, expired or revoked") && !refused.headers.contains_key("set-cookie")
    );
    let foreign = [("content-type", "application/x-www-form-urlencoded"), ("origin", "https://evil.example")];
    http.send("POST", "/ui/login", &foreign, &format!("token={secret}")).await.expect_status(403);
}

async fn files_may_be_kept_forever_and_have_no_scope(fixture: Fixture) {
    let http = with_tokens(&fixture);
    let login = http.get("/ui/login").await.text;
    let file = |end: &str| {
        let at = login.find(end).expect(end) + end.len();
        let start = login[..at].rfind("/ui/assets/").expect("a path");
        login[start..at].to_owned()
    };
    for (end, content_type) in [(".css", "text/css"), (".js", "text/javascript"), (".svg", "image/svg+xml")] {
        let file = http.get(&file(end)).await.expect_status(200);
        assert!(file.header("content-type").starts_with(content_type));
        assert!(file.header("cache-control").contains("immutable"));
    }
    http.get("/ui/assets/other.css").await.expect_status(404);
}

async fn search_opens_what_the_text_means(fixture: Fixture) {
    let http = open(&fixture);
    let id = fixture.add(job("mail").queue("letters")).await;
    let flow = crate::flows::put(&fixture, longshore::Flow::new("f").task(crate::flows::named("a"))).await;
    for (text, location) in [
        (id.to_string(), format!("/ui/jobs/{id}")),
        (flow.id.to_string(), format!("/ui/flows/{}", flow.id)),
        (id.to_string()[..35].into(), format!("/ui/jobs?error={}", &id.to_string()[..35])),
        ("letters".into(), "/ui/queues/letters".into()),
        ("mail".into(), "/ui/jobs?kind=mail".into()),
        ("no route".into(), "/ui/jobs?error=no%20route".into()),
    ] {
        let found = http.get(&format!("/ui/search?q={}", encoded(&text))).await.expect_status(303);
        assert_eq!(found.header("location"), location);
    }
}

async fn payloads_can_be_hidden_and_redacted(fixture: Fixture) {
    // Names that no id can contain, which is hexadecimal.
    let payload = json!({ "user": "grace", "password": "s3cret" });
    let id = fixture.add(longshore::NewJob::new("login", &payload)).await;
    let page = async |dashboard: Dashboard| {
        let api = Api::new(fixture.client()).dashboard(dashboard);
        HttpClient::for_api(api).get(&format!("/ui/jobs/{id}")).await.expect_status(200).text
    };
    assert!(page(Dashboard::new()).await.contains("s3cret"));
    let redacted = page(Dashboard::new().redact("login", ["password"])).await;
    assert!(
        redacted.contains("grace") && redacted.contains("••••") && !redacted.contains("s3cret"),
        "{redacted}"
    );
    let hidden = page(Dashboard::new().hide_payloads()).await;
    assert!(!hidden.contains("grace") && !hidden.contains("s3cret"), "{hidden}");
}
