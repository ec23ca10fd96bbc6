//! The steps of `test` and `ci`, and the report about them: how long each took, and what did not
//! run.

use std::{
    fmt::Write as _,
    process::Command,
    time::{Duration, Instant},
};

use crate::run::{self, Result, took};

/// The steps of a run, in the order in which they ended.
pub(crate) struct Steps {
    began: Instant,
    steps: Vec<Step>,
    /// What did not run, each with the reason.
    left_out: Vec<(String, String)>,
}

/// A step that has ended.
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) duration: Duration,
    pub(crate) place: Place,
}

/// When a step ran.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Place {
    /// After the step before it.
    InSequence,
    /// At the same time as other steps. Its time is not a part of the total.
    Beside,
}

impl Steps {
    pub(crate) fn new() -> Steps {
        Steps { began: Instant::now(), steps: Vec::new(), left_out: Vec::new() }
    }

    /// Runs a command as a step; see [`run::step`].
    pub(crate) fn run(&mut self, name: &str, command: &mut Command) -> Result {
        self.time(name, || run::step(name, command))
    }

    /// Does something as a step, and records its time.
    pub(crate) fn time<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let began = Instant::now();
        let result = work();
        self.add(Step { name: name.to_owned(), duration: began.elapsed(), place: Place::InSequence });
        result
    }

    pub(crate) fn add(&mut self, step: Step) {
        self.steps.push(step);
    }

    /// Records that a part of the run is missing.
    pub(crate) fn leave_out(&mut self, name: &str, reason: &str) {
        eprintln!("==> {name}: does not run, {reason}");
        self.left_out.push((name.to_owned(), reason.to_owned()));
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The table of times, the slowest tests, what did not run, and what failed.
    pub(crate) fn report(&self, slowest: &[(Duration, String)], failures: &[String]) -> String {
        let mut report = "==> steps\n".to_owned();
        let width = self.steps.iter().map(|step| step.name.len()).max().unwrap_or_default().max(5);
        let mut row = |name: &str, duration: Duration, note: &str| {
            let _ = writeln!(report, "    {name:<width$} {:>8}{note}", took(duration));
        };
        for step in &self.steps {
            let note = if step.place == Place::Beside { "  beside other steps" } else { "" };
            row(&step.name, step.duration, note);
        }
        row("total", self.began.elapsed(), "");
        if !slowest.is_empty() {
            let _ = writeln!(report, "==> the {} slowest tests", slowest.len());
        }
        for (duration, test) in slowest {
            let _ = writeln!(report, "    {:>8} {test}", took(*duration));
        }
        if self.left_out.is_empty() && failures.is_empty() {
            report.push_str("==> everything ran\n");
        }
        let left_out = self.left_out.iter().map(|(name, reason)| format!("{name}: {reason}"));
        for (title, lines) in [("DID NOT RUN", left_out.collect()), ("FAILED", failures.to_vec())] {
            if !lines.is_empty() {
                let _ = writeln!(report, "==> {title}\n    {}", lines.join("\n    "));
            }
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: &str, seconds: u64, place: Place) -> Step {
        Step { name: name.into(), duration: Duration::from_secs(seconds), place }
    }

    #[test]
    fn the_report_lists_steps_slow_tests_what_did_not_run_and_what_failed() {
        let mut steps = Steps::new();
        steps.add(step("format", 2, Place::InSequence));
        steps.add(step("browser", 61, Place::Beside));
        steps.leave_out("sdks", "`npm` is missing");
        let slowest = [(Duration::from_secs(9), "conformance claim::sqlite::a_test".into())];
        let report = steps.report(&slowest, &["browser: exit status 1".into()]);
        let lines: Vec<&str> = report.lines().collect();
        assert_eq!(
            [&lines[..3], &lines[4..]].concat(),
            [
                "==> steps",
                "    format      2.0s",
                "    browser   1m 01s  beside other steps",
                "==> the 1 slowest tests",
                "        9.0s conformance claim::sqlite::a_test",
                "==> DID NOT RUN",
                "    sdks: `npm` is missing",
                "==> FAILED",
                "    browser: exit status 1",
            ]
        );
        assert!(lines[3].starts_with("    total"), "{}", lines[3]);
    }

    #[test]
    fn a_complete_run_says_so() {
        assert!(Steps::new().report(&[], &[]).ends_with("==> everything ran\n"));
        assert!(!Steps::new().report(&[], &["it failed".into()]).contains("everything ran"));
    }

    #[test]
    fn a_failed_step_is_recorded_too() {
        let mut steps = Steps::new();
        assert!(steps.run("lints", &mut Command::new("false")).is_err());
        assert!(steps.report(&[], &[]).contains("    lints"));
    }
}
