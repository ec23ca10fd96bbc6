//! Random graphs and random schedules of operations on them, compared after every step with a model
//! in memory that uses only the rules in `flow`.
//!
//! `LONGSHORE_FLOW_CASES=10000` runs more graphs, and `LONGSHORE_FLOW_SEED=17` starts with that one; alone, it
//! runs only that one.

use std::collections::{BTreeMap, BTreeSet};

use chrono::{DateTime, Utc};
use longshore::rules::flow::{
    self, Candidate, Change, Counts, End, FlowTurn, Follow, Held, ParentLink, Pick, Reopened,
};
use longshore::store::{ClaimRequest, Claimed};
use longshore::{
    Condition, Ending, Flow, FlowId, FlowRecord, JobId, NewJob, Outcome, Retention, Status, SweepOptions,
    WorkerId, task,
};
use uuid::Uuid;

use crate::fixture::*;
use crate::random::Random;

cases! {
    every_schedule_of_every_graph_follows_the_rules,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting { is_held: bool },
    Running { cancel_requested: bool },
    Finished { outcome: Outcome, is_skipped: bool, at: DateTime<Utc> },
}

struct Link {
    parent: Uuid,
    child: Uuid,
    condition: Condition,
    met: Option<bool>,
}

struct Model {
    flow: Uuid,
    queue: String,
    /// Members and callbacks.
    jobs: BTreeMap<Uuid, State>,
    callbacks: Vec<Uuid>,
    links: Vec<Link>,
    counts: Counts,
    ended_at: DateTime<Utc>,
    changes: Vec<Change>,
    claimed: Vec<Claimed>,
    worker: WorkerId,
}

async fn every_schedule_of_every_graph_follows_the_rules(fixture: Fixture) {
    let first = number_in_environment("LONGSHORE_FLOW_SEED");
    let cases = number_in_environment("LONGSHORE_FLOW_CASES").unwrap_or(if first.is_some() { 1 } else { 40 });
    let seeds = first.unwrap_or(1)..first.unwrap_or(1) + cases;
    // Changes are followed only where the schedule says so.
    let _held = fixture.hold_advances().await;
    for seed in seeds {
        let mut random = Random::new(seed);
        let mut model = Model::enqueue(&fixture, &mut random, seed).await;
        for _ in 0..random.below(30) + 5 {
            let step = model.step(&fixture, &mut random).await;
            model.compare(&fixture, &format!("seed {seed}, {step}")).await;
        }
        model.finish(&fixture, seed).await;
        if seed % 50 == 0 {
            let problems = fixture.check().await.expect("check").problems;
            assert_eq!(problems, [], "seed {seed}");
        }
    }
}

impl Model {
    async fn enqueue(fixture: &Fixture, random: &mut Random, seed: u64) -> Self {
        let queue = format!("q{seed}");
        let job = |queue: &str| NewJob::new("work", &seed).queue(queue).max_attempts(1000).timeout(None);
        let tasks = random.below(9) + 1;
        let mut flow = Flow::new("random");
        for nth in 0..tasks {
            let mut node = task(format!("t{nth}"), job(&queue));
            for parent in 0..nth {
                if random.is_one_in(3) {
                    node = node.after_condition(format!("t{parent}"), Condition::ALL[random.below(3)]);
                }
            }
            flow = flow.task(node);
        }
        for condition in Condition::ALL {
            if random.is_one_in(3) {
                flow = flow.on(condition, job(&queue));
            }
        }
        let id = fixture.enqueue_flow(flow.clone()).await.expect("enqueue_flow").id;
        // The same ids, because the flow has them already.
        let graph = flow.validate().expect("valid");
        let mut model = Model {
            flow: id.0,
            queue,
            jobs: BTreeMap::new(),
            callbacks: graph.callback_ids().map(|id| id.0).collect(),
            links: Vec::new(),
            counts: Counts { open: tasks as i64, is_sealed: true, ..Counts::default() },
            ended_at: fixture.now().await,
            changes: Vec::new(),
            claimed: Vec::new(),
            worker: fixture.worker().await,
        };
        for (parent, child, condition) in graph.link_ids() {
            model.links.push(Link { parent, child: child.0, condition, met: None });
        }
        for id in graph.member_ids().map(|id| id.0).chain(model.callbacks.clone()) {
            let is_held = model.links.iter().any(|link| link.child == id);
            model.jobs.insert(id, State::Waiting { is_held });
        }
        model
    }

    fn is_member(&self, job: Uuid) -> bool {
        !self.callbacks.contains(&job)
    }

    fn pick(&self, random: &mut Random) -> Option<Uuid> {
        (!self.jobs.is_empty())
            .then(|| *self.jobs.keys().nth(random.below(self.jobs.len())).expect("in range"))
    }

    /// Runs a random operation and returns what it was.
    async fn step(&mut self, fixture: &Fixture, random: &mut Random) -> String {
        let now = fixture.now().await;
        match random.below(16) {
            0..=3 => {
                let limit = random.below(4) as u32 + 1;
                self.claim(fixture, limit).await;
                format!("claim {limit}")
            }
            4..=7 if !self.claimed.is_empty() => {
                let claimed = self.claimed.remove(random.below(self.claimed.len()));
                let ending = match random.below(6) {
                    0..=2 => done(),
                    3 => failed_permanently(),
                    4 => Ending::Released,
                    _ => observed_cancel(),
                };
                fixture.must_finish(&claimed, ending.clone()).await;
                self.settle(claimed.lease().id.0, &ending, now);
                format!("settle {:?} of {}", ending, claimed.lease().id)
            }
            8..=10 => {
                let limit = random.below(4) as u32 + 1;
                fixture.store().advance(None, limit).await.expect("advance");
                self.advance(limit as usize, now);
                format!("follow {limit}")
            }
            11 => {
                let Some(job) = self.pick(random) else { return "nothing".into() };
                let accepted = fixture.cancel(JobId(job)).await.is_ok();
                assert_eq!(self.cancel(job, now), accepted, "cancel {job}");
                format!("cancel {job}")
            }
            12 => {
                let Some(job) = self.pick(random) else { return "nothing".into() };
                let accepted = fixture.retry(JobId(job)).await.is_ok();
                assert_eq!(self.retry(job), accepted, "retry {job}");
                format!("retry {job}")
            }
            13 if random.is_one_in(2) => {
                let Some(job) = self.pick(random) else { return "nothing".into() };
                let accepted = fixture.delete(JobId(job)).await.is_ok();
                assert_eq!(self.delete(job), accepted, "delete {job}");
                format!("delete {job}")
            }
            13 => {
                fixture.advance(2 * DAY).await;
                self.crash(fixture).await;
                self.retain(fixture).await;
                "retain".into()
            }
            14 if random.is_one_in(2) => {
                fixture.advance(2 * MINUTE).await;
                self.crash(fixture).await;
                "recover".into()
            }
            14 => {
                self.cancel_flow(fixture, now).await;
                "cancel the flow".into()
            }
            _ => {
                self.retry_flow(fixture, now).await;
                "retry the flow".into()
            }
        }
    }

    async fn claim(&mut self, fixture: &Fixture, limit: u32) {
        let request =
            ClaimRequest { queues: vec![self.queue.clone().into()], ..ClaimRequest::new(self.worker, limit) };
        for claimed in fixture.claim_with(&request).await {
            let job = claimed.lease().id.0;
            assert_eq!(self.jobs[&job], State::Waiting { is_held: false }, "{job} was claimed");
            self.jobs.insert(job, State::Running { cancel_requested: false });
            self.claimed.push(claimed);
        }
    }

    fn finish_job(&mut self, job: Uuid, outcome: Outcome, is_skipped: bool, at: DateTime<Utc>) {
        self.jobs.insert(job, State::Finished { outcome, is_skipped, at });
        if self.is_member(job) {
            let end = End::of(outcome == Outcome::Succeeded);
            let is_failure = end == End::Failed && !is_skipped;
            self.changes.push(Change { job, end: Some(end), is_failure, is_counted: false });
        }
    }

    fn settle(&mut self, job: Uuid, ending: &Ending, now: DateTime<Utc>) {
        let State::Running { cancel_requested } = self.jobs[&job] else { panic!("{job} is not running") };
        match ending {
            Ending::Succeeded { .. } => self.finish_job(job, Outcome::Succeeded, false, now),
            Ending::Cancelled { .. } => self.finish_job(job, Outcome::Cancelled, false, now),
            _ if cancel_requested => self.finish_job(job, Outcome::Cancelled, false, now),
            Ending::Failed { .. } => self.finish_job(job, Outcome::FailedPermanent, false, now),
            _ => drop(self.jobs.insert(job, State::Waiting { is_held: false })),
        }
    }

    /// Follows up to `limit` changes, as `advance` does.
    fn advance(&mut self, limit: usize, now: DateTime<Utc>) {
        let is_return = |change: &Change| change.end.is_none();
        let returns = self.changes.iter().enumerate().filter(|(_, change)| is_return(change));
        let last_return = returns.take(limit).last().map(|(nth, _)| nth);
        // Of a flow with returns, all changes up to the last one of them are read.
        let read = last_return.map_or(limit.min(self.changes.len()), |nth| nth + 1);
        let later = self.changes.split_off(read);
        let changes: Vec<(Uuid, Change)> =
            std::mem::take(&mut self.changes).into_iter().map(|change| (self.flow, change)).collect();
        let (mut counted, mut parents) = (Vec::new(), Vec::new());
        for ((_, change), pick) in changes.iter().zip(flow::pick(&changes, &BTreeSet::new())) {
            match pick {
                Pick::Leave => self.changes.push(*change),
                Pick::Count => counted.push(*change),
                Pick::Follow => {
                    counted.push(*change);
                    parents.push((change.job, change.end));
                }
            }
        }
        self.changes.extend(later);
        self.follow_parents(parents, now);
        counted.iter().for_each(|change| self.counts.add(change));
        match self.counts.turn() {
            FlowTurn::Stays => {}
            // A change that follows may be a member that runs again.
            FlowTurn::Ends(_) if !self.changes.is_empty() => {}
            FlowTurn::Ends(end) => {
                self.counts.has_ended = true;
                self.ended_at = now;
                self.follow_parents(vec![(self.flow, Some(end))], now);
            }
            FlowTurn::Reopens => {
                self.counts.has_ended = false;
                self.follow_parents(vec![(self.flow, None)], now);
            }
        }
    }

    fn follow_parents(&mut self, parents: Vec<(Uuid, Option<End>)>, now: DateTime<Utc>) {
        let (mut children, mut of_reopened) = (BTreeSet::new(), BTreeSet::new());
        for (parent, end) in parents {
            for link in self.links.iter_mut().filter(|link| link.parent == parent) {
                let met = end.map(|end| link.condition.is_met(end));
                match end {
                    Some(_) => children.insert(link.child),
                    // Only links that were closed are opened.
                    None => link.met.is_some() && of_reopened.insert(link.child),
                };
                link.met = met;
            }
        }
        for child in children {
            if self.jobs.get(&child) != Some(&State::Waiting { is_held: true }) {
                continue;
            }
            let links = self.links.iter().filter(|link| link.child == child);
            let held = Held {
                open: links.clone().filter(|link| link.met.is_none()).count() as i64,
                unmet: links.filter(|link| link.met == Some(false)).count() as i64,
            };
            match flow::follow(held, self.is_member(child) && self.counts.is_cancelled) {
                Follow::Wait => {}
                Follow::Release => drop(self.jobs.insert(child, State::Waiting { is_held: false })),
                Follow::Skip | Follow::Cancel => self.finish_job(child, Outcome::Cancelled, true, now),
            }
        }
        for child in of_reopened {
            let is_skipped = matches!(self.jobs.get(&child), Some(State::Finished { is_skipped: true, .. }));
            let is_cancelled = self.is_member(child) && self.counts.is_cancelled;
            if is_skipped && flow::comes_back(&self.links_of(child), is_cancelled) {
                self.jobs.insert(child, State::Waiting { is_held: true });
                if self.is_member(child) {
                    self.counts.open += 1;
                    self.changes.push(Change { job: child, end: None, is_failure: false, is_counted: true });
                }
            }
        }
    }

    fn links_of(&self, child: Uuid) -> Vec<ParentLink> {
        let links = self.links.iter().filter(|link| link.child == child);
        links.map(|link| ParentLink { parent: link.parent, met: link.met }).collect()
    }

    fn cancel(&mut self, job: Uuid, now: DateTime<Utc>) -> bool {
        match self.jobs[&job] {
            State::Waiting { .. } => self.finish_job(job, Outcome::Cancelled, false, now),
            State::Running { .. } => drop(self.jobs.insert(job, State::Running { cancel_requested: true })),
            State::Finished { .. } => return false,
        }
        true
    }

    fn retry(&mut self, job: Uuid) -> bool {
        match self.jobs[&job] {
            State::Waiting { is_held } => return !is_held,
            State::Running { .. } => return false,
            State::Finished { outcome, is_skipped, .. } => {
                self.jobs.insert(job, State::Waiting { is_held: false });
                if self.is_member(job) {
                    let is_failure = outcome != Outcome::Succeeded && !is_skipped;
                    self.changes.push(Change { job, end: None, is_failure, is_counted: false });
                }
            }
        }
        true
    }

    fn is_needed(&self, job: Uuid) -> bool {
        self.is_member(job) && !self.counts.has_ended
    }

    fn delete(&mut self, job: Uuid) -> bool {
        let is_finished = matches!(self.jobs[&job], State::Finished { .. });
        if !is_finished || self.is_needed(job) {
            return false;
        }
        self.remove(job);
        true
    }

    fn remove(&mut self, job: Uuid) {
        self.jobs.remove(&job);
        if self.is_member(job) {
            self.links.retain(|link| link.child != job);
        }
    }

    async fn retain(&mut self, fixture: &Fixture) {
        let policy = Retention { succeeded: Some(DAY), cancelled: Some(DAY), failed_permanent: Some(DAY) };
        fixture.retain(&policy, |_| async { true }).await.expect("retain");
        let oldest = fixture.now().await - DAY;
        let expired: Vec<Uuid> = self
            .jobs
            .iter()
            .filter(|(_, state)| matches!(state, State::Finished { at, .. } if *at < oldest))
            .map(|(job, _)| *job)
            .filter(|job| !self.is_needed(*job) && !self.is_kept_by_flow(*job, oldest))
            .collect();
        expired.into_iter().for_each(|job| self.remove(job));
    }

    /// Whether a retry of the flow may need a job that would be removed otherwise.
    fn is_kept_by_flow(&self, job: Uuid, oldest: DateTime<Utc>) -> bool {
        let is_skipped = matches!(self.jobs[&job], State::Finished { is_skipped: true, .. });
        let is_linked = self.links.iter().any(|link| link.parent == job || link.child == job);
        let is_over = self.counts.has_ended && self.ended_at < oldest;
        (self.is_member(job) || is_skipped) && is_linked && !is_over
    }

    /// The worker dies, and its jobs are recovered.
    async fn crash(&mut self, fixture: &Fixture) {
        let now = fixture.now().await;
        fixture.sweep(&SweepOptions::default()).await.expect("sweep");
        // A sweep recovers jobs in the order of their ids.
        self.claimed.sort_by_key(|claimed| claimed.lease().id);
        for claimed in std::mem::take(&mut self.claimed) {
            self.settle(claimed.lease().id.0, &Ending::Released, now);
        }
        fixture.advance(MINUTE).await;
        self.worker = fixture.worker().await;
    }

    async fn cancel_flow(&mut self, fixture: &Fixture, now: DateTime<Utc>) {
        let flow = FlowId(self.flow);
        let flagged = fixture.store().flag_cancelled(flow).await.expect("flag_cancelled");
        assert_eq!(flagged, !self.counts.has_ended && !self.counts.is_cancelled);
        if self.counts.has_ended {
            return;
        }
        self.counts.is_cancelled = true;
        fixture.store().cancel_members(flow, None, 0, 1000).await.expect("cancel_members");
        for job in self.jobs.keys().copied().collect::<Vec<_>>() {
            match self.jobs[&job] {
                State::Waiting { .. } if self.is_member(job) => {
                    self.finish_job(job, Outcome::Cancelled, true, now);
                }
                State::Running { .. } if self.is_member(job) => {
                    self.jobs.insert(job, State::Running { cancel_requested: true });
                }
                _ => {}
            }
        }
        // The end of the walk is a change without a job, which only this removes.
        self.follow_all(fixture, now).await;
    }

    async fn follow_all(&mut self, fixture: &Fixture, now: DateTime<Utc>) {
        while fixture.store().advance(None, 1000).await.expect("advance").more {}
        // One more for a flow that ends without changes.
        self.advance(1000, now);
        while !self.changes.is_empty() {
            self.advance(1000, now);
        }
    }

    async fn retry_flow(&mut self, fixture: &Fixture, now: DateTime<Utc>) {
        self.follow_all(fixture, now).await;
        let flow = FlowId(self.flow);
        loop {
            let done = fixture.store().retry_members(flow, now, None, 1000).await.expect("retry_members");
            assert!(!done.advance_first);
            let reopened = self.reopen(now);
            assert_eq!(done.reopened as usize, reopened.len());
            if reopened.is_empty() {
                return;
            }
            self.counts.is_cancelled = false;
            self.counts.has_ended = false;
            for link in self.links.iter_mut().filter(|link| link.parent == flow.0) {
                link.met = None;
            }
            for job in self.callbacks.clone() {
                if matches!(self.jobs.get(&job), Some(State::Finished { is_skipped: true, .. })) {
                    self.jobs.insert(job, State::Waiting { is_held: true });
                }
            }
            self.follow_all(fixture, now).await;
        }
    }

    /// Reopens the members that had ended without success before a retry began.
    fn reopen(&mut self, before: DateTime<Utc>) -> Vec<Reopened> {
        let failed = |state: &State| matches!(state, State::Finished { outcome, at, is_skipped } if *outcome != Outcome::Succeeded && (*at <= before || *is_skipped));
        let candidates: Vec<Candidate> = self
            .jobs
            .iter()
            .filter(|(job, state)| failed(state) && self.is_member(**job))
            .map(|(job, _)| Candidate { job: *job, links: self.links_of(*job) })
            .collect();
        let reopened = flow::reopen(&candidates);
        let is_reopened = |job: Uuid| reopened.iter().any(|reopened| reopened.job == job);
        for link in &mut self.links {
            if is_reopened(link.parent) && is_reopened(link.child) {
                link.met = None;
            }
        }
        for Reopened { job, is_held } in &reopened {
            if let State::Finished { is_skipped, .. } = self.jobs[job]
                && self.is_member(*job)
            {
                self.counts.open += 1;
                self.counts.failed -= i64::from(!is_skipped);
                let is_failure = !is_skipped;
                self.changes.push(Change { job: *job, end: None, is_failure, is_counted: true });
            }
            self.jobs.insert(*job, State::Waiting { is_held: *is_held });
        }
        reopened
    }

    async fn compare(&self, fixture: &Fixture, step: &str) {
        let tasks = fixture.tasks(FlowId(self.flow), None, 1000).await.expect("tasks");
        let mut found = BTreeMap::new();
        for task in &tasks {
            found.insert(task.id.0, (task.status, task.held, task.skipped));
        }
        let members = self.jobs.iter().filter(|(job, _)| self.is_member(**job));
        let expected: BTreeMap<_, _> =
            members.map(|(job, state)| (*job, shown(state, &found[job]))).collect();
        assert_eq!(found, expected, "{step}");
        for job in self.callbacks.iter().filter(|job| self.jobs.contains_key(job)) {
            let status = fixture.status(JobId(*job)).await;
            let (expected, ..) = shown(&self.jobs[job], &(status, false, false));
            assert_eq!(status, expected, "{step}: callback {job}");
        }
        let flow: FlowRecord = fixture.flow(FlowId(self.flow)).await.expect("flow");
        let Counts { open, failed, is_cancelled, has_ended, .. } = self.counts;
        assert_eq!(
            (flow.open as i64, flow.failed as i64, flow.cancelled, flow.ended_at.is_some()),
            (open, failed, is_cancelled, has_ended),
            "{step}"
        );
    }

    /// Runs what is left: the flow always ends, and nothing is left waiting.
    async fn finish(&mut self, fixture: &Fixture, seed: u64) {
        for _ in 0..100 {
            let now = fixture.now().await;
            for claimed in std::mem::take(&mut self.claimed) {
                fixture.must_finish(&claimed, done()).await;
                self.settle(claimed.lease().id.0, &done(), now);
            }
            self.follow_all(fixture, now).await;
            self.claim(fixture, 100).await;
            if self.claimed.is_empty() {
                break;
            }
        }
        self.compare(fixture, &format!("seed {seed}, at the end")).await;
        assert!(self.counts.has_ended, "seed {seed}: the flow has not ended");
        let is_finished = |state: &State| matches!(state, State::Finished { .. });
        assert!(self.jobs.values().all(is_finished), "seed {seed}: {:?}", self.jobs);
    }
}

/// How a job in this state is listed. A waiting job may be `queued` or `retrying`.
fn shown(state: &State, found: &(Status, bool, bool)) -> (Status, bool, bool) {
    match state {
        State::Waiting { is_held } => {
            let status = if found.0 == Status::Retrying { Status::Retrying } else { Status::Queued };
            (status, *is_held, false)
        }
        State::Running { .. } => (Status::Running, false, false),
        State::Finished { outcome, is_skipped, .. } => (outcome.status(), false, *is_skipped),
    }
}
