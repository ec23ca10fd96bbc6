//! SIGINT and SIGTERM, for programs that run until a signal ends them.

use super::Stopper;
use crate::error::{Error, Result};

/// Listens for the signals that request the process to end (SIGINT and SIGTERM), from creation
/// on, so that no signal is missed between two waits.
///
/// For a program that runs a worker next to something else; [`Worker::run`] handles signals by
/// itself.
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
    signals: [tokio::signal::unix::Signal; 2],
}

impl Signals {
    /// Starts to listen.
    pub fn new() -> Result<Self> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let listen = |kind| {
                signal(kind)
                    .map_err(|error| Error::unavailable("cannot listen for signals").with_source(error))
            };
            Ok(Signals { signals: [listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?] })
        }
        #[cfg(not(unix))]
        Ok(Signals {})
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) {
        #[cfg(unix)]
        {
            let [interrupt, terminate] = &mut self.signals;
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

    /// Stops the worker at the first signal, and without a grace period at the second.
    /// `on_first` is called after the first signal, to stop other parts of the program.
    pub async fn stop(mut self, stopper: Stopper, on_first: impl FnOnce()) {
        self.next().await;
        tracing::info!("stopping; running jobs may finish, a second signal stops them now");
        stopper.stop();
        on_first();
        self.next().await;
        tracing::info!("stopping now");
        stopper.stop_now();
    }
}
