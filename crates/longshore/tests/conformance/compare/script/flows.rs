//! Steps about flows and events.

use serde_json::{Value, json};
use uuid::Uuid;

use super::*;

pub(super) fn requests() -> Vec<Request> {
    vec![
        Request::new(22, "POST /flows", |script| {
            let flow = script.new_flow();
            script.post("/flows", flow)
        })
        .learn(|script, _, reply| script.flows.add(&reply["id"])),
        Request::new(12, "GET /flows/{id}", |script| script.of_flow("GET", "")),
        Request::new(25, "GET /flows/{id}/tasks", |script| {
            let flow = script.flow()?;
            let limit = if script.one_in(3) {
                vec![("limit", (script.below(3) + 1).to_string())]
            } else {
                Vec::new()
            };
            script.list(&format!("/flows/{flow}/tasks"), limit)
        })
        .learn(|script, _, reply| items(reply).iter().for_each(|task| script.jobs.add(&task["id"]))),
        Request::new(8, "GET /flows", |script| {
            let mut filter = Vec::new();
            if script.one_in(3) {
                filter.push(("name", script.of(&["import", "export"]).into()));
            }
            if script.one_in(3) {
                filter.push(("open", script.of(&["true", "false"]).into()));
            }
            if script.one_in(2) {
                filter.push(("limit", (script.below(6) + 1).to_string()));
            }
            script.list("/flows", filter)
        }),
        Request::new(14, "POST /flows/{id}/jobs", |script| {
            let flow = script.flow()?;
            let count = script.below(3) + 1;
            let jobs: Vec<Value> = (0..count).map(|_| script.plain_job()).collect();
            let mut step = script.post(format!("/flows/{flow}/jobs"), json!({ "jobs": jobs }));
            if let Some(Step::Call(call)) = &mut step
                && script.one_in(2)
            {
                call.idempotency_key = Some(format!("part {}", script.below(3)));
            }
            step
        }),
        Request::new(6, "POST /flows/{id}/seal", |script| script.of_flow("POST", "/seal")),
        Request::new(6, "POST /flows/{id}/cancel", |script| script.of_flow("POST", "/cancel")),
        Request::new(8, "POST /flows/{id}/retry", |script| script.of_flow("POST", "/retry")),
        Request::new(14, "POST /events", |script| {
            let event = json!({ "name": script.of(&EVENTS), "payload": script.payload() });
            script.post("/events", event)
        }),
        Request::new(5, "GET /events/{name}", |script| {
            let name = script.of(&EVENTS);
            script.get(format!("/events/{name}"))
        }),
    ]
}

impl Script {
    fn flow(&mut self) -> Option<String> {
        self.recent(|script| &script.flows)
    }

    fn of_flow(&mut self, method: &'static str, path: &str) -> Option<Step> {
        let flow = self.flow()?;
        self.call(method, format!("/flows/{flow}{path}"), None)
    }

    fn new_flow(&mut self) -> Value {
        let count = self.below(5) + 1;
        let mut tasks = Vec::new();
        for nth in 0..count {
            let mut task = self.plain_job();
            task["task"] = json!(format!("t{nth}"));
            let mut after = Vec::new();
            for parent in 0..nth {
                if self.one_in(2) {
                    let condition = self.of(&["succeeded", "succeeded", "ended", "failed"]);
                    after.push(json!({ "task": format!("t{parent}"), "condition": condition }));
                }
            }
            if !after.is_empty() {
                task["after"] = json!(after);
            }
            tasks.push(task);
        }
        let mut flow = json!({ "name": self.of(&["import", "export"]), "tasks": tasks });
        self.maybe(&mut flow, 4, "on_success", Script::plain_job);
        self.maybe(&mut flow, 4, "on_failure", |script| json!([script.plain_job(), script.plain_job()]));
        self.maybe(&mut flow, 4, "on_end", Script::plain_job);
        self.maybe(&mut flow, 6, "deadline_seconds", |script| json!(script.below(200) + 5));
        self.maybe(&mut flow, 2, "sealed", |_| json!(false));
        self.maybe(&mut flow, 5, "idempotency_key", |script| json!(format!("flow {}", script.below(3))));
        self.maybe(&mut flow, 8, "id", |script| match script.flow() {
            Some(known) if script.one_in(2) => json!(known),
            _ => json!(Uuid::now_v7()),
        });
        flow
    }
}
