//! `longshore events` prints events and reconnects to a server.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::fixture::{CommandOutput, Fixture, binary, on_every_target};
use crate::process::{Process, free_port};

on_every_target!(each_event_is_one_line, an_event_is_emitted_and_shown);

/// Enqueues jobs until `wait` returns. It is unknown when the command starts to receive
/// events, so one job is not enough.
fn while_enqueueing<T>(fixture: &Fixture, wait: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    let mut enqueue = binary();
    enqueue.env("DATABASE_URL", &fixture.url).args(["enqueue", "greet", "--json"]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!(enqueue.output().unwrap().status.success());
            }
        });
        let _stop = StopOnDrop(&done);
        wait()
    })
}

/// Stops enqueueing even if `wait` panics. Otherwise the test would never end.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The next event with this name.
fn next(events: &mut Process, name: &str) -> Value {
    loop {
        let event: Value = serde_json::from_str(&events.line()).unwrap();
        if event["event"] == name {
            return event;
        }
    }
}

fn assert_stops_on_sigint(mut events: Process) {
    events.signal("INT");
    let (code, _, _) = events.ended();
    assert_eq!(code, Some(0));
}

fn each_event_is_one_line(fixture: &Fixture) {
    fixture.migrated();
    let mut events = Process::start(&mut fixture.command(&["events", "--json"]));
    let event = while_enqueueing(fixture, || next(&mut events, "job"));
    let data = &event["data"];
    assert_eq!((&data["kind"], &data["status"]), (&"greet".into(), &"queued".into()), "{event}");
    assert!(event["id"].is_string(), "{event}");
    assert_stops_on_sigint(events);

    let mut events = Process::start(&mut fixture.command(&["events"]));
    let line = while_enqueueing(fixture, || {
        loop {
            let line = events.line();
            if line.contains("  job ") {
                return line;
            }
        }
    });
    assert!(line.ends_with(" queued  greet in default, attempts 0\n"), "{line}");
    assert_stops_on_sigint(events);
}

#[test]
fn events_continue_after_a_server_restart() {
    let fixture = Fixture::sqlite();
    let address = format!("127.0.0.1:{}", free_port());
    let serve = || {
        let mut command = binary();
        command.env("DATABASE_URL", &fixture.url).args(["serve", "--json", "--bind", &address]);
        let mut server = Process::start(&mut command);
        server.address();
        server
    };
    fixture.migrated();
    let server = serve();
    let url = format!("http://{address}");
    let mut events = Process::start(binary().env("LONGSHORE_SERVER", &url).args(["events", "--json"]));
    let before = while_enqueueing(&fixture, || next(&mut events, "job"));
    drop(server);
    // The first attempt to reconnect fails here, so the command has to try again.
    drop(TcpListener::bind(&address).unwrap().accept().unwrap());
    let _restarted = serve();
    let reset = next(&mut events, "reset");
    assert_ne!(reset["id"], before["id"], "a new server cannot continue the first one's events");
    while_enqueueing(&fixture, || next(&mut events, "job"));
    assert_stops_on_sigint(events);
}

#[test]
fn an_event_without_an_end_closes_the_stream() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let accept = move |head: &str| -> TcpStream {
        let (mut stream, _) = listener.accept().unwrap();
        assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(format!("HTTP/1.1 {head}\r\n\r\n").as_bytes()).unwrap();
        stream
    };
    let sending = std::thread::spawn(move || {
        let mut stream = accept("200 OK\r\ncontent-type: text/event-stream");
        // More than the command reads of an event and the sockets keep.
        let line = format!("data: {}\n", "x".repeat(64 * 1024));
        let sent = (0..512).try_for_each(|_| stream.write_all(line.as_bytes()));
        drop(stream);
        // The command does not reconnect again.
        drop(accept("404 Not Found\r\ncontent-length: 0"));
        sent
    });
    let output = binary().env("LONGSHORE_SERVER", &url).args(["events", "--json"]).output().unwrap();
    let output = CommandOutput::of(output);
    let sent = sending.join().unwrap();
    assert_eq!((output.code, output.out.as_str()), (1, ""), "{output:?}");
    assert!(output.err.starts_with("the server sends an event without an end; reconnecting\n"), "{output:?}");
    let error = sent.unwrap_err().kind();
    let is_closed = matches!(error, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset);
    assert!(is_closed, "the command closes the stream before it opens another one: {error}");
}

#[test]
fn an_unreachable_server_is_an_error_at_the_start() {
    let output = binary().env("LONGSHORE_SERVER", "http://127.0.0.1:1").args(["events"]).output().unwrap();
    CommandOutput::of(output).fails_with(5, &["--server"]);
}

fn an_event_is_emitted_and_shown(fixture: &Fixture) {
    fixture.migrated();
    fixture.run("events show approved:42").fails_with(3, &["no event `approved:42`"]);
    let emitted =
        fixture.run_args(&["events", "emit", "approved:42", "--payload", r#"{"by": "ada"}"#]).ok().out;
    assert!(emitted.starts_with("event      approved:42\n"), "{emitted}");
    let again = fixture.run("events emit approved:42 --json");
    assert!(again.code == 0 && again.err.contains("exists already"), "{again:?}");
    let again: Value = serde_json::from_str(&again.out).unwrap();
    assert_eq!(again["payload"], serde_json::json!({ "by": "ada" }), "the first one wins");
    assert_eq!(fixture.run("events show approved:42 --json").json(), again);
    fixture.run("events emit approved:43 --payload {").fails_with(2, &["payload", "not JSON"]);
    let id = fixture.enqueue("greet");
    assert!(fixture.run(&format!("jobs steps {id}")).ok().out.starts_with("no steps"));
    assert_eq!(fixture.run(&format!("jobs steps {id} --json")).json(), serde_json::json!([]));
}
