//! One of the two sides of a comparison: an engine behind the API, to which a script is applied step by step.

use std::time::Duration;

use longshore::api::{Access, Api, Operations, hash_token};
use longshore::store::{NewToken, Retention};
use longshore::{Scope, UnknownKinds};
use serde_json::{Value, json};
use uuid::Uuid;

use super::names::Names;
use crate::fixture::*;
use crate::http::client::HttpClient;

/// One step of a script.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// A request to the API.
    Call(Call),
    /// Moves the clock forward.
    Move(Duration),
    /// Creates a token with all scopes but `admin` for one queue.
    NewToken(Uuid),
    /// What workers do between jobs.
    Upkeep(Upkeep),
}

/// A request to the API. It contains names instead of ids.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) method: &'static str,
    pub(super) path: String,
    pub(super) idempotency_key: Option<String>,
    pub(super) body: Option<Value>,
    pub(super) caller: Caller,
    pub(super) server: Server,
}

/// Whose token a request carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// All scopes, all queues.
    Admin,
    /// All scopes but `admin`, and only the queue [`LIMITED_TO`].
    Limited,
}

/// Which server gets a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Same,
    /// One that was just started, and so remembers nothing of the worker. A server that remembers where a worker's
    /// last claim stopped looks at what is before that place only now and then, by the time of its host.
    New,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Upkeep {
    Pending,
    FireDue,
    RunOperations,
    Retain,
    RemoveOld,
    Fold,
    Sample,
    Check,
}

/// The queue of limited tokens.
pub(super) const LIMITED_TO: &str = "mail";

/// What a side replies to a step, with names instead of ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    /// The status of the response, or `done`.
    pub(super) outcome: String,
    /// The headers that clients use.
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: String,
}

/// The headers that are compared.
const HEADERS: [&str; 6] = ["link", "location", "retry-after", "enqueued-as", "allow", "content-type"];

impl Reply {
    pub(super) fn is_success(&self) -> bool {
        self.outcome == "done" || self.outcome.starts_with('2')
    }

    /// Whether the reply may be compared: a server error says nothing about what the engine would have done.
    pub(super) fn is_sound(&self) -> bool {
        self.outcome != "problems" && !self.outcome.starts_with('5')
    }

    pub(super) fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(header, _)| *header == name);
        found.map_or("", |(_, value)| value)
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_default()
    }

    fn done(result: impl Into<Value>) -> Self {
        Reply { outcome: "done".into(), headers: Vec::new(), body: result.into().to_string() }
    }
}

pub(super) struct Side {
    pub(super) fixture: Fixture,
    names: Names,
    admin: String,
    limited: String,
    http: HttpClient,
}

impl Side {
    pub(super) async fn new(fixture: Fixture) -> Self {
        let (admin, limited) = (secret(Uuid::now_v7()), secret(Uuid::now_v7()));
        let side = Side { http: server(&fixture), fixture, names: Names::default(), admin, limited };
        side.put_token(Uuid::now_v7(), "admin", &side.admin, &Scope::ALL, None).await;
        side.put_token(Uuid::now_v7(), "limited", &side.limited, &limited_scopes(), Some(LIMITED_TO)).await;
        side
    }

    /// Takes a step, and then does what happens soon after it in the background.
    pub(super) async fn take(&mut self, step: &Step) -> Reply {
        let mut reply = match step {
            Step::Call(call) => self.send(call).await,
            Step::Move(by) => {
                self.fixture.advance(*by).await;
                Reply::done(self.fixture.now().await.to_rfc3339())
            }
            Step::NewToken(id) => {
                self.put_token(*id, "further", &secret(*id), &limited_scopes(), Some(LIMITED_TO)).await;
                Reply::done(id.to_string())
            }
            Step::Upkeep(upkeep) => self.keep_up(*upkeep).await,
        };
        self.fixture.flush().await;
        // Otherwise it is stored after ten seconds of the host's clock.
        self.fixture.store_measures().await;
        reply.body = self.names.hide(&reply.body);
        for (_, value) in &mut reply.headers {
            *value = self.names.hide(value);
        }
        reply
    }

    async fn send(&mut self, call: &Call) -> Reply {
        if call.server == Server::New {
            self.http = server(&self.fixture);
        }
        let http = self.http.with_token(match call.caller {
            Caller::Admin => &self.admin,
            Caller::Limited => &self.limited,
        });
        let body = call.body.as_ref().map(|body| self.names.show(&body.to_string()));
        let mut headers = Vec::new();
        if body.is_some() {
            headers.push(("content-type", "application/json"));
        }
        if let Some(key) = &call.idempotency_key {
            headers.push(("idempotency-key", key));
        }
        let path = self.names.show(&call.path);
        // One that changes several jobs at once. Flows follow afterwards, so that they do not change some of them meanwhile.
        let held = match path.as_str() {
            "/jobs/bulk" | "/dead-letters/redrive" => Some(self.fixture.hold_advances().await),
            _ => None,
        };
        let response = http.send(call.method, &path, &headers, body.as_deref().unwrap_or_default()).await;
        drop(held);
        let body = if path.ends_with("/explain") {
            without_place_in_line(&response.text)
        } else {
            response.text.clone()
        };
        let headers = HEADERS.iter().map(|name| (*name, response.header(name).to_owned()));
        Reply {
            outcome: response.status.to_string(),
            headers: headers.filter(|(_, value)| !value.is_empty()).collect(),
            body,
        }
    }

    async fn keep_up(&self, upkeep: Upkeep) -> Reply {
        let client = &self.fixture;
        let at_once = |_| async { true };
        let retention =
            Retention { succeeded: Some(HOUR), cancelled: Some(2 * HOUR), failed_permanent: Some(12 * HOUR) };
        match upkeep {
            Upkeep::Pending => {
                client.do_pending().await.expect("do_pending");
                Reply::done(Value::Null)
            }
            Upkeep::FireDue => {
                let report = client.fire_due().await.expect("fire_due");
                Reply::done(serde_json::to_value(report).expect("JSON"))
            }
            Upkeep::RunOperations => {
                let _held = client.hold_advances().await;
                client.run_operations(at_once).await.expect("run_operations");
                Reply::done(Value::Null)
            }
            Upkeep::Retain => {
                // How many rows it examines is up to the engine.
                let retained = client.retain(&retention, at_once).await.expect("retain");
                Reply::done(json!({ "removed": retained.removed, "done": retained.done }))
            }
            Upkeep::RemoveOld => {
                let events = client.remove_old_events().await.expect("remove_old_events");
                let flows = client.remove_old_flows(&retention).await.expect("remove_old_flows");
                let operations = client.remove_old_operations().await.expect("remove_old_operations");
                Reply::done(json!({ "events": events, "flows": flows, "operations": operations }))
            }
            Upkeep::Fold => {
                // How many rows it folds is up to the engine.
                client.fold_tallies(at_once).await.expect("fold_tallies");
                client.fold_history(at_once).await.expect("fold_history");
                Reply::done(Value::Null)
            }
            Upkeep::Sample => {
                let counts = client.counts().await.expect("counts");
                let overdue = client.overdue().await.expect("overdue");
                Reply::done(client.store_samples(&counts, &overdue).await.expect("store_samples"))
            }
            Upkeep::Check => {
                let report = client.check().await.expect("check");
                let outcome = if report.problems.is_empty() { "done" } else { "problems" };
                let body = serde_json::to_string(&report).expect("JSON");
                Reply { outcome: outcome.into(), headers: Vec::new(), body }
            }
        }
    }

    async fn put_token(&self, id: Uuid, name: &str, secret: &str, scopes: &[Scope], queue: Option<&str>) {
        let token = NewToken {
            id,
            name: name.into(),
            hash: hash_token(secret),
            scopes: scopes.iter().map(|scope| scope.as_str().into()).collect(),
            queues: queue.map(|queue| vec![queue.into()]),
            expires_at: None,
        };
        self.fixture.create_token(&token).await.expect("a token");
    }

    /// A text with names instead of ids.
    pub(super) fn hide(&mut self, text: &str) -> String {
        self.names.hide(text)
    }
}

/// An explanation without "is 1st of 2 groups in line".
fn without_place_in_line(text: &str) -> String {
    const END: &str = " groups in line";
    let mut pieces: Vec<&str> = text.split(END).collect();
    let last = pieces.pop().unwrap_or_default();
    let kept = pieces.iter().map(|piece| piece.rsplit_once(" is ").map_or(*piece, |(before, _)| before));
    kept.chain([last]).collect()
}

fn secret(id: Uuid) -> String {
    format!("secret-{id}")
}

fn limited_scopes() -> Vec<Scope> {
    Scope::ALL.into_iter().filter(|scope| *scope != Scope::Admin).collect()
}

/// A server that leaves operations to the script.
fn server(fixture: &Fixture) -> HttpClient {
    let api = Api::new(fixture.client()).access(Access::Tokens).unknown_kinds(UnknownKinds::Allow);
    HttpClient::for_api(api.operations(Operations::Leave))
}
