//! The operator's commands: queues, cron, dead letters, kinds, counts, health and stats.

use std::time::Duration;

use longshore::store::NewWorker;
use longshore::{ALL_QUEUES, Ending, NewJob};
use serde_json::json;

use crate::fixture::{CommandOutput, Fixture, binary, on_every_target};
use crate::jobs::serve_pages;

on_every_target!(
    queues_are_paused_resumed_and_limited,
    groups_are_listed_limited_and_paused,
    only_an_unknown_queue_is_reported_as_unknown,
    schedules_are_added_paused_run_and_removed,
    dead_letters_are_listed_and_redriven,
    dead_letters_are_redriven_by_filter,
    counts_are_by_queue_kind_and_status,
    health_is_ok_when_the_queue_responds,
    stats_show_what_ended_and_how_fast,
    kinds_are_registered_listed_and_removed,
);

fn queues_are_paused_resumed_and_limited(fixture: &Fixture) {
    fixture.migrated();
    assert_eq!(fixture.run("queues list --json").json(), json!([]));
    assert!(fixture.run("queues list").ok().out.starts_with("no queues"));
    fixture.enqueue("greet --queue mail");

    let paused = fixture.run("queues pause mail --json").json();
    assert_eq!(
        (&paused["name"], &paused["paused"], &paused["waiting"]),
        (&json!("mail"), &json!(true), &json!(1))
    );
    let limited = fixture.run("queues limit mail 3").ok().out;
    let words: Vec<&str> = limited.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(words, ["mail", "paused", "3", "-", "1", "0"]);
    let resumed = fixture.run("queues resume mail --json").json();
    assert_eq!((&resumed["paused"], &resumed["limit"]), (&json!(false), &json!(3)));
    assert_eq!(fixture.run("queues limit mail none --json").json()["limit"], json!(null));
    assert_eq!(fixture.run("queues list --json").json()[0]["name"], "mail");

    let typo = fixture.run("queues pause mial");
    assert_eq!(typo.code, 0, "{typo:?}");
    assert!(typo.err.starts_with("warning: queue `mial` is unknown"), "{typo:?}");
    assert!(typo.err.contains("did you mean `mail`?"), "{typo:?}");
    assert!(typo.out.contains("paused"), "the queue is paused anyway: {typo:?}");
    fixture.run("queues resume mial").ok();

    fixture.run("queues limit mail 0").fails_with(2, &["mail", "at least 1", "pause"]);
    fixture.run("queues limit mail some").fails_with(2, &["N|none", "or none"]);
    fixture.run(&format!("queues pause {}", "x".repeat(129))).fails_with(2, &["queue", "at most 128"]);
    for line in ["queues pause *", "queues limit * 1", "enqueue greet --queue *"] {
        fixture.run(line).fails_with(2, &["queue", "`*` means every queue"]);
    }
    fixture.run_args(&["queues", "resume", ""]).fails_with(2, &["queue", "1 to 128 bytes"]);
}

fn groups_are_listed_limited_and_paused(fixture: &Fixture) {
    fixture.migrated();
    fixture.enqueue("greet --queue mail --group acme");
    let words = |line: &str| -> Vec<String> {
        let out = fixture.run(line).ok().out;
        out.lines().nth(1).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(words("groups list mail"), ["acme", "active", "-", "-", "1", "0"]);
    assert_eq!(
        words("groups set mail acme --limit 5 --rate 100/s --burst 10"),
        ["acme", "active", "5", "100/s", "+10", "1", "0"]
    );
    assert_eq!(words("groups pause mail acme")[1], "paused");
    assert_eq!(words("groups resume mail acme")[1], "active");
    let group = fixture.run("groups set mail acme --limit none --rate none --json").json();
    assert_eq!((&group["limit"], &group["rate"]), (&json!(null), &json!(null)));
    fixture.run("groups default mail --limit 2").ok();
    let queue = fixture.run("groups default mail --rate 5/10m --json").json();
    assert_eq!((&queue["group_limit"], &queue["group_rate"]["period_ms"]), (&json!(2), &json!(600_000)));
    assert_eq!(words("groups list mail"), ["acme", "active", "2", "5/10m", "1", "0"]);
    assert_eq!(words("queues rate mail 100/s")[3], "100/s");
    assert_eq!(fixture.run("queues rate mail none --json").json()["rate"], json!(null));
    assert_eq!(fixture.run("groups list mail --json").json()[0]["name"], "acme");
    assert!(fixture.run("groups list other").ok().out.starts_with("no group"));
    fixture.run("groups set mail acme --rate 0/s").fails_with(2, &["rate.starts", "1 to 1000000"]);
    fixture.run("groups set mail acme --rate often").fails_with(2, &["N/TIME|none", "100/s"]);
    fixture.run(&format!("enqueue greet --group {}", "x".repeat(129))).fails_with(2, &["group", "128"]);
}

fn only_an_unknown_queue_is_reported_as_unknown(fixture: &Fixture) {
    fixture.migrated();
    fixture.run("queues pause default").ok();
    let unknown = fixture.run("queues pause defualt --json");
    assert_eq!((unknown.code, unknown.err.as_str()), (0, ""), "{unknown:?}");
    let warning = |queue: &str| fixture.run(&format!("queues resume {queue}")).err;
    let has_no_worker = "warning: queue `images` is unknown: it had no settings, no jobs and no worker\n";
    assert_eq!(warning("images"), has_no_worker);

    // The only job of the queue has finished.
    let finished = fixture.enqueue("greet --queue mail");
    fixture.run(&format!("jobs cancel {finished}")).ok();
    fixture.run("queues limit mail 3").ok();

    fixture.with_client(async |client| {
        let queues = vec![ALL_QUEUES.to_owned(), "reports".to_owned()];
        client.store().register(&NewWorker { queues, ..NewWorker::new("crane 7") }).await
    });
    fixture.run("queues pause reports").ok();
    let has_no_jobs =
        "warning: queue `report` is unknown: it had no settings and no jobs; did you mean `reports`?\n";
    assert_eq!(warning("report"), has_no_jobs);
    // A worker that does not respond serves no queue.
    fixture.move_clock(Duration::from_secs(3600));
    assert!(warning("videos").contains("no settings, no jobs and no worker"));
}

fn schedules_are_added_paused_run_and_removed(fixture: &Fixture) {
    fixture.migrated().with_kinds(&["report"]);
    assert_eq!(fixture.run("cron list --json").json(), json!([]));
    assert!(fixture.run("cron list").ok().out.starts_with("no schedules"));

    let nightly =
        ["cron", "add", "nightly", "30 2 * * *", "report", "--zone", "Europe/Berlin", "--missed", "all:7"];
    let put = fixture.run_args(&nightly).ok().out;
    assert!(put.contains("nightly") && put.contains("Europe/Berlin") && put.contains("all:7"), "{put}");
    let row: Vec<&str> = put.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..3], ["nightly", "active", "in"], "{put}");
    assert_eq!(row[4..11], ["30", "2", "*", "*", "*", "report", "default"], "{put}");
    let listed = fixture.run("cron list --json").json();
    assert_eq!((&listed[0]["name"], &listed[0]["paused"]), (&json!("nightly"), &json!(false)));
    fixture.run_args(&nightly).ok();
    assert_eq!(fixture.run("cron list --json").json()[0]["next_at"], listed[0]["next_at"]);
    let shown = fixture.run("cron show nightly --json").json();
    assert_eq!((&shown["cron"], &shown["job"]["kind"]), (&json!("30 2 * * *"), &json!("report")));
    assert!(fixture.run("cron show nightly").ok().out.contains("Europe/Berlin"));
    fixture.run("cron show daily").fails_with(3, &["no schedule"]);

    assert_eq!(fixture.run("cron pause nightly --json").json()["paused"], json!(true));
    assert!(fixture.run("cron run nightly").ok().out.starts_with("created "));
    assert_eq!(fixture.run("cron resume nightly --json").json()["paused"], json!(false));
    assert_eq!(fixture.run("jobs list --kind report --json").json()["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(fixture.run("cron remove nightly").ok().out, "removed nightly\n");

    fixture.run("cron pause nightly").fails_with(3, &["nightly"]);
    fixture.run_args(&["cron", "add", "x", "99 * * * *", "report"]).fails_with(2, &["99"]);
    fixture
        .run_args(&["cron", "add", "x", "* * * * *", "report", "--zone", "Mars/Base"])
        .fails_with(2, &["zone"]);
    fixture
        .run_args(&["cron", "add", "x", "* * * * *", "report", "--missed", "some"])
        .fails_with(2, &["missed"]);
}

fn dead_letters_are_listed_and_redriven(fixture: &Fixture) {
    fixture.migrated();
    assert_eq!(fixture.run("dead list").ok().out, "no dead letters match\n");
    let done = fixture.finished_job(NewJob::new("greet", &()), Ending::Succeeded { result: None });
    let id = fixture.failed_job("send_email", "mailbox full").to_string();

    let dead = fixture.run("dead list --json").json();
    assert_eq!((dead["jobs"].as_array().unwrap().len(), &dead["jobs"][0]["id"]), (1, &json!(id)));
    assert!(fixture.run("dead list --kind send_email").ok().out.contains("mailbox full"));
    assert_eq!(fixture.run("dead list --kind greet --json").json()["jobs"], json!([]));

    assert_eq!(fixture.run(&format!("dead redrive {id}")).ok().out, format!("queued {id}\n"));
    fixture.run(&format!("dead redrive {id}")).fails_with(4, &[&id, "has not ended"]);
    fixture.run(&format!("dead redrive {done}")).fails_with(4, &["ended as succeeded", "retry it instead"]);
    fixture.run("dead redrive").fails_with(2, &["--kind", "--queue", "--all"]);
    fixture.run(&format!("dead redrive {id} --all")).fails_with(2, &["--all"]);
}

fn dead_letters_are_redriven_by_filter(fixture: &Fixture) {
    fixture.migrated();
    for kind in ["a", "a", "a", "b"] {
        fixture.failed_job(kind, "no");
    }
    assert_eq!(
        fixture.run("dead redrive --kind a --limit 2 --json").json(),
        json!({ "redriven": 2, "skipped": 0 })
    );
    assert_eq!(fixture.run("dead redrive --queue elsewhere").ok().out, "redriven: 0\n");
    assert_eq!(fixture.run("dead redrive --all").ok().out, "redriven: 2\n");
    assert_eq!(fixture.run("dead list --json").json()["jobs"], json!([]));
}

fn counts_are_by_queue_kind_and_status(fixture: &Fixture) {
    fixture.migrated();
    assert_eq!(fixture.run("counts").ok().out, "no jobs\n");
    fixture.failed_job("pay", "no");
    fixture.enqueue("pay");
    fixture.enqueue("pay");
    fixture.enqueue("greet --queue mail");
    let counts = fixture.run("counts --json").json();
    let count =
        json!({ "status": "queued", "queue": "default", "kind": "pay", "jobs": 2, "estimated": false });
    assert!(counts.as_array().unwrap().contains(&count), "{counts}");
    let table = fixture.run("counts").ok().out;
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][2..], ["QUEUED", "RUNNING", "SUCCEEDED", "RETRYING", "FAILED_PERMANENT", "CANCELLED"]);
    assert_eq!(rows[1], ["default", "pay", "2", "0", "0", "0", "1", "0"]);
    assert_eq!(rows[2], ["mail", "greet", "1", "0", "0", "0", "0", "0"]);
}

fn health_is_ok_when_the_queue_responds(fixture: &Fixture) {
    fixture.migrated();
    assert_eq!(fixture.run("health").ok().out, "ok\n");
    assert_eq!(fixture.run("health --json").json(), json!({ "status": "ok" }));
}

fn stats_show_what_ended_and_how_fast(fixture: &Fixture) {
    fixture.migrated();
    let idle = fixture.run("stats").ok().out;
    assert!(idle.contains("run time  p50 -, p95 -, p99 -\n"), "{idle}");
    fixture.failed_job("pay", "no");
    fixture.finished_job(NewJob::new("greet", &()), Ending::Succeeded { result: None });
    fixture.enqueue("greet");
    let shown = fixture.run("stats").ok().out;
    assert!(shown.contains("now       1 queued, 0 retrying, 0 running\n"), "{shown}");
    assert!(
        shown.contains("ended     1 succeeded, 1 failed_permanent, 0 cancelled in 60 minutes\n"),
        "{shown}"
    );
    assert!(shown.contains("MINUTE"), "{shown}");
    let of_kind = fixture.run("stats --kind pay --minutes 5").ok().out;
    assert!(of_kind.contains("0 succeeded, 1 failed_permanent, 0 cancelled in 5 minutes\n"), "{of_kind}");
    let document = fixture.run("stats --queue default --json").json();
    assert!(document["per_second"].as_f64().unwrap() > 0.0, "{document}");
    assert_eq!(document["counts"].as_array().unwrap().len(), 3, "{document}");
    fixture.run("stats --minutes 0").fails_with(2, &["--minutes", "1..=1440"]);
}

#[test]
fn stats_and_counts_mark_estimates() {
    const STATS: &str = r#"{ "at": "2026-07-14T09:30:12Z", "series": [], "per_second": 0.0,
        "run_seconds": { "p50": null, "p95": null, "p99": null },
        "counts": [
            { "status": "queued", "queue": "mail", "kind": "greet", "jobs": 130, "estimated": false },
            { "status": "queued", "queue": "default", "kind": "pay", "jobs": 300000, "estimated": true },
            { "status": "running", "queue": "default", "kind": "pay", "jobs": 7, "estimated": false }
        ] }"#;
    let (url, _requested) = serve_pages(&[(STATS, ""), (STATS, "")]);
    let run = |command: &str| {
        CommandOutput::of(binary().env("LONGSHORE_SERVER", &url).arg(command).output().unwrap()).ok().out
    };
    let stats = run("stats");
    assert!(stats.contains("now       ~300130 queued, 0 retrying, 7 running\n"), "{stats}");
    let counts = run("counts");
    assert!(counts.contains("  ~300000  7 ") && counts.contains("  130 "), "{counts}");
}

fn kinds_are_registered_listed_and_removed(fixture: &Fixture) {
    fixture.migrated();
    assert_eq!(fixture.run("kinds list --json").json(), json!([]));
    assert!(fixture.run("kinds list").ok().out.starts_with("no kinds"));
    let schema = r#"{"type":"object","required":["pages"]}"#;
    let put = fixture.run_args(&[
        "kinds",
        "put",
        "report",
        "--schema",
        schema,
        "--defaults",
        r#"{"queue":"slow"}"#,
    ]);
    assert!(put.ok().out.contains(r#"{"queue":"slow"}"#));
    let kept = fixture.run("kinds put report --json").json();
    assert_eq!(kept["schema"]["required"], json!(["pages"]), "fields that are not given stay unchanged");

    fixture.run("enqueue report").fails_with(2, &["payload", "pages"]);
    let id =
        fixture.run_args(&["enqueue", "report", "--payload", r#"{"pages":3}"#, "--json"]).json()["job_id"]
            .clone();
    let job = fixture.run(&format!("jobs show {} --json", id.as_str().unwrap())).json();
    assert_eq!(job["queue"], "slow", "the kind's default applies");

    fixture.run("kinds put report --schema {oops").fails_with(2, &["schema", "not JSON"]);
    fixture.run_args(&["kinds", "put", "report", "--schema", r#"{"type":7}"#]).fails_with(2, &["schema"]);
    fixture
        .run_args(&["kinds", "put", "report", "--defaults", r#"{"colour":1}"#])
        .fails_with(2, &["defaults", "colour"]);
    assert_eq!(fixture.run("kinds remove report").ok().out, "removed report\n");
    fixture.run("kinds remove report").fails_with(3, &["is not registered"]);
}
