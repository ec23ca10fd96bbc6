//! `migrate`, `workers`, `sweep` and `check`.

use std::time::Duration;

use longshore::SCHEMA_VERSION;
use serde_json::json;

use crate::fixture::{CommandOutput, Fixture, binary, on_every_engine};
use crate::process::{Process, until};

/// Generous, for slow machines.
const MAX_WAIT: Duration = Duration::from_secs(60);

on_every_engine!(
    migrating_twice_changes_nothing_the_second_time,
    migrate_check_reports_a_pending_migration_and_changes_nothing,
    before_the_migration_every_command_says_to_migrate,
    workers_are_listed_with_their_state,
    workers_are_listed_with_their_process_and_servers_are_not_workers,
    a_sweep_recovers_what_its_dry_run_reported,
    a_sweep_uses_the_given_resilient_flags_and_factor,
    check_finds_a_job_without_a_state,
    a_database_that_may_lose_commits_is_refused_unless_the_url_accepts_it,
    check_prints_a_remedy_that_removes_the_problem,
);

// ---- migrate ---------------------------------------------------------------------

fn migrating_twice_changes_nothing_the_second_time(fixture: &Fixture) {
    let newest = SCHEMA_VERSION;
    assert_eq!(fixture.run("migrate --json").json(), json!({ "from": 0, "to": newest }));
    assert_eq!(
        fixture.run("migrate").ok().out,
        format!("already at schema version {newest}; nothing to do\n")
    );
    assert_eq!(fixture.run("migrate --check").ok().out, format!("up to date at schema version {newest}\n"));
    assert_eq!(
        fixture.run("migrate --check --json").json(),
        json!({ "version": newest, "wanted": newest, "pending": false })
    );
}

fn migrate_check_reports_a_pending_migration_and_changes_nothing(fixture: &Fixture) {
    for _ in 0..2 {
        let check = fixture.run("migrate --check");
        assert_eq!(check.code, 1);
        let pending =
            format!("pending: schema version 0, wanted {SCHEMA_VERSION}; run `longshore migrate`\n");
        assert_eq!(check.out, pending);
    }
    let check = fixture.run("migrate --check --json");
    assert_eq!((check.code, check.document()["pending"].clone()), (1, json!(true)));
    assert!(fixture.file().is_none_or(|file| !file.exists()), "no file is created");
}

fn before_the_migration_every_command_says_to_migrate(fixture: &Fixture) {
    let lines = [
        "enqueue greet",
        "jobs list",
        "queues list",
        "dead list",
        "workers list",
        "sweep",
        "counts",
        "check",
    ];
    for line in lines {
        fixture.run(line).fails_with(6, &["longshore migrate"]);
    }
    assert!(fixture.file().is_none_or(|file| !file.exists()), "no file is created");
}

// ---- workers, sweep and check ----------------------------------------------------

fn workers_are_listed_with_their_state(fixture: &Fixture) {
    fixture.migrated();
    assert_eq!(fixture.run("workers list").ok().out, "no workers\n");
    fixture.enqueue("greet");
    let (worker, _) = fixture.claim(1);
    let listed = fixture.run("workers list --json").json();
    assert_eq!((&listed[0]["id"], &listed[0]["name"]), (&json!(worker.id), &json!("crane 7")));
    assert_eq!((&listed[0]["running"], &listed[0]["stale"]), (&json!(1), &json!(false)));

    fixture.move_clock(Duration::from_secs(30));
    // The name of this worker has two words.
    let state = |line: &str| {
        let listed = fixture.run(line).ok().out;
        listed.lines().nth(1).unwrap().split_whitespace().nth(2).unwrap().to_owned()
    };
    assert_eq!(state("workers list"), "alive");
    assert_eq!(state("workers list --threshold 20s"), "silent");
    fixture.run("workers list --threshold 20").fails_with(2, &["--threshold", "like 500ms"]);
}

fn workers_are_listed_with_their_process_and_servers_are_not_workers(fixture: &Fixture) {
    fixture.migrated();
    let (_server, _) = fixture.serve("");
    until(MAX_WAIT, "the server is registered", || {
        fixture.run("workers list --all --json").json().as_array().unwrap().len() == 1
    });
    assert_eq!(fixture.run("workers list --json").json(), json!([]), "a server runs no jobs");
    assert_eq!(fixture.run("workers list").ok().out, "no workers; 1 server does only upkeep (see --all)\n");
    let mut command = fixture.command(&["worker", "--metrics-addr", "off", "--log", "off"]);
    let worker = Process::start(&mut command);
    until(MAX_WAIT, "the worker is registered", || {
        fixture.run("workers list --json").json().as_array().unwrap().len() == 1
    });
    let listed = fixture.run("workers list --json").json();
    let (host, pid) = (listed[0]["host"].as_str().unwrap(), worker.id());
    assert_eq!((&listed[0]["pid"], &listed[0]["version"]), (&json!(pid), &json!(env!("CARGO_PKG_VERSION"))));
    let table = fixture.run("workers list").ok().out;
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 2, "{table}");
    for part in [host, &pid.to_string(), env!("CARGO_PKG_VERSION"), "alive"] {
        assert!(lines[1].contains(part), "{part}: {table}");
    }
    assert_eq!(fixture.run("workers list --all").ok().out.lines().count(), 3);

    // The clock of the database is not moved, so that the age of the heartbeat is real.
    let past = match fixture.file() {
        Some(_) => "heartbeat_at - 33000000",
        None => "heartbeat_at - interval '33 seconds'",
    };
    worker.signal("STOP");
    fixture.damage(&format!("update workers set heartbeat_at = {past} where pid = {pid}"));
    let silent = fixture.run("workers list --threshold 20s").ok().out;
    worker.signal("CONT");
    assert!(silent.contains("silent for 3"), "{silent}");
}

fn a_sweep_recovers_what_its_dry_run_reported(fixture: &Fixture) {
    fixture.migrated();
    let id = fixture.enqueue("greet");
    let (worker, _) = fixture.claim(1);
    assert_eq!(fixture.run("sweep").ok().out, "recovered 0 jobs from 0 workers\n");

    fixture.move_clock(Duration::from_secs(40));
    assert_eq!(fixture.run("sweep --dry-run").ok().out, "would recover 0 jobs from 0 workers\n");
    for _ in 0..2 {
        let reported = fixture.run("sweep --dry-run --threshold 30s --json").json();
        assert_eq!(
            reported,
            json!({ "workers": [worker.id], "recovered": 1, "skipped": 0, "deferred": 0, "dry_run": true })
        );
    }
    let done = fixture.run("sweep --threshold 30s --recovery-delay 2m").ok().out;
    assert_eq!(done, format!("recovered 1 job from 1 worker\nworker {}\n", worker.id));
    let job = fixture.run(&format!("jobs show {id} --json")).json();
    assert_eq!((&job["status"], &job["interruptions"]), (&json!("retrying"), &json!(1)));
    assert_eq!(job["last_error"], "Job recovered after worker interruption");
    let waits = fixture.with_client(async |client| {
        let job = client.get(id.parse()?).await?;
        Ok(job.run_at - client.store().now().await?)
    });
    assert_eq!(waits.num_seconds(), 120);
    fixture.run("sweep --recovery-delay soon").fails_with(2, &["--recovery-delay", "like 500ms"]);
}

fn a_sweep_uses_the_given_resilient_flags_and_factor(fixture: &Fixture) {
    fixture.migrated();
    fixture.enqueue("greet --flag slow_disks");
    fixture.claim(1);
    fixture.move_clock(Duration::from_secs(100));
    let would_recover =
        |flags: &str| fixture.run(&format!("sweep --dry-run --json {flags}")).json()["recovered"].clone();
    assert_eq!(would_recover(""), 1);
    assert_eq!(would_recover("--resilient-flags slow_disks,other"), 0);
    assert_eq!(would_recover("--resilient-flags slow_disks --resilient-factor 1"), 1);
    assert_eq!(would_recover("--resilient-flags="), 1);
    fixture.run("sweep --resilient-factor 0").fails_with(2, &["resilient_factor", "use 1 to"]);
}

fn check_finds_a_job_without_a_state(fixture: &Fixture) {
    fixture.migrated();
    let id = fixture.enqueue("greet");
    fixture.enqueue("greet --queue mail");
    assert_eq!(fixture.run("check").ok().out, "2 jobs checked; no problems found\n");
    assert_eq!(fixture.run("check --json").json(), json!({ "jobs": 2, "problems": [], "warnings": [] }));
    fixture.damage("delete from ready where queue = 'default'");
    let found = fixture.run("check").fails_with(1, &["problems found: 1"]);
    assert!(found.out.contains(&id), "{found:?}");
    let found = fixture.run("check --json");
    assert_eq!((found.code, found.document()["problems"].as_array().unwrap().len()), (1, 1));
}

fn a_database_that_may_lose_commits_is_refused_unless_the_url_accepts_it(fixture: &Fixture) {
    fixture.migrated();
    let Some(relaxed) = fixture.url.strip_suffix("&durability=relaxed") else {
        // SQLite commits are always durable, so there is nothing to accept.
        let url = format!("{}?durability=relaxed", fixture.url);
        let output = binary().args(["--database-url", &url, "migrate"]).output().unwrap();
        CommandOutput::of(output).fails_with(2, &["no parameters", "always durable"]);
        return;
    };
    // The session's own setting, whatever the server's is.
    let unsafe_url = format!("{relaxed}&options=-c%20synchronous_commit%3Doff");
    let run = |url: &str, line: &str| {
        let args = line.split_whitespace();
        CommandOutput::of(binary().args(["--database-url", url]).args(args).output().unwrap())
    };
    for line in ["worker --drain", "serve --bind 127.0.0.1:0", "serve --with-worker --bind 127.0.0.1:0"] {
        let line = format!("{line} --simulate --log off");
        let parts = ["synchronous_commit = off", "lost", "turn the setting on", "durability=relaxed"];
        run(&unsafe_url, &line).fails_with(1, &parts);
    }
    let checked = run(&unsafe_url, "check");
    assert_eq!(checked.code, 0, "{checked:?}");
    assert!(checked.err.contains("warning: the database has synchronous_commit = off"), "{checked:?}");
    let accepted = format!("{unsafe_url}&durability=relaxed");
    let worker = run(&accepted, "worker --drain --log warn");
    assert_eq!(worker.code, 0, "{worker:?}");
    assert!(worker.err.contains("synchronous_commit = off"), "{worker:?}");
    run(&accepted, "check").ok();
    run(&format!("{relaxed}&durability=some"), "check").fails_with(2, &["durability", "`full` or `relaxed`"]);
}

fn check_prints_a_remedy_that_removes_the_problem(fixture: &Fixture) {
    fixture.migrated();
    let id = fixture.enqueue("greet");
    fixture.enqueue("greet --queue mail");
    fixture.damage("delete from jobs where queue = 'default'");
    let found = fixture.run("check").fails_with(1, &["problems found: 1. Check again after the remedies"]);
    let lines: Vec<&str> = found.out.lines().collect();
    assert_eq!(lines[0], format!("job {id} is in ready but not in jobs"));
    assert!(lines[1].starts_with("  remedy: Delete the row, and what belongs to it. "), "{found:?}");
    assert!(lines[2..].iter().all(|line| line.starts_with("    ")), "{found:?}");
    let printed = lines[2..].iter().map(|line| line.trim()).collect::<Vec<_>>();

    let problem = fixture.run("check --json").document()["problems"][0].clone();
    assert_eq!(problem["problem"], lines[0]);
    assert_eq!(format!("  remedy: {}", problem["remedy"].as_str().unwrap()), lines[1]);
    let sql: Vec<&str> = problem["sql"].as_array().unwrap().iter().map(|sql| sql.as_str().unwrap()).collect();
    assert_eq!(sql.join("\n").lines().map(str::trim).collect::<Vec<_>>(), printed);
    fixture.damage(&printed.join("\n"));
    assert_eq!(fixture.run("check").ok().out, "1 jobs checked; no problems found\n");
}
