//! Running a command for at most a given time, or until it is no longer needed.
//!
//! The command gets its own process group, because a hung test is usually a
//! grandchild (cargo starts the test program) and killing cargo alone would leave
//! it running.

use std::{
    os::unix::process::CommandExt,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::run::Result;

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Runs `command` to its end and returns its status. After `limit`, kills its
/// whole process group and returns `None`.
///
/// Redirect the output to files, not to pipes: this function does not read pipes.
pub(crate) fn status_within(limit: Duration, command: &mut Command) -> Result<Option<ExitStatus>> {
    let started = Instant::now();
    status_unless(&|| started.elapsed() >= limit, command)
}

/// As [`status_within`], but kills the command as soon as `is_over` returns true.
pub(crate) fn status_unless(is_over: &dyn Fn() -> bool, command: &mut Command) -> Result<Option<ExitStatus>> {
    let mut child = command.process_group(0).spawn()?;
    let mut killer = GroupKiller::watch(child.id())?;
    while !is_over() {
        if let Some(status) = child.try_wait()? {
            killer.dismiss();
            return Ok(Some(status));
        }
        thread::sleep(POLL_INTERVAL);
    }
    killer.kill_group();
    // Already dead, unless `kill` failed; then at least `wait` must not hang.
    let _ = child.kill();
    child.wait()?;
    Ok(None)
}

/// A shell that kills a process group when its standard input closes. That also
/// happens when this program is interrupted or killed: the group is not the
/// terminal's foreground group, so Ctrl-C does not reach it.
struct GroupKiller {
    shell: Child,
}

const KILL_GROUP: &str = r#"
    trap '' HUP INT TERM
    read -r _
    kill -s KILL -- "-$1"
"#;

impl GroupKiller {
    fn watch(group: u32) -> Result<GroupKiller> {
        let shell = Command::new("sh")
            .args(["-c", KILL_GROUP, "sh", &group.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("sh: {error}"))?;
        Ok(GroupKiller { shell })
    }

    fn kill_group(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }

    /// Ends the shell without killing the group, whose id may be reused by now.
    fn dismiss(mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

impl Drop for GroupKiller {
    fn drop(&mut self) {
        self.kill_group();
    }
}

#[cfg(test)]
mod tests {
    use std::{env, fs};

    use super::*;

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).stdin(Stdio::null());
        shell
    }

    #[test]
    fn a_command_that_ends_in_time_returns_its_status() {
        let status = status_within(Duration::from_secs(60), &mut shell("exit 7")).expect("sh runs");
        assert_eq!(status.and_then(|status| status.code()), Some(7));
    }

    #[test]
    fn a_command_that_hangs_is_killed_with_its_children() {
        let pid_file = env::temp_dir().join(format!("longshore-time-limit-{}", std::process::id()));
        let script = format!("sleep 600 & echo $! > {}; wait", pid_file.display());
        let mut limit = Duration::from_millis(500);
        let child = loop {
            let started = Instant::now();
            assert_eq!(status_within(limit, &mut shell(&script)).expect("sh runs"), None);
            assert!(started.elapsed() < Duration::from_secs(300), "nothing waits for the sleep to end");
            // On a slow machine, the limit may be over before the script has started its child.
            match fs::read_to_string(&pid_file) {
                Ok(child) if child.ends_with('\n') => break child,
                _ => limit *= 4,
            }
        };
        fs::remove_file(&pid_file).expect("the file is ours");
        assert!(has_ended(child.trim()), "process {child} is still running");
    }

    /// Whether the process is gone, or a zombie that its new parent has not
    /// collected yet. Waits for up to a minute, because a kill takes effect asynchronously.
    fn has_ended(pid: &str) -> bool {
        let ended = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(')').is_none_or(|(_, fields)| fields.trim_start().starts_with('Z'))
        };
        (0..1200).any(|_| {
            thread::sleep(POLL_INTERVAL);
            ended()
        })
    }
}
