//! Runs every command in the guides to the API and to the command.
//!
//! The blocks marked `sh` run in order, in one shell. A comment above a command says if it is
//! expected to fail: `# 404` is the status of a response, `# exits 3` the exit code of a
//! command.

use std::path::Path;
use std::process::Command;

use longshore::JobId;

use crate::fixture::binary;
use crate::process::{Process, request};

/// Runs before the guide's commands: a wrapper that records each curl call and its status.
const PRELUDE: &str = r#"
set -u
curl() {
  # The event stream never ends by itself; stopping it here is not an error.
  case "$*" in */events) limit=2 ;; *) limit=60 ;; esac
  code=$(command curl -sS --max-time $limit --noproxy '*' -o "$FOLDER/body" -w '%{http_code}' "$@" 2> "$FOLDER/errors")
  [ $limit = 2 ] || cat "$FOLDER/errors" >&2
  { printf '%s\037%s' "$EXPECTED" "$code"; printf '\037%s' "$@"; printf '\036'; } >> "$FOLDER/calls"
  cat "$FOLDER/body"
  : > "$FOLDER/body"
}
"#;

/// One recorded call of curl.
struct Call {
    expected: String,
    code: String,
    args: Vec<String>,
}

impl Call {
    fn read(record: &str) -> Self {
        let mut parts = record.split('\u{1f}').map(str::to_owned);
        let (expected, code) = (parts.next().unwrap(), parts.next().unwrap());
        Call { expected, code, args: parts.collect() }
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

/// The guide's commands as one script.
fn script(guide: &str, addr: &str) -> String {
    let (mut script, mut expected) = (PRELUDE.to_owned(), String::new());
    let (mut inside, mut quoted, mut continues) = (false, false, false);
    for line in guide.lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            _ if !inside => {}
            _ => {
                let status = line.strip_prefix("# ").filter(|status| status.parse::<u16>().is_ok());
                if let Some(status) = status {
                    status.clone_into(&mut expected);
                }
                if !continues && line.contains("curl ") {
                    script += &format!("EXPECTED={}\n", std::mem::take(&mut expected));
                }
                script += line;
                script.push('\n');
                quoted ^= line.matches('\'').count() % 2 == 1;
                continues = quoted || line.ends_with('\\');
            }
        }
    }
    script.replace("127.0.0.1:8080", addr)
}

#[test]
fn every_command_in_the_api_guide_works_and_every_endpoint_is_covered() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides/api.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    for tool in ["bash", "curl", "jq"] {
        let installed =
            Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
        assert!(installed, "{tool} is missing; install it (Debian: apt-get install {tool})");
    }
    let folder = std::env::temp_dir().join(format!("longshore-guide-{}", JobId::new()));
    std::fs::create_dir(&folder).unwrap();
    let data = folder.join("data");
    let mut dev = Process::start(binary().args([
        "dev",
        "--bind",
        "127.0.0.1:0",
        "--json",
        "--data-dir",
        data.to_str().unwrap(),
    ]));
    let addr = dev.address();

    let ran =
        Command::new("bash").args(["-c", &script(&guide, &addr)]).env("FOLDER", &folder).output().unwrap();
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(errors, "", "{}", String::from_utf8_lossy(&ran.stdout));
    let calls = std::fs::read_to_string(folder.join("calls")).unwrap();
    let calls: Vec<Call> = calls.split_terminator('\u{1e}').map(Call::read).collect();
    for Call { expected, code, args } in &calls {
        let fits = if expected.is_empty() { code.starts_with('2') } else { code == expected };
        assert!(fits, "status {code}: curl {}", args.join(" "));
    }

    let document = request(&addr, "GET", "/api-docs/openapi.json", None, "").json(200);
    for (route, methods) in document["paths"].as_object().unwrap() {
        // HTML pages.
        if route.starts_with("/docs") {
            continue;
        }
        for method in methods.as_object().unwrap().keys() {
            let covered = calls.iter().any(|call| call.matches(method, route));
            assert!(covered, "the guide has no curl for {method} {route}");
        }
    }
    let _ = std::fs::remove_dir_all(&folder);
}

/// The guide's commands as one script that records every unexpected exit code.
fn commands(guide: &str) -> String {
    let (mut script, mut inside, mut code) = (String::from("set -u\n"), false, "0");
    for line in guide.lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            _ if !inside => {}
            _ => match line.strip_prefix("# exits ") {
                Some(expected) => code = expected,
                None => {
                    script += &format!("{line}\n");
                    script += &format!("[ $? = {code} ] || printf '%s\\n' {} >> failed\n", quoted(line));
                    code = "0";
                }
            },
        }
    }
    script
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[test]
fn every_command_in_the_guide_to_the_command_works() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides/command.md");
    let script = commands(&std::fs::read_to_string(guide).unwrap());
    assert!(script.matches("longshore ").count() > 25, "{script}");
    let folder = std::env::temp_dir().join(format!("longshore-command-{}", JobId::new()));
    std::fs::create_dir(&folder).unwrap();
    let binaries = Path::new(env!("CARGO_BIN_EXE_longshore")).parent().unwrap();
    let path = format!("{}:{}", binaries.display(), std::env::var("PATH").unwrap());
    let ran = Command::new("bash")
        .args(["-c", &script])
        .current_dir(&folder)
        .env_remove("LONGSHORE_SERVER")
        .env("PATH", path)
        .output()
        .unwrap();
    let failed = std::fs::read_to_string(folder.join("failed")).unwrap_or_default();
    let _ = std::fs::remove_dir_all(&folder);
    assert_eq!(failed, "", "unexpected exit codes; standard error: {}", String::from_utf8_lossy(&ran.stderr));
}
