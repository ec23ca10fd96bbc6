//! A few threads for work with schemas that is too long, or needs too much stack, for the threads of the runtime.
//!
//! Every piece of work is bounded before it comes here, so no thread is occupied for long.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tokio::sync::oneshot;

const THREADS: usize = 2;
/// Enough for the deepest schema and the deepest payload. Memory is used only where the stack is.
const STACK: usize = 32 * 1024 * 1024;

type Work = Box<dyn FnOnce() + Send>;

/// Runs a function on one of the threads. Fails if it panics, or if there are no threads.
pub(super) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    static QUEUE: OnceLock<Result<Sender<Work>, String>> = OnceLock::new();
    let queue = QUEUE.get_or_init(start).as_ref().map_err(Clone::clone)?;
    let (reply, result) = oneshot::channel();
    let work = move || {
        // The caller may have gone away while this waited.
        if !reply.is_closed() {
            let _ = reply.send(work());
        }
    };
    let stopped = || "the threads for schemas have stopped; restart the process".to_owned();
    queue.send(Box::new(work)).map_err(|_| stopped())?;
    result.await.map_err(|_| "the check panicked; the log has the message".to_owned())
}

fn start() -> Result<Sender<Work>, String> {
    let (queue, works) = channel();
    let works = Arc::new(Mutex::new(works));
    for _ in 0..THREADS {
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
