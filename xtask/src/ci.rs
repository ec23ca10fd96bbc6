//! `cargo xtask ci`: every check that a change must pass. The first failure ends
//! the run. The tests come last, so that their summary is at the end of the output.

use std::{process::Command, time::Instant};

use crate::{
    features, older_sqlx,
    run::{self, Result, cargo, step},
    test,
};

/// `cargo xtask ci`.
pub(crate) fn ci() -> Result {
    let started = Instant::now();
    // Fail on a missing Postgres now, not after the builds.
    let database = test::Database::find()?;

    step("format", &mut cargo(["fmt", "--all", "--check"]))?;
    step("lints", &mut clippy(&["--workspace", "--all-targets", "--all-features"]))?;
    for (name, flags) in features::combinations()? {
        let mut selection = vec!["--package", "longshore", "--lib"];
        selection.extend(flags.iter().map(String::as_str));
        step(&name, &mut clippy(&selection))?;
    }
    step("docs", &mut docs())?;
    older_sqlx::check()?;
    licences()?;

    let duration = run::took(started.elapsed());
    eprintln!("==> {} passed all static checks in {duration}; next: the tests", commit());
    test::run(database, &[])
}

/// Clippy with warnings denied through its arguments, because changing RUSTFLAGS
/// would rebuild every dependency.
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

/// Skipped with a message if cargo-deny is missing, because it takes many minutes
/// to build.
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

/// The commit that is being checked, for readers of the log, or "the working tree"
/// if git cannot describe it.
fn commit() -> String {
    let described =
        Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(run::workspace()).output();
    match described {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_string(),
        _ => "the working tree".to_string(),
    }
}
