//! The walk over every operation and every page: who is refused, and that a token which covers only some queues
//! learns nothing about others. [`OPERATIONS`] and `pages::PAGES` are the table; an operation or a page that is missing there
//! fails the cases.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};

use longshore::api::{Access, Api, Dashboard, Operations, hash_token};
use longshore::store::{Claimed, NewWorker};
use longshore::{
    Action, FailureFilter, Flow, JobFilter, JobId, NewJob, NewKind, NewOperation, NewSchedule, NewToken,
    Scope, Status, UnknownKinds, WorkerId, task,
};
use serde_json::Value;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::auth::{token, token_with};
use super::client::{HttpClient, Response};
use crate::fixture::{DAY, Fixture, MINUTE, done, failed_permanently, ids};

cases! {
    no_operation_is_missing_in_the_walk,
    no_operation_accepts_a_bad_token,
    every_operation_requires_its_scope,
    every_operation_keeps_a_limited_token_to_its_queues,
    public_operations_reveal_nothing,
}

/// What a token with the right scope that covers only some queues gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limited {
    /// For its own queue the same as a token without limits, for another queue this status.
    Own(u16),
    /// It is refused: the operation concerns all queues.
    Never,
}

use Limited::{Never, Own};

/// Method and path, body, status, what a limited token gets. Each word in braces is replaced by a new object of that
/// sort: see [`Queue::fill`].
type Row = (&'static str, &'static str, u16, Limited);

const LEASE: &str = r#"{"worker_id":"{worker}","id":"{leased}","lease_no":1"#;

const OPERATIONS: &[Row] = &[
    ("GET /", "", 200, Own(200)),
    ("GET /api-docs/openapi.json", "", 200, Own(200)),
    ("GET /docs", "", 308, Own(308)),
    ("GET /docs/", "", 200, Own(200)),
    ("GET /docs/swagger-ui.css", "", 200, Own(200)),
    ("GET /cron", "", 200, Never),
    ("GET /cron/{schedule}", "", 200, Never),
    (
        "PUT /cron/{schedule}",
        r#"{"cron":"0 3 * * *","job":{"kind":"a","payload":1,"queue":"{queue}"}}"#,
        200,
        Never,
    ),
    ("DELETE /cron/{schedule}", "", 204, Never),
    ("POST /cron/{schedule}/pause", "", 200, Never),
    ("POST /cron/{schedule}/resume", "", 200, Never),
    ("POST /cron/{schedule}/run", "", 201, Never),
    ("GET /dead-letters", "", 200, Never),
    ("GET /dead-letters?queue={queue}", "", 200, Own(403)),
    ("POST /dead-letters/redrive", r#"{"kind":"none"}"#, 200, Never),
    ("POST /dead-letters/redrive", r#"{"kind":"none","queue":"{queue}"}"#, 200, Own(403)),
    ("POST /dead-letters/{dead}/redrive", "", 200, Own(403)),
    // What the stream shows is tested in `events.rs`.
    ("GET /events", "", 200, Own(200)),
    ("POST /events", r#"{"name":"{event}","payload":1}"#, 200, Never),
    ("GET /events/{event}", "", 200, Never),
    ("GET /failures", "", 200, Never),
    ("GET /failures/{failure}", "", 200, Never),
    ("GET /flows", "", 200, Never),
    ("POST /flows", r#"{"name":"walk","tasks":[{"kind":"a","payload":1,"queue":"{queue}"}]}"#, 201, Own(403)),
    (
        "POST /flows",
        r#"{"name":"walk","id":"{flow}","tasks":[{"kind":"a","payload":1,"queue":"mine"}]}"#,
        200,
        Own(403),
    ),
    ("GET /flows/{flow}", "", 200, Own(403)),
    ("POST /flows/{flow}/cancel", "", 200, Own(403)),
    ("POST /flows/{flow}/jobs", r#"{"jobs":[{"kind":"a","payload":1,"queue":"{queue}"}]}"#, 200, Own(403)),
    ("POST /flows/{flow}/retry", "", 200, Own(403)),
    ("POST /flows/{flow}/seal", "", 200, Own(403)),
    ("GET /flows/{flow}/tasks", "", 200, Own(403)),
    ("GET /groups?name={group}", "", 200, Own(200)),
    ("GET /groups?name=ecre", "", 200, Own(200)),
    ("GET /jobs", "", 200, Never),
    ("GET /jobs?queue={queue}", "", 200, Own(403)),
    ("GET /jobs?queue={queue}&idempotency_key={job_key}", "", 200, Own(403)),
    ("POST /jobs", r#"{"kind":"a","payload":1,"queue":"{queue}"}"#, 201, Own(403)),
    ("POST /jobs", r#"{"kind":"a","payload":1,"queue":"mine","id":"{job}"}"#, 200, Own(403)),
    ("POST /jobs/batch", r#"[{"kind":"a","payload":1,"queue":"{queue}"}]"#, 200, Own(200)),
    ("POST /jobs/batch", r#"[{"kind":"a","payload":1,"queue":"mine","id":"{job}"}]"#, 200, Own(200)),
    ("POST /jobs/bulk", r#"{"action":"cancel","filter":{"kind":"none"}}"#, 200, Never),
    ("POST /jobs/bulk", r#"{"action":"cancel","filter":{"kind":"none","queue":"{queue}"}}"#, 200, Own(403)),
    ("GET /jobs/{job}", "", 200, Own(403)),
    ("GET /jobs/{job}?wait_seconds=0.001", "", 200, Own(403)),
    ("DELETE /jobs/{dead}", "", 204, Own(403)),
    ("PATCH /jobs/{job}", r#"{"priority":1}"#, 200, Own(403)),
    ("POST /jobs/{job}/cancel", "", 200, Own(403)),
    ("GET /jobs/{job}/explain", "", 200, Own(403)),
    ("POST /jobs/{dead}/retry", "", 200, Own(403)),
    ("POST /jobs/{job}/retry", r#"{"priority":1}"#, 200, Own(403)),
    ("GET /jobs/{job}/steps", "", 200, Own(403)),
    // Kinds belong to no queue.
    ("GET /kinds", "", 200, Own(200)),
    ("PUT /kinds/{kind}", r#"{"defaults":{"priority":1}}"#, 200, Never),
    ("DELETE /kinds/{kind}", "", 204, Never),
    ("POST /leases", r#"{"queues":["{queue}"],"kinds":["none"]}"#, 200, Own(403)),
    ("POST /leases", r#"{"worker_id":"{worker}","queues":["{queue}"],"kinds":["none"]}"#, 200, Own(403)),
    ("POST /leases", r#"{"worker_id":"{worker}","limit":0}"#, 200, Own(403)),
    ("POST /leases/inputs", "{lease}}", 200, Own(403)),
    ("POST /leases/join", r#"{lease},"name":"all"}"#, 409, Own(403)),
    ("POST /leases/journal", "{lease}}", 200, Own(403)),
    ("POST /leases/renew", r#"{"worker_id":"{worker}"}"#, 200, Own(403)),
    (
        "POST /leases/settle",
        r#"{"worker_id":"{worker}","items":[{"id":"{leased}","lease_no":1,"outcome":"succeeded"}]}"#,
        200,
        Own(403),
    ),
    (
        "POST /leases/spawn",
        r#"{lease},"name":"parts","jobs":[{"kind":"a","payload":1,"queue":"{queue}"}]}"#,
        200,
        Own(403),
    ),
    ("POST /leases/steps", r#"{lease},"steps":[{"name":"charge","value":1}]}"#, 200, Own(403)),
    ("POST /leases/wait", r#"{lease},"waits":[{"name":"nap","within_seconds":1}]}"#, 200, Own(403)),
    ("DELETE /leases/{worker}", "", 204, Own(403)),
    ("GET /metrics", "", 200, Never),
    ("GET /operations", "", 200, Own(200)),
    ("POST /operations", r#"{"action":"retry","filter":{"kind":"none"}}"#, 202, Never),
    ("POST /operations", r#"{"action":"retry","filter":{"kind":"none","queue":"{queue}"}}"#, 202, Own(403)),
    ("POST /operations", r#"{"action":"retry","ids":["{job}"]}"#, 202, Own(202)),
    ("GET /operations/{operation}", "", 200, Own(403)),
    ("POST /operations/{operation}/stop", "", 200, Own(403)),
    ("POST /operations/{operation}/resume", "", 200, Own(403)),
    ("GET /queues", "", 200, Own(200)),
    ("PATCH /queues/{queue}/group-defaults", r#"{"limit":1000}"#, 200, Own(403)),
    ("GET /queues/{queue}/groups", "", 200, Own(403)),
    ("GET /queues/{queue}/groups/{group}", "", 200, Own(403)),
    ("PATCH /queues/{queue}/groups/{group}", r#"{"limit":1000}"#, 200, Own(403)),
    ("PUT /queues/{queue}/limit", r#"{"limit":1000}"#, 200, Own(403)),
    ("POST /queues/{queue}/pause", "", 200, Own(403)),
    ("POST /queues/{queue}/resume", "", 200, Own(403)),
    ("PUT /queues/{queue}/rate", r#"{"rate":null}"#, 200, Own(403)),
    ("GET /stats", "", 200, Never),
    ("GET /stats?queue={queue}", "", 200, Own(403)),
    ("POST /sweep", r#"{"dry_run":true}"#, 200, Never),
    ("GET /tokens", "", 200, Never),
    ("DELETE /tokens/{token}", "", 204, Never),
    ("GET /workers", "", 200, Never),
];

/// The operations that require no token.
const PUBLIC: &[&str] = &["GET /health", "GET /session", "POST /session", "DELETE /session"];

/// Texts of the other queue, and its name. No limited token may see them, except what it has sent itself.
const SECRETS: [&str; 10] = [
    "foreign",
    "secret-kind",
    "secret-payload",
    "secret-context",
    "secret-tag",
    "secret-group",
    "secret-key",
    "secret-flow",
    "secret-task",
    "secret-schedule",
];

/// A queue with jobs whose texts all begin with the same word.
struct Queue<'a> {
    fixture: &'a Fixture,
    name: &'static str,
    word: &'static str,
    /// Rises, so that a new job is claimed before older ones.
    priority: AtomicI64,
}

impl<'a> Queue<'a> {
    /// The queue of the limited tokens.
    fn mine(fixture: &'a Fixture) -> Self {
        Queue { fixture, name: "mine", word: "plain", priority: AtomicI64::new(1000) }
    }

    /// Another queue.
    fn foreign(fixture: &'a Fixture) -> Self {
        Queue { fixture, name: "foreign", word: "secret", priority: AtomicI64::new(1000) }
    }

    fn text(&self, what: &str) -> String {
        format!("{}-{what}", self.word)
    }

    fn job(&self) -> NewJob {
        NewJob::new(self.text("kind"), &self.text("payload"))
            .queue(self.name)
            .context(self.text("context"))
            .tags([self.text("tag")])
            .group(self.text("group"))
    }

    async fn worker(&self) -> WorkerId {
        let worker = NewWorker { queues: vec![self.name.into()], ..NewWorker::new(self.text("worker")) };
        self.fixture.store().register(&worker).await.expect("register");
        worker.id
    }

    /// A new job that this worker holds.
    async fn claimed(&self, worker: WorkerId) -> (JobId, Claimed) {
        // It may be paused.
        self.fixture.resume(self.name).await.expect("resume");
        let priority = self.priority.fetch_add(1, Ordering::Relaxed);
        let id = self.fixture.add(self.job().priority(priority)).await;
        let mut claimed = self.fixture.claim_from(self.name, worker, 1).await;
        assert_eq!(ids(&claimed), [id]);
        (id, claimed.remove(0))
    }

    async fn dead(&self) -> JobId {
        let (id, claimed) = self.claimed(self.worker().await).await;
        self.fixture.must_finish(&claimed, failed_permanently()).await;
        id
    }

    /// Jobs in every state, a flow, a schedule and an operation, for lists to show.
    async fn furnish(&self) {
        for what in ["{job}", "{dead}", "{leased}", "{flow}", "{schedule}", "{operation}", "{event}"] {
            self.fill(what).await;
        }
        let (_, claimed) = self.claimed(self.worker().await).await;
        self.fixture.must_finish(&claimed, done()).await;
    }

    /// Replaces each word in braces by a new object of this queue.
    async fn fill(&self, text: &str) -> String {
        let Queue { fixture, .. } = self;
        let unique = Uuid::now_v7();
        let mut text = text.replace("{lease}", LEASE).replace("{queue}", self.name);
        text = text.replace("{group}", &self.text("group"));
        if text.contains("{job}") {
            let id = fixture.add(self.job().delay(DAY)).await;
            text = text.replace("{job}", &id.to_string());
        }
        if text.contains("{job_key}") {
            let key = self.text("key");
            fixture.enqueue(self.job().delay(DAY).idempotency_key(&*key)).await.expect("enqueue");
            text = text.replace("{job_key}", &key);
        }
        if text.contains("{dead}") {
            text = text.replace("{dead}", &self.dead().await.to_string());
        }
        if text.contains("{failure}") {
            self.dead().await;
            while fixture.store().fold_error_groups(100).await.expect("fold") > 0 {}
            let groups = fixture.failures(&FailureFilter::default()).await.expect("failures");
            text = text.replace("{failure}", &groups[0].fingerprint.to_string());
        }
        if text.contains("{leased}") || text.contains("{worker}") {
            let worker = self.worker().await;
            let (job, _) = self.claimed(worker).await;
            text = text.replace("{leased}", &job.to_string()).replace("{worker}", &worker.to_string());
        }
        if text.contains("{flow}") {
            let key = self.text(&format!("key-{unique}"));
            let first = task(self.text("task"), self.job().delay(DAY));
            let flow = Flow::new(self.text("flow")).task(first).open().idempotency_key(key);
            let flow = fixture.enqueue_flow(flow).await.expect("a flow");
            text = text.replace("{flow}", &flow.id.to_string());
        }
        if text.contains("{schedule}") {
            let name = self.text(&format!("schedule-{unique}"));
            let schedule = NewSchedule::new(&name, "0 3 * * *", self.job());
            fixture.put_schedule(schedule).await.expect("a schedule");
            text = text.replace("{schedule}", &name);
        }
        if text.contains("{event}") {
            let name = self.text(&format!("event-{unique}"));
            fixture.emit(&name, &self.text("payload")).await.expect("an event");
            text = text.replace("{event}", &name);
        }
        if text.contains("{kind}") {
            let name = format!("kind-{unique}");
            fixture
                .put_kinds(&[NewKind { name: name.clone(), schema: None, defaults: None }])
                .await
                .expect("a kind");
            text = text.replace("{kind}", &name);
        }
        if text.contains("{operation}") {
            let filter = JobFilter {
                queue: Some(self.name.into()),
                kind: Some(self.text("kind-of-none")),
                ..JobFilter::default()
            };
            let operation = NewOperation::matching(Action::Cancel, filter);
            let operation = fixture.start_operation(operation).await.expect("an operation");
            text = text.replace("{operation}", &operation.id.to_string());
        }
        if text.contains("{token}") {
            let (id, _) = token(fixture, Scope::Read, None).await;
            text = text.replace("{token}", &id.to_string());
        }
        text
    }
}

/// The text with every word in braces replaced by an id that does not exist.
fn with_unknown_ids(text: &str) -> String {
    let mut parts = text.replace("{lease}", LEASE);
    while let Some((start, end)) = braces(&parts) {
        parts.replace_range(start..=end, "01990000-0000-7000-8000-000000000000");
    }
    parts
}

/// Where the first word in braces is.
fn braces(text: &str) -> Option<(usize, usize)> {
    text.match_indices('{').find_map(|(start, _)| {
        let word = text[start + 1..].find(|c: char| !c.is_ascii_lowercase() && c != '_')?;
        (word > 0 && text[start + 1 + word..].starts_with('}')).then_some((start, start + 1 + word))
    })
}

fn api(fixture: &Fixture) -> HttpClient {
    let api = Api::new(fixture.client())
        .access(Access::Tokens)
        .unknown_kinds(UnknownKinds::Allow)
        // Operations stay as they are.
        .operations(Operations::Leave)
        .metrics(String::new);
    #[cfg(feature = "dashboard")]
    let api = api.dashboard(Dashboard::new());
    HttpClient::for_api(api)
}

async fn send(http: &HttpClient, operation: &str, body: &str) -> Response {
    let (method, path) = operation.split_once(' ').expect("a method and a path");
    let json = [("content-type", "application/json")];
    http.send(method, path, if body.is_empty() { &[] } else { &json }, body).await
}

/// The operations of the document, such as `GET /jobs/{}`, with the scope that each of them names.
async fn documented(http: &HttpClient, fixture: &Fixture) -> Vec<(String, Option<String>)> {
    let (_, secret) = token(fixture, Scope::Read, None).await;
    let document = http.with_token(&secret).get("/api-docs/openapi.json").await.expect_status(200).json();
    let mut operations = Vec::new();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            let scope = operation["security"][0]["token"][0].as_str().map(str::to_owned);
            operations.push((format!("{} {}", method.to_uppercase(), pattern(path)), scope));
        }
    }
    operations
}

/// A path without its query, with `{}` for each parameter.
fn pattern(path: &str) -> String {
    let mut path = path.split('?').next().unwrap_or_default().replace("swagger-ui.css", "{file}");
    if path == "/ui/nothing" {
        path = "/ui/{*path}".into();
    }
    let is_parameter = |part: &str| part.starts_with('{');
    let parts: Vec<&str> = path.split('/').map(|part| if is_parameter(part) { "{}" } else { part }).collect();
    parts.join("/")
}

/// The rows of the table, with the scope that the document names.
async fn rows(http: &HttpClient, fixture: &Fixture) -> Vec<(Row, Scope)> {
    let documented = documented(http, fixture).await;
    let with_scope = |row: &Row| {
        let (_, scope) = documented.iter().find(|(operation, _)| *operation == pattern(row.0))?;
        let scope = Scope::ALL.into_iter().find(|known| Some(known.as_str()) == scope.as_deref());
        Some((*row, scope.unwrap_or_else(|| panic!("{} requires no scope", row.0))))
    };
    OPERATIONS.iter().filter_map(with_scope).collect()
}

/// The scopes that an operation needs. A few need a second one, which the document describes in words.
fn needed(operation: &str, scope: Scope) -> Vec<Scope> {
    match operation {
        "POST /leases/spawn" => vec![scope, Scope::Enqueue],
        path if path.starts_with("/ui/new") => vec![scope, Scope::Enqueue],
        _ => vec![scope],
    }
}

async fn no_operation_is_missing_in_the_walk(fixture: Fixture) {
    let documented = documented(&api(&fixture), &fixture).await;
    assert!(documented.len() > 70, "{documented:?}");
    let walked: Vec<String> = OPERATIONS.iter().map(|row| pattern(row.0)).collect();
    for (operation, scope) in &documented {
        match scope {
            Some(_) => assert!(walked.contains(operation), "{operation}: add it to OPERATIONS"),
            None => assert!(PUBLIC.contains(&operation.as_str()), "{operation} requires no token"),
        }
    }
    for operation in &walked {
        assert!(documented.iter().any(|(known, _)| known == operation), "{operation} does not exist");
    }
}

/// Headers with credentials that are not valid.
async fn bad_credentials(fixture: &Fixture) -> Vec<(&'static str, String)> {
    let (revoked, revoked_secret) = token(fixture, Scope::Admin, None).await;
    assert!(fixture.store().revoke_token(revoked).await.expect("revoke"));
    let expired = "expired-secret";
    let expires_at = Some(fixture.now().await + MINUTE);
    let token = NewToken {
        id: Uuid::now_v7(),
        name: "expired".into(),
        hash: hash_token(expired),
        scopes: vec!["admin".into()],
        queues: None,
        expires_at,
    };
    fixture.store().put_token(&token).await.expect("a token");
    fixture.advance(MINUTE).await;
    vec![
        ("x-nothing", String::new()),
        ("authorization", "Bearer unknown".into()),
        ("authorization", "Basic dXNlcjpwYXNz".into()),
        ("authorization", format!("Bearer {revoked_secret}")),
        ("authorization", format!("Bearer {expired}")),
        ("cookie", "longshore_session=unknown".into()),
    ]
}

async fn no_operation_accepts_a_bad_token(fixture: Fixture) {
    let http = api(&fixture);
    let credentials = bad_credentials(&fixture).await;
    let mut calls = JoinSet::new();
    for ((operation, body, ..), _) in rows(&http, &fixture).await {
        for (name, value) in credentials.clone() {
            let http = http.clone();
            calls.spawn(async move {
                let (method, path) = operation.split_once(' ').expect("a method and a path");
                let headers = [(name, value.as_str()), ("content-type", "application/json")];
                let refused =
                    http.send(method, &with_unknown_ids(path), &headers, &with_unknown_ids(body)).await;
                assert_eq!(refused.status, 401, "{operation} with {name}: {value}");
                let refused = refused.expect_problem(401, "unauthorized", "");
                assert!(refused.header("www-authenticate").starts_with("Bearer"), "{operation}");
            });
        }
    }
    // All at once: lookups of unknown tokens are limited, and those of one moment share one.
    calls.join_all().await;
}

/// A client whose token has these scopes and covers only this queue. Tokens are kept, because the server looks up only so
/// many of them per second.
async fn limited_client(
    known: &mut HashMap<String, HttpClient>,
    http: &HttpClient,
    queue: &Queue<'_>,
    scopes: &[Scope],
) -> HttpClient {
    let name = format!("{scopes:?}");
    if let Some(known) = known.get(&name) {
        return known.clone();
    }
    let (_, secret) = token_with(queue.fixture, scopes, Some(&[queue.name])).await;
    known.insert(name, http.with_token(&secret));
    http.with_token(&secret)
}

async fn every_operation_requires_its_scope(fixture: Fixture) {
    let http = api(&fixture);
    let mine = Queue::mine(&fixture);
    let mut clients = Vec::new();
    for scope in Scope::ALL {
        for queues in [None, Some(&[mine.name][..])] {
            let (_, secret) = token(&fixture, scope, queues).await;
            clients.push((scope, queues.is_some(), http.with_token(&secret)));
        }
    }
    for ((operation, body, status, _), scope) in rows(&http, &fixture).await {
        let needed = needed(operation, scope);
        for (held, is_limited, http) in &clients {
            if *held == Scope::Admin || needed == [*held] {
                if *is_limited {
                    continue;
                }
                let filled = mine.fill(&format!("{operation}\n{body}")).await;
                let (operation, body) = filled.split_once('\n').expect("two lines");
                let response = send(http, operation, body).await;
                assert_eq!(response.status, status, "{operation} by {held:?}: {response:?}");
                // Writing does not read what existed before.
                let is_shown =
                    ["payload", "context", "tag"].map(|what| response.text.contains(&mine.text(what)));
                let may_show = ![Scope::Enqueue, Scope::Operate].contains(held);
                assert!(may_show || is_shown == [false; 3], "{operation} by {held:?}: {response:?}");
            } else {
                let response = send(http, &with_unknown_ids(operation), &with_unknown_ids(body)).await;
                assert_eq!(response.status, 403, "{operation} by {held:?}: {response:?}");
                let missing = needed.iter().find(|scope| *scope != held).expect("a scope");
                response.expect_problem(403, "forbidden", &format!("`{}`", missing.as_str()));
            }
        }
    }
}

/// The words of the other queue, and the ids of its objects, that a response contains although the request does not.
fn leaks<'s>(request: &str, response: &Response, ids: &'s [String]) -> Vec<&'s str> {
    let text = format!("{} {:?}", response.text, response.headers);
    let secrets = SECRETS.into_iter().chain(ids.iter().map(String::as_str));
    secrets.filter(|secret| text.contains(secret) && !request.contains(secret)).collect()
}

/// The ids of all jobs and flows of a queue.
async fn ids_of(fixture: &Fixture, queue: &str) -> Vec<String> {
    let filter = longshore::ListFilter { queue: Some(queue.into()), limit: 200, ..Default::default() };
    let jobs = fixture.list(&filter).await.expect("list").jobs;
    jobs.iter()
        .flat_map(|job| job.flow.map(|flow| flow.to_string()).into_iter().chain([job.id.to_string()]))
        .collect()
}

async fn every_operation_keeps_a_limited_token_to_its_queues(fixture: Fixture) {
    let http = api(&fixture);
    let (mine, foreign) = (Queue::mine(&fixture), Queue::foreign(&fixture));
    mine.furnish().await;
    foreign.furnish().await;
    let hidden = ids_of(&fixture, foreign.name).await;
    assert!(hidden.len() > 5, "{hidden:?}");
    let mut known = HashMap::new();
    for ((operation, body, status, limited), scope) in rows(&http, &fixture).await {
        let needed = needed(operation, scope);
        for scopes in [&needed[..], &[Scope::Admin]] {
            let http = limited_client(&mut known, &http, &mine, scopes).await;
            for queue in [&mine, &foreign] {
                let expected = match limited {
                    Never => 403,
                    Own(_) if queue.name == mine.name => status,
                    Own(other) => other,
                };
                let request = queue.fill(&format!("{operation}\n{body}")).await;
                let (operation, body) = request.split_once('\n').expect("two lines");
                let response = send(&http, operation, body).await;
                assert_eq!(response.status, expected, "{request} by {scopes:?}: {response:?}");
                let leaked = leaks(&request, &response, &hidden);
                assert!(leaked.is_empty(), "{request} shows {leaked:?}: {response:?}");
            }
        }
    }
    lease_of_another_queue(&http, &fixture, &mine, &foreign).await;
}

/// A worker of its own gives a token no access to jobs of other queues.
async fn lease_of_another_queue(http: &HttpClient, fixture: &Fixture, mine: &Queue<'_>, foreign: &Queue<'_>) {
    let (_, secret) = token(fixture, Scope::Admin, Some(&[mine.name])).await;
    let http = http.with_token(&secret);
    let hidden = ids_of(fixture, foreign.name).await;
    for (operation, body, ..) in
        OPERATIONS.iter().filter(|row| row.1.contains("{lease}") || row.1.contains("{leased}"))
    {
        let (job, _) = foreign.claimed(foreign.worker().await).await;
        let body = body.replace("{lease}", LEASE).replace("{leased}", &job.to_string());
        let body = mine.fill(&body).await;
        let response = send(&http, operation, &body).await;
        let is_lost = response.status == 409 || response.text.contains("lease_lost");
        assert!(is_lost, "{operation} {body}: {response:?}");
        assert!(leaks(&body, &response, &hidden).is_empty(), "{operation} {body}: {response:?}");
        assert_eq!(fixture.status(job).await, Status::Running);
    }
}

async fn public_operations_reveal_nothing(fixture: Fixture) {
    let http = api(&fixture);
    Queue::foreign(&fixture).furnish().await;
    for (operation, body, status) in [
        ("GET /health", "", 200),
        ("GET /session", "", 401),
        ("POST /session", r#"{"token":"unknown"}"#, 401),
        ("DELETE /session", "", 204),
    ] {
        assert!(PUBLIC.contains(&operation));
        let response = send(&http, operation, body).await;
        assert_eq!(response.status, status, "{operation}: {response:?}");
        assert!(leaks("", &response, &[]).is_empty(), "{operation}: {response:?}");
    }
    let health: Value = http.get("/health").await.json();
    assert_eq!(health, serde_json::json!({ "status": "ok" }));
}

#[cfg(feature = "dashboard")]
mod pages {
    use super::*;

    cases! {
        no_page_is_missing_in_the_walk,
        every_page_requires_a_token_with_its_scope,
        every_page_keeps_a_limited_token_to_its_queues,
    }

    /// Paths of pages, their status, and what a limited token gets.
    const PAGES: &[(&str, u16, Limited)] = &[
        ("/ui", 200, Own(200)),
        ("/ui/", 303, Own(303)),
        ("/ui/jobs", 200, Own(200)),
        ("/ui/jobs?queue={queue}", 200, Own(403)),
        ("/ui/jobs/{job}", 200, Own(403)),
        ("/ui/jobs/{dead}", 200, Own(403)),
        ("/ui/queues", 200, Own(200)),
        ("/ui/queues/{queue}", 200, Own(403)),
        ("/ui/failures", 200, Never),
        ("/ui/failures/{failure}", 200, Never),
        ("/ui/workers", 200, Never),
        ("/ui/cron", 200, Never),
        ("/ui/kinds", 200, Own(200)),
        ("/ui/kinds/{kind}", 200, Own(200)),
        ("/ui/flows", 200, Never),
        ("/ui/flows/{flow}", 200, Never),
        ("/ui/settings", 200, Own(200)),
        ("/ui/new", 200, Own(200)),
        ("/ui/new?from={job}", 200, Own(403)),
        ("/ui/search?q={job}", 303, Own(303)),
        ("/ui/search?q={group}", 303, Own(303)),
        ("/ui/keys", 200, Own(200)),
        ("/ui/nothing", 404, Own(404)),
    ];

    /// The pages that require no token, because they are needed to log in.
    const PUBLIC_PAGES: &[&str] = &["/ui/login", "/ui/session", "/ui/assets/{file}"];

    async fn no_page_is_missing_in_the_walk(_: Fixture) {
        let source = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/dashboard/mod.rs"));
        let (_, routes) = source.split_once("fn add_routes").expect("the routes");
        let (routes, _) = routes.split_once("\n}").expect("the end of the function");
        let routes: Vec<&str> = routes.split('"').filter(|text| text.starts_with("/ui")).collect();
        assert!(routes.len() > 20, "{routes:?}");
        let walked: Vec<String> = PAGES.iter().map(|page| pattern(page.0)).collect();
        for route in routes {
            let is_public = PUBLIC_PAGES.contains(&route);
            assert!(is_public || walked.contains(&pattern(route)), "{route}: add it to PAGES");
        }
    }

    async fn every_page_requires_a_token_with_its_scope(fixture: Fixture) {
        let http = api(&fixture);
        let credentials = bad_credentials(&fixture).await;
        let mine = Queue::mine(&fixture);
        let mut calls = JoinSet::new();
        for (page, ..) in PAGES {
            for (name, value) in credentials.clone() {
                let http = http.clone();
                calls.spawn(async move {
                    let path = with_unknown_ids(page);
                    let sent = http.send("GET", &path, &[(name, &value)], "").await;
                    assert_eq!(sent.status, 303, "{page} with {name}: {value}");
                    assert!(sent.header("location").starts_with("/ui/login"), "{page}: {sent:?}");
                    let part =
                        http.send("GET", &path, &[(name, &value), ("longshore-fragment", "1")], "").await;
                    part.expect_problem(401, "unauthorized", "");
                });
            }
        }
        calls.join_all().await;
        let mut clients = Vec::new();
        for scope in Scope::ALL {
            let (_, secret) = token(&fixture, scope, None).await;
            clients.push((scope, http.with_token(&secret)));
        }
        for (page, status, _) in PAGES {
            let needed = needed(page, Scope::Read);
            for (scope, http) in &clients {
                let scope = *scope;
                let filled = mine.fill(page).await;
                let response = http.get(&filled).await;
                let is_allowed = scope == Scope::Admin || needed == [scope];
                assert_eq!(
                    response.status,
                    if is_allowed { *status } else { 403 },
                    "{page} by {scope:?}: {response:?}"
                );
            }
        }
        for page in PUBLIC_PAGES {
            let response = http.get(&with_unknown_ids(page)).await;
            assert!([200, 404].contains(&response.status), "{page}: {response:?}");
            assert!(leaks("", &response, &[]).is_empty(), "{page}: {response:?}");
        }
    }

    async fn every_page_keeps_a_limited_token_to_its_queues(fixture: Fixture) {
        let http = api(&fixture);
        let (mine, foreign) = (Queue::mine(&fixture), Queue::foreign(&fixture));
        mine.furnish().await;
        foreign.furnish().await;
        let hidden = ids_of(&fixture, foreign.name).await;
        let mut known = HashMap::new();
        for (page, status, limited) in PAGES {
            for scopes in [&needed(page, Scope::Read)[..], &[Scope::Admin]] {
                let http = limited_client(&mut known, &http, &mine, scopes).await;
                for queue in [&mine, &foreign] {
                    let expected = match limited {
                        Never => 403,
                        Own(_) if queue.name == mine.name => *status,
                        Own(other) => *other,
                    };
                    let path = queue.fill(page).await;
                    let response = http.get(&path).await;
                    assert_eq!(response.status, expected, "{path} by {scopes:?}: {response:?}");
                    let leaked = leaks(&path, &response, &hidden);
                    assert!(leaked.is_empty(), "{path} shows {leaked:?}: {response:?}");
                }
            }
        }
    }
}
