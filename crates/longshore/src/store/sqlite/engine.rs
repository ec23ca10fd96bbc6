//! The threads of the engine: one that writes, a few that read.
//!
//! SQLite lets one connection write at a time, and a commit costs a sync of the disk. So
//! one thread owns the writing connection and commits calls in groups: while one commit
//! is in progress, the next group collects. A single caller waits for no other. A call
//! that has started runs to its end even if its caller no longer waits, so dropping a
//! future does no harm.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rusqlite::{Connection, OpenFlags};
use tokio::sync::oneshot;

use super::SqliteStore;
use super::tx::{Fault, Tx};
use crate::error::{Error, Result};
use crate::private_file;
use crate::store::{CancelNotices, EventNotices, Notice, NoticeSender, Notifying, Wakeups};

/// How long a write waits for another process before it fails as `unavailable`.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the writer checks whether another process has written.
const FOREIGN_WRITES_EVERY: Duration = Duration::from_millis(100);
/// The maximum number of calls that share one commit.
const MAX_GROUP: usize = 256;
const READERS: usize = 3;
const CACHED_STATEMENTS: usize = 160;
/// A larger log is checkpointed less often, and pages that are written again and again
/// (the heads of the indexes) are copied back only once.
const CHECKPOINT_PAGES: u32 = 4000;
const MAX_LOG_BYTES: u32 = 64 * 1024 * 1024;
/// Not larger, because a commit that balanced a tree walks the whole cache (measured
/// with one caller: 30,000 commits/s with 16 MiB, 8,000 with 64 MiB). The operating
/// system caches the rest.
const WRITER_CACHE_KIB: u32 = 16 * 1024;
const READER_CACHE_KIB: u32 = 8 * 1024;

/// Where the tables are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Location {
    /// In a file.
    File(PathBuf),
    /// In memory, visible to this store only.
    Memory,
}

/// Sends calls to the threads. They end when the last clone is dropped.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    writer: Sender<Message>,
    /// `None` for a database in memory, where the writer also reads.
    readers: Option<Sender<Box<dyn Task>>>,
    subscribers: NoticeSender,
}

enum Message {
    Work(Box<dyn Task>),
    /// There is a subscriber: start checking for writes by other processes.
    Subscribed,
}

impl Engine {
    pub(super) async fn open(location: Location) -> Result<Self> {
        let (writer, inbox) = channel();
        let subscribers = NoticeSender::new();
        let (opened, is_open) = oneshot::channel();
        let (at, sender) = (location.clone(), subscribers.clone());
        spawn("longshore-write", move || {
            // Opened on this thread, because it may take long: another process may be
            // recovering the log.
            match open_writer(&at) {
                Ok(mut conn) => {
                    let _ = opened.send(Ok(()));
                    write_until_closed(&mut conn, &inbox, &sender);
                }
                Err(error) => {
                    let _ = opened.send(Err(error));
                }
            }
        })?;
        is_open.await.map_err(|_| ended())??;
        let readers = match location {
            Location::Memory => None,
            Location::File(path) => Some(spawn_readers(&path)?),
        };
        Ok(Engine { writer, readers, subscribers })
    }

    /// Runs `work` in a write transaction. Returns once it is on disk.
    pub(super) async fn write<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, Fault> + Send + 'static,
    {
        self.write_on(|conn| work(&Tx::new(conn))).await
    }

    /// Runs `work` on one snapshot, which includes every write that has returned.
    pub(super) async fn read<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, Fault> + Send + 'static,
    {
        self.read_on(|conn| work(&Tx::new(conn))).await
    }

    /// As [`write`](Self::write), for work that needs the connection itself.
    pub(super) async fn write_on<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Connection) -> Result<T, Fault> + Send + 'static,
    {
        let (caller, reply) = oneshot::channel();
        let call = Call { work: Some(work), result: None, caller, mode: Mode::Write };
        self.writer.send(Message::Work(Box::new(call))).map_err(|_| ended())?;
        reply.await.map_err(|_| ended())?
    }

    /// As [`read`](Self::read), for work that needs the connection itself.
    pub(super) async fn read_on<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Connection) -> Result<T, Fault> + Send + 'static,
    {
        let Some(readers) = &self.readers else { return self.write_on(work).await };
        let (caller, reply) = oneshot::channel();
        let call = Call { work: Some(work), result: None, caller, mode: Mode::Read };
        readers.send(Box::new(call)).map_err(|_| ended())?;
        reply.await.map_err(|_| ended())?
    }

    fn subscribe<T>(&self, subscribe: impl FnOnce(&NoticeSender) -> T) -> T {
        let subscription = subscribe(&self.subscribers);
        let _ = self.writer.send(Message::Subscribed);
        subscription
    }
}

#[async_trait]
impl Notifying for SqliteStore {
    fn notify_local(&self, notices: &[Notice]) -> bool {
        self.engine.subscribers.send(notices)
    }

    async fn notify_others(&self, _: &[Notice]) -> Result<()> {
        // Other processes detect the commit by themselves: `data_version` changes.
        Ok(())
    }

    async fn subscribe(&self) -> Result<Wakeups> {
        Ok(self.engine.subscribe(NoticeSender::wakeups))
    }

    async fn subscribe_to_cancels(&self) -> Result<CancelNotices> {
        Ok(self.engine.subscribe(NoticeSender::cancels))
    }

    async fn subscribe_to_events(&self) -> Result<EventNotices> {
        Ok(EventNotices::NEVER)
    }
}

/// A call, with the types of its work erased.
trait Task: Send {
    /// Runs the work. Returns whether to keep its changes.
    fn run(&mut self, conn: &mut Connection) -> bool;
    /// Replies to the caller, given the result of the whole transaction.
    fn reply(self: Box<Self>, committed: Result<(), &Error>);
}

struct Call<T, F> {
    work: Option<F>,
    /// `None` before it ran, and for a read that was skipped.
    result: Option<Result<T>>,
    caller: oneshot::Sender<Result<T>>,
    mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Runs even if its caller no longer waits.
    Write,
    /// Is skipped if its caller no longer waits.
    Read,
}

impl<T, F> Task for Call<T, F>
where
    T: Send,
    F: FnOnce(&mut Connection) -> Result<T, Fault> + Send,
{
    fn run(&mut self, conn: &mut Connection) -> bool {
        if self.mode == Mode::Read && self.caller.is_closed() {
            return false;
        }
        let Some(work) = self.work.take() else { return false };
        // A panic in one call must not end the thread, which serves all callers.
        let result = catch_unwind(AssertUnwindSafe(|| work(conn)))
            .unwrap_or_else(|_| Err(Error::internal("the SQLite engine panicked; this is a bug").into()));
        let keep = result.is_ok();
        self.result = Some(result.map_err(Error::from));
        keep
    }

    fn reply(self: Box<Self>, committed: Result<(), &Error>) {
        let result = match (self.result, committed) {
            (Some(Err(own)), _) => Err(own),
            (_, Err(error)) => Err(error.shared()),
            (Some(Ok(done)), Ok(())) => Ok(done),
            (None, Ok(())) => return,
        };
        let _ = self.caller.send(result);
    }
}

fn write_until_closed(conn: &mut Connection, inbox: &Receiver<Message>, subscribers: &NoticeSender) {
    let mut foreign = ForeignWrites { version: None, checked: Instant::now() };
    loop {
        let first = if !subscribers.has_subscribers() {
            foreign.version = None;
            inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            foreign.check(conn, subscribers);
            inbox.recv_timeout(FOREIGN_WRITES_EVERY)
        };
        let first = match first {
            Ok(Message::Work(task)) => task,
            Ok(Message::Subscribed) | Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let waiting = inbox.try_iter().filter_map(|message| match message {
            Message::Work(task) => Some(task),
            Message::Subscribed => None,
        });
        commit_together(conn, std::iter::once(first).chain(waiting).take(MAX_GROUP).collect());
    }
}

/// Runs calls in one transaction, each in its own savepoint, so that a call that
/// fails is undone without the others. Replies only after the commit.
fn commit_together(conn: &mut Connection, mut group: Vec<Box<dyn Task>>) {
    let committed = run_group(conn, &mut group).map_err(Error::from);
    if committed.is_err() && !conn.is_autocommit() {
        let _ = run(conn, "rollback");
    }
    for task in group {
        task.reply(committed.as_ref().copied());
    }
}

fn run_group(conn: &mut Connection, group: &mut [Box<dyn Task>]) -> Result<(), Fault> {
    run(conn, "begin immediate")?;
    if let [task] = group {
        let keep = task.run(conn);
        check_still_open(conn)?;
        return run(conn, if keep { "commit" } else { "rollback" });
    }
    for task in group {
        run(conn, "savepoint call")?;
        let keep = task.run(conn);
        check_still_open(conn)?;
        if !keep {
            run(conn, "rollback to call")?;
        }
        run(conn, "release call")?;
    }
    run(conn, "commit")
}

/// Fails if SQLite has rolled back the transaction by itself, as it does when the disk is
/// full or a read fails.
fn check_still_open(conn: &Connection) -> Result<(), Fault> {
    if conn.is_autocommit() {
        return Err(Error::unavailable("the database rolled back the transaction; try again").into());
    }
    Ok(())
}

fn run(conn: &Connection, sql: &str) -> Result<(), Fault> {
    conn.prepare_cached(sql)?.execute([])?;
    Ok(())
}

/// Detects writes by another process, or by another connection of this one. They may
/// have made jobs of any queue due.
struct ForeignWrites {
    /// The `data_version` at the last check.
    version: Option<i64>,
    checked: Instant,
}

impl ForeignWrites {
    fn check(&mut self, conn: &Connection, subscribers: &NoticeSender) {
        if self.version.is_some() && self.checked.elapsed() < FOREIGN_WRITES_EVERY {
            return;
        }
        self.checked = Instant::now();
        // Read on the writing connection, whose own commits do not change it.
        let version = conn
            .prepare_cached("pragma data_version")
            .and_then(|mut statement| statement.query_row([], |row| row.get("data_version")))
            .ok();
        if version.is_some() && self.version.is_some() && version != self.version {
            subscribers.send_missed();
        }
        self.version = version.or(self.version);
    }
}

fn spawn_readers(path: &Path) -> Result<Sender<Box<dyn Task>>> {
    let (readers, inbox) = channel::<Box<dyn Task>>();
    let inbox = Arc::new(Mutex::new(inbox));
    for _ in 0..READERS {
        let (inbox, path) = (inbox.clone(), path.to_owned());
        spawn("longshore-read", move || {
            let mut conn = None;
            loop {
                let next = inbox.lock().map(|inbox| inbox.recv());
                let Ok(Ok(mut task)) = next else { return };
                let done = read_once(&mut conn, &path, task.as_mut()).map_err(Error::from);
                task.reply(done.as_ref().copied());
            }
        })?;
    }
    Ok(readers)
}

fn read_once(conn: &mut Option<Connection>, path: &Path, task: &mut dyn Task) -> Result<(), Fault> {
    let conn = match conn {
        Some(conn) => conn,
        None => conn.insert(open_reader(path)?),
    };
    run(conn, "begin")?;
    task.run(conn);
    check_still_open(conn)?;
    run(conn, "rollback")
}

fn open_writer(location: &Location) -> Result<Connection> {
    let conn = match location {
        Location::Memory => Connection::open_in_memory().map_err(Fault::from)?,
        Location::File(path) => {
            // SQLite would let everyone read the file. Its other files get the permissions of this one. A file that
            // exists is not opened: closing it would release the locks that this process has on it.
            drop(private_file::options().create_new(true).open(path));
            let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
                | OpenFlags::SQLITE_OPEN_CREATE
                | OpenFlags::SQLITE_OPEN_NO_MUTEX;
            let conn = Connection::open_with_flags(path, flags).map_err(|error| cannot_open(path, error))?;
            configure(&conn, WRITER_CACHE_KIB).map_err(|error| cannot_open(path, error))?;
            switch_to_wal(&conn, path)?;
            return Ok(conn);
        }
    };
    configure(&conn, WRITER_CACHE_KIB).map_err(Fault::from)?;
    Ok(conn)
}

fn open_reader(path: &Path) -> Result<Connection, Fault> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags)?;
    configure(&conn, READER_CACHE_KIB)?;
    conn.pragma_update(None, "query_only", true)?;
    Ok(conn)
}

fn configure(conn: &Connection, cache_kib: u32) -> rusqlite::Result<()> {
    conn.busy_handler(Some(wait_for_others))?;
    conn.set_prepared_statement_cache_capacity(CACHED_STATEMENTS);
    conn.execute_batch(&format!(
        "pragma synchronous = full;
         pragma temp_store = memory;
         pragma cache_size = -{cache_kib};
         pragma wal_autocheckpoint = {CHECKPOINT_PAGES};
         pragma journal_size_limit = {MAX_LOG_BYTES};"
    ))
}

/// Like SQLite's own busy timeout, but with shorter pauses: our write transactions take
/// about a millisecond, and SQLite's pauses grow to a hundred.
fn wait_for_others(round: i32) -> bool {
    thread_local! { static SINCE: Cell<Option<Instant>> = const { Cell::new(None) } }
    let now = Instant::now();
    if round == 0 {
        SINCE.set(Some(now));
    }
    if SINCE.get().is_some_and(|since| now.duration_since(since) >= BUSY_TIMEOUT) {
        return false;
    }
    thread::sleep(Duration::from_micros(if round < 20 { 250 } else { 2000 }));
    true
}

fn switch_to_wal(conn: &Connection, path: &Path) -> Result<()> {
    let began = Instant::now();
    loop {
        let mode =
            conn.query_row("pragma journal_mode = wal", [], |row| row.get::<_, String>("journal_mode"));
        match mode {
            Ok(_) => return Ok(()),
            Err(error) => match error.sqlite_error_code() {
                // A file that cannot be written can still be read.
                Some(rusqlite::ErrorCode::ReadOnly) => return Ok(()),
                // SQLite does not wait by itself if several processes open a new file at
                // the same time.
                Some(rusqlite::ErrorCode::DatabaseBusy) if began.elapsed() < BUSY_TIMEOUT => {
                    thread::sleep(Duration::from_millis(5));
                }
                _ => return Err(cannot_open(path, error)),
            },
        }
    }
}

fn cannot_open(path: &Path, error: rusqlite::Error) -> Error {
    let path = path.display();
    match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::NotADatabase) => Error::invalid(
            "url",
            format!("database URL: `{path}` is not an SQLite database; use another file name or move the file away"),
        ),
        Some(rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::PermissionDenied) => Error::invalid(
            "url",
            format!("database URL: `{path}` cannot be opened; use a file in a folder that this user can write to"),
        ),
        _ => return Fault::from(error).into(),
    }
    .with_source(error)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new().name(name.into()).spawn(body).map(drop).map_err(|error| {
        Error::unavailable("cannot start a thread for the database; check the limit of threads")
            .with_source(error)
    })
}

fn ended() -> Error {
    Error::unavailable("the database engine has stopped; open it again")
}
