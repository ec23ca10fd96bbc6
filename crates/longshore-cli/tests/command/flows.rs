//! `longshore flows`: enqueue, list, show, cancel and retry graphs of jobs.

use longshore::{Ending, Flow, JobId, NewJob, fan_out, task};
use serde_json::{Value, json};

use crate::fixture::{Fixture, UNKNOWN_ID, on_every_target};
use crate::terminal::at_a_terminal;

on_every_target!(
    a_flow_is_enqueued_from_a_file_and_shown_in_layers,
    a_bad_flow_is_refused_and_names_the_task,
    flows_are_listed_and_named_by_their_whole_id,
    a_flow_is_cancelled_and_retried,
    jobs_are_added_to_a_flow_until_it_is_sealed,
    a_large_flow_is_folded,
    a_flow_fits_80_columns,
);

fn import() -> Value {
    let task =
        |name: &str, after: Value| json!({ "task": name, "kind": "greet", "payload": 1, "after": after });
    json!({
        "name": "import",
        "idempotency_key": "import 7",
        "tasks": [
            task("fetch", json!([])),
            task("store", json!(["parse", "count"])),
            task("parse", json!(["fetch"])),
            task("count", json!([{ "task": "fetch", "condition": "ended" }])),
        ],
        "on_failure": { "kind": "alert", "payload": 1 },
    })
}

fn enqueue(fixture: &Fixture, flow: &Value) -> String {
    let stored = fixture.run_with_input("flows enqueue - --json", flow.to_string().as_bytes()).json();
    stored["id"].as_str().unwrap().to_owned()
}

/// Runs the due jobs and lets the flow follow their ends.
fn run_due(fixture: &Fixture, ending: Ending) -> usize {
    let (_, claimed) = fixture.claim(100);
    claimed.iter().for_each(|job| fixture.settle(job, ending.clone()));
    fixture.with_client(async |client| client.advance_flows().await);
    claimed.len()
}

fn done() -> Ending {
    Ending::Succeeded { result: None }
}

fn failed() -> Ending {
    Ending::Failed { error: "no".into(), retry_in: None }
}

/// The rows of the drawn tasks, without ids and repeated spaces.
fn drawn(fixture: &Fixture, id: &str) -> Vec<String> {
    let shown = fixture.run(&format!("flows show {id}")).ok().out;
    let rows = shown.lines().skip_while(|line| !line.is_empty()).skip(2);
    let is_id = |word: &&str| word.len() == 36 && word.parse::<JobId>().is_ok();
    rows.map(|row| row.split_whitespace().filter(|word| !is_id(word)).collect::<Vec<_>>().join(" ")).collect()
}

fn a_flow_is_enqueued_from_a_file_and_shown_in_layers(fixture: &Fixture) {
    fixture.migrated();
    let file = std::env::temp_dir().join(format!("longshore-flow-{}.json", JobId::new()));
    std::fs::write(&file, import().to_string()).unwrap();
    let line = format!("flows enqueue {}", file.display());
    let created = fixture.run(&line).ok().out;
    let id = created.split(' ').nth(1).unwrap().to_owned();
    assert_eq!(created, format!("created {id} (4 jobs)\n"));
    assert_eq!(fixture.run(&line).ok().out, format!("existing {id} (4 jobs)\n"));
    std::fs::remove_file(&file).unwrap();

    let shown = fixture.run(&format!("flows show {id}")).ok().out;
    for line in [
        format!("flow       {id}"),
        "name       import".into(),
        "status     running".into(),
        "jobs       4, of which 4 have not ended and 0 failed".into(),
        "key        import 7".into(),
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line}: {shown}");
    }
    assert_eq!(
        drawn(fixture, &id),
        [
            "┌ ○ fetch queued",
            "│",
            "├ ◌ parse waiting fetch",
            "├ ◌ count waiting fetch (ended)",
            "│",
            "└ ◌ store waiting parse, count",
        ]
    );
    assert_eq!(run_due(fixture, failed()), 1);
    assert_eq!(run_due(fixture, done()), 1);
    assert_eq!(
        drawn(fixture, &id),
        [
            "┌ ✗ fetch failed_permanent",
            "│",
            "├ - parse skipped fetch",
            "├ ✓ count succeeded fetch (ended)",
            "│",
            "└ - store skipped parse, count",
        ]
    );
    let document = fixture.run(&format!("flows show {id} --json")).json();
    assert_eq!(document["flow"]["status"], "failed");
    assert_eq!((document["tasks"].as_array().unwrap().len(), &document["next"]), (4, &Value::Null));
    let job = document["tasks"][0]["id"].as_str().unwrap();
    let job = fixture.run(&format!("jobs show {job}")).ok().out;
    assert!(job.contains(&format!("flow             {id}\ntask             fetch\n")), "{job}");
}

fn a_bad_flow_is_refused_and_names_the_task(fixture: &Fixture) {
    fixture.migrated();
    let mut cyclic = import();
    cyclic["tasks"][0]["after"] = json!(["store"]);
    let mut unknown = import();
    unknown["tasks"][1]["after"] = json!(["parce"]);
    for (flow, parts) in [
        (cyclic.to_string(), ["these tasks wait for each other", "remove one of the links"]),
        (unknown.to_string(), ["task `store`: after", "no task `parce`"]),
        ("{".into(), ["standard input: not JSON", "--help"]),
        ("[]".into(), ["not an object", ""]),
    ] {
        fixture.run_with_input("flows enqueue -", flow.as_bytes()).fails_with(2, &parts);
    }
    fixture.run("flows enqueue /does/not/exist.json").fails_with(2, &["/does/not/exist.json"]);
    assert_eq!(fixture.run("flows list --json").json()["flows"], json!([]));
    assert_eq!(fixture.run("flows list").ok().out, "no flows match\n");
    for command in ["show", "cancel", "retry", "seal"] {
        fixture.run(&format!("flows {command} {UNKNOWN_ID}")).fails_with(3, &["does not exist"]);
    }
    fixture.run("flows show 0123abcd").fails_with(2, &["is not the id of a flow", "flows list"]);
}

fn flows_are_listed_and_named_by_their_whole_id(fixture: &Fixture) {
    fixture.migrated();
    let ids: Vec<String> = ["a", "b", "b"]
        .map(|name| {
            let tasks = json!([{ "kind": "greet", "payload": name }]);
            enqueue(fixture, &json!({ "name": name, "tasks": tasks }))
        })
        .into();
    let page = fixture.run("flows list --limit 2");
    assert_eq!(page.code, 0, "{page:?}");
    let rows: Vec<&str> = page.out.lines().skip(1).collect();
    assert!(rows[0].starts_with(&ids[2]) && rows[1].starts_with(&ids[1]) && rows.len() == 2, "{page:?}");
    let next = format!("next page: longshore flows list --limit 2 --cursor {}\n", ids[1]);
    assert_eq!(page.err, next);
    let rest = fixture.run(&format!("flows list --limit 2 --cursor {} --json", ids[1])).json();
    assert_eq!((&rest["flows"][0]["id"], &rest["next"]), (&json!(ids[0]), &Value::Null));
    fixture.run(&format!("flows cancel {}", ids[1])).ok();
    let open = fixture.run("flows list --name b --open --json").json();
    assert_eq!((open["flows"].as_array().unwrap().len(), &open["flows"][0]["id"]), (1, &json!(ids[2])));

    let part = &ids[0][..34];
    fixture.run(&format!("flows cancel {part}")).fails_with(2, &[part, "longshore flows list"]);
    // Children have the id of their job.
    let job = fixture.enqueue("greet");
    fixture.run(&format!("flows show {job}")).fails_with(3, &["does not exist", "flows list"]);
}

fn a_flow_is_cancelled_and_retried(fixture: &Fixture) {
    fixture.migrated();
    let id = enqueue(fixture, &import());
    let (_, running) = fixture.claim(1);
    let cancelled = fixture.run(&format!("flows cancel {id}")).ok().out;
    assert_eq!(cancelled, format!("cancelled {id}: 3 waiting jobs; 1 running job requested to stop\n"));
    fixture.settle(&running[0], Ending::Cancelled { reason: None });
    fixture.with_client(async |client| client.advance_flows().await);
    assert_eq!(fixture.run(&format!("flows show {id} --json")).json()["flow"]["status"], "cancelled");
    fixture.run(&format!("flows cancel {id}")).fails_with(4, &["already ended", "retry"]);
    let retried = fixture.run(&format!("flows retry {id}")).ok().out;
    assert_eq!(retried, format!("retried {id}: 4 jobs run again\n"));
    let again = fixture.run(&format!("flows retry {id} --json")).json();
    assert_eq!(again, json!({ "reopened": 0 }));
    assert_eq!(
        fixture.run(&format!("flows retry {id}")).ok().out,
        format!("nothing to retry in {id}: no job has ended without success\n")
    );
    // The command follows the end itself, because there is no worker.
    let id = enqueue(fixture, &json!({ "name": "f", "tasks": [{ "kind": "greet", "payload": 1 }] }));
    assert_eq!(
        fixture.run(&format!("flows cancel {id} --json")).json(),
        json!({ "cancelled": 1, "requested": 0 })
    );
    assert_eq!(fixture.run(&format!("flows show {id} --json")).json()["flow"]["status"], "cancelled");
}

fn jobs_are_added_to_a_flow_until_it_is_sealed(fixture: &Fixture) {
    fixture.migrated();
    let id = enqueue(fixture, &json!({ "name": "batch", "sealed": false }));
    let part =
        json!({ "jobs": [{ "kind": "greet", "payload": 1 }, { "kind": "greet", "payload": 2 }] }).to_string();
    let add = format!("flows add {id} -");
    assert_eq!(fixture.run_with_input(&add, part.as_bytes()).ok().out, "the flow has 2 jobs now\n");
    let shown = fixture.run(&format!("flows show {id}")).ok().out;
    assert!(shown.contains("0 failed; not sealed: more can be added\n"), "{shown}");
    assert_eq!(drawn(fixture, &id), ["┌ ○ greet queued", "└ ○ greet queued"]);
    assert_eq!(run_due(fixture, done()), 2);
    assert_eq!(fixture.run(&format!("flows seal {id}")).ok().out, format!("sealed {id}\n"));
    assert_eq!(fixture.run(&format!("flows show {id} --json")).json()["flow"]["status"], "succeeded");
    fixture.run_with_input(&add, part.as_bytes()).fails_with(4, &["is sealed"]);
}

fn a_large_flow_is_folded(fixture: &Fixture) {
    fixture.migrated();
    let flow = fixture.with_client(async |client| {
        let pages = (1..=45).map(|n| task(format!("page-{n}"), NewJob::new("greet", &n)));
        let flow = Flow::new("book").task(task("fetch", NewJob::new("greet", &0)));
        client.enqueue_flow(flow.then_all(pages).then(task("bind", NewJob::new("greet", &46)))).await
    });
    assert_eq!(run_due(fixture, done()), 1);
    let (_, claimed) = fixture.claim(3);
    fixture.settle(&claimed[0], done());
    fixture.settle(&claimed[1], failed());
    fixture.with_client(async |client| client.advance_flows().await);
    assert_eq!(
        drawn(fixture, &flow.id.to_string()),
        [
            "┌ ✓ fetch 1 succeeded",
            "│",
            "├ ✗ 45 × page 1 failed_permanent, 1 running, 42 queued, 1 succeeded fetch",
            "│",
            "└ - bind 1 skipped page",
        ]
    );
}

fn a_flow_fits_80_columns(fixture: &Fixture) {
    fixture.migrated();
    let long = |n: usize| format!("a task with a name that is rather long, number {n}");
    let (small, large) = fixture.with_client(async |client| {
        let named = |n: usize| task(long(n), NewJob::new("greet", &n));
        let small = fan_out((0..5).map(named)).then(named(5));
        let large = fan_out((0..50).map(named)).then(named(50)).then(task("last", NewJob::new("greet", &())));
        Ok((client.enqueue_flow(small).await?, client.enqueue_flow(large).await?))
    });
    let plain = [("NO_COLOR", "1")];
    for (flow, parts) in
        [(small, ["┌ ○ a task with", "└ ◌ a task with"]), (large, ["51 × a task with", "└ ◌ last"])]
    {
        for line in [format!("flows show {}", flow.id), "flows list".into()] {
            let Some(shown) = at_a_terminal(fixture, &plain, &line) else { return };
            assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
        }
        let shown = at_a_terminal(fixture, &plain, &format!("flows show {}", flow.id)).unwrap();
        assert!(parts.iter().all(|part| shown.contains(part)), "{shown}");
    }
}
