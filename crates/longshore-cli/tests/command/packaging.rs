//! What is shipped in `packaging/` holds against the program: metrics that it
//! shows, variables that it reads, times that fit its own.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use regex::Regex;
use serde_json::Value;
use yaml_rust2::{Yaml, YamlLoader};

use crate::fixture::{CommandOutput, Fixture, binary, on_every_engine};
use crate::process::{Process, request, until};

on_every_engine!(every_metric_of_the_dashboard_and_the_alerts_is_shown);

/// However busy the machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn text(path: &str) -> String {
    std::fs::read_to_string(file(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(path: &str) -> Yaml {
    let documents = YamlLoader::load_from_str(&text(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let [document] = documents.try_into().unwrap_or_else(|_| panic!("{path}: one document"));
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

/// The metrics that an expression of Prometheus names: what is left without
/// labels, times and functions.
fn metrics_in(expression: &str) -> BTreeSet<String> {
    let aside = Regex::new(r#"\{[^}]*\}|\[[^\]]*\]|\bby\s*\([^)]*\)|\boffset\s+\w+"#).unwrap();
    let rest = aside.replace_all(expression, " ");
    let word = Regex::new(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\(?)").unwrap();
    let words = word.captures_iter(&rest).filter(|found| found[2].is_empty());
    words
        .map(|found| found[1].to_owned())
        .filter(|name| !["or", "and", "unless"].contains(&name.as_str()))
        .collect()
}

/// A histogram is shown as three series.
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
    let found = metrics_in(
        r#"sum by (le, kind) (rate(a_total{b="c",d=~"e|f"}[5m])) / (max(g_seconds offset 1h) or vector(0)) > 2"#,
    );
    assert_eq!(found, ["a_total", "g_seconds"].map(str::to_owned).into());
}

fn every_metric_of_the_dashboard_and_the_alerts_is_shown(bench: &Fixture) {
    let mut used = metrics_used();
    assert!(used.remove("up"), "Prometheus's own");
    assert!(used.len() > 10, "{used:?}");
    if bench.file().is_some() {
        // SQLite has no pool.
        used.retain(|name| !name.starts_with("longshore_pool_"));
    }
    // Nobody claims it, so a queue has a depth and an oldest job from the start.
    bench.migrated().enqueue("greet --queue nobodys");
    let mut command = binary();
    command.env("DATABASE_URL", &bench.url);
    let mut server = Process::start(command.args("serve --with-worker --bind 127.0.0.1:0 --json".split(' ')));
    let addr = server.address();
    let job = r#"{"kind":"summarize_text","payload":{"text":"Ships come. Ships go."}}"#;
    assert_eq!(request(&addr, "POST", "/jobs", None, job).status, 201);
    let missing = || {
        let shown = request(&addr, "GET", "/metrics", None, "").text;
        let lines = shown.lines().filter(|line| !line.starts_with('#'));
        let names: BTreeSet<String> =
            lines.filter_map(|line| line.split(['{', ' ']).next()).map(without_suffix).collect();
        used.difference(&names).cloned().collect::<Vec<_>>()
    };
    until(PATIENCE, &format!("all of {used:?} are shown"), || missing().is_empty());
}

#[test]
fn the_dashboard_finds_its_source() {
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
fn every_alert_says_what_happened_and_the_guide_what_to_do() {
    let guide = text("docs/guides/production.md");
    for alert in alerts() {
        let name = alert["alert"].as_str().unwrap();
        assert!(!alert["annotations"]["summary"].as_str().unwrap().is_empty(), "{name}");
        assert!(["warning", "critical"].contains(&alert["labels"]["severity"].as_str().unwrap()), "{name}");
        assert!(guide.contains(&format!("**{name}**")), "docs/guides/production.md has nothing on {name}");
    }
}

// ---- settings ------------------------------------------------------------------

/// The variables of every setting, and the defaults by key.
fn settings() -> Value {
    CommandOutput::of(binary().args(["config", "show", "--json"]).output().unwrap()).json()["settings"]
        .clone()
}

#[test]
fn every_variable_that_is_set_is_a_setting() {
    let settings = settings();
    let known: BTreeSet<&str> =
        settings.as_array().unwrap().iter().map(|setting| setting["variable"].as_str().unwrap()).collect();
    let mut set = BTreeSet::new();
    for (path, pattern) in [
        ("Dockerfile", r"(?m)^(?:ENV| {3}) ([A-Z_]+)="),
        ("packaging/compose/compose.yaml", r"(?m)^ +([A-Z_]+):"),
        ("packaging/systemd/longshore-server.service", r"(?m)^Environment=([A-Z_]+)="),
        ("packaging/systemd/longshore-worker@.service", r"(?m)^Environment=([A-Z_]+)="),
    ] {
        let text = text(path);
        let found: Vec<String> =
            Regex::new(pattern).unwrap().captures_iter(&text).map(|found| found[1].to_owned()).collect();
        assert!(!found.is_empty(), "{path} sets something");
        set.extend(found);
    }
    set.retain(|name| !name.starts_with("POSTGRES_") && !name.starts_with("GF_"));
    for name in &set {
        assert!(known.contains(name.as_str()), "{name} is no setting of longshore");
    }
    let promised =
        ["DATABASE_URL", "API_BIND_ADDR", "WORKER_CONCURRENCY", "WORKER_METRICS_BIND_ADDR", "RUST_LOG"];
    assert!(promised.iter().all(|name| set.contains(*name)), "{set:?}");
}

#[test]
fn whoever_stops_a_process_waits_longer_than_its_jobs_may_go_on() {
    let seconds = |text: &str| text.strip_suffix('s').unwrap().parse::<u64>().unwrap();
    let settings = settings();
    let settings = settings.as_array().unwrap();
    let grace = settings.iter().find(|setting| setting["key"] == "worker.shutdown-grace").unwrap();
    let grace = seconds(grace["value"].as_str().unwrap());
    for unit in ["longshore-server.service", "longshore-worker@.service"] {
        let text = text(&format!("packaging/systemd/{unit}"));
        let patience = text.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).unwrap();
        assert!(seconds(patience) > grace, "{unit}: {patience}");
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
        let after = &services[name]["depends_on"]["migrate"]["condition"];
        assert_eq!(after.as_str(), Some("service_completed_successfully"), "{name}");
    }
    assert_eq!(services["worker"]["deploy"]["replicas"].as_i64(), Some(2));
    assert_eq!(services["server"]["environment"]["LONGSHORE_AUTH"].as_str(), Some("tokens"));
}

// ---- as their readers read them ------------------------------------------------

/// Runs a tool that may not be installed; what it said if it was not content
/// with our files. What it says of others' is not for us.
fn complaint(tool: &str, arguments: &[&str]) -> Option<String> {
    match Command::new(tool).args(arguments).output() {
        Ok(said) => {
            let told = String::from_utf8_lossy(&said.stderr);
            let content = said.status.success() && !told.contains("longshore");
            (!content).then(|| format!("{said:?}"))
        }
        Err(error) => {
            eprintln!("skipped: {tool} is not installed ({error})");
            None
        }
    }
}

#[test]
fn prometheus_understands_its_files() {
    let config = file("packaging/prometheus/prometheus.yml");
    // It reads the rules that the configuration names, too.
    assert_eq!(complaint("promtool", &["check", "config", config.to_str().unwrap()]), None);
    let cases = file("packaging/prometheus/alerts.test.yml");
    assert_eq!(complaint("promtool", &["test", "rules", cases.to_str().unwrap()]), None);
}

#[test]
fn systemd_understands_the_units() {
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
    let told = complaint("systemd-analyze", &["verify", server.to_str().unwrap(), worker.to_str().unwrap()]);
    let _ = std::fs::remove_dir_all(&folder);
    assert_eq!(told, None);
}
