//! Runs every example as a program. Each example asserts what it shows. Building the tests
//! builds the examples.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

fn example(name: &str) -> Command {
    let mut program = std::env::current_exe().expect("current_exe");
    program.pop();
    program.pop();
    program.extend(["examples", name]);
    Command::new(program)
}

fn run_example(name: &str) {
    let output = example(name).output().unwrap_or_else(|error| panic!("{name}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}: {}\n{out}\n{err}", output.status);
}

/// Makes a test for each example.
macro_rules! examples {
    ($($example:ident),+ $(,)?) => {
        const LISTED: &[&str] = &["incoming_webhook", "order", $(stringify!($example)),+];
        $(#[test]
        fn $example() {
            run_example(stringify!($example));
        })+
    };
}

examples!(
    axum_app,
    cancel_and_stop,
    cron,
    handlers,
    hooks,
    limits,
    mounted_api,
    progress_and_results,
    recovery,
    sentry,
    typed_job,
    workflow
);

#[test]
fn every_example_is_listed() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut found: Vec<String> = std::fs::read_dir(folder)
        .expect("examples")
        .map(|entry| entry.expect("entry").path().file_stem().expect("name").to_string_lossy().into_owned())
        .collect();
    let mut listed = LISTED.to_vec();
    listed.sort_unstable();
    found.sort();
    assert_eq!(found, listed);
}

/// A running `incoming_webhook`. It is killed when it is dropped.
struct WebhookServer {
    program: Child,
    address: String,
}

impl WebhookServer {
    const KEY: [u8; 32] = [7; 32];

    fn start() -> (Self, impl Iterator<Item = String>) {
        let secret = format!("whsec_{}", BASE64_STANDARD.encode(Self::KEY));
        let mut program = example("incoming_webhook")
            .env("WEBHOOK_SECRET", secret)
            .stdout(Stdio::piped())
            .spawn()
            .expect("start");
        let mut lines = BufReader::new(program.stdout.take().expect("stdout")).lines().map_while(Result::ok);
        let address = lines.next().expect("an address");
        (WebhookServer { program, address }, lines)
    }

    /// Sends a payment that was signed this many seconds ago. Returns the status.
    fn pay(&self, cents: u32, age: u64, key: [u8; 32]) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time").as_secs();
        let (sent, body) = (now - age, format!(r#"{{"order":42,"cents":{cents}}}"#));
        let mac = Hmac::<Sha256>::new_from_slice(&key).expect("a key");
        let mac = mac.chain_update(format!("msg_1.{sent}.{body}")).finalize().into_bytes();
        let signature = format!("v1,bm90IHRoaXMgb25l v1,{}", BASE64_STANDARD.encode(mac));
        self.send(
            &body,
            &format!("webhook-id: msg_1\r\nwebhook-timestamp: {sent}\r\nwebhook-signature: {signature}\r\n"),
        )
    }

    fn send(&self, body: &str, headers: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("connect");
        let length = body.len();
        let request = format!(
            "POST /payments HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
        );
        stream.write_all(request.as_bytes()).expect("send");
        let mut response = String::new();
        stream.read_to_string(&mut response).expect("receive");
        response.split(' ').nth(1).expect("a status").to_owned()
    }
}

impl Drop for WebhookServer {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

#[test]
fn an_incoming_webhook_continues_the_job_once() {
    let (server, mut lines) = WebhookServer::start();
    let key = WebhookServer::KEY;
    assert_eq!(server.send(r#"{"order":42,"cents":1}"#, ""), "401", "without a signature");
    assert_eq!(server.pay(2, 0, [8; 32]), "401", "forged");
    assert_eq!(server.pay(3, 301, key), "401", "old");
    assert_eq!(server.pay(4, 10, key), "204", "good");
    assert_eq!(lines.next().as_deref(), Some("order 42 is paid with 4 cents"));
    assert_eq!(server.pay(4, 10, key), "204", "repeated");
    assert_eq!(server.pay(5, 0, key), "204", "the first event wins");
    drop(server);
    assert_eq!(lines.next(), None, "the order is shipped once");
}

/// The requests of the example `order`: one charge, ten parcels, one notification.
const REQUESTS: usize = 12;

/// Kills the program with SIGKILL after each of its requests in turn, at a moment when the step or the
/// child is not stored yet or has just been stored, and starts it again. Every request is made, and a
/// step that was stored is not repeated.
#[test]
fn order_continues_wherever_it_is_killed() {
    for kill_after in 0..=REQUESTS {
        let folder =
            std::env::temp_dir().join(format!("longshore-order-{}-{kill_after}", std::process::id()));
        let mut requests = Vec::new();
        if kill_after < REQUESTS {
            let mut killed = example("order").arg(&folder).stdout(Stdio::piped()).spawn().expect("start");
            let mut lines =
                BufReader::new(killed.stdout.take().expect("stdout")).lines().map_while(Result::ok);
            // Not killed before its first request: the job would not be stored yet.
            requests.extend(lines.by_ref().take(kill_after.max(1)));
            killed.kill().expect("kill");
            killed.wait().expect("wait");
            // It may have made more requests meanwhile.
            requests.extend(lines);
            // The next program need not wait until the worker of this one counts as dead.
            let database = rusqlite::Connection::open(folder.join("queue.db")).expect("open");
            database.execute_batch("update workers set stale_after_ms = 1").expect("update");
        }
        let output = example("order").arg(&folder).output().expect("start");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(
            output.status.success(),
            "killed after {kill_after} requests: {}\n{out}\n{err}",
            output.status
        );
        let before = requests.len();
        requests.extend(out.lines().map(str::to_owned));
        let mut made: Vec<&String> = requests.iter().collect();
        made.sort();
        made.dedup();
        assert_eq!(made.len(), REQUESTS, "killed after {kill_after} requests: {requests:?}");
        // What ran when the program was killed may be repeated: the last request before it, or some of
        // the ten parcels, which are shipped in parallel.
        let in_flight = if before <= 1 || before == REQUESTS { 1 } else { REQUESTS - 2 };
        let repeated = requests.len() - made.len();
        assert!(
            repeated <= in_flight,
            "killed after {kill_after} requests, {repeated} repeated: {requests:?}"
        );
        let charges = requests.iter().filter(|request| *request == "charge-42").count();
        assert!(before > 1 || charges <= 2);
        assert!(before <= 1 || charges == 1, "the charge was stored: {requests:?}");
        std::fs::remove_dir_all(folder).expect("remove");
    }
}
