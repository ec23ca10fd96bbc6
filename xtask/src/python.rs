//! Python programs that tasks run, installed in virtual environments under `target`
//! in the versions that a requirements file lists.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use crate::run::{Result, Unavailable, succeeds, target_dir, took};

/// A virtual environment with all packages of a requirements file.
pub(crate) struct Environment {
    home: PathBuf,
}

impl Environment {
    /// The environment `name` under `target/python`. Creates it again if it was
    /// installed from different requirements.
    pub(crate) fn with(name: &str, requirements: &Path) -> Result<Environment> {
        let home = target_dir().join("python").join(name);
        let wanted = fs::read_to_string(requirements)
            .map_err(|error| format!("{}: {error}", requirements.display()))?;
        // Written last, so that an interrupted installation starts again.
        let marker = home.join("installed.txt");
        let environment = Environment { home };
        if fs::read_to_string(&marker).is_ok_and(|installed| installed == wanted) {
            return Ok(environment);
        }
        let started = Instant::now();
        eprintln!("==> python: installing {name} under {}", environment.home.display());
        let _ = fs::remove_dir_all(&environment.home);
        let mut create = Command::new("python3");
        create.args(["-m", "venv"]).arg(&environment.home);
        if !succeeds(&mut create) {
            return Err(Unavailable("`python3 -m venv` failed".into()).into());
        }
        let mut install = environment.program("pip");
        install
            .args(["install", "--quiet", "--disable-pip-version-check", "--requirement"])
            .arg(requirements);
        let output = install.output().map_err(|error| format!("pip: {error}"))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let last = stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("no error message");
            return Err(Unavailable(format!(
                "pip cannot install the packages in {}; check that its package index can be reached: {last}",
                requirements.display()
            ))
            .into());
        }
        fs::write(marker, wanted)?;
        eprintln!("    python: ok, {}", took(started.elapsed()));
        Ok(environment)
    }

    /// A command that runs a program of the environment.
    pub(crate) fn program(&self, name: &str) -> Command {
        Command::new(self.home.join("bin").join(name))
    }
}
