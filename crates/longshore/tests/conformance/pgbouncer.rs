//! PgBouncer between the program and Postgres. Everything works in session mode. A mode that
//! would mix up prepared statements is refused when the database is opened.
//!
//! The cases are skipped if `pgbouncer` is not installed; `cargo xtask test` installs it if
//! it can.

use std::fs::{self, File, Permissions};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::Instant;

use longshore::store::{ClaimCursor, ClaimRequest, NewWorker};
use longshore::{Client, ListFilter, Report};
use sqlx::postgres::PgConnectOptions;

use crate::fixture::*;

cases! {
    only on postgres:
    everything_works_through_pgbouncer_in_session_mode,
    pgbouncer_in_transaction_mode_is_refused_unless_it_tracks_statements,
    pgbouncer_in_statement_mode_is_refused,
    a_parameter_that_pgbouncer_does_not_know_is_named,
}

/// A PgBouncer in front of the test database. It ends when this is dropped.
struct PgBouncer {
    child: Child,
    folder: PathBuf,
    address: String,
}

impl PgBouncer {
    /// Starts PgBouncer with these settings; `None` if it is not installed.
    fn start(settings: &str) -> Option<Self> {
        let Some(program) = program() else {
            crate::missing::skip("pgbouncer is not installed (Debian: apt-get install pgbouncer)");
            return None;
        };
        // A port that was free a moment ago may be taken by now.
        let started = (0..5).find_map(|_| PgBouncer::start_on_free_port(&program, settings));
        Some(started.expect("pgbouncer did not start"))
    }

    fn start_on_free_port(program: &PathBuf, settings: &str) -> Option<Self> {
        let folder = std::env::temp_dir().join(format!("longshore-pgbouncer-{}", longshore::JobId::new()));
        fs::create_dir(&folder).expect("a folder");
        let port =
            TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let server = PgConnectOptions::from_str(&database_url()).expect("a URL");
        let password = password().map(|password| format!(" password={password}")).unwrap_or_default();
        let configuration = format!(
            "[databases]\n* = host={} port={} user={}{password}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n\
             default_pool_size = 30\n{settings}\n",
            server.get_host(),
            server.get_port(),
            server.get_username(),
        );
        let file = folder.join("pgbouncer.ini");
        fs::write(&file, configuration).expect("the configuration");
        // PgBouncer does not run as root, and must be able to read the file.
        for path in [&folder, &file] {
            fs::set_permissions(path, Permissions::from_mode(0o755)).expect("permissions");
        }
        let mut command = Command::new(program);
        if fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0) {
            command.args(["-u", "nobody"]);
        }
        let log = File::create(folder.join("log")).expect("a log");
        let child = command.arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        let mut bouncer =
            PgBouncer { child: child.expect("pgbouncer"), folder, address: format!("127.0.0.1:{port}") };
        let started = Instant::now();
        while TcpStream::connect(&bouncer.address).is_err() {
            let ended = bouncer.child.try_wait().expect("the process");
            if ended.is_some() || started.elapsed() > MAX_WAIT {
                eprintln!("{}", fs::read_to_string(bouncer.folder.join("log")).unwrap_or_default());
                return None;
            }
            std::thread::sleep(SECOND / 50);
        }
        Some(bouncer)
    }

    /// The URL of a database, through PgBouncer.
    fn url(&self, direct: &str) -> String {
        let server = PgConnectOptions::from_str(&database_url()).expect("a URL");
        let address = format!("{}:{}", server.get_host(), server.get_port());
        assert!(direct.contains(&address), "the URL of the test database must name a host and a port");
        direct.replacen(&address, &self.address, 1)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    folders.map(|folder| folder.join("pgbouncer")).find(|program| program.is_file())
}

/// Whether this PgBouncer has the setting `max_prepared_statements`.
fn can_track_statements() -> bool {
    let program = program().expect("pgbouncer");
    let output = Command::new(program).arg("--version").output().expect("pgbouncer --version");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split_whitespace().nth(1).expect("a version");
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(1), Some(21))
}

/// The password in the URL of the test database.
fn password() -> Option<String> {
    let url = database_url();
    let (_, rest) = url.split_once("://")?;
    let (user, _) = rest.split('/').next()?.rsplit_once('@')?;
    user.split_once(':').map(|(_, password)| password.to_owned())
}

/// Runs a job from the enqueue to its end, and reads it.
async fn use_queue(client: &Client) {
    let id = client.enqueue(job("mail")).await.expect("enqueue").id;
    let worker = NewWorker::new("test");
    client.store().register(&worker).await.expect("register");
    let request = ClaimRequest::new(worker.id, 5);
    let claimed = client.claim(&request, &mut ClaimCursor::default()).await.expect("claim").jobs;
    assert_eq!(ids(&claimed), [id]);
    let report =
        Report { claimed: &claimed[0], ending: done(), follow_ups: Vec::new(), has_progressed: false };
    client.settle(vec![report]).await.expect("settle");
    let by = ListFilter { kind: Some("mail".into()), ..ListFilter::default() };
    assert_eq!(client.list(&by).await.expect("list").jobs[0].id, id);
    assert_eq!(client.check().await.expect("check").problems, []);
}

async fn everything_works_through_pgbouncer_in_session_mode(fixture: Fixture) {
    let Some(bouncer) = PgBouncer::start("pool_mode = session") else { return };
    let url = bouncer.url(&fixture.bare_url());
    let client = Client::connect(&url).await.expect("connect");
    client.migrate().await.expect("migrate");
    use_queue(&client).await;
    // Another process notifies this one.
    let mut wakeups = client.store().subscribe().await.expect("subscribe");
    let other = Client::connect(&url).await.expect("connect");
    other.enqueue(job("sms").queue("phones")).await.expect("enqueue");
    let notified = tokio::time::timeout(MAX_WAIT, wakeups.next()).await.expect("a notification");
    assert_eq!(notified.as_deref(), Some("phones"));
    // Many statements at once, on several connections.
    let enqueued = (0..20).map(|n| {
        let client = if n % 2 == 0 { client.clone() } else { other.clone() };
        tokio::spawn(async move {
            client.enqueue(job("fax").unique_key(format!("{n}"), Default::default())).await
        })
    });
    for enqueued in enqueued.collect::<Vec<_>>() {
        enqueued.await.expect("a task").expect("enqueue");
    }
}

async fn assert_refused(url: &str, parts: &[&str]) {
    let error = Client::connect(url).await.expect_err("must be refused");
    for part in parts {
        assert!(error.to_string().contains(part), "`{part}` is not in: {error}");
    }
}

async fn pgbouncer_in_transaction_mode_is_refused_unless_it_tracks_statements(fixture: Fixture) {
    let settings = |tracked: u32| match can_track_statements() {
        true => format!("pool_mode = transaction\nmax_prepared_statements = {tracked}"),
        false => "pool_mode = transaction".to_owned(),
    };
    if program().is_none() {
        PgBouncer::start("");
        return;
    }
    let bouncer = PgBouncer::start(&settings(0)).expect("installed");
    // The second time, server connections have statements of the first.
    for _ in 0..2 {
        let remedies = ["transaction mode", "pool_mode = session", "max_prepared_statements"];
        assert_refused(&bouncer.url(&fixture.url()), &remedies).await;
    }
    // The smallest pool has only one server connection.
    let smallest = PgBouncer::start(&format!("{}\nmax_db_connections = 1", settings(0))).expect("installed");
    assert_refused(&smallest.url(&fixture.url()), &["transaction mode"]).await;
    if can_track_statements() {
        let tracking = PgBouncer::start(&settings(100)).expect("installed");
        use_queue(&Client::connect(&tracking.url(&fixture.url())).await.expect("connect")).await;
    }
}

async fn pgbouncer_in_statement_mode_is_refused(fixture: Fixture) {
    let Some(bouncer) = PgBouncer::start("pool_mode = statement") else { return };
    assert_refused(&bouncer.url(&fixture.url()), &["statement mode", "pool_mode = session"]).await;
}

async fn a_parameter_that_pgbouncer_does_not_know_is_named(fixture: Fixture) {
    let Some(bouncer) = PgBouncer::start("pool_mode = session") else { return };
    let url = with_parameter(&bouncer.url(&fixture.url()), "options=-c%20lock_timeout%3D5s");
    assert_refused(&url, &["options", "ignore_startup_parameters"]).await;
}
