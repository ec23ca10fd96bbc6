//! Durable steps of a handler: work that is done once, sleeps, and waits for events. They
//! survive crashes, deployments and moves to another host.

use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::context::Context;
use super::handler::{Failure, without_values};
use super::journal::Active;
use crate::client::job_metrics::{count_replayed_step, count_stored_steps, count_timed_out_wait};
use crate::rules::enqueue::{check_event, check_json, check_name};
use crate::rules::lifecycle::PendingWait;
use crate::rules::retry::MAX_DELAY;
use crate::rules::waits::{WaitState, Winner};
use crate::store::{MAX_STEP_VALUE, NewStep, StepState};
#[cfg(feature = "postgres")]
use crate::store::{StepRecord, postgres::StepConnection};

impl<S: Send + Sync> Context<S> {
    /// Does a piece of work once. When it is done, its value is stored with the job under `name`.
    /// If the job runs again, because a later step failed or the worker died, the stored value
    /// is returned and the work is not repeated.
    ///
    /// If the worker dies after the work and before its value is stored, the work is repeated;
    /// so make it idempotent, for example with a key that you send to the payment provider.
    ///
    /// Each step of a job has its own name. A step is a step because of its name, not because of
    /// its position: steps may be added, removed and reordered while jobs are in flight. Attempts
    /// and interruptions count since the last stored step.
    ///
    /// ```
    /// use std::time::Duration;
    /// use longshore::{Context, Failure};
    ///
    /// async fn order(number: u32, ctx: Context) -> Result<(), Failure> {
    ///     let charge: String = ctx.step("charge", || async { Ok(format!("charge-{number}")) }).await?;
    ///     ctx.sleep("cool-down", Duration::from_secs(3 * 24 * 60 * 60)).await?;
    ///     ctx.step("ship", || async { println!("shipping, paid by {charge}"); Ok(()) }).await
    /// }
    /// ```
    pub async fn step<T, Work, Working>(&self, name: &str, work: Work) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned,
        Work: FnOnce() -> Working,
        Working: Future<Output = Result<T, Failure>>,
    {
        let _active = self.journal().suspension.activate();
        if let Some(value) = self.done_before(name).await? {
            return decode(name, &value);
        }
        let value = work().await?;
        self.save_step(name, encode(name, &value)?).await?;
        Ok(value)
    }

    /// Like [`step`](Self::step), in a Postgres transaction that also stores the step. So what the
    /// work changes in the database is committed exactly once, together with the step. If the work
    /// fails, or another worker owns the job by then, the transaction is rolled back.
    ///
    /// The transaction is in the queue's database. Until it ends, no other worker can take the job,
    /// so keep it short. Its connection comes from the pool of the worker's client.
    ///
    /// ```no_run
    /// use longshore::{Context, Failure};
    ///
    /// async fn book(order: i64, ctx: Context) -> Result<(), Failure> {
    ///     ctx.step_in("book", async |tx| {
    ///         sqlx::query("update stock set left_over = left_over - 1").execute(&mut *tx).await?;
    ///         sqlx::query("insert into bookings values ($1)").bind(order).execute(&mut *tx).await?;
    ///         Ok(())
    ///     })
    ///     .await
    /// }
    /// ```
    #[cfg(feature = "postgres")]
    pub async fn step_in<T, Work>(&self, name: &str, work: Work) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned,
        Work: AsyncFnOnce(&mut sqlx::PgConnection) -> Result<T, Failure>,
    {
        let _active = self.journal().suspension.activate();
        let Some(store) = self.postgres() else {
            return Err(Failure::permanent(format!(
                "step `{name}`: `step_in` needs a Postgres database, but this client uses another engine; use `step`"
            )));
        };
        if let Some(value) = self.done_before(name).await? {
            return decode(name, &value);
        }
        let mut connection = store.step_connection().await?;
        let done = self.work_in(&mut connection, name, work).await;
        connection.release().await;
        done
    }

    #[cfg(feature = "postgres")]
    async fn work_in<T, Work>(
        &self,
        connection: &mut StepConnection,
        name: &str,
        work: Work,
    ) -> Result<T, Failure>
    where
        T: Serialize + DeserializeOwned,
        Work: AsyncFnOnce(&mut sqlx::PgConnection) -> Result<T, Failure>,
    {
        let lease = self.job().lease();
        let Some(mut transaction) = connection.begin(&lease).await? else {
            return Err(self.lease_lost().into());
        };
        let value = work(transaction.connection()).await?;
        let step = NewStep { lease, name: name.to_owned(), value: encode(name, &value)? };
        self.journal().check_size(name, &step.value)?;
        match transaction.commit(&step).await {
            Ok(fenced) => self.check_fence(fenced)?,
            // The commit may have succeeded. If it is still in progress, it holds the lease, so that
            // the next attempt starts after its end.
            Err(error) if self.is_stored(name).await => {
                tracing::debug!(%error, job_id = %lease.id, step = name, "the step is stored although the commit failed");
            }
            Err(error) => return Err(error.into()),
        }
        self.journal().mark_progress();
        count_stored_steps(1);
        Ok(value)
    }

    /// Whether the step is stored now.
    #[cfg(feature = "postgres")]
    async fn is_stored(&self, name: &str) -> bool {
        let is_done = |step: &StepRecord| step.name == name && matches!(step.state, StepState::Done(_));
        self.client().steps(self.id()).await.is_ok_and(|steps| steps.iter().any(is_done))
    }

    /// The value of a step that an earlier attempt has stored.
    async fn done_before(&self, name: &str) -> Result<Option<Box<RawValue>>, Failure> {
        match self.journaled("step", name, name).await? {
            Some(StepState::Done(value)) => {
                count_replayed_step();
                Ok(Some(value))
            }
            Some(StepState::Waiting { .. }) => Err(Failure::permanent(format!(
                "step `{name}`: an earlier version of this job waited under this name; use another name"
            ))),
            None => Ok(None),
        }
    }

    /// Waits for this long, without a worker: the job is suspended and continues in a new attempt,
    /// which repeats the handler up to this point with the stored values of its steps. What the
    /// handler did outside of steps is done again.
    ///
    /// The time is counted from the first time that the job gets here.
    pub async fn sleep(&self, name: &str, time: Duration) -> Result<(), Failure> {
        self.wait("sleep", name, name, &[Wait::sleep(time)]).await.map(drop)
    }

    /// Waits for an event, without a worker, like [`sleep`](Self::sleep). It does not matter
    /// whether the event was emitted before the job waits or later. The event's name is also the
    /// name of the step.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use longshore::{Context, Failure};
    /// #[derive(serde::Deserialize)]
    /// struct Approval { by: String }
    ///
    /// async fn pay_out(number: u32, ctx: Context) -> Result<(), Failure> {
    ///     let day = Duration::from_secs(24 * 60 * 60);
    ///     match ctx.event::<Approval>(&format!("approved:{number}")).within(day).await? {
    ///         Some(approval) => println!("{} approved it", approval.by),
    ///         None => return Err(Failure::cancelled("nobody approved it in time")),
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn event<T: DeserializeOwned>(&self, name: &str) -> EventWait<'_, S, T> {
        EventWait { ctx: self, name: name.to_owned(), payload: PhantomData }
    }

    /// Waits for the first of several things, without a worker. What came first is stored, so a
    /// later attempt sees the same.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use longshore::{Context, Failure};
    /// # use longshore::worker::Wait;
    /// async fn decide(number: u32, ctx: Context) -> Result<(), Failure> {
    ///     let day = Duration::from_secs(24 * 60 * 60);
    ///     let waits = [
    ///         Wait::event(format!("approved:{number}")),
    ///         Wait::event(format!("rejected:{number}")),
    ///         Wait::sleep(day),
    ///     ];
    ///     let first = ctx.any("decision", waits).await?;
    ///     println!("{}", ["approved", "rejected", "no answer"][first.index]);
    ///     Ok(())
    /// }
    /// ```
    pub async fn any(&self, name: &str, waits: impl IntoIterator<Item = Wait>) -> Result<First, Failure> {
        let waits: Vec<Wait> = waits.into_iter().collect();
        self.wait("any", name, name, &waits).await
    }

    async fn wait(&self, what: &str, name: &str, step: &str, waits: &[Wait]) -> Result<First, Failure> {
        check_waits(what, name, waits)?;
        let active = self.journal().suspension.activate();
        let earlier = match self.journaled(what, name, step).await? {
            Some(StepState::Done(winner)) => {
                count_replayed_step();
                return first(decode(name, &winner)?, name, waits);
            }
            Some(StepState::Waiting { until }) => until,
            None => None,
        };
        let names: Vec<String> = waits.iter().filter_map(Wait::event_name).collect();
        let time = shortest_sleep(waits).map(|(_, time)| time);
        let winner = match self.client().wait_state(&names, time, earlier).await? {
            WaitState::Over(winner) => winner,
            WaitState::Open { until } => return self.suspend(active, name, step, until, names).await,
        };
        self.save_step(step, encode(name, &winner)?).await?;
        if winner.event.is_none() && !names.is_empty() {
            count_timed_out_wait();
        }
        first(winner, name, waits)
    }

    pub(super) async fn suspend(
        &self,
        active: Active<'_>,
        name: &str,
        step: &str,
        until: Option<DateTime<Utc>>,
        events: Vec<String>,
    ) -> Result<First, Failure> {
        let suspension = &self.journal().suspension;
        if !suspension.is_possible() {
            return Err(Failure::permanent(format!(
                "`{name}`: a job of a batch cannot wait, because its batch shares one call; \
                 run this kind with a function or a typed job"
            )));
        }
        active.suspend(PendingWait { step: step.to_owned(), until, events }).await;
        Err(Failure::retry(format!("`{name}`: the attempt ended while this task waited")))
    }

    /// What an earlier attempt stored under the name `step`, which this attempt now uses.
    pub(super) async fn journaled(
        &self,
        what: &str,
        name: &str,
        step: &str,
    ) -> Result<Option<StepState>, Failure> {
        check_name("name", name).map_err(|error| Failure::permanent(format!("{what} `{name}`: {error}")))?;
        if !self.journal().use_name(step) {
            return Err(Failure::permanent(format!(
                "{what} `{name}`: the name is used twice in this attempt; give each step its own name, \
                 for example with a number"
            )));
        }
        Ok(self.journal().earlier(self.client(), self.job().lease(), step).await?)
    }

    pub(super) async fn save_step(&self, name: &str, value: Box<RawValue>) -> Result<(), Failure> {
        self.journal().check_size(name, &value)?;
        let step = NewStep { lease: self.job().lease(), name: name.to_owned(), value };
        let fenced = self.journal().save(self.client(), step).await?;
        self.check_fence(fenced)?;
        count_stored_steps(1);
        Ok(())
    }
}

pub(super) fn encode(name: &str, value: &impl Serialize) -> Result<Box<RawValue>, Failure> {
    let value = serde_json::value::to_raw_value(value)
        .map_err(|error| Failure::permanent(format!("step `{name}`: its value is not JSON: {error}")))?;
    check_json("value", value.get(), MAX_STEP_VALUE).map_err(|error| {
        Failure::permanent(format!("step `{name}`: {error}; store it elsewhere and return where it is"))
    })?;
    Ok(value)
}

pub(super) fn decode<T: DeserializeOwned>(name: &str, value: &RawValue) -> Result<T, Failure> {
    serde_json::from_str(value.get()).map_err(|error| {
        let why = without_values(&error.to_string());
        Failure::permanent(format!(
            "step `{name}`: the stored value does not fit the type: {why}; give the changed step a new name"
        ))
    })
}

fn check_waits(what: &str, name: &str, waits: &[Wait]) -> Result<(), Failure> {
    if waits.is_empty() {
        return Err(Failure::permanent(format!("{what} `{name}`: name at least one thing to wait for")));
    }
    for wait in waits {
        match wait {
            Wait(Awaited::Sleep(time)) if *time > MAX_DELAY => {
                return Err(Failure::permanent(format!("{what} `{name}`: wait at most ten years")));
            }
            Wait(Awaited::Sleep(_)) => {}
            Wait(Awaited::Event(event)) => check_event("event", event)
                .map_err(|error| Failure::permanent(format!("{what} `{name}`: {error}")))?,
        }
    }
    Ok(())
}

/// The shortest sleep and its index.
fn shortest_sleep(waits: &[Wait]) -> Option<(usize, Duration)> {
    let sleeps = waits.iter().enumerate().filter_map(|(index, wait)| match wait {
        Wait(Awaited::Sleep(time)) => Some((index, *time)),
        Wait(Awaited::Event(_)) => None,
    });
    sleeps.min_by_key(|(_, time)| *time)
}

/// One of the things that [`Context::any`] waits for.
#[derive(Clone, Debug)]
pub struct Wait(Awaited);

#[derive(Clone, Debug)]
enum Awaited {
    Sleep(Duration),
    Event(String),
}

impl Wait {
    /// Waits until this much time has passed.
    pub fn sleep(time: Duration) -> Self {
        Wait(Awaited::Sleep(time))
    }

    /// Waits for the event with this name.
    pub fn event(name: impl Into<String>) -> Self {
        Wait(Awaited::Event(name.into()))
    }

    fn event_name(&self) -> Option<String> {
        match &self.0 {
            Awaited::Sleep(_) => None,
            Awaited::Event(name) => Some(name.clone()),
        }
    }
}

/// What came first, among the things that the handler waits for now.
fn first(winner: Winner, name: &str, waits: &[Wait]) -> Result<First, Failure> {
    let index = match &winner.event {
        Some(event) => waits.iter().position(|wait| wait.event_name().as_ref() == Some(event)),
        None => shortest_sleep(waits).map(|(index, _)| index),
    };
    let Some(index) = index else {
        let what = winner.event.map_or("the end of a sleep".into(), |event| format!("the event `{event}`"));
        return Err(Failure::permanent(format!(
            "`{name}`: {what} came first, but the job no longer waits for it; give the changed wait a new name"
        )));
    };
    Ok(First { index, payload: winner.into_payload() })
}

/// What came first of the things that [`Context::any`] waited for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct First {
    /// Its position among the things waited for.
    pub index: usize,
    /// The payload, if it is an event.
    pub payload: Option<Box<RawValue>>,
}

/// A wait for an event. Await it, or limit it with [`within`](Self::within).
pub struct EventWait<'a, S, T> {
    ctx: &'a Context<S>,
    name: String,
    payload: PhantomData<fn() -> T>,
}

impl<'a, S: Send + Sync, T: DeserializeOwned> EventWait<'a, S, T> {
    /// Waits for at most this long; `None` then means that the event did not come in time. The
    /// time is counted from the first time that the job gets here.
    pub async fn within(self, time: Duration) -> Result<Option<T>, Failure> {
        let waits = [Wait::event(&self.name), Wait::sleep(time)];
        self.first(&waits).await
    }

    async fn first(&self, waits: &[Wait]) -> Result<Option<T>, Failure> {
        let first = self.ctx.wait("event", &self.name, &format!("event:{}", self.name), waits).await?;
        first.payload.map(|payload| decode_event(&self.name, &payload)).transpose()
    }
}

impl<'a, S: Send + Sync, T: DeserializeOwned + Send + 'a> IntoFuture for EventWait<'a, S, T> {
    type Output = Result<T, Failure>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<T, Failure>> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let payload = self.first(&[Wait::event(&self.name)]).await?;
            payload.ok_or_else(|| Failure::permanent(format!("event `{}`: it has no payload", self.name)))
        })
    }
}

fn decode_event<T: DeserializeOwned>(name: &str, payload: &RawValue) -> Result<T, Failure> {
    serde_json::from_str(payload.get()).map_err(|error| {
        let why = without_values(&error.to_string());
        Failure::permanent(format!("event `{name}`: its payload does not fit the type: {why}"))
    })
}
