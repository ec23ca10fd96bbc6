//! The built-in kinds with their real handlers, run by the real worker.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use serde_json::{Value, json};

use crate::fixture::{CommandOutput, Fixture, binary};
use crate::mail::MailServer;
use crate::missing::skip;

/// A queue and the folder in which its worker runs. It uses SQLite only, because what
/// the handlers do does not depend on the engine.
pub(crate) struct BuiltinRunner {
    fixture: Fixture,
    folder: PathBuf,
}

impl BuiltinRunner {
    pub(crate) fn new() -> Self {
        let fixture = Fixture::sqlite();
        fixture.migrated();
        let folder = fixture.file().unwrap().parent().unwrap().canonicalize().unwrap();
        BuiltinRunner { fixture, folder }
    }

    pub(crate) fn enqueue(&self, kind: &str, payload: &Value) -> String {
        let payload = payload.to_string();
        let output = self.fixture.run_args(&["enqueue", kind, "--payload", &payload, "--json"]).json();
        output["job_id"].as_str().unwrap().to_owned()
    }

    /// Runs all due jobs in the folder.
    pub(crate) fn drain(&self, flags: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
        let mut worker = binary();
        worker.env("DATABASE_URL", &self.fixture.url).envs(variables.iter().copied());
        worker.args(["worker", "--drain", "--json"]).args(flags).current_dir(&self.folder);
        CommandOutput::of(worker.output().unwrap())
    }

    fn job(&self, id: &str) -> Value {
        self.fixture.run(&format!("jobs show {id} --json")).json()
    }
}

/// Starts a server that sends this response to one request. Returns its port and a
/// channel with the request.
pub(crate) fn respond_once(response: Vec<u8>) -> (u16, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let request = read_request(&mut stream);
        stream.write_all(&response).unwrap();
        sender.send(request).unwrap();
    });
    (port, receiver)
}

fn read_request(stream: &mut TcpStream) -> String {
    let mut request = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&request);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
                return text.into_owned();
            }
        }
        let mut chunk = [0; 4096];
        let read = stream.read(&mut chunk).unwrap();
        assert!(read > 0, "the client closed the connection");
        request.extend_from_slice(&chunk[..read]);
    }
}

#[test]
fn a_summary_is_the_jobs_result() {
    let runner = BuiltinRunner::new();
    let id =
        runner.enqueue("summarize_text", &json!({ "text": "Ships come in. Ships go out.", "max_words": 4 }));
    let done = runner.drain(&["--log", "off"], &[]).json();
    assert_eq!(done["succeeded"], 1);
    let job = runner.job(&id);
    assert_eq!(job["result"], json!({ "summary": "Ships come in.", "words": 3, "sentences": 1 }), "{job}");
}

#[test]
fn without_a_mail_server_mail_is_written_to_the_outbox() {
    let runner = BuiltinRunner::new();
    let id =
        runner.enqueue("send_email", &json!({ "to": "ada@example.com", "subject": "Hi", "body": "s3cret" }));
    let output = runner.drain(&["--mail-from", "Harbour <harbour@example.com>"], &[]);
    assert_eq!(output.code, 0, "{output:?}");
    assert!(output.err.contains("mail is written to") && output.err.contains("--smtp-url"), "{output:?}");
    assert!(output.err.contains("webhooks are sent unsigned"), "{output:?}");
    assert!(!output.err.contains("s3cret"), "payloads are never logged: {output:?}");
    let path = runner.folder.join("outbox").join(format!("{id}.eml"));
    assert_eq!(runner.job(&id)["result"]["path"], path.to_str().unwrap());
    let message = std::fs::read_to_string(path).unwrap();
    assert!(message.contains(&format!("Message-ID: <{id}@example.com>")), "{message}");
}

#[test]
fn a_mail_server_receives_the_message() {
    let mut server = MailServer::start(&["--password", "s3cret"]);
    let runner = BuiltinRunner::new();
    let id =
        runner.enqueue("send_email", &json!({ "to": "ada@example.com", "subject": "Hi", "body": "Hello." }));
    let refused = runner
        .enqueue("send_email", &json!({ "to": "refused@example.com", "subject": "Hi", "body": "Hello." }));
    let url = server.url("ada:s3cret@");
    let output = runner.drain(&["--mail-from", "harbour@example.com"], &[("LONGSHORE_SMTP_URL", &url)]);
    assert_eq!(output.code, 0, "{output:?}");
    assert!(!output.err.contains("s3cret"), "{output:?}");
    assert_eq!(
        (&output.document()["succeeded"], &output.document()["failed_permanent"]),
        (&json!(1), &json!(1))
    );
    let message = server.next_message();
    assert_eq!((&message["to"], &message["body"]), (&json!(["ada@example.com"]), &json!("Hello.")));
    assert_eq!(message["message_id"], format!("<{id}@example.com>"));
    assert!(runner.job(&refused)["last_error"].as_str().unwrap().contains("no such mailbox"));
}

#[test]
fn an_image_is_fetched_resized_and_written() {
    let runner = BuiltinRunner::new();
    // One red pixel.
    let image = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\xff\x00\x00\x00\x00\x00,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;";
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", image.len());
    let (port, _request) = respond_once([head.as_bytes(), image].concat());
    let fetched = runner.enqueue(
        "resize_image",
        &json!({ "source_url": format!("http://127.0.0.1:{port}/a.gif"), "width": 8, "height": 4 }),
    );
    std::fs::create_dir(runner.folder.join("in")).unwrap();
    std::fs::write(runner.folder.join("in/a.gif"), image).unwrap();
    let file = format!("file://{}/in/a.gif", runner.folder.display());
    let read = runner.enqueue("resize_image", &json!({ "source_url": file, "width": 3, "height": 9 }));
    let done = runner
        .drain(
            &["--allow-http", "--allow-outbound", "127.0.0.0/8", "--image-root", "in", "--log", "off"],
            &[("LONGSHORE_IMAGE_OUTPUT", "out")],
        )
        .json();
    assert_eq!(done["succeeded"], 2, "{:?} {:?}", runner.job(&fetched), runner.job(&read));
    for (id, side) in [(fetched, 4_u32), (read, 3)] {
        let path = runner.folder.join("out").join(format!("{id}.png"));
        assert_eq!(runner.job(&id)["result"], json!({ "path": path, "width": side, "height": side }));
        let png = std::fs::read(path).unwrap();
        assert_eq!(
            png[16..24],
            [side.to_be_bytes(), side.to_be_bytes()].concat(),
            "the size in the PNG header"
        );
    }
}

#[test]
fn a_webhook_is_posted_and_signed() {
    let runner = BuiltinRunner::new();
    let (port, requests) = respond_once(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec());
    let url = format!("http://127.0.0.1:{port}/hook");
    let id = runner.enqueue("webhook_delivery", &json!({ "url": url, "body": { "ship": "Vega" } }));
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let output = runner.drain(
        &["--allow-http", "--allow-outbound", "127.0.0.1"],
        &[
            ("LONGSHORE_WEBHOOK_SECRETS", secret),
            ("http_proxy", "http://127.0.0.1:1"),
            ("ALL_PROXY", "http://127.0.0.1:1"),
        ],
    );
    assert_eq!(output.document()["succeeded"], 1, "{:?}", runner.job(&id));
    assert!(!output.err.contains("unsigned") && !output.err.contains("Vega"), "{output:?}");
    assert_eq!(runner.job(&id)["result"], json!({ "status": 204 }));
    let request = requests.recv().unwrap();
    assert!(
        request.starts_with("POST /hook HTTP/1.1\r\n"),
        "the request does not go through the proxy: {request}"
    );
    assert!(request.contains(&format!("webhook-id: {id}\r\n")), "{request}");
    assert!(request.contains("webhook-signature: v1,"), "{request}");
    assert!(request.ends_with(r#"{"ship":"Vega"}"#), "{request}");
}

/// Creates a certificate for 127.0.0.1 and its key, and returns their paths; `None` if
/// openssl is not installed.
fn certificate(folder: &Path) -> Option<(String, String)> {
    const CONFIG: &str = "[req]\ndistinguished_name = name\n[name]\n[leaf]\nbasicConstraints = critical, CA:FALSE\n\
                          subjectAltName = IP:127.0.0.1\n";
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (config, certificate, key) = (path("tls.cnf"), path("tls.pem"), path("tls.key"));
    std::fs::write(&config, CONFIG).unwrap();
    let mut openssl = Command::new("openssl");
    openssl.args("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2".split(' '));
    openssl.args(["-subj", "/CN=127.0.0.1", "-config", &config, "-extensions", "leaf"]);
    let output = openssl.args(["-keyout", &key, "-out", &certificate]).output();
    if output.is_err() {
        skip("openssl is not installed");
    }
    assert!(output.ok()?.status.success());
    Some((certificate, key))
}

/// An HTTPS server that accepts every POST.
struct HttpsServer(Child);

impl HttpsServer {
    const SCRIPT: &str = "
import http.server, ssl, sys

class Hook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers['content-length']))
        self.send_response(204)
        self.end_headers()

server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hook)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(*sys.argv[1:])
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
print(server.server_port, flush=True)
server.serve_forever()";

    /// Returns the server and its port.
    fn start(certificate: &str, key: &str) -> (Self, u16) {
        let mut python = Command::new("python3");
        python.args(["-c", Self::SCRIPT, certificate, key]).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = python.spawn().unwrap();
        let mut port = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut port).unwrap();
        (HttpsServer(process), port.trim().parse().unwrap())
    }
}

impl Drop for HttpsServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn tls_servers_are_called_only_if_their_certificate_is_trusted() {
    let runner = BuiltinRunner::new();
    let Some((certificate, key)) = certificate(&runner.folder) else { return };
    let mut mail = MailServer::start(&["--tls", &certificate, &key]);
    let (_https, port) = HttpsServer::start(&certificate, &key);
    let url = format!("smtps://{}", mail.addr());
    let webhook = json!({ "url": format!("https://127.0.0.1:{port}/"), "body": 1 });
    let message = json!({ "to": "ada@example.com", "subject": "Hi", "body": "Hello." });
    let flags = ["--mail-from", "harbour@example.com", "--allow-outbound", "127.0.0.1", "--log", "off"];

    for id in [runner.enqueue("send_email", &message), runner.enqueue("webhook_delivery", &webhook)] {
        runner.drain(&flags, &[("LONGSHORE_SMTP_URL", &url)]).ok();
        let job = runner.job(&id);
        assert_eq!(job["status"], "retrying", "{job}");
        assert!(job["last_error"].as_str().unwrap().contains("invalid peer certificate"), "{job}");
        runner.fixture.run(&format!("jobs cancel {id}")).ok();
    }
    for id in [runner.enqueue("send_email", &message), runner.enqueue("webhook_delivery", &webhook)] {
        runner.drain(&flags, &[("LONGSHORE_SMTP_URL", &url), ("SSL_CERT_FILE", &certificate)]).ok();
        let job = runner.job(&id);
        assert_eq!(job["status"], "succeeded", "{job}");
    }
    assert_eq!(mail.next_message()["to"], json!(["ada@example.com"]));
}

#[test]
fn internal_addresses_and_plain_http_are_refused_unless_allowed() {
    let runner = BuiltinRunner::new();
    let plain = runner.enqueue("webhook_delivery", &json!({ "url": "http://example.com/", "body": 1 }));
    let internal = runner.enqueue("webhook_delivery", &json!({ "url": "https://localhost/", "body": 1 }));
    let integer = runner.enqueue("webhook_delivery", &json!({ "url": "https://2130706433/", "body": 1 }));
    let done = runner.drain(&["--log", "off"], &[]).json();
    assert_eq!(done["failed_permanent"], 3);
    for (id, host, setting) in [
        (plain, "example.com", "--allow-http"),
        (internal, "localhost", "--allow-outbound"),
        (integer, "127.0.0.1", "--allow-outbound"),
    ] {
        let error = runner.job(&id)["last_error"].as_str().unwrap().to_owned();
        assert!(error.contains(host) && error.contains(setting), "{error}");
    }
}

#[test]
fn errors_in_settings_name_the_flag_and_show_no_secret() {
    let runner = BuiltinRunner::new();
    std::fs::write(runner.folder.join("file"), "").unwrap();
    for (flags, named) in [
        (&["--smtp-url", "s3cret", "--mail-from", "a@b"][..], "--smtp-url"),
        (&["--smtp-url", "smtps://ada:s3cret@mail"], "--mail-from"),
        (&["--mail-from", "nobody"], "--mail-from"),
        (&["--outbox", "file"], "--outbox"),
        (&["--image-root", "nowhere"], "--image-root"),
        (&["--image-output", "file"], "--image-output"),
        (&["--webhook-secret", "whsec_s3cret"], "--webhook-secret"),
        (&["--allow-outbound", "10.0.0.0/99"], "--allow-outbound"),
    ] {
        let output = runner.drain(&[flags, &["--log", "off"]].concat(), &[]).fails_with(2, &[named]);
        assert!(!output.err.contains("s3cret"), "{output:?}");
    }
    // The simulator does not use these settings.
    runner.drain(&["--simulate", "--image-root", "nowhere", "--log", "off"], &[]).ok();
}
