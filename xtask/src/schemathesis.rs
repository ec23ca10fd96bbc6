//! `cargo xtask schemathesis`: sends valid and invalid requests, generated from the
//! OpenAPI document, to the real server on each engine.
//!
//! There are two passes. With a token, all checks of schemathesis must pass. Without a
//! token, only `/health` may succeed. The configuration and hooks of schemathesis are
//! in `xtask/schemathesis/`. Failures are printed with the seed that reproduces them.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use crate::{
    postgres::random_hex,
    python::Environment,
    run::{Result, target_dir, took, workspace},
    server::{self, Engine, Server, TestDatabase},
    test::{Database, OpenDatabase},
    tools,
};

/// What was requested on the command line.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    engines: Vec<Engine>,
    length: Length,
    /// The minimum number of requests to each engine.
    examples: Option<u32>,
    seed: Option<u32>,
}

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Length {
    Full,
    /// Without the phases that look for new failures, for `cargo xtask test`.
    Short,
}

impl Length {
    fn examples(self) -> u32 {
        match self {
            Length::Full => 2000,
            Length::Short => 500,
        }
    }

    fn phases(self) -> &'static [&'static str] {
        match self {
            Length::Full => &["examples", "coverage", "fuzzing", "stateful"],
            Length::Short => &["examples", "coverage"],
        }
    }
}

impl Options {
    pub(crate) fn parse(args: Vec<OsString>) -> Result<Options, String> {
        let mut options =
            Options { engines: Engine::BOTH.to_vec(), length: Length::Full, examples: None, seed: None };
        let mut args = args.into_iter().map(|arg| arg.to_string_lossy().into_owned());
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or(format!("`{flag}` needs a value"));
            let number =
                |text: String| text.parse().map_err(|_| format!("`{flag} {text}`: `{text}` is not a number"));
            match flag.as_str() {
                "--engine" => options.engines = Engine::parse(&value()?)?,
                "--short" => options.length = Length::Short,
                "--examples" => options.examples = Some(number(value()?)?),
                "--seed" => options.seed = Some(number(value()?)?),
                other => {
                    return Err(format!(
                        "`schemathesis` takes --engine, --short, --examples and --seed, not `{other}`"
                    ));
                }
            }
        }
        Ok(options)
    }
}

/// `cargo xtask schemathesis`.
pub(crate) fn schemathesis(options: &Options) -> Result {
    tools::require("schemathesis")?;
    let needs_postgres = options.engines.contains(&Engine::Postgres);
    let database = needs_postgres.then(Database::find).transpose()?;
    let python = Environment::with("schemathesis", &folder().join("requirements.txt"))?;
    let database = database.map(Database::open).transpose()?;
    test_engines(options, &python, database.as_ref())
}

/// The folder with the configuration and hooks.
fn folder() -> PathBuf {
    workspace().join("xtask/schemathesis")
}

fn test_engines(options: &Options, python: &Environment, database: Option<&OpenDatabase>) -> Result {
    server::build()?;
    let length = options.length;
    let with_token = Pass::WithToken {
        phases: length.phases(),
        examples: options.examples.unwrap_or_else(|| length.examples()),
    };
    let flag = if length == Length::Short { " --short" } else { "" };
    let seed = match options.seed {
        Some(seed) => seed,
        None => u32::from_str_radix(&random_hex(4)?, 16)?,
    };
    let mut failures = Vec::new();
    for engine in &options.engines {
        let home = target_dir().join("schemathesis").join(engine.name());
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home)?;
        let test_database = match (engine, database) {
            (Engine::Postgres, Some(database)) => TestDatabase::schema(database)?,
            _ => TestDatabase::file(&home),
        };
        let server = Server::start(test_database, &home)?;
        for pass in [with_token, Pass::WithoutToken] {
            if let Err(error) = pass.run(python, &server, &home, seed) {
                failures.push(format!(
                    "schemathesis on {engine}: {error}\n       \
                     repeat with: cargo xtask schemathesis --engine {engine} --seed {seed}{flag}",
                    engine = engine.name(),
                ));
            }
        }
        if let Err(error) = server.stop() {
            failures.push(format!("schemathesis on {}: {error}", engine.name()));
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\nxtask: ").into()) }
}

/// One run of schemathesis.
#[derive(Clone, Copy)]
enum Pass<'a> {
    /// All checks.
    WithToken { phases: &'a [&'a str], examples: u32 },
    /// Only `/health` may succeed.
    WithoutToken,
}

impl Pass<'_> {
    fn name(self) -> &'static str {
        match self {
            Pass::WithToken { .. } => "with-token",
            Pass::WithoutToken => "without-token",
        }
    }

    fn run(self, python: &Environment, server: &Server, home: &Path, seed: u32) -> Result {
        let (log, report) =
            (home.join(format!("{}.log", self.name())), home.join(format!("{}.json", self.name())));
        let started = Instant::now();
        eprintln!(
            "==> schemathesis: {} {}, seed {seed}",
            server.engine().name(),
            self.name().replace('-', " a ")
        );
        let output = fs::File::create(&log)?;
        let status = self
            .command(python, server, &report)
            .arg(format!("--seed={seed}"))
            .current_dir(home)
            .stdout(output.try_clone()?)
            .stderr(output)
            .status()
            .map_err(|error| format!("schemathesis: {error}"))?;
        let output = fs::read_to_string(&log)?;
        if !status.success() {
            eprintln!("{}", failure_section(&output));
            return Err(format!("found failures ({}, {status})", self.name()).into());
        }
        let sent = count(&fs::read_to_string(&report)?, "generated")
            .ok_or("the report of schemathesis contains no number of requests")?;
        let least = match self {
            Pass::WithToken { examples, .. } => u64::from(examples),
            Pass::WithoutToken => 1,
        };
        if sent < least {
            return Err(format!("only {sent} of {least} requests were sent").into());
        }
        eprintln!("    schemathesis: ok, {sent} requests, {}", took(started.elapsed()));
        Ok(())
    }

    fn command(self, python: &Environment, server: &Server, report: &Path) -> Command {
        let document = workspace().join("docs/openapi.json");
        let mut command = python.program("schemathesis");
        let common = [
            "--no-color",
            "--continue-on-failure",
            // With more than one, schemathesis itself fails now and then.
            "--workers=1",
            // Only a request that hangs is too slow.
            "--request-timeout=60",
            "--suppress-health-check=too_slow",
        ];
        let report = format!("--report-json-path={}", report.display());
        match self {
            Pass::WithToken { phases, examples } => {
                let operations = fs::read_to_string(&document)
                    .map_or(1, |document| document.matches("\"operationId\"").count().max(1));
                command
                    .arg(format!("--config-file={}", folder().join("schemathesis.toml").display()))
                    .args(["run", &format!("{}/api-docs/openapi.json", server.url())])
                    .arg(format!("--phases={}", phases.join(",")))
                    .arg(format!("--max-examples={}", examples.div_ceil(operations as u32)))
                    // No `--checks`: the default is every check except `max_response_time`, which a slow
                    // machine fails. The response of `stream_events` never ends.
                    .arg("--exclude-operation-id=stream_events")
                    .env("LONGSHORE_TOKEN", server.token());
            }
            // Read from the file: the server requires a token for its document.
            Pass::WithoutToken => {
                command
                    .arg("run")
                    .arg(document)
                    .arg(format!("--url={}", server.url()))
                    .args(["--phases=examples,coverage", "--warnings=off"])
                    .arg("--checks=nothing_without_a_token,not_a_server_error")
                    .env_remove("LONGSHORE_TOKEN");
            }
        }
        command
            .args(common)
            .arg("--report=json")
            .arg(report)
            .env("SCHEMATHESIS_HOOKS", folder().join("hooks.py"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("NO_PROXY", "127.0.0.1");
        command
    }
}

/// The part of the output of schemathesis that lists failures and errors, or all of it
/// if there is no such part.
fn failure_section(log: &str) -> &str {
    let headings = ["= FAILURES =", "= ERRORS ="];
    let first = headings.iter().filter_map(|heading| log.find(heading)).min();
    &log[first.unwrap_or(0)..]
}

/// The value of a numeric field whose name occurs once in the JSON text.
fn count(json: &str, name: &str) -> Option<u64> {
    let rest = json.split_once(&format!("\"{name}\":"))?.1.trim_start();
    rest[..rest.find(|next: char| !next.is_ascii_digit())?].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, String> {
        Options::parse(line.split_whitespace().map(OsString::from).collect())
    }

    #[test]
    fn the_default_is_a_full_run_on_both_engines() {
        let full =
            Options { engines: Engine::BOTH.to_vec(), length: Length::Full, examples: None, seed: None };
        assert_eq!(parsed(""), Ok(full));
        let narrowed = Options {
            engines: vec![Engine::Sqlite],
            length: Length::Short,
            examples: Some(9),
            seed: Some(7),
        };
        assert_eq!(parsed("--engine sqlite --examples 9 --short --seed 7"), Ok(narrowed));
    }

    #[test]
    fn the_error_names_the_wrong_argument() {
        for (line, named) in
            [("--engine mysql", "mysql"), ("--seed x", "x"), ("--examples", "--examples"), ("fast", "fast")]
        {
            let error = parsed(line).expect_err("the line is wrong");
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn a_count_is_read_from_the_report() {
        assert_eq!(count(r#"{"test_cases": {"generated": 4176, "errored": 0}}"#, "generated"), Some(4176));
        assert_eq!(count("{}", "generated"), None);
    }

    #[test]
    fn only_failures_are_shown() {
        assert_eq!(failure_section("progress\n= FAILURES =\nhere"), "= FAILURES =\nhere");
        assert_eq!(failure_section("it did not start"), "it did not start");
    }
}
