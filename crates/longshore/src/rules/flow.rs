//! The rules of flows: what happens to the members of a flow when others end. Pure: the store reads
//! the rows, calls these functions and stores what they decide.
//!
//! `client/graph.rs` has the builder and its checks, `client/children.rs` what a job spawns and joins. `store/advance.rs`
//! and `store/operate_flows.rs` store the decisions.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::job::FlowId;

/// The maximum number of links of a flow.
pub const MAX_LINKS: usize = 100_000;
/// The maximum number of tasks that are stored in one commit.
pub const MAX_TASKS: usize = 100_000;
/// The maximum number of members of a flow.
pub const MAX_MEMBERS: usize = 1_000_000;

/// The prefix of the events that end a join. Callers cannot emit events with it.
pub(crate) const FLOW_EVENT: &str = "flow-ended:";

/// The name of the event that is emitted when the children of a job have ended.
pub(crate) fn flow_event(flow: FlowId) -> String {
    format!("{FLOW_EVENT}{flow}")
}

/// What a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// The other task has succeeded.
    Succeeded,
    /// The other task has ended, whatever its outcome.
    Ended,
    /// The other task has ended without success: it failed, was cancelled or skipped.
    Failed,
}

impl Condition {
    /// All conditions.
    pub const ALL: [Condition; 3] = [Condition::Succeeded, Condition::Ended, Condition::Failed];

    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Condition::Succeeded => "succeeded",
            Condition::Ended => "ended",
            Condition::Failed => "failed",
        }
    }

    pub(crate) fn from_stored(text: &str) -> crate::Result<Self> {
        let found = Condition::ALL.into_iter().find(|condition| condition.as_str() == text);
        found.ok_or_else(|| crate::Error::internal(format!("unknown condition `{text}` of a link")))
    }

    /// Whether a parent that ended in this way meets it.
    pub fn is_met(self, end: End) -> bool {
        match self {
            Condition::Succeeded => end == End::Succeeded,
            Condition::Ended => true,
            Condition::Failed => end == End::Failed,
        }
    }
}

/// How a member or a flow ended, for the jobs that wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It succeeded.
    Succeeded,
    /// It ended in any other way.
    Failed,
}

impl End {
    /// Converts from whether it succeeded.
    pub fn of(succeeded: bool) -> Self {
        if succeeded { End::Succeeded } else { End::Failed }
    }
}

/// Something that happened to a member of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The member.
    pub job: Uuid,
    /// How it ended; `None` if it was reopened.
    pub end: Option<End>,
    /// Whether it counts as a failure of the flow or, if it was reopened, whether it counted. A
    /// member that was skipped does not.
    pub is_failure: bool,
    /// Whether the counts of the flow already include it.
    pub is_counted: bool,
}

/// The counts of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The members that have not ended.
    pub open: i64,
    /// The members that failed.
    pub failed: i64,
    /// Whether no members can be added any more.
    pub is_sealed: bool,
    /// Whether it was cancelled.
    pub is_cancelled: bool,
    /// Whether it has ended.
    pub has_ended: bool,
}

impl Counts {
    /// Counts a change.
    pub fn add(&mut self, change: &Change) {
        if change.is_counted {
            return;
        }
        let (open, failed) = if change.end.is_some() { (-1, 1) } else { (1, -1) };
        // Never below zero, which the database refuses: a wrong count must not block other flows.
        self.open = (self.open + open).max(0);
        if change.is_failure {
            self.failed = (self.failed + failed).max(0);
        }
    }

    /// What the counts mean for the flow itself.
    pub fn turn(&self) -> FlowTurn {
        let is_over = self.is_sealed && self.open == 0;
        match (self.has_ended, is_over) {
            (false, true) => FlowTurn::Ends(self.end()),
            (true, false) => FlowTurn::Reopens,
            _ => FlowTurn::Stays,
        }
    }

    /// How it ended, if it has.
    pub fn end(&self) -> End {
        End::of(self.failed == 0 && !self.is_cancelled)
    }
}

/// What becomes of a flow after changes of its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowTurn {
    /// It ends, in this way.
    Ends(End),
    /// It had ended, and is open again.
    Reopens,
    /// Nothing changes.
    Stays,
}

/// What one step does with a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// Count it, and follow it.
    Follow,
    /// Count it only: it is an end, and the member runs again already.
    Count,
    /// Leave it for a later step.
    Leave,
}

/// Decides what the next step does with changes, oldest first. `reopened` has the flows with a member that
/// was reopened, in these changes or in others that were not read.
///
/// The ends in a flow are left for later until all its reopenings have been followed, including those that
/// they cause: a task must not start while a skipped parent is about to wait again. The changes of one member
/// stay in order.
pub fn pick(changes: &[(Uuid, Change)], reopened: &BTreeSet<Uuid>) -> Vec<Pick> {
    let returns = || changes.iter().filter(|(_, change)| change.end.is_none());
    let flows: BTreeSet<Uuid> = returns().map(|(flow, _)| *flow).chain(reopened.iter().copied()).collect();
    let mut returning: BTreeSet<Uuid> = returns().map(|(_, change)| change.job).collect();
    let picked = changes.iter().map(|(flow, change)| match change.end {
        _ if !flows.contains(flow) => Pick::Follow,
        // A second reopening of the same member is left for later.
        None if returning.remove(&change.job) => Pick::Follow,
        Some(_) if returning.contains(&change.job) => Pick::Count,
        _ => Pick::Leave,
    });
    picked.collect()
}

/// The links of a held child.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The links whose parent has not ended.
    pub open: i64,
    /// The links whose condition the end of the parent does not meet.
    pub unmet: i64,
}

/// What happens to a held child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow {
    /// It still waits.
    Wait,
    /// It waits for no other task any more, and can start.
    Release,
    /// It ends as cancelled, because it can never start.
    Skip,
    /// It ends as cancelled, because its flow is cancelled.
    Cancel,
}

/// Decides what happens to a held child whose links have changed.
pub fn follow(child: Held, flow_is_cancelled: bool) -> Follow {
    debug_assert!(child.open >= 0 && child.unmet >= 0, "numbers of links");
    if child.unmet > 0 {
        Follow::Skip
    } else if flow_is_cancelled {
        Follow::Cancel
    } else if child.open > 0 {
        Follow::Wait
    } else {
        Follow::Release
    }
}

/// The reason that is stored for a skipped task. `blocker` is the parent whose end did not meet the
/// condition, and `end` is that end.
pub fn skip_reason(blocker: Option<&str>, end: End) -> String {
    let name = blocker.map_or("a task that it waits for".to_owned(), |task| format!("task `{task}`"));
    match end {
        End::Succeeded => format!("skipped: {name} succeeded"),
        End::Failed => format!("skipped: {name} did not succeed"),
    }
}

/// The reason that is stored for a skipped callback.
pub const CALLBACK_SKIPPED: &str = "skipped: the flow ended in another way than this callback waits for";

/// The reason that is stored for the members of a cancelled flow.
pub const FLOW_CANCELLED: &str = "the flow was cancelled";

/// A link to a member that may be reopened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParentLink {
    /// The parent.
    pub parent: Uuid,
    /// Whether the parent's end meets the condition; `None` if the parent has not ended.
    pub met: Option<bool>,
}

/// A finished member that did not succeed, with its links.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The member.
    pub job: Uuid,
    /// What it waited for.
    pub links: Vec<ParentLink>,
}

/// A member that is reopened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reopened {
    /// The member.
    pub job: Uuid,
    /// Whether it waits for a parent that has not ended, or that is reopened too.
    pub is_held: bool,
}

/// Decides which of the members that did not succeed are reopened when the failed part of a flow is retried:
/// all, except those that would be skipped again because the end of a parent that is not reopened does not
/// meet their condition.
pub fn reopen(candidates: &[Candidate]) -> Vec<Reopened> {
    // How many links of each candidate are not met, and which candidates each parent blocks.
    let (mut unmet, mut blocked) = (BTreeMap::<Uuid, usize>::new(), BTreeMap::<Uuid, Vec<Uuid>>::new());
    for candidate in candidates {
        for link in candidate.links.iter().filter(|link| link.met == Some(false)) {
            *unmet.entry(candidate.job).or_default() += 1;
            blocked.entry(link.parent).or_default().push(candidate.job);
        }
    }
    let jobs = candidates.iter().map(|candidate| candidate.job);
    let mut startable: Vec<Uuid> = jobs.filter(|job| !unmet.contains_key(job)).collect();
    let mut reopened = BTreeSet::new();
    while let Some(job) = startable.pop() {
        reopened.insert(job);
        for child in blocked.remove(&job).unwrap_or_default() {
            if let Some(left) = unmet.get_mut(&child) {
                debug_assert!(*left > 0, "a link is counted once");
                *left -= 1;
                startable.extend((*left == 0).then_some(child));
            }
        }
    }
    let is_held = |candidate: &Candidate| {
        candidate.links.iter().any(|link| link.met.is_none() || reopened.contains(&link.parent))
    };
    let kept = candidates.iter().filter(|candidate| reopened.contains(&candidate.job));
    kept.map(|candidate| Reopened { job: candidate.job, is_held: is_held(candidate) }).collect()
}

/// Decides whether a task that was skipped waits again, now that a parent of it was reopened.
pub fn comes_back(links: &[ParentLink], flow_is_cancelled: bool) -> bool {
    !flow_is_cancelled && links.iter().all(|link| link.met != Some(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u128) -> Uuid {
        Uuid::from_u128(n)
    }

    #[test]
    fn a_condition_is_met_by_the_end_it_names() {
        let met = |end| Condition::ALL.map(|condition| condition.is_met(end));
        assert_eq!(met(End::Succeeded), [true, true, false]);
        assert_eq!(met(End::Failed), [false, true, true]);
    }

    #[test]
    fn a_child_starts_after_its_last_parent_and_is_skipped_after_the_first_unmet_one() {
        let decide = |open, unmet, cancelled| follow(Held { open, unmet }, cancelled);
        assert_eq!(decide(1, 0, false), Follow::Wait);
        assert_eq!(decide(0, 0, false), Follow::Release);
        assert_eq!(decide(3, 1, false), Follow::Skip);
        assert_eq!(decide(0, 0, true), Follow::Cancel);
        assert_eq!(decide(2, 0, true), Follow::Cancel);
    }

    #[test]
    fn a_flow_ends_when_it_is_sealed_and_no_member_is_open() {
        let ended = |is_failure: bool| Change {
            job: id(1),
            end: Some(End::of(!is_failure)),
            is_failure,
            is_counted: false,
        };
        let mut counts = Counts { open: 2, is_sealed: true, ..Counts::default() };
        counts.add(&ended(false));
        assert_eq!(counts.turn(), FlowTurn::Stays);
        counts.add(&ended(true));
        assert_eq!(counts.turn(), FlowTurn::Ends(End::Failed));
        assert_eq!(Counts { is_sealed: false, ..counts }.turn(), FlowTurn::Stays);
        counts.has_ended = true;
        let reopened = Change { job: id(1), end: None, is_failure: true, is_counted: false };
        counts.add(&reopened);
        counts.add(&Change { is_counted: true, ..reopened });
        assert_eq!((counts.open, counts.failed), (1, 0));
        assert_eq!(counts.turn(), FlowTurn::Reopens);
    }

    #[test]
    fn returns_are_followed_before_ends_of_the_same_flow() {
        let change =
            |flow, job, end| (id(flow), Change { job: id(job), end, is_failure: false, is_counted: false });
        let end = |flow, job| change(flow, job, Some(End::Succeeded));
        let back = |flow, job| change(flow, job, None);
        let pick = |changes: &[(Uuid, Change)]| super::pick(changes, &BTreeSet::new());
        use Pick::{Count, Follow, Leave};
        assert_eq!(pick(&[end(1, 11), end(1, 12)]), [Follow, Follow]);
        assert_eq!(pick(&[end(1, 11), end(2, 21), back(1, 12)]), [Leave, Follow, Follow]);
        // The changes of one member stay in order, and an end that has been undone starts nothing.
        assert_eq!(
            pick(&[end(1, 11), back(1, 11), end(1, 11), back(1, 11), back(1, 12), end(1, 12)]),
            [Count, Follow, Leave, Leave, Follow, Leave]
        );
        // A reopening that was not read.
        assert_eq!(super::pick(&[end(1, 11), end(2, 21)], &BTreeSet::from([id(1)])), [Leave, Follow]);
    }

    #[test]
    fn a_skipped_task_comes_back_unless_another_parent_still_keeps_it_from_starting() {
        let links = |met: &[Option<bool>]| -> Vec<ParentLink> {
            met.iter().map(|met| ParentLink { parent: id(1), met: *met }).collect()
        };
        assert!(comes_back(&links(&[None, Some(true)]), false));
        assert!(!comes_back(&links(&[None, Some(false)]), false));
        assert!(!comes_back(&links(&[None]), true));
    }

    #[test]
    fn a_retry_reopens_the_failed_part_and_holds_what_waits_for_it() {
        let candidate = |job, links: &[(u128, Option<bool>)]| Candidate {
            job: id(job),
            links: links.iter().map(|(parent, met)| ParentLink { parent: id(*parent), met: *met }).collect(),
        };
        // 1 failed; 2 was skipped because of 1, and 3 because of 2. 4 needed the failure of 9, which
        // succeeded, and 5 needed 4. 6 failed after 8 had succeeded. 11 needed 1, and the failure of 9.
        let candidates = [
            candidate(3, &[(2, Some(false))]),
            candidate(2, &[(1, Some(false)), (8, Some(true))]),
            candidate(1, &[]),
            candidate(4, &[(9, Some(false))]),
            candidate(5, &[(4, Some(false))]),
            candidate(6, &[(8, Some(true))]),
            candidate(7, &[(8, Some(true)), (10, None)]),
            candidate(11, &[(1, Some(false)), (9, Some(false))]),
        ];
        let reopened: Vec<(u128, bool)> =
            reopen(&candidates).iter().map(|reopened| (reopened.job.as_u128(), reopened.is_held)).collect();
        assert_eq!(reopened, [(3, true), (2, true), (1, false), (6, false), (7, true)]);
    }
}
