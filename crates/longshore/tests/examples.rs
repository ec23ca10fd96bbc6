//! Runs every example as a program. Each example asserts what it shows. Building the tests
//! builds the examples.

use std::path::PathBuf;
use std::process::Command;

fn run_example(name: &str) {
    let mut program = std::env::current_exe().expect("current_exe");
    program.pop();
    program.pop();
    program.extend(["examples", name]);
    let output =
        Command::new(&program).output().unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}: {}\n{out}\n{err}", output.status);
}

/// Makes a test for each example.
macro_rules! examples {
    ($($example:ident),+ $(,)?) => {
        const LISTED: &[&str] = &[$(stringify!($example)),+];
        $(#[test]
        fn $example() {
            run_example(stringify!($example));
        })+
    };
}

examples!(
    axum_app,
    cancel_and_stop,
    cron,
    handlers,
    hooks,
    mounted_api,
    progress_and_results,
    recovery,
    sentry,
    typed_job
);

#[test]
fn every_example_is_listed() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut found: Vec<String> = std::fs::read_dir(folder)
        .expect("examples")
        .map(|entry| entry.expect("entry").path().file_stem().expect("name").to_string_lossy().into_owned())
        .collect();
    found.sort();
    assert_eq!(found, LISTED);
}
