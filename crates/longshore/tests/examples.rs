//! Every example runs to its end as the program it is, and its own assertions
//! hold. Building the tests builds them.

use std::path::PathBuf;
use std::process::Command;

fn runs(name: &str) {
    let mut program = std::env::current_exe().expect("this test has a path");
    program.pop();
    program.pop();
    program.extend(["examples", name]);
    let ended =
        Command::new(&program).output().unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let (out, err) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "{name}: {}\n{out}\n{err}", ended.status);
}

/// Makes a test of each example.
macro_rules! run {
    ($($example:ident),+ $(,)?) => {
        const LISTED: &[&str] = &[$(stringify!($example)),+];
        $(#[test]
        fn $example() {
            runs(stringify!($example));
        })+
    };
}

run!(
    axum_app,
    cancel_and_stop,
    cron,
    handlers,
    hooks,
    mounted_api,
    progress_and_results,
    recovery,
    typed_job
);

#[test]
fn none_is_forgotten() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut found: Vec<String> = std::fs::read_dir(folder)
        .expect("examples")
        .map(|entry| entry.expect("entry").path().file_stem().expect("name").to_string_lossy().into_owned())
        .collect();
    found.sort();
    assert_eq!(found, LISTED);
}
