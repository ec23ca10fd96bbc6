//! The list of mutants: reads `xtask/mutants/*.mutants` and finds the place of a mutant in
//! the code.
//!
//! A mutant is a few lines:
//!
//! ```text
//! == rules: charge an attempt for a release
//! in src/rules/lifecycle.rs after fn uncharged(job
//! - attempts: job.attempt - 1,
//! + attempts: job.attempt,
//! caught by settle::*::a_release_is_not_charged_and_is_due_at_once
//! ```
//!
//! The text of the `-` lines, at its first occurrence after the text that follows `after`,
//! becomes the text of the `+` lines. It may start and end inside a line. Without `+` lines
//! it is deleted. `*` stands for both engines. Lines that start with `#` are comments.

use std::{fs, ops::Range, path::Path};

use crate::run::Result;

/// The text of the `-` lines must start within this many lines after the anchor. Otherwise
/// a text that has gone from its statement could match in a later, unrelated one.
const MAX_LINES_AFTER_ANCHOR: usize = 60;

/// One bug: `find`, at its first occurrence after `anchor`, becomes `replace`.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Mutant {
    /// What the bug does, in the imperative.
    pub(super) name: String,
    /// The file and the line of the list.
    pub(super) listed_at: String,
    /// Relative to the library's folder.
    pub(super) file: String,
    /// Occurs exactly once in the file.
    pub(super) anchor: String,
    pub(super) find: String,
    pub(super) replace: String,
    /// The test cases that must fail, as `module::engine::case`.
    pub(super) caught_by: Vec<String>,
}

/// Reads all files of the folder, in the order of their names.
pub(super) fn read(folder: &Path) -> Result<Vec<Mutant>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "mutants") {
            files.push(path);
        }
    }
    files.sort();
    let mut mutants: Vec<Mutant> = Vec::new();
    for path in files {
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for mutant in parse(&file, &fs::read_to_string(&path)?)? {
            if let Some(other) = mutants.iter().find(|other| other.name == mutant.name) {
                let (at, other) = (&mutant.listed_at, &other.listed_at);
                return Err(format!("{at}: the mutant at {other} has the same name").into());
            }
            mutants.push(mutant);
        }
    }
    Ok(mutants)
}

/// Reads one file of the list. The error names the line.
fn parse(file: &str, text: &str) -> Result<Vec<Mutant>, String> {
    let mut mutants: Vec<Mutant> = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let at = format!("{file}:{}", n + 1);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix("== ") {
            if let Some(last) = mutants.last() {
                last.check_complete()?;
            }
            mutants.push(Mutant { name: name.into(), listed_at: at, ..Mutant::default() });
            continue;
        }
        let mutant =
            mutants.last_mut().ok_or_else(|| format!("{at}: a mutant starts with `== ` and its name"))?;
        mutant.add_line(line).map_err(|problem| format!("{at}: {problem}"))?;
    }
    if let Some(last) = mutants.last() {
        last.check_complete()?;
    }
    Ok(mutants)
}

impl Mutant {
    fn add_line(&mut self, line: &str) -> Result<(), String> {
        let (key, rest) = match line {
            "-" | "+" => (line, ""),
            _ => line.split_once(' ').unwrap_or((line, "")),
        };
        if rest != rest.trim_end() {
            return Err("the line ends with a space, which is easily lost; include the next word".into());
        }
        match key {
            "in" if self.file.is_empty() => {
                let (file, anchor) =
                    rest.split_once(" after ").ok_or("write `in <file> after <a text that occurs once>`")?;
                (self.file, self.anchor) = (file.into(), anchor.into());
            }
            "in" => return Err("a second `in`; a mutant has one place".into()),
            "-" if self.replace.is_empty() && self.caught_by.is_empty() => append(&mut self.find, rest),
            "-" => return Err("`-` lines come before `+` lines and `caught by`".into()),
            "+" if self.caught_by.is_empty() => append(&mut self.replace, rest),
            "+" => return Err("`+` lines come before `caught by`".into()),
            "caught" => {
                let case = rest.strip_prefix("by ").ok_or("write `caught by <module>::<engine>::<case>`")?;
                match case.split_once("::*::") {
                    Some((module, name)) => {
                        let on = |engine| format!("{module}::{engine}::{name}");
                        self.caught_by.extend([on("postgres"), on("sqlite")]);
                    }
                    None => self.caught_by.push(case.into()),
                }
            }
            _ => return Err(format!("`{key}` is unknown; use `== `, `in`, `-`, `+`, `caught by` or `#`")),
        }
        Ok(())
    }

    fn check_complete(&self) -> Result<(), String> {
        let missing = match self {
            Mutant { file, .. } if file.is_empty() => "in",
            Mutant { find, .. } if find.is_empty() => "-",
            Mutant { caught_by, .. } if caught_by.is_empty() => "caught by",
            _ => return Ok(()),
        };
        Err(format!("{}: the mutant has no line that starts with `{missing} `", self.listed_at))
    }

    /// Where the bug is in `text`, or what is stale about the mutant.
    pub(super) fn place_in(&self, text: &str) -> Result<Range<usize>, String> {
        let Mutant { anchor, find, replace, .. } = self;
        if find == replace {
            return Err("it changes nothing".into());
        }
        let anchored = match text.matches(anchor).count() {
            0 => return Err(format!("the text `{anchor}` is gone")),
            1 => text.find(anchor).unwrap_or_default(),
            n => return Err(format!("the text `{anchor}` occurs {n} times; it must be unique")),
        };
        let at = text[anchored..].find(find).map(|distance| anchored + distance);
        let near = at.filter(|at| text[anchored..*at].matches('\n').count() <= MAX_LINES_AFTER_ANCHOR);
        near.map(|at| at..at + find.len()).ok_or_else(|| {
            format!("`{find}` does not occur within {MAX_LINES_AFTER_ANCHOR} lines after `{anchor}`")
        })
    }
}

fn append(text: &mut String, line: &str) {
    if !text.is_empty() {
        text.push('\n');
    }
    text.push_str(line);
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::mutants) fn mutant(anchor: &str, find: &str, replace: &str) -> Mutant {
        let [anchor, find, replace] = [anchor, find, replace].map(str::to_owned);
        Mutant { file: "src/lib.rs".into(), anchor, find, replace, ..Mutant::default() }
    }

    #[test]
    fn a_mutant_is_read_line_by_line() {
        let text = "# A comment.\n\n== a: name\nin src/b.rs after fn c(\n- one after\n-\n-     two\n+ three\n\
                    caught by d::*::e\ncaught by f::g::sqlite_only::h\n\n== i: j\nin k.sql after l\n- m\ncaught by n::postgres::o\n";
        let expected = [
            Mutant {
                name: "a: name".into(),
                listed_at: "z.mutants:3".into(),
                file: "src/b.rs".into(),
                anchor: "fn c(".into(),
                find: "one after\n\n    two".into(),
                replace: "three".into(),
                caught_by: ["d::postgres::e", "d::sqlite::e", "f::g::sqlite_only::h"]
                    .map(String::from)
                    .into(),
            },
            Mutant {
                name: "i: j".into(),
                listed_at: "z.mutants:12".into(),
                file: "k.sql".into(),
                anchor: "l".into(),
                find: "m".into(),
                replace: String::new(),
                caught_by: vec!["n::postgres::o".into()],
            },
        ];
        assert_eq!(parse("z.mutants", text).expect("it is valid"), expected);
    }

    #[test]
    fn a_problem_is_reported_with_its_file_and_line() {
        let problem = |text: &str| parse("z.mutants", text).expect_err(text);
        let complete = "== a\nin b after c\n- d\n+ e\ncaught by f::*::g\n";
        assert!(parse("z.mutants", complete).is_ok());
        assert_eq!(problem("- a"), "z.mutants:1: a mutant starts with `== ` and its name");
        assert_eq!(problem("== a\nin b"), "z.mutants:2: write `in <file> after <a text that occurs once>`");
        assert!(problem("== a\nin b after c\nin b after c").starts_with("z.mutants:3: a second `in`"));
        assert!(problem("== a\n\ncaught f").starts_with("z.mutants:3: write `caught by"));
        assert!(problem("== a\n* b").starts_with("z.mutants:2: `*` is unknown"));
        assert!(problem("== a\n- b ").starts_with("z.mutants:2: the line ends with a space"));
        assert!(problem(&format!("{complete}- h")).starts_with("z.mutants:6: `-` lines come before"));
        assert!(problem(&format!("{complete}+ h")).starts_with("z.mutants:6: `+` lines come before"));
        for (missing, key) in [("in b after c\n", "in"), ("- d\n", "-"), ("caught by f::*::g\n", "caught by")]
        {
            let message = format!("z.mutants:1: the mutant has no line that starts with `{key} `");
            assert_eq!(problem(&complete.replace(missing, "")), message);
            assert_eq!(problem(&format!("{}== next", complete.replace(missing, ""))), message);
        }
    }

    #[test]
    fn only_the_first_match_after_the_anchor_is_the_place() {
        assert_eq!(mutant("b", "x", "y").place_in("x b x x"), Ok(4..5));
    }

    #[test]
    fn a_missing_anchor_a_repeated_anchor_and_a_missing_text_are_stale() {
        let problem = |text| mutant("b", "x", "y").place_in(text).expect_err("it is stale");
        assert!(problem("x x").contains("is gone"));
        assert!(problem("b x b x").contains("2 times"));
        assert!(problem("x b").contains("`x` does not occur"));
        assert!(mutant("b", "x", "x").place_in("b x").is_err_and(|why| why.contains("changes nothing")));
    }

    #[test]
    fn a_text_far_from_its_anchor_is_stale() {
        let near = format!("b{}x", "\n".repeat(MAX_LINES_AFTER_ANCHOR));
        assert!(mutant("b", "x", "y").place_in(&near).is_ok());
        let far = format!("b{}x", "\n".repeat(MAX_LINES_AFTER_ANCHOR + 1));
        assert!(mutant("b", "x", "y").place_in(&far).is_err());
    }
}
