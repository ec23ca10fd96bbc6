//! A mail server as a process of its own, for the tests of `send_email`: not
//! written in Rust, so that two implementations have to agree about SMTP.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

pub(crate) struct MailServer {
    process: Child,
    said: Lines<BufReader<ChildStdout>>,
    port: u16,
}

impl MailServer {
    /// `None` where there is no Python.
    pub(crate) fn start(flags: &[&str]) -> Option<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mail/server.py");
        let mut python = Command::new("python3");
        let python = python.arg(script).args(flags).stdin(Stdio::null()).stdout(Stdio::piped());
        let Ok(mut process) = python.spawn() else {
            eprintln!("skipped: python3 is not installed");
            return None;
        };
        let mut said = BufReader::new(process.stdout.take().unwrap()).lines();
        let port = said.next().unwrap().unwrap().parse().unwrap();
        Some(MailServer { process, said, port })
    }

    /// Its URL; `user` is empty or ends with `@`.
    pub(crate) fn url(&self, user: &str) -> String {
        format!("smtp://{user}{}", self.addr())
    }

    pub(crate) fn addr(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The next message that it took.
    pub(crate) fn took(&mut self) -> Value {
        serde_json::from_str(&self.said.next().unwrap().unwrap()).unwrap()
    }
}

impl Drop for MailServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
