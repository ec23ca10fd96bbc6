//! What a comparison prints: the differences of two replies, and how often each kind of step had which outcome.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

use super::side::Reply;

/// How often each kind of step had which outcome.
#[derive(Default)]
pub(super) struct Coverage(BTreeMap<&'static str, Outcomes>);

#[derive(Default)]
struct Outcomes {
    counts: BTreeMap<String, u32>,
    has_succeeded: bool,
}

impl Coverage {
    pub(super) fn add(&mut self, name: &'static str, reply: &Reply) {
        let outcomes = self.0.entry(name).or_default();
        *outcomes.counts.entry(reply.outcome.clone()).or_default() += 1;
        outcomes.has_succeeded |= reply.is_success();
    }

    /// The kinds of these that have not succeeded once.
    pub(super) fn without_success(&self, names: impl Iterator<Item = &'static str>) -> Vec<&'static str> {
        let has_succeeded = |name: &&str| self.0.get(name).is_some_and(|outcomes| outcomes.has_succeeded);
        names.filter(|name| !has_succeeded(name)).collect()
    }

    pub(super) fn table(&self) -> String {
        let mut table = String::new();
        for (name, outcomes) in &self.0 {
            let counts: Vec<String> =
                outcomes.counts.iter().map(|(outcome, count)| format!("{outcome} × {count}")).collect();
            let _ = writeln!(table, "{name:<40} {}", counts.join(", "));
        }
        table
    }
}

/// A reply as lines that can be compared.
fn lines(reply: &Reply) -> Vec<String> {
    let mut lines = vec![reply.outcome.clone()];
    lines.extend(reply.headers.iter().map(|(name, value)| format!("{name}: {value}")));
    let json =
        serde_json::from_str::<Value>(&reply.body).and_then(|body| serde_json::to_string_pretty(&body));
    let body = json.unwrap_or_else(|_| reply.body.clone());
    lines.extend(body.lines().map(str::to_owned));
    lines
}

/// The differences of two replies, line by line, with some lines around them.
pub(super) fn difference(sqlite: &Reply, postgres: &Reply) -> String {
    let (before, after) = (lines(sqlite), lines(postgres));
    if before == after {
        // The same JSON, written in different ways.
        return format!("- {}\n+ {}\n", sqlite.body, postgres.body);
    }
    let marked = marked_lines(&before, &after);
    let mut text = String::new();
    let mut was_shown = true;
    for (nth, (mark, line)) in marked.iter().enumerate() {
        let around = nth.saturating_sub(CONTEXT)..(nth + CONTEXT + 1).min(marked.len());
        let is_shown = marked[around].iter().any(|(mark, _)| *mark != ' ');
        if is_shown {
            let _ = writeln!(text, "{mark} {line}");
        } else if was_shown {
            text += "  …\n";
        }
        was_shown = is_shown;
    }
    text
}

/// How many equal lines are shown before and after a difference.
const CONTEXT: usize = 6;

/// All lines: those that only the first list has are marked with `-`, those that only the second one has with `+`.
fn marked_lines<'a>(before: &'a [String], after: &'a [String]) -> Vec<(char, &'a str)> {
    // The length of the longest common part of the rests, for each pair of rests.
    let mut common = vec![vec![0_u32; after.len() + 1]; before.len() + 1];
    for (i, one) in before.iter().enumerate().rev() {
        for (j, other) in after.iter().enumerate().rev() {
            common[i][j] =
                if one == other { common[i + 1][j + 1] + 1 } else { common[i + 1][j].max(common[i][j + 1]) };
        }
    }
    let (mut i, mut j, mut marked) = (0, 0, Vec::new());
    while i < before.len() || j < after.len() {
        if i < before.len() && j < after.len() && before[i] == after[j] {
            marked.push((' ', &*before[i]));
            (i, j) = (i + 1, j + 1);
        } else if j == after.len() || (i < before.len() && common[i + 1][j] >= common[i][j + 1]) {
            marked.push(('-', &*before[i]));
            i += 1;
        } else {
            marked.push(('+', &*after[j]));
            j += 1;
        }
    }
    marked
}

#[test]
fn a_difference_is_marked_by_line() {
    let reply = |body: &str| Reply { outcome: "200".into(), headers: Vec::new(), body: body.into() };
    let shown = difference(&reply(r#"{"a":1,"b":2}"#), &reply(r#"{"a":1,"b":3}"#));
    assert_eq!(shown, "  200\n  {\n    \"a\": 1,\n-   \"b\": 2\n+   \"b\": 3\n  }\n");
    assert_eq!(difference(&reply("[1]"), &reply("[1.0]")).lines().count(), 5);
    assert_eq!(difference(&reply("[1]"), &reply("[ 1]")), "- [1]\n+ [ 1]\n");
}
