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
    run::{Result, cargo, step, succeeds, target_dir, took, workspace},
    schemathesis::server::{Server, TestDatabase},
    test::{Database, OpenDatabase},
    time_limit::status_within,
};

/// The variable that names another Chromium than the one on PATH.
const CHROMIUM_VARIABLE: &str = "LONGSHORE_CHROMIUM";
/// The prefix under which the second server of an engine is tested.
const PREFIX: &str = "/queue";
/// How long the tests on one engine may take.
const TIME_LIMIT: Duration = Duration::from_secs(300);

/// What was requested on the command line.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    engines: Vec<Engine>,
    /// Run only the tests whose names contain this text.
    only: Option<String>,
    mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Engine {
    Sqlite,
    Postgres,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    Test,
    Screenshots,
}

const BOTH: [Engine; 2] = [Engine::Sqlite, Engine::Postgres];

impl Options {
    pub(crate) fn parse(args: Vec<OsString>) -> Result<Options, String> {
        let mut options = Options { engines: BOTH.to_vec(), only: None, mode: Mode::Test };
        let mut args = args.into_iter().map(|arg| arg.to_string_lossy().into_owned());
        while let Some(flag) = args.next() {
            let mut value = || args.next().ok_or(format!("`{flag}` needs a value"));
            match flag.as_str() {
                "--engine" => options.engines = engines(&value()?)?,
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

fn engines(name: &str) -> Result<Vec<Engine>, String> {
    match name {
        "sqlite" => Ok(vec![Engine::Sqlite]),
        "postgres" => Ok(vec![Engine::Postgres]),
        "both" => Ok(BOTH.to_vec()),
        other => Err(format!("unknown engine `{other}`; use sqlite, postgres or both")),
    }
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Engine::Sqlite => "sqlite",
            Engine::Postgres => "postgres",
        }
    }
}

/// `cargo xtask browser`.
pub(crate) fn browser(options: &Options) -> Result {
    let needs_postgres = options.engines.contains(&Engine::Postgres);
    let database = needs_postgres.then(Database::find).transpose()?;
    let suite = Suite::install()?;
    let database = database.map(Database::open).transpose()?;
    run(options, &suite, database.as_ref())
}

/// All tests, for `cargo xtask test`. Skipped with a message if Chromium or the npm packages
/// cannot be installed.
pub(crate) fn quick(database: &OpenDatabase) -> Result {
    match Suite::install() {
        Ok(suite) => {
            let options = Options { engines: BOTH.to_vec(), only: None, mode: Mode::Test };
            run(&options, &suite, Some(database))
        }
        Err(reason) => {
            eprintln!("==> browser: SKIPPED, {reason}");
            Ok(())
        }
    }
}

fn run(options: &Options, suite: &Suite, database: Option<&OpenDatabase>) -> Result {
    // The same features as for the tests, so that cargo does not build everything twice.
    let build = ["build", "--workspace", "--all-features", "--bin", "longshore"];
    step("build server", &mut cargo(build))?;
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
    /// Installs what is missing. Installs the npm packages again if the versions differ from
    /// those installed before.
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
        let wanted = fs::read_to_string(source.join("package-lock.json"))?;
        // Written last, so that an interrupted installation starts again.
        let marker = suite.home.join("installed.json");
        if fs::read_to_string(&marker).is_ok_and(|installed| installed == wanted) {
            return Ok(suite);
        }
        if !succeeds(Command::new("node").arg("--version")) {
            return Err(
                "node is missing; install Node.js 20 or later (Debian: apt-get install nodejs npm)".into()
            );
        }
        eprintln!("==> npm: installing playwright-core and axe-core under {}", suite.home.display());
        let mut install = Command::new("npm");
        install
            .args(["ci", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"])
            .current_dir(&suite.home);
        if !succeeds(&mut install) {
            return Err("`npm ci` failed; install npm, and check that its registry can be reached".into());
        }
        fs::write(marker, wanted)?;
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
        node.env("LONGSHORE_URL", server.url())
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

/// Finds Chromium, or installs Debian's package.
fn chromium() -> Result<PathBuf> {
    if let Some(given) = env::var_os(CHROMIUM_VARIABLE).filter(|path| !path.is_empty()) {
        let given = PathBuf::from(given);
        return match given.is_file() {
            true => Ok(given),
            false => Err(format!("{CHROMIUM_VARIABLE}: there is no program at {}", given.display()).into()),
        };
    }
    let find =
        || ["chromium", "chromium-browser", "google-chrome"].into_iter().find_map(debian::find_program);
    if let Some(found) = find() {
        return Ok(found);
    }
    let remedy = |reason: String| {
        format!(
            "Chromium was not found, and {reason}. Install it (Debian: apt-get install chromium; Fedora: dnf \
             install chromium; macOS: brew install --cask chromium), or set {CHROMIUM_VARIABLE} to its path"
        )
    };
    debian::install("chromium").map_err(|error| remedy(error.to_string()))?;
    find().ok_or_else(|| remedy("Debian's package contains no program of this name".into()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, String> {
        Options::parse(line.split_whitespace().map(OsString::from).collect())
    }

    #[test]
    fn the_default_is_all_tests_on_both_engines() {
        let all = || Options { engines: BOTH.to_vec(), only: None, mode: Mode::Test };
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
