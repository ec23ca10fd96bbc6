//! Python programs that tasks run: an environment under `target`, with the
//! versions that a list names.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use crate::run::{Result, succeeds, target_dir, took};

/// An environment with everything of a list installed.
pub(crate) struct Environment {
    home: PathBuf,
}

impl Environment {
    /// The environment of that name under `target`, made or brought up to date if
    /// it is not what the list says.
    pub(crate) fn with(name: &str, list: &Path) -> Result<Environment> {
        let home = target_dir().join("python").join(name);
        let wanted = fs::read_to_string(list).map_err(|error| format!("{}: {error}", list.display()))?;
        // Written last, so that an installation that was cut short is begun anew.
        let mark = home.join("installed.txt");
        let environment = Environment { home };
        if fs::read_to_string(&mark).is_ok_and(|installed| installed == wanted) {
            return Ok(environment);
        }
        let began = Instant::now();
        eprintln!("==> python: installing {name} under {}", environment.home.display());
        let _ = fs::remove_dir_all(&environment.home);
        let mut make = Command::new("python3");
        make.args(["-m", "venv"]).arg(&environment.home);
        if !succeeds(&mut make) {
            return Err("`python3 -m venv` does not work; install Python 3 with its venv module \
                        (Debian: apt-get install python3-venv)"
                .into());
        }
        let mut install = environment.program("pip");
        install.args(["install", "--quiet", "--disable-pip-version-check", "--requirement"]).arg(list);
        let done = install.output().map_err(|error| format!("pip: {error}"))?;
        if !done.status.success() {
            let words = String::from_utf8_lossy(&done.stderr);
            let last = words.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it says nothing");
            return Err(format!(
                "pip cannot install what {} lists, is its registry within reach? {last}",
                list.display()
            )
            .into());
        }
        fs::write(mark, wanted)?;
        eprintln!("    python: ok, {}", took(began.elapsed()));
        Ok(environment)
    }

    /// A program of the environment.
    pub(crate) fn program(&self, name: &str) -> Command {
        Command::new(self.home.join("bin").join(name))
    }
}
