//! npm packages that tasks use, installed in the versions that a `package-lock.json` lists.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use crate::run::{Result, Unavailable, took};

/// A folder with all packages of its lock file.
pub(crate) struct Packages {
    folder: PathBuf,
}

impl Packages {
    /// Installs the packages of `package-lock.json` in `folder`, unless they are those of the
    /// last time. `user` names what needs them, for the messages.
    pub(crate) fn install(user: &str, folder: &Path) -> Result<Packages> {
        let lock = folder.join("package-lock.json");
        let wanted = fs::read_to_string(&lock).map_err(|error| format!("{}: {error}", lock.display()))?;
        let packages = Packages { folder: folder.to_path_buf() };
        let modules = folder.join("node_modules");
        // Written last, so that an interrupted installation starts again.
        let marker = modules.join("installed.json");
        if fs::read_to_string(&marker).is_ok_and(|installed| installed == wanted) {
            return Ok(packages);
        }
        let started = Instant::now();
        eprintln!("==> npm: installing the packages of {user} under {}", modules.display());
        let mut install = Command::new("npm");
        install
            .args(["ci", "--loglevel=error", "--no-audit", "--no-fund", "--ignore-scripts"])
            .current_dir(folder)
            .stdin(Stdio::null());
        let output = install.output().map_err(|error| format!("npm: {error}"))?;
        if !output.status.success() {
            return Err(Unavailable(format!(
                "npm cannot install the packages in {}; check that its registry can be reached: {}",
                lock.display(),
                reason(&String::from_utf8_lossy(&output.stderr)),
            ))
            .into());
        }
        fs::write(marker, wanted)?;
        eprintln!("    npm: ok, {}", took(started.elapsed()));
        Ok(packages)
    }

    /// The folder that contains `node_modules`.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A command that runs a program of the packages in their folder.
    pub(crate) fn program(&self, name: &str) -> Command {
        let mut program = Command::new(self.folder.join("node_modules/.bin").join(name));
        program.current_dir(&self.folder);
        program
    }
}

/// What npm printed about its failure, on one line. The last line of npm names its log file, so
/// it is left out.
fn reason(stderr: &str) -> String {
    let lines = stderr.lines().map(|line| line.trim_start_matches("npm error").trim());
    let informative = lines.filter(|line| !line.is_empty() && !line.starts_with("A complete log"));
    let reason: Vec<&str> = informative.take(5).collect();
    if reason.is_empty() { "no error message".into() } else { reason.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_npm_is_one_line_without_the_log_file() {
        let stderr = "npm error code ENOTFOUND\nnpm error\nnpm error network request failed\n\
                      npm error A complete log of this run can be found in: debug.log\n";
        assert_eq!(reason(stderr), "code ENOTFOUND; network request failed");
        assert_eq!(reason(""), "no error message");
    }
}
