//! A Postgres server for one test, which the test can stop and start. It does not
//! outlive the test: a watchdog shell stops it when its standard input closes.

use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use longshore::JobId;
use sqlx::Connection;

pub(crate) struct PostgresServer {
    programs: PathBuf,
    home: PathBuf,
    /// The user and group that the server runs as, if we are root: Postgres refuses
    /// to run as root.
    account: Option<(u32, u32)>,
    port: u16,
    watchdog: Child,
}

impl PostgresServer {
    /// Creates and starts a server. Returns `None` if Postgres is not installed.
    pub(crate) fn create() -> Option<Self> {
        let server = PostgresServer::with_empty_home()?;
        server.run(
            "initdb",
            &["-A", "trust", "-U", "postgres", "--no-sync", "--encoding", "UTF8", "--locale", "C"],
        );
        server.start();
        Some(server)
    }

    /// Creates and starts a standby of this server. Commits wait for it from now on.
    pub(crate) async fn create_synchronous_standby(&self) -> Self {
        let standby = PostgresServer::with_empty_home().unwrap();
        let port = self.port.to_string();
        let source = ["-h", "127.0.0.1", "-p", &port, "-U", "postgres"];
        let how = ["--write-recovery-conf", "--checkpoint", "fast", "--no-sync"];
        standby.run("pg_basebackup", &[&source[..], &how[..]].concat());
        standby.start();
        let mut connection = sqlx::PgConnection::connect(&self.url()).await.unwrap();
        for sql in ["alter system set synchronous_standby_names = '*'", "select pg_reload_conf()"] {
            sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
        }
        loop {
            let synced = "select exists (select from pg_stat_replication where sync_state = 'sync')";
            if sqlx::query_scalar(synced).fetch_one(&mut connection).await.unwrap() {
                return standby;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Makes a standby the primary.
    pub(crate) fn promote(&self) {
        self.run("pg_ctl", &["-w", "promote"]);
    }

    /// Stops all processes of the server without ending them: connections stay open and
    /// get no reply.
    pub(crate) fn freeze(&self) {
        self.signal_all("STOP");
    }

    fn signal_all(&self, signal: &str) {
        let Ok(file) = std::fs::read_to_string(self.home.join("data/postmaster.pid")) else { return };
        let server = file.lines().next().unwrap().to_owned();
        // The server first, so that it starts no new processes.
        let _ = Command::new("kill").args(["-s", signal, &server]).status();
        let _ = Command::new("pkill").args([&format!("-{signal}"), "-P", &server]).status();
    }

    fn with_empty_home() -> Option<Self> {
        let programs = programs()?;
        let home = Path::new("/tmp").join(format!("longshore-faults-pg-{}", JobId::new().0.simple()));
        std::fs::create_dir(&home).unwrap();
        let account =
            if std::fs::metadata(&home).unwrap().uid() == 0 { Some(unprivileged_account()?) } else { None };
        if let Some((uid, gid)) = account {
            chown(&home, Some(uid), Some(gid)).unwrap();
        }
        let stop =
            format!("{} -D {}/data -m immediate stop", programs.join("pg_ctl").display(), home.display());
        let mut watchdog = Command::new("sh");
        watchdog
            .args(["-c", &format!("trap '' HUP INT TERM; read -r _; {stop}; rm -rf {}", home.display())])
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        if let Some((uid, gid)) = account {
            watchdog.uid(uid).gid(gid);
        }
        let watchdog = watchdog.spawn().unwrap();
        Some(PostgresServer { programs, home, account, port: free_port(), watchdog })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Starts the server and waits until it is ready.
    pub(crate) fn start(&self) {
        let settings = format!(
            "-c listen_addresses=127.0.0.1 -c port={} -c unix_socket_directories='' -c max_connections=100 \
             -c fsync=off -c shared_buffers=32MB -c wal_level=logical",
            self.port
        );
        let log = self.home.join("log").display().to_string();
        self.run("pg_ctl", &["-w", "-l", &log, "-o", &settings, "start"]);
    }

    /// Stops the server like a crash does. Committed data survives.
    pub(crate) fn stop(&self) {
        self.run("pg_ctl", &["-w", "-m", "immediate", "stop"]);
    }

    fn run(&self, program: &str, args: &[&str]) {
        let mut command = Command::new(self.programs.join(program));
        command.arg("-D").arg(self.home.join("data")).args(args).current_dir("/");
        // The server inherits these handles and would keep our pipes open.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if let Some((uid, gid)) = self.account {
            command.uid(uid).gid(gid);
        }
        let status = command.status().unwrap();
        let log = std::fs::read_to_string(self.home.join("log")).unwrap_or_default();
        assert!(status.success(), "{program} {args:?}: {status}\n{log}");
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // A frozen server would not stop.
        self.signal_all("CONT");
        drop(self.watchdog.stdin.take());
        let _ = self.watchdog.wait();
        // An unprivileged watchdog cannot remove the folder itself from a parent that
        // it does not own.
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

/// A port that is free, and that stays free until a server uses it: systems give ports above 32,768 to connections
/// and to servers that do not name one.
pub(crate) fn free_port() -> u16 {
    loop {
        // Random, because other tests look for a port at the same time.
        let port = 10_000 + JobId::new().0.as_u128() as u16 % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// The folder with the server's programs.
fn programs() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").output().ok();
    let configured = output.map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    let installed = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let installed = installed.map(|version| version.path().join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> =
        configured.into_iter().chain(installed).chain(std::env::split_paths(&path)).collect();
    folders
        .into_iter()
        .find(|folder| ["initdb", "pg_ctl", "postgres"].iter().all(|name| folder.join(name).exists()))
}

/// The user and group id of an unprivileged account.
fn unprivileged_account() -> Option<(u32, u32)> {
    let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
    ["postgres", "nobody"].iter().find_map(|name| {
        let line = passwd.lines().find(|line| line.split(':').next() == Some(name))?;
        let mut ids = line.split(':').skip(2);
        Some((ids.next()?.parse().ok()?, ids.next()?.parse().ok()?))
    })
}
