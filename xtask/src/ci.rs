//! Everything a change has to pass. The first failure ends the run and is named;
//! the tests come last so that their summary ends it.

use std::{process::Command, time::Instant};

use crate::{
    features,
    run::{self, Result, cargo, step},
    test,
};

/// `cargo xtask ci`.
pub(crate) fn ci() -> Result {
    let began = Instant::now();
    // A missing Postgres should show now, not after the builds.
    let database = test::Database::find()?;

    step("format", &mut cargo(["fmt", "--all", "--check"]))?;
    step("lints", &mut clippy(&["--workspace", "--all-targets", "--all-features"]))?;
    for (name, flags) in features::combinations()? {
        let mut selection = vec!["--package", "longshore", "--lib"];
        selection.extend(flags.iter().map(String::as_str));
        step(&name, &mut clippy(&selection))?;
    }
    step("docs", &mut docs())?;
    licences()?;

    eprintln!("==> {} passed every check in {}; the tests remain", commit(), run::took(began.elapsed()));
    test::run(database, &[])
}

/// Clippy with warnings denied by its own arguments: RUSTFLAGS would rebuild
/// every dependency.
fn clippy(selection: &[&str]) -> Command {
    let mut clippy = cargo(["clippy"]);
    clippy.args(selection).args(["--", "-D", "warnings"]);
    clippy
}

fn docs() -> Command {
    let mut doc = cargo(["doc", "--workspace", "--no-deps", "--all-features"]);
    doc.env("RUSTDOCFLAGS", "-D warnings");
    doc
}

/// Needs a tool that takes many minutes to build, so a machine without it goes
/// without the check, and says so.
fn licences() -> Result {
    if !run::succeeds(&mut cargo(["deny", "--version"])) {
        eprintln!(
            "==> licences: SKIPPED, cargo-deny is not installed \
             (cargo install cargo-deny --locked)"
        );
        return Ok(());
    }
    step("licences", &mut cargo(["deny", "check", "--hide-inclusion-graph", "licenses", "bans", "sources"]))
}

/// The commit being checked, for a log that is read later; without git, or
/// outside a repository, just what it is.
fn commit() -> String {
    let described =
        Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(run::workspace()).output();
    match described {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_string(),
        _ => "the working tree".to_string(),
    }
}
