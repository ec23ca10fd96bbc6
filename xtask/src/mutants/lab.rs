//! Where mutants are built and tested: a copy of the tree with all mutants, under
//! `target/mutants`, and the conformance suite that is built from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use super::switch::Switched;
use crate::{
    run::{Result, cargo, target_dir, workspace},
    time_limit::status_within,
};

/// The library's folder in the workspace.
pub(super) const LIBRARY: &str = "crates/longshore";

/// The tests of a mutant normally take seconds.
const TIME_LIMIT: Duration = Duration::from_secs(5 * 60);

/// A function has several bodies, so an unoptimised program needs more stack.
const STACK_BYTES: &str = "16777216";

/// The copy of the tree.
pub(super) struct Lab {
    home: PathBuf,
}

/// Why the copy does not compile: the first error in the code of each mutant.
pub(super) type BuildErrors = BTreeMap<usize, String>;

impl Lab {
    pub(super) fn new() -> Lab {
        Lab { home: target_dir().join("mutants") }
    }

    /// Copies the tree, with the mutants, and builds the conformance suite.
    pub(super) fn build(
        &self,
        files: &BTreeMap<String, Switched>,
        database_url: &str,
    ) -> Result<Result<Suite, BuildErrors>> {
        let tree = self.home.join("tree");
        copy_tree(&tree, files)?;
        // With the features and the folder of `cargo xtask test`, so that dependencies are not built again.
        // [`with_own_version`] keeps the artifacts apart.
        let built = cargo(["test", "--workspace", "--all-features", "--test", "conformance", "--no-run"])
            .arg("--message-format=short")
            .current_dir(&tree)
            .env("CARGO_TARGET_DIR", target_dir())
            .output()?;
        let messages = String::from_utf8_lossy(&built.stderr);
        if !built.status.success() {
            let errors = errors_by_mutant(&messages, files);
            // An error that no mutant explains is not theirs.
            return if errors.is_empty() { Err(messages.into()) } else { Ok(Err(errors)) };
        }
        let program = executable(&messages).ok_or("cargo has not printed the name of the test program")?;
        let logs = self.home.join("logs");
        fs::create_dir_all(&logs)?;
        Ok(Ok(Suite {
            program: tree.join(program),
            folder: tree.join(LIBRARY),
            logs,
            database_url: database_url.to_owned(),
        }))
    }
}

/// The test program in cargo's message `Executable tests/… (target/…)`.
fn executable(messages: &str) -> Option<&str> {
    let line = messages.lines().find(|line| line.trim_start().starts_with("Executable"))?;
    line.rsplit_once('(')?.1.strip_suffix(')')
}

/// Finds the mutants at fault by the lines that the compiler names, in messages such as
/// `crates/longshore/src/lib.rs:17:5: error[E0308]: mismatched types`.
fn errors_by_mutant(messages: &str, files: &BTreeMap<String, Switched>) -> BuildErrors {
    let mut errors = BuildErrors::new();
    for message in messages.lines().filter(|message| message.contains(": error")) {
        let mut parts = message.splitn(4, ':');
        let (Some(file), Some(line)) = (parts.next(), parts.next().and_then(|line| line.parse().ok())) else {
            continue;
        };
        let file = file.strip_prefix(LIBRARY).and_then(|file| files.get(file.trim_start_matches('/')));
        for mutant in file.into_iter().flat_map(|file| file.mutants_at(line)) {
            errors.entry(mutant).or_insert_with(|| message.to_owned());
        }
    }
    errors
}

/// The conformance suite with all mutants in it.
pub(super) struct Suite {
    program: PathBuf,
    /// Tests expect to run in the folder of their package.
    folder: PathBuf,
    logs: PathBuf,
    database_url: String,
}

/// How a test case ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Ended {
    Failed,
    Passed,
    /// It did not execute the code of the mutant, so its result says nothing.
    NotReached,
    /// It was killed after [`TIME_LIMIT`].
    TimedOut,
    /// The test program ended without a result, for example by an abort.
    Crashed,
}

impl Suite {
    /// Runs a test case with at most one mutant on, in a process of its own. `slot` is a
    /// number that no other run uses at the same time.
    pub(super) fn run(&self, slot: usize, mutant: Option<usize>, case: &str) -> Result<Ended> {
        let log = |name| self.logs.join(format!("{slot}-{name}"));
        let (output, reached) = (log("output"), log("reached"));
        if reached.exists() {
            fs::remove_file(&reached)?;
        }
        let file = File::create(&output)?;
        let mut test = Command::new(&self.program);
        test.args(["--exact", case])
            .current_dir(&self.folder)
            .env("LONGSHORE_TEST_DATABASE_URL", &self.database_url)
            .env("LONGSHORE_MUTANT", mutant.map_or(String::new(), |mutant| mutant.to_string()))
            .env("LONGSHORE_MUTANT_REACHED", &reached)
            .env("RUST_MIN_STACK", STACK_BYTES)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file);
        let status = status_within(TIME_LIMIT, &mut test)?;
        let is_reached = mutant.is_none() || reached.exists();
        Ok(ended(status, &String::from_utf8_lossy(&fs::read(output)?), is_reached))
    }
}

fn ended(status: Option<ExitStatus>, output: &str, is_reached: bool) -> Ended {
    if status.is_none() {
        return Ended::TimedOut;
    }
    let summary = output.lines().rfind(|line| line.starts_with("test result:")).unwrap_or_default();
    match (summary.contains(" 1 passed; 0 failed;"), summary.contains(" 0 passed; 1 failed;")) {
        (false, false) => Ended::Crashed,
        _ if !is_reached => Ended::NotReached,
        (true, _) => Ended::Passed,
        (false, true) => Ended::Failed,
    }
}

/// Copies the files that git tracks or would add, except that some have mutants.
fn copy_tree(root: &Path, switched: &BTreeMap<String, Switched>) -> Result {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(workspace())
        .output()?;
    if !listed.status.success() {
        return Err("cannot list the tree: `git ls-files` failed".into());
    }
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    // Git also lists files that were deleted but not committed.
    let is_file = |name: &&str| workspace().join(name).is_file();
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for name in listed.split('\0').filter(is_file) {
        files.insert(name.to_owned(), fs::read(workspace().join(name))?);
    }
    for (name, file) in switched {
        files.insert(format!("{LIBRARY}/{name}"), file.text.clone().into_bytes());
    }
    let manifest = String::from_utf8_lossy(files.get(MANIFEST).ok_or("the tree has no Cargo.toml")?);
    files.insert(MANIFEST.to_owned(), with_own_version(&manifest)?.into_bytes());
    for (name, wanted) in &files {
        write_if_changed(&root.join(name), wanted)?;
    }
    let names: BTreeSet<&str> = files.keys().map(String::as_str).collect();
    remove_others(root, &|file| file.to_str().is_some_and(|name| names.contains(name)))
}

const MANIFEST: &str = "Cargo.toml";

/// The manifest with a version that no other build has. Cargo names artifacts by package and version,
/// not by folder: with the same version, `cargo nextest` could run the program with the mutants.
fn with_own_version(manifest: &str) -> Result<String> {
    let parts = || {
        let (before, package) = manifest.split_once(PACKAGE)?;
        let (between, version) = package.split_once(VERSION)?;
        let (version, after) = version.split_once('"')?;
        Some(format!("{before}{PACKAGE}{between}{VERSION}{version}+mutants\"{after}"))
    };
    parts().ok_or_else(|| "Cargo.toml has no version in [workspace.package]".into())
}

const PACKAGE: &str = "[workspace.package]";
const VERSION: &str = "\nversion = \"";

/// Removes files of an earlier copy that are no longer in the checkout. The old file of
/// a renamed module could otherwise keep the copy from compiling.
fn remove_others(root: &Path, is_listed: &dyn Fn(&Path) -> bool) -> Result {
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.strip_prefix(root).is_ok_and(is_listed) {
                fs::remove_file(path)?;
            }
        }
    }
    Ok(())
}

/// Does not touch files that are already equal, so that cargo does not rebuild
/// them.
fn write_if_changed(path: &Path, wanted: &[u8]) -> Result {
    if fs::read(path).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    Ok(fs::write(path, wanted)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::{
        super::{list::tests::mutant, switch::switch},
        *,
    };

    #[test]
    fn the_test_program_is_read_from_cargos_messages() {
        let messages = "   Compiling a v0.1.0 (/b)\n    Finished `test` profile\n  Executable tests/c.rs (/target/c-0)\n";
        assert_eq!(executable(messages), Some("/target/c-0"));
        assert_eq!(executable("    Finished `test` profile\n"), None);
    }

    #[test]
    fn a_build_error_is_attributed_to_the_mutants_on_its_line() {
        let mutant = mutant("fn f", "x", "y");
        let file = switch("fn f() {\n    x\n}\n", &[(7, &mutant)], &[]).expect("it applies");
        let files = BTreeMap::from([("src/a.rs".to_owned(), file)]);
        let errors = |messages: &str| errors_by_mutant(messages, &files);
        let message = "crates/longshore/src/a.rs:4:5: error[E0425]: cannot find value `y`";
        let expected = BuildErrors::from([(7, message.to_owned())]);
        assert_eq!(errors(&format!("{message}\ncrates/longshore/src/a.rs:5:1: error: another\n")), expected);
        assert_eq!(errors("crates/longshore/src/a.rs:7:5: error: in the original"), BuildErrors::new());
        assert_eq!(errors("crates/longshore/src/b.rs:4:5: error: in another file"), BuildErrors::new());
        assert_eq!(errors("crates/longshore/src/a.rs:4:5: warning: unused"), BuildErrors::new());
    }

    #[test]
    fn the_copy_has_a_version_of_its_own() {
        let manifest = "[x]\nversion = \"9\"\n[workspace.package]\nedition = \"2024\"\nversion = \"0.1.0\"\n";
        let changed = with_own_version(manifest).expect("it has a version");
        assert_eq!(changed, manifest.replace("0.1.0", "0.1.0+mutants"));
        assert!(with_own_version("[workspace]\n").is_err());
    }

    #[test]
    fn a_result_counts_only_if_the_case_ended_and_reached_the_mutant() {
        let summary = |passed, failed| {
            format!("running 1 test\n\ntest result: ok. {passed} passed; {failed} failed; 0 ignored\n")
        };
        let status = Some(ExitStatus::from_raw(0));
        assert_eq!(ended(status, &summary(1, 0), true), Ended::Passed);
        assert_eq!(ended(status, &summary(0, 1), true), Ended::Failed);
        assert_eq!(ended(status, &summary(0, 1), false), Ended::NotReached);
        assert_eq!(ended(status, &summary(1, 0), false), Ended::NotReached);
        assert_eq!(ended(status, &summary(0, 0), true), Ended::Crashed, "there is no such case");
        assert_eq!(ended(status, "running 1 test\n", true), Ended::Crashed);
        assert_eq!(ended(None, &summary(0, 1), true), Ended::TimedOut);
    }
}
