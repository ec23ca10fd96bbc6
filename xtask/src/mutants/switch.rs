//! Puts all mutants into one copy of the library, each behind a switch that `runtime.rs`
//! reads when the program runs. So one build is enough for all of them.
//!
//! A bug in a function is switched by a second body:
//!
//! ```text
//! fn f() -> T {
//!     if crate::mutant::is(17) {
//!         return {
//!             the body with the bug
//!         };
//!     }
//!     the body
//! }
//! ```
//!
//! A bug in a statement outside a function, in a static, a constant, a macro or an SQL
//! file, is switched in the text: the statement contains both variants, and a
//! [hook](HOOKS) in each engine chooses one before the database gets it. A statement of
//! both engines is chosen before it is translated for SQLite. This also works for
//! statements that are assembled from parts.
//!
//! Functions are found by their indentation, which rustfmt guarantees.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Range,
    path::Path,
};

use super::{
    list::Mutant,
    runtime::{END, NEXT, START},
};
use crate::run::Result;

/// The module `mutant` of the copy, and the file that declares it.
const RUNTIME: &str = include_str!("runtime.rs");
const ROOT: &str = "src/lib.rs";

/// A line that is added at the beginning of a function of the library.
pub(super) struct Hook {
    file: &'static str,
    function: &'static str,
    line: &'static str,
}

/// Every statement passes one of these functions.
const HOOKS: [Hook; 5] = [
    Hook {
        file: "src/store/postgres/migrate.rs",
        function: "pub(super) fn sql(&self, text: &'static str) -> SqlStr {\n",
        line: "let text = crate::mutant::sql(text);\n",
    },
    Hook {
        file: "src/store/postgres/migrate.rs",
        function: "pub(super) fn fill(&self, text: &str) -> String {\n",
        line: "let text = crate::mutant::sql(text);\n",
    },
    Hook {
        file: "src/store/check.rs",
        function: "pub(crate) fn sql(&self, statement: &str, values: &[String]) -> String {\n",
        line: "let statement = crate::mutant::sql(statement);\n",
    },
    Hook {
        file: "src/store/sqlite/tx.rs",
        function: "pub(super) fn prepare(&self, sql: &str) -> Sql<CachedStatement<'c>> {\n",
        line: "let sql = crate::mutant::sql(sql);\n",
    },
    // A translation of both variants together could take a marker for a part of a word.
    Hook {
        file: "src/store/db.rs",
        function: "pub(super) fn for_sqlite(text: &str) -> String {\n",
        line: "let text = crate::mutant::sql(text);\n",
    },
];

/// A file of the library with its mutants.
#[derive(Debug, PartialEq)]
pub(super) struct Switched {
    pub(super) text: String,
    /// Which lines belong to which mutant. Lines are counted from 1.
    lines: Vec<(Range<usize>, usize)>,
}

impl Switched {
    /// The mutants that this line belongs to.
    pub(super) fn mutants_at(&self, line: usize) -> impl Iterator<Item = usize> {
        self.lines.iter().filter(move |(lines, _)| lines.contains(&line)).map(|(_, mutant)| *mutant)
    }
}

/// The files of the library that have mutants or hooks, by their names. A mutant's number
/// is its position in the list.
pub(super) fn switch_all<'m>(
    library: &Path,
    mutants: impl IntoIterator<Item = (usize, &'m Mutant)>,
) -> Result<BTreeMap<String, Switched>> {
    let mut by_file: BTreeMap<&str, Vec<(usize, &Mutant)>> = BTreeMap::new();
    for (number, mutant) in mutants {
        by_file.entry(&mutant.file).or_default().push((number, mutant));
    }
    for file in HOOKS.iter().map(|hook| hook.file).chain([ROOT]) {
        by_file.entry(file).or_default();
    }
    let runtime = Switched { text: RUNTIME.into(), lines: Vec::new() };
    let mut files = BTreeMap::from([("src/mutant.rs".to_owned(), runtime)]);
    for (file, mutants) in by_file {
        let text = fs::read_to_string(library.join(file)).map_err(|error| format!("{file}: {error}"))?;
        let hooks: Vec<&Hook> = HOOKS.iter().filter(|hook| hook.file == file).collect();
        let mut switched = switch(&text, &mutants, &hooks).map_err(|problem| format!("{file}: {problem}"))?;
        if file == ROOT {
            switched.text.push_str("mod mutant;\n");
        }
        files.insert(file.to_owned(), switched);
    }
    Ok(files)
}

pub(super) fn switch(text: &str, mutants: &[(usize, &Mutant)], hooks: &[&Hook]) -> Result<Switched, String> {
    let mut edits = Vec::new();
    for hook in hooks {
        let at =
            text.find(hook.function).ok_or_else(|| format!("there is no `{}`", hook.function.trim_end()))?;
        let at = at + hook.function.len();
        edits.push(Edit { range: at..at, text: hook.line.into(), mutants: Vec::new() });
    }
    let mut in_statements = Vec::new();
    for (number, mutant) in mutants {
        let site = Site::find(mutant, text)?;
        match site.body {
            Some(body) => {
                let bug = format!(
                    "{}{}{}",
                    &text[body.start..site.range.start],
                    mutant.replace,
                    &text[site.range.end..body.end]
                );
                let text = format!("if crate::mutant::is({number}) {{\nreturn {{\n{bug}}};\n}}\n");
                edits.push(Edit { range: body.start..body.start, text, mutants: vec![*number] });
            }
            None => in_statements.push((site.range, *number, *mutant)),
        }
    }
    edits.extend(statement_edits(text, in_statements));
    Ok(apply(text, edits))
}

/// Where a mutant changes a file.
pub(super) struct Site {
    pub(super) range: Range<usize>,
    /// The body of the function that contains the range, or `None` for a statement outside
    /// functions.
    body: Option<Range<usize>>,
}

impl Site {
    /// Finds the place, or the reason why the mutant cannot be applied or switched.
    pub(super) fn find(mutant: &Mutant, text: &str) -> Result<Site, String> {
        let range = mutant.place_in(text)?;
        let function = enclosing_function(text, &range);
        if let Some(signature) = function.as_ref().map(|function| &text[function.signature.clone()]) {
            if signature.contains("-> impl ") {
                return Err(
                    "the function returns `impl …`, so it cannot have a second body; change its caller"
                        .into(),
                );
            }
            if signature.contains("const fn ") {
                return Err("a `const fn` cannot be switched; change its caller".into());
            }
        } else if mutant.file.ends_with(".rs") {
            if [&text[range.clone()], &mutant.replace].iter().any(|part| part.contains('"')) {
                return Err("outside functions, only a part of a string literal can be switched".into());
            }
            check_arguments(text, &range, &mutant.replace)?;
        }
        Ok(Site { range, body: function.map(|function| function.body) })
    }
}

/// Checks that the statement still has the same arguments. SQLite refuses another number of them, and gives the time
/// the number after the others, so every case would fail, whatever it checks.
fn check_arguments(text: &str, range: &Range<usize>, replace: &str) -> Result<(), String> {
    let item = enclosing_item(text, range);
    let before = arguments(&text[item.clone()]);
    let after = arguments(&[&text[item.start..range.start], replace, &text[range.end..item.end]].concat());
    match before.symmetric_difference(&after).next() {
        None => Ok(()),
        Some(other) => Err(format!(
            "only one of the two statements has the argument `{other}`; write for example `{other} is not null`"
        )),
    }
}

/// The item outside functions that contains the range. Only its first and its last line are not indented.
fn enclosing_item(text: &str, range: &Range<usize>) -> Range<usize> {
    let lines = || [0].into_iter().chain(text.match_indices('\n').map(|(end, _)| end + 1));
    let is_outer = |line: &usize| text[*line..].starts_with(|c: char| !c.is_whitespace());
    let start = lines().filter(is_outer).take_while(|line| *line <= range.start).last();
    let end = lines().filter(is_outer).find(|line| *line >= range.end);
    start.unwrap_or_default()..end.unwrap_or(text.len())
}

/// The arguments in a part of a statement, such as `$1`, or `?1` on SQLite.
fn arguments(text: &str) -> BTreeSet<String> {
    let numbers = text.match_indices(['$', '?']).map(|(at, sign)| {
        let number = text[at + 1..].chars().take_while(char::is_ascii_digit);
        sign.chars().chain(number).collect::<String>()
    });
    numbers.filter(|argument| argument.len() > 1).collect()
}

struct Function {
    signature: Range<usize>,
    /// The lines between the braces.
    body: Range<usize>,
}

/// The innermost function whose body contains the range.
fn enclosing_function(text: &str, range: &Range<usize>) -> Option<Function> {
    let mut lines = Vec::new();
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        lines.push((at, line));
        at += line.len();
    }
    let functions =
        lines.iter().enumerate().filter(|(_, (at, line))| *at < range.start && starts_function(line));
    functions
        .filter_map(|(n, _)| function_at(&lines[n..]))
        .rfind(|function| function.body.start <= range.start && range.end <= function.body.end)
}

/// Whether the line is the first one of a function, after its attributes.
fn starts_function(line: &str) -> bool {
    let mut rest = line.trim_start();
    if let Some(after) = rest.strip_prefix("pub") {
        rest = match after.strip_prefix('(').and_then(|after| after.split_once(')')) {
            Some((_, after)) => after.trim_start(),
            None => after.trim_start(),
        };
    }
    for word in ["const ", "async ", "unsafe "] {
        rest = rest.strip_prefix(word).unwrap_or(rest);
    }
    rest.starts_with("fn ")
}

/// The function that starts at the first line. `None` for one without a body.
fn function_at(lines: &[(usize, &str)]) -> Option<Function> {
    let (start, first) = *lines.first()?;
    let indent = &first[..first.len() - first.trim_start().len()];
    // Lines of the signature that are indented further are parameters or bounds.
    let is_outer = |line: &str| line.strip_prefix(indent).is_some_and(|rest| !rest.starts_with(' '));
    let mut rest = lines.iter();
    let (opens, opening) =
        rest.find(|(_, line)| is_outer(line) && line.trim_end().ends_with(['{', ';', '}']))?;
    if !opening.trim_end().ends_with('{') {
        return None;
    }
    let body = opens + opening.len();
    let (closes, _) = rest.find(|(_, line)| is_outer(line) && line.trim() == "}")?;
    Some(Function { signature: start..body, body: body..*closes })
}

/// The edits that put the variants of all mutants into their statements. Mutants whose
/// ranges overlap share one list of variants.
fn statement_edits(text: &str, mut mutants: Vec<(Range<usize>, usize, &Mutant)>) -> Vec<Edit> {
    mutants.sort_by_key(|(range, number, _)| (range.start, *number));
    let mut groups: Vec<(Range<usize>, Vec<_>)> = Vec::new();
    for mutant in mutants {
        match groups.last_mut() {
            Some((range, group)) if mutant.0.start < range.end => {
                range.end = range.end.max(mutant.0.end);
                group.push(mutant);
            }
            _ => groups.push((mutant.0.clone(), vec![mutant])),
        }
    }
    let edits = groups.into_iter().map(|(range, group)| {
        let mut variants = format!("{START}{}", &text[range.clone()]);
        for (own, number, mutant) in &group {
            let (before, after) = (&text[range.start..own.start], &text[own.end..range.end]);
            variants += &format!("{NEXT}{number}{NEXT}{before}{}{after}", mutant.replace);
        }
        variants.push(END);
        Edit { range, text: variants, mutants: group.iter().map(|(_, number, _)| *number).collect() }
    });
    edits.collect()
}

/// The range becomes the text, because of these mutants.
struct Edit {
    range: Range<usize>,
    text: String,
    mutants: Vec<usize>,
}

fn apply(text: &str, mut edits: Vec<Edit>) -> Switched {
    // Stable, so that a hook stays before the second bodies of its function.
    edits.sort_by_key(|edit| edit.range.start);
    let mut switched = Switched { text: String::new(), lines: Vec::new() };
    let mut done = 0;
    for edit in edits {
        switched.text.push_str(&text[done..edit.range.start]);
        let first = 1 + switched.text.matches('\n').count();
        let end = first + edit.text.lines().count();
        switched.lines.extend(edit.mutants.iter().map(|mutant| (first..end, *mutant)));
        switched.text.push_str(&edit.text);
        done = edit.range.end;
    }
    switched.text.push_str(&text[done..]);
    switched
}

#[cfg(test)]
mod tests {
    use super::{
        super::{list::tests::mutant, runtime::choose},
        *,
    };

    fn switched(text: &str, mutants: &[&Mutant]) -> Result<Switched, String> {
        let numbered: Vec<_> = mutants.iter().copied().enumerate().collect();
        switch(text, &numbered, &[])
    }

    #[test]
    fn a_function_gets_a_second_body_for_each_mutant() {
        let code = "fn f() -> i32 {\n    let a = 1;\n    a + 2\n}\n\nfn g() {\n    1\n}\n";
        let (one, two) = (mutant("fn f", "1", "3"), mutant("fn f", "a + 2", "a\n        + 4"));
        let expected = "fn f() -> i32 {\n\
            if crate::mutant::is(0) {\nreturn {\n    let a = 3;\n    a + 2\n};\n}\n\
            if crate::mutant::is(1) {\nreturn {\n    let a = 1;\n    a\n        + 4\n};\n}\n    \
            let a = 1;\n    a + 2\n}\n\nfn g() {\n    1\n}\n";
        let switched = switched(code, &[&one, &two]).expect("both are in a function");
        assert_eq!(switched.text, expected);
        let at = |line: usize| switched.mutants_at(line).collect::<Vec<_>>();
        assert_eq!(
            (at(1), at(2), at(7), at(8), at(14), at(15)),
            (vec![], vec![0], vec![0], vec![1], vec![1], vec![])
        );
    }

    #[test]
    fn the_innermost_function_around_a_text_is_found_by_its_indentation() {
        let code = "impl A {\n    pub(in crate::a) async fn f<T>(\n        x: T,\n    ) -> B\n    where\n        T: C,\n    {\n        \
                    x\n    }\n\n    const K: &str = \"k\";\n\n    fn outer() {\n        fn inner() {\n            y\n        }\n        \
                    z\n    }\n\n    fn declared();\n}\nconst W: &str = \"w\";\n";
        let body = |find: &str| {
            let at = code.find(find).expect(find);
            enclosing_function(code, &(at..at + find.len())).map(|function| code[function.body].trim())
        };
        assert_eq!(body("x\n    }"), None, "the text goes beyond the body");
        assert_eq!(body("        x\n"), Some("x"));
        assert_eq!(body("k\""), None);
        assert_eq!(body("y\n"), Some("y"));
        assert_eq!(body("z\n"), Some("fn inner() {\n            y\n        }\n        z"));
        assert_eq!(body("w\""), None);
    }

    #[test]
    fn a_statement_outside_functions_contains_all_its_variants() {
        let code = "const S: &str = \"select a, b from c where d\";\n";
        let mutants = [
            mutant("S", "a, b", "a"),
            mutant("S", "b from", "from"),
            mutant("S", "where d", ""),
            mutant("S", "a, b", "b"),
        ];
        let switched = switched(code, &mutants.each_ref()).expect("all are in a literal");
        assert_eq!(choose(&switched.text, None), (code.to_owned(), false));
        let expected = [
            "select a from c where d",
            "select a, from c where d",
            "select a, b from c ",
            "select b from c where d",
        ];
        for (number, statement) in expected.into_iter().enumerate() {
            let expected = format!("const S: &str = \"{statement}\";\n");
            assert_eq!(choose(&switched.text, Some(number)), (expected, true), "{number}");
        }
        assert_eq!(
            choose(&switched.text, Some(4)),
            (code.to_owned(), false),
            "a mutant of another statement"
        );
        assert_eq!(switched.mutants_at(1).count(), 4);
    }

    #[test]
    fn a_place_that_cannot_be_switched_is_refused() {
        let problem = |code: &str, find: &str| switched(code, &[&mutant("fn", find, "y")]).expect_err(code);
        assert!(problem("fn f() -> impl A {\n    x\n}\n", "x").contains("returns `impl …`"));
        assert!(problem("pub const fn f() -> A {\n    x\n}\n", "x").contains("`const fn`"));
        assert!(problem("// fn\nconst A: &str = \"x\";\n", "\"x").contains("part of a string literal"));
    }

    #[test]
    fn a_mutant_of_a_statement_keeps_its_arguments() {
        let code = "static ONE: Statement = Statement::new(\n    \"a = $1 and ($12 is null\n     or b = $12)\",\n);\n\n\
                    static TWO: Statement = Statement::new(\"c = $2 or c = ?3\");\n";
        let problem =
            |find: &str, replace: &str| switched(code, &[&mutant("static ONE", find, replace)]).err();
        assert_eq!(problem("b = $12", "true"), None);
        assert_eq!(problem("a = $1 ", "a <> $1 "), None);
        assert_eq!(problem("c = $2", "c <> $2"), None);
        let other = |find, replace| problem(find, replace).unwrap_or_default();
        assert!(other("a = $1 and", "").contains("the argument `$1`"));
        assert!(other("b = $12", "b = $2").contains("the argument `$2`"), "the one of the other statement");
        assert!(other("or c = ?3", "").contains("the argument `?3`"));
    }

    #[test]
    fn a_hook_comes_before_the_second_bodies_of_its_function() {
        let hook = Hook { file: "", function: "fn f() {\n", line: "hook();\n" };
        let mutant = mutant("fn f", "x", "y");
        let switched =
            switch("fn f() {\n    x\n}\n", &[(0, &mutant)], &[&hook]).expect("it has the function");
        assert!(switched.text.starts_with("fn f() {\nhook();\nif crate::mutant::is(0)"), "{}", switched.text);
        assert!(switch("fn g() {\n}\n", &[], &[&hook]).is_err_and(|why| why.contains("no `fn f() {`")));
    }
}
