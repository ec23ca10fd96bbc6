//! Steps about single jobs: enqueue, read, list, edit, cancel, retry and delete.

use serde_json::{Value, json};
use uuid::Uuid;

use super::*;

/// A tag that no job with a unique key has. Several changes of an operation are made at once, so of several jobs with one
/// key, another one gets the key each time that they are retried together.
pub(super) const WITHOUT_KEY: &str = TAGS[2];

pub(super) fn requests() -> Vec<Request> {
    vec![
        Request::new(60, "POST /jobs", |script| {
            let mut job = script.keyed_job();
            script.maybe(&mut job, 6, "id", |script| match script.job() {
                Some(known) if script.one_in(3) => json!(known),
                _ => json!(Uuid::now_v7()),
            });
            let mut step = script.post("/jobs", job);
            if let Some(Step::Call(call)) = &mut step
                && script.one_in(15)
            {
                call.idempotency_key = Some(script.idempotency_key());
            }
            step
        })
        .learn(learn_job),
        Request::new(15, "POST /jobs/batch", |script| {
            let count = script.below(6) + 1;
            let jobs: Vec<Value> = (0..count).map(|_| script.keyed_job()).collect();
            script.post("/jobs/batch", json!(jobs))
        })
        .learn(|script, _, reply| {
            items(&reply["items"]).iter().for_each(|item| script.jobs.add(&item["id"]))
        }),
        Request::new(20, "GET /jobs/{id}", |script| script.of_job("GET", "")),
        Request::new(12, "GET /jobs/{id}/explain", |script| script.of_job("GET", "/explain")),
        Request::new(8, "GET /jobs/{id}/steps", |script| script.of_job("GET", "/steps")),
        Request::new(30, "GET /jobs", |script| {
            let filter = script.job_filter();
            script.list("/jobs", filter)
        })
        .learn(|script, _, reply| items(reply).iter().take(2).for_each(|job| script.jobs.add(&job["id"]))),
        Request::new(15, "GET the next page", |script| {
            let path = script.next_page.take()?;
            script.get(path)
        }),
        Request::new(10, "GET /dead-letters", |script| {
            let mut filter = script.job_filter();
            filter
                .retain(|(name, _)| ["kind", "queue", "limit", "offset", "cursor", "payload"].contains(name));
            script.list("/dead-letters", filter)
        })
        .learn(|script, _, reply| items(reply).iter().for_each(|job| script.dead.add(&job["id"]))),
        Request::new(20, "POST /jobs/{id}/cancel", |script| script.of_job("POST", "/cancel")),
        Request::new(16, "POST /jobs/{id}/retry", |script| {
            let job = script.job()?;
            let edit = if script.one_in(3) { Some(script.edit()) } else { None };
            script.call("POST", format!("/jobs/{job}/retry"), edit)
        }),
        Request::new(12, "PATCH /jobs/{id}", |script| {
            let (job, edit) = (script.job()?, script.edit());
            script.call("PATCH", format!("/jobs/{job}"), Some(edit))
        }),
        Request::new(10, "DELETE /jobs/{id}", |script| script.of_job("DELETE", "")),
        Request::new(8, "POST /dead-letters/{id}/redrive", |script| {
            let job = script.recent(|script| &script.dead)?;
            script.command(format!("/dead-letters/{job}/redrive"))
        }),
    ]
}

fn learn_job(script: &mut Script, _: &Step, reply: &Value) {
    script.jobs.add(&reply["id"]);
}

impl Script {
    fn of_job(&mut self, method: &'static str, path: &str) -> Option<Step> {
        let job = self.job()?;
        self.call(method, format!("/jobs/{job}{path}"), None)
    }

    pub(super) fn idempotency_key(&mut self) -> String {
        format!("idem {}", self.below(12))
    }

    /// A job as flows, follow-ups and schedules may contain it, too: without keys.
    pub(super) fn plain_job(&mut self) -> Value {
        let payload = self.payload();
        let mut job = json!({ "kind": self.of(&KINDS), "payload": payload, "retry": self.retry() });
        self.maybe(&mut job, 1, "queue", |script| json!(script.queue()));
        self.maybe(&mut job, 4, "priority", |script| json!(script.below(5) as i64 - 2));
        if PLAIN.iter().all(|queue| job["queue"] != *queue) {
            self.maybe(&mut job, 2, "group", |script| json!(script.of(&GROUPS)));
        } else if job["queue"] == "default" && self.one_in(2) {
            job.as_object_mut().map(|job| job.remove("queue"));
        }
        self.maybe(&mut job, 3, "max_attempts", |script| json!(script.below(4) + 1));
        self.maybe(&mut job, 6, "delay_seconds", |script| {
            script.of(&[json!(0), json!(2.5), json!(20), json!(300)])
        });
        if job["delay_seconds"].is_null() {
            self.maybe(&mut job, 8, "run_at", |script| {
                let seconds = script.below(60) as i64 - 20;
                script.time(seconds)
            });
        }
        self.maybe(&mut job, 5, "timeout_seconds", |script| {
            script.of(&[json!("none"), json!(30), json!(90.5)])
        });
        self.maybe(&mut job, 3, "tags", |script| json!(script.some(&TAGS)));
        self.maybe(&mut job, 6, "flags", |script| json!(script.some(&FLAGS)));
        self.maybe(&mut job, 8, "context", |_| json!("by hand"));
        self.maybe(
            &mut job,
            6,
            "metadata",
            |script| json!({ "team": script.of(&TAGS), "n": script.below(3) }),
        );
        self.maybe(&mut job, 60, "max_attempts", |_| json!(0));
        job
    }

    pub(super) fn keyed_job(&mut self) -> Value {
        let mut job = self.plain_job();
        self.maybe(&mut job, 5, "idempotency_key", |script| json!(script.idempotency_key()));
        self.maybe(&mut job, 3, "unique_key", |script| json!(format!("unique {}", script.below(5))));
        if !job["unique_key"].is_null() {
            self.maybe(&mut job, 2, "unique_mode", |script| {
                json!(script.of(&["dedupe", "replace", "preserve_run_at"]))
            });
            if let Some(tags) = job["tags"].as_array_mut() {
                tags.retain(|tag| tag != WITHOUT_KEY);
            }
        }
        job
    }

    /// JSON of every type. Engines keep its text.
    pub(super) fn payload(&mut self) -> Value {
        let n = self.below(9);
        self.of(&[
            json!({ "n": n, "to": "ada@example.com" }),
            json!([1, 2.50, "Zoë", { "deep": [null, true] }]),
            json!("text with \"quotes\" and \n lines"),
            json!(null),
            json!(-1e30),
            json!({}),
        ])
    }

    /// A policy whose delays do not depend on the job's id.
    pub(super) fn retry(&mut self) -> Value {
        self.of(&[
            json!({ "policy": "fixed", "delay_ms": 1500 }),
            json!({ "policy": "fixed", "delay_ms": 0 }),
            json!({ "policy": "exponential", "cap_ms": 30_000 }),
            json!({ "policy": "list", "delays_ms": [500, 4000] }),
            json!({ "policy": "jitter", "base_ms": 3000, "cap_ms": 3000 }),
            json!({ "policy": "none" }),
        ])
    }

    fn edit(&mut self) -> Value {
        let mut edit = json!({});
        self.maybe(&mut edit, 2, "priority", |script| json!(script.below(5) as i64 - 2));
        self.maybe(&mut edit, 3, "payload", Script::payload);
        self.maybe(&mut edit, 3, "delay_seconds", |script| json!(script.below(30)));
        self.maybe(&mut edit, 8, "run_at", |script| script.time(7));
        edit
    }

    /// Some parameters of a list of jobs.
    pub(super) fn job_filter(&mut self) -> Vec<(&'static str, String)> {
        let statuses = ["queued", "running", "succeeded", "retrying", "failed_permanent", "cancelled"];
        let mut filter = Vec::new();
        if self.one_in(3) {
            let status =
                if self.one_in(3) { self.some(&statuses).join(",") } else { self.of(&statuses).into() };
            filter.push(("status", status));
        }
        if self.one_in(4) {
            filter.push(("kind", self.of(&KINDS).into()));
        }
        if self.one_in(3) {
            filter.push(("queue", self.queue().into()));
        }
        if self.one_in(8) {
            filter.push(("group", self.of(&GROUPS).into()));
        }
        if self.one_in(8) {
            filter.push(("tag", self.of(&TAGS).into()));
        }
        if self.one_in(12) {
            filter.push(("error", self.of(&["SMTP", "paper", "%25", "zo"]).into()));
        }
        if self.one_in(10)
            && let Some(fingerprint) = self.recent(|script| &script.fingerprints)
        {
            filter.push(("failure", fingerprint));
        }
        if self.one_in(10) {
            let key = self.idempotency_key().replace(' ', "%20");
            filter.push(("idempotency_key", key));
        }
        if self.one_in(10) {
            filter.push(("unique_key", format!("unique%20{}", self.below(5))));
        }
        for name in ["ended_after", "ended_before"] {
            if self.one_in(10) {
                let seconds = -(self.below(600) as i64);
                filter.push((name, self.time(seconds).as_str().unwrap_or_default().to_owned()));
            }
        }
        if self.one_in(12) {
            // Ids have the time of the host, which is not that of the pinned clock.
            filter.push((
                self.of(&["newer_than", "older_than"]),
                self.of(&["2020-01-01T00:00:00Z", "2090-01-01T00:00:00Z"]).into(),
            ));
        }
        if self.one_in(2) {
            filter.push(("limit", (self.below(12) + 1).to_string()));
        }
        if self.one_in(10) {
            filter.push(("offset", self.below(6).to_string()));
        } else if self.one_in(10)
            && let Some(job) = self.job()
        {
            filter.push(("cursor", job));
        }
        if self.one_in(6) {
            filter.push(("payload", "false".into()));
        }
        filter
    }
}
