//! `cargo xtask mutants`: does the conformance suite notice when a rule is
//! broken on purpose?
//!
//! Each mutant is one small bug in a rule, an engine or the API, and names the
//! cases that must turn red. They are tried in a copy of the tree under
//! `target/mutants`, never in the checkout. A mutant that survives, or whose text
//! is no longer found, fails the task: the list has to follow the code.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

mod api;
mod postgres;
mod rules;
mod sqlite;

use crate::{
    run::{Result, cargo, target_dir, took, workspace},
    test::Database,
};

/// One bug: `old`, first found after `after`, becomes `new`.
struct Mutant {
    name: &'static str,
    file: &'static str,
    after: &'static str,
    old: &'static str,
    new: &'static str,
    /// The cases that must fail, as `module::engine::case`.
    red: &'static [&'static str],
}

/// Every bug, by where it is. The lists follow the code: a text that is no longer
/// found fails the task.
fn all() -> impl Iterator<Item = &'static Mutant> {
    [rules::MUTANTS, postgres::MUTANTS, sqlite::MUTANTS, api::MUTANTS].into_iter().flatten()
}

/// `cargo xtask mutants [words]`: all of them, or those whose name contains
/// every word.
pub(crate) fn mutants(args: &[OsString]) -> Result {
    let words: Vec<_> = args.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let chosen: Vec<_> =
        all().filter(|mutant| words.iter().all(|word| mutant.name.contains(word.as_str()))).collect();
    if chosen.is_empty() {
        return Err(format!("no mutant's name contains `{}`", words.join(" ")).into());
    }
    let database = Database::find()?.open()?;
    let home = target_dir().join("mutants");
    let tree = Tree::copy(home.join("tree"))?;
    let mut survivors = Vec::new();
    for (nth, mutant) in chosen.iter().enumerate() {
        let began = Instant::now();
        let fate = tree.with(mutant, || {
            let mut suite =
                cargo(["test", "--package", "longshore", "--all-features", "--test", "conformance"]);
            suite
                .current_dir(&tree.root)
                .args(["--", "--exact"])
                .args(mutant.red)
                .env("CARGO_TARGET_DIR", home.join("target"))
                .env("LONGSHORE_TEST_DATABASE_URL", database.url());
            fate(&mut suite, mutant.red.len())
        })?;
        let seconds = took(began.elapsed());
        eprintln!("    {}/{} {}: {fate:?}, {seconds}", nth + 1, chosen.len(), mutant.name);
        if fate != Fate::Red {
            survivors.push(format!("{} ({fate:?})", mutant.name));
        }
    }
    if survivors.is_empty() {
        eprintln!("==> mutants: all {} were noticed", chosen.len());
        return Ok(());
    }
    Err(format!("not noticed by the suite:\n  {}", survivors.join("\n  ")).into())
}

/// What became of a mutant.
#[derive(Debug, PartialEq)]
enum Fate {
    /// Every case it names failed.
    Red,
    /// At least one of them passed.
    Survived,
    /// The bug is no program, so nothing is known about the suite.
    DoesNotBuild,
    /// The code has moved on; so must the mutant.
    NotFound,
}

fn fate(suite: &mut Command, cases: usize) -> Result<Fate> {
    let output = suite.output().map_err(|error| format!("cannot run the suite: {error}"))?;
    let told = String::from_utf8_lossy(&output.stdout);
    let Some(summary) = told.lines().find(|line| line.starts_with("test result:")) else {
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        return Ok(Fate::DoesNotBuild);
    };
    Ok(if summary.contains(&format!(" 0 passed; {cases} failed")) { Fate::Red } else { Fate::Survived })
}

/// A copy of the files that git knows or would know.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn copy(root: PathBuf) -> Result<Self> {
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(workspace())
            .output()?;
        if !listed.status.success() {
            return Err("cannot list the tree: `git ls-files` failed".into());
        }
        for name in String::from_utf8_lossy(&listed.stdout).split('\0').filter(|name| !name.is_empty()) {
            copy_if_changed(&workspace().join(name), &root.join(name))?;
        }
        Ok(Tree { root })
    }

    /// Runs `trial` with the bug in place, and takes it out again.
    fn with(&self, mutant: &Mutant, trial: impl FnOnce() -> Result<Fate>) -> Result<Fate> {
        let path = self.root.join(mutant.file);
        let healthy = fs::read_to_string(&path)?;
        let mutated = match mutant.apply(&healthy) {
            Ok(mutated) => mutated,
            Err(lost) => {
                eprintln!("    {lost}");
                return Ok(Fate::NotFound);
            }
        };
        fs::write(&path, mutated)?;
        let result = trial();
        fs::write(&path, healthy)?;
        result
    }
}

/// Leaves files alone that are as they should be, so that cargo rebuilds
/// nothing for their sake.
fn copy_if_changed(from: &Path, to: &Path) -> Result {
    let Ok(wanted) = fs::read(from) else { return Ok(()) };
    if fs::read(to).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    Ok(fs::write(to, wanted)?)
}

impl Mutant {
    fn apply(&self, text: &str) -> Result<String> {
        let lost = |what: &str| {
            format!(
                "mutant `{}`: `{what}` is no longer in {}; let the list follow the code",
                self.name, self.file
            )
        };
        let after = text.find(self.after).ok_or_else(|| lost(self.after))?;
        let at = after + text[after..].find(self.old).ok_or_else(|| lost(self.old))?;
        Ok(format!("{}{}{}", &text[..at], self.new, &text[at + self.old.len()..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutant_still_finds_its_place() {
        for mutant in all() {
            let text = fs::read_to_string(workspace().join(mutant.file)).expect("the file");
            let mutated = mutant.apply(&text).expect("the place");
            assert_ne!(mutated, text, "{}", mutant.name);
        }
    }

    #[test]
    fn every_mutant_names_cases_that_exist() {
        let suite = workspace().join("crates/longshore/tests/conformance");
        for path in all().flat_map(|mutant| mutant.red) {
            let mut parts: Vec<_> = path.split("::").collect();
            let case = parts.pop().expect("a case");
            parts.pop().expect("an engine");
            let module = suite.join(parts.join("/")).with_extension("rs");
            let module = fs::read_to_string(module).expect(path);
            assert!(module.contains(&format!("\n    {case},\n")), "{path}");
        }
    }

    #[test]
    fn only_the_first_place_after_the_anchor_changes() {
        let mutant = Mutant { name: "", file: "", after: "b", old: "x", new: "y", red: &[] };
        assert_eq!(mutant.apply("x b x x").expect("found"), "x b y x");
        assert!(mutant.apply("x x").is_err());
    }
}
