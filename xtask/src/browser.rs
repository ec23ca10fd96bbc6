//! `cargo xtask browser`: tests the dashboard in a real browser, on each engine.
//!
//! The tests are in `crates/longshore/tests/browser/`. They run in Node.js and drive Chromium
//! with playwright-core. This module provides what they need: Chromium, the npm packages, and
//! servers with empty databases. With `--screenshots` it takes pictures of every page instead.

use std::{
    env,
    ffi::OsString,
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{
    debian,
    npm::Packages,
    run::{Result, step, target_dir, took, workspace},
    server::{self, Engine, Server, TestDatabase},
    test::{Database, OpenDatabase},
    time_limit::status_within,
    tools::{self, CHROMIUM_NAMES, CHROMIUM_VARIABLE},
};

/// The prefix under which the second server of an engine is tested.
const PREFIX: &str = "/queue";
/// How long the tests on one engine may take before they count as hanging: many times what they need.
const TIME_LIMIT: Duration = Duration::from_secs(60 * 60);

/// What was requested on the command line.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    engines: Vec<Engine>,
    /// Run only the tests whose names contain this text.
    only: Option<String>,
    mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Test,
    Screenshots,
}

impl Options {
    pub(crate) fn parse(args: Vec<OsString>) -> Result<Options, String> {
        let mut options = Options { engines: Engine::BOTH.to_vec(), only: None, mode: Mode::Test };
        let mut args = args.into_iter().map(|arg| arg.to_string_lossy().into_owned());
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or(format!("`{flag}` needs a value"));
            match flag.as_str() {
                "--engine" => options.engines = Engine::parse(&value()?)?,
                "--only" => options.only = Some(value()?),
                "--screenshots" => {
                    // On Postgres, where psql can add a history.
                    options = Options { engines: vec![Engine::Postgres], mode: Mode::Screenshots, ..options };
                }
                other => {
                    return Err(format!("`browser` takes --engine, --only and --screenshots, not `{other}`"));
                }
            }
        }
        Ok(options)
    }
}

/// `cargo xtask browser`.
pub(crate) fn browser(options: &Options) -> Result {
    tools::require("browser")?;
    let needs_postgres = options.engines.contains(&Engine::Postgres);
    let database = needs_postgres.then(Database::find).transpose()?;
    let suite = Suite::install()?;
    let database = database.map(Database::open).transpose()?;
    run(options, &suite, database.as_ref())
}

fn run(options: &Options, suite: &Suite, database: Option<&OpenDatabase>) -> Result {
    server::build()?;
    let mut failures = Vec::new();
    for engine in &options.engines {
        if let Err(error) = suite.run(*engine, options, database) {
            failures.push(format!(
                "browser tests on {}: {error}\n       repeat with: cargo xtask browser --engine {}",
                engine.name(),
                engine.name(),
            ));
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\nxtask: ").into()) }
}

/// Chromium, and the tests with their npm packages under `target`.
struct Suite {
    chromium: PathBuf,
    home: PathBuf,
}

impl Suite {
    /// Installs what is missing.
    fn install() -> Result<Suite> {
        let suite = Suite { chromium: chromium()?, home: target_dir().join("browser") };
        let source = workspace().join("crates/longshore/tests/browser");
        fs::create_dir_all(&suite.home)?;
        for file in fs::read_dir(&suite.home)?.flatten() {
            // A test that was removed from the source must not run.
            if file.path().extension().is_some_and(|extension| extension == "mjs") {
                fs::remove_file(file.path())?;
            }
        }
        for file in fs::read_dir(&source)?.flatten().filter(|file| file.path().is_file()) {
            fs::copy(file.path(), suite.home.join(file.file_name()))?;
        }
        Packages::install("the browser tests", &suite.home)?;
        Ok(suite)
    }

    fn run(&self, engine: Engine, options: &Options, database: Option<&OpenDatabase>) -> Result {
        let start = |name: &str, args: &[&str]| -> Result<Server> {
            let home = self.home.join(engine.name()).join(name);
            let _ = fs::remove_dir_all(&home);
            fs::create_dir_all(&home)?;
            let database = match (engine, database) {
                (Engine::Postgres, Some(database)) => TestDatabase::schema(database)?,
                _ => TestDatabase::file(&home),
            };
            Server::start_with(database, &home, args)
        };
        let server = start("root", &[])?;
        let prefixed = start("prefixed", &["--base-path", PREFIX])?;
        if options.mode == Mode::Screenshots {
            step("add history", &mut server.psql(&self.home.join("history.sql"))?)?;
        }
        let mut node = self.command(options);
        node.env("LONGSHORE_ENGINE", engine.name())
            .env("LONGSHORE_URL", server.url())
            .env("LONGSHORE_TOKEN", server.token())
            .env("LONGSHORE_READER_TOKEN", server.create_token("reader", "read")?)
            .env("LONGSHORE_PREFIX", PREFIX)
            .env("LONGSHORE_PREFIXED_URL", prefixed.url())
            .env("LONGSHORE_PREFIXED_TOKEN", prefixed.token());
        eprintln!("==> browser: {}, log of the server in {}", engine.name(), server.log().display());
        let started = Instant::now();
        let status = status_within(TIME_LIMIT, &mut node)?
            .ok_or_else(|| format!("were stopped after {}", took(TIME_LIMIT)))?;
        server.stop()?;
        prefixed.stop()?;
        if !status.success() {
            return Err(format!("failed ({status})").into());
        }
        eprintln!("    browser: ok on {}, {}", engine.name(), took(started.elapsed()));
        Ok(())
    }

    /// The program that drives the browser, without the addresses of the servers.
    fn command(&self, options: &Options) -> Command {
        let mut node = Command::new("node");
        match options.mode {
            Mode::Test => {
                // Two files at a time: while one waits for a live update, the other one works.
                node.args(["--test", "--test-concurrency=2", "--test-reporter=spec"]);
                if let Some(only) = &options.only {
                    node.arg(format!("--test-name-pattern={only}"));
                }
            }
            Mode::Screenshots => {
                node.arg("screenshots.mjs").arg(workspace().join("docs/images/dashboard"));
            }
        }
        node.current_dir(&self.home)
            .env(CHROMIUM_VARIABLE, &self.chromium)
            .env("NO_PROXY", "127.0.0.1")
            .stdin(Stdio::null());
        node
    }
}

/// The Chromium that the environment names, or the one on PATH.
fn chromium() -> Result<PathBuf> {
    if let Some(given) = env::var_os(CHROMIUM_VARIABLE).filter(|path| !path.is_empty()) {
        let given = PathBuf::from(given);
        return match given.is_file() {
            true => Ok(given),
            false => Err(format!("{CHROMIUM_VARIABLE}: there is no program at {}", given.display()).into()),
        };
    }
    let found = CHROMIUM_NAMES.into_iter().find_map(debian::find_program);
    found.ok_or_else(|| format!("Chromium is not on PATH; set {CHROMIUM_VARIABLE} to its path").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, String> {
        Options::parse(line.split_whitespace().map(OsString::from).collect())
    }

    #[test]
    fn the_default_is_all_tests_on_both_engines() {
        let all = || Options { engines: Engine::BOTH.to_vec(), only: None, mode: Mode::Test };
        assert_eq!(parsed(""), Ok(all()));
        assert_eq!(parsed("--engine both"), Ok(all()));
        let narrowed =
            Options { engines: vec![Engine::Postgres], only: Some("tabs".into()), mode: Mode::Test };
        assert_eq!(parsed("--engine postgres --only tabs"), Ok(narrowed));
    }

    #[test]
    fn screenshots_need_one_engine() {
        let screenshots = Options { engines: vec![Engine::Postgres], only: None, mode: Mode::Screenshots };
        assert_eq!(parsed("--screenshots"), Ok(screenshots));
    }

    #[test]
    fn the_error_names_the_wrong_argument() {
        for (line, named) in [("--engine mysql", "mysql"), ("--only", "--only"), ("fast", "fast")] {
            let error = parsed(line).expect_err("the line is wrong");
            assert!(error.contains(named), "{error}");
        }
    }
}
