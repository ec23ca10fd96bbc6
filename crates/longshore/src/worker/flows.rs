//! Flows from inside a handler: the results of the tasks that it waited for, and children that it
//! spawns and joins.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::context::Context;
use super::handler::{Failure, without_values};
use super::steps::{decode, encode};
use crate::client::members;
use crate::enqueue::NewJob;
use crate::error::Error;
use crate::job::{FlowId, JobId, Outcome};
use crate::job_metrics::count_replayed_step;
use crate::store::{NewChildren, ParentRecord, Spawned, StepState, flow_event};

/// How often a join looks again if a child runs although the flow of the children has ended.
const MAX_JOIN_ROUNDS: u32 = 50;
const JOIN_PAUSE: Duration = Duration::from_millis(20);

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
            Some(StepState::Waiting { .. }) => {
                return Err(Failure::permanent(format!(
                    "spawn `{name}`: an earlier version of this job waited under this name; use another name"
                )));
            }
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
            Spawned::Cancelled => {
                let id = self.id();
                Err(Failure::permanent(format!(
                    "spawn `{name}`: the children of this job were cancelled; retry them (`longshore flows retry {id}`), \
                     then this job"
                )))
            }
            Spawned::IdOfFlow => Err(Failure::permanent(format!(
                "spawn `{name}`: a flow has the id of this job, so the job cannot have children; enqueue it with another id"
            ))),
            Spawned::Full => Err(Failure::permanent(format!(
                "spawn `{name}`: the job would have more than a million children; spawn children that spawn others"
            ))),
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
            return Ok(Children { all: children.of(name, Some(&spawned))? });
        }
        let Some(record) = self.client().store().flow(flow).await? else {
            return Err(Failure::permanent(format!(
                "join `{name}`: this job has no children; a job can join only those that it has spawned itself"
            )));
        };
        let mut all = Vec::new();
        if record.ended_at.is_some() {
            all = self.spawned_children().await?.of(name, None)?;
        }
        let is_open = |all: &[ParentRecord]| all.iter().any(|child| child.outcome.is_none());
        for _ in 0..MAX_JOIN_ROUNDS {
            // An operator may have retried a child a moment ago, and the flow may not have followed that yet.
            if record.ended_at.is_none() || !is_open(&all) {
                break;
            }
            tokio::time::sleep(JOIN_PAUSE).await;
            self.client().advance_flows().await?;
            if self.client().flow(flow).await?.ended_at.is_none() {
                break;
            }
            all = self.spawned_children().await?.of(name, None)?;
        }
        if record.ended_at.is_none() || is_open(&all) {
            self.suspend(active, name, name, None, vec![flow_event(flow)]).await?;
            all = self.spawned_children().await?.of(name, None)?;
        }
        let spawned = all.iter().filter_map(|child| child.task.clone()).collect();
        self.save_step(name, encode(name, &Joined { spawned })?).await?;
        Ok(Children { all })
    }

    /// The children that this run of the job has spawned. A job that succeeded and was retried starts over; its
    /// earlier children are members of the same flow.
    async fn spawned_children(&self) -> Result<SpawnedChildren, Failure> {
        let mut children = self.client().flow_results(FlowId(self.id().0)).await?;
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
        children.retain(|child| {
            child
                .task
                .as_ref()
                .and_then(|task| spawns.get(task))
                .is_some_and(|spawn| spawn.contains(child.id))
        });
        spawns.extend(self.journal().spawns());
        Ok(SpawnedChildren { children, spawns })
    }
}

/// The children of this run of a job, and what it has spawned.
pub(super) struct SpawnedChildren {
    children: Vec<ParentRecord>,
    spawns: HashMap<String, Spawn>,
}

impl SpawnedChildren {
    fn has(&self, spawns: &BTreeSet<String>) -> bool {
        spawns.iter().all(|name| self.spawns.contains_key(name))
    }

    /// The children of these spawns, or of all. An error if some were deleted: their results are unknown.
    fn of(&self, join: &str, spawns: Option<&BTreeSet<String>>) -> Result<Vec<ParentRecord>, Failure> {
        let is_wanted = |name: &String| spawns.is_none_or(|spawns| spawns.contains(name));
        let mut found = HashMap::<&String, usize>::new();
        for task in self.children.iter().filter_map(|child| child.task.as_ref()) {
            *found.entry(task).or_default() += 1;
        }
        for (name, Spawn { spawned, .. }) in self.spawns.iter().filter(|(name, _)| is_wanted(name)) {
            let missing = spawned.saturating_sub(found.get(name).copied().unwrap_or(0));
            if missing > 0 {
                return Err(Failure::permanent(format!(
                    "join `{join}`: {missing} of the {spawned} children of spawn `{name}` were deleted, so their results are \
                     unknown"
                )));
            }
        }
        let is_wanted = |child: &&ParentRecord| child.task.as_ref().is_some_and(is_wanted);
        Ok(self.children.iter().filter(is_wanted).cloned().collect())
    }
}

/// What the step of a [`Context::spawn`] stores: how many children, and the first and the last of their ids.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Spawn {
    spawned: usize,
    first: Option<JobId>,
    last: Option<JobId>,
}

impl Spawn {
    fn of(ids: impl Iterator<Item = JobId> + Clone) -> Self {
        Spawn { spawned: ids.clone().count(), first: ids.clone().min(), last: ids.max() }
    }

    fn contains(&self, id: JobId) -> bool {
        self.first.is_some_and(|first| first <= id) && self.last.is_some_and(|last| id <= last)
    }
}

/// What a join has waited for: the names of the spawns before it. A later attempt returns the same
/// children, even if the job has spawned others since.
#[derive(Serialize, Deserialize)]
struct Joined {
    spawned: BTreeSet<String>,
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
