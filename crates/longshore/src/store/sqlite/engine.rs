//! The threads behind the engine: one that writes, a few that read.
//!
//! SQLite lets one connection write at a time, and a commit costs a sync of the
//! disk. So one thread owns the writing connection and commits what has queued
//! up meanwhile together: while one commit is under way the next group gathers.
//! A caller alone waits for nobody. Work runs on these threads to its end
//! whether or not its caller still waits, so a dropped future harms nothing.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};
use tokio::sync::{broadcast, oneshot};

use super::tx::{Fault, Tx};
use crate::error::{Error, Result};

/// How long a write waits for another process before it is `unavailable`.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the writer looks whether another process has written.
const FOREIGN_WRITES_EVERY: Duration = Duration::from_millis(100);
/// How many calls share one commit at most.
const GROUP: usize = 256;
const READERS: usize = 3;
const STATEMENTS: usize = 160;
/// A larger log is checkpointed less often, and pages written again and again
/// (the heads of the indexes) are copied back once.
const CHECKPOINT_PAGES: u32 = 4000;
const LOG_BYTES: u32 = 64 * 1024 * 1024;
/// No more: a commit that balanced a tree walks the whole cache (measured, one
/// caller: 30,000 commits/s with 16 MiB, 8,000 with 64), and the system's own
/// cache holds the rest.
const WRITER_CACHE_KIB: u32 = 16 * 1024;
const READER_CACHE_KIB: u32 = 8 * 1024;

/// Where the tables are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In a file.
    File(PathBuf),
    /// In memory, seen by this store alone.
    Memory,
}

/// Hands work to the threads. When the last handle is dropped, they end.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    writer: Sender<Message>,
    /// None in memory: there the writer reads, too.
    readers: Option<Sender<Box<dyn Task>>>,
    wakeups: broadcast::Sender<String>,
}

enum Message {
    Work(Box<dyn Task>),
    /// Somebody subscribed: begin to look for other processes' writes.
    Subscribed,
}

impl Engine {
    pub(super) async fn open(place: Place) -> Result<Self> {
        let (writer, inbox) = channel();
        let (wakeups, _) = broadcast::channel(256);
        let (opened, is_open) = oneshot::channel();
        let (at, hints) = (place.clone(), wakeups.clone());
        spawn("longshore-write", move || {
            // The file is opened here, as it may take long (another process
            // may be recovering the log).
            match open_writer(&at) {
                Ok(conn) => {
                    let _ = opened.send(Ok(()));
                    write_until_closed(&conn, &inbox, &hints);
                }
                Err(error) => {
                    let _ = opened.send(Err(error));
                }
            }
        })?;
        is_open.await.map_err(|_| ended())??;
        let readers = match place {
            Place::Memory => None,
            Place::File(path) => Some(spawn_readers(&path)?),
        };
        Ok(Engine { writer, readers, wakeups })
    }

    /// Runs `work` in a write transaction; answers once it is on disk.
    pub(super) async fn write<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, Fault> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let call = Call { work: Some(work), result: None, reply, mode: Mode::Write };
        self.writer.send(Message::Work(Box::new(call))).map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    /// Runs `work` on one snapshot, which holds everything answered before.
    pub(super) async fn read<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Tx<'_>) -> Result<T, Fault> + Send + 'static,
    {
        let Some(readers) = &self.readers else { return self.write(work).await };
        let (reply, answer) = oneshot::channel();
        let call = Call { work: Some(work), result: None, reply, mode: Mode::Read };
        readers.send(Box::new(call)).map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    /// Notifies subscribers in this process. Returns whether there is one.
    pub(super) fn notify(&self, queues: &[String]) -> bool {
        queues.iter().filter(|queue| self.wakeups.send(String::clone(queue)).is_ok()).count() > 0
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<String> {
        let wakeups = self.wakeups.subscribe();
        let _ = self.writer.send(Message::Subscribed);
        wakeups
    }
}

/// A call on its way through a thread.
trait Task: Send {
    /// Says whether what it did may stay.
    fn run(&mut self, tx: &Tx<'_>) -> bool;
    fn answer(self: Box<Self>, fate: Result<(), &Error>);
}

struct Call<T, F> {
    work: Option<F>,
    /// `None` before it ran, and for a read whose caller has gone.
    result: Option<Result<T>>,
    reply: oneshot::Sender<Result<T>>,
    mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Runs to its end even if its caller has gone.
    Write,
    /// Is skipped if its caller has gone.
    Read,
}

impl<T, F> Task for Call<T, F>
where
    T: Send,
    F: FnOnce(&Tx<'_>) -> Result<T, Fault> + Send,
{
    fn run(&mut self, tx: &Tx<'_>) -> bool {
        if self.mode == Mode::Read && self.reply.is_closed() {
            return false;
        }
        let Some(work) = self.work.take() else { return false };
        // One call's panic must not end the thread that serves all.
        let result = catch_unwind(AssertUnwindSafe(|| work(tx)))
            .unwrap_or_else(|_| Err(Error::internal("the SQLite engine panicked; this is a bug").into()));
        let keep = result.is_ok();
        self.result = Some(result.map_err(Error::from));
        keep
    }

    fn answer(self: Box<Self>, fate: Result<(), &Error>) {
        let result = match (self.result, fate) {
            (Some(Err(own)), _) => Err(own),
            (_, Err(error)) => Err(error.shared()),
            (Some(Ok(done)), Ok(())) => Ok(done),
            (None, Ok(())) => return,
        };
        let _ = self.reply.send(result);
    }
}

fn write_until_closed(conn: &Connection, inbox: &Receiver<Message>, wakeups: &broadcast::Sender<String>) {
    let mut foreign = ForeignWrites { seen: None, looked: Instant::now() };
    loop {
        let first = if wakeups.receiver_count() == 0 {
            foreign.seen = None;
            inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            foreign.look(conn, wakeups);
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
        commit_together(conn, std::iter::once(first).chain(waiting).take(GROUP).collect());
    }
}

/// Runs calls in one transaction, each in a savepoint of its own, so that one
/// that fails is undone alone. Nobody is answered before the commit.
fn commit_together(conn: &Connection, mut group: Vec<Box<dyn Task>>) {
    let fate = run_group(conn, &mut group).map_err(Error::from);
    if fate.is_err() && !conn.is_autocommit() {
        let _ = run(conn, "rollback");
    }
    for task in group {
        task.answer(fate.as_ref().copied());
    }
}

fn run_group(conn: &Connection, group: &mut [Box<dyn Task>]) -> Result<(), Fault> {
    run(conn, "begin immediate")?;
    if let [task] = group {
        let keep = task.run(&Tx::new(conn));
        still_open(conn)?;
        return run(conn, if keep { "commit" } else { "rollback" });
    }
    for task in group {
        run(conn, "savepoint call")?;
        let keep = task.run(&Tx::new(conn));
        still_open(conn)?;
        if !keep {
            run(conn, "rollback to call")?;
        }
        run(conn, "release call")?;
    }
    run(conn, "commit")
}

/// A full disk or a failed read makes SQLite roll back everything by itself.
fn still_open(conn: &Connection) -> Result<(), Fault> {
    match conn.is_autocommit() {
        true => Err(Error::unavailable("the database gave up the transaction; try again").into()),
        false => Ok(()),
    }
}

fn run(conn: &Connection, sql: &str) -> Result<(), Fault> {
    conn.prepare_cached(sql)?.execute([])?;
    Ok(())
}

/// Notices when another process (or another connection of this one) has
/// written, which may have brought work to any queue.
struct ForeignWrites {
    seen: Option<i64>,
    looked: Instant,
}

impl ForeignWrites {
    fn look(&mut self, conn: &Connection, wakeups: &broadcast::Sender<String>) {
        if self.seen.is_some() && self.looked.elapsed() < FOREIGN_WRITES_EVERY {
            return;
        }
        self.looked = Instant::now();
        // Asked of the writing connection, whose own commits do not change it.
        let version = conn
            .prepare_cached("pragma data_version")
            .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
            .ok();
        if version.is_some() && self.seen.is_some() && version != self.seen {
            let _ = wakeups.send(String::new());
        }
        self.seen = version.or(self.seen);
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
                let fate = read_once(&mut conn, &path, task.as_mut()).map_err(Error::from);
                task.answer(fate.as_ref().copied());
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
    task.run(&Tx::new(conn));
    still_open(conn)?;
    run(conn, "rollback")
}

fn open_writer(place: &Place) -> Result<Connection> {
    let conn = match place {
        Place::Memory => Connection::open_in_memory().map_err(Fault::from)?,
        Place::File(path) => {
            let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
                | OpenFlags::SQLITE_OPEN_CREATE
                | OpenFlags::SQLITE_OPEN_NO_MUTEX;
            let conn = Connection::open_with_flags(path, flags).map_err(|error| cannot_open(path, error))?;
            settle_in(&conn, WRITER_CACHE_KIB).map_err(|error| cannot_open(path, error))?;
            switch_to_wal(&conn, path)?;
            return Ok(conn);
        }
    };
    settle_in(&conn, WRITER_CACHE_KIB).map_err(Fault::from)?;
    Ok(conn)
}

fn open_reader(path: &Path) -> Result<Connection, Fault> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags)?;
    settle_in(&conn, READER_CACHE_KIB)?;
    conn.pragma_update(None, "query_only", true)?;
    Ok(conn)
}

fn settle_in(conn: &Connection, cache_kib: u32) -> rusqlite::Result<()> {
    conn.busy_handler(Some(wait_for_others))?;
    conn.set_prepared_statement_cache_capacity(STATEMENTS);
    conn.execute_batch(&format!(
        "pragma synchronous = full;
         pragma temp_store = memory;
         pragma cache_size = -{cache_kib};
         pragma wal_autocheckpoint = {CHECKPOINT_PAGES};
         pragma journal_size_limit = {LOG_BYTES};"
    ))
}

/// Like SQLite's own busy timeout, but with short naps: write transactions
/// here take about a millisecond, and its own naps grow to a hundred.
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
        let mode = conn.query_row("pragma journal_mode = wal", [], |row| row.get::<_, String>(0));
        match mode {
            Ok(_) => return Ok(()),
            Err(error) => match error.sqlite_error_code() {
                // A file that cannot be written may still be looked at.
                Some(rusqlite::ErrorCode::ReadOnly) => return Ok(()),
                // SQLite does not wait here by itself when several processes
                // open a new file at once.
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
            format!("database URL: `{path}` is not an SQLite database; name another file or move it away"),
        ),
        Some(rusqlite::ErrorCode::CannotOpen | rusqlite::ErrorCode::PermissionDenied) => Error::invalid(
            "url",
            format!("database URL: `{path}` cannot be opened; is it a file, and may this user write there?"),
        ),
        _ => return Fault::from(error).into(),
    }
    .with_source(error)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new()
        .name(name.into())
        .spawn(body)
        .map(drop)
        .map_err(|error| Error::unavailable("cannot start a thread for the database").with_source(error))
}

fn ended() -> Error {
    Error::unavailable("the database engine has stopped; open it again")
}
