//! Flows from inside a handler: the results of the tasks that it waited for, and children that it
//! spawns and joins.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use super::context::Context;
use super::handler::{Failure, without_values};
use super::steps::{decode, encode};
use crate::client::children::{Joined, Spawn, SpawnedChildren, no_children, refusal, waited_before};
use crate::client::job_metrics::count_replayed_step;
use crate::client::{JoinState, members};
use crate::error::Error;
use crate::job::{FlowId, JobId, Outcome};
use crate::rules::enqueue::NewJob;
use crate::rules::flow::flow_event;
use crate::store::{NewChildren, ParentRecord, Spawned, StepState};

impl<S: Send + Sync> Context<S> {
    /// The result of a task of the flow that this one waited for.
    ///
    /// ```
    /// # use longshore::{Context, Failure};
    /// async fn parse(_: (), ctx: Context) -> Result<(), Failure> {
    ///     let rows: Vec<String> = ctx.input("fetch").await?;
    ///     println!("{} rows", rows.len());
    ///     Ok(())
    /// }
    /// ```
    pub async fn input<T: DeserializeOwned>(&self, task: &str) -> Result<T, Failure> {
        let parents = self.client().parents(self.id()).await?;
        let Some(parent) = parents.iter().find(|parent| parent.task.as_deref() == Some(task)) else {
            let names: Vec<String> = parents
                .iter()
                .filter_map(|parent| parent.task.as_ref())
                .map(|name| format!("`{name}`"))
                .collect();
            let known = match names.is_empty() {
                true => "it waits for no other task".to_owned(),
                false => format!("it waits for {}", names.join(", ")),
            };
            return Err(Failure::permanent(format!(
                "input `{task}`: this job does not wait for a task of this name; {known}"
            )));
        };
        result_of(task, parent)
    }

    /// The results of all tasks that this one waited for, of those that succeeded, with their names.
    pub async fn inputs<T: DeserializeOwned>(&self) -> Result<Vec<(String, T)>, Failure> {
        let parents = self.client().parents(self.id()).await?;
        let succeeded = parents.into_iter().filter(|parent| parent.outcome == Some(Outcome::Succeeded));
        let named = succeeded.map(|parent| {
            let name = parent.task.clone().unwrap_or_else(|| parent.id.to_string());
            let result = result_of(&name, &parent)?;
            Ok((name, result))
        });
        named.collect()
    }

    /// Enqueues children of this job, up to 10,000 per call, once: the name is that of a durable
    /// [step](Self::step). They start at once. [`join`](Self::join) waits for them.
    ///
    /// ```
    /// # use longshore::{Context, Failure, NewJob};
    /// async fn ship(parcels: u32, ctx: Context) -> Result<(), Failure> {
    ///     ctx.spawn("parcels", (1..=parcels).map(|n| NewJob::new("ship_parcel", &n))).await?;
    ///     let labels: Vec<String> = ctx.join("all shipped").await?.results()?;
    ///     println!("{} labels", labels.len());
    ///     Ok(())
    /// }
    /// ```
    pub async fn spawn(
        &self,
        name: &str,
        jobs: impl IntoIterator<Item = impl Into<NewJob>>,
    ) -> Result<(), Failure> {
        let jobs: Vec<NewJob> = jobs.into_iter().map(Into::into).collect();
        let _active = self.journal().suspension.activate();
        match self.journaled("spawn", name, name).await? {
            Some(StepState::Done(value)) => {
                count_replayed_step();
                self.journal().add_spawn(name, decode(name, &value)?);
                return Ok(());
            }
            Some(StepState::Waiting { .. }) => return Err(Failure::permanent(waited_before(name))),
            None => {}
        }
        let refused = |error: Error| match error.is_invalid() {
            true => Failure::permanent(format!("spawn `{name}`: {error}")),
            false => error.into(),
        };
        let members = members(Some(name), jobs).map_err(refused)?;
        let spawn = Spawn::of(members.iter().map(|member| member.job.id));
        let value = encode(name, &spawn)?;
        self.journal().check_size(name, &value)?;
        let children = NewChildren {
            lease: self.job().lease(),
            kind: self.job().kind().to_owned(),
            step: name.to_owned(),
            value,
            members,
        };
        match self.client().spawn_children(children).await.map_err(refused)? {
            Spawned::Stored => {
                self.journal().add_spawn(name, spawn);
                self.journal().mark_progress();
                Ok(())
            }
            Spawned::LeaseLost => Err(self.lease_lost().into()),
            refused => Err(Failure::permanent(refusal(name, self.id(), refused).unwrap_or_default())),
        }
    }

    /// Waits until all children that this job has [spawned](Self::spawn) have ended, without a worker,
    /// like [`sleep`](Self::sleep). Returns how they ended.
    pub async fn join(&self, name: &str) -> Result<Children, Failure> {
        let flow = FlowId(self.id().0);
        let active = self.journal().suspension.activate();
        if let Some(StepState::Done(joined)) = self.journaled("join", name, name).await? {
            count_replayed_step();
            let Joined { spawned } = decode(name, &joined)?;
            let known = self.journal().children().filter(|known| known.has(&spawned));
            let children = match known {
                Some(known) => known,
                None => {
                    let children = Arc::new(self.spawned_children().await?);
                    self.journal().keep_children(children.clone());
                    children
                }
            };
            let all = children.of(name, Some(&spawned)).map_err(Failure::permanent)?;
            return Ok(Children { all });
        }
        let Some(record) = self.client().store().flow(flow).await? else {
            return Err(Failure::permanent(no_children(name)));
        };
        let mut all = None;
        for round in 0.. {
            if record.ended_at.is_none() {
                break;
            }
            let children = self.spawned_children().await?.of(name, None).map_err(Failure::permanent)?;
            match self.client().join_state(&record, &children, round).await? {
                JoinState::Ended => all = Some(children),
                JoinState::Open => {}
                JoinState::Again => continue,
            }
            break;
        }
        let all = match all {
            Some(all) => all,
            None => {
                self.suspend(active, name, name, None, vec![flow_event(flow)]).await?;
                self.spawned_children().await?.of(name, None).map_err(Failure::permanent)?
            }
        };
        self.save_step(name, encode(name, &Joined::of(&all))?).await?;
        Ok(Children { all })
    }

    /// The children that this run of the job has spawned. A job that succeeded and was retried starts over; its
    /// earlier children are members of the same flow.
    async fn spawned_children(&self) -> Result<SpawnedChildren, Failure> {
        let children = self.client().flow_results(FlowId(self.id().0)).await?;
        let mut spawns = HashMap::<String, Spawn>::new();
        let mut others = HashSet::<String>::new();
        for task in children.iter().filter_map(|child| child.task.as_ref()) {
            if !spawns.contains_key(task) && !others.contains(task) {
                let stored = self.journal().earlier(self.client(), self.job().lease(), task).await?;
                let spawn = match (self.journal().spawn(task), stored) {
                    (Some(spawn), _) => spawn,
                    (None, Some(StepState::Done(value))) => decode(task, &value)?,
                    (None, _) => {
                        others.insert(task.clone());
                        continue;
                    }
                };
                spawns.insert(task.clone(), spawn);
            }
        }
        spawns.extend(self.journal().spawns());
        Ok(SpawnedChildren::new(children, spawns))
    }
}

fn result_of<T: DeserializeOwned>(name: &str, parent: &ParentRecord) -> Result<T, Failure> {
    if parent.outcome != Some(Outcome::Succeeded) {
        let outcome = parent.outcome.map_or("not ended", Outcome::as_str);
        return Err(Failure::permanent(format!("`{name}` has no result: its outcome is {outcome}")));
    }
    let result = parent.result.as_deref().unwrap_or(RawValue::NULL);
    serde_json::from_str(result.get()).map_err(|error| {
        let why = without_values(&error.to_string());
        Failure::permanent(format!("the result of `{name}` does not fit the type: {why}"))
    })
}

/// The children of a job, all of which have ended. See [`Context::join`].
#[derive(Clone, Debug)]
pub struct Children {
    all: Vec<ParentRecord>,
}

impl Children {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Those that did not succeed.
    pub fn failed(&self) -> impl Iterator<Item = JobId> {
        self.all.iter().filter(|child| child.outcome != Some(Outcome::Succeeded)).map(|child| child.id)
    }

    /// The results of all children, in the order in which they were created. An error if one of
    /// them did not succeed.
    pub fn results<T: DeserializeOwned>(&self) -> Result<Vec<T>, Failure> {
        self.all.iter().map(|child| result_of(&child.id.to_string(), child)).collect()
    }
}
