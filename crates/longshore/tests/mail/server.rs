//! A mail server in its own process, for the tests of `send_email`. It is written in
//! Python, so that two independent implementations have to agree about SMTP.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

pub(crate) struct MailServer {
    process: Child,
    stdout: Lines<BufReader<ChildStdout>>,
    port: u16,
}

impl MailServer {
    pub(crate) fn start(flags: &[&str]) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../longshore/tests/mail/server.py");
        let mut python = Command::new("python3");
        let python = python.arg(script).args(flags).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process =
            python.spawn().expect("python3 is missing; install it (Debian: apt-get install python3)");
        let mut stdout = BufReader::new(process.stdout.take().unwrap()).lines();
        let port = stdout.next().unwrap().unwrap().parse().unwrap();
        MailServer { process, stdout, port }
    }

    /// The server's URL; `user` is empty or ends with `@`.
    pub(crate) fn url(&self, user: &str) -> String {
        format!("smtp://{user}{}", self.addr())
    }

    pub(crate) fn addr(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Waits for the next message that the server accepts.
    pub(crate) fn next_message(&mut self) -> Value {
        serde_json::from_str(&self.stdout.next().unwrap().unwrap()).unwrap()
    }
}

impl Drop for MailServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
