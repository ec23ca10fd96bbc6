//! Properties of all output: it cannot control the terminal, shows no secrets, and a closed
//! pipe is not an error.

use std::process::Stdio;

use longshore::{Ending, NewJob};

use crate::fixture::{CommandOutput, Fixture, binary, on_every_engine};

on_every_engine!(
    stored_text_cannot_control_the_terminal,
    a_closed_pipe_is_not_an_error,
    output_that_cannot_be_written_is_an_error,
);

const HOSTILE: &str = "\u{1b}[2J\u{1b}]0;owned\u{7}\u{9b}31m\u{202e}txet\r\nlast";

fn is_harmless(text: &str) -> bool {
    !text.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}')
}

fn stored_text_cannot_control_the_terminal(fixture: &Fixture) {
    fixture.migrated();
    let job = NewJob::new(HOSTILE, HOSTILE).tags([HOSTILE]).context(HOSTILE).idempotency_key(HOSTILE);
    let ending = Ending::Failed { error: HOSTILE.into(), retry_in: None };
    let id = fixture.finished_job(job, ending);
    fixture.with_client(async |client| {
        client.enqueue(NewJob::new("greet", &()).queue(HOSTILE)).await?;
        client.pause(HOSTILE).await
    });
    let show = format!("jobs show {id}");
    for line in ["jobs list", "dead list", "queues list", "counts", &show] {
        for line in [line.to_owned(), format!("{line} --json")] {
            let text = fixture.run(&line).ok().out;
            assert!(is_harmless(&text), "{line}: {text:?}");
            assert!(text.contains("last"), "{line}: {text:?}");
        }
    }
    let job = fixture.run(&format!("{show} --json")).json();
    assert_eq!(
        (&job["payload"], &job["last_error"]),
        (&HOSTILE.into(), &HOSTILE.into()),
        "JSON output is complete"
    );
    let refused = fixture.run_args(&["queues", "limit", HOSTILE, "0"]).fails_with(2, &["at least 1"]);
    assert!(is_harmless(&refused.err), "{refused:?}");
}

fn a_closed_pipe_is_not_an_error(fixture: &Fixture) {
    fixture.migrated().with_client(async |client| {
        // More than a pipe buffers, so that the write fails.
        let jobs = (0..50).map(|_| NewJob::new("greet", &"x".repeat(4000)));
        client.enqueue_many(jobs).await
    });
    for args in [["jobs", "list"].as_slice(), &["jobs", "list", "--json"]] {
        let mut command = binary();
        command.env("DATABASE_URL", &fixture.url).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        drop(child.stdout.take());
        let output = CommandOutput::of(child.wait_with_output().unwrap());
        assert_eq!(output.code, 0, "{output:?}");
        let unexpected = output.err.lines().find(|line| !line.starts_with("next page: "));
        assert_eq!(unexpected, None, "{output:?}");
    }
}

#[cfg(not(target_os = "linux"))]
fn output_that_cannot_be_written_is_an_error(_: &Fixture) {}

#[cfg(target_os = "linux")]
fn output_that_cannot_be_written_is_an_error(fixture: &Fixture) {
    fixture.migrated();
    let lines = [
        "jobs list",
        "jobs list --json",
        "jobs list --watch 100ms",
        "config show",
        "completions bash",
        "--help",
        "tokens create reader --scope read",
        "tokens create reader --scope read --json",
    ];
    for line in lines {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = fixture.command(&line.split_whitespace().collect::<Vec<_>>());
        let output = CommandOutput::of(command.stdout(full).output().unwrap());
        let output = output.fails_with(1, &["could not be written to standard output"]);
        assert_eq!(output.err.contains("tokens revoke "), line.starts_with("tokens create"), "{output:?}");
    }
}

#[test]
fn no_password_is_ever_printed() {
    let url = "postgres://ada:s3cret@db.invalid/jobs";
    for line in ["check", "--help", "jobs list --help", "jobs list --status nonsense", "migrate"] {
        let output = binary().env("DATABASE_URL", url).args(line.split_whitespace()).output().unwrap();
        let output = CommandOutput::of(output);
        assert!(!format!("{output:?}").contains("s3cret"), "{line}: {output:?}");
    }
    let as_a_subcommand = CommandOutput::of(binary().arg(url).output().unwrap());
    let output = as_a_subcommand.fails_with(2, &["ada:***@db.invalid"]);
    assert!(!output.err.contains("s3cret"), "{output:?}");
}

#[test]
fn a_database_that_does_not_respond_is_unavailable() {
    let url = "postgres://ada:s3cret@db.invalid/jobs";
    for line in ["check", "enqueue greet", "migrate --check"] {
        let output = binary().env("DATABASE_URL", url).args(line.split_whitespace()).output().unwrap();
        CommandOutput::of(output).fails_with(5, &["database"]);
    }
}

#[test]
fn the_root_help_lists_every_exit_code() {
    let help = CommandOutput::of(binary().arg("--help").output().unwrap()).ok().out;
    for line in [
        "0  done",
        "1  something",
        "2  usage",
        "3  not found",
        "4  conflict",
        "5  unavailable",
        "6  schema",
        "7  denied",
        "8  ended",
        "9  not ended",
    ] {
        assert!(help.contains(line), "{line}");
    }
    CommandOutput::of(binary().output().unwrap());
}

#[test]
fn every_shell_has_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = CommandOutput::of(binary().args(["completions", shell]).output().unwrap()).ok().out;
        for word in ["longshore", "redrive", "token-file"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    CommandOutput::of(binary().args(["completions", "csh"]).output().unwrap())
        .fails_with(2, &["bash", "fish"]);
}
