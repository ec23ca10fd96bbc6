//! Processes that stay, and how cases talk to them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A process that is killed if the case does not end it.
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

    /// The same, with a file for what it logs: more than a pipe holds would stop it.
    pub(crate) fn start_logging(command: &mut Command, log: &Path) -> Self {
        let log = File::create(log).unwrap();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Process { child, out }
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// What it prints up to a line that ends it.
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

    /// The next line it prints.
    #[track_caller]
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        if self.out.read_line(&mut line).unwrap() == 0 {
            panic!("ended: {:?}", self.ended());
        }
        line
    }

    /// Where a server listens that was started with `--json`, like 127.0.0.1:8080.
    #[track_caller]
    pub(crate) fn address(&mut self) -> String {
        let greeting: Value = serde_json::from_str(&self.printed_up_to("}")).unwrap();
        greeting["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned()
    }

    /// How it ends, and what it had yet to say.
    pub(crate) fn ended(&mut self) -> (Option<i32>, String, String) {
        let (mut out, mut err) = (String::new(), String::new());
        self.out.read_to_string(&mut out).unwrap();
        if let Some(mut said) = self.child.stderr.take() {
            said.read_to_string(&mut err).unwrap();
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

/// What a server answered.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) text: String,
}

impl Reply {
    /// The JSON of an answer with this status.
    #[track_caller]
    pub(crate) fn json(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// One request.
#[track_caller]
pub(crate) fn request(addr: &str, method: &str, path: &str, token: Option<&str>, body: &str) -> Reply {
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
    let head = format!("host: {addr}\r\nconnection: close\r\ncontent-type: application/json\r\n{token}");
    let length = body.len();
    let answer =
        exchange(addr, &format!("{method} {path} HTTP/1.1\r\n{head}content-length: {length}\r\n\r\n{body}"));
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    let text = answer.split_once("\r\n\r\n").map(|(_, text)| text.to_owned());
    Reply { status: status.expect("a status"), text: text.expect("a body") }
}

/// What a server answers to these bytes before it closes.
#[track_caller]
pub(crate) fn exchange(addr: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Asks again until the answer is what must come.
#[track_caller]
pub(crate) fn until(within: Duration, what: &str, mut there: impl FnMut() -> bool) {
    let began = Instant::now();
    while !there() {
        assert!(began.elapsed() < within, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
