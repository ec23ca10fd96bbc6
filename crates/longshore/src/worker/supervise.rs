//! Starting a worker, supervising its tasks, and stopping it in order.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::builder::Builder;
use super::context::StopReason;
use super::hooks::{self, Hooks};
use super::registry::Registry;
use super::settings::Settings;
use super::shared::{EndsAll, Phase, Shared};
use super::signals::Signals;
use super::{claim, execute, heartbeat, settle, upkeep};
use crate::client::Client;
use crate::cron::NewSchedule;
use crate::error::Result;
use crate::job::WorkerId;
use crate::lifecycle::Ending;

/// After the grace, handlers that were told to stop have this long.
const STOP_WITHIN: Duration = Duration::from_millis(800);
/// What has ended by then has this long to be stored.
const SETTLE_WITHIN: Duration = Duration::from_millis(500);

/// A worker that has not begun.
pub struct Worker {
    pub(super) client: Client,
    pub(super) settings: Settings,
    pub(super) registry: Registry,
    pub(super) schedules: Vec<NewSchedule>,
    pub(super) hooks: Option<Arc<dyn Hooks>>,
}

/// What a worker has done since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    /// Attempts that succeeded.
    pub succeeded: u64,
    /// Attempts that failed and will be tried again.
    pub retrying: u64,
    /// Jobs that failed for good.
    pub failed_permanent: u64,
    /// Jobs that ended as cancelled.
    pub cancelled: u64,
    /// Attempts put off or given back.
    pub put_back: u64,
}

impl Worker {
    /// Begins to put one together.
    pub fn builder(client: Client) -> Builder {
        Builder::new(client)
    }

    /// Begins to work; goes on until [stopped](RunningWorker::stop).
    pub async fn start(self) -> Result<RunningWorker> {
        self.begin(Phase::Working).await
    }

    /// Runs what is due, and what becomes due meanwhile, until nothing is; then
    /// stops.
    pub async fn drain(self) -> Result<Summary> {
        let running = self.begin(Phase::Draining).await?;
        Ok(running.wait().await)
    }

    /// Works until the process is told to end (SIGINT or SIGTERM); a second
    /// signal cuts the grace short.
    pub async fn run(self) -> Result<Summary> {
        self.run_as(Phase::Working).await
    }

    /// As [`drain`](Self::drain), and heeds signals as [`run`](Self::run) does.
    pub async fn run_drain(self) -> Result<Summary> {
        self.run_as(Phase::Draining).await
    }

    async fn run_as(self, phase: Phase) -> Result<Summary> {
        let mut signals = Signals::new()?;
        let running = tokio::select! {
            begun = self.begin(phase) => begun?,
            // Nothing has been claimed yet.
            () = signals.next() => return Ok(Summary::default()),
        };
        tokio::spawn(signals.stop(running.stopper(), || {}));
        Ok(running.wait().await)
    }

    async fn begin(self, phase: Phase) -> Result<RunningWorker> {
        let worker = WorkerId::new();
        let client = self.client.clone();
        for schedule in self.schedules {
            self.client.put_schedule(schedule).await?;
        }
        client.register(&heartbeat::registration(&self.settings, self.registry.kinds(), worker)).await?;
        let (reports, inbox) = mpsc::unbounded_channel();
        let shared =
            Shared::new(self.client, self.settings, self.registry, self.hooks, reports, worker, phase);
        let ends_all = EndsAll(shared.clone());
        heartbeat::spawn(shared.clone(), client.with_own_connection())?;
        if let Err(error) = client.put_kinds(shared.registry.published()).await {
            tracing::warn!(%error, "could not publish the worker's kinds; it works all the same");
        }
        if let Some(hooks) = &shared.hooks {
            hooks::call("on_worker_start", hooks.on_worker_start(worker)).await;
        }
        let now = watch::Sender::new(false);
        let task = tokio::spawn(supervise(ends_all, inbox, now.subscribe()));
        Ok(RunningWorker { shared, now, task })
    }
}

/// A worker at work. Dropping it does not stop it.
pub struct RunningWorker {
    shared: Arc<Shared>,
    now: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

/// Stops a worker from elsewhere.
#[derive(Clone)]
pub struct Stopper {
    shared: Arc<Shared>,
    now: watch::Sender<bool>,
}

impl Stopper {
    /// Claims no more; what runs may finish within the grace.
    pub fn stop(&self) {
        self.shared.phase.send_if_modified(|phase| {
            let before = *phase;
            *phase = before.max(Phase::Finishing);
            *phase != before
        });
    }

    /// As [`stop`](Self::stop), without grace.
    pub fn stop_now(&self) {
        self.stop();
        self.now.send_replace(true);
    }
}

impl RunningWorker {
    /// This boot's id.
    pub fn id(&self) -> WorkerId {
        self.shared.worker()
    }

    /// Something to stop it by from elsewhere.
    pub fn stopper(&self) -> Stopper {
        Stopper { shared: self.shared.clone(), now: self.now.clone() }
    }

    /// What it has done so far.
    pub fn summary(&self) -> Summary {
        self.shared.metrics.summary()
    }

    /// Stops: claims no more at once, lets running jobs finish within the grace,
    /// then tells them to stop, then drops them. What did not finish goes back to
    /// the queue at once, uncharged.
    pub async fn stop(self) -> Summary {
        self.stopper().stop();
        self.wait().await
    }

    /// Stops without grace.
    pub async fn stop_now(self) -> Summary {
        self.stopper().stop_now();
        self.wait().await
    }

    /// Waits until somebody has stopped it.
    pub async fn wait(self) -> Summary {
        if let Err(died) = self.task.await {
            tracing::error!(%died, "the worker's supervisor died");
        }
        self.shared.metrics.summary()
    }
}

/// Runs the parts of a worker, and takes them down in order.
async fn supervise(
    ends_all: EndsAll,
    inbox: mpsc::UnboundedReceiver<settle::AttemptReport>,
    mut now: watch::Receiver<bool>,
) {
    let shared = ends_all.0.clone();
    let mut runners = JoinSet::new();
    for _ in 0..shared.settings.concurrency {
        runners.spawn(execute::run(shared.clone()));
    }
    let mut upkeep = JoinSet::new();
    upkeep.spawn(upkeep::sweep(shared.clone()));
    if shared.settings.schedules {
        upkeep.spawn(upkeep::cron(shared.clone()));
    }
    upkeep.spawn(upkeep::retain(shared.clone()));
    upkeep.spawn(upkeep::sample(shared.clone()));
    upkeep.spawn(shared.progress.clone().run(shared.client.clone()));
    let mut settler = tokio::spawn(settle::run(shared.clone(), inbox));
    let mut claimer = tokio::spawn(claim::run(shared.clone()));

    loop {
        tokio::select! {
            () = shared.reached(Phase::Finishing) => break,
            Some(Err(died)) = runners.join_next() => {
                tracing::error!(%died, "a runner died; another takes its place");
                runners.spawn(execute::run(shared.clone()));
            }
        }
    }
    // A claim that is under way gives back what it found. One that hangs on the
    // database is left to its engine, which does the same when the answer comes.
    let grace_ends = tokio::time::Instant::now() + shared.settings.shutdown_grace;
    if tokio::time::timeout(STOP_WITHIN, &mut claimer).await.is_err() {
        claimer.abort();
    }
    for attempt in shared.buffer.take_all() {
        shared.report(attempt, Ending::Released, None);
    }
    shared.buffer.close();

    let all_done = async { while runners.join_next().await.is_some() {} };
    tokio::pin!(all_done);
    let in_time = tokio::select! {
        () = &mut all_done => true,
        () = tokio::time::sleep_until(grace_ends) => false,
        () = cut_short(&mut now) => false,
    };
    if !in_time {
        let running = shared.held.all();
        tracing::warn!(jobs = running.len(), "the grace is over; telling handlers to stop");
        running.iter().for_each(|attempt| attempt.control.stop(StopReason::Shutdown));
        if tokio::time::timeout(STOP_WITHIN, &mut all_done).await.is_err() {
            running.iter().for_each(|attempt| attempt.control.abort(StopReason::Shutdown));
            // A handler that blocks its thread cannot even be dropped; its job
            // goes back all the same, and the fence keeps it out.
            let _ = tokio::time::timeout(Duration::from_millis(100), &mut all_done).await;
            for attempt in shared.held.all() {
                shared.report(attempt, Ending::Released, None);
            }
        }
    }
    settle_the_rest(&shared).await;
    shared.phase.send_replace(Phase::Ended);
    upkeep.abort_all();
    if tokio::time::timeout(SETTLE_WITHIN, &mut settler).await.is_err() {
        settler.abort();
    }
    let worker = shared.worker();
    let retired = tokio::time::timeout(SETTLE_WITHIN, shared.client.retire(worker)).await;
    if !matches!(retired, Ok(Ok(()))) {
        tracing::debug!("could not sign off; recovery will clear the worker's row");
    }
    if let Some(hooks) = &shared.hooks {
        let telling = async {
            shared.telling.all().await;
            hooks::call("on_worker_stop", hooks.on_worker_stop(worker)).await;
        };
        let in_time = tokio::select! {
            () = telling => true,
            () = tokio::time::sleep(shared.settings.shutdown_grace) => false,
            () = cut_short(&mut now) => false,
        };
        if !in_time {
            tracing::warn!("stopped before every hook had heard what was stored");
        }
    }
}

/// Waits until somebody wants it to end without grace.
async fn cut_short(now: &mut watch::Receiver<bool>) {
    if now.wait_for(|now| *now).await.is_err() {
        // Nobody is left who could want it.
        std::future::pending().await
    }
}

/// Waits until every lease is settled, as long as the database answers.
async fn settle_the_rest(shared: &Shared) {
    let all_settled = async {
        loop {
            let settled = shared.held.settled.notified();
            if shared.held.len() == 0 {
                return;
            }
            settled.await;
        }
    };
    let _ = tokio::time::timeout(SETTLE_WITHIN, all_settled).await;
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn the_grace_is_cut_short_by_who_asks_for_it_and_not_by_who_goes_away() {
        let mut context = Context::from_waker(Waker::noop());
        let (asks, mut now) = watch::channel(false);
        let mut short = pin!(cut_short(&mut now));
        assert!(short.as_mut().poll(&mut context).is_pending());
        drop(asks);
        assert!(short.as_mut().poll(&mut context).is_pending(), "nobody has asked");

        let (asks, mut now) = watch::channel(false);
        asks.send_replace(true);
        assert!(pin!(cut_short(&mut now)).poll(&mut context).is_ready());
    }
}
