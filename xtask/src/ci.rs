//! `cargo xtask ci`: every check that a change must pass. The first static check that fails ends
//! the run. The tests come last, so that their summary is at the end of the output.

use std::process::Command;

use crate::{
    features, licences, older_sqlx,
    run::{self, Result, Unavailable, cargo},
    steps::Steps,
    test::{Database, Tests},
    tools::{Missing, is_ci},
};

/// `cargo xtask ci`.
pub(crate) fn ci() -> Result {
    // Fail on a missing program now, not after the builds.
    let missing = Missing::after_installing()?;
    let database = Database::find()?;

    let mut steps = Steps::new();
    steps.run("format", &mut cargo(["fmt", "--all", "--check"]))?;
    // The suites that test the server from outside mostly wait, so they run beside the checks.
    let tests = Tests::begin(missing, database, &mut steps)?;
    static_checks(&mut steps)?;
    let duration = run::took(steps.elapsed());
    eprintln!("==> {} passed all static checks in {duration}; next: the tests", commit());
    tests.finish(steps)
}

fn static_checks(steps: &mut Steps) -> Result {
    steps.run("lints", &mut clippy(&["--workspace", "--all-targets", "--all-features"]))?;
    for (name, flags) in features::combinations()? {
        let mut selection = vec!["--package", "longshore", "--lib"];
        selection.extend(flags.iter().map(String::as_str));
        steps.run(&name, &mut clippy(&selection))?;
    }
    // The features of the command without those that the tests enable.
    steps.run("command", &mut clippy(&["--package", "longshore-cli", "--bin", "longshore"]))?;
    steps.run("docs", &mut docs())?;
    match steps.time("sqlx 0.8", older_sqlx::check) {
        Err(error) if error.is::<Unavailable>() && !is_ci() => {
            steps.leave_out("sqlx 0.8", &error.to_string());
        }
        checked => checked?,
    }
    steps.time("licences", licences::check)
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
