//! Workers, sweeps and the check.

use std::time::Duration;

use serde_json::json;

use crate::bench::{Bench, on_every_engine};

on_every_engine!(
    workers_are_listed_with_their_state,
    a_sweep_recovers_what_its_dry_run_told,
    a_check_finds_a_job_that_is_nowhere,
);

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
        assert_eq!(told, json!({ "workers": [worker.id], "recovered": 1, "skipped": 0, "dry_run": true }));
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
