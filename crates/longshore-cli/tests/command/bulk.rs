//! Bulk operations by filter: cancel, retry, delete and purge.

use longshore::{Ending, NewJob};
use serde_json::json;

use crate::fixture::{Fixture, UNKNOWN_ID, on_every_target};

on_every_target!(
    a_dry_run_counts_and_the_operation_changes_all_matching_jobs,
    without_a_terminal_an_operation_by_filter_requires_yes,
    a_dry_run_counts_only_the_jobs_that_would_change,
    an_operation_stops_at_its_limit,
    finished_jobs_are_deleted_and_retried_by_filter,
    an_operation_takes_ids_or_a_filter_but_not_both,
    dead_letters_are_purged,
);

fn a_dry_run_counts_and_the_operation_changes_all_matching_jobs(fixture: &Fixture) {
    fixture.migrated();
    // More than one request changes, so that the operation needs several.
    let many: Vec<NewJob> = (0..501).map(|_| NewJob::new("greet", &()).tags(["nightly"])).collect();
    fixture.with_client(async |client| client.enqueue_many(many).await);
    let other = fixture.enqueue("greet --tag daily");

    let dry = fixture.run("jobs cancel --tag nightly --kind greet --dry-run");
    assert_eq!(dry.ok().out, "would cancel 501 jobs\n");
    let done = fixture.run("jobs cancel --tag nightly --yes --json").json();
    assert_eq!(
        done,
        json!({ "action": "cancel", "matched": 501, "changed": 501, "skipped": 0, "dry_run": false })
    );
    let again = fixture.run("jobs cancel --tag nightly --yes").ok().out;
    assert!(again.starts_with("cancelled: 0, skipped: 501 ("), "{again}");
    assert_eq!(fixture.run(&format!("jobs show {other} --json")).json()["status"], "queued");
    assert_eq!(fixture.run("jobs cancel --tag weekly --yes").ok().out, "cancelled: 0\n");
}

fn without_a_terminal_an_operation_by_filter_requires_yes(fixture: &Fixture) {
    fixture.migrated();
    let id = fixture.enqueue("greet");
    for line in ["jobs cancel --kind greet", "jobs retry --kind greet", "jobs cancel --queue default"] {
        fixture.run(line).fails_with(2, &["1 job;", "--yes", "--dry-run"]);
    }
    assert_eq!(fixture.run(&format!("jobs show {id} --json")).json()["status"], "queued");
    // Nothing to confirm.
    assert_eq!(fixture.run("jobs cancel --kind nobody").ok().out, "cancelled: 0\n");
}

fn a_dry_run_counts_only_the_jobs_that_would_change(fixture: &Fixture) {
    fixture.migrated();
    fixture.finished_job(NewJob::new("greet", &()), Ending::Succeeded { result: None });
    let line = "jobs delete --kind greet";
    assert_eq!(fixture.run(&format!("{line} --dry-run")).ok().out, "would delete 1 job\n");
    for _ in 0..3 {
        fixture.enqueue("greet");
    }
    let would = "delete 1 job and skip 3 (their state does not allow it)";
    assert_eq!(fixture.run(&format!("{line} --dry-run")).ok().out, format!("would {would}\n"));
    fixture.run(line).fails_with(2, &[would, "--yes"]);
    let counted = fixture.run(&format!("{line} --dry-run --json")).json();
    assert_eq!(
        counted,
        json!({ "action": "delete", "matched": 4, "changed": 0, "skipped": 3, "dry_run": true })
    );
    let done = fixture.run(&format!("{line} --yes")).ok().out;
    assert!(done.starts_with("deleted: 1, skipped: 3 ("), "{done}");
    // Nothing to confirm, and nothing is changed.
    let nothing = fixture.run(line).ok().out;
    assert!(nothing.starts_with("deleted: 0, skipped: 3 ("), "{nothing}");
}

fn an_operation_stops_at_its_limit(fixture: &Fixture) {
    fixture.migrated();
    let ids: Vec<String> = (0..3).map(|_| fixture.enqueue("greet")).collect();
    assert_eq!(fixture.run("jobs cancel --kind greet --limit 2 --dry-run --json").json()["matched"], 2);
    assert_eq!(fixture.run("jobs cancel --kind greet --limit 2 --yes").ok().out, "cancelled: 2\n");
    let oldest = fixture.run(&format!("jobs show {} --json", ids[0])).json();
    assert_eq!(oldest["status"], "queued", "newest first");
    assert_eq!(fixture.run("jobs cancel --kind greet --limit 0 --yes").ok().out, "cancelled: 0\n");
}

fn finished_jobs_are_deleted_and_retried_by_filter(fixture: &Fixture) {
    fixture.migrated();
    for kind in ["greet", "greet", "pay"] {
        fixture.finished_job(NewJob::new(kind, &()), Ending::Succeeded { result: None });
    }
    let line = "jobs delete --status succeeded --kind greet";
    assert_eq!(fixture.run(&format!("{line} --older-than 1d --yes")).ok().out, "deleted: 0\n");
    assert_eq!(fixture.run(&format!("{line} --newer-than 1d --yes")).ok().out, "deleted: 2\n");
    assert_eq!(fixture.run("jobs retry --status succeeded --yes").ok().out, "queued: 1\n");
    let left = fixture.run("jobs list --json").json();
    assert_eq!((&left["jobs"][0]["kind"], &left["jobs"][0]["status"]), (&json!("pay"), &json!("queued")));
    fixture.run(&format!("{line} --older-than lately")).fails_with(2, &["--older-than", "or a time"]);
}

fn an_operation_takes_ids_or_a_filter_but_not_both(fixture: &Fixture) {
    fixture.migrated();
    for line in ["cancel", "retry", "delete"] {
        fixture.run(&format!("jobs {line} {UNKNOWN_ID} --kind a")).fails_with(2, &["--kind"]);
        fixture.run(&format!("jobs {line} --yes")).fails_with(2, &["ID", "--status", "--older-than"]);
        fixture.run(&format!("jobs {line} {UNKNOWN_ID} --dry-run")).fails_with(2, &["--dry-run"]);
    }
}

fn dead_letters_are_purged(fixture: &Fixture) {
    fixture.migrated();
    let done = fixture.finished_job(NewJob::new("greet", &()), Ending::Succeeded { result: None });
    let one = fixture.failed_job("send_email", "mailbox full");
    for kind in ["send_email", "pay"] {
        fixture.failed_job(kind, "no");
    }
    assert_eq!(fixture.run(&format!("dead purge {one}")).ok().out, format!("deleted {one}\n"));
    fixture
        .run(&format!("dead purge {done}"))
        .fails_with(4, &["not a dead letter", "succeeded", "jobs delete"]);
    fixture.run(&format!("dead purge {UNKNOWN_ID}")).fails_with(3, &[UNKNOWN_ID]);
    fixture.run("dead purge").fails_with(2, &["ID", "--kind", "--all"]);
    fixture.run("dead purge --all").fails_with(2, &["delete 2 jobs", "--yes"]);
    assert_eq!(fixture.run("dead purge --all --dry-run").ok().out, "would delete 2 jobs\n");
    assert_eq!(fixture.run("dead purge --kind send_email --yes").ok().out, "deleted: 1\n");
    let purged = fixture.run("dead purge --all --yes --json").json();
    assert_eq!((&purged["changed"], &purged["action"]), (&json!(1), &json!("delete")));
    assert_eq!(fixture.run("jobs list --json").json()["jobs"][0]["id"], json!(done), "other jobs stay");
}
