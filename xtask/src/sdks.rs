//! `cargo xtask sdks`: tests the Python and the TypeScript SDK on a real server, on both engines, and
//! installs what users install into empty environments.
//!
//! Each SDK has a program that runs all its checks: lints, types, the comparison of its wire types with
//! `docs/openapi.json`, and its tests. This module provides the server, Postgres and the packages from PyPI
//! and npm.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{
    python::Environment,
    run::{Result, cargo, step, succeeds, target_dir, took, workspace},
    test::{Database, OpenDatabase},
    time_limit::status_within,
};

/// How long the checks of one SDK may take.
const TIME_LIMIT: Duration = Duration::from_secs(15 * 60);

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

/// `cargo xtask sdks`. Fails if a package cannot be installed.
pub(crate) fn sdks(options: &Options) -> Result {
    let database = Database::find()?;
    let installed = options.sdks.iter().map(|sdk| sdk.install()).collect::<Result<Vec<_>>>()?;
    check(&installed, &database.open()?)
}

/// As [`sdks`], for `cargo xtask test`. An SDK whose packages cannot be installed is skipped with a message.
pub(crate) fn quick(database: &OpenDatabase) -> Result {
    let install = |sdk: Sdk| {
        let skipped = |reason| eprintln!("==> {} SDK: SKIPPED, {reason}", sdk.name());
        sdk.install().map_err(skipped).ok()
    };
    let installed: Vec<Installed> = ALL.into_iter().filter_map(install).collect();
    if installed.is_empty() { Ok(()) } else { check(&installed, database) }
}

fn check(installed: &[Installed], database: &OpenDatabase) -> Result {
    // The same features as for the tests, so that cargo does not build everything twice.
    let build = ["build", "--workspace", "--all-features", "--bin", "longshore"];
    step("build server", &mut cargo(build))?;
    let output = if installed.len() == 1 { Output::Terminal } else { Output::File };
    // At the same time: most tests wait, for a lease to end or a process to stop.
    let failures: Vec<String> = thread::scope(|scope| {
        let checks: Vec<_> = installed
            .iter()
            .map(|sdk| scope.spawn(|| sdk.check(database.url(), output).map_err(|error| error.to_string())))
            .collect();
        let results = installed.iter().zip(checks);
        let failure = |(sdk, check): (&Installed, thread::ScopedJoinHandle<Result<(), String>>)| {
            let error = check.join().unwrap_or_else(|_| Err("the check panicked".into())).err()?;
            let name = sdk.name();
            Some(format!("{name} SDK: {error}\n       repeat with: cargo xtask sdks {name}"))
        };
        results.filter_map(failure).collect()
    });
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\nxtask: ").into()) }
}

/// Where the output of the checks of one SDK goes.
#[derive(Clone, Copy)]
enum Output {
    Terminal,
    /// To a file, printed when the checks have ended, so that the output of two SDKs is not mixed.
    File,
}

impl Sdk {
    fn name(self) -> &'static str {
        match self {
            Sdk::Python => "python",
            Sdk::TypeScript => "typescript",
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
            Sdk::TypeScript => install_npm_packages(&self.folder()).map(|()| Installed::TypeScript),
        }
    }
}

/// Installs the packages of `package-lock.json`, unless they are those of the last time.
fn install_npm_packages(folder: &Path) -> Result {
    let wanted = fs::read_to_string(folder.join("package-lock.json"))?;
    let packages = folder.join("node_modules");
    // Written last, so that an interrupted installation starts again.
    let marker = packages.join("installed.json");
    if fs::read_to_string(&marker).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    if !succeeds(Command::new("node").arg("--version")) {
        return Err(
            "node is missing; install Node.js 20 or later (Debian: apt-get install nodejs npm)".into()
        );
    }
    eprintln!("==> npm: installing the packages of the TypeScript SDK under {}", packages.display());
    let mut install = Command::new("npm");
    // Not `npm ci`: it refuses a lock file without the packages for other platforms that the registry does not have.
    let args = ["install", "--no-save", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"];
    install.args(args).current_dir(folder);
    if !succeeds(&mut install) {
        return Err("`npm install` failed; install npm, and check that its registry can be reached".into());
    }
    fs::write(marker, wanted)?;
    Ok(())
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

    fn check(&self, database_url: &str, output: Output) -> Result {
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
            .env("LONGSHORE_BIN", target_dir().join("debug/longshore"))
            .env("LONGSHORE_TEST_DATABASE_URL", database_url)
            .env("NO_PROXY", "127.0.0.1")
            .stdin(Stdio::null());
        let log = target_dir().join(format!("{}-sdk.log", self.name()));
        if let Output::File = output {
            eprintln!("    {} SDK: the output goes to {}", self.name(), log.display());
            let file = fs::File::create(&log)?;
            check.stdout(file.try_clone()?).stderr(file);
        }
        let status = status_within(TIME_LIMIT, &mut check)?;
        if let Output::File = output {
            let printed = fs::read(&log)?;
            eprint!("==> {} SDK: output\n{}", self.name(), String::from_utf8_lossy(&printed));
        }
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
