//! Queues, dead letters, workers, sweeps, counts and the check.

use std::time::Duration;

use longshore::{Ending, NewJob};
use serde_json::json;

use crate::bench::{Bench, on_every_engine};

on_every_engine!(
    queues_are_paused_resumed_and_limited,
    schedules_are_put_paused_run_and_removed,
    dead_letters_are_listed_and_redriven,
    dead_letters_are_redriven_by_filter,
    workers_are_listed_with_their_state,
    a_sweep_recovers_what_its_dry_run_told,
    counts_tell_queue_kind_and_status,
    a_check_finds_a_job_that_is_nowhere,
);

fn queues_are_paused_resumed_and_limited(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("queues list --json").json(), json!([]));
    assert!(bench.run("queues list").ok().out.starts_with("no queues"));
    bench.enqueue("greet --queue mail");

    let paused = bench.run("queues pause mail --json").json();
    assert_eq!(
        (&paused["name"], &paused["paused"], &paused["waiting"]),
        (&json!("mail"), &json!(true), &json!(1))
    );
    let limited = bench.run("queues limit mail 3").ok().out;
    let words: Vec<&str> = limited.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(words, ["mail", "paused", "3", "1", "0"]);
    let resumed = bench.run("queues resume mail --json").json();
    assert_eq!((&resumed["paused"], &resumed["limit"]), (&json!(false), &json!(3)));
    assert_eq!(bench.run("queues limit mail none --json").json()["limit"], json!(null));
    assert_eq!(bench.run("queues list --json").json()[0]["name"], "mail");

    bench.run("queues limit mail 0").refused(2, &["mail", "at least 1", "pause"]);
    bench.run("queues limit mail some").refused(2, &["N|none", "or none"]);
    bench.run(&format!("queues pause {}", "x".repeat(129))).refused(2, &["queue", "at most 128"]);
    bench.words(&["queues", "resume", ""]).refused(2, &["queue", "1 to 128 bytes"]);
}

fn schedules_are_put_paused_run_and_removed(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("cron list --json").json(), json!([]));
    assert!(bench.run("cron list").ok().out.starts_with("no schedules"));

    let nightly =
        ["cron", "add", "nightly", "30 2 * * *", "report", "--zone", "Europe/Berlin", "--missed", "all:7"];
    let put = bench.words(&nightly).ok().out;
    assert!(put.contains("nightly") && put.contains("Europe/Berlin") && put.contains("all:7"), "{put}");
    let listed = bench.run("cron list --json").json();
    assert_eq!((&listed[0]["name"], &listed[0]["paused"]), (&json!("nightly"), &json!(false)));
    bench.words(&nightly).ok();
    assert_eq!(bench.run("cron list --json").json()[0]["next_at"], listed[0]["next_at"]);

    assert_eq!(bench.run("cron pause nightly --json").json()["paused"], json!(true));
    assert!(bench.run("cron run nightly").ok().out.starts_with("created "));
    assert_eq!(bench.run("cron resume nightly --json").json()["paused"], json!(false));
    assert_eq!(bench.run("jobs list --kind report --json").json()["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(bench.run("cron remove nightly").ok().out, "removed nightly\n");

    bench.run("cron pause nightly").refused(3, &["nightly"]);
    bench.words(&["cron", "add", "x", "99 * * * *", "report"]).refused(2, &["99"]);
    bench.words(&["cron", "add", "x", "* * * * *", "report", "--zone", "Mars/Base"]).refused(2, &["zone"]);
    bench.words(&["cron", "add", "x", "* * * * *", "report", "--missed", "some"]).refused(2, &["missed"]);
}

fn dead_letters_are_listed_and_redriven(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("dead list").ok().out, "no dead letters match\n");
    let done = bench.ended(NewJob::new("greet", &()), Ending::Succeeded { result: None });
    let id = bench.failed("send_email", "mailbox full").to_string();

    let dead = bench.run("dead list --json").json();
    assert_eq!((dead["jobs"].as_array().unwrap().len(), &dead["jobs"][0]["id"]), (1, &json!(id)));
    assert!(bench.run("dead list --kind send_email").ok().out.contains("mailbox full"));
    assert_eq!(bench.run("dead list --kind greet --json").json()["jobs"], json!([]));

    assert_eq!(bench.run(&format!("dead redrive {id}")).ok().out, format!("queued {id}\n"));
    bench.run(&format!("dead redrive {id}")).refused(4, &[&id, "has not ended"]);
    bench.run(&format!("dead redrive {done}")).refused(4, &["ended as succeeded", "retry it instead"]);
    bench.run("dead redrive").refused(2, &["--kind", "--queue", "--all"]);
    bench.run(&format!("dead redrive {id} --all")).refused(2, &["--all"]);
}

fn dead_letters_are_redriven_by_filter(bench: &Bench) {
    bench.migrated();
    for kind in ["a", "a", "a", "b"] {
        bench.failed(kind, "no");
    }
    assert_eq!(bench.run("dead redrive --kind a --limit 2 --json").json(), json!({ "redriven": 2 }));
    assert_eq!(bench.run("dead redrive --queue elsewhere").ok().out, "redriven: 0\n");
    assert_eq!(bench.run("dead redrive --all").ok().out, "redriven: 2\n");
    assert_eq!(bench.run("dead list --json").json()["jobs"], json!([]));
}

fn workers_are_listed_with_their_state(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("workers list").ok().out, "no workers are known\n");
    bench.enqueue("greet");
    let (worker, _) = bench.claim(1);
    let listed = bench.run("workers list --json").json();
    assert_eq!((&listed[0]["id"], &listed[0]["name"]), (&json!(worker.id), &json!("crane 7")));
    assert_eq!((&listed[0]["running"], &listed[0]["stale"]), (&json!(1), &json!(false)));

    bench.move_clock(Duration::from_secs(30));
    let state = |line: &str| {
        let listed = bench.run(line).ok().out;
        listed.lines().nth(1).unwrap().split_whitespace().nth(3).unwrap().to_owned()
    };
    assert_eq!(state("workers list"), "alive");
    assert_eq!(state("workers list --threshold 20s"), "stale");
    bench.run("workers list --threshold 20").refused(2, &["--threshold", "like 500ms"]);
}

fn a_sweep_recovers_what_its_dry_run_told(bench: &Bench) {
    bench.migrated();
    let id = bench.enqueue("greet");
    let (worker, _) = bench.claim(1);
    assert_eq!(bench.run("sweep").ok().out, "recovered 0 jobs from 0 workers\n");

    bench.move_clock(Duration::from_secs(40));
    assert_eq!(bench.run("sweep --dry-run").ok().out, "would recover 0 jobs from 0 workers\n");
    for _ in 0..2 {
        let told = bench.run("sweep --dry-run --threshold 30s --json").json();
        assert_eq!(told, json!({ "workers": [worker.id], "recovered": 1, "skipped": 0 }));
    }
    let done = bench.run("sweep --threshold 30s --recovery-delay 2m").ok().out;
    assert_eq!(done, format!("recovered 1 job from 1 worker\nworker {}\n", worker.id));
    let job = bench.run(&format!("jobs show {id} --json")).json();
    assert_eq!((&job["status"], &job["interruptions"]), (&json!("retrying"), &json!(1)));
    assert_eq!(job["last_error"], "Job recovered after worker interruption");
    let waits = bench.library(async |client| {
        let job = client.get(id.parse()?).await?;
        Ok(job.run_at - client.store().now().await?)
    });
    assert_eq!(waits.num_seconds(), 120);
    bench.run("sweep --recovery-delay soon").refused(2, &["--recovery-delay", "like 500ms"]);
}

fn counts_tell_queue_kind_and_status(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("counts").ok().out, "no jobs\n");
    bench.failed("pay", "no");
    bench.enqueue("pay");
    bench.enqueue("pay");
    bench.enqueue("greet --queue mail");
    let counts = bench.run("counts --json").json();
    let count =
        json!({ "status": "queued", "queue": "default", "kind": "pay", "jobs": 2, "estimated": false });
    assert!(counts.as_array().unwrap().contains(&count), "{counts}");
    let table = bench.run("stats").ok().out;
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][2..], ["QUEUED", "RUNNING", "SUCCEEDED", "RETRYING", "FAILED_PERMANENT", "CANCELLED"]);
    assert_eq!(rows[1], ["default", "pay", "2", "0", "0", "0", "1", "0"]);
    assert_eq!(rows[2], ["mail", "greet", "1", "0", "0", "0", "0", "0"]);
}

fn a_check_finds_a_job_that_is_nowhere(bench: &Bench) {
    bench.migrated();
    let id = bench.enqueue("greet");
    bench.enqueue("greet --queue mail");
    assert_eq!(bench.run("check").ok().out, "2 jobs checked; all is well\n");
    assert_eq!(bench.run("check --json").json(), json!({ "jobs": 2, "problems": [] }));
    bench.damage("delete from ready where queue = 'default'");
    let found = bench.run("check").refused(1, &["problems found: 1"]);
    assert!(found.out.contains(&id), "{found:?}");
    let found = bench.run("check --json");
    assert_eq!((found.code, found.document()["problems"].as_array().unwrap().len()), (1, 1));
}
