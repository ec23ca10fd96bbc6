//! Steps of operators: queues, groups, operations, schedules, kinds, tokens, statistics, and upkeep.

use serde_json::{Value, json};
use uuid::Uuid;

use super::super::side::LIMITED_TO;
use super::jobs::WITHOUT_KEY;
use super::*;

const SCHEDULES: [&str; 3] = ["nightly", "hourly", "often"];

pub(super) fn requests() -> Vec<Request> {
    vec![
        // Upkeep.
        Request::new(20, "upkeep: pending", |_| upkeep(Upkeep::Pending)),
        Request::new(14, "upkeep: fire schedules", |_| upkeep(Upkeep::FireDue)),
        Request::new(12, "upkeep: run operations", |_| upkeep(Upkeep::RunOperations)),
        Request::new(4, "upkeep: retain", |_| upkeep(Upkeep::Retain)),
        Request::new(4, "upkeep: remove old", |_| upkeep(Upkeep::RemoveOld)),
        Request::new(6, "upkeep: fold", |_| upkeep(Upkeep::Fold)),
        Request::new(6, "upkeep: sample", |_| upkeep(Upkeep::Sample)),
        Request::new(14, "POST /sweep", |script| {
            let mut body = json!({});
            script.maybe(&mut body, 4, "dry_run", |_| json!(true));
            script.maybe(&mut body, 3, "threshold_seconds", |script| json!(script.below(90)));
            script.maybe(&mut body, 2, "delay_seconds", |script| json!(script.below(9)));
            script.maybe(&mut body, 3, "resilient_flags", |script| json!(script.some(&FLAGS)));
            script.maybe(&mut body, 3, "resilient_factor", |script| json!(script.below(3) + 1));
            script.post("/sweep", body)
        }),
        // Queues and groups.
        Request::new(4, "POST /queues/{name}/pause", |script| script.of_queue("/pause")),
        Request::new(12, "POST /queues/{name}/resume", |script| script.of_queue("/resume")),
        Request::new(6, "PUT /queues/{name}/limit", |script| {
            let (queue, body) = (script.of(&PLAIN), json!({ "limit": script.limit() }));
            script.call("PUT", format!("/queues/{queue}/limit"), Some(body))
        }),
        Request::new(6, "PUT /queues/{name}/rate", |script| {
            let (queue, body) = (script.of(&PLAIN), json!({ "rate": script.rate() }));
            script.call("PUT", format!("/queues/{queue}/rate"), Some(body))
        }),
        Request::new(6, "PATCH /queues/{name}/group-defaults", |script| {
            let mut body = json!({});
            script.maybe(&mut body, 2, "limit", Script::limit);
            script.maybe(&mut body, 2, "rate", Script::rate);
            script.change_queue("PATCH", "/group-defaults", body)
        }),
        Request::new(14, "PATCH /queues/{name}/groups/{group}", |script| {
            let group = script.of(&GROUPS);
            let mut body = json!({});
            script.maybe(&mut body, 3, "limit", Script::limit);
            script.maybe(&mut body, 4, "rate", Script::rate);
            script.maybe(&mut body, 2, "paused", |script| json!(script.one_in(3)));
            script.change_queue("PATCH", &format!("/groups/{group}"), body)
        }),
        Request::new(8, "GET /queues", |script| script.get("/queues")),
        Request::new(6, "GET /queues/{name}/groups", |script| {
            let queue = script.queue();
            let mut page = Vec::new();
            if script.one_in(2) {
                page.push(("limit", (script.below(3) + 1).to_string()));
            }
            if script.one_in(3) {
                page.push(("after", script.of(&GROUPS).into()));
            }
            script.list(&format!("/queues/{queue}/groups"), page)
        }),
        Request::new(4, "GET /queues/{name}/groups/{group}", |script| {
            let (queue, group) = (script.queue(), script.of(&GROUPS));
            script.get(format!("/queues/{queue}/groups/{group}"))
        }),
        Request::new(5, "GET /groups", |script| {
            let name = script.of(&["o", "acme", "b", "x"]);
            script.get(format!("/groups?name={name}"))
        }),
        // Many jobs at once.
        Request::new(6, "POST /jobs/bulk", |script| {
            let mut body = script.many_jobs();
            script.maybe(&mut body, 4, "dry_run", |_| json!(true));
            script.maybe(&mut body, 2, "limit", |script| json!(script.below(9) + 1));
            script.post("/jobs/bulk", body)
        }),
        Request::new(10, "POST /operations", |script| {
            let mut body = script.many_jobs();
            if script.one_in(3) {
                // Jobs with keys may be among them: see `WITHOUT_KEY`.
                body = json!({ "action": script.of(&["cancel", "delete", "retry"]) });
                let count = if body["action"] == "retry" { 1 } else { script.below(4) + 1 };
                let ids: Option<Vec<String>> = (0..count).map(|_| script.job()).collect();
                body["ids"] = json!(ids?);
            } else if let Some(status) = body["filter"]["status"].as_str() {
                body["filter"]["status"] = json!([status]);
            }
            script.maybe(&mut body, 4, "id", |_| json!(Uuid::now_v7()));
            script.post("/operations", body)
        })
        .learn(|script, _, reply| script.operations.add(&reply["id"])),
        Request::new(4, "GET /operations", |script| {
            let mut filter = Vec::new();
            if script.one_in(2) {
                filter.push(("limit", (script.below(3) + 1).to_string()));
            }
            if script.one_in(3) {
                filter.push(("state", script.of(&["running", "stopped", "done", "failed"]).into()));
            }
            script.list("/operations", filter)
        }),
        Request::new(4, "GET /operations/{id}", |script| script.of_operation("GET", "")),
        Request::new(5, "POST /operations/{id}/stop", |script| script.of_operation("POST", "/stop")),
        Request::new(7, "POST /operations/{id}/resume", |script| script.of_operation("POST", "/resume")),
        Request::new(5, "POST /dead-letters/redrive", |script| {
            let mut body = json!({});
            script.maybe(&mut body, 3, "kind", |script| json!(script.of(&KINDS)));
            script.maybe(&mut body, 3, "queue", |script| json!(script.queue()));
            script.maybe(&mut body, 2, "limit", |script| json!(script.below(4) + 1));
            if let Some(fingerprint) = script.recent(|script| &script.fingerprints)
                && script.one_in(3)
            {
                body["failure"] = json!(fingerprint);
            }
            script.post("/dead-letters/redrive", body)
        }),
        Request::new(8, "GET /failures", |script| {
            let mut filter = Vec::new();
            if script.one_in(3) {
                filter.push(("kind", script.of(&KINDS).into()));
            }
            if script.one_in(2) {
                filter.push(("limit", (script.below(3) + 1).to_string()));
            }
            script.list("/failures", filter)
        })
        .learn(|script, _, reply| {
            items(reply).iter().for_each(|group| script.fingerprints.add(&group["fingerprint"]))
        }),
        Request::new(5, "GET /failures/{fingerprint}", |script| {
            let fingerprint = script.recent(|script| &script.fingerprints)?;
            script.get(format!("/failures/{fingerprint}"))
        }),
        // Schedules and kinds.
        Request::new(12, "PUT /cron/{name}", |script| {
            let (name, schedule) = (script.of(&SCHEDULES), script.schedule());
            script.call("PUT", format!("/cron/{name}"), Some(schedule))
        }),
        Request::new(4, "GET /cron", |script| script.get("/cron")),
        Request::new(5, "GET /cron/{name}", |script| script.of_schedule("GET", "")),
        Request::new(5, "POST /cron/{name}/pause", |script| script.of_schedule("POST", "/pause")),
        Request::new(4, "POST /cron/{name}/resume", |script| script.of_schedule("POST", "/resume")),
        Request::new(9, "POST /cron/{name}/run", |script| script.of_schedule("POST", "/run"))
            .learn(|script, _, reply| script.jobs.add(&reply["job_id"])),
        Request::new(2, "DELETE /cron/{name}", |script| script.of_schedule("DELETE", "")),
        Request::new(4, "PUT /kinds/{kind}", |script| {
            let kind = script.of(&KINDS);
            let mut body = json!({});
            script.maybe(&mut body, 3, "schema", |_| json!({ "not": { "type": "string" } }));
            script.maybe(&mut body, 2, "defaults", |script| {
                json!({ "queue": script.queue(), "priority": 1, "max_attempts": 2, "timeout_seconds": 20 })
            });
            script.call("PUT", format!("/kinds/{kind}"), Some(body))
        }),
        Request::new(5, "GET /kinds", |script| {
            let schemas = if script.one_in(2) { vec![("schemas", "true".to_owned())] } else { Vec::new() };
            script.list("/kinds", schemas)
        }),
        Request::new(5, "DELETE /kinds/{kind}", |script| {
            let kind = script.of(&KINDS);
            script.call("DELETE", format!("/kinds/{kind}"), None)
        }),
        // Tokens, workers and statistics.
        Request::new(5, "create a token", |script| {
            let id = Uuid::now_v7();
            script.tokens.add(&json!(id));
            Some(Step::NewToken(id))
        }),
        Request::new(5, "GET /tokens", |script| script.get("/tokens")),
        Request::new(6, "DELETE /tokens/{id}", |script| {
            let token = script.recent(|script| &script.tokens)?;
            script.call("DELETE", format!("/tokens/{token}"), None)
        }),
        Request::new(6, "GET /workers", |script| {
            let threshold =
                if script.one_in(2) { vec![("threshold_seconds", "30".to_owned())] } else { Vec::new() };
            script.list("/workers", threshold)
        }),
        Request::new(10, "GET /stats", |script| {
            let mut filter = Vec::new();
            if script.one_in(2) {
                filter.push(("minutes", (script.below(90) + 1).to_string()));
            }
            if script.one_in(3) {
                filter.push(("queue", script.queue().into()));
            }
            if script.one_in(3) {
                filter.push(("kind", script.of(&KINDS).into()));
            }
            script.list("/stats", filter)
        }),
        Request::new(1, "check", |_| upkeep(Upkeep::Check)),
    ]
}

impl Script {
    fn of_queue(&mut self, path: &str) -> Option<Step> {
        let queue = self.queue();
        self.command(format!("/queues/{queue}{path}"))
    }

    fn change_queue(&mut self, method: &'static str, path: &str, body: Value) -> Option<Step> {
        let queue = self.queue();
        self.call(method, format!("/queues/{queue}{path}"), Some(body))
    }

    fn of_operation(&mut self, method: &'static str, path: &str) -> Option<Step> {
        let operation = self.recent(|script| &script.operations)?;
        self.call(method, format!("/operations/{operation}{path}"), None)
    }

    fn of_schedule(&mut self, method: &'static str, path: &str) -> Option<Step> {
        let name = self.of(&SCHEDULES);
        self.call(method, format!("/cron/{name}{path}"), None)
    }

    /// None more often than one.
    fn limit(&mut self) -> Value {
        self.of(&[json!(null), json!(null), json!(1), json!(2), json!(4)])
    }

    fn rate(&mut self) -> Value {
        self.of(&[
            json!(null),
            json!(null),
            json!({ "starts": 2, "period_ms": 1000 }),
            json!({ "starts": 3, "period_ms": 10_000, "burst": 2 }),
        ])
    }

    fn schedule(&mut self) -> Value {
        let mut schedule = json!({ "cron": self.of(&["*/5 * * * *", "0 * * * *", "*/20 * * * * *"]) });
        let mut job = self.plain_job();
        for field in ["run_at", "delay_seconds"] {
            job.as_object_mut().map(|job| job.remove(field));
        }
        self.maybe(&mut job, 4, "unique_key", |_| json!("schedule"));
        schedule["job"] = job;
        self.maybe(&mut schedule, 2, "zone", |script| json!(script.of(&["Europe/Berlin", "Asia/Kathmandu"])));
        self.maybe(&mut schedule, 2, "missed", |script| json!(script.of(&["skip", "one", "all:3"])));
        self.maybe(&mut schedule, 6, "paused", |script| json!(script.one_in(2)));
        schedule
    }

    /// Which jobs to change, and how.
    fn many_jobs(&mut self) -> Value {
        let action = self.of(&["cancel", "delete", "retry"]);
        let mut filter = json!({ "queue": self.of(&[LIMITED_TO, LIMITED_TO, "media", "default", "bulk"]) });
        self.maybe(&mut filter, 2, "kind", |script| json!(script.of(&KINDS)));
        self.maybe(&mut filter, 2, "status", |script| {
            json!(script.of(&["queued", "running", "succeeded", "failed_permanent", "cancelled"]))
        });
        if action == "retry" {
            filter["tag"] = json!(WITHOUT_KEY);
        } else {
            self.maybe(&mut filter, 2, "tag", |script| json!(script.of(&TAGS)));
        }
        json!({ "action": action, "filter": filter })
    }
}
