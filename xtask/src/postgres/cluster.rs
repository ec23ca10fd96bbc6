//! A Postgres cluster in its own directory: creating it, starting and stopping its
//! server, and finding its URL. Callers decide when the server stops.
//!
//! ```text
//! <home>/            readable by the owner only; also contains the socket
//!   data/            the data directory that initdb creates
//!   password         the superuser's password, random
//!   log              the server's log since its last start
//! ```

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    net::TcpListener,
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{Binaries, Owner};
use crate::run::{self, Result};

/// What the server is configured for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Tuning {
    /// Many short tests; losing the data does no harm.
    Fast,
    /// Durable commits, as in production, and enough memory for benchmarks.
    Durable,
}

/// A cluster, which may not exist or run yet.
pub(crate) struct Cluster {
    home: PathBuf,
    binaries: Binaries,
    owner: Owner,
}

impl Cluster {
    pub(crate) fn at(home: PathBuf, binaries: Binaries, owner: Owner) -> Cluster {
        Cluster { home, binaries, owner }
    }

    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    pub(crate) fn binaries(&self) -> &Binaries {
        &self.binaries
    }

    pub(crate) fn exists(&self) -> bool {
        self.data().join("PG_VERSION").exists()
    }

    /// Creates the cluster in a directory that is new or belongs to the owner.
    pub(crate) fn create(&self) -> Result {
        self.owner.make_dir(&self.home)?;
        let password = self.home.join("password");
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&password)?
            .write_all(random_hex(16)?.as_bytes())?;
        self.owner.give(&password)?;

        let output = self
            .owner
            .command(self.binaries.program("initdb"))
            .current_dir(&self.home)
            .args(["--pgdata", "data", "--pwfile", "password"])
            .args(["--username", "postgres", "--no-instructions"])
            // Text sorts by bytes on every machine, as it does in SQLite.
            .args(["--encoding", "UTF8", "--locale", "C"])
            // Only the owner can reach the socket's directory. TCP requires the
            // password, with md5: the password is random and stays on this machine,
            // and SCRAM costs an unoptimised client 40 ms per connection.
            .args(["--auth-local", "trust", "--auth-host", "md5"])
            // The new cluster does not have to survive a crash of the machine.
            .arg("--no-sync")
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("initdb: {error}"))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(format!("initdb failed ({}):\n{}", output.status, stderr.trim()).into());
        }
        Ok(())
    }

    /// Starts the server and waits until it accepts connections. It listens on
    /// `port`, or on a free port if that is taken or `None`.
    pub(crate) fn start(&self, tuning: Tuning, mut port: Option<u16>) -> Result<Child> {
        // A port that was free a moment ago may be taken when the server binds it:
        // another process may be starting a cluster at the same time.
        for _ in 0..10 {
            let attempt = match port.take() {
                Some(port) => port,
                None => free_port()?,
            };
            let mut server = self.spawn(tuning, attempt)?;
            if self.wait_until_ready(&mut server)? {
                return Ok(server);
            }
            if !self.log().contains("could not create any TCP/IP sockets") {
                return Err(format!("postgres did not start:\n{}", self.log_tail()).into());
            }
        }
        Err("postgres did not start: all 10 ports that were tried were taken".into())
    }

    /// The URL of the running server; `None` if it is not running.
    pub(crate) fn url(&self) -> Option<String> {
        let port = self.port()?;
        let password = fs::read_to_string(self.home.join("password")).ok()?;
        Some(format!("postgres://postgres:{password}@127.0.0.1:{port}/postgres"))
    }

    /// The port that the server listens on; `None` if it is not running.
    pub(crate) fn port(&self) -> Option<u16> {
        let running = run::succeeds(self.pg_ctl().arg("status"));
        self.pid_file().filter(|_| running).map(|file| file.port)
    }

    /// Stops the server and keeps its data; returns false if it was not running.
    pub(crate) fn stop(&self) -> Result<bool> {
        if self.port().is_none() {
            return Ok(false);
        }
        if !run::succeeds(self.pg_ctl().args(["stop", "--mode", "fast", "--wait"])) {
            return Err(format!("postgres did not stop:\n{}", self.log_tail()).into());
        }
        Ok(true)
    }

    /// The last lines of the server's log.
    pub(crate) fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    fn spawn(&self, tuning: Tuning, port: u16) -> Result<Child> {
        let log = File::create(self.home.join("log"))?;
        let mut command = self.owner.command(self.binaries.program("postgres"));
        command.current_dir(&self.home).arg("-D").arg(self.data());
        for (name, value) in settings(tuning, memory_mb()) {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        if tuning == Tuning::Durable && self.binaries.have_library("pg_stat_statements") {
            // Loaded, so that benchmarks can turn it on; off, because it costs time.
            command.args(["-c", "shared_preload_libraries=pg_stat_statements"]);
            command.args(["-c", "pg_stat_statements.track=none"]);
        }
        command
            .args(["-c", "listen_addresses=127.0.0.1"])
            .args(["-c", &format!("port={port}")])
            .args(["-c", &format!("unix_socket_directories={}", self.socket())]);
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C in the terminal must not stop the server before the tests that
            // use it.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("postgres: {error}").into())
    }

    /// Returns true once the server is ready, and false if it ended instead.
    fn wait_until_ready(&self, server: &mut Child) -> Result<bool> {
        let timeout = Duration::from_secs(120);
        let started = Instant::now();
        while started.elapsed() < timeout {
            if server.try_wait()?.is_some() {
                return Ok(false);
            }
            // A server that crashed may have left its file behind.
            let ours = |file: &PidFile| file.pid == server.id();
            if self.pid_file().filter(ours).is_some_and(|file| file.is_ready) {
                return Ok(true);
            }
            thread::sleep(Duration::from_millis(20));
        }
        server.kill()?;
        server.wait()?;
        Err(format!("postgres was not ready after {}:\n{}", run::took(timeout), self.log_tail()).into())
    }

    fn pg_ctl(&self) -> std::process::Command {
        let mut pg_ctl = self.owner.command(self.binaries.program("pg_ctl"));
        pg_ctl.current_dir("/").arg("-D").arg(self.data());
        pg_ctl
    }

    fn data(&self) -> PathBuf {
        self.home.join("data")
    }

    fn log(&self) -> String {
        let log = fs::read(self.home.join("log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    fn pid_file(&self) -> Option<PidFile> {
        PidFile::parse(&fs::read_to_string(self.data().join("postmaster.pid")).ok()?)
    }

    /// The directory for the socket, or an empty string (no socket) if the socket's
    /// path would be longer than the system allows.
    fn socket(&self) -> String {
        let home = self.home.to_string_lossy();
        if home.len() + "/.s.PGSQL.65535".len() < 104 { home.into_owned() } else { String::new() }
    }
}

fn settings(tuning: Tuning, memory_mb: Option<u64>) -> Vec<(&'static str, String)> {
    match tuning {
        Tuning::Fast => vec![
            ("fsync", "off".into()),
            ("synchronous_commit", "off".into()),
            ("full_page_writes", "off".into()),
            ("max_connections", "300".into()),
            ("shared_buffers", "256MB".into()),
        ],
        Tuning::Durable => {
            // The usual quarter of the memory, but not more than the measurements in
            // the documentation were made with.
            let shared_buffers = memory_mb.map_or(512, |total| (total / 4).clamp(128, 2048));
            vec![
                ("fsync", "on".into()),
                ("synchronous_commit", "on".into()),
                ("full_page_writes", "on".into()),
                ("max_connections", "200".into()),
                ("shared_buffers", format!("{shared_buffers}MB")),
                ("max_wal_size", "8GB".into()),
            ]
        }
    }
}

fn memory_mb() -> Option<u64> {
    total_memory_mb(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn total_memory_mb(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: u64 = total.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes / 1024)
}

/// The contents of `postmaster.pid`.
#[derive(Debug, PartialEq)]
struct PidFile {
    pid: u32,
    port: u16,
    is_ready: bool,
}

impl PidFile {
    /// Returns `None` while the server is still writing the file.
    fn parse(text: &str) -> Option<PidFile> {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        Some(PidFile {
            pid: lines.first()?.parse().ok()?,
            port: lines.get(3)?.parse().ok()?,
            is_ready: lines.get(7) == Some(&"ready"),
        })
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// `bytes` random bytes as hexadecimal digits, for names and passwords.
pub(crate) fn random_hex(bytes: usize) -> Result<String> {
    let mut random = vec![0; bytes];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID_FILE: &str = "\
4711
/tmp/longshore-1/data
1763180000
54329
/tmp/longshore-1
127.0.0.1
 12345678      9
ready   
";

    #[test]
    fn the_pid_file_contains_the_port_and_whether_the_server_is_ready() {
        let ready = PidFile { pid: 4711, port: 54329, is_ready: true };
        assert_eq!(PidFile::parse(PID_FILE), Some(ready));
        let starting = PID_FILE.replace("ready", "starting");
        assert!(PidFile::parse(&starting).is_some_and(|file| !file.is_ready));
        assert_eq!(PidFile::parse("4711\n/tmp/longshore-1/data\n"), None);
    }

    #[test]
    fn shared_buffers_are_a_quarter_of_the_memory_up_to_two_gigabytes() {
        let shared_buffers = |memory| {
            settings(Tuning::Durable, memory)
                .into_iter()
                .find(|(name, _)| *name == "shared_buffers")
                .map(|(_, value)| value)
        };
        assert_eq!(shared_buffers(Some(4096)).as_deref(), Some("1024MB"));
        assert_eq!(shared_buffers(Some(65536)).as_deref(), Some("2048MB"));
        assert_eq!(shared_buffers(None).as_deref(), Some("512MB"));
    }

    #[test]
    fn durable_tuning_turns_every_durability_setting_on() {
        let durable = settings(Tuning::Durable, None);
        for name in ["fsync", "synchronous_commit", "full_page_writes"] {
            assert!(durable.contains(&(name, "on".into())), "{name}");
        }
    }

    #[test]
    fn memory_is_read_in_megabytes() {
        let meminfo = "MemFree:  77 kB\nMemTotal:       24576000 kB\n";
        assert_eq!(total_memory_mb(meminfo), Some(24000));
    }

    #[test]
    fn random_names_differ() {
        let [one, two] = [1, 2].map(|_| random_hex(8).expect("there is a /dev/urandom"));
        assert_eq!(one.len(), 16);
        assert_ne!(one, two);
    }
}
