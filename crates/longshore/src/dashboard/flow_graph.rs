//! The graph of a flow as SVG: tasks in layers from left to right, each after those it waits for. A large
//! flow is folded: tasks whose names differ only in numbers are one box with a count.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use maud::{Markup, html};

use super::flows::name;
use super::{Frame, format, widgets};
use crate::job::{JobId, Status};
use crate::store::TaskRecord;

/// A flow with more tasks than this is folded.
const MAX_BOXES: usize = 200;
/// A folded flow with more lines than this is not drawn.
const MAX_LINES: usize = 2_000;
/// A flow with more tasks than this in one layer is folded.
const MAX_IN_LAYER: usize = 40;
const BOX: (usize, usize) = (172, 40);
const GAP: (usize, usize) = (56, 14);
/// The number of characters of a name that fit into a box.
const NAME: usize = 22;

/// A box of the graph: a task, or all tasks with the same name.
struct Node<'t> {
    name: String,
    tasks: Vec<&'t TaskRecord>,
    /// The boxes that it waits for.
    after: BTreeSet<usize>,
    layer: usize,
    row: usize,
    /// How far its layer is moved down.
    shift: usize,
}

/// The graph, unless no task waits for another.
pub(super) fn render(frame: &Frame, tasks: &[TaskRecord]) -> Markup {
    if tasks.iter().all(|task| task.after.is_empty()) {
        return html! {};
    }
    let single = (tasks.len() <= MAX_BOXES)
        .then(|| boxes(tasks, |task| (task.id.to_string(), name(task).to_owned())))
        .map(placed)
        .filter(|nodes| widest(nodes) <= MAX_IN_LAYER);
    let is_large = single.is_none();
    let fold = || placed(boxes(tasks, |task| (folded(name(task)), folded(name(task)))));
    let nodes = single.unwrap_or_else(fold);
    html! {
        section .panel {
            div .panel-head { h2 { "Graph" } span .faint .only-narrow { "scroll to see all →" } @if is_large { span .faint { "tasks whose names differ only in numbers are one box" } } }
            @if nodes.len() > MAX_BOXES || nodes.iter().map(|node| node.after.len()).sum::<usize>() > MAX_LINES {
                p .panel-body .faint { "This flow is too large to draw. The table below has all its tasks." }
            } @else {
                div .graph tabindex="0" role="region" aria-label="Graph; the table below has the same data" { (draw(frame, &nodes)) }
            }
        }
    }
}

/// A name without its numbers: `part 7` as `part …`.
fn folded(name: &str) -> String {
    let mut folded = String::with_capacity(name.len());
    for c in name.chars() {
        match c {
            '0'..='9' if folded.ends_with('…') => {}
            '0'..='9' => folded.push('…'),
            c => folded.push(c),
        }
    }
    folded
}

/// The boxes, one per key, in the order of their first tasks. `key` also returns the name of the box.
fn boxes<'t>(tasks: &'t [TaskRecord], key: impl Fn(&TaskRecord) -> (String, String)) -> Vec<Node<'t>> {
    let mut nodes: Vec<Node<'t>> = Vec::new();
    let mut by_key: BTreeMap<String, usize> = BTreeMap::new();
    let mut box_of: HashMap<JobId, usize> = HashMap::new();
    for task in tasks {
        let (key, name) = key(task);
        let i = *by_key.entry(key).or_insert_with(|| {
            let after = BTreeSet::new();
            nodes.push(Node { name, tasks: Vec::new(), after, layer: 0, row: 0, shift: 0 });
            nodes.len() - 1
        });
        nodes[i].tasks.push(task);
        box_of.insert(task.id, i);
    }
    for task in tasks {
        let child = box_of[&task.id];
        // A parent that is not among the tasks that were read has no box.
        let parents =
            task.after.iter().filter_map(|link| box_of.get(&link.id)).filter(|parent| **parent != child);
        nodes[child].after.extend(parents);
    }
    nodes
}

/// Chooses layers and rows. A box is one layer after the last of those that it waits for; in a layer, boxes
/// are sorted by the rows of their parents, so that few lines cross.
fn placed(mut nodes: Vec<Node<'_>>) -> Vec<Node<'_>> {
    choose_layers(&mut nodes);
    let layers = nodes.iter().map(|node| node.layer).max().unwrap_or(0);
    let mut layered: Vec<Vec<usize>> = vec![Vec::new(); layers + 1];
    for (i, node) in nodes.iter().enumerate() {
        layered[node.layer].push(i);
    }
    for members in &mut layered {
        let centre = |i: &usize| {
            let rows = nodes[*i].after.iter().map(|parent| nodes[*parent].row);
            let (sum, count) = rows.fold((0, 0), |(sum, count), row| (sum + row, count + 1));
            ((sum * 1000_usize).checked_div(count).unwrap_or(0), *i)
        };
        members.sort_by_key(centre);
        for (row, i) in members.iter().enumerate() {
            nodes[*i].row = row;
        }
    }
    let tallest = widest(&nodes);
    for members in &layered {
        for i in members {
            nodes[*i].shift = (tallest - members.len()) * (BOX.1 + GAP.1) / 2;
        }
    }
    nodes
}

/// Visits each box after all those that it waits for, and each line once. Folding can make cycles: if every box that
/// is left waits for another one that is left, the first of them is next.
fn choose_layers(nodes: &mut [Node<'_>]) {
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
    let mut missing: Vec<usize> = nodes.iter().map(|node| node.after.len()).collect();
    for (i, node) in nodes.iter().enumerate() {
        node.after.iter().for_each(|parent| children[*parent].push(i));
    }
    let mut ready: VecDeque<usize> = (0..nodes.len()).filter(|i| missing[*i] == 0).collect();
    let mut is_visited = vec![false; nodes.len()];
    let mut rest = 0..nodes.len();
    while let Some(i) = ready.pop_front().or_else(|| rest.find(|i| !is_visited[*i])) {
        if std::mem::replace(&mut is_visited[i], true) {
            continue;
        }
        for child in &children[i] {
            missing[*child] -= 1;
            if !is_visited[*child] {
                nodes[*child].layer = nodes[*child].layer.max(nodes[i].layer + 1);
                if missing[*child] == 0 {
                    ready.push_back(*child);
                }
            }
        }
    }
}

fn widest(nodes: &[Node<'_>]) -> usize {
    nodes.iter().map(|node| node.row + 1).max().unwrap_or(0)
}

/// The corner of a box. Layers with fewer boxes are centred.
fn corner(node: &Node<'_>) -> (usize, usize) {
    (node.layer * (BOX.0 + GAP.0) + 1, node.row * (BOX.1 + GAP.1) + node.shift + 1)
}

fn draw(frame: &Frame, nodes: &[Node<'_>]) -> Markup {
    let layers = nodes.iter().map(|node| node.layer + 1).max().unwrap_or(0);
    let (width, height) = (layers * (BOX.0 + GAP.0) - GAP.0 + 2, widest(nodes) * (BOX.1 + GAP.1) - GAP.1 + 2);
    html! {
        svg width=(width) height=(height) viewBox=(format!("0 0 {width} {height}")) {
            @for node in nodes { @for parent in &node.after { (edge(&nodes[*parent], node)) } }
            @for node in nodes { (draw_box(frame, node)) }
        }
    }
}

fn edge(parent: &Node<'_>, child: &Node<'_>) -> Markup {
    let ((x1, y1), (x2, y2)) = (corner(parent), corner(child));
    let (x1, y1, y2) = (x1 + BOX.0, y1 + BOX.1 / 2, y2 + BOX.1 / 2);
    let bend = GAP.0 / 2;
    let is_open = child.tasks.iter().any(|task| task.held);
    let class = if is_open { "edge is-open" } else { "edge" };
    html! { path class=(class) d=(format!("M{x1} {y1}C{} {y1} {} {y2} {x2} {y2}", x1 + bend, x2.saturating_sub(bend))) {} }
}

/// The status that a box shows: the one that needs attention first.
fn status(node: &Node<'_>) -> (&'static str, String) {
    let with = |status: Status| {
        node.tasks.iter().filter(|task| task.status == status && !task.held && !task.skipped).count()
    };
    let order = [
        Status::FailedPermanent,
        Status::Running,
        Status::Retrying,
        Status::Queued,
        Status::Cancelled,
        Status::Succeeded,
    ];
    let counts = order.map(|status| (status, with(status)));
    let held = node.tasks.iter().filter(|task| task.held).count();
    let skipped = node.tasks.iter().filter(|task| task.skipped).count();
    let first = counts.iter().find(|(_, count)| *count > 0).map(|(status, _)| widgets::status_word(*status));
    let class = first.unwrap_or(if held > 0 { "held" } else { "cancelled" });
    let words = counts.iter().map(|(status, count)| (widgets::status_word(*status), *count));
    let words = words.chain([("held", held), ("skipped", skipped)]).filter(|(_, count)| *count > 0);
    let is_single = node.tasks.len() == 1;
    let words: Vec<String> = words
        .map(
            |(word, count)| {
                if is_single { word.to_owned() } else { format!("{} {word}", format::number(count as u64)) }
            },
        )
        .collect();
    (class, words.join(", "))
}

fn draw_box(frame: &Frame, node: &Node<'_>) -> Markup {
    let (x, y) = corner(node);
    let (class, words) = status(node);
    let content = html! {
        title { (node.name) ": " (words) @if class == "held" { " (" (widgets::HELD) ")" } }
        rect x=(x) y=(y) width=(BOX.0) height=(BOX.1) rx="7" {}
        circle cx=(x + 15) cy=(y + 14) r="4" {}
        text .name x=(x + 26) y=(y + 18) { (format::shortened(&node.name, NAME)) }
        text .state x=(x + 26) y=(y + 32) { (format::shortened(&words, NAME + 4)) }
    };
    let class = format!("box is-{class}");
    html! {
        @match node.tasks.as_slice() {
            [task] => a class=(class) href=(frame.url(&format!("/ui/jobs/{}", task.id))) { (content) },
            _ => g class=(class) { (content) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::flows::tests::task;
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    fn places(nodes: &[Node<'_>]) -> Vec<(usize, usize)> {
        nodes.iter().map(|node| (node.layer, node.row)).collect()
    }

    #[test]
    fn a_task_is_one_layer_after_the_last_one_it_waits_for() {
        let tasks = [
            task(1, "a", &[]),
            task(2, "b", &[1]),
            task(3, "c", &[1]),
            task(4, "d", &[1, 3]),
            task(5, "e", &[]),
        ];
        let nodes = placed(boxes(&tasks, |task| (task.id.to_string(), name(task).to_owned())));
        assert_eq!(places(&nodes), [(0, 0), (1, 0), (1, 1), (2, 0), (0, 1)]);
    }

    #[test]
    fn large_flows_are_folded_by_names_without_numbers() {
        let mut tasks = vec![task(1, "start", &[])];
        tasks.extend((2..=300).map(|n| task(n, &format!("part {n}"), &[1])));
        let page = render(&Frame::of_operator("/ui/flows/x"), &tasks).0;
        assert_eq!(page.matches("<rect").count(), 2, "{page}");
        assert!(page.contains("299 held") && page.contains("part …"), "{page}");
    }

    #[test]
    fn folding_may_make_a_cycle_and_still_ends() {
        let mut tasks: Vec<TaskRecord> = (1..=201).map(|n| task(n, "a", &[])).collect();
        tasks[1] = task(2, "b", &[1]);
        tasks[2] = task(3, "a", &[2]);
        assert_eq!(render(&Frame::of_operator("/ui/flows/x"), &tasks).0.matches("<rect").count(), 2);
    }

    #[test]
    fn the_order_of_the_tasks_does_not_matter() {
        let tasks = [task(4, "d", &[2, 3]), task(3, "c", &[2]), task(2, "b", &[1]), task(1, "a", &[])];
        let nodes = placed(boxes(&tasks, |task| (task.id.to_string(), name(task).to_owned())));
        assert_eq!(places(&nodes), [(3, 0), (2, 0), (1, 0), (0, 0)]);
    }

    #[test]
    fn a_flow_with_too_many_lines_is_not_drawn() {
        // 300 names that differ in letters, each after all those before it.
        let letters = |n: u128| n.to_string().bytes().map(|digit| char::from(digit + 49)).collect::<String>();
        let tasks: Vec<TaskRecord> =
            (1..=300).rev().map(|n| task(n, &letters(n), &(1..n).collect::<Vec<_>>())).collect();
        let page = render(&Frame::of_operator("/ui/flows/x"), &tasks).0;
        assert!(page.contains("too large to draw") && !page.contains("<rect"), "{}", page.len());
    }

    #[test]
    fn names_are_escaped_and_flows_without_links_have_no_graph() {
        let frame = Frame::of_operator("/ui/flows/x");
        assert_escaped(&render(&frame, &[task(1, HOSTILE, &[]), task(2, HOSTILE, &[1])]));
        assert_eq!(render(&frame, &[task(1, "a", &[])]).0, "");
    }
}
