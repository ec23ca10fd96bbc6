//! Children of a job: what the steps of a spawn and of a join store, and which children a join returns. The
//! rules are the same for Rust handlers (`worker/flows.rs`) and for workers that call the API
//! (`api/leases/flows.rs`).

use std::collections::{BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::job::JobId;
use crate::store::{ParentRecord, Spawned};

/// What the step of a spawn stores: how many children, and the first and the last of their ids.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spawn {
    spawned: usize,
    first: Option<JobId>,
    last: Option<JobId>,
}

impl Spawn {
    pub(crate) fn of(ids: impl Iterator<Item = JobId> + Clone) -> Self {
        Spawn { spawned: ids.clone().count(), first: ids.clone().min(), last: ids.max() }
    }

    /// Reads the value of a step; `None` if it is not that of a spawn.
    #[cfg(feature = "api")]
    pub(crate) fn read(value: &RawValue) -> Option<Self> {
        serde_json::from_str(value.get()).ok()
    }

    fn contains(&self, id: JobId) -> bool {
        self.first.is_some_and(|first| first <= id) && self.last.is_some_and(|last| id <= last)
    }
}

/// What a join has waited for: the names of the spawns before it. A later attempt returns the same
/// children, even if the job has spawned others since.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Joined {
    pub(crate) spawned: BTreeSet<String>,
}

impl Joined {
    pub(crate) fn of(children: &[ParentRecord]) -> Self {
        Joined { spawned: children.iter().filter_map(|child| child.task.clone()).collect() }
    }
}

/// The children of this run of a job, and what it has spawned. A job that succeeded and was retried starts
/// over; its earlier children are members of the same flow.
pub(crate) struct SpawnedChildren {
    children: Vec<ParentRecord>,
    spawns: HashMap<String, Spawn>,
}

impl SpawnedChildren {
    /// `children` are all members of the flow, `spawns` what this run has spawned, by the name of the step.
    pub(crate) fn new(mut children: Vec<ParentRecord>, spawns: HashMap<String, Spawn>) -> Self {
        children.retain(|child| is_child(child, &spawns));
        SpawnedChildren { children, spawns }
    }

    #[cfg(feature = "worker")]
    pub(crate) fn has(&self, spawns: &BTreeSet<String>) -> bool {
        spawns.iter().all(|name| self.spawns.contains_key(name))
    }

    /// The children of these spawns, or of all. Fails if a child was deleted, because its result is unknown.
    pub(crate) fn of(
        &self,
        join: &str,
        spawns: Option<&BTreeSet<String>>,
    ) -> Result<Vec<ParentRecord>, String> {
        let is_wanted = |name: &String| spawns.is_none_or(|spawns| spawns.contains(name));
        let mut found = HashMap::<&String, usize>::new();
        for task in self.children.iter().filter_map(|child| child.task.as_ref()) {
            *found.entry(task).or_default() += 1;
        }
        for (name, Spawn { spawned, .. }) in self.spawns.iter().filter(|(name, _)| is_wanted(name)) {
            let missing = spawned.saturating_sub(found.get(name).copied().unwrap_or(0));
            if missing > 0 {
                return Err(format!(
                    "join `{join}`: {missing} of the {spawned} children of spawn `{name}` were deleted, so their results are \
                     unknown"
                ));
            }
        }
        let is_wanted = |child: &&ParentRecord| child.task.as_ref().is_some_and(is_wanted);
        Ok(self.children.iter().filter(is_wanted).cloned().collect())
    }
}

/// Whether a member of the flow is a child of one of these spawns.
pub(crate) fn is_child(member: &ParentRecord, spawns: &HashMap<String, Spawn>) -> bool {
    let spawn = member.task.as_ref().and_then(|task| spawns.get(task));
    spawn.is_some_and(|spawn| spawn.contains(member.id))
}

/// Why a join of a job without children is refused.
pub(crate) fn no_children(join: &str) -> String {
    format!("join `{join}`: this job has no children; a job can join only those that it has spawned itself")
}

/// Why a step of an earlier attempt prevents a spawn.
pub(crate) fn waited_before(spawn: &str) -> String {
    format!("spawn `{spawn}`: an earlier version of this job waited under this name; use another name")
}

/// Why children were not stored, although the lease is live.
pub(crate) fn refusal(spawn: &str, id: JobId, spawned: Spawned) -> Option<String> {
    match spawned {
        Spawned::Stored | Spawned::LeaseLost => None,
        Spawned::Cancelled => Some(format!(
            "spawn `{spawn}`: the children of this job were cancelled; retry them (`longshore flows retry {id}`), \
             then this job"
        )),
        Spawned::IdOfFlow => Some(format!(
            "spawn `{spawn}`: a flow has the id of this job, so the job cannot have children; enqueue it with another id"
        )),
        Spawned::Full => Some(format!(
            "spawn `{spawn}`: the job would have more than a million children; spawn children that spawn others"
        )),
    }
}
