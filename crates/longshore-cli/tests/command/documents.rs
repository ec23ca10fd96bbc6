//! Runs every command of README and of the guides, in the order in which README lists them, in
//! one shell.
//!
//! Blocks marked `sh` are commands, blocks marked `sql` are statements, and in blocks marked
//! `console` the lines after `$` are commands. A comment above a command says if it is expected
//! to fail: `# 404` is the status of a response, `# exits 3` the exit code of a command.
//! `documents.prelude.sh` replaces what the reader does in a second terminal.

use std::path::{Path, PathBuf};
use std::process::Command;

use longshore::JobId;
use serde_json::Value;
use sqlx::Connection;

use crate::fixture::binary;
use crate::missing::skip;
use crate::process::free_port;

const PRELUDE: &str = include_str!("documents.prelude.sh");

const GUIDES_OF_SDKS: [&str; 4] = [
    "docs/guides/python.md",
    "docs/guides/typescript.md",
    "docs/guides/from-celery.md",
    "docs/guides/from-bullmq.md",
];

/// A job for the reader of the runbook: a dead letter.
const BEFORE_PRODUCTION: &str = r#"
DEAD=$(DATABASE_URL=$POSTGRES_URL longshore enqueue webhook_delivery --payload '{"url":"http://127.0.0.1:1/","body":1}' --json)
ID=$(printf '%s' "$DEAD" | jq -r .job_id)
DATABASE_URL=$POSTGRES_URL longshore worker --drain
"#;

#[test]
fn every_command_of_readme_and_guides_runs_in_one_shell() {
    let Ok(server) = std::env::var("LONGSHORE_TEST_DATABASE_URL") else {
        return skip("LONGSHORE_TEST_DATABASE_URL is not set");
    };
    for tool in ["bash", "curl", "jq", "psql", "pg_dump", "python3"] {
        let installed =
            Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
        if !installed {
            return skip(&format!("{tool} is missing"));
        }
    }
    let database = ScratchDatabase::create(server);
    let folder = Folder::create();
    let port = free_port().to_string();
    let script = script(&documents(), &database.url(), &folder.0, &port);
    std::fs::write(folder.0.join("script.sh"), &script).unwrap();

    // What the reader's shell has: the command, and nothing about Longshore.
    let installed = Path::new(env!("CARGO_BIN_EXE_longshore")).parent().unwrap();
    let mut shell = Command::new("bash");
    for (name, _) in binary().get_envs() {
        shell.env_remove(name);
    }
    let ran = shell
        .arg("script.sh")
        .current_dir(&folder.0)
        .env("PATH", format!("{}:{}", installed.display(), std::env::var("PATH").unwrap()))
        .env("FOLDER", &folder.0)
        .env("REPOSITORY", repository())
        .env("POSTGRES_URL", database.url())
        .env("PORT", &port)
        .env("LONGSHORE_METRICS_PORT", "auto")
        .env("LONGSHORE_SHUTDOWN_GRACE", "1s")
        .output()
        .unwrap();
    let failed = std::fs::read_to_string(folder.0.join("failed")).unwrap_or_default();
    let (out, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert_eq!(failed, "", "commands that failed; standard error:\n{errors}\nstandard output:\n{out}");
    assert!(out.ends_with("the end\n"), "the script ended early: {errors}\n{out}");

    let calls = std::fs::read_to_string(folder.0.join("calls")).unwrap();
    let calls: Vec<Call> = calls.split_terminator('\u{1e}').map(Call::read).collect();
    for (method, route) in operations() {
        let covered = calls.iter().any(|call| call.matches(&method, &route));
        assert!(covered, "the guides have no curl for {method} {route}");
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// README, and then the documents that it links to under `Guides`, in that order.
fn documents() -> Vec<(String, String)> {
    let readme = std::fs::read_to_string(repository().join("README.md")).unwrap();
    let guides = readme.split("\n## Guides\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let mut names = vec!["README.md".to_owned()];
    for link in guides.split("](").skip(1) {
        let name = link.split([')', '#']).next().unwrap().to_owned();
        // How to work on Longshore itself is not for its users. The suites of the SDKs run what is in their guides.
        let is_elsewhere = name == "CONTRIBUTING.md" || GUIDES_OF_SDKS.contains(&name.as_str());
        if name.ends_with(".md") && !is_elsewhere && !names.contains(&name) {
            names.push(name);
        }
    }
    assert!(names.len() > 12, "{names:?}");
    let read = |name: String| {
        let text = std::fs::read_to_string(repository().join(&name)).unwrap();
        (name, text)
    };
    names.into_iter().map(read).collect()
}

/// All commands as one script that records every unexpected result.
fn script(documents: &[(String, String)], postgres: &str, folder: &Path, port: &str) -> String {
    let mut script = PRELUDE.to_owned();
    for (name, text) in documents {
        if name == "docs/guides/production.md" {
            script += BEFORE_PRODUCTION;
        }
        for Step { command, expected } in steps(text) {
            // The addresses and folders of the examples, as this test has them.
            let command = command
                .replace("postgres://longshore@db/app", postgres)
                .replace("https://queue.example.com", &format!("http://127.0.0.1:{port}"))
                .replace(":8080", &format!(":{port}"))
                .replace("longshore_…", "longshore_0")
                .replace("/srv/", &format!("{}/srv/", folder.display()))
                .replace(" worker.py", &format!(" {}/examples/python/worker.py", repository().display()));
            let (status, code) = match expected {
                Expected::Success => ("", "0"),
                Expected::Status(status) => (status, "0"),
                Expected::Exit(code) => ("", code),
            };
            script += &format!("EXPECTED={status}\n{command}\n");
            script += &format!("[ $? = {code} ] || fail {}\n", quoted(&format!("{name}: {command}")));
        }
    }
    script += "stop worker\nstop server\necho 'the end'\n";
    script
}

/// A command and the result that its document promises.
struct Step<'a> {
    command: String,
    expected: Expected<'a>,
}

#[derive(Clone, Copy)]
enum Expected<'a> {
    Success,
    Status(&'a str),
    Exit(&'a str),
}

fn steps(document: &str) -> Vec<Step<'_>> {
    let (mut steps, mut block) = (Vec::new(), None);
    let (mut command, mut expected) = (String::new(), Expected::Success);
    for line in document.lines() {
        if let Some(language) = line.strip_prefix("```") {
            if block.take() == Some("sql") {
                let sql = std::mem::take(&mut command);
                let command = format!("psql \"$POSTGRES_URL\" <<'END'\n{sql}END");
                steps.push(Step { command, expected: Expected::Success });
            } else {
                assert_eq!(command, "", "a command has no end");
                block = Some(language).filter(|language| !language.is_empty());
            }
            continue;
        }
        let line = match block {
            Some("sh") => line,
            Some("console") => match line.strip_prefix("$ ") {
                Some(line) => line,
                None => continue,
            },
            Some("sql") => {
                command += &format!("{line}\n");
                continue;
            }
            _ => continue,
        };
        if let Some(comment) = line.strip_prefix("# ") {
            match comment.strip_prefix("exits ") {
                Some(code) => expected = Expected::Exit(code),
                None if comment.parse::<u16>().is_ok() => expected = Expected::Status(comment),
                None => {}
            }
            continue;
        }
        command += &format!("{line}\n");
        if is_complete(&command) {
            let command = std::mem::take(&mut command).trim_end().to_owned();
            // The prelude starts servers in the background by itself.
            let command = match command.strip_suffix(" &") {
                Some(server) if server.starts_with("longshore ") => server.to_owned(),
                _ => command,
            };
            steps.push(Step { command, expected: std::mem::replace(&mut expected, Expected::Success) });
        }
    }
    steps
}

/// Whether a shell would run this, and not wait for another line.
fn is_complete(command: &str) -> bool {
    let parsed = Command::new("bash").args(["-n", "-c", command]).output().unwrap();
    parsed.status.success() && !command.ends_with("\\\n")
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The operations of the API that the guides must show, as method and route.
fn operations() -> Vec<(String, String)> {
    let document = std::fs::read_to_string(repository().join("docs/openapi.json")).unwrap();
    let document: Value = serde_json::from_str(&document).unwrap();
    let mut operations = Vec::new();
    for (route, methods) in document["paths"].as_object().unwrap() {
        // HTML pages.
        if !route.starts_with("/docs") {
            let methods = methods.as_object().unwrap().keys();
            operations.extend(methods.map(|method| (method.clone(), route.clone())));
        }
    }
    operations
}

/// One recorded call of curl.
struct Call {
    args: Vec<String>,
}

impl Call {
    fn read(record: &str) -> Self {
        Call { args: record.split('\u{1f}').map(str::to_owned).collect() }
    }

    fn method(&self) -> &str {
        let named = self.args.iter().position(|word| word == "-X").map(|at| self.args[at + 1].as_str());
        let sends = self.args.iter().any(|word| word == "-d" || word == "--data-binary");
        named.unwrap_or(if sends { "POST" } else { "GET" })
    }

    fn path(&self) -> &str {
        let url = self.args.iter().find_map(|word| word.strip_prefix("http://")).expect("a URL");
        let path = url.find('/').map_or("/", |at| &url[at..]);
        path.split('?').next().unwrap()
    }

    /// Whether this call matches a route like `/jobs/{id}/cancel`.
    fn matches(&self, method: &str, route: &str) -> bool {
        let (path, route): (Vec<_>, Vec<_>) = (self.path().split('/').collect(), route.split('/').collect());
        let fits = |(given, part): (&&str, &&str)| given == part || part.starts_with('{');
        self.method().eq_ignore_ascii_case(method)
            && path.len() == route.len()
            && path.iter().zip(&route).all(fits)
    }
}

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn create() -> Self {
        let folder = std::env::temp_dir().join(format!("longshore-documents-{}", JobId::new()));
        for part in ["srv/pictures", "srv/uploads"] {
            std::fs::create_dir_all(folder.join(part)).unwrap();
        }
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A database of its own, because the documents use the default schema. It is removed at the end.
struct ScratchDatabase {
    server: String,
    name: String,
}

impl ScratchDatabase {
    fn create(server: String) -> Self {
        let database = ScratchDatabase { server, name: format!("documents_{}", JobId::new().0.simple()) };
        database.run(&format!("create database {}", database.name));
        database
    }

    /// The server of the tests may have fsync off.
    fn url(&self) -> String {
        let mut url = url::Url::parse(&self.server).unwrap();
        url.set_path(&self.name);
        url.query_pairs_mut().append_pair("durability", "relaxed");
        url.into()
    }

    fn run(&self, sql: &str) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut connection = sqlx::PgConnection::connect(&self.server).await.unwrap();
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
        });
    }
}

impl Drop for ScratchDatabase {
    fn drop(&mut self) {
        self.run(&format!("drop database if exists {} with (force)", self.name));
    }
}
