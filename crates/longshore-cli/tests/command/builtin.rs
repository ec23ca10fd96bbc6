//! The built-in kinds with their real work, run by the real worker.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use serde_json::{Value, json};

use crate::fixture::{CommandOutput, Fixture, binary};
use crate::mail::MailServer;

/// What a job needs of the outside is the same on every engine; SQLite will do.
pub(crate) struct Yard {
    bench: Fixture,
    folder: PathBuf,
}

impl Yard {
    pub(crate) fn new() -> Self {
        let bench = Fixture::sqlite();
        bench.migrated();
        let folder = bench.file().unwrap().parent().unwrap().canonicalize().unwrap();
        Yard { bench, folder }
    }

    pub(crate) fn enqueue(&self, kind: &str, payload: &Value) -> String {
        let payload = payload.to_string();
        let answer = self.bench.run_args(&["enqueue", kind, "--payload", &payload, "--json"]).json();
        answer["job_id"].as_str().unwrap().to_owned()
    }

    /// Runs what is due, in a folder of its own.
    pub(crate) fn drain(&self, flags: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
        let mut worker = binary();
        worker.env("DATABASE_URL", &self.bench.url).envs(variables.iter().copied());
        worker.args(["worker", "--drain", "--json"]).args(flags).current_dir(&self.folder);
        CommandOutput::of(worker.output().unwrap())
    }

    fn job(&self, id: &str) -> Value {
        self.bench.run(&format!("jobs show {id} --json")).json()
    }
}

/// Answers one request and passes it on.
pub(crate) fn serve(answer: Vec<u8>) -> (u16, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (told, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let request = read_request(&mut stream);
        stream.write_all(&answer).unwrap();
        told.send(request).unwrap();
    });
    (port, heard)
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
        assert!(read > 0, "the caller hung up");
        request.extend_from_slice(&chunk[..read]);
    }
}

#[test]
fn a_summary_is_the_jobs_result() {
    let yard = Yard::new();
    let id =
        yard.enqueue("summarize_text", &json!({ "text": "Ships come in. Ships go out.", "max_words": 4 }));
    let done = yard.drain(&["--log", "off"], &[]).json();
    assert_eq!(done["succeeded"], 1);
    let job = yard.job(&id);
    assert_eq!(job["result"], json!({ "summary": "Ships come in.", "words": 3, "sentences": 1 }), "{job}");
}

#[test]
fn without_a_mail_server_mail_is_written_to_the_outbox() {
    let yard = Yard::new();
    let id =
        yard.enqueue("send_email", &json!({ "to": "ada@example.com", "subject": "Hi", "body": "s3cret" }));
    let answer = yard.drain(&["--mail-from", "Harbour <harbour@example.com>"], &[]);
    assert_eq!(answer.code, 0, "{answer:?}");
    assert!(answer.err.contains("mail is written to") && answer.err.contains("--smtp-url"), "{answer:?}");
    assert!(answer.err.contains("webhooks go unsigned"), "{answer:?}");
    assert!(!answer.err.contains("s3cret"), "payloads are never logged: {answer:?}");
    let path = yard.folder.join("outbox").join(format!("{id}.eml"));
    assert_eq!(yard.job(&id)["result"]["path"], path.to_str().unwrap());
    let message = std::fs::read_to_string(path).unwrap();
    assert!(message.contains(&format!("Message-ID: <{id}@example.com>")), "{message}");
}

#[test]
fn a_mail_server_gets_the_mail() {
    let Some(mut server) = MailServer::start(&["--password", "s3cret"]) else { return };
    let yard = Yard::new();
    let id =
        yard.enqueue("send_email", &json!({ "to": "ada@example.com", "subject": "Hi", "body": "Hello." }));
    let refused = yard
        .enqueue("send_email", &json!({ "to": "refused@example.com", "subject": "Hi", "body": "Hello." }));
    let url = server.url("ada:s3cret@");
    let answer = yard.drain(&["--mail-from", "harbour@example.com"], &[("LONGSHORE_SMTP_URL", &url)]);
    assert_eq!(answer.code, 0, "{answer:?}");
    assert!(!answer.err.contains("s3cret"), "{answer:?}");
    assert_eq!(
        (&answer.document()["succeeded"], &answer.document()["failed_permanent"]),
        (&json!(1), &json!(1))
    );
    let took = server.took();
    assert_eq!((&took["to"], &took["body"]), (&json!(["ada@example.com"]), &json!("Hello.")));
    assert_eq!(took["message_id"], format!("<{id}@example.com>"));
    assert!(yard.job(&refused)["last_error"].as_str().unwrap().contains("no such mailbox"));
}

#[test]
fn a_picture_is_fetched_fitted_and_written() {
    let yard = Yard::new();
    // One red pixel.
    let picture = b"GIF89a\x01\x00\x01\x00\x80\x00\x00\xff\x00\x00\x00\x00\x00,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;";
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", picture.len());
    let (port, _heard) = serve([head.as_bytes(), picture].concat());
    let fetched = yard.enqueue(
        "resize_image",
        &json!({ "source_url": format!("http://127.0.0.1:{port}/a.gif"), "width": 8, "height": 4 }),
    );
    std::fs::create_dir(yard.folder.join("in")).unwrap();
    std::fs::write(yard.folder.join("in/a.gif"), picture).unwrap();
    let file = format!("file://{}/in/a.gif", yard.folder.display());
    let read = yard.enqueue("resize_image", &json!({ "source_url": file, "width": 3, "height": 9 }));
    let done = yard
        .drain(
            &["--allow-http", "--allow-outbound", "127.0.0.0/8", "--image-root", "in", "--log", "off"],
            &[("LONGSHORE_IMAGE_OUTPUT", "out")],
        )
        .json();
    assert_eq!(done["succeeded"], 2, "{:?} {:?}", yard.job(&fetched), yard.job(&read));
    for (id, side) in [(fetched, 4_u32), (read, 3)] {
        let path = yard.folder.join("out").join(format!("{id}.png"));
        assert_eq!(yard.job(&id)["result"], json!({ "path": path, "width": side, "height": side }));
        let png = std::fs::read(path).unwrap();
        assert_eq!(png[16..24], [side.to_be_bytes(), side.to_be_bytes()].concat(), "the size it says it has");
    }
}

#[test]
fn a_webhook_is_posted_and_signed() {
    let yard = Yard::new();
    let (port, heard) = serve(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec());
    let url = format!("http://127.0.0.1:{port}/hook");
    let id = yard.enqueue("webhook_delivery", &json!({ "url": url, "body": { "ship": "Vega" } }));
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let answer = yard.drain(
        &["--allow-http", "--allow-outbound", "127.0.0.1"],
        &[
            ("LONGSHORE_WEBHOOK_SECRETS", secret),
            ("http_proxy", "http://127.0.0.1:1"),
            ("ALL_PROXY", "http://127.0.0.1:1"),
        ],
    );
    assert_eq!(answer.document()["succeeded"], 1, "{:?}", yard.job(&id));
    assert!(!answer.err.contains("unsigned") && !answer.err.contains("Vega"), "{answer:?}");
    assert_eq!(yard.job(&id)["result"], json!({ "status": 204 }));
    let request = heard.recv().unwrap();
    assert!(request.starts_with("POST /hook HTTP/1.1\r\n"), "no proxy in between: {request}");
    assert!(request.contains(&format!("webhook-id: {id}\r\n")), "{request}");
    assert!(request.contains("webhook-signature: v1,"), "{request}");
    assert!(request.ends_with(r#"{"ship":"Vega"}"#), "{request}");
}

/// A certificate for 127.0.0.1 and its key; `None` where there is no openssl.
fn certificate(folder: &Path) -> Option<(String, String)> {
    const CONFIG: &str = "[req]\ndistinguished_name = name\n[name]\n[leaf]\nbasicConstraints = critical, CA:FALSE\n\
                          subjectAltName = IP:127.0.0.1\n";
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (config, certificate, key) = (path("tls.cnf"), path("tls.pem"), path("tls.key"));
    std::fs::write(&config, CONFIG).unwrap();
    let mut openssl = Command::new("openssl");
    openssl.args("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2".split(' '));
    openssl.args(["-subj", "/CN=127.0.0.1", "-config", &config, "-extensions", "leaf"]);
    let made = openssl.args(["-keyout", &key, "-out", &certificate]).output();
    if made.is_err() {
        eprintln!("skipped: openssl is not installed");
    }
    assert!(made.ok()?.status.success());
    Some((certificate, key))
}

/// Takes every POST, by TLS.
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

    /// With its port.
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
fn servers_speak_tls_and_strangers_are_not_trusted() {
    let yard = Yard::new();
    let Some((certificate, key)) = certificate(&yard.folder) else { return };
    let Some(mut mail) = MailServer::start(&["--tls", &certificate, &key]) else { return };
    let (_https, port) = HttpsServer::start(&certificate, &key);
    let url = format!("smtps://{}", mail.addr());
    let hook = json!({ "url": format!("https://127.0.0.1:{port}/"), "body": 1 });
    let letter = json!({ "to": "ada@example.com", "subject": "Hi", "body": "Hello." });
    let flags = ["--mail-from", "harbour@example.com", "--allow-outbound", "127.0.0.1", "--log", "off"];

    for id in [yard.enqueue("send_email", &letter), yard.enqueue("webhook_delivery", &hook)] {
        yard.drain(&flags, &[("LONGSHORE_SMTP_URL", &url)]).ok();
        let job = yard.job(&id);
        assert_eq!(job["status"], "retrying", "{job}");
        assert!(job["last_error"].as_str().unwrap().contains("invalid peer certificate"), "{job}");
        yard.bench.run(&format!("jobs cancel {id}")).ok();
    }
    for id in [yard.enqueue("send_email", &letter), yard.enqueue("webhook_delivery", &hook)] {
        yard.drain(&flags, &[("LONGSHORE_SMTP_URL", &url), ("SSL_CERT_FILE", &certificate)]).ok();
        let job = yard.job(&id);
        assert_eq!(job["status"], "succeeded", "{job}");
    }
    assert_eq!(mail.took()["to"], json!(["ada@example.com"]));
}

#[test]
fn inner_addresses_and_plain_http_are_refused_unless_allowed() {
    let yard = Yard::new();
    let plain = yard.enqueue("webhook_delivery", &json!({ "url": "http://example.com/", "body": 1 }));
    let inner = yard.enqueue("webhook_delivery", &json!({ "url": "https://localhost/", "body": 1 }));
    let number = yard.enqueue("webhook_delivery", &json!({ "url": "https://2130706433/", "body": 1 }));
    let done = yard.drain(&["--log", "off"], &[]).json();
    assert_eq!(done["failed_permanent"], 3);
    for (id, host, setting) in [
        (plain, "example.com", "--allow-http"),
        (inner, "localhost", "--allow-outbound"),
        (number, "127.0.0.1", "--allow-outbound"),
    ] {
        let told = yard.job(&id)["last_error"].as_str().unwrap().to_owned();
        assert!(told.contains(host) && told.contains(setting), "{told}");
    }
}

#[test]
fn settings_are_refused_by_the_name_of_their_flag_and_no_secret_is_shown() {
    let yard = Yard::new();
    std::fs::write(yard.folder.join("file"), "").unwrap();
    for (flags, told) in [
        (&["--smtp-url", "s3cret", "--mail-from", "a@b"][..], "--smtp-url"),
        (&["--smtp-url", "smtps://ada:s3cret@mail"], "--mail-from"),
        (&["--mail-from", "nobody"], "--mail-from"),
        (&["--outbox", "file"], "--outbox"),
        (&["--image-root", "nowhere"], "--image-root"),
        (&["--image-output", "file"], "--image-output"),
        (&["--webhook-secret", "whsec_s3cret"], "--webhook-secret"),
        (&["--allow-outbound", "10.0.0.0/99"], "--allow-outbound"),
    ] {
        let answer = yard.drain(&[flags, &["--log", "off"]].concat(), &[]).fails_with(2, &[told]);
        assert!(!answer.err.contains("s3cret"), "{answer:?}");
    }
    // What is only rehearsed needs none of it.
    yard.drain(&["--simulate", "--image-root", "nowhere", "--log", "off"], &[]).ok();
}
