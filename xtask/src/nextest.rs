//! Runs the Rust tests with cargo-nextest. Collects how long each test took, and holds back the
//! summary, so that the report about the run can stand above it.

use std::{
    io::{BufRead, BufReader, IsTerminal, Read},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use crate::run::{self, Result, cargo};

/// Whether cargo-nextest is installed.
pub(crate) fn is_installed() -> bool {
    run::succeeds(&mut cargo(["nextest", "--version"]))
}

/// `cargo nextest run` with what all runs need.
pub(crate) fn command() -> Command {
    let mut command = cargo(["nextest", "run", "--no-fail-fast"]);
    // Many tests wait most of the time. More at a time would not save more.
    let cores = thread::available_parallelism().map_or(1, usize::from);
    // Not an argument, which could not be given a second time.
    command.env("NEXTEST_TEST_THREADS", (TESTS_PER_CORE * cores).to_string());
    command
}

const TESTS_PER_CORE: usize = 2;

/// The end of a run.
pub(crate) struct Ended {
    /// The runner's own summary, with the list of failed tests.
    pub(crate) summary: String,
    /// The time and the name of each test that ran.
    pub(crate) tests: Vec<(Duration, String)>,
    pub(crate) result: Result,
}

impl Ended {
    /// The slowest tests, slowest first.
    pub(crate) fn slowest(&self, count: usize) -> Vec<(Duration, String)> {
        let mut tests = self.tests.clone();
        tests.sort_by(|one, other| other.cmp(one));
        tests.truncate(count);
        tests
    }
}

/// Runs `cargo nextest run` to its end. Prints what it prints, except for the summary.
pub(crate) fn run(name: &str, command: &mut Command) -> Result<Ended> {
    // Through a pipe nextest does not use colours by itself.
    let color = if std::io::stderr().is_terminal() { "--color=always" } else { "--color=never" };
    command.arg(color).stderr(Stdio::piped());
    run::print_command(name, command);
    let mut child = command.spawn().map_err(|error| format!("{name}: cargo nextest: {error}"))?;
    let mut output = Output::default();
    if let Some(stderr) = child.stderr.take() {
        output.read(stderr, |line| eprintln!("{line}"))?;
    }
    let status = child.wait()?;
    let result = if status.success() { Ok(()) } else { Err(format!("{name} failed ({status})").into()) };
    Ok(Ended { summary: output.summary, tests: output.tests, result })
}

#[derive(Default)]
struct Output {
    summary: String,
    tests: Vec<(Duration, String)>,
}

impl Output {
    fn read(&mut self, stderr: impl Read, mut print: impl FnMut(&str)) -> Result {
        // A line that begins the summary, if the next one does.
        let mut rule: Option<String> = None;
        for line in BufReader::new(stderr).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).into_owned();
            let plain = without_colors(&line);
            if !self.summary.is_empty() || plain.trim_start().starts_with("Summary [") {
                for line in rule.take().into_iter().chain([line]) {
                    self.summary += &line;
                    self.summary.push('\n');
                }
                continue;
            }
            if let Some(rule) = rule.take() {
                print(&rule);
            }
            if plain.starts_with("────") {
                rule = Some(line);
                continue;
            }
            self.tests.extend(ended_test(&plain));
            print(&line);
        }
        rule.iter().for_each(|rule| print(rule));
        Ok(())
    }
}

/// The time and the name in a line such as
/// `        PASS [   0.012s] (  12/3360) longshore::conformance claim::sqlite::a_case`.
fn ended_test(line: &str) -> Option<(Duration, String)> {
    let (status, rest) = line.trim_start().split_once(" [")?;
    // `SLOW` and `TERMINATING` lines are about tests that still run.
    if !matches!(status.trim(), "PASS" | "FAIL" | "LEAK" | "TIMEOUT" | "ABORT") && !status.starts_with("SIG")
    {
        return None;
    }
    let (seconds, name) = rest.split_once("s] ")?;
    let name = match name.strip_prefix('(') {
        Some(counted) => counted.split_once(") ")?.1,
        None => name,
    };
    let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
    Some((Duration::try_from_secs_f64(seconds.trim().parse().ok()?).ok()?, name))
}

/// The text without the sequences that colour it: `ESC [ … m`.
fn without_colors(line: &str) -> String {
    let mut parts = line.split("\u{1b}[");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain += part.split_once('m').map_or(part, |(_, rest)| rest);
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "────────────
 Nextest run ID 1 with nextest profile: default
    Starting 3 tests across 2 binaries
        PASS [   0.012s] (1/3) longshore::conformance claim::sqlite::a_case
        SLOW [>  60.000s] (───) longshore::conformance claim::sqlite::slow
        FAIL [   1.500s] (2/3) longshore keys::tests::a_key
  stderr ───
    PASS [not a result]
        PASS [  61.250s] (3/3) longshore::conformance claim::sqlite::slow
────────────
     Summary [  61.300s] 3 tests run: 2 passed (1 slow), 1 failed, 0 skipped
        FAIL [   1.500s] (2/3) longshore keys::tests::a_key
error: test run failed
";

    fn read(text: &str) -> (Output, String) {
        let mut output = Output::default();
        let mut printed = String::new();
        let read = output.read(text.as_bytes(), |line| printed += &format!("{line}\n"));
        read.expect("a slice is readable");
        (output, printed)
    }

    #[test]
    fn the_summary_is_held_back_and_the_rest_is_printed() {
        let (output, printed) = read(RUN);
        assert!(output.summary.starts_with("────────────\n     Summary [  61.300s] 3 tests"));
        assert!(output.summary.ends_with("error: test run failed\n"));
        assert_eq!(format!("{printed}{}", output.summary), RUN, "nothing is lost");
    }

    #[test]
    fn each_ended_test_counts_once() {
        let (output, _) = read(RUN);
        let ended = Ended { summary: output.summary, tests: output.tests, result: Ok(()) };
        let names = |count| ended.slowest(count).into_iter().map(|(_, name)| name).collect::<Vec<_>>();
        assert_eq!(
            names(9),
            [
                "longshore::conformance claim::sqlite::slow",
                "longshore keys::tests::a_key",
                "longshore::conformance claim::sqlite::a_case"
            ]
        );
        assert_eq!(names(1).len(), 1);
    }

    #[test]
    fn a_run_that_does_not_start_is_printed_whole() {
        let (output, printed) = read("error: could not compile\n────\n");
        assert_eq!((output.summary.as_str(), printed.as_str()), ("", "error: could not compile\n────\n"));
    }

    #[test]
    fn colours_do_not_hide_results() {
        let line = "\u{1b}[32;1m        PASS\u{1b}[0m [   0.500s] (1/3) \u{1b}[35;1mlongshore\u{1b}[0m a::b";
        assert_eq!(
            ended_test(&without_colors(line)),
            Some((Duration::from_millis(500), "longshore a::b".into()))
        );
    }
}
