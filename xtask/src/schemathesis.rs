//! `cargo xtask schemathesis`: requests made up from the OpenAPI document, right
//! and wrong ones, against the real server on each engine.
//!
//! Two passes: with a token every check of schemathesis holds; without one
//! nothing but `/health` answers well. What schemathesis is told beside the
//! document is in `xtask/schemathesis/`. Everything it finds is printed with the
//! seed that finds it again.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

mod server;

use server::{Server, TestDatabase};

use crate::{
    postgres::random_hex,
    python::Environment,
    run::{Result, cargo, step, target_dir, took, workspace},
    test::{Database, OpenDatabase},
};

/// What was asked for on the command line.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    engines: Vec<Engine>,
    examples: u32,
    seed: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Engine {
    Sqlite,
    Postgres,
}

/// How many requests each engine has to answer, unless told otherwise.
const EXAMPLES: u32 = 2000;
/// As many as a run of the suite can spare the time for.
const QUICK: u32 = 500;

impl Options {
    pub(crate) fn parse(args: Vec<OsString>) -> Result<Options, String> {
        let mut options =
            Options { engines: vec![Engine::Sqlite, Engine::Postgres], examples: EXAMPLES, seed: None };
        let mut args = args.into_iter().map(|arg| arg.to_string_lossy().into_owned());
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or(format!("`{flag}` needs a value"));
            let number = |text: String| text.parse().map_err(|_| format!("`{flag} {text}`: not a number"));
            match flag.as_str() {
                "--engine" => options.engines = vec![Engine::parse(&value()?)?],
                "--examples" => options.examples = number(value()?)?,
                "--seed" => options.seed = Some(number(value()?)?),
                other => {
                    return Err(format!(
                        "`schemathesis` takes --engine, --examples and --seed, not `{other}`"
                    ));
                }
            }
        }
        Ok(options)
    }
}

impl Engine {
    fn parse(name: &str) -> Result<Engine, String> {
        match name {
            "sqlite" => Ok(Engine::Sqlite),
            "postgres" => Ok(Engine::Postgres),
            other => Err(format!("there is no engine `{other}`; there are sqlite and postgres")),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Engine::Sqlite => "sqlite",
            Engine::Postgres => "postgres",
        }
    }
}

/// `cargo xtask schemathesis`.
pub(crate) fn schemathesis(options: &Options) -> Result {
    let needs_postgres = options.engines.contains(&Engine::Postgres);
    let database = needs_postgres.then(Database::find).transpose()?;
    let python = environment()?;
    let database = database.map(Database::open).transpose()?;
    every_engine(options, &python, database.as_ref(), &["examples", "coverage", "fuzzing", "stateful"])
}

/// As part of the suite. Without the programs it needs it is left out, and says
/// so.
pub(crate) fn quickly(database: &OpenDatabase) -> Result {
    let python = match environment() {
        Ok(python) => python,
        Err(why) => {
            eprintln!("==> schemathesis: SKIPPED, {why}");
            return Ok(());
        }
    };
    let options = Options { engines: vec![Engine::Sqlite, Engine::Postgres], examples: QUICK, seed: None };
    every_engine(&options, &python, Some(database), &["examples", "coverage"])
}

fn environment() -> Result<Environment> {
    Environment::with("schemathesis", &folder().join("requirements.txt"))
}

/// What schemathesis is told.
fn folder() -> PathBuf {
    workspace().join("xtask/schemathesis")
}

fn every_engine(
    options: &Options,
    python: &Environment,
    database: Option<&OpenDatabase>,
    phases: &[&str],
) -> Result {
    // With the features of the suite, or cargo would build everything twice.
    let build = ["build", "--workspace", "--all-features", "--bin", "longshore"];
    step("the server", &mut cargo(build))?;
    let seed = match options.seed {
        Some(seed) => seed,
        None => u32::from_str_radix(&random_hex(4)?, 16)?,
    };
    let mut findings = Vec::new();
    for engine in &options.engines {
        let home = target_dir().join("schemathesis").join(engine.name());
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home)?;
        let test_database = match (engine, database) {
            (Engine::Postgres, Some(database)) => TestDatabase::schema(database)?,
            _ => TestDatabase::file(&home),
        };
        let server = Server::start(test_database, &home)?;
        for pass in [Pass::WithToken { phases, examples: options.examples }, Pass::WithoutToken] {
            let done = pass.run(python, &server, &home, seed);
            if let Err(error) = done {
                findings.push(format!(
                    "schemathesis on {}: {error}\n       again: cargo xtask schemathesis --engine {} --seed {seed}",
                    engine.name(),
                    engine.name(),
                ));
            }
        }
        if let Err(error) = server.stop() {
            findings.push(format!("schemathesis on {}: {error}", engine.name()));
        }
    }
    if findings.is_empty() { Ok(()) } else { Err(findings.join("\nxtask: ").into()) }
}

/// One run of schemathesis.
#[derive(Clone, Copy)]
enum Pass<'a> {
    /// Every check.
    WithToken { phases: &'a [&'a str], examples: u32 },
    /// Nothing but `/health` answers well.
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
        let began = Instant::now();
        eprintln!("==> schemathesis: {} {}, seed {seed}", server.engine(), self.name().replace('-', " a "));
        let output = fs::File::create(&log)?;
        let status = self
            .command(python, server, &report)
            .arg(format!("--seed={seed}"))
            .current_dir(home)
            .stdout(output.try_clone()?)
            .stderr(output)
            .status()
            .map_err(|error| format!("schemathesis: {error}"))?;
        let words = fs::read_to_string(&log)?;
        if !status.success() {
            eprintln!("{}", findings(&words));
            return Err(format!("it found something ({}, {status})", self.name()).into());
        }
        let made = count(&fs::read_to_string(&report)?, "generated")
            .ok_or("schemathesis' report names no number of requests")?;
        if let Pass::WithToken { examples, .. } = self
            && made < u64::from(examples)
        {
            return Err(format!("only {made} requests of {examples} were made").into());
        }
        eprintln!("    schemathesis: ok, {made} requests, {}", took(began.elapsed()));
        Ok(())
    }

    fn command(self, python: &Environment, server: &Server, report: &Path) -> Command {
        let document = workspace().join("docs/openapi.json");
        let mut command = python.program("schemathesis");
        // One worker: with more, schemathesis stumbles over itself now and then.
        let common = ["--no-color", "--continue-on-failure", "--workers=1", "--request-timeout=60"];
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
                    .arg("--checks=all")
                    // Its answer has no end.
                    .arg("--exclude-path=/events")
                    .env("LONGSHORE_TOKEN", server.token());
            }
            // The server shows its document to nobody without a token.
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

/// What schemathesis found, without what it did on the way.
fn findings(log: &str) -> &str {
    let headings = ["= FAILURES =", "= ERRORS ="];
    let first = headings.iter().filter_map(|heading| log.find(heading)).min();
    &log[first.unwrap_or(0)..]
}

/// A number of a JSON text in which the name stands once.
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
    fn both_engines_answer_two_thousand_requests_unless_told_otherwise() {
        let both = vec![Engine::Sqlite, Engine::Postgres];
        assert_eq!(parsed(""), Ok(Options { engines: both, examples: 2000, seed: None }));
        let narrowed = Options { engines: vec![Engine::Sqlite], examples: 9, seed: Some(7) };
        assert_eq!(parsed("--engine sqlite --examples 9 --seed 7"), Ok(narrowed));
    }

    #[test]
    fn a_mistake_on_the_line_is_named() {
        for (line, named) in
            [("--engine mysql", "mysql"), ("--seed x", "x"), ("--examples", "--examples"), ("fast", "fast")]
        {
            let told = parsed(line).expect_err("a mistake");
            assert!(told.contains(named), "{told}");
        }
    }

    #[test]
    fn a_count_is_read_from_a_report() {
        assert_eq!(count(r#"{"test_cases": {"generated": 4176, "errored": 0}}"#, "generated"), Some(4176));
        assert_eq!(count("{}", "generated"), None);
    }

    #[test]
    fn only_what_was_found_is_shown() {
        assert_eq!(findings("much before\n= FAILURES =\nhere"), "= FAILURES =\nhere");
        assert_eq!(findings("it did not start"), "it did not start");
    }
}
