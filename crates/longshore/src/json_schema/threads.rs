//! A few threads for work with schemas that is too long, or needs too much stack, for the threads of the runtime.
//!
//! Every piece of work is bounded before it comes here, so no thread is occupied for long.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tokio::sync::oneshot;

const THREADS: usize = 2;
/// The maximum number of pieces of work that wait for a thread. Each holds a payload or a schema in memory.
const MAX_WAITING: usize = 64;
/// Enough for the deepest schema and the deepest payload. Memory is used only where the stack is.
const STACK: usize = 32 * 1024 * 1024;

/// Why work was not done.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Failed {
    pub(super) reason: String,
    /// Whether it would fail again.
    pub(super) panicked: bool,
}

impl Failed {
    fn unavailable(reason: impl Into<String>) -> Self {
        Failed { reason: reason.into(), panicked: false }
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Runs a function on one of the threads. Fails if it panics, if too much work waits, or if there are no
/// threads.
pub(super) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failed> {
    static QUEUE: OnceLock<Result<SyncSender<Work>, String>> = OnceLock::new();
    let queue = QUEUE.get_or_init(|| start(THREADS)).as_ref().map_err(Failed::unavailable)?;
    run_on(queue, work).await
}

async fn run_on<T: Send + 'static>(
    queue: &SyncSender<Work>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failed> {
    let (reply, result) = oneshot::channel();
    let work = move || {
        // The caller may have gone away while this waited.
        if !reply.is_closed() {
            let _ = reply.send(work());
        }
    };
    queue.try_send(Box::new(work)).map_err(|error| match error {
        TrySendError::Full(_) => {
            Failed::unavailable("too many long checks of payloads wait; try again in a moment")
        }
        TrySendError::Disconnected(_) => {
            Failed::unavailable("the threads for schemas have stopped; restart the process")
        }
    })?;
    let panicked =
        |_| Failed { reason: "the check panicked; the log has the message".into(), panicked: true };
    result.await.map_err(panicked)
}

fn start(threads: usize) -> Result<SyncSender<Work>, String> {
    let (queue, works) = sync_channel(MAX_WAITING);
    let works = Arc::new(Mutex::new(works));
    for _ in 0..threads {
        let works = works.clone();
        let thread = std::thread::Builder::new().name("longshore-schema".into()).stack_size(STACK);
        thread.spawn(move || serve(&works)).map_err(|error| format!("cannot start a thread: {error}"))?;
    }
    Ok(queue)
}

fn serve(works: &Mutex<Receiver<Work>>) {
    loop {
        let next = works.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(work) = next else { return };
        // The panic hook has written the message. Dropping the reply reports it to the caller.
        let _ = catch_unwind(AssertUnwindSafe(work));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_so_much_work_waits() {
        let queue = start(1).expect("a thread");
        let (blocked, is_blocked) = std::sync::mpsc::channel();
        let (free, is_freed) = std::sync::mpsc::channel::<()>();
        let block: Work = Box::new(move || {
            blocked.send(()).expect("the test waits");
            // Until the test drops the other end.
            let _ = is_freed.recv();
        });
        queue.try_send(block).expect("room");
        is_blocked.recv().expect("it started");
        for _ in 0..MAX_WAITING {
            queue.try_send(Box::new(|| ())).expect("room");
        }
        let refused = run_on(&queue, || ()).await.expect_err("no room");
        assert!(!refused.panicked && refused.reason.contains("try again in a moment"), "{}", refused.reason);
        drop(free);
    }
}
