//! Generates the steps of a random history from a seed and from the replies so far. Both engines give the same replies,
//! so there is one script for both.
//!
//! Names come from small sets and ids from what was used last, so that requests meet: keys are taken, groups reach their
//! limits, and leases are lost.

mod flows;
mod jobs;
mod operate;
mod work;

use std::collections::VecDeque;
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use serde_json::{Value, json};

use super::side::{Call, Caller, Server, Step, Upkeep};
use crate::fixture::*;
use crate::random::Random;

pub(super) const QUEUES: [&str; 4] = ["default", "media", "mail", "bulk"];
/// The queues whose jobs have no groups. Only these have limits and are claimed from in small batches: which of the
/// groups that join the line in one statement comes first is up to the engine, so other claims take all that is due.
const PLAIN: [&str; 2] = ["default", "media"];
const KINDS: [&str; 3] = ["greet", "order", "report"];
const GROUPS: [&str; 3] = ["acme", "bolt", "core"];
const TAGS: [&str; 3] = ["nightly", "blue", "paid"];
const FLAGS: [&str; 2] = ["gpu", "long"];
pub(super) const EVENTS: [&str; 5] = ["paid:1", "paid:2", "approved", "packed", "no:such"];
const ERRORS: [&str; 4] =
    ["smtp said 451 for user 12", "smtp said 452 for user 7", "no paper", "Zoë's key: “no”"];

/// One kind of request or other step.
pub(super) struct Request {
    /// What the coverage calls it.
    pub(super) name: &'static str,
    /// How often it is chosen, compared to the others.
    weight: usize,
    /// Makes a step, unless the history has nothing yet that it could be about.
    make: fn(&mut Script) -> Option<Step>,
    /// Takes what later steps use from a reply.
    pub(super) learn: fn(&mut Script, &Step, &Value),
}

impl Request {
    const fn new(weight: usize, name: &'static str, make: fn(&mut Script) -> Option<Step>) -> Self {
        Request { name, weight, make, learn: |_, _, _| {} }
    }

    const fn learn(self, learn: fn(&mut Script, &Step, &Value)) -> Self {
        Request { learn, ..self }
    }
}

/// Every kind of step.
pub(super) fn requests() -> Vec<Request> {
    let all = [
        TIME.into_iter().collect(),
        jobs::requests(),
        work::requests(),
        flows::requests(),
        operate::requests(),
    ];
    all.into_iter().flatten().collect::<Vec<_>>()
}

const TIME: [Request; 3] = [
    Request::new(60, "move the clock by seconds", |script| script.move_clock(1, 8)),
    Request::new(14, "move the clock by a minute", |script| script.move_clock(20, 90)),
    Request::new(2, "move the clock by hours", |script| script.move_clock(600, 20_000)),
];

/// The ids that were used last, newest last.
#[derive(Default)]
pub(super) struct Recent(VecDeque<String>);

impl Recent {
    /// Few enough that most of them are used again.
    const MAX: usize = 40;

    pub(super) fn add(&mut self, id: &Value) {
        let Some(id) = id.as_str() else { return };
        self.0.retain(|known| known != id);
        self.0.push_back(id.to_owned());
        if self.0.len() > Recent::MAX {
            self.0.pop_front();
        }
    }

    fn remove(&mut self, id: &str) {
        self.0.retain(|known| known != id);
    }
}

/// A lease that the script knows, live or not.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lease {
    worker: String,
    id: String,
    lease_no: u64,
}

impl Lease {
    fn reference(&self) -> Value {
        json!({ "id": self.id, "lease_no": self.lease_no })
    }
}

/// What the script knows of the history.
pub(super) struct Script {
    random: Random,
    now: DateTime<Utc>,
    jobs: Recent,
    dead: Recent,
    flows: Recent,
    operations: Recent,
    tokens: Recent,
    fingerprints: Recent,
    workers: Recent,
    leases: Vec<Lease>,
    ended: VecDeque<Lease>,
    /// The path of the next page of the last list.
    next_page: Option<String>,
    requests: Vec<Request>,
}

impl Script {
    pub(super) fn new(seed: u64) -> Self {
        Script {
            random: Random::new(seed),
            now: start(),
            jobs: Recent::default(),
            dead: Recent::default(),
            flows: Recent::default(),
            operations: Recent::default(),
            tokens: Recent::default(),
            fingerprints: Recent::default(),
            workers: Recent::default(),
            leases: Vec::new(),
            ended: VecDeque::new(),
            next_page: None,
            requests: requests(),
        }
    }

    /// The next step, and the number of its kind in [`requests`].
    pub(super) fn next(&mut self) -> (usize, Step) {
        let total = self.requests.iter().map(|request| request.weight).sum();
        loop {
            let mut left = self.random.below(total);
            let weights = self.requests.iter().map(|request| request.weight);
            let nth = weights.into_iter().position(|weight| {
                let is_chosen = left < weight;
                left = left.saturating_sub(weight);
                is_chosen
            });
            let Some(nth) = nth else { continue };
            if let Some(step) = (self.requests[nth].make)(self) {
                return (nth, step);
            }
        }
    }

    /// Learns from the reply to the last step.
    pub(super) fn learn(&mut self, nth: usize, step: &Step, reply: &Value, link: &str) {
        let learn = self.requests[nth].learn;
        learn(self, step, reply);
        if let Some((path, _)) = link.trim_start_matches('<').split_once(">; rel=\"next\"") {
            self.next_page = Some(path.to_owned());
        }
    }

    fn move_clock(&mut self, min: usize, max: usize) -> Option<Step> {
        // Not only whole seconds.
        let millis = (min + self.random.below(max - min)) * 1000 + self.random.below(2) * 250;
        let by = Duration::from_millis(millis as u64);
        self.now += by;
        Some(Step::Move(by))
    }

    // ---- choices ---------------------------------------------------------------

    fn one_in(&mut self, n: usize) -> bool {
        self.random.is_one_in(n)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random.below(limit)
    }

    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.random.below(choices.len())].clone()
    }

    /// Some of these, maybe none.
    fn some(&mut self, choices: &[&str]) -> Vec<String> {
        let chosen = choices.iter().filter(|_| self.random.is_one_in(2));
        chosen.map(|choice| (*choice).to_owned()).collect()
    }

    fn queue(&mut self) -> &'static str {
        self.of(&QUEUES)
    }

    /// One of the newest of these more often than an older one.
    fn recent(&mut self, of: fn(&Script) -> &Recent) -> Option<String> {
        let count = of(self).0.len();
        let span = self.random.below(count) + 1;
        let back = self.random.below(span) + 1;
        of(self).0.get(count.checked_sub(back)?).cloned()
    }

    fn job(&mut self) -> Option<String> {
        self.recent(|script| &script.jobs)
    }

    fn time(&self, seconds: i64) -> Value {
        let at = self.now + TimeDelta::seconds(seconds);
        json!(at.to_rfc3339_opts(SecondsFormat::Millis, true))
    }

    /// Sets a field once in `n` times.
    fn maybe(&mut self, body: &mut Value, n: usize, field: &str, value: impl FnOnce(&mut Script) -> Value) {
        if self.one_in(n) {
            body[field] = value(self);
        }
    }

    // ---- steps -----------------------------------------------------------------

    fn call(&mut self, method: &'static str, path: impl Into<String>, body: Option<Value>) -> Option<Step> {
        let caller = if self.one_in(12) { Caller::Limited } else { Caller::Admin };
        let path = path.into();
        Some(Step::Call(Call { method, path, idempotency_key: None, body, caller, server: Server::Same }))
    }

    fn get(&mut self, path: impl Into<String>) -> Option<Step> {
        self.call("GET", path, None)
    }

    fn post(&mut self, path: impl Into<String>, body: Value) -> Option<Step> {
        self.call("POST", path, Some(body))
    }

    /// A request without a body.
    fn command(&mut self, path: impl Into<String>) -> Option<Step> {
        self.call("POST", path, None)
    }

    /// A list with some of these parameters.
    fn list(&mut self, path: &str, parameters: Vec<(&str, String)>) -> Option<Step> {
        let chosen: Vec<String> =
            parameters.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        let query = if chosen.is_empty() { String::new() } else { format!("?{}", chosen.join("&")) };
        self.get(format!("{path}{query}"))
    }
}

fn upkeep(upkeep: Upkeep) -> Option<Step> {
    Some(Step::Upkeep(upkeep))
}

/// The items of a list.
fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The body of a request.
fn body_of(step: &Step) -> &Value {
    match step {
        Step::Call(Call { body: Some(body), .. }) => body,
        _ => &Value::Null,
    }
}
