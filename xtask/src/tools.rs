//! The programs that the tests run besides cargo: finds them, installs them where apt-get may be
//! used, and says what does not run without them.
//!
//! With `CI=true` a missing program is an error, so that a part of the suite cannot disappear
//! without anybody noticing. Otherwise the run goes on, and its end lists what did not run.
//! Packages from PyPI and npm are installed by the suites that use them.

use std::{env, ffi::OsStr, process::Command};

use crate::{
    debian, nextest,
    postgres::Binaries,
    run::{Result, Unavailable, succeeds},
};

/// A program that tests run.
struct Tool {
    name: &'static str,
    /// Debian's package that contains it.
    package: &'static str,
    is_usable: fn(&str) -> bool,
    /// What does not run without it: suites of [`crate::suites`] by name, or tests.
    needed_by: Need,
}

/// What needs a program.
#[derive(Clone, Copy)]
enum Need {
    Suites(&'static [&'static str]),
    /// Tests of the Rust suite.
    Tests(&'static str),
}

const WITH_NODE: &[&str] = &["clients", "browser", "sdks typescript"];
const WITH_PYTHON: &[&str] = &["schemathesis", "clients", "sdks python"];

const TOOLS: [Tool; 16] = [
    Tool { is_usable: is_node, ..suites("node", "nodejs", WITH_NODE) },
    suites("npm", "npm", WITH_NODE),
    Tool { is_usable: is_chromium, ..suites("chromium", "chromium", &["browser"]) },
    Tool { is_usable: is_python, ..suites("python3", "python3", WITH_PYTHON) },
    Tool { is_usable: has_venv, ..suites("python3 -m venv", "python3-venv", WITH_PYTHON) },
    Tool {
        is_usable: has_postgres_server,
        ..tests("postgres", "postgresql", "outages and failover of Postgres")
    },
    tests("pgbouncer", "pgbouncer", "Postgres behind PgBouncer"),
    tests("openssl", "openssl", "mail and webhooks over TLS"),
    tests("promtool", "prometheus", "the metrics page and the files for Prometheus"),
    tests("systemd-analyze", "systemd", "the systemd units"),
    tests("script", "bsdutils", "the command at a terminal"),
    tests("fish", "fish", "completion in fish"),
    tests("bash", "bash", "the commands of the guides"),
    tests("curl", "curl", "the commands of the guides"),
    tests("jq", "jq", "the commands of the guides"),
    tests("psql", "postgresql-client", "the commands of the guides"),
];

const fn suites(name: &'static str, package: &'static str, suites: &'static [&'static str]) -> Tool {
    Tool { name, package, is_usable: is_on_path, needed_by: Need::Suites(suites) }
}

const fn tests(name: &'static str, package: &'static str, tests: &'static str) -> Tool {
    Tool { name, package, is_usable: is_on_path, needed_by: Need::Tests(tests) }
}

/// The programs that are missing and cannot be installed.
pub(crate) struct Missing {
    tools: Vec<(&'static Tool, String)>,
}

impl Missing {
    /// Finds or installs all programs. With `CI=true`, fails if one is missing.
    pub(crate) fn after_installing() -> Result<Missing> {
        // `cargo test` does not end tests that hang, and prints no times.
        if is_ci() && !nextest::is_installed() {
            return Err("CI=true, and cargo-nextest is missing (cargo install cargo-nextest --locked)".into());
        }
        let missing = Missing::of(|_| true);
        if is_ci() && !missing.tools.is_empty() {
            return Err(missing.remedy().into());
        }
        Ok(missing)
    }

    /// Finds or installs the programs of one suite.
    fn of_suite(suite: &str) -> Missing {
        Missing::of(|tool| tool.is_needed_by(suite))
    }

    fn of(is_wanted: impl Fn(&Tool) -> bool) -> Missing {
        let wanted = TOOLS.iter().filter(|tool| is_wanted(tool));
        Missing { tools: wanted.filter_map(|tool| Some((tool, tool.find_or_install().err()?))).collect() }
    }

    /// Why a suite cannot run, if a program that it needs is missing.
    pub(crate) fn prevents(&self, suite: &str) -> Option<String> {
        let (tool, reason) = self.tools.iter().find(|(tool, _)| tool.is_needed_by(suite))?;
        Some(tool.describe(reason))
    }

    /// The tests of the Rust suite that pass without testing anything, each with the reason.
    pub(crate) fn tests(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.tools.iter().filter_map(|(tool, reason)| match tool.needed_by {
            Need::Tests(tests) => Some((tests, tool.describe(reason))),
            Need::Suites(_) => None,
        })
    }

    fn remedy(&self) -> String {
        let lines: Vec<String> =
            self.tools.iter().map(|(tool, reason)| format!("  {}", tool.describe(reason))).collect();
        let packages: Vec<&str> = self.tools.iter().map(|(tool, _)| tool.package).collect();
        format!(
            "CI=true, and these programs are missing, so that tests would be skipped:\n{}\n\
             Install them (Debian: apt-get install {}), or unset CI to run without them",
            lines.join("\n"),
            packages.join(" ")
        )
    }
}

/// Finds or installs the programs that one suite needs.
pub(crate) fn require(suite: &str) -> Result {
    match Missing::of_suite(suite).prevents(suite) {
        Some(reason) => Err(Unavailable(reason).into()),
        None => Ok(()),
    }
}

impl Tool {
    fn is_needed_by(&self, suite: &str) -> bool {
        matches!(self.needed_by, Need::Suites(suites) if suites.contains(&suite))
    }

    fn find_or_install(&self) -> Result<(), String> {
        if (self.is_usable)(self.name) {
            return Ok(());
        }
        debian::install(self.package).map_err(|error| error.to_string())?;
        if (self.is_usable)(self.name) { Ok(()) } else { Err("the package does not help".into()) }
    }

    fn describe(&self, reason: &str) -> String {
        let wanted = match self.name {
            "node" => "node (20 or later)",
            "python3" => "python3 (3.11 or later)",
            name => name,
        };
        format!("`{wanted}` is missing: {reason} (Debian's package: {})", self.package)
    }
}

/// Whether this is a run that must not skip anything.
pub(crate) fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|ci| ci == "true")
}

/// The variable that names another Chromium than the one on PATH.
pub(crate) const CHROMIUM_VARIABLE: &str = "LONGSHORE_CHROMIUM";

/// The names under which Chromium is looked up on PATH.
pub(crate) const CHROMIUM_NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

fn is_chromium(_: &str) -> bool {
    // The suite complains about a wrong path, and names the variable.
    let is_given = env::var_os(CHROMIUM_VARIABLE).is_some_and(|path| !path.is_empty());
    is_given || CHROMIUM_NAMES.into_iter().any(is_on_path)
}

fn has_postgres_server(_: &str) -> bool {
    Binaries::find().is_some()
}

fn is_on_path(program: &str) -> bool {
    debian::find_program(program).is_some()
}

fn is_node(node: &str) -> bool {
    // It prints `v20.20.2`.
    version(node).is_some_and(|version| version >= vec![20])
}

fn is_python(python: &str) -> bool {
    // It prints `Python 3.11.7`.
    version(python).is_some_and(|version| version >= vec![3, 11])
}

fn has_venv(_: &str) -> bool {
    succeeds(Command::new("python3").args(["-c", "import venv, ensurepip"]))
}

fn version(program: impl AsRef<OsStr>) -> Option<Vec<u32>> {
    let output = Command::new(program).arg("--version").output().ok()?;
    parse_version(&String::from_utf8_lossy(&output.stdout))
}

/// The first number with dots in a text.
fn parse_version(text: &str) -> Option<Vec<u32>> {
    let start = text.find(|next: char| next.is_ascii_digit())?;
    let rest = &text[start..];
    let end = rest.find(|next: char| !next.is_ascii_digit() && next != '.').unwrap_or(rest.len());
    rest[..end].split('.').map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(names: &[&str]) -> Missing {
        let tools = TOOLS.iter().filter(|tool| names.contains(&tool.name));
        Missing { tools: tools.map(|tool| (tool, "apt-get was not found".to_owned())).collect() }
    }

    #[test]
    fn a_missing_program_prevents_the_suites_that_need_it_and_no_others() {
        let missing = missing(&["chromium", "fish"]);
        assert!(missing.prevents("browser").is_some_and(|why| why.contains("apt-get was not found")));
        assert_eq!(missing.prevents("sdks typescript"), None);
        assert_eq!(missing.tests().map(|(tests, _)| tests).collect::<Vec<_>>(), ["completion in fish"]);
    }

    #[test]
    fn the_remedy_names_every_missing_package() {
        let remedy = missing(&["node", "promtool"]).remedy();
        assert!(remedy.contains("apt-get install nodejs prometheus"), "{remedy}");
        assert!(remedy.contains("node (20 or later)"), "{remedy}");
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(parse_version("Python 3.11.7\n"), Some(vec![3, 11, 7]));
        assert_eq!(parse_version("v20.20.2"), Some(vec![20, 20, 2]));
        assert_eq!(parse_version("no version"), None);
        assert!(parse_version("Python 3.9.2") < Some(vec![3, 11]));
    }
}
