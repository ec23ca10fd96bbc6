//! One random history on both engines: each step is taken on both sides, and their replies are compared. Now and then, and
//! at the end, all records are compared.

use serde_json::Value;

use super::report::{Coverage, difference};
use super::script::{EVENTS, QUEUES, Request, Script, requests};
use super::side::{Call, Caller, Reply, Server, Side, Step, Upkeep};
use crate::fixture::*;

/// After how many steps all records are compared.
const RECORDS_EVERY: usize = 250;
/// How often a list is read again before a difference counts. A page is short if it takes longer than 80 ms to fill
/// it, so on a busy host the pages of the two sides may differ.
const READS: usize = 3;
/// How many steps that were about the same objects are printed with a difference.
const STEPS_SHOWN: usize = 12;

pub(super) struct History {
    seed: u64,
    sqlite: Side,
    postgres: Side,
    /// Every step so far, as text.
    steps: Vec<String>,
}

impl History {
    /// Takes `length` steps.
    pub(super) async fn run(seed: u64, length: usize, sides: [Fixture; 2], coverage: &mut Coverage) {
        let [sqlite, postgres] = sides;
        let (sqlite, postgres) = (Side::new(sqlite).await, Side::new(postgres).await);
        let mut history = History { seed, sqlite, postgres, steps: Vec::new() };
        let (mut script, requests): (Script, Vec<Request>) = (Script::new(seed), requests());
        for nth in 1..=length {
            let (kind, step) = script.next();
            let reply = history.take(requests[kind].name, &step).await;
            coverage.add(requests[kind].name, &reply);
            script.learn(kind, &step, &reply.json(), reply.header("link"));
            if nth % RECORDS_EVERY == 0 || nth == length {
                history.compare_records().await;
            }
        }
    }

    /// Takes a step on both sides. Fails if they reply differently.
    async fn take(&mut self, name: &str, step: &Step) -> Reply {
        let text = text_of(step);
        let (text, _) = (self.sqlite.hide(&text), self.postgres.hide(&text));
        self.steps.push(format!("{}. {name}: {text}", self.steps.len() + 1));
        let is_read = matches!(step, Step::Call(Call { method: "GET", .. }));
        let mut reads = 1;
        loop {
            let (sqlite, postgres) = (self.sqlite.take(step).await, self.postgres.take(step).await);
            let is_sound = sqlite.is_sound();
            if sqlite == postgres && is_sound {
                return sqlite;
            }
            if is_read && is_sound && reads < READS {
                reads += 1;
                continue;
            }
            panic!("{}", self.failure(&sqlite, &postgres));
        }
    }

    fn failure(&self, sqlite: &Reply, postgres: &Reply) -> String {
        let seed = self.seed;
        let problem = if sqlite == postgres {
            "both sides failed"
        } else {
            "the engines differ (- sqlite, + postgres)"
        };
        let step = self.steps.last().map_or("", String::as_str);
        let shown = difference(sqlite, postgres);
        let about = self.steps_about(&format!("{step}\n{}", changed(&shown)));
        format!(
            "seed {seed}: {problem}\n\n{step}\n\n{shown}\nsteps about the same objects:\n{about}\n\
             run it again: LONGSHORE_COMPARE_SEED={seed} cargo xtask test compare\n"
        )
    }

    /// The last steps that name an object that this text names, and the moves of the clock after the first of them.
    fn steps_about(&self, text: &str) -> String {
        let names: Vec<&str> =
            text.split('<').skip(1).filter_map(|rest| rest.split_once('>')).map(|(name, _)| name).collect();
        let is_about = |step: &&String| names.iter().any(|name| step.contains(&format!("<{name}>")));
        let mut found: Vec<&str> =
            self.steps.iter().filter(is_about).rev().take(STEPS_SHOWN).map(String::as_str).collect();
        found.reverse();
        found.join("\n")
    }

    // ---- records -----------------------------------------------------------------

    async fn compare_records(&mut self) {
        self.take("records", &Step::Upkeep(Upkeep::Check)).await;
        for job in self.all("/jobs?limit=200").await {
            for path in ["", "/steps", "/explain"] {
                self.read(&format!("/jobs/{job}{path}")).await;
            }
        }
        for flow in self.all("/flows?limit=200").await {
            self.read(&format!("/flows/{flow}")).await;
            self.all(&format!("/flows/{flow}/tasks?limit=200")).await;
        }
        for path in ["/queues", "/workers", "/tokens", "/cron", "/stats?minutes=10080"] {
            self.read(path).await;
        }
        for path in ["/failures?limit=200", "/kinds?schemas=true", "/operations?limit=200"] {
            self.all(path).await;
        }
        for queue in QUEUES {
            self.read(&format!("/queues/{queue}/groups?limit=200")).await;
            self.read(&format!("/stats?minutes=10080&queue={queue}")).await;
        }
        for event in EVENTS {
            self.read(&format!("/events/{event}")).await;
        }
    }

    async fn read(&mut self, path: &str) -> Reply {
        let (body, idempotency_key) = (None, None);
        let path = path.to_owned();
        let call =
            Call { method: "GET", path, idempotency_key, body, caller: Caller::Admin, server: Server::Same };
        self.take("records", &Step::Call(call)).await
    }

    /// Reads all pages of a list, and returns the ids.
    async fn all(&mut self, path: &str) -> Vec<String> {
        let (mut ids, mut next) = (Vec::new(), Some(path.to_owned()));
        while let Some(path) = next.take() {
            let page = self.read(&path).await;
            let items = page.json().as_array().cloned().unwrap_or_default();
            ids.extend(items.iter().filter_map(|item| item["id"].as_str()).map(str::to_owned));
            let link = page.header("link").trim_start_matches('<').split_once(">; rel=\"next\"");
            next = link.map(|(path, _)| path.to_owned());
        }
        ids
    }
}

/// The changed lines of a difference.
fn changed(difference: &str) -> String {
    let is_changed = |line: &&str| line.starts_with(['-', '+']);
    difference.lines().filter(is_changed).collect::<Vec<_>>().join("\n")
}

/// A step, as text to read.
fn text_of(step: &Step) -> String {
    match step {
        Step::Call(Call { method, path, body, idempotency_key, caller, .. }) => {
            let body = body.as_ref().map(Value::to_string).unwrap_or_default();
            let key =
                idempotency_key.as_ref().map(|key| format!(" with the key `{key}`")).unwrap_or_default();
            let limited = if *caller == Caller::Limited { " (limited token)" } else { "" };
            format!("{method} {path} {body}{key}{limited}")
        }
        Step::Move(by) => format!("{by:?}"),
        Step::NewToken(id) => id.to_string(),
        Step::Upkeep(upkeep) => format!("{upkeep:?}"),
    }
}
