//! `--watch`: the same answer again and again.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::fixture::{Fixture, on_every_target};
use crate::process::Process;

on_every_target!(every_list_can_be_watched, what_is_watched_shows_what_changes, text_is_appended_for_a_file);

fn watch(fixture: &Fixture, line: &str) -> Process {
    let mut command: Command = fixture.command(&line.split_whitespace().collect::<Vec<_>>());
    Process::start(&mut command)
}

fn ends_well(mut watched: Process) {
    watched.signal("INT");
    let (code, _, err) = watched.ended();
    assert_eq!((code, err.as_str()), (Some(0), ""));
}

fn every_list_can_be_watched(fixture: &Fixture) {
    fixture.migrated();
    for line in ["jobs list", "queues list", "workers list", "counts", "dead list", "cron list", "stats"] {
        let mut watched = watch(fixture, &format!("{line} --json --watch 100ms"));
        for _ in 0..2 {
            serde_json::from_str::<Value>(&watched.line()).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
        ends_well(watched);
    }
    fixture.run("jobs list --watch 1ms").fails_with(2, &["--watch", "100ms or more"]);
}

fn what_is_watched_shows_what_changes(fixture: &Fixture) {
    fixture.migrated();
    let mut watched = watch(fixture, "jobs list --kind greet --watch 100ms --json");
    let jobs = |line: String| serde_json::from_str::<Value>(&line).unwrap()["jobs"].as_array().unwrap().len();
    assert_eq!(jobs(watched.line()), 0);
    // A payload may hold line breaks; a document is one line all the same.
    fixture.run_args(&["enqueue", "greet", "--payload", "{\n \"n\": 1\n}", "--json"]).ok();
    let began = std::time::Instant::now();
    while jobs(watched.line()) == 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "the new job is never shown");
    }
    ends_well(watched);
}

fn text_is_appended_for_a_file(fixture: &Fixture) {
    fixture.migrated();
    let mut watched = watch(fixture, "dead list --watch 100ms");
    for _ in 0..2 {
        assert_eq!(watched.line(), "no dead letters match\n", "nothing that drives a terminal");
    }
    ends_well(watched);
}
