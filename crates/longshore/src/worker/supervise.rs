//! Starting a worker, supervising its tasks, and the shutdown sequence. Each task is in its own
//! module.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::builder::Builder;
use super::context::StopReason;
use super::hooks::{self, Hooks};
use super::registry::Registry;
use super::settings::Settings;
use super::shared::{EndGuard, Phase, Shared};
use super::signals::Signals;
use super::{cancel, claim_loop, execute, heartbeat, settle, upkeep};
use crate::BoxFuture;
use crate::client::schedules::{NewSchedule, Undeclared};
use crate::client::{Client, job_metrics};
use crate::error::Result;
use crate::job::WorkerId;

/// After the grace period, handlers have this long to react to their stop token. Also the
/// longest wait for a claim in flight.
const STOP_TIMEOUT: Duration = Duration::from_millis(800);
/// The minimum time for the last settlements after the handlers have ended. If the grace period is
/// not over, they have until its end.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(500);
/// The longest wait for dropped handlers to end.
const ABORT_TIMEOUT: Duration = Duration::from_millis(100);
/// After the last settlements, the longest wait for the settler to end.
const SETTLER_TIMEOUT: Duration = Duration::from_millis(150);
/// The longest wait for signing off. Together with the timeouts above less than two seconds,
/// unless a claim in flight hangs and the grace period is shorter than [`STOP_TIMEOUT`].
const SIGN_OFF_TIMEOUT: Duration = Duration::from_millis(400);

/// A worker that is built but not yet started.
pub struct Worker {
    pub(super) client: Client,
    pub(super) settings: Settings,
    pub(super) registry: Registry,
    pub(super) schedules: Vec<NewSchedule>,
    pub(super) undeclared: Undeclared,
    pub(super) hooks: Option<Arc<dyn Hooks>>,
}

/// How a worker's attempts have ended since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Summary {
    /// Attempts that succeeded.
    pub succeeded: u64,
    /// Attempts that failed and will be retried.
    pub retrying: u64,
    /// Jobs that failed permanently.
    pub failed_permanent: u64,
    /// Jobs that ended as cancelled, including those that never started.
    pub cancelled: u64,
    /// Attempts that were snoozed, suspended or released. Jobs that were released before they started do
    /// not count.
    pub put_back: u64,
}

impl Worker {
    /// Starts building a worker.
    pub fn builder(client: Client) -> Builder {
        Builder::new(client)
    }

    /// Starts the worker; it runs until it is [stopped](RunningWorker::stop).
    pub async fn start(self) -> Result<RunningWorker> {
        self.start_in(Phase::Working).await
    }

    /// Runs all due jobs, including those that become due meanwhile, and stops when none is
    /// left.
    pub async fn drain(self) -> Result<Summary> {
        let running = self.start_in(Phase::Draining).await?;
        Ok(running.wait().await)
    }

    /// Runs until SIGINT or SIGTERM arrives, then stops; a second signal ends the grace period
    /// at once.
    pub async fn run(self) -> Result<Summary> {
        self.run_in(Phase::Working).await
    }

    /// Like [`drain`](Self::drain), and also stops on signals like [`run`](Self::run).
    pub async fn run_drain(self) -> Result<Summary> {
        self.run_in(Phase::Draining).await
    }

    async fn run_in(self, phase: Phase) -> Result<Summary> {
        let mut signals = Signals::new()?;
        let running = tokio::select! {
            started = self.start_in(phase) => started?,
            // Nothing has been claimed yet.
            () = signals.next() => return Ok(Summary::default()),
        };
        tokio::spawn(signals.stop(running.stopper(), || {}));
        Ok(running.wait().await)
    }

    /// An async function is compiled in the crate that awaits it, with everything that it alone
    /// calls, and this one calls the whole runtime. A function that returns a boxed future is
    /// compiled here, once.
    #[inline(never)]
    fn start_in(self, phase: Phase) -> BoxFuture<'static, Result<RunningWorker>> {
        Box::pin(async move {
            let worker_id = WorkerId::new();
            let client = self.client.clone();
            let program = &self.settings.name_prefix;
            let undeclared = client.declare_schedules(program, self.schedules, self.undeclared).await?;
            report_undeclared(&undeclared, self.undeclared);
            let kinds = self.registry.kinds();
            job_metrics::describe();
            kinds.iter().flatten().for_each(|kind| job_metrics::register_kind(kind));
            client.register(&heartbeat::registration(&self.settings, kinds, worker_id)).await?;
            let (reports, inbox) = mpsc::unbounded_channel();
            let shared =
                Shared::new(self.client, self.settings, self.registry, self.hooks, reports, worker_id, phase);
            let end_guard = EndGuard(shared.clone());
            heartbeat::spawn(shared.clone(), client.with_own_connection())?;
            if let Err(error) = client.put_kinds(shared.registry.published()).await {
                tracing::warn!(%error, %worker_id, "could not publish the worker's kinds; the worker starts anyway");
            }
            if let Some(hooks) = &shared.hooks {
                hooks::call("on_worker_start", hooks.on_worker_start(worker_id)).await;
            }
            let skip_grace = watch::Sender::new(false);
            let task = tokio::spawn(supervise(end_guard, inbox, skip_grace.subscribe()));
            Ok(RunningWorker { shared, skip_grace, task, undeclared })
        })
    }
}

/// The handle of a running worker. Dropping the handle does not stop the worker.
pub struct RunningWorker {
    shared: Arc<Shared>,
    skip_grace: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
    undeclared: Vec<String>,
}

/// Stops a running worker from another task. Cheap to clone.
#[derive(Clone)]
pub struct Stopper {
    shared: Arc<Shared>,
    skip_grace: watch::Sender<bool>,
}

impl Stopper {
    /// Stops claiming; running jobs may finish within the grace period.
    pub fn stop(&self) {
        self.shared.phase.send_if_modified(|phase| {
            let before = *phase;
            *phase = before.max(Phase::Finishing);
            *phase != before
        });
    }

    /// Like [`stop`](Self::stop), without a grace period.
    pub fn stop_now(&self) {
        self.stop();
        self.skip_grace.send_replace(true);
    }
}

impl RunningWorker {
    /// The worker's current id. It changes if the worker was declared dead and registered again.
    pub fn id(&self) -> WorkerId {
        self.shared.worker_id()
    }

    /// Returns a handle that can stop the worker from another task.
    pub fn stopper(&self) -> Stopper {
        Stopper { shared: self.shared.clone(), skip_grace: self.skip_grace.clone() }
    }

    /// The names of the schedules that this program declared earlier and no longer does, as
    /// [`Builder::undeclared_schedules`] describes.
    pub fn undeclared_schedules(&self) -> &[String] {
        &self.undeclared
    }

    /// How the worker's attempts have ended so far.
    pub fn summary(&self) -> Summary {
        self.shared.metrics.summary()
    }

    /// Stops the worker and waits until it has stopped. It stops claiming at once, lets running
    /// jobs finish within the grace period, then fires their stop tokens, then drops them.
    /// Unfinished jobs are released to the queue at once, uncharged.
    pub async fn stop(self) -> Summary {
        self.stopper().stop();
        self.wait().await
    }

    /// Like [`stop`](Self::stop), without a grace period.
    pub async fn stop_now(self) -> Summary {
        self.stopper().stop_now();
        self.wait().await
    }

    /// Waits until the worker has stopped.
    pub async fn wait(self) -> Summary {
        if let Err(died) = self.task.await {
            tracing::error!(%died, worker_id = %self.shared.worker_id(), "the worker's supervisor died");
        }
        self.shared.metrics.summary()
    }
}

fn report_undeclared(schedules: &[String], undeclared: Undeclared) {
    for schedule in schedules {
        match undeclared {
            Undeclared::Report => tracing::warn!(
                schedule,
                "this program no longer declares the schedule, but the schedule still ticks; remove it with \
                 `longshore cron remove`, or let the worker remove it with `Builder::undeclared_schedules`"
            ),
            Undeclared::Remove => {
                tracing::info!(schedule, "removed a schedule that this program no longer declares");
            }
        }
    }
}

/// Runs the worker's tasks, and stops them in order.
async fn supervise(
    end_guard: EndGuard,
    inbox: mpsc::UnboundedReceiver<settle::AttemptReport>,
    mut skip_grace: watch::Receiver<bool>,
) {
    let shared = end_guard.0.clone();
    let mut runners = JoinSet::new();
    for _ in 0..shared.settings.concurrency {
        runners.spawn(execute::run(shared.clone()));
    }
    let mut upkeep = JoinSet::new();
    upkeep.spawn(upkeep::sweep(shared.clone()));
    if shared.settings.schedules {
        upkeep.spawn(upkeep::cron(shared.clone()));
    }
    upkeep.spawn(upkeep::deliver(shared.clone()));
    upkeep.spawn(upkeep::operations(shared.clone()));
    upkeep.spawn(upkeep::retain(shared.clone()));
    upkeep.spawn(upkeep::fold(shared.clone()));
    upkeep.spawn(upkeep::sample(shared.clone()));
    upkeep.spawn(cancel::listen(shared.clone()));
    upkeep.spawn(shared.progress.clone().run(shared.client.clone()));
    let mut settler = tokio::spawn(settle::run(shared.clone(), inbox));
    let mut claimer = tokio::spawn(claim_loop::run(shared.clone()));

    loop {
        tokio::select! {
            () = shared.reached(Phase::Finishing) => break,
            Some(Err(died)) = runners.join_next() => {
                tracing::error!(%died, worker_id = %shared.worker_id(), "a runner died; starting another");
                runners.spawn(execute::run(shared.clone()));
            }
        }
    }
    // A claim in flight releases the jobs it found. If it hangs on the database, the
    // client releases them when the reply arrives.
    let grace_ends = tokio::time::Instant::now() + shared.settings.shutdown_grace;
    if tokio::time::timeout(STOP_TIMEOUT, &mut claimer).await.is_err() {
        claimer.abort();
    }
    for attempt in shared.buffer.take_all() {
        shared.release(attempt);
    }
    shared.buffer.close();
    stop_runners(&shared, &mut runners, grace_ends, &mut skip_grace).await;
    wait_until_settled(&shared, grace_ends, &mut skip_grace).await;
    shared.phase.send_replace(Phase::Ended);
    upkeep.abort_all();
    if tokio::time::timeout(SETTLER_TIMEOUT, &mut settler).await.is_err() {
        settler.abort();
    }
    for attempt in shared.held.all() {
        shared.metrics.completed(&attempt, "error", None);
    }
    shared.client.job_log.flush();
    let _ = tokio::time::timeout(SIGN_OFF_TIMEOUT, shared.client.store_measures()).await;
    let worker_id = shared.worker_id();
    let retired = tokio::time::timeout(SIGN_OFF_TIMEOUT, shared.client.retire(worker_id)).await;
    if !matches!(retired, Ok(Ok(()))) {
        tracing::debug!(%worker_id, "could not sign off; recovery will remove the worker's row");
    }
    finish_hooks(&shared, worker_id, &mut skip_grace).await;
}

/// Lets the runners finish within the grace period, then fires the handlers' stop tokens, then
/// drops the handlers. Releases the jobs of handlers that cannot be dropped.
async fn stop_runners(
    shared: &Shared,
    runners: &mut JoinSet<()>,
    grace_ends: tokio::time::Instant,
    skip_grace: &mut watch::Receiver<bool>,
) {
    let all_done = async { while runners.join_next().await.is_some() {} };
    tokio::pin!(all_done);
    let in_time = tokio::select! {
        () = &mut all_done => true,
        () = tokio::time::sleep_until(grace_ends) => false,
        () = grace_skipped(skip_grace) => false,
    };
    if !in_time {
        let running = shared.held.all();
        tracing::warn!(jobs = running.len(), "the grace period is over; stopping the running handlers");
        running.iter().for_each(|attempt| attempt.control.stop(StopReason::Shutdown));
        if tokio::time::timeout(STOP_TIMEOUT, &mut all_done).await.is_err() {
            running.iter().for_each(|attempt| attempt.control.abort(StopReason::Shutdown));
            // A handler that blocks its thread cannot be dropped. Its job is released
            // anyway; the fence rejects whatever the handler does later.
            let _ = tokio::time::timeout(ABORT_TIMEOUT, &mut all_done).await;
            for attempt in shared.held.all() {
                shared.release(attempt);
            }
        }
    }
}

/// Waits for the hook calls in flight, and calls `on_worker_stop`. Gives up after another grace
/// period.
async fn finish_hooks(shared: &Shared, worker_id: WorkerId, skip_grace: &mut watch::Receiver<bool>) {
    let Some(hooks) = &shared.hooks else { return };
    let hooks_done = async {
        shared.hook_calls.all_done().await;
        hooks::call("on_worker_stop", hooks.on_worker_stop(worker_id)).await;
    };
    let in_time = tokio::select! {
        () = hooks_done => true,
        () = tokio::time::sleep(shared.settings.shutdown_grace) => false,
        () = grace_skipped(skip_grace) => false,
    };
    if !in_time {
        tracing::warn!("stopped before every hook call had finished");
    }
}

/// Waits until a stop without a grace period is requested.
async fn grace_skipped(skip_grace: &mut watch::Receiver<bool>) {
    if skip_grace.wait_for(|skip| *skip).await.is_err() {
        // All senders are gone, so nothing can request it any more.
        std::future::pending().await
    }
}

/// Waits until every lease is settled. The database may be slow or away for a while, and a job whose
/// result is not stored runs again, so this uses what is left of the grace period, and at least
/// [`SETTLE_TIMEOUT`].
async fn wait_until_settled(
    shared: &Shared,
    grace_ends: tokio::time::Instant,
    skip_grace: &mut watch::Receiver<bool>,
) {
    let began = tokio::time::Instant::now();
    let all_settled = async {
        loop {
            let settled = shared.held.settled.notified();
            if shared.held.len() == 0 {
                return;
            }
            settled.await;
        }
    };
    let grace_over = async {
        tokio::time::sleep_until(began + SETTLE_TIMEOUT).await;
        if tokio::time::Instant::now() < grace_ends && !*skip_grace.borrow() {
            let jobs = shared.held.len();
            tracing::warn!(jobs, "waiting for the database to store results, at most for the grace period");
        }
        tokio::select! {
            () = tokio::time::sleep_until(grace_ends) => {}
            () = grace_skipped(skip_grace) => {}
        }
    };
    tokio::select! {
        () = all_settled => {}
        () = grace_over => {
            tracing::warn!(jobs = shared.held.len(), "could not store how some attempts ended; recovery will handle the jobs");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn the_grace_period_ends_early_on_request_but_not_when_the_handles_are_dropped() {
        let mut context = Context::from_waker(Waker::noop());
        let (sender, mut skip_grace) = watch::channel(false);
        let mut skipped = pin!(grace_skipped(&mut skip_grace));
        assert!(skipped.as_mut().poll(&mut context).is_pending());
        drop(sender);
        assert!(skipped.as_mut().poll(&mut context).is_pending(), "no request was made");

        let (sender, mut skip_grace) = watch::channel(false);
        sender.send_replace(true);
        assert!(pin!(grace_skipped(&mut skip_grace)).poll(&mut context).is_ready());
    }
}
