//! Logs, metrics and traces of the long-running commands.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longshore::JobId;
use regex::Regex;
use serde_json::{Value, json};

use crate::fixture::{CommandOutput, Fixture, binary, on_every_engine};
use crate::missing::skip;
use crate::process::{Process, request, until};

on_every_engine!(
    a_worker_logs_each_attempt_with_its_fields,
    with_a_json_log_everything_is_json,
    a_json_log_cannot_control_the_terminal,
    the_metrics_follow_the_rules_of_prometheus,
    a_worker_whose_metrics_port_is_in_use_runs_jobs,
    a_trace_leads_from_the_enqueue_to_the_run,
);

/// Generous, for slow machines.
const MAX_WAIT: Duration = Duration::from_secs(60);
const SUMMARY: &str = r#"{"text":"Ships come. Ships go.","max_words":2}"#;
/// No webhook may be sent to this machine, so the job fails permanently.
const REFUSED: &str = r#"{"url":"https://127.0.0.1/","body":{}}"#;

/// A file that is removed when this is dropped.
struct LogFile(PathBuf);

impl LogFile {
    fn new() -> Self {
        LogFile(std::env::temp_dir().join(format!("longshore-log-{}", JobId::new())))
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap_or_default()
    }
}

impl Drop for LogFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn json_lines(text: &str) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    text.lines().map(parse).collect()
}

fn drain(fixture: &Fixture, change: impl FnOnce(&mut Command)) -> CommandOutput {
    let mut command = fixture.command(&["worker", "--drain"]);
    change(&mut command);
    CommandOutput::of(command.output().unwrap())
}

// ---- logs ----------------------------------------------------------------------

fn a_worker_logs_each_attempt_with_its_fields(fixture: &Fixture) {
    fixture.migrated();
    let enqueue = |kind: &str, payload: &str| {
        let enqueued = fixture.run_args(&["enqueue", kind, "--payload", payload, "--json"]).json();
        enqueued["job_id"].as_str().unwrap().to_owned()
    };
    let (done, dead) = (enqueue("summarize_text", SUMMARY), enqueue("webhook_delivery", REFUSED));
    let log = drain(fixture, |_| {}).err;
    let line = |id: &str| log.lines().find(|line| line.contains(id)).unwrap_or_else(|| panic!("{id}: {log}"));
    for part in [" INFO ", "job succeeded", "kind=\"summarize_text\"", "attempt=1", "run_seconds="] {
        assert!(line(&done).contains(part), "{part}: {log}");
    }
    for part in ["ERROR", "job failed permanently", "kind=\"webhook_delivery\"", "error=\""] {
        assert!(line(&dead).contains(part), "{part}: {log}");
    }
    assert!(!log.contains('\u{1b}'), "standard error is not a terminal: {log}");
}

#[test]
fn dev_prints_a_short_line_for_each_attempt() {
    let (folder, log) = (LogFile::new(), LogFile::new());
    let mut command = binary();
    command.args(["dev", "--bind", "127.0.0.1:0", "--json", "--data-dir", folder.0.to_str().unwrap()]);
    let mut dev = Process::start_logging(&mut command, &log.0);
    let addr = dev.address();
    for (kind, payload) in [("summarize_text", SUMMARY), ("webhook_delivery", REFUSED)] {
        let body = format!(r#"{{"kind":"{kind}","payload":{payload}}}"#);
        request(&addr, "POST", "/jobs", None, &body).json(201);
    }
    let expected = [
        r"(?m)^\d\d:\d\d:\d\d ✓ summarize_text [0-9a-f-]{36} attempt 1 of \d+, [0-9.]+ m?s$",
        r"(?m)^\d\d:\d\d:\d\d ✗ webhook_delivery [0-9a-f-]{36} attempt 1 of \d+, .*: .*; failed permanently$",
    ];
    for pattern in expected {
        let pattern = Regex::new(pattern).unwrap();
        until(MAX_WAIT, &format!("{pattern}"), || pattern.is_match(&log.text()));
    }
    drop(dev);
    let _ = std::fs::remove_dir_all(&folder.0);
}

/// Runs a command in a terminal, with these variables.
#[cfg(target_os = "linux")]
fn run_in_terminal(command: &str, variables: &[(&str, &str)]) -> Option<String> {
    let mut script = Command::new("script");
    script.args(["-qec", command, "/dev/null"]).env_remove("NO_COLOR").env("TERM", "xterm");
    script.envs(variables.iter().copied()).env("LONGSHORE_CONFIG", "");
    match script.output() {
        Ok(output) => Some(String::from_utf8_lossy(&output.stdout).into_owned()),
        Err(error) => {
            skip(&format!("script is not installed: {error}"));
            None
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn only_a_capable_terminal_gets_colours() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let command = format!("{} worker --drain", env!("CARGO_BIN_EXE_longshore"));
    let run = |variables: &[(&str, &str)]| {
        let url = [("DATABASE_URL", fixture.url.as_str())];
        run_in_terminal(&command, &[variables, &url[..]].concat())
    };
    let Some(coloured) = run(&[]) else { return };
    assert!(coloured.contains("\u{1b}["), "{coloured:?}");
    for variable in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let plain = run(&[variable]).unwrap();
        assert!(plain.contains("worker starting") && !plain.contains('\u{1b}'), "{variable:?}: {plain:?}");
    }
}

fn with_a_json_log_everything_is_json(fixture: &Fixture) {
    fixture.migrated();
    let json_log = |line: &str| {
        let mut command = fixture.command(&line.split_whitespace().collect::<Vec<_>>());
        command.env("RUST_LOG_FORMAT", "json");
        command
    };
    fixture.run_args(&["enqueue", "summarize_text", "--payload", SUMMARY]).ok();
    let drained = CommandOutput::of(json_log("worker --drain").output().unwrap());
    assert_eq!(json_lines(&drained.out)[0]["succeeded"], 1);
    let lines = json_lines(&drained.err);
    let done = lines.iter().find(|line| line["fields"]["message"] == "job succeeded").unwrap();
    assert_eq!((&done["level"], &done["fields"]["attempt"]), (&json!("INFO"), &json!(1)));

    let mut server = Process::start(&mut json_log("serve --bind 127.0.0.1:0"));
    let greeting: Value = serde_json::from_str(&server.line()).unwrap();
    let addr = greeting["url"].as_str().unwrap().strip_prefix("http://").unwrap();
    // The address is printed before the server handles signals.
    assert_eq!(request(addr, "GET", "/health", None, "").status, 200);
    server.signal("TERM");
    let (code, out, err) = server.ended();
    assert_eq!((code, out.as_str()), (Some(0), ""));
    assert!(!json_lines(&err).is_empty());

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (line, code, part) in [
        (format!("serve --bind {taken}"), 1, taken.as_str()),
        ("worker --concurrency 0".into(), 2, "--concurrency: must be at least 1"),
        ("worker --nonsense".into(), 2, "--nonsense"),
        ("serve --config missing.toml".into(), 2, "missing.toml"),
    ] {
        let failed = CommandOutput::of(json_log(&line).output().unwrap());
        assert_eq!((failed.code, failed.out.as_str()), (code, ""), "{failed:?}");
        let last = json_lines(&failed.err).pop().unwrap();
        assert_eq!(last["level"], "ERROR", "{line}: {last}");
        assert!(last["timestamp"].is_string(), "{line}: {last}");
        assert!(last["fields"]["message"].as_str().unwrap().contains(part), "{line}: {last}");
    }
    // Commands without a log are not affected.
    CommandOutput::of(json_log("jobs show nonsense").output().unwrap()).fails_with(2, &[]);
}

fn a_json_log_cannot_control_the_terminal(fixture: &Fixture) {
    // Controls a terminal and reorders text. JSON requires no escapes for these characters.
    const HOSTILE: &str = "mail\u{9b}31m\u{202e}txet";
    fixture.migrated();
    fixture.run_args(&["enqueue", "summarize_text", "--queue", HOSTILE, "--payload", SUMMARY]).ok();
    let log = drain(fixture, |worker| {
        worker.args(["--queues", HOSTILE]).env("RUST_LOG_FORMAT", "json");
    })
    .err;
    assert!(!log.contains(['\u{9b}', '\u{202e}']), "{log:?}");
    let lines = json_lines(&log);
    let done = lines.iter().find(|line| line["fields"]["message"] == "job succeeded").unwrap();
    assert_eq!(done["fields"]["queue"], HOSTILE);
}

// ---- metrics -------------------------------------------------------------------

/// The rules of `promtool check metrics`, and those of the text format. Returns the violations.
fn violations(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut help, mut types) = (BTreeMap::new(), BTreeMap::new());
    let mut series = BTreeSet::new();
    let mut current = String::new();
    let mut closed = BTreeSet::new();
    let sample = Regex::new(r#"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(.*)\})? (\S+)$"#).unwrap();
    let label = Regex::new(r#"([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)"#).unwrap();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let mut words = line.splitn(4, ' ');
        if line.starts_with("# ") {
            let (_, what, name) = (words.next(), words.next().unwrap(), words.next().unwrap().to_owned());
            let value = words.next().unwrap_or_default().to_owned();
            let previous = match what {
                "HELP" => help.insert(name.clone(), value),
                "TYPE" => types.insert(name.clone(), value),
                _ => None,
            };
            if previous.is_some() {
                found.push(format!("{name}: a second {what} line"));
            }
            if name != current {
                closed.insert(std::mem::replace(&mut current, name.clone()));
                if closed.contains(&name) {
                    found.push(format!("{name}: its lines are not together"));
                }
            }
            continue;
        }
        let Some(parts) = sample.captures(line) else {
            found.push(format!("not a sample: {line}"));
            continue;
        };
        let name = parts[1].to_owned();
        if !series.insert(line.rsplit_once(' ').unwrap().0.to_owned()) {
            found.push(format!("a second sample of the same series: {line}"));
        }
        if !["NaN", "+Inf", "-Inf"].contains(&&parts[4]) && parts[4].parse::<f64>().is_err() {
            found.push(format!("not a number: {line}"));
        }
        let labels = parts.get(3).map_or("", |labels| labels.as_str());
        let names: Vec<String> = label.captures_iter(labels).map(|label| label[1].to_owned()).collect();
        if !label.replace_all(labels, "").is_empty() {
            found.push(format!("invalid labels: {line}"));
        }
        let kind = types.get(&current).map_or("", String::as_str);
        let suffixes: &[&str] = if kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
        if !suffixes.iter().any(|suffix| name == format!("{current}{suffix}")) {
            found.push(format!("{name}: no TYPE line before it"));
        }
        if names.iter().any(|name| name == "le") != name.ends_with("_bucket")
            || names.iter().any(|n| n == "quantile")
        {
            found.push(format!("{name}: a label that belongs to another type"));
        }
        if let Some(label) = names.iter().find(|name| name.chars().any(char::is_uppercase)) {
            found.push(format!("{name}: label {label} is not in snake_case"));
        }
    }
    for (name, kind) in &types {
        if help.get(name).is_none_or(String::is_empty) {
            found.push(format!("{name}: no help text"));
        }
        if (kind == "counter") != name.ends_with("_total") {
            found.push(format!("{name}: counters, and only counters, end in _total"));
        }
        if kind != "histogram" && ["_bucket", "_sum", "_count"].iter().any(|suffix| name.ends_with(suffix)) {
            found.push(format!("{name}: a suffix of histograms"));
        }
        if !["counter", "gauge", "histogram"].contains(&kind.as_str()) {
            found.push(format!("{name}: type {kind}"));
        }
        let parts: Vec<&str> = name.split('_').collect();
        let units = [
            "milliseconds",
            "microseconds",
            "nanoseconds",
            "minutes",
            "hours",
            "days",
            "weeks",
            "kilobytes",
            "megabytes",
            "gigabytes",
            "kibibytes",
            "mebibytes",
            "gibibytes",
            "bits",
            "percent",
            "celsius",
            "fahrenheit",
            "s",
            "ms",
            "us",
            "ns",
            "sec",
            "b",
            "kb",
            "mb",
            "gb",
            "tb",
            "pb",
            "m",
            "h",
            "d",
        ];
        if let Some(unit) = parts.iter().find(|part| units.contains(part)) {
            found.push(format!("{name}: {unit} is not a base unit"));
        }
        if parts.contains(&kind.as_str()) {
            found.push(format!("{name}: contains its type"));
        }
        if name.contains(':') || name.chars().any(char::is_uppercase) {
            found.push(format!("{name}: not in snake_case"));
        }
    }
    found
}

#[test]
fn violations_of_the_rules_are_found() {
    let good = "# HELP a_total A.\n# TYPE a_total counter\na_total{b=\"c\\\"d\",e=\"f\"} 1\n\
                # HELP g_seconds G.\n# TYPE g_seconds histogram\ng_seconds_bucket{le=\"+Inf\"} 1\n\
                g_seconds_sum 0.5\ng_seconds_count 1\n";
    assert_eq!(violations(good), Vec::<String>::new());
    for bad in [
        "# TYPE a_total counter\na_total 1\n",
        "a_total 1\n",
        "# HELP a A.\n# TYPE a counter\na 1\n",
        "# HELP a_total A.\n# TYPE a_total gauge\na_total 1\n",
        "# HELP a_ms A.\n# TYPE a_ms gauge\na_ms 1\n",
        "# HELP a A.\n# TYPE a gauge\na 1\na 2\n",
        "# HELP a A.\n# TYPE a gauge\na one\n",
        "# HELP a A.\n# TYPE a gauge\na{b=c} 1\n",
        "# HELP aB A.\n# TYPE aB gauge\naB 1\n",
    ] {
        assert!(!violations(bad).is_empty(), "{bad}");
    }
}

fn the_metrics_follow_the_rules_of_prometheus(fixture: &Fixture) {
    fixture.migrated();
    let mut command = fixture.command(&["serve", "--with-worker", "--bind", "127.0.0.1:0", "--json"]);
    let mut server = Process::start(&mut command);
    let addr = server.address();
    let metrics = || request(&addr, "GET", "/metrics", None, "").text;
    let has = |line: &str| metrics().lines().any(|found| found == line);
    // Before the first job, so that the first dead letter is an increase.
    for line in [
        r#"worker_jobs_started_total{kind="send_email"} 0"#,
        r#"worker_jobs_completed_total{kind="send_email",outcome="failed_permanent"} 0"#,
        r#"longshore_auth_failures_total{reason="no_token"} 0"#,
        r#"longshore_http_connections_closed_total{reason="body_limit"} 0"#,
        "longshore_recovered_jobs_total 0",
        concat!("longshore_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
    ] {
        until(MAX_WAIT, line, || has(line));
    }
    let job = format!(r#"{{"kind":"summarize_text","payload":{SUMMARY}}}"#);
    request(&addr, "POST", "/jobs", None, &job).json(201);
    until(MAX_WAIT, "the job has ended", || {
        has(r#"worker_jobs_completed_total{kind="summarize_text",outcome="succeeded"} 1"#)
    });
    let text = metrics();
    assert_eq!(violations(&text), Vec::<String>::new(), "{text}");
    let histograms = text.lines().filter(|line| line.ends_with(" histogram")).count();
    assert!(histograms >= 5, "{text}");
    if cfg!(target_os = "linux") {
        for name in
            ["cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds"]
        {
            let name = format!("process_{name} ");
            let line = text.lines().find(|line| line.starts_with(&name)).unwrap_or_else(|| panic!("{name}"));
            assert!(line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() >= 0.0, "{line}");
        }
    }
}

/// The address in the line about metrics, if it has been logged.
fn metrics_address(log: &str) -> Option<String> {
    let rest = log.split("serving metrics at http://").nth(1)?;
    Some(rest.split("/metrics").next().unwrap().to_owned())
}

fn a_worker_whose_metrics_port_is_in_use_runs_jobs(fixture: &Fixture) {
    fixture.migrated();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    fixture.run_args(&["enqueue", "summarize_text", "--payload", SUMMARY]).ok();
    let drained = drain(fixture, |command| {
        command.args(["--json", "--metrics-addr", &taken]);
    });
    assert_eq!((drained.code, &drained.document()["succeeded"]), (0, &json!(1)), "{drained:?}");
    let warning = drained.err.lines().find(|line| line.contains(" WARN ") && line.contains("metrics"));
    let warning = warning.unwrap_or_default();
    for part in [taken.as_str(), "--metrics-port", "auto"] {
        assert!(warning.contains(part), "{part}: {drained:?}");
    }

    let log = LogFile::new();
    let mut command = fixture.command(&["worker", "--metrics-addr", &taken, "--metrics-port", "auto"]);
    let worker = Process::start_logging(&mut command, &log.0);
    until(MAX_WAIT, "a line with the address", || metrics_address(&log.text()).is_some());
    let addr = metrics_address(&log.text()).unwrap();
    assert_ne!(addr, taken);
    let text = request(&addr, "GET", "/metrics", None, "").text;
    assert_eq!(violations(&text), Vec::<String>::new(), "{text}");
    assert!(text.contains("\nprocess_start_time_seconds "), "{text}");
    assert_eq!(request(&addr, "GET", "/nowhere", None, "").status, 404);
    drop(worker);
}

// ---- traces --------------------------------------------------------------------

/// A collector: it keeps the spans that it receives.
#[derive(Clone)]
struct Collector {
    url: String,
    requests: Arc<Mutex<Vec<Value>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let received = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, mut text) = (stream.unwrap(), Vec::new());
                let body = loop {
                    let mut chunk = [0; 4096];
                    let read = stream.read(&mut chunk).unwrap();
                    assert!(read > 0, "the exporter closed the connection");
                    text.extend_from_slice(&chunk[..read]);
                    let text = String::from_utf8_lossy(&text);
                    let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
                    if body.len() >= length.parse().unwrap() {
                        assert!(head.starts_with("POST /v1/traces "), "{head}");
                        assert!(head.contains("content-type: application/json"), "{head}");
                        break body.to_owned();
                    }
                };
                received.lock().unwrap().push(serde_json::from_str(&body).unwrap());
                stream
                    .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
                    .unwrap();
            }
        });
        Collector { url, requests }
    }

    fn spans(&self) -> Vec<Value> {
        let requests = self.requests.lock().unwrap().clone();
        let spans = requests.iter().flat_map(|request| {
            let resource = &request["resourceSpans"][0];
            resource["scopeSpans"][0]["spans"].as_array().unwrap().clone()
        });
        spans.collect()
    }

    #[track_caller]
    fn span(&self, name: &str) -> Value {
        let spans = self.spans();
        let found = spans.iter().find(|span| span["name"] == name).cloned();
        found.unwrap_or_else(|| panic!("no span {name}: {spans:#?}"))
    }
}

fn a_trace_leads_from_the_enqueue_to_the_run(fixture: &Fixture) {
    fixture.migrated();
    let collector = Collector::start();
    let variables =
        [("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.as_str()), ("OTEL_SERVICE_NAME", "harbour")];
    let mut enqueue = fixture.command(&["enqueue", "summarize_text", "--payload", SUMMARY, "--json"]);
    CommandOutput::of(enqueue.envs(variables).output().unwrap()).ok();
    let drained = drain(fixture, |command| {
        command.envs(variables).env("RUST_LOG_FORMAT", "json");
    });

    let (root, run) = (collector.span("longshore enqueue"), collector.span("job summarize_text"));
    assert_eq!(root["traceId"], run["traceId"]);
    let parent = collector.spans().into_iter().find(|span| span["spanId"] == run["parentSpanId"]);
    assert_eq!(parent.expect("the parent is exported")["traceId"], run["traceId"]);
    assert_eq!(collector.span("POST /jobs")["parentSpanId"], root["spanId"]);
    assert_eq!((&run["kind"], &run["status"]), (&json!(5), &json!({})));
    let nanoseconds = |field: &str| run[field].as_str().unwrap().parse::<u64>().unwrap();
    assert!(nanoseconds("startTimeUnixNano") <= nanoseconds("endTimeUnixNano"));
    let resource = &collector.requests.lock().unwrap()[0]["resourceSpans"][0]["resource"]["attributes"];
    let name = resource.as_array().unwrap().iter().find(|attribute| attribute["key"] == "service.name");
    assert_eq!(name.unwrap()["value"]["stringValue"], "harbour");

    let lines = json_lines(&drained.err);
    let line = lines.iter().find(|line| line["fields"]["message"] == "job succeeded").unwrap();
    assert_eq!(line["fields"]["trace_id"], run["traceId"]);
}

#[test]
fn a_request_through_a_server_is_part_of_the_callers_trace() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let collector = Collector::start();
    let variable = ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.as_str());
    let mut serve = fixture.command(&["serve", "--with-worker", "--bind", "127.0.0.1:0", "--json"]);
    let mut server = Process::start(serve.envs([variable]));
    let url = format!("http://{}", server.address());
    let mut enqueue = binary();
    enqueue.envs([variable, ("LONGSHORE_SERVER", url.as_str())]);
    // This one fails, so its span has an error.
    enqueue.args(["enqueue", "webhook_delivery", "--payload", REFUSED, "--json"]);
    CommandOutput::of(enqueue.output().unwrap()).ok();
    let exported = |name: &str| collector.spans().iter().any(|span| span["name"] == name);
    until(MAX_WAIT, "the spans arrive", || exported("job webhook_delivery") && exported("POST /jobs"));
    let path = ["longshore enqueue", "POST /jobs", "enqueue", "job webhook_delivery"];
    for [parent, name] in path.array_windows() {
        let (parent, span) = (collector.span(parent), collector.span(name));
        assert_eq!(
            (&span["traceId"], &span["parentSpanId"]),
            (&parent["traceId"], &parent["spanId"]),
            "{name}"
        );
    }
    assert_eq!(collector.span("job webhook_delivery")["status"]["code"], 2);
    assert!(!exported("GET /metrics") && !exported("GET /health"));
}

#[test]
fn a_collector_that_is_away_delays_nothing() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let away = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    fixture.run_args(&["enqueue", "summarize_text", "--payload", SUMMARY]).ok();
    let drained = drain(&fixture, |command| {
        command.args(["--json", "--otlp-endpoint", &format!("http://{away}")]);
    });
    assert_eq!((drained.code, &drained.document()["succeeded"]), (0, &json!(1)), "{drained:?}");
    assert!(drained.err.contains("could not export traces"), "{drained:?}");
    let invalid = drain(&fixture, |command| {
        command.args(["--otlp-endpoint", "127.0.0.1:4318"]);
    });
    invalid.fails_with(2, &["--otlp-endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318"]);
}

/// If promtool is installed, it accepts the metrics too.
#[test]
fn promtool_accepts_the_metrics() {
    if Command::new("promtool").arg("--version").output().is_err() {
        return skip("promtool is not installed");
    }
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let (_server, url) = fixture.serve("");
    let text = request(url.strip_prefix("http://").unwrap(), "GET", "/metrics", None, "").text;
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(std::process::Stdio::piped());
    let mut child = promtool.stderr(std::process::Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
