//! Checks the files in `packaging/` against the program: the program exports the metrics
//! that they use and reads the variables that they set, and their timeouts are longer than the program's.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use regex::Regex;
use serde_json::Value;
use yaml_rust2::{Yaml, YamlLoader};

use crate::fixture::{CommandOutput, Fixture, binary, on_every_engine};
use crate::missing::skip;
use crate::process::{Process, request, until};

on_every_engine!(every_metric_of_the_dashboard_and_the_alerts_is_exported);

/// Enough for a very busy machine.
const MAX_WAIT: Duration = Duration::from_secs(60);

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn text(path: &str) -> String {
    std::fs::read_to_string(file(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(path: &str) -> Yaml {
    let documents = YamlLoader::load_from_str(&text(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let [document] = documents.try_into().unwrap_or_else(|_| panic!("{path}: expected one document"));
    document
}

fn alerts() -> Vec<Yaml> {
    let groups = yaml("packaging/prometheus/alerts.yml")["groups"].as_vec().unwrap().clone();
    groups.iter().flat_map(|group| group["rules"].as_vec().unwrap().clone()).collect()
}

fn dashboard() -> Value {
    serde_json::from_str(&text("packaging/grafana/dashboards/longshore.json")).unwrap()
}

// ---- metrics -------------------------------------------------------------------

/// The names of the metrics in a Prometheus expression: the words that remain without
/// labels, durations and functions.
fn metrics_in(expression: &str) -> BTreeSet<String> {
    let ignored = Regex::new(r#"\{[^}]*\}|\[[^\]]*\]|\bby\s*\([^)]*\)|\boffset\s+\w+"#).unwrap();
    let rest = ignored.replace_all(expression, " ");
    let word = Regex::new(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\(?)").unwrap();
    let words = word.captures_iter(&rest).filter(|word| word[2].is_empty());
    words
        .map(|word| word[1].to_owned())
        .filter(|name| !["or", "and", "unless"].contains(&name.as_str()))
        .collect()
}

/// The metric of a series: a histogram has three series with suffixes.
fn without_suffix(name: &str) -> String {
    let suffix = ["_bucket", "_sum", "_count"].into_iter().find_map(|suffix| name.strip_suffix(suffix));
    suffix.unwrap_or(name).to_owned()
}

fn metrics_used() -> BTreeSet<String> {
    let mut expressions: Vec<String> =
        alerts().iter().map(|alert| alert["expr"].as_str().unwrap().to_owned()).collect();
    for panel in dashboard()["panels"].as_array().unwrap() {
        let targets = panel["targets"].as_array().unwrap();
        expressions.extend(targets.iter().map(|target| target["expr"].as_str().unwrap().to_owned()));
    }
    for variable in dashboard()["templating"]["list"].as_array().unwrap() {
        let query = variable["query"]["query"].as_str().unwrap();
        let values_of = query.strip_prefix("label_values(").and_then(|rest| rest.split(',').next());
        expressions.push(values_of.unwrap().to_owned());
    }
    expressions
        .iter()
        .flat_map(|expression| metrics_in(expression))
        .map(|name| without_suffix(&name))
        .collect()
}

#[test]
fn the_metrics_of_an_expression_are_found() {
    let metrics = metrics_in(
        r#"sum by (le, kind) (rate(a_total{b="c",d=~"e|f"}[5m])) / (max(g_seconds offset 1h) or vector(0)) > 2"#,
    );
    assert_eq!(metrics, ["a_total", "g_seconds"].map(str::to_owned).into());
}

fn every_metric_of_the_dashboard_and_the_alerts_is_exported(fixture: &Fixture) {
    let mut used = metrics_used();
    assert!(used.remove("up"), "Prometheus itself provides `up`");
    assert!(used.len() > 10, "{used:?}");
    if fixture.file().is_some() {
        // SQLite has no connection pool.
        used.retain(|name| !name.starts_with("longshore_pool_"));
    }
    // No worker claims this job, so there is always a queue depth and an oldest job.
    fixture.migrated().enqueue("greet --queue unclaimed");
    let mut command = binary();
    command.env("DATABASE_URL", &fixture.url);
    let mut server = Process::start(command.args("serve --with-worker --bind 127.0.0.1:0 --json".split(' ')));
    let addr = server.address();
    let job = r#"{"kind":"summarize_text","payload":{"text":"Ships come. Ships go."}}"#;
    assert_eq!(request(&addr, "POST", "/jobs", None, job).status, 201);
    let missing = || {
        let exported = request(&addr, "GET", "/metrics", None, "").text;
        let lines = exported.lines().filter(|line| !line.starts_with('#'));
        let names: BTreeSet<String> =
            lines.filter_map(|line| line.split(['{', ' ']).next()).map(without_suffix).collect();
        used.difference(&names).cloned().collect::<Vec<_>>()
    };
    until(MAX_WAIT, &format!("all of {used:?} are exported"), || missing().is_empty());
}

#[test]
fn the_dashboard_uses_the_provisioned_data_source() {
    let provisioned = yaml("packaging/grafana/provisioning/datasources/prometheus.yaml");
    let uid = provisioned["datasources"][0]["uid"].as_str().unwrap();
    for panel in dashboard()["panels"].as_array().unwrap() {
        assert_eq!(panel["datasource"]["uid"], uid, "{}", panel["title"]);
        assert!(!panel["description"].as_str().unwrap().is_empty(), "{}", panel["title"]);
    }
    let provider = yaml("packaging/grafana/provisioning/dashboards/longshore.yaml");
    let folder = provider["providers"][0]["options"]["path"].as_str().unwrap();
    let compose = text("packaging/compose/compose.yaml");
    assert!(compose.contains(&format!("../grafana/dashboards:{folder}:ro")), "{folder} is mounted");
}

#[test]
fn every_alert_has_a_summary_and_a_paragraph_in_the_guide() {
    let guide = text("docs/guides/production.md");
    for alert in alerts() {
        let name = alert["alert"].as_str().unwrap();
        assert!(!alert["annotations"]["summary"].as_str().unwrap().is_empty(), "{name}");
        assert!(["warning", "critical"].contains(&alert["labels"]["severity"].as_str().unwrap()), "{name}");
        assert!(guide.contains(&format!("**{name}**")), "docs/guides/production.md does not describe {name}");
    }
}

// ---- settings ------------------------------------------------------------------

/// All settings with their keys, variables and values.
fn settings() -> Value {
    CommandOutput::of(binary().args(["config", "show", "--json"]).output().unwrap()).json()["settings"]
        .clone()
}

#[test]
fn every_variable_in_the_files_is_a_setting() {
    let settings = settings();
    let known: BTreeSet<&str> =
        settings.as_array().unwrap().iter().map(|setting| setting["variable"].as_str().unwrap()).collect();
    let mut used = BTreeSet::new();
    for (path, pattern) in [
        ("Dockerfile", r"(?m)^(?:ENV| {3}) ([A-Z_]+)="),
        ("packaging/compose/compose.yaml", r"(?m)^ +([A-Z_]+):"),
        ("packaging/systemd/longshore-server.service", r"(?m)^Environment=([A-Z_]+)="),
        ("packaging/systemd/longshore-worker@.service", r"(?m)^Environment=([A-Z_]+)="),
    ] {
        let text = text(path);
        let variables: Vec<String> =
            Regex::new(pattern).unwrap().captures_iter(&text).map(|line| line[1].to_owned()).collect();
        assert!(!variables.is_empty(), "{path} sets no variable");
        used.extend(variables);
    }
    used.retain(|name| !name.starts_with("POSTGRES_") && !name.starts_with("GF_"));
    for name in &used {
        assert!(known.contains(name.as_str()), "{name} is not a setting of longshore");
    }
    let expected =
        ["DATABASE_URL", "API_BIND_ADDR", "WORKER_CONCURRENCY", "WORKER_METRICS_BIND_ADDR", "RUST_LOG"];
    assert!(expected.iter().all(|name| used.contains(*name)), "{used:?}");
}

#[test]
fn stop_timeouts_are_longer_than_the_shutdown_grace() {
    let seconds = |text: &str| text.strip_suffix('s').unwrap().parse::<u64>().unwrap();
    let settings = settings();
    let settings = settings.as_array().unwrap();
    let grace = settings.iter().find(|setting| setting["key"] == "worker.shutdown-grace").unwrap();
    let grace = seconds(grace["value"].as_str().unwrap());
    for unit in ["longshore-server.service", "longshore-worker@.service"] {
        let text = text(&format!("packaging/systemd/{unit}"));
        let timeout = text.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).unwrap();
        assert!(seconds(timeout) > grace, "{unit}: {timeout}");
        assert!(
            text.contains("\nKillSignal=SIGTERM\n") && text.contains("\nNoNewPrivileges=yes\n"),
            "{unit}"
        );
    }
    let compose = yaml("packaging/compose/compose.yaml");
    assert!(seconds(compose["x-longshore"]["stop_grace_period"].as_str().unwrap()) > grace);
}

#[test]
fn the_services_start_in_order() {
    let services = yaml("packaging/compose/compose.yaml")["services"].clone();
    assert_eq!(services["migrate"]["depends_on"]["database"]["condition"].as_str(), Some("service_healthy"));
    for name in ["server", "worker"] {
        let condition = &services[name]["depends_on"]["migrate"]["condition"];
        assert_eq!(condition.as_str(), Some("service_completed_successfully"), "{name}");
    }
    assert_eq!(services["worker"]["deploy"]["replicas"].as_i64(), Some(2));
    assert_eq!(services["server"]["environment"]["LONGSHORE_AUTH"].as_str(), Some("tokens"));
    // Prometheus and browsers have no token.
    assert_eq!(services["server"]["environment"]["LONGSHORE_PUBLIC"].as_str(), Some("metrics,docs"));
}

// ---- validation by the tools that read the files --------------------------------

/// Runs a validation tool if it is installed, and returns its output if it finds a
/// problem in our files. Messages about other files are ignored.
fn problems_found_by(tool: &str, arguments: &[&str]) -> Option<String> {
    match Command::new(tool).args(arguments).output() {
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let valid = output.status.success() && !stderr.contains("longshore");
            (!valid).then(|| format!("{output:?}"))
        }
        Err(error) => {
            skip(&format!("{tool} is not installed: {error}"));
            None
        }
    }
}

#[test]
fn promtool_accepts_the_prometheus_files() {
    let config = file("packaging/prometheus/prometheus.yml");
    // This also checks the rule files that the configuration names.
    assert_eq!(problems_found_by("promtool", &["check", "config", config.to_str().unwrap()]), None);
    let cases = file("packaging/prometheus/alerts.test.yml");
    assert_eq!(problems_found_by("promtool", &["test", "rules", cases.to_str().unwrap()]), None);
}

#[test]
fn systemd_accepts_the_units() {
    let folder = std::env::temp_dir().join(format!("longshore-units-{}", longshore::JobId::new()));
    std::fs::create_dir(&folder).unwrap();
    for unit in ["longshore-server.service", "longshore-worker@.service"] {
        let text = text(&format!("packaging/systemd/{unit}"));
        let text = text.replace("/usr/bin/longshore", env!("CARGO_BIN_EXE_longshore"));
        std::fs::write(folder.join(unit), text).unwrap();
    }
    let [server, worker] =
        ["longshore-server.service", "longshore-worker@1.service"].map(|unit| folder.join(unit));
    std::fs::copy(folder.join("longshore-worker@.service"), &worker).unwrap();
    let problems =
        problems_found_by("systemd-analyze", &["verify", server.to_str().unwrap(), worker.to_str().unwrap()]);
    let _ = std::fs::remove_dir_all(&folder);
    assert_eq!(problems, None);
}
