//! Steps of workers that call the API: leases, reports, durable steps, waits and children.

use serde_json::{Value, json};

use super::*;

pub(super) fn requests() -> Vec<Request> {
    vec![
        Request::new(16, "POST /leases (register)", |script| {
            let mut body = script.claim();
            body["name"] = json!(script.of(&["python", "node"]));
            // A worker that is silent for longer is declared dead.
            body["stale_after_seconds"] = script.of(&[json!(20), json!(60), json!(3600)]);
            script.maybe(&mut body, 3, "host", |_| json!("web-1"));
            script.maybe(&mut body, 3, "pid", |_| json!(4711));
            script.maybe(&mut body, 3, "version", |_| json!("longshore-python 0.1.0"));
            script.maybe(&mut body, 6, "announce", |script| {
                json!([{ "name": script.of(&KINDS), "defaults": { "max_attempts": 4, "retry": script.retry() } }])
            });
            script.lease_call(body)
        })
        .learn(learn_leases),
        Request::new(70, "POST /leases (claim)", |script| {
            let worker = script.worker()?;
            let mut body = script.claim();
            if script.one_in(2) {
                body["held"] = script.held(&worker);
            }
            body["worker_id"] = json!(worker);
            script.lease_call(body)
        })
        .learn(learn_leases),
        Request::new(40, "POST /leases (reports)", |script| {
            let worker = script.worker_with_leases()?;
            let mut body = script.claim();
            script.maybe(&mut body, 2, "limit", |_| json!(0));
            body["held"] = script.held(&worker);
            body["worker_id"] = json!(worker);
            let leases: Vec<Lease> = script.leases.iter().filter(|lease| lease.worker == worker).cloned().collect();
            let mut lists = json!({ "settle": [], "steps": [], "progress": [], "checkpoints": [] });
            for lease in leases {
                let mut item = lease.reference();
                let (list, field, value) = match script.below(7) {
                    0..3 => {
                        let item = script.end(&lease);
                        lists["settle"].as_array_mut()?.push(item);
                        continue;
                    }
                    3 => ("steps", "steps", script.steps()),
                    4 => ("progress", "progress", script.payload()),
                    5 => ("checkpoints", "checkpoint", script.payload()),
                    _ => continue,
                };
                item[field] = value;
                lists[list].as_array_mut()?.push(item);
            }
            for list in ["settle", "steps", "progress", "checkpoints"] {
                body[list] = lists[list].take();
            }
            script.lease_call(body)
        })
        .learn(learn_leases),
        Request::new(45, "POST /leases/settle", |script| {
            let lease = script.lease()?;
            let (worker, mut items) = (lease.worker.clone(), vec![script.end(&lease)]);
            let others = script.leases.iter().filter(|other| other.worker == worker && **other != lease);
            let others: Vec<Lease> = others.cloned().collect();
            for other in others {
                if script.one_in(3) {
                    items.push(script.end(&other));
                }
            }
            script.post("/leases/settle", json!({ "worker_id": worker, "items": items }))
        })
        .learn(learn_ends),
        Request::new(10, "POST /leases/settle (once more)", |script| {
            let count = script.ended.len();
            let nth = script.below(count);
            let lease = script.ended.get(nth)?.clone();
            let items = [script.end(&lease)];
            script.post("/leases/settle", json!({ "worker_id": lease.worker, "items": items }))
        }),
        Request::new(25, "POST /leases/renew", |script| {
            let worker = script.worker()?;
            let held = script.held(&worker);
            let mut body = json!({ "worker_id": worker, "leases": held });
            if let Some(lease) = script.leases.iter().find(|lease| lease.worker == worker).cloned()
                && script.one_in(3)
            {
                let mut item = lease.reference();
                item["progress"] = script.payload();
                body["progress"] = json!([item]);
            }
            script.post("/leases/renew", body)
        })
        .learn(|script, step, reply| {
            script.lose(&body_of(step)["worker_id"], &reply["lost"]);
            script.forget_dead(step, reply);
        }),
        Request::new(14, "POST /leases/steps", |script| {
            let steps = script.steps();
            script.of_lease("/leases/steps", json!({ "steps": steps }))
        }),
        Request::new(20, "POST /leases/wait", |script| {
            let waits = script.waits();
            script.of_lease("/leases/wait", json!({ "waits": waits }))
        })
        .learn(learn_wait),
        Request::new(6, "POST /leases/journal", |script| script.of_lease("/leases/journal", json!({}))),
        Request::new(6, "POST /leases/inputs", |script| script.of_lease("/leases/inputs", json!({}))),
        Request::new(12, "POST /leases/spawn", |script| {
            let count = script.below(3) + 1;
            let jobs: Vec<Value> = (0..count).map(|_| script.plain_job()).collect();
            let name = script.of(&["parcels", "mails"]);
            script.of_lease("/leases/spawn", json!({ "name": name, "jobs": jobs }))
        })
        .learn(|script, step, reply| {
            if reply["status"] == "stored" {
                // The children of a job are the flow with its id.
                script.flows.add(&body_of(step)["id"]);
            }
        }),
        Request::new(14, "POST /leases/join", |script| {
            let name = script.of(&["first", "second"]);
            let mut body = json!({ "name": name });
            script.maybe(&mut body, 3, "limit", |script| json!(script.below(3) + 1));
            script.of_lease("/leases/join", body)
        })
        .learn(learn_wait),
        Request::new(5, "DELETE /leases/{worker_id}", |script| {
            let worker = script.worker()?;
            script.forget_worker(&worker);
            script.call("DELETE", format!("/leases/{worker}"), None)
        }),
    ]
}

/// The limit of a claim that takes all that is due.
const ALL: usize = 1000;

/// What a lease call returns: new leases, lost ones, and which reports were stored.
fn learn_leases(script: &mut Script, step: &Step, reply: &Value) {
    if script.forget_dead(step, reply) {
        return;
    }
    let worker = &reply["worker_id"];
    script.workers.add(worker);
    script.lose(worker, &reply["lost"]);
    script.lose(worker, &json!(ended_in(&reply["settled"])));
    for job in items(&reply["jobs"]) {
        script.jobs.add(&job["id"]);
        let (Some(worker), Some(id)) = (worker.as_str(), job["id"].as_str()) else { continue };
        let lease_no = job["lease_no"].as_u64().unwrap_or_default();
        script.leases.push(Lease { worker: worker.into(), id: id.into(), lease_no });
    }
}

fn learn_ends(script: &mut Script, step: &Step, reply: &Value) {
    script.lose(&body_of(step)["worker_id"], &json!(ended_in(&reply["items"])));
}

/// The reports after which their leases are no longer live.
fn ended_in(reports: &Value) -> Vec<Value> {
    let is_over = |report: &&Value| report["settled"] == "stored" || report["settled"] == "lease_lost";
    items(reports).iter().filter(is_over).cloned().collect()
}

/// After a wait or a join, the lease may be gone.
fn learn_wait(script: &mut Script, step: &Step, reply: &Value) {
    if reply["status"] == "suspended" || reply["status"] == "lease_lost" {
        let body = body_of(step);
        script.lose(&body["worker_id"], &json!([{ "id": body["id"], "lease_no": body["lease_no"] }]));
    }
}

impl Script {
    fn worker(&mut self) -> Option<String> {
        self.recent(|script| &script.workers)
    }

    fn lease(&mut self) -> Option<Lease> {
        let count = self.leases.len();
        let nth = self.below(count);
        self.leases.get(nth).cloned()
    }

    fn worker_with_leases(&mut self) -> Option<String> {
        self.lease().map(|lease| lease.worker)
    }

    /// The leases of a worker, rarely without one of them.
    fn held(&mut self, worker: &str) -> Value {
        let mut held: Vec<Value> =
            self.leases.iter().filter(|lease| lease.worker == worker).map(Lease::reference).collect();
        if self.one_in(10) {
            held.pop();
        }
        json!(held)
    }

    /// What a worker asks for.
    fn claim(&mut self) -> Value {
        let (queues, limit) = match self.below(6) {
            0 => (PLAIN.to_vec(), self.below(6) + 1),
            1 => (vec!["media"], self.below(3) + 1),
            2 => (vec!["default"], self.below(6) + 1),
            3 => (vec!["mail"], ALL),
            4 => (vec!["bulk", "mail"], ALL),
            _ => (QUEUES.to_vec(), ALL),
        };
        let mut body = json!({ "queues": queues, "limit": limit });
        self.maybe(&mut body, 4, "kinds", |script| {
            let mut kinds = script.some(&KINDS);
            kinds.push(script.of(&KINDS).into());
            kinds.sort();
            kinds.dedup();
            json!(kinds)
        });
        body
    }

    fn lease_call(&mut self, body: Value) -> Option<Step> {
        let mut step = self.post("/leases", body);
        if let Some(Step::Call(call)) = &mut step {
            call.server = Server::New;
        }
        step
    }

    /// A request about one lease.
    fn of_lease(&mut self, path: &str, mut body: Value) -> Option<Step> {
        // A stale one now and then.
        let stale = if self.one_in(8) { self.ended.back().cloned() } else { None };
        let lease = stale.or_else(|| self.lease())?;
        body["worker_id"] = json!(lease.worker);
        body["id"] = json!(lease.id);
        body["lease_no"] = json!(lease.lease_no);
        self.post(path, body)
    }

    /// The end of an attempt.
    fn end(&mut self, lease: &Lease) -> Value {
        let mut item = lease.reference();
        let outcome = self.of(&[
            "succeeded",
            "succeeded",
            "succeeded",
            "failed",
            "failed",
            "failed",
            "cancelled",
            "snoozed",
            "released",
            "not_started",
        ]);
        item["outcome"] = json!(outcome);
        match outcome {
            "succeeded" => {
                self.maybe(&mut item, 2, "result", Script::payload);
                self.maybe(&mut item, 6, "follow_ups", |script| {
                    let count = script.below(2) + 1;
                    (0..count).map(|_| script.keyed_job()).collect()
                });
            }
            "failed" => {
                self.maybe(&mut item, 1, "error", |script| json!(script.of(&ERRORS)));
                self.maybe(&mut item, 4, "permanent", |_| json!(true));
                if item["permanent"].is_null() {
                    self.maybe(&mut item, 4, "retry_after_seconds", |script| json!(script.below(20)));
                }
            }
            "cancelled" => self.maybe(&mut item, 2, "error", |_| json!("saw the cancellation")),
            "snoozed" => item["delay_seconds"] = json!(self.below(40)),
            _ => {}
        }
        item
    }

    fn steps(&mut self) -> Value {
        let mut steps =
            vec![json!({ "name": self.of(&["charge", "pack", "ship"]), "value": self.payload() })];
        if self.one_in(3) {
            steps.push(json!({ "name": "notify" }));
        }
        json!(steps)
    }

    /// One or two waits: for a time, for events, or for both.
    fn waits(&mut self) -> Value {
        let names = ["nap", "payment", "approval"];
        let count = self.below(2) + 1;
        let first = self.below(names.len());
        let waits = (0..count).map(|nth| {
            let mut wait = json!({ "name": names[(first + nth) % names.len()] });
            self.maybe(&mut wait, 2, "within_seconds", |script| json!(script.below(60)));
            if wait["within_seconds"].is_null() || self.one_in(3) {
                let mut events = self.some(&EVENTS);
                events.push(self.of(&EVENTS).into());
                events.sort();
                events.dedup();
                wait["events"] = json!(events);
            }
            wait
        });
        waits.collect::<Vec<_>>().into()
    }

    /// These leases of a worker are no longer live. Late reports may still name them.
    fn lose(&mut self, worker: &Value, leases: &Value) {
        for lost in items(leases) {
            let is_lost = |lease: &Lease| {
                *worker == *lease.worker && lost["id"] == *lease.id && lost["lease_no"] == lease.lease_no
            };
            self.end_leases(is_lost);
        }
    }

    fn end_leases(&mut self, is_over: impl Fn(&Lease) -> bool) {
        let (over, live) = std::mem::take(&mut self.leases).into_iter().partition(is_over);
        self.leases = live;
        self.ended.extend::<Vec<Lease>>(over);
        while self.ended.len() > 10 {
            self.ended.pop_front();
        }
    }

    fn forget_worker(&mut self, worker: &str) {
        self.workers.remove(worker);
        self.end_leases(|lease| lease.worker == worker);
    }

    /// A worker that was declared dead can only register again.
    fn forget_dead(&mut self, step: &Step, reply: &Value) -> bool {
        let is_refused = reply["error"].is_string();
        if reply["error"] == "conflict"
            && let Some(worker) = body_of(step)["worker_id"].as_str()
        {
            self.forget_worker(worker);
        }
        is_refused
    }
}
