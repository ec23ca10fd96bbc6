//! `events`: follows what happens, and comes back when a server does.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::fixture::{Fixture, binary, on_every_target};
use crate::process::Process;

on_every_target!(what_happens_is_told_a_line_each);

/// Enqueues until something is seen: nobody knows when a listener has begun to
/// listen.
fn while_jobs_arrive<T>(fixture: &Fixture, see: impl FnOnce() -> T) -> T {
    let seen = AtomicBool::new(false);
    let mut enqueue = binary();
    enqueue.env("DATABASE_URL", &fixture.url).args(["enqueue", "greet", "--json"]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !seen.load(Ordering::Relaxed) {
                assert!(enqueue.output().unwrap().status.success());
            }
        });
        let end = EndsIt(&seen);
        let answer = see();
        drop(end);
        answer
    })
}

/// Also when a case fails: it could otherwise never end.
struct EndsIt<'a>(&'a AtomicBool);

impl Drop for EndsIt<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn next(events: &mut Process, name: &str) -> Value {
    loop {
        let event: Value = serde_json::from_str(&events.line()).unwrap();
        if event["event"] == name {
            return event;
        }
    }
}

fn ends_well(mut events: Process) {
    events.signal("INT");
    let (code, _, _) = events.ended();
    assert_eq!(code, Some(0));
}

fn what_happens_is_told_a_line_each(fixture: &Fixture) {
    fixture.migrated();
    let mut events = Process::start(&mut fixture.command(&["events", "--json"]));
    let event = while_jobs_arrive(fixture, || next(&mut events, "job"));
    let data = &event["data"];
    assert_eq!((&data["kind"], &data["status"]), (&"greet".into(), &"queued".into()), "{event}");
    assert!(event["id"].is_string(), "{event}");
    ends_well(events);

    let mut events = Process::start(&mut fixture.command(&["events"]));
    let line = while_jobs_arrive(fixture, || {
        loop {
            let line = events.line();
            if line.contains("  job ") {
                return line;
            }
        }
    });
    assert!(line.ends_with(" queued  greet in default, attempts 0\n"), "{line}");
    ends_well(events);
}

#[test]
fn a_server_that_comes_back_is_followed_again() {
    let fixture = Fixture::sqlite();
    let (server, url) = fixture.migrated().serve("");
    let mut events = Process::start(binary().env("LONGSHORE_SERVER", &url).args(["events", "--json"]));
    let before = while_jobs_arrive(&fixture, || next(&mut events, "job"));
    drop(server);
    let address = url.strip_prefix("http://").unwrap();
    // It comes while there is no server yet, and must come once more.
    drop(TcpListener::bind(address).unwrap().accept().unwrap());
    let mut again = binary();
    again.env("DATABASE_URL", &fixture.url).args(["serve", "--json", "--bind", address]);
    let mut again = Process::start(&mut again);
    again.address();
    let reset = next(&mut events, "reset");
    assert_ne!(reset["id"], before["id"], "another server cannot go on where the first was");
    while_jobs_arrive(&fixture, || next(&mut events, "job"));
    ends_well(events);
}

#[test]
fn a_server_that_was_never_there_is_an_error() {
    let nobody = binary().env("LONGSHORE_SERVER", "http://127.0.0.1:1").args(["events"]).output().unwrap();
    crate::fixture::CommandOutput::of(nobody).fails_with(5, &["--server"]);
}
