//! Draws the tasks of a flow as a table: in layers, each task below those that it waits for. Of large
//! flows, tasks that differ only in a number are one row.

use std::collections::{BTreeMap, HashMap};

use longshore::{JobId, Status};
use serde::Deserialize;

use crate::output::{Fit, Table};

/// Above this number of tasks, similar ones are one row.
const MAX_ROWS: usize = 40;

/// A job of a flow, in the API's format.
#[derive(Deserialize)]
pub(super) struct Task {
    id: JobId,
    task: Option<String>,
    kind: String,
    status: Status,
    held: bool,
    skipped: bool,
    after: Vec<Link>,
}

#[derive(Deserialize)]
struct Link {
    id: JobId,
    task: Option<String>,
    condition: String,
}

/// What is shown of a task's status, from what needs attention most to what is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Shown {
    Failed,
    Cancelled,
    Running,
    Retrying,
    Queued,
    Waiting,
    Succeeded,
    Skipped,
}

impl Shown {
    fn symbol(self) -> char {
        match self {
            Shown::Failed => '✗',
            Shown::Cancelled => '⊘',
            Shown::Running => '▶',
            Shown::Retrying => '↻',
            Shown::Queued => '○',
            Shown::Waiting => '◌',
            Shown::Succeeded => '✓',
            Shown::Skipped => '-',
        }
    }

    fn word(self) -> &'static str {
        match self {
            Shown::Failed => Status::FailedPermanent.as_str(),
            Shown::Cancelled => Status::Cancelled.as_str(),
            Shown::Running => Status::Running.as_str(),
            Shown::Retrying => Status::Retrying.as_str(),
            Shown::Queued => Status::Queued.as_str(),
            Shown::Waiting => "waiting",
            Shown::Succeeded => Status::Succeeded.as_str(),
            Shown::Skipped => "skipped",
        }
    }
}

impl Task {
    fn name(&self) -> &str {
        self.task.as_deref().unwrap_or(&self.kind)
    }

    fn shown(&self) -> Shown {
        match self.status {
            _ if self.held => Shown::Waiting,
            _ if self.skipped => Shown::Skipped,
            Status::FailedPermanent => Shown::Failed,
            Status::Cancelled => Shown::Cancelled,
            Status::Running => Shown::Running,
            Status::Retrying => Shown::Retrying,
            Status::Queued => Shown::Queued,
            Status::Succeeded => Shown::Succeeded,
        }
    }
}

/// The tasks as a table.
pub(super) fn draw(tasks: &[Task]) -> Table {
    let depths = depths(tasks);
    if tasks.len() <= MAX_ROWS { draw_each(tasks, &depths) } else { draw_folded(tasks, &depths) }
}

/// The depth of each task: the length of the longest way to it from a task that waits for nothing.
fn depths(tasks: &[Task]) -> Vec<usize> {
    let places: HashMap<JobId, usize> = tasks.iter().enumerate().map(|(nth, task)| (task.id, nth)).collect();
    let mut children = vec![Vec::new(); tasks.len()];
    let mut open = vec![0; tasks.len()];
    for (child, task) in tasks.iter().enumerate() {
        for parent in task.after.iter().filter_map(|link| places.get(&link.id)) {
            children[*parent].push(child);
            open[child] += 1;
        }
    }
    let mut depths = vec![0; tasks.len()];
    let mut free: Vec<usize> = (0..tasks.len()).filter(|nth| open[*nth] == 0).collect();
    while let Some(nth) = free.pop() {
        for child in &children[nth] {
            depths[*child] = depths[*child].max(depths[nth] + 1);
            open[*child] -= 1;
            if open[*child] == 0 {
                free.push(*child);
            }
        }
    }
    depths
}

fn draw_each(tasks: &[Task], depths: &[usize]) -> Table {
    let mut table = Table::new([
        ("task", Fit::Cut),
        ("status", Fit::Whole),
        ("id", Fit::WholeOrOmitted),
        ("after", Fit::CutOrOmitted),
    ]);
    let mut rows: Vec<(usize, [String; 4])> = Vec::with_capacity(tasks.len());
    for (task, depth) in tasks.iter().zip(depths) {
        let after: Vec<String> = task.after.iter().map(Link::describe).collect();
        let name = format!("{} {}", task.shown().symbol(), task.name());
        rows.push((*depth, [name, task.shown().word().to_owned(), task.id.to_string(), after.join(", ")]));
    }
    // Stable, so that tasks of one layer stay in the order in which they were created.
    rows.sort_by_key(|(depth, _)| *depth);
    add_layers(&mut table, rows);
    table
}

impl Link {
    fn describe(&self) -> String {
        let name = self.task.clone().unwrap_or_else(|| self.id.to_string());
        match self.condition.as_str() {
            "succeeded" => name,
            condition => format!("{name} ({condition})"),
        }
    }
}

/// Tasks that are one row.
#[derive(Default)]
struct Group {
    /// The smallest depth of its tasks.
    depth: usize,
    tasks: usize,
    shown: BTreeMap<Shown, usize>,
    after: Vec<String>,
}

fn draw_folded(tasks: &[Task], depths: &[usize]) -> Table {
    let mut groups: Vec<(&str, Group)> = Vec::new();
    let mut places = HashMap::new();
    for (task, depth) in tasks.iter().zip(depths) {
        let name = common_part(task.name());
        let place = *places.entry(name).or_insert_with(|| {
            groups.push((name, Group { depth: *depth, ..Group::default() }));
            groups.len() - 1
        });
        let group = &mut groups[place].1;
        group.depth = group.depth.min(*depth);
        group.tasks += 1;
        *group.shown.entry(task.shown()).or_default() += 1;
        for link in &task.after {
            let parent = common_part(link.task.as_deref().unwrap_or_default());
            if !parent.is_empty() && parent != name && !group.after.iter().any(|known| known == parent) {
                group.after.push(parent.to_owned());
            }
        }
    }
    groups.sort_by_key(|(_, group)| group.depth);
    let omitted = groups.len().saturating_sub(MAX_ROWS);
    let mut rows: Vec<(usize, [String; 3])> = Vec::new();
    for (name, group) in groups.into_iter().take(MAX_ROWS) {
        let counts: Vec<String> =
            group.shown.iter().map(|(shown, count)| format!("{count} {}", shown.word())).collect();
        let symbol = group.shown.keys().next().map_or(' ', |shown| shown.symbol());
        let name = match group.tasks {
            1 => format!("{symbol} {name}"),
            tasks => format!("{symbol} {tasks} × {name}"),
        };
        rows.push((group.depth, [name, counts.join(", "), group.after.join(", ")]));
    }
    if omitted > 0 {
        rows.push((
            usize::MAX,
            [format!("{omitted} more groups; --json lists all tasks"), String::new(), String::new()],
        ));
    }
    let mut table = Table::new([("tasks", Fit::Cut), ("status", Fit::Cut), ("after", Fit::CutOrOmitted)]);
    add_layers(&mut table, rows);
    table
}

/// A name without the number at its end: `ship` of `ship-17`.
fn common_part(name: &str) -> &str {
    match name.trim_end_matches(|c: char| c.is_ascii_digit()) {
        same if same.len() == name.len() => name,
        part => match part.trim_end_matches(['-', '_', ' ', ':', '.', '#']) {
            "" => name,
            part => part,
        },
    }
}

/// Adds rows that are sorted by depth, joined by a line, with an empty row between two layers.
fn add_layers<const N: usize>(table: &mut Table, rows: Vec<(usize, [String; N])>) {
    let last = rows.len().saturating_sub(1);
    let mut above = None;
    for (nth, (depth, mut cells)) in rows.into_iter().enumerate() {
        if above.is_some_and(|above| above != depth) {
            let mut between = [const { String::new() }; N];
            between[0] = "│".into();
            table.row(between);
        }
        above = Some(depth);
        let line = match (nth, last) {
            (0, 0) => '─',
            (0, _) => '┌',
            (nth, last) if nth == last => '└',
            _ => '├',
        };
        cells[0] = format!("{line} {}", cells[0]);
        table.row(cells);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_only_in_a_number_have_a_common_part() {
        for (name, part) in [
            ("ship-17", "ship"),
            ("ship", "ship"),
            ("page 3", "page"),
            ("p12", "p"),
            ("17", "17"),
            ("v2-final", "v2-final"),
            ("-7", "-7"),
            ("", ""),
        ] {
            assert_eq!(common_part(name), part, "{name}");
        }
    }

    #[test]
    fn a_task_is_below_every_task_that_it_waits_for() {
        let id = |n: u128| JobId(uuid::Uuid::from_u128(n));
        let task = |n: u128, after: &[u128]| Task {
            id: id(n),
            task: None,
            kind: "greet".into(),
            status: Status::Queued,
            held: false,
            skipped: false,
            after: after
                .iter()
                .map(|n| Link { id: id(*n), task: None, condition: "succeeded".into() })
                .collect(),
        };
        // 9 is not among the tasks, because it was removed.
        let tasks = [task(1, &[2, 3]), task(2, &[4]), task(3, &[2]), task(4, &[9]), task(5, &[])];
        assert_eq!(depths(&tasks), [3, 1, 2, 0, 0]);
    }
}
