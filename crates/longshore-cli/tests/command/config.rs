//! Settings: which source wins, what the configuration file may contain, and how secrets in
//! it are protected.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use longshore::JobId;
use serde_json::{Value, json};

use crate::fixture::{CommandOutput, Fixture, binary, on_every_engine};
use crate::process::{Process, request, until};

on_every_engine!(every_command_runs_with_only_a_file);

/// A working folder that is removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    /// A folder with this `longshore.toml`, readable only by its owner.
    fn with(text: &str) -> Self {
        let folder = Folder(std::env::temp_dir().join(format!("longshore-config-{}", JobId::new())));
        std::fs::create_dir(&folder.0).unwrap();
        folder.write("longshore.toml", text);
        folder
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let file = self.0.join(name);
        std::fs::write(&file, text).unwrap();
        restrict_to_owner(&file);
        file
    }

    /// The binary, run in this folder and without LONGSHORE_CONFIG.
    fn command(&self, line: &str) -> Command {
        let mut command = binary();
        command.current_dir(&self.0).env_remove("LONGSHORE_CONFIG").args(line.split_whitespace());
        command
    }

    fn run(&self, line: &str) -> CommandOutput {
        CommandOutput::of(self.command(line).output().unwrap())
    }

    /// The output of `config show`, by key.
    fn shown(&self, line: &str) -> Value {
        by_key(&self.run(&format!("config show --json {line}")).json())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn by_key(shown: &Value) -> Value {
    let settings = shown["settings"].as_array().unwrap().iter();
    settings.map(|setting| (setting["key"].as_str().unwrap().to_owned(), setting.clone())).collect()
}

#[cfg(unix)]
fn restrict_to_owner(file: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600)).unwrap();
}

#[cfg(not(unix))]
fn restrict_to_owner(_: &Path) {}

#[track_caller]
fn assert_setting(setting: &Value, value: impl Into<Value>, from: &str, source: &str) {
    let expected = (value.into(), from, source);
    let found =
        (setting["value"].clone(), setting["from"].as_str().unwrap(), setting["source"].as_str().unwrap());
    assert_eq!(found, expected, "{setting}");
}

// ---- precedence ----------------------------------------------------------------

#[test]
fn a_flag_beats_a_variable_which_beats_the_file_which_beats_the_default() {
    let folder = Folder::with("[worker]\nconcurrency = 5\npoll-interval = \"6s\"\nsweep-interval = \"7s\"\n");
    let output = folder
        .command("config show --json worker --concurrency 1")
        .env("WORKER_CONCURRENCY", "2")
        .env("LONGSHORE_POLL_INTERVAL", "3s")
        .output()
        .unwrap();
    let shown = by_key(&CommandOutput::of(output).json());
    assert_setting(&shown["worker.concurrency"], "1", "flag", "--concurrency");
    assert_setting(&shown["worker.poll-interval"], "3s", "variable", "$LONGSHORE_POLL_INTERVAL");
    assert_setting(&shown["worker.sweep-interval"], "7s", "file", "longshore.toml:4");
    assert_setting(&shown["worker.recovery-delay"], "5s", "default", "default");
}

#[test]
fn lists_switches_and_numbers_are_read_from_the_file() {
    let folder = Folder::with(
        "worker.queues = ['mail', 'images']\n[server]\nmax-connections = 0x10\nwith-worker = true\n\
         host = 'a.example,b.example'\npublic = []\n[outbound]\nallow-http = true\n",
    );
    let shown = folder.shown("");
    assert_setting(&shown["worker.queues"], json!(["mail", "images"]), "file", "longshore.toml:1");
    assert_setting(&shown["server.max-connections"], "16", "file", "longshore.toml:3");
    assert_setting(&shown["server.with-worker"], true, "file", "longshore.toml:4");
    assert_setting(&shown["server.host"], json!(["a.example", "b.example"]), "file", "longshore.toml:5");
    assert_setting(&shown["server.public"], json!([]), "file", "longshore.toml:6");
    assert_setting(&shown["outbound.allow-http"], true, "file", "longshore.toml:8");
    assert_setting(&shown["worker.simulate"], false, "default", "default");

    let off = folder.command("config show --json").env("LONGSHORE_WITH_WORKER", "false").output().unwrap();
    let shown = by_key(&CommandOutput::of(off).json());
    assert_setting(&shown["server.with-worker"], false, "variable", "$LONGSHORE_WITH_WORKER");
}

#[test]
fn the_file_is_the_one_named_or_the_one_in_the_folder_or_none() {
    let folder = Folder::with("worker.concurrency = 5\n");
    folder.write("other.toml", "worker.concurrency = 6\n");
    assert_setting(&folder.shown("")["worker.concurrency"], "5", "file", "longshore.toml:1");
    assert_setting(&folder.shown("--config other.toml")["worker.concurrency"], "6", "file", "other.toml:1");
    let with_variable = |name: &str| {
        let output = folder.command("config show --json").env("LONGSHORE_CONFIG", name).output().unwrap();
        by_key(&CommandOutput::of(output).json())
    };
    assert_setting(&with_variable("other.toml")["worker.concurrency"], "6", "file", "other.toml:1");
    assert_setting(&with_variable("")["worker.concurrency"], "4", "default", "default");
    let expected = ["missing.toml", "does not exist", "--config", "LONGSHORE_CONFIG="];
    folder.run("--config missing.toml jobs list").fails_with(2, &expected);
}

#[test]
fn a_drain_serves_no_metrics_even_if_the_file_has_an_address() {
    let folder = Folder::with("worker.metrics-addr = '127.0.0.1:9'\n");
    assert_setting(&folder.shown("worker")["worker.metrics-addr"], "127.0.0.1:9", "file", "longshore.toml:1");
    assert_setting(&folder.shown("worker --drain")["worker.metrics-addr"], "off", "default", "default");
}

#[test]
fn each_command_shows_its_own_settings() {
    let folder = Folder::with("");
    let keys = |line: &str| folder.shown(line).as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let (all, worker, serve, dev) = (keys(""), keys("worker"), keys("serve"), keys("dev"));
    let has = |keys: &[String], key: &str| keys.iter().any(|known| known == key);
    assert!(has(&worker, "worker.metrics-addr") && !has(&worker, "server.bind"), "{worker:?}");
    assert!(has(&serve, "server.bind") && has(&serve, "worker.queues"), "{serve:?}");
    assert!(has(&dev, "dev.data-dir") && !has(&dev, "worker.concurrency"), "{dev:?}");
    assert!([worker, serve, dev].iter().flatten().all(|key| has(&all, key)), "{all:?}");
    assert_setting(&folder.shown("dev")["worker.shutdown-grace"], "1s", "default", "default");
    assert_eq!(folder.shown("dev")["worker.queues"]["value"], serde_json::json!(["*"]));
    assert_setting(&folder.shown("")["worker.shutdown-grace"], "30s", "default", "default");
    let table = folder.run("config show").ok().out;
    assert!(table.starts_with("SETTING"), "{table}");
}

// ---- secrets -------------------------------------------------------------------

#[test]
fn secrets_are_masked_whatever_their_source() {
    let folder = Folder::with(
        "[database]\nurl = 'postgres://ada:s3cret@db/jobs'\n[mail]\nsmtp-url = 'smtps://bob:s3cret@mail'\n\
         [webhooks]\nsecret = ['whsec_s3cret', 'whsec_older_s3cret']\n",
    );
    for line in ["config show", "config show worker", "config show --json", "worker --help", "--help"] {
        let output = folder.run(line).ok();
        assert!(!format!("{output:?}").contains("s3cret"), "{line}: {output:?}");
    }
    let shown = folder.shown("");
    assert_setting(&shown["database.url"], "postgres://ada:***@db/jobs", "file", "longshore.toml:2");
    assert_setting(&shown["mail.smtp-url"], "smtps://bob:***@mail", "file", "longshore.toml:4");
    assert_setting(&shown["webhooks.secret"], json!(["***", "***"]), "file", "longshore.toml:6");
    let flag = folder.shown("--database-url postgres://eve:s3cret@other/jobs");
    assert_setting(&flag["database.url"], "postgres://eve:***@other/jobs", "flag", "--database-url");
}

#[test]
fn a_password_is_masked_whatever_characters_it_contains() {
    for hostile in ["s3'xyz", "s3 xyz", "s3\"xyz", "s3`xyz", "s3@xyz", "s3/xyz", "s3?xyz", "s3#xyz"] {
        let folder = Folder::with(&format!("[mail]\nsmtp-url = '''smtps://me:{hostile}@mail'''\n"));
        for line in ["config show", "config show --json"] {
            let url = format!("postgres://ada:{hostile}@db/jobs?Password={hostile}");
            let output =
                CommandOutput::of(folder.command(line).env("DATABASE_URL", url).output().unwrap()).ok();
            assert!(!output.out.contains("xyz") && !output.out.contains("s3"), "{hostile}: {output:?}");
            assert!(
                output.out.contains("postgres://") && output.out.contains("smtps://"),
                "{hostile}: {output:?}"
            );
        }
    }
}

#[cfg(unix)]
#[test]
fn a_file_with_a_secret_that_other_users_can_read_causes_a_warning() {
    use std::os::unix::fs::PermissionsExt;
    let open_to = |folder: &Folder, mode: u32| {
        let file = folder.0.join("longshore.toml");
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
        let output = folder.run("config check");
        assert_eq!(output.code, 0, "{output:?}");
        output.err
    };
    let secret = Folder::with("[database]\nurl = 'postgres://ada:s3cret@db/jobs'\n");
    assert_eq!(open_to(&secret, 0o600), "");
    for mode in [0o640, 0o604, 0o644] {
        let warned = open_to(&secret, mode);
        assert!(warned.contains("longshore.toml:2") && warned.contains("chmod 600"), "{mode:o}: {warned}");
        assert!(!warned.contains("s3cret"), "{warned}");
    }
    let harmless = Folder::with("[database]\nurl = 'postgres://ada@db/jobs'\n[log]\nfilter = 'debug'\n");
    assert_eq!(open_to(&harmless, 0o644), "", "it contains no password");
}

// ---- invalid files -------------------------------------------------------------

#[test]
fn errors_name_the_file_the_line_the_key_and_the_remedy() {
    let cases: [(&str, &[&str]); 13] = [
        ("[worker]\nconcurency = 4", &["longshore.toml:2", "`worker.concurency`", "`worker.concurrency`"]),
        ("\n[serve]\nbind = ''", &["longshore.toml:3", "`serve.bind`", "`server.bind`"]),
        ("[wrker]", &["longshore.toml:1", "`wrker`", "`worker."]),
        ("concurrency = 4", &["longshore.toml:1", "`worker.concurrency`"]),
        ("[worker]\n\nqueues = 1.5", &["longshore.toml:3", "`worker.queues`", "write a list"]),
        ("worker.queues = [true]", &["longshore.toml:1", "`worker.queues`", "write a list"]),
        ("worker.concurrency = [4]", &["`worker.concurrency`", "is a list", "whole number"]),
        ("worker.simulate = 'no'", &["`worker.simulate`", "is a string", "true or false"]),
        ("[worker.queues]\na = 1", &["`worker.queues`", "is a table"]),
        ("# Why\nworker.poll-interval = 500", &["longshore.toml:2", "`worker.poll-interval`", "500ms"]),
        ("server.auth = 'maybe'", &["longshore.toml:1", "`server.auth`", "off, tokens"]),
        ("[worker]\nconcurrency =", &["longshore.toml:2", "not TOML"]),
        ("[worker]\nconcurrency = 4\nconcurrency = 5", &["longshore.toml:3", "not TOML"]),
    ];
    for (text, expected) in cases {
        Folder::with(text).run("config check").fails_with(2, expected);
    }
}

#[test]
fn a_command_checks_all_keys_of_the_file_but_only_its_own_values() {
    let folder = Folder::with("worker.concurrency = 'many'\n");
    let url = format!("sqlite:{}", folder.0.join("jobs.db").display());
    folder.run(&format!("migrate --database-url {url}")).ok();
    folder.run(&format!("worker --database-url {url}")).fails_with(2, &["longshore.toml:1", "'many'"]);
    let folder = Folder::with("worker.many = 4\n");
    folder.run(&format!("migrate --database-url {url}")).fails_with(2, &["longshore.toml:1"]);
}

#[test]
fn help_works_with_an_invalid_file() {
    let folder = Folder::with("nonsense");
    for line in ["--help", "worker --help", "help worker", "--version"] {
        folder.run(line).ok();
    }
    folder.run("worker --concurrency many").fails_with(2, &["--concurrency"]);
}

#[test]
fn an_error_in_the_file_shows_no_secret() {
    let folder = Folder::with("[database]\nurl = 'postgres://ada:s3cret@db/jobs' x\n");
    let output = folder.run("jobs list").fails_with(2, &["longshore.toml:2"]);
    assert!(!output.err.contains("s3cret"), "{output:?}");
}

// ---- the file in use -----------------------------------------------------------

fn every_command_runs_with_only_a_file(fixture: &Fixture) {
    let folder = Folder::with(&format!(
        "[database]\nurl = '{}'\n[server]\nbind = '127.0.0.1:0'\nwith-worker = true\nrate-limit = 1\n",
        fixture.url
    ));
    folder.run("migrate").ok();
    let id = folder.run("enqueue greet --json").json()["job_id"].as_str().unwrap().to_owned();
    folder.run(&format!("jobs show {id}")).ok();
    let mut server = Process::start(&mut folder.command("serve --json"));
    let addr = server.address();
    let statuses: Vec<u16> = (0..50).map(|_| request(&addr, "GET", "/jobs", None, "").status).collect();
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
}

#[test]
fn a_full_queue_accepts_no_more_jobs() {
    let fixture = Fixture::sqlite();
    let folder = Folder::with("");
    let line = "serve --migrate --json --bind 127.0.0.1:0 --allow-unknown-kinds --queue-depth-limit 1";
    let mut server = Process::start(folder.command(line).env("DATABASE_URL", &fixture.url));
    let addr = server.address();
    let enqueue = || request(&addr, "POST", "/jobs", None, r#"{"kind":"greet","payload":1}"#).status;
    assert_eq!(enqueue(), 201);
    // The server looks up the depth once a second.
    until(Duration::from_secs(60), "the queue is full", || enqueue() == 429);
}

// ---- the example file ----------------------------------------------------------

/// The shipped file, which lists every setting.
fn example() -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/longshore.toml");
    std::fs::read_to_string(file).unwrap()
}

#[test]
fn the_example_file_changes_nothing() {
    let (with, without) = (Folder::with(&example()), Folder::with(""));
    assert_eq!(with.shown(""), without.shown(""));
}

#[test]
fn the_example_file_lists_every_setting_with_its_default() {
    let all: Vec<String> = example()
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.starts_with(' ') => setting.to_owned(),
            _ => line.to_owned(),
        })
        .collect();
    let (with, without) = (Folder::with(&all.join("\n")), Folder::with(""));
    let defaults = without.shown("");
    for (key, setting) in with.shown("").as_object().unwrap() {
        assert_eq!(setting["from"], "file", "the example lacks `{key}`");
        let default = &defaults[key]["value"];
        let has_default = !default.is_null() && *default != json!([]);
        assert!(!has_default || setting["value"] == *default, "{setting}: the default is {default}");
    }
    with.run("config check").ok();
}

#[test]
fn errors_are_json_if_the_file_sets_a_json_log() {
    let folder = Folder::with("[log]\nformat = \"json\"\n");
    folder.write("other.toml", "log.format = 'json'\n[worker]\nconcurency = 3\n");
    folder.write("broken.toml", "[log]\nformat = 'json'\n[worker]\nconcurrency = = 3\n");
    folder.write("pretty.toml", "log.format = 'pretty'\n");
    let is_json = |output: &CommandOutput| {
        assert_eq!((output.code, output.out.as_str()), (2, ""), "{output:?}");
        let lines: Vec<Option<Value>> =
            output.err.lines().map(|line| serde_json::from_str(line).ok()).collect();
        assert!(lines.iter().all(Option::is_some) || lines.iter().all(Option::is_none), "{output:?}");
        lines.iter().flatten().any(|line| line["level"] == "ERROR")
    };
    for (line, expected) in [
        ("worker --concurency 3", true),
        ("worker --config other.toml", true),
        ("serve --nonsense --config=other.toml", true),
        ("dev --config broken.toml", true),
        ("worker --concurency 3 --config pretty.toml", false),
        ("worker --concurency 3 --config missing.toml", false),
        ("worker --concurency 3 --config=", false),
        // A flag is stronger than the file.
        ("worker --concurency 3 --log-format pretty", false),
        // Commands without a log are not affected.
        ("jobs list --nonsense", false),
        ("config show worker --nonsense", false),
    ] {
        assert_eq!(is_json(&folder.run(line)), expected, "{line}");
    }
    for (variable, value, expected) in [
        ("LONGSHORE_CONFIG", "other.toml", true),
        ("LONGSHORE_CONFIG", "pretty.toml", false),
        ("LONGSHORE_CONFIG", "", false),
        ("RUST_LOG_FORMAT", "pretty", false),
    ] {
        let output = folder.command("worker --nonsense").env(variable, value).output().unwrap();
        assert_eq!(is_json(&CommandOutput::of(output)), expected, "{variable}={value}");
    }
}
