//! SIGINT and SIGTERM, for programs that stay until they are told to end.

use super::Stopper;
use crate::error::{Error, Result};

/// The signals that ask a process to end. Listened for from the beginning to the
/// end, so that none comes between two looks.
///
/// For a program that runs a worker beside something else; [`Worker::run`]
/// heeds them by itself.
///
/// ```no_run
/// # async fn run(worker: longshore::Worker) -> longshore::Result<()> {
/// let mut signals = longshore::worker::Signals::new()?;
/// let running = worker.start().await?;
/// signals.next().await;
/// running.stop().await;
/// # Ok(()) }
/// ```
///
/// [`Worker::run`]: super::Worker::run
#[derive(Debug)]
pub struct Signals {
    #[cfg(unix)]
    either: [tokio::signal::unix::Signal; 2],
}

impl Signals {
    /// Listens from here on.
    pub fn new() -> Result<Self> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let listen = |kind| {
                signal(kind)
                    .map_err(|error| Error::unavailable("cannot listen for signals").with_source(error))
            };
            Ok(Signals { either: [listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?] })
        }
        #[cfg(not(unix))]
        Ok(Signals {})
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        #[cfg(unix)]
        {
            let [interrupt, terminate] = &mut self.either;
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        }
        #[cfg(not(unix))]
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// The first signal stops the worker, the second at once. Between the two,
    /// `begun` may stop what runs beside it.
    pub async fn stop(mut self, stopper: Stopper, begun: impl FnOnce()) {
        self.next().await;
        tracing::info!("stopping; what runs may finish, a second signal cuts it short");
        stopper.stop();
        begun();
        self.next().await;
        tracing::info!("stopping now");
        stopper.stop_now();
    }
}
