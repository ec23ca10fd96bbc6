//! A flow to enqueue: its tasks, what they wait for, and the checks before anything is stored.

use std::collections::HashMap;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::job::FlowId;
use crate::rules::enqueue::{NewJob, ValidJob, check_key, check_name};
use crate::rules::flow::{Condition, MAX_LINKS, MAX_TASKS};
use crate::rules::retry::MAX_DELAY;
use crate::store::{NewFlow, NewLink, NewMember};

/// A task of a flow: a job with a name, and the tasks that it waits for.
#[derive(Clone, Debug)]
pub struct Task {
    /// `None`: the kind of the job, with a number if several tasks have it.
    name: Option<String>,
    job: NewJob,
    after: Vec<(Parent, Condition)>,
}

#[derive(Clone, Debug)]
enum Parent {
    Name(String),
    /// The place of the task in the flow.
    Nth(usize),
}

/// A task with a name of its own.
///
/// ```
/// use longshore::{Flow, NewJob, task};
///
/// let flow = Flow::new("import")
///     .task(task("fetch", NewJob::new("fetch", "https://example.com/data.csv")))
///     .task(task("parse", NewJob::new("parse", &())).after("fetch"))
///     .task(task("alert", NewJob::new("alert", &())).after_failure("parse"));
/// # flow.validate()?;
/// # Ok::<(), longshore::Error>(())
/// ```
pub fn task(name: impl Into<String>, job: impl Into<NewJob>) -> Task {
    Task { name: Some(name.into()), job: job.into(), after: Vec::new() }
}

impl Task {
    /// Starts after another task has succeeded. If that one does not succeed, this one is skipped.
    pub fn after(self, task: impl Into<String>) -> Self {
        self.after_condition(task, Condition::Succeeded)
    }

    /// Starts after each of these tasks has succeeded.
    pub fn after_all<S: Into<String>>(self, tasks: impl IntoIterator<Item = S>) -> Self {
        tasks.into_iter().fold(self, Task::after)
    }

    /// Starts after another task has ended, whatever its outcome.
    pub fn after_end(self, task: impl Into<String>) -> Self {
        self.after_condition(task, Condition::Ended)
    }

    /// Starts after another task has failed, was cancelled or skipped. If that one succeeds, this
    /// one is skipped.
    pub fn after_failure(self, task: impl Into<String>) -> Self {
        self.after_condition(task, Condition::Failed)
    }

    /// Starts after another task has ended in a way that meets the condition.
    pub fn after_condition(mut self, task: impl Into<String>, condition: Condition) -> Self {
        self.after.push((Parent::Name(task.into()), condition));
        self
    }
}

impl From<NewJob> for Task {
    /// A task with the kind of the job as its name.
    fn from(job: NewJob) -> Self {
        Task { name: None, job, after: Vec::new() }
    }
}

/// A graph of tasks to enqueue. Tasks that wait for no other one start at once and in parallel.
///
/// ```
/// # use longshore::{Client, Flow, NewJob, fan_out, task};
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let client = Client::connect("sqlite::memory:").await?;
/// # client.migrate().await?;
/// let parcels = (1..=3).map(|n| NewJob::new("ship", &n));
/// let flow = fan_out(parcels).then(NewJob::new("notify", "shipped")).name("order 7");
/// let stored = client.enqueue_flow(flow).await?;
/// assert_eq!(stored.members, 4);
/// # Ok::<(), longshore::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Flow {
    id: FlowId,
    name: String,
    key: Option<String>,
    deadline: Option<Duration>,
    tasks: Vec<Task>,
    /// The tasks that `then` waits for: those that the last call added.
    last: Vec<usize>,
    callbacks: Vec<(Condition, NewJob)>,
    is_sealed: bool,
}

/// Tasks that run in parallel, in a flow. [`Flow::then`] adds what comes after them.
pub fn fan_out<T: Into<Task>>(tasks: impl IntoIterator<Item = T>) -> Flow {
    Flow::new("fan-out").then_all(tasks)
}

/// Tasks that run one after the other, in a flow: `chain![a, b, c]`.
///
/// ```
/// use longshore::{NewJob, chain, task};
///
/// let flow = chain![NewJob::new("fetch", &7), NewJob::new("parse", &7), task("mail", NewJob::new("send", &7))];
/// # flow.validate()?;
/// # Ok::<(), longshore::Error>(())
/// ```
#[macro_export]
macro_rules! chain {
    ($($task:expr),+ $(,)?) => {
        $crate::Flow::new("chain")$(.then($task))+
    };
}

impl Flow {
    /// A flow without tasks. The name is for people: it need not be unique.
    pub fn new(name: impl Into<String>) -> Self {
        Flow {
            id: FlowId::new(),
            name: name.into(),
            key: None,
            deadline: None,
            tasks: Vec::new(),
            last: Vec::new(),
            callbacks: Vec::new(),
            is_sealed: true,
        }
    }

    /// Sets the id. By default a new one is generated.
    pub fn id(mut self, id: FlowId) -> Self {
        self.id = id;
        self
    }

    /// Sets the name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets an idempotency key: a second enqueue with the same key returns the first flow, unchanged,
    /// for as long as that flow is kept.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Cancels the flow if it has not ended after this time.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Adds a task.
    pub fn task(mut self, task: impl Into<Task>) -> Self {
        self.last = vec![self.tasks.len()];
        self.tasks.push(task.into());
        self
    }

    /// Adds a task that starts after all tasks of the last call have succeeded.
    pub fn then(self, task: impl Into<Task>) -> Self {
        self.then_all([task])
    }

    /// Adds tasks that run in parallel, after all tasks of the last call have succeeded.
    pub fn then_all<T: Into<Task>>(mut self, tasks: impl IntoIterator<Item = T>) -> Self {
        let first = self.tasks.len();
        for task in tasks {
            let mut task = task.into();
            let parents = self.last.iter().map(|nth| (Parent::Nth(*nth), Condition::Succeeded));
            task.after.extend(parents);
            self.tasks.push(task);
        }
        self.last = (first..self.tasks.len()).collect();
        self
    }

    /// Enqueues this job when the flow has ended, whatever its outcome.
    pub fn on_end(self, job: impl Into<NewJob>) -> Self {
        self.on(Condition::Ended, job)
    }

    /// Enqueues this job when all tasks have succeeded. Tasks that were skipped because their
    /// condition was not needed do not count.
    pub fn on_success(self, job: impl Into<NewJob>) -> Self {
        self.on(Condition::Succeeded, job)
    }

    /// Enqueues this job when the flow has ended, and a task has failed or was cancelled.
    pub fn on_failure(self, job: impl Into<NewJob>) -> Self {
        self.on(Condition::Failed, job)
    }

    /// Enqueues this job when the flow has ended in a way that meets the condition.
    pub fn on(mut self, condition: Condition, job: impl Into<NewJob>) -> Self {
        self.callbacks.push((condition, job.into()));
        self
    }

    /// Leaves the flow open: [`Client::add_to_flow`](crate::Client::add_to_flow) adds members, up to a
    /// million, and [`Client::seal_flow`](crate::Client::seal_flow) lets it end.
    pub fn open(mut self) -> Self {
        self.is_sealed = false;
        self
    }

    /// Checks every task and the graph. The error names the task, the field and the remedy.
    pub fn validate(self) -> Result<NewFlow> {
        check_name("name", &self.name)?;
        if let Some(key) = &self.key {
            check_key("idempotency_key", key)?;
        }
        if let Some(deadline) = self.deadline
            && !(Duration::from_millis(1)..=MAX_DELAY).contains(&deadline)
        {
            return Err(Error::invalid(
                "deadline",
                format!("deadline: {deadline:?} is out of range; use 1 ms to ten years, or none"),
            ));
        }
        if self.tasks.is_empty() && self.is_sealed {
            return Err(Error::invalid(
                "tasks",
                "tasks: the flow has none; add at least one, or leave the flow open and add jobs later",
            ));
        }
        if self.tasks.len() > MAX_TASKS {
            return Err(Error::invalid(
                "tasks",
                format!(
                    "tasks: {} are too many for one commit; use at most {MAX_TASKS}, or leave the flow open and add \
                     jobs in parts",
                    self.tasks.len()
                ),
            ));
        }
        if self.callbacks.len() > MAX_CALLBACKS {
            return Err(Error::invalid(
                "callbacks",
                format!("callbacks: use at most {MAX_CALLBACKS}; a callback can enqueue further jobs"),
            ));
        }
        let names = names(&self.tasks)?;
        let parents = parents(&self.tasks, &names)?;
        check_acyclic(&names, &parents)?;
        let mut members = Vec::with_capacity(names.len());
        for ((task, name), parents) in self.tasks.into_iter().zip(&names).zip(&parents) {
            let job = member_job(name, task.job)?;
            members.push(NewMember { job, task: Some(name.clone()), is_held: !parents.is_empty() });
        }
        let mut links = Vec::with_capacity(parents.iter().map(Vec::len).sum());
        for (child, parents) in members.iter().zip(&parents) {
            for (parent, condition) in parents {
                let parent = members[*parent].job.id.0;
                links.push(NewLink { parent, child: child.job.id, condition: *condition });
            }
        }
        let mut callbacks = Vec::with_capacity(self.callbacks.len());
        for (condition, job) in self.callbacks {
            let job = member_job(callback_name(condition), job)?;
            links.push(NewLink { parent: self.id.0, child: job.id, condition });
            callbacks.push(job);
        }
        check_ids(self.id, members.iter().map(|member| &member.job).chain(&callbacks))?;
        Ok(NewFlow {
            id: self.id,
            name: self.name,
            key: self.key,
            deadline: self.deadline,
            is_sealed: self.is_sealed,
            members,
            callbacks,
            links,
        })
    }
}

/// The maximum number of callbacks of a flow.
const MAX_CALLBACKS: usize = 100;

fn callback_name(condition: Condition) -> &'static str {
    match condition {
        Condition::Succeeded => "on_success",
        Condition::Ended => "on_end",
        Condition::Failed => "on_failure",
    }
}

/// Checks the job of a task.
pub(crate) fn member_job(name: &str, job: NewJob) -> Result<ValidJob> {
    let job = job.validate().map_err(|error| error.in_task(name))?;
    let key = match (&job.unique, &job.idempotency_key) {
        (Some(_), _) => "unique_key",
        (None, Some(_)) => "idempotency_key",
        (None, None) => return Ok(job),
    };
    Err(Error::invalid(
        key,
        format!("task `{name}`: {key}: tasks of a flow cannot have keys; give the flow an idempotency key"),
    ))
}

fn check_ids<'a>(flow: FlowId, jobs: impl Iterator<Item = &'a ValidJob>) -> Result<()> {
    let mut ids: Vec<_> = jobs.map(|job| job.id.0).collect();
    ids.push(flow.0);
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::invalid("id", format!("id: {} is used twice; use new ids", pair[0]))),
        None => Ok(()),
    }
}

/// The name of each task.
fn names(tasks: &[Task]) -> Result<Vec<String>> {
    let mut places = HashMap::with_capacity(tasks.len());
    for (nth, task) in tasks.iter().enumerate() {
        if let Some(name) = &task.name {
            check_name("task", name)?;
            if places.insert(name.clone(), nth).is_some() {
                return Err(Error::invalid(
                    "task",
                    format!("task `{name}`: the name is used twice; give each task its own name"),
                ));
            }
        }
    }
    let mut numbers = HashMap::<&str, usize>::new();
    let mut names = Vec::with_capacity(tasks.len());
    for (nth, task) in tasks.iter().enumerate() {
        let name = match &task.name {
            Some(name) => name.clone(),
            None => {
                let kind = task.job.kind();
                let number = numbers.entry(kind).or_default();
                loop {
                    *number += 1;
                    let name = if *number == 1 { kind.to_owned() } else { format!("{kind}-{number}") };
                    if places.insert(name.clone(), nth).is_none() {
                        break name;
                    }
                }
            }
        };
        names.push(name);
    }
    Ok(names)
}

/// The places of the parents of each task, each once.
fn parents(tasks: &[Task], names: &[String]) -> Result<Vec<Vec<(usize, Condition)>>> {
    let places: HashMap<&str, usize> = names.iter().enumerate().map(|(nth, name)| (&**name, nth)).collect();
    let count: usize = tasks.iter().map(|task| task.after.len()).sum();
    if count > MAX_LINKS {
        return Err(Error::invalid(
            "after",
            format!(
                "after: the flow has {count} links; a flow can have at most {MAX_LINKS}. Add a task between the two \
                 sides, so that each side has one link per task"
            ),
        ));
    }
    let mut all = Vec::with_capacity(tasks.len());
    for (task, name) in tasks.iter().zip(names) {
        let mut own = HashMap::<usize, Condition>::new();
        let mut parents = Vec::with_capacity(task.after.len());
        for (parent, condition) in &task.after {
            let place = match parent {
                Parent::Nth(nth) => *nth,
                Parent::Name(parent) => *places.get(&**parent).ok_or_else(|| {
                    Error::invalid(
                        "after",
                        format!(
                            "task `{name}`: after: there is no task `{parent}` in this flow; add it, or correct the name"
                        ),
                    )
                })?,
            };
            match own.insert(place, *condition) {
                None => parents.push((place, *condition)),
                Some(before) if before == *condition => {}
                Some(_) => {
                    return Err(Error::invalid(
                        "after",
                        format!(
                            "task `{name}`: after: waits for task `{}` in two ways; use one condition",
                            names[place]
                        ),
                    ));
                }
            }
        }
        all.push(parents);
    }
    Ok(all)
}

/// Finds tasks that wait for each other.
fn check_acyclic(names: &[String], parents: &[Vec<(usize, Condition)>]) -> Result<()> {
    let mut waits_for: Vec<usize> = parents.iter().map(Vec::len).collect();
    let mut children = vec![Vec::new(); parents.len()];
    for (child, parents) in parents.iter().enumerate() {
        parents.iter().for_each(|(parent, _)| children[*parent].push(child));
    }
    let mut free: Vec<usize> = (0..parents.len()).filter(|nth| waits_for[*nth] == 0).collect();
    let mut started = 0;
    while let Some(nth) = free.pop() {
        started += 1;
        for child in &children[nth] {
            waits_for[*child] -= 1;
            if waits_for[*child] == 0 {
                free.push(*child);
            }
        }
    }
    if started == parents.len() {
        return Ok(());
    }
    Err(Error::invalid(
        "after",
        format!(
            "after: these tasks wait for each other: {}; remove one of the links",
            cycle(names, parents, &waits_for)
        ),
    ))
}

/// A cycle among the tasks that could not start.
fn cycle(names: &[String], parents: &[Vec<(usize, Condition)>], waits_for: &[usize]) -> String {
    const SHOWN: usize = 10;
    let mut at = waits_for.iter().position(|open| *open > 0).unwrap_or(0);
    let mut path = Vec::new();
    let mut seen = HashMap::new();
    // Every task that could not start has a parent that could not.
    while !seen.contains_key(&at) {
        seen.insert(at, path.len());
        path.push(at);
        at =
            parents[at].iter().map(|(parent, _)| *parent).find(|parent| waits_for[*parent] > 0).unwrap_or(at);
    }
    let cycle = &path[seen[&at]..];
    let mut words: Vec<String> = cycle.iter().take(SHOWN).map(|nth| format!("`{}`", names[*nth])).collect();
    if cycle.len() > SHOWN {
        words.push("…".into());
    }
    words.push(format!("`{}`", names[at]));
    words.join(" → ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(kind: &str) -> NewJob {
        NewJob::new(kind, &())
    }

    fn refused(flow: Flow) -> (String, String) {
        let error = flow.validate().expect_err("refused");
        (error.field().unwrap_or_default().to_owned(), error.to_string())
    }

    #[test]
    fn a_cycle_is_refused_and_named() {
        let flow = Flow::new("f")
            .task(task("start", job("k")))
            .task(task("a", job("k")).after("c").after("start"))
            .task(task("b", job("k")).after("a"))
            .task(task("c", job("k")).after("b"))
            .task(task("late", job("k")).after("c"));
        let (field, message) = refused(flow);
        assert_eq!(field, "after");
        assert!(message.contains("`a` → `c` → `b` → `a`"), "{message}");
        let (_, message) = refused(Flow::new("f").task(task("a", job("k")).after("a")));
        assert!(message.contains("`a` → `a`"), "{message}");
    }

    #[test]
    fn unknown_parents_and_duplicate_names_are_refused() {
        let (field, message) = refused(Flow::new("f").task(task("a", job("k")).after("b")));
        assert_eq!(field, "after");
        assert!(message.contains("task `a`") && message.contains("no task `b`"), "{message}");
        let twice = Flow::new("f").task(task("a", job("k"))).task(task("a", job("k")));
        let (field, message) = refused(twice);
        assert_eq!(field, "task");
        assert!(message.contains("`a`") && message.contains("used twice"), "{message}");
        let two_ways =
            Flow::new("f").task(task("a", job("k"))).task(task("b", job("k")).after("a").after_end("a"));
        assert!(refused(two_ways).1.contains("in two ways"));
    }

    #[test]
    fn too_many_links_are_refused() {
        let parents = (0..317).map(|n| task(format!("p{n}"), job("k")));
        let children = (0..316).map(|n| task(format!("c{n}"), job("k")));
        let (field, message) = refused(fan_out(parents).then_all(children));
        assert_eq!(field, "after");
        assert!(message.contains("100172 links") && message.contains("100000"), "{message}");
    }

    #[test]
    fn a_bad_job_is_named_by_its_task() {
        let (field, message) = refused(Flow::new("f").task(task("a", job("k").max_attempts(0))));
        assert_eq!(field, "max_attempts");
        assert!(message.starts_with("task `a`: max_attempts"), "{message}");
        let keyed = Flow::new("f").task(task("a", job("k").idempotency_key("x")));
        assert!(refused(keyed).1.contains("tasks of a flow cannot have keys"));
        assert_eq!(refused(Flow::new("f")).0, "tasks");
        assert_eq!(refused(Flow::new("f").task(job("k")).deadline(Duration::ZERO)).0, "deadline");
        let same = job("k");
        assert_eq!(refused(Flow::new("f").task(task("a", same.clone())).task(task("b", same))).0, "id");
    }

    #[test]
    fn tasks_without_a_name_get_that_of_their_kind() {
        let flow = chain![job("a"), job("b"), task("a", job("c")), job("a")].validate().expect("valid");
        let names: Vec<_> =
            flow.members.iter().map(|member| member.task.clone().unwrap_or_default()).collect();
        assert_eq!(names, ["a-2", "b", "a", "a-3"]);
        assert_eq!(flow.links.len(), 3);
        assert_eq!(
            flow.members.iter().map(|member| member.is_held).collect::<Vec<_>>(),
            [false, true, true, true]
        );
    }

    #[test]
    fn fan_out_joins_all_of_its_tasks() {
        let flow = fan_out([job("a"), job("a"), job("a")]).then(job("b")).on_end(job("c"));
        let flow = flow.validate().expect("valid");
        let last = flow.members[3].job.id;
        assert_eq!(flow.links.iter().filter(|link| link.child == last).count(), 3);
        assert!(flow.links.iter().any(|link| link.parent == flow.id.0 && link.child == flow.callbacks[0].id));
    }
}
