//! A cluster that is removed when it is dropped, and also when this program is
//! interrupted or killed, when destructors do not run.

use std::{
    env,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{Binaries, Cluster, Owner, Tuning, cluster::random_hex};
use crate::run::{self, Result};

/// Where the files of a temporary cluster are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Location {
    /// With other temporary files, possibly in memory.
    TempDir,
    /// On a disk, because benchmarks measure the cost of a commit.
    Disk,
}

/// A running cluster; dropping it stops the server and removes its files.
pub(crate) struct TemporaryCluster {
    url: String,
    cluster: Cluster,
    server: Child,
    watchdog: Watchdog,
}

impl TemporaryCluster {
    pub(crate) fn start(binaries: Binaries, tuning: Tuning, location: Location) -> Result<TemporaryCluster> {
        let owner = Owner::choose()?;
        let home = location.directory(&owner)?.join(format!("longshore-{}", random_hex(4)?));
        // Start the watchdog before there are files or processes to clean up.
        let watchdog = Watchdog::start(&home)?;
        let cluster = Cluster::at(home, binaries, owner);
        cluster.create()?;
        let server = cluster.start(tuning, None)?;
        let url = cluster.url().ok_or("postgres ended right after its start")?;
        eprintln!("==> postgres: started a temporary cluster in {}", cluster.home().display());
        Ok(TemporaryCluster { url, cluster, server, watchdog })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for TemporaryCluster {
    fn drop(&mut self) {
        if let Ok(Some(status)) = self.server.try_wait() {
            eprintln!("xtask: postgres ended unexpectedly ({status}):\n{}", self.cluster.log_tail());
        }
        self.watchdog.clean_up();
        // The watchdog has stopped the server; this only reaps the process.
        let _ = self.server.wait();
    }
}

impl Location {
    /// The first candidate directory that the owner can reach.
    fn directory(self, owner: &Owner) -> Result<PathBuf> {
        let candidates = match self {
            Location::TempDir => [env::temp_dir(), "/tmp".into()],
            Location::Disk => [run::target_dir(), "/var/tmp".into()],
        };
        candidates.into_iter().find(|dir| owner.can_reach(dir)).ok_or_else(|| {
            "there is no directory for a temporary cluster that its owner can reach; set TMPDIR".into()
        })
    }
}

/// A shell that waits until its standard input closes, then stops the server and
/// removes its files. The input closes when this program drops the pipe or dies.
struct Watchdog {
    shell: Child,
}

/// SIGQUIT is Postgres' immediate shutdown: the data is removed, so no checkpoint is
/// needed.
const CLEAN_UP_ON_EOF: &str = r#"
    trap '' HUP INT TERM
    read -r _
    running="$1/data/postmaster.pid"
    pid=$(head -n 1 "$running" 2>/dev/null)
    if [ -n "$pid" ]; then
        kill -QUIT "$pid"
        tenths=0
        while [ -e "$running" ] && kill -0 "$pid" && [ $tenths -lt 100 ]; do
            sleep 0.1
            tenths=$((tenths + 1))
        done
        [ -e "$running" ] && kill -KILL "$pid"
    fi
    # An initdb whose parent died may still be adding files.
    for _ in 1 2 3 4 5; do
        rm -rf "$1" && break
        sleep 1
    done
"#;

impl Watchdog {
    fn start(home: &Path) -> Result<Watchdog> {
        let shell = Command::new("sh")
            .args(["-c", CLEAN_UP_ON_EOF, "sh"])
            .arg(home)
            .current_dir("/")
            .stdin(Stdio::piped())
            // Not inherited: a reader of this program's output would wait for the
            // watchdog to end.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("sh: {error}"))?;
        Ok(Watchdog { shell })
    }

    /// Triggers the cleanup and waits for it.
    fn clean_up(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.clean_up();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn dropping_the_watchdog_removes_the_files() {
        let home = env::temp_dir()
            .join(format!("longshore-watched-{}", random_hex(4).expect("there is a /dev/urandom")));
        fs::create_dir_all(home.join("data")).expect("temp dir is writable");
        let watchdog = Watchdog::start(&home).expect("there is a shell");
        assert!(home.exists(), "the files stay until then");
        drop(watchdog);
        assert!(!home.exists());
    }
}
