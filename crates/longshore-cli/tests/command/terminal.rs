//! Properties of all output: it cannot control the terminal, shows no secrets, and a closed
//! pipe is not an error.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Duration;

use longshore::{Action, Ending, Flow, JobFilter, NewJob, NewOperation, task};

use crate::fixture::{CommandOutput, Fixture, binary, on_every_engine};
use crate::missing::skip;

on_every_engine!(
    stored_text_cannot_control_the_terminal,
    a_closed_pipe_is_not_an_error,
    output_that_cannot_be_written_is_an_error,
    a_list_at_80_columns_shows_what_matters,
    every_list_fits_80_columns_with_whole_ids,
    counts_at_80_columns_show_running_jobs,
    colours_depend_on_the_terminal_and_the_user,
    bash_completes_commands_flags_and_values,
    bash_completes_values_of_the_queue_that_the_command_line_names,
    fish_completes_values_with_descriptions,
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
    let flow = fixture.with_client(async |client| {
        let flow = Flow::new(HOSTILE).task(task(HOSTILE, NewJob::new(HOSTILE, &()).queue(HOSTILE)));
        client.enqueue_flow(flow).await
    });
    let (show, show_flow) = (format!("jobs show {id}"), format!("flows show {}", flow.id));
    for line in ["jobs list", "dead list", "queues list", "counts", "flows list", &show_flow, &show] {
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
    // A password that should have been percent-encoded.
    for url in [url, "postgres://ada:1?s3cret@db.invalid/jobs", "postgres://ada:1#s3cret@db.invalid/jobs"] {
        for line in ["check", "--help", "jobs list --help", "jobs list --status nonsense", "migrate"] {
            let output = binary().env("DATABASE_URL", url).args(line.split_whitespace()).output().unwrap();
            let output = CommandOutput::of(output);
            assert!(!format!("{output:?}").contains("s3cret"), "{line}: {output:?}");
        }
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

// ---- at a terminal ---------------------------------------------------------------

/// Runs a command at a terminal of 80 columns. `None` if the program `script` is missing.
pub(crate) fn at_a_terminal(fixture: &Fixture, variables: &[(&str, &str)], line: &str) -> Option<String> {
    let mut command = Command::new("script");
    let line = format!("stty cols 80 rows 24; {} {line}", env!("CARGO_BIN_EXE_longshore"));
    command.args(["-qec", &line, "/dev/null"]).stdin(Stdio::null());
    command.env("DATABASE_URL", &fixture.url).env("LONGSHORE_CONFIG", "").env("TERM", "xterm");
    command.env_remove("LONGSHORE_SERVER").env_remove("NO_COLOR").envs(variables.iter().copied());
    match command.output() {
        Ok(output) => Some(String::from_utf8(output.stdout).unwrap().replace('\r', "")),
        Err(error) => {
            skip(&format!("`script` cannot run: {error}"));
            None
        }
    }
}

fn a_list_at_80_columns_shows_what_matters(fixture: &Fixture) {
    fixture.migrated();
    let error = "connection refused by the mail server of the harbour";
    let id = fixture.failed_job("send_email", error);
    fixture.enqueue("greet --queue a-queue-with-a-long-name");
    let plain = [("NO_COLOR", "1")];
    let Some(listed) = at_a_terminal(fixture, &plain, "jobs list") else { return };
    assert!(listed.lines().all(|line| line.chars().count() <= 80), "{listed}");
    let row = listed.lines().find(|line| line.contains("failed_permanent")).unwrap();
    assert_eq!(row, format!("{id}  failed_permanent  send_email  connection …"), "ids are whole");
    let footer = "not shown: age, attempts, queue, due, priority (use a wider terminal or --json)";
    assert_eq!(listed.lines().last(), Some(footer), "{listed}");

    let dead = at_a_terminal(fixture, &plain, "dead list").unwrap();
    assert!(!dead.contains("STATUS") && dead.contains("connection refused by the mai"), "{dead}");
}

fn every_list_fits_80_columns_with_whole_ids(fixture: &Fixture) {
    fixture.migrated();
    let job = fixture.enqueue("summarize_page --queue a-queue-with-a-long-name");
    let flow = fixture.with_client(async |client| {
        let flow =
            Flow::new("import-of-all-customers").task(task("parse-the-file", NewJob::new("parse", &())));
        client.enqueue_flow(flow).await
    });
    fixture.run(&format!("flows cancel {}", flow.id)).ok();
    let token = fixture.run("tokens create a-program-of-another-team --scope read,work --json").json();
    let operation = fixture.with_client(async |client| {
        let filter = JobFilter { kind: Some("summarize_page".into()), ..JobFilter::default() };
        client.start_operation(NewOperation::matching(Action::Retry, filter)).await
    });
    let flow_id = flow.id.to_string();
    let lists = [
        ("jobs list", job.as_str()),
        ("flows list", &flow_id),
        (&format!("flows show {flow_id}"), "parse-the-file"),
        ("tokens list", token["id"].as_str().unwrap()),
        ("operations list", &operation.id.to_string()),
    ];
    for (line, text) in lists {
        let Some(shown) = at_a_terminal(fixture, &[("NO_COLOR", "1")], line) else { return };
        assert!(shown.lines().all(|line| line.chars().count() <= 80), "{line}: {shown}");
        assert!(shown.contains(text), "{line}: {shown}");
    }
}

fn counts_at_80_columns_show_running_jobs(fixture: &Fixture) {
    fixture.migrated();
    let job = || NewJob::new("summarize_page", &());
    fixture.finished_job(job(), Ending::Succeeded { result: None });
    fixture.finished_job(job(), Ending::Failed { error: "no".into(), retry_in: None });
    let later = Some(Duration::from_secs(3600));
    fixture.finished_job(job(), Ending::Failed { error: "not yet".into(), retry_in: later });
    let cancelled = fixture.enqueue("summarize_page");
    fixture.run(&format!("jobs cancel {cancelled}")).ok();
    fixture.enqueue("summarize_page");
    let Some(counts) = at_a_terminal(fixture, &[("NO_COLOR", "1")], "counts") else { return };
    let expected = "\
QUEUE    KIND            QUEUED  RUNNING  SUCCEEDED  RETRYING  FAILED_PERMANENT
default  summarize_page  1       0        1          1         1
not shown: cancelled (use a wider terminal or --json)
";
    assert_eq!(counts, expected);
}

fn colours_depend_on_the_terminal_and_the_user(fixture: &Fixture) {
    fixture.migrated().failed_job("greet", "no");
    let Some(coloured) = at_a_terminal(fixture, &[], "jobs list") else { return };
    assert!(coloured.contains("\u{1b}[31mfailed_permanent\u{1b}[0m"), "{coloured:?}");
    let lines = ["jobs list", "jobs list --watch 100ms", "--help", "jobs delete --status succeeded --yes"];
    for line in lines {
        // A watched list is stopped after its first frames.
        let line = if line.contains("--watch") {
            format!("{line} & sleep 1; kill -INT $!; wait")
        } else {
            line.into()
        };
        for variables in [[("TERM", "dumb")], [("NO_COLOR", "1")]] {
            let shown = at_a_terminal(fixture, &variables, &line).unwrap();
            let is_watched_in_colour = line.contains("--watch") && variables[0].0 == "NO_COLOR";
            let escapes =
                if is_watched_in_colour { shown.contains("\u{1b}[3") } else { shown.contains('\u{1b}') };
            assert!(!escapes, "{line} {variables:?}: {shown:?}");
        }
    }
    assert!(!fixture.run("jobs list").ok().out.contains('\u{1b}'), "no terminal, no colours");
}

// ---- shells --------------------------------------------------------------------

#[test]
fn every_shell_has_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = CommandOutput::of(binary().args(["completions", shell]).output().unwrap()).ok().out;
        let words: &[&str] = match shell {
            "elvish" | "powershell" => &["longshore", "redrive", "token-file"],
            _ => &["longshore", " complete -- "],
        };
        for word in words {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    CommandOutput::of(binary().args(["completions", "csh"]).output().unwrap())
        .fails_with(2, &["bash", "fish"]);
}

/// The parts into which bash splits a command line: words, which it splits again before and after
/// `:`, `=` and `@` unless they are quoted.
fn split_as_bash(line: &str) -> Vec<String> {
    let is_separator = |c: char| matches!(c, ':' | '=' | '@');
    let mut parts: Vec<String> = Vec::new();
    for word in line.split(' ') {
        if word.starts_with('\'') || word.is_empty() {
            parts.push(word.to_owned());
            continue;
        }
        let mut last = None;
        for c in word.chars() {
            match parts.last_mut().filter(|_| last == Some(is_separator(c))) {
                Some(part) => part.push(c),
                None => parts.push(c.into()),
            }
            last = Some(is_separator(c));
        }
    }
    parts
}

/// Sources the script in bash and completes a command line, whose last word is after the last
/// space.
fn complete_in_bash(variables: &[(&str, &str)], line: &str) -> Vec<String> {
    let longshore = env!("CARGO_BIN_EXE_longshore");
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let parts = split_as_bash(line);
    let script = format!(
        "source <({longshore} completions bash); COMP_LINE={}; COMP_WORDS=({longshore} {}); COMP_CWORD={}; \
         _longshore; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        quoted(&format!("{longshore} {line}")),
        parts.iter().map(|part| quoted(part)).collect::<Vec<_>>().join(" "),
        parts.len()
    );
    let mut command = Command::new("bash");
    command.args(["-c", &script]).env("LONGSHORE_CONFIG", "");
    command.env_remove("DATABASE_URL").env_remove("LONGSHORE_SERVER").envs(variables.iter().copied());
    let output = CommandOutput::of(command.output().expect("is bash installed?")).ok();
    output.out.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn bash_completes_commands_flags_and_values(fixture: &Fixture) {
    fixture.migrated().with_kinds(&["greet", "report"]).enqueue("greet --queue mail");
    fixture.run_args(&["cron", "add", "nightly", "30 2 * * *", "report"]).ok();
    let complete = |line: &str| complete_in_bash(&[("DATABASE_URL", &fixture.url)], line);
    assert_eq!(complete("dead re"), ["redrive"]);
    assert_eq!(complete("jobs list --token"), ["--token-file"]);
    assert_eq!(complete("jobs list --status fa"), ["failed_permanent"]);
    // bash replaces only what follows the separator.
    assert_eq!(complete("jobs list --status=fa"), ["failed_permanent"]);
    assert_eq!(complete("cron add x y z --missed=all:2"), ["24"]);
    assert_eq!(complete("cron add x y z --missed=all:"), ["24"]);
    let statuses = ["queued", "running", "succeeded", "retrying", "failed_permanent", "cancelled"];
    assert_eq!(complete("jobs list --status="), statuses);
    assert_eq!(complete("tokens create ci --scope op"), ["operate"]);
    assert_eq!(complete("enqueue x --unique-mode re"), ["replace"]);
    assert_eq!(complete("enqueue gr"), ["greet"]);
    let kinds = ["greet", "report", "resize_image", "send_email", "summarize_text", "webhook_delivery"];
    assert_eq!(complete("jobs list --kind "), kinds);
    assert_eq!(complete("jobs list --queue de"), ["default"]);
    assert_eq!(complete("worker --queues default,ma"), ["default,mail"]);
    assert_eq!(complete("cron run "), ["nightly"]);
    assert_eq!(complete("enqueue greet --payload "), Vec::<String>::new(), "a file name");
}

fn bash_completes_values_of_the_queue_that_the_command_line_names(fixture: &Fixture) {
    fixture.migrated().enqueue("greet --queue mail:eu");
    fixture.run_args(&["cron", "add", "nightly", "30 2 * * *", "report"]);
    let complete = |line: &str| complete_in_bash(&[], line);
    let url = &fixture.url;
    let mut targets = vec![format!("--database-url '{url}'")];
    // The URL of Postgres has a character that must be quoted.
    if !url.contains('&') {
        targets.extend([format!("--database-url {url}"), format!("--database-url={url}")]);
    }
    let (_server, server) = fixture.serve("");
    targets.extend([format!("--server {server}"), format!("--server={server}")]);
    for target in targets {
        assert_eq!(complete(&format!("jobs list {target} --queue ma")), ["mail:eu"], "{target}");
        assert_eq!(complete(&format!("jobs list {target} --queue mail:")), ["eu"], "{target}");
        assert_eq!(complete(&format!("jobs list {target} --queue=mail:e")), ["eu"], "{target}");
        assert_eq!(complete(&format!("{target} cron run ")), ["nightly"], "{target}");
    }
}

fn fish_completes_values_with_descriptions(fixture: &Fixture) {
    fixture.migrated().with_kinds(&["greet"]);
    let longshore = env!("CARGO_BIN_EXE_longshore");
    let folder = std::path::Path::new(longshore).parent().unwrap().display();
    let script = format!(
        "set -p PATH {folder}; longshore completions fish | source; \
         complete -C 'longshore jobs list --status fa'; complete -C 'longshore enqueue gr'; \
         complete -C 'longshore dead red'"
    );
    let mut command = Command::new("fish");
    command.args(["-c", &script]).env("DATABASE_URL", &fixture.url).env("LONGSHORE_CONFIG", "");
    match command.env_remove("LONGSHORE_SERVER").output() {
        Ok(output) => {
            let output = CommandOutput::of(output).ok().out;
            let redrive = "redrive\tEnqueue dead letters again, with a new set of attempts";
            assert_eq!(output.lines().collect::<Vec<_>>(), ["failed_permanent", "greet", redrive]);
        }
        Err(error) => skip(&format!("fish cannot run: {error}")),
    }
}

#[test]
fn without_a_queue_completion_offers_the_other_words() {
    // No target at all, a server that is not there, and one that does not respond.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    for server in [None, Some("http://127.0.0.1:1"), Some(silent.as_str())] {
        let complete = |line: &str| {
            let mut command = binary();
            command.args(["complete", "--"]).args(line.split(' '));
            command.envs(server.map(|server| ("LONGSHORE_SERVER", server)));
            CommandOutput::of(command.output().unwrap()).ok().out
        };
        assert_eq!(complete("jobs list --status q"), "queued\n", "{server:?}");
        assert_eq!(complete("enqueue s"), "send_email\nsummarize_text\n", "{server:?}");
        assert_eq!(complete("jobs list --queue d"), "default\n", "{server:?}");
        assert_eq!(complete("cron run "), "", "{server:?}");
    }
}

#[test]
fn manual_pages_are_printed_or_written_to_a_folder() {
    let page = CommandOutput::of(binary().args(["man", "jobs", "list"]).output().unwrap()).ok().out;
    assert!(page.starts_with(".TH LONGSHORE\\-JOBS\\-LIST 1"), "{page}");
    assert!(page.contains("\\-\\-status <STATUS>") && page.contains("failed_permanent"), "{page}");
    let folder = std::env::temp_dir().join(format!("longshore-man-{}", longshore::JobId::new()));
    let output = binary().args(["man", "--output"]).arg(&folder).output().unwrap();
    CommandOutput::of(output).ok();
    for name in ["longshore.1", "longshore-worker.1", "longshore-dead-redrive.1"] {
        assert!(folder.join(name).is_file(), "{name}");
    }
    assert!(!folder.join("longshore-complete.1").exists(), "a hidden command");
    std::fs::remove_dir_all(&folder).unwrap();
    let typo = CommandOutput::of(binary().args(["man", "jbos"]).output().unwrap());
    typo.fails_with(2, &["longshore jbos", "did you mean `jobs`?"]);
}
