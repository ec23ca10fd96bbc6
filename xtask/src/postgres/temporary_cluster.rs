//! A cluster that cannot outlive us: it goes when it is dropped, and it goes
//! when this program is interrupted or killed, which no destructor survives.

use std::{
    env,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{Binaries, Cluster, Owner, Tuning, cluster::random_hex};
use crate::run::{self, Result};

/// Where a cluster that will not be kept is put meanwhile.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Location {
    /// With the other temporary files, which may well be memory.
    TempDir,
    /// On a disk, because what a commit costs is what is being measured.
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
        // Before there is anything to clean up, so that no moment is unguarded.
        let watchdog = Watchdog::over(&home)?;
        let cluster = Cluster::at(home, binaries, owner);
        cluster.create()?;
        let server = cluster.start(tuning, None)?;
        let url = cluster.url().ok_or("postgres ended as soon as it was up")?;
        eprintln!("==> postgres: a throw-away cluster in {}", cluster.home().display());
        Ok(TemporaryCluster { url, cluster, server, watchdog })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for TemporaryCluster {
    fn drop(&mut self) {
        if let Ok(Some(status)) = self.server.try_wait() {
            eprintln!("xtask: postgres ended before its time ({status}):\n{}", self.cluster.log_tail());
        }
        self.watchdog.release();
        // The watchdog has stopped it; this only collects it.
        let _ = self.server.wait();
    }
}

impl Location {
    /// The first suitable directory that the owner can get to.
    fn directory(self, owner: &Owner) -> Result<PathBuf> {
        let candidates = match self {
            Location::TempDir => [env::temp_dir(), "/tmp".into()],
            Location::Disk => [run::target_dir(), "/var/tmp".into()],
        };
        candidates
            .into_iter()
            .find(|dir| owner.can_reach(dir))
            .ok_or_else(|| "found no directory for a throw-away cluster; set TMPDIR".into())
    }
}

/// A shell that waits for the end of its input, which comes when we let go of
/// the pipe or when the system takes it from our dead hands.
struct Watchdog {
    shell: Child,
}

/// SIGQUIT, Postgres' immediate shutdown: a checkpoint would be for nothing.
const WATCH: &str = r#"
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
    # An initdb that lost us halfway may still be adding files.
    for _ in 1 2 3 4 5; do
        rm -rf "$1" && break
        sleep 1
    done
"#;

impl Watchdog {
    fn over(home: &Path) -> Result<Watchdog> {
        let shell = Command::new("sh")
            .args(["-c", WATCH, "sh"])
            .arg(home)
            .current_dir("/")
            .stdin(Stdio::piped())
            // Not ours: whoever reads our output would wait for the watchdog.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("sh: {error}"))?;
        Ok(Watchdog { shell })
    }

    /// Lets the watchdog do its work and waits for it.
    fn release(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_watchdog_removes_what_it_guards_once_it_is_let_go() {
        let home = env::temp_dir()
            .join(format!("longshore-watched-{}", random_hex(4).expect("there is a /dev/urandom")));
        fs::create_dir_all(home.join("data")).expect("temp dir is writable");
        let watchdog = Watchdog::over(&home).expect("there is a shell");
        assert!(home.exists(), "not before");
        drop(watchdog);
        assert!(!home.exists());
    }
}
