//! `--watch` repeats a command.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::fixture::{Fixture, on_every_target};
use crate::process::Process;

on_every_target!(
    every_list_can_be_watched,
    a_watched_list_shows_changes,
    without_a_terminal_output_is_appended
);

fn watch(fixture: &Fixture, line: &str) -> Process {
    let mut command: Command = fixture.command(&line.split_whitespace().collect::<Vec<_>>());
    Process::start(&mut command)
}

fn assert_stops_on_sigint(mut watched: Process) {
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
        assert_stops_on_sigint(watched);
    }
    fixture.run("jobs list --watch 1ms").fails_with(2, &["--watch", "100ms or more"]);
}

fn a_watched_list_shows_changes(fixture: &Fixture) {
    fixture.migrated();
    let mut watched = watch(fixture, "jobs list --kind greet --watch 100ms --json");
    let jobs = |line: String| serde_json::from_str::<Value>(&line).unwrap()["jobs"].as_array().unwrap().len();
    assert_eq!(jobs(watched.line()), 0);
    // The payload contains line breaks, but each document must be one line.
    fixture.run_args(&["enqueue", "greet", "--payload", "{\n \"n\": 1\n}", "--json"]).ok();
    let began = std::time::Instant::now();
    while jobs(watched.line()) == 0 {
        assert!(began.elapsed() < Duration::from_secs(60), "the new job did not appear");
    }
    assert_stops_on_sigint(watched);
}

fn without_a_terminal_output_is_appended(fixture: &Fixture) {
    fixture.migrated();
    let mut watched = watch(fixture, "dead list --watch 100ms");
    for _ in 0..2 {
        assert_eq!(watched.line(), "no dead letters match\n", "no terminal control sequences");
    }
    assert_stops_on_sigint(watched);
}
