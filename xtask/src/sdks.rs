//! `cargo xtask sdks`: tests the Python and the TypeScript SDK on a real server, on both engines, and
//! installs what users install into empty environments.
//!
//! Each SDK has a program that runs all its checks: lints, types, the comparison of its wire types with
//! `docs/openapi.json`, and its tests. This module provides the server, Postgres and the packages from PyPI
//! and npm.

use std::{
    ffi::OsString,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{
    npm::Packages,
    python::Environment,
    run::{Result, took, workspace},
    server,
    test::Database,
    time_limit::status_within,
    tools,
};

/// How long the checks of one SDK may take before they count as hanging: many times what they need.
const TIME_LIMIT: Duration = Duration::from_secs(60 * 60);

/// An SDK.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sdk {
    Python,
    TypeScript,
}

const ALL: [Sdk; 2] = [Sdk::Python, Sdk::TypeScript];

/// What was requested on the command line.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    sdks: Vec<Sdk>,
}

impl Options {
    pub(crate) fn parse(args: Vec<OsString>) -> Result<Options, String> {
        let args: Vec<String> = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
        let sdk = |name: &str| match name {
            "python" => Ok(Sdk::Python),
            "typescript" => Ok(Sdk::TypeScript),
            other => Err(format!("unknown SDK `{other}`; use python or typescript, or nothing for both")),
        };
        let named = args.iter().map(|name| sdk(name)).collect::<Result<Vec<_>, _>>()?;
        Ok(Options { sdks: if named.is_empty() { ALL.to_vec() } else { named } })
    }
}

/// `cargo xtask sdks`.
pub(crate) fn sdks(options: &Options) -> Result {
    let install = |sdk: &Sdk| {
        tools::require(sdk.suite())?;
        sdk.install()
    };
    let database = Database::find()?;
    let installed = options.sdks.iter().map(install).collect::<Result<Vec<_>>>()?;
    server::build()?;
    let database = database.open()?;
    let check = |sdk: &Installed| {
        let error = sdk.check(database.url()).err()?;
        let name = sdk.name();
        Some(format!("{name} SDK: {error}\n       repeat with: cargo xtask sdks {name}"))
    };
    let failures: Vec<String> = installed.iter().filter_map(check).collect();
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\nxtask: ").into()) }
}

impl Sdk {
    fn name(self) -> &'static str {
        match self {
            Sdk::Python => "python",
            Sdk::TypeScript => "typescript",
        }
    }

    /// The name of its suite in [`crate::suites`].
    fn suite(self) -> &'static str {
        match self {
            Sdk::Python => "sdks python",
            Sdk::TypeScript => "sdks typescript",
        }
    }

    fn folder(self) -> PathBuf {
        workspace().join("sdks").join(self.name())
    }

    /// Installs the packages that the checks need.
    fn install(self) -> Result<Installed> {
        match self {
            Sdk::Python => {
                let requirements = self.folder().join("requirements-dev.txt");
                Environment::with("sdk", &requirements).map(Installed::Python)
            }
            Sdk::TypeScript => {
                Packages::install("the TypeScript SDK", &self.folder()).map(|_| Installed::TypeScript)
            }
        }
    }
}

/// An SDK whose checks can run.
enum Installed {
    Python(Environment),
    TypeScript,
}

impl Installed {
    fn sdk(&self) -> Sdk {
        match self {
            Installed::Python(_) => Sdk::Python,
            Installed::TypeScript => Sdk::TypeScript,
        }
    }

    fn name(&self) -> &'static str {
        self.sdk().name()
    }

    fn check(&self, database_url: &str) -> Result {
        let started = Instant::now();
        eprintln!("==> {} SDK: lints, types and tests on both engines", self.name());
        let mut check = match self {
            Installed::Python(environment) => {
                let mut check = environment.program("python");
                check.arg("tools/check.py");
                check
            }
            Installed::TypeScript => {
                let mut check = Command::new("npm");
                check.args(["run", "--silent", "check"]);
                check
            }
        };
        check
            .current_dir(self.sdk().folder())
            .env(server::BINARY_VARIABLE, server::binary())
            .env("LONGSHORE_TEST_DATABASE_URL", database_url)
            .env("NO_PROXY", "127.0.0.1")
            .stdin(Stdio::null());
        let status = status_within(TIME_LIMIT, &mut check)?;
        let status = status.ok_or_else(|| format!("the checks were stopped after {}", took(TIME_LIMIT)))?;
        if !status.success() {
            return Err(format!("the checks failed ({status})").into());
        }
        eprintln!("    {} SDK: ok, {}", self.name(), took(started.elapsed()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, String> {
        Options::parse(line.split_whitespace().map(OsString::from).collect())
    }

    #[test]
    fn the_default_is_both_sdks() {
        assert_eq!(parsed(""), Ok(Options { sdks: ALL.to_vec() }));
        assert_eq!(parsed("typescript"), Ok(Options { sdks: vec![Sdk::TypeScript] }));
    }

    #[test]
    fn the_error_names_the_unknown_sdk() {
        let error = parsed("ruby").expect_err("there is no such SDK");
        assert!(error.contains("ruby") && error.contains("typescript"), "{error}");
    }
}
