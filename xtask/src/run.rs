//! Running cargo and other programs: where the workspace is, what a child's
//! environment looks like, and how a step is announced and timed.

use std::{
    env,
    error::Error,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// What every task returns. Tasks fail with a sentence for a person to read, so
/// there is nothing for a richer error type to distinguish.
pub(crate) type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

/// The workspace's root directory.
pub(crate) fn workspace() -> PathBuf {
    // What `cargo run` says now, before what was true at compile time: a target
    // directory may have been copied from another clone.
    let xtask = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    xtask.parent().unwrap_or(Path::new(".")).to_path_buf()
}

/// Where cargo puts what it builds.
pub(crate) fn target_dir() -> PathBuf {
    let given = env::var_os("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty());
    workspace().join(given.as_deref().unwrap_or(OsStr::new("target")))
}

/// `cargo <args>` in the workspace, as if it had been typed there.
pub(crate) fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(args).current_dir(workspace());
    // Build scripts such as ring's watch these; left in place, `cargo xtask`
    // and plain `cargo` would rebuild each other's work every time.
    for (name, _) in env::vars_os() {
        if describes_xtask(&name.to_string_lossy()) {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Runs one named step, saying what it does and how long it took.
pub(crate) fn step(name: &str, command: &mut Command) -> Result {
    announce(name, command);
    let began = Instant::now();
    finish(name, command)?;
    eprintln!("    {name}: ok, {}", took(began.elapsed()));
    Ok(())
}

/// Runs the step whose own last lines are to be the last that is printed.
pub(crate) fn last_step(name: &str, command: &mut Command) -> Result {
    announce(name, command);
    finish(name, command)
}

/// Whether `command` runs and succeeds; its output is nobody's business.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// A duration as one would say it.
pub(crate) fn took(duration: Duration) -> String {
    match duration.as_secs() {
        0..60 => format!("{:.1}s", duration.as_secs_f64()),
        seconds => format!("{}m {:02}s", seconds / 60, seconds % 60),
    }
}

fn announce(name: &str, command: &Command) {
    eprintln!("==> {name}: {}", typed(command));
}

fn finish(name: &str, command: &mut Command) -> Result {
    let status =
        command.status().map_err(|error| format!("{name}: cannot run `{}`: {error}", typed(command)))?;
    if status.success() {
        return Ok(());
    }
    Err(format!("{name} failed ({status}): {}", typed(command)).into())
}

/// The command as one would type it to run the step again.
fn typed(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut line = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

/// Whether `cargo run` set this variable to describe this program.
fn describes_xtask(variable: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|prefix| variable.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_keep_the_settings_and_lose_the_description_of_xtask() {
        assert!(describes_xtask("CARGO_PKG_NAME"));
        assert!(describes_xtask("CARGO_MANIFEST_DIR"));
        assert!(!describes_xtask("CARGO_TARGET_DIR"));
        assert!(!describes_xtask("CARGO_TERM_COLOR"));
        assert!(!describes_xtask("CARGO"));
    }

    #[test]
    fn a_step_reads_as_it_would_be_typed() {
        let mut command = Command::new("/toolchain/bin/cargo");
        command.args(["fmt", "--all"]);
        assert_eq!(typed(&command), "cargo fmt --all");
    }

    #[test]
    fn durations_turn_to_minutes_after_the_first() {
        assert_eq!(took(Duration::from_millis(1_240)), "1.2s");
        assert_eq!(took(Duration::from_secs(125)), "2m 05s");
    }

    #[test]
    fn a_failed_step_names_itself() {
        let error = last_step("lints", &mut Command::new("false")).expect_err("false fails");
        assert!(error.to_string().starts_with("lints failed"), "{error}");
    }
}
