//! Long-running processes in tests, and HTTP requests to them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use longshore::JobId;
use serde_json::Value;

/// A process that is killed when this is dropped.
pub(crate) struct Process {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Process { child, out }
    }

    /// Like [`start`](Self::start), but logs to a file: a full pipe would block the process.
    pub(crate) fn start_logging(command: &mut Command, log: &Path) -> Self {
        let log = File::create(log).unwrap();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Process { child, out }
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Reads standard output up to and including the line `last`.
    #[track_caller]
    pub(crate) fn printed_up_to(&mut self, last: &str) -> String {
        let mut printed = String::new();
        while printed.lines().last() != Some(last) {
            if self.out.read_line(&mut printed).unwrap() == 0 {
                let (code, _, err) = self.ended();
                panic!("ended with {code:?} before `{last}`: {printed}{err}");
            }
        }
        printed
    }

    /// The next line of standard output.
    #[track_caller]
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        if self.out.read_line(&mut line).unwrap() == 0 {
            panic!("ended: {:?}", self.ended());
        }
        line
    }

    /// The address of a server that was started with `--json`, like 127.0.0.1:8080.
    #[track_caller]
    pub(crate) fn address(&mut self) -> String {
        // One line if the log is JSON, otherwise several.
        let mut printed = self.line();
        while serde_json::from_str::<Value>(&printed).is_err() {
            printed += &self.line();
        }
        let greeting: Value = serde_json::from_str(&printed).unwrap();
        greeting["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned()
    }

    /// Waits for the end. Returns the exit code and the rest of the output.
    pub(crate) fn ended(&mut self) -> (Option<i32>, String, String) {
        let (mut out, mut err) = (String::new(), String::new());
        self.out.read_to_string(&mut out).unwrap();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut err).unwrap();
        }
        (self.child.wait().unwrap().code(), out, err)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An HTTP response.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) text: String,
}

impl Reply {
    /// Asserts the status and returns the JSON body.
    #[track_caller]
    pub(crate) fn json(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Sends one HTTP request.
#[track_caller]
pub(crate) fn request(addr: &str, method: &str, path: &str, token: Option<&str>, body: &str) -> Reply {
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
    let head = format!("host: {addr}\r\nconnection: close\r\ncontent-type: application/json\r\n{token}");
    let length = body.len();
    let response =
        exchange(addr, &format!("{method} {path} HTTP/1.1\r\n{head}content-length: {length}\r\n\r\n{body}"));
    let status = response.split(' ').nth(1).and_then(|status| status.parse().ok());
    let text = response.split_once("\r\n\r\n").map(|(_, text)| text.to_owned());
    Reply { status: status.expect("a status"), text: text.expect("a body") }
}

/// Sends these bytes and returns everything the server sends until it closes the connection.
#[track_caller]
pub(crate) fn exchange(addr: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

/// A port that is free, and that stays free until a server uses it: systems give ports above 32,768 to connections
/// and to servers that do not name one.
pub(crate) fn free_port() -> u16 {
    loop {
        // Random, because other tests look for a port at the same time.
        let port = 10_000 + JobId::new().0.as_u128() as u16 % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Polls until the condition is true.
#[track_caller]
pub(crate) fn until(within: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < within, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
