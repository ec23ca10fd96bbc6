//! Running cargo and other programs: the workspace's directories, the environment of
//! child processes, and printing and timing steps.

use std::{
    env,
    error::Error,
    ffi::OsStr,
    fmt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// The result of every task. Errors are messages for people; no caller distinguishes
/// them, so there is no error type.
pub(crate) type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

/// A program or a package that a task needs is not available here, so the task tested nothing.
#[derive(Debug)]
pub(crate) struct Unavailable(pub(crate) String);

impl Error for Unavailable {}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The workspace's root directory.
pub(crate) fn workspace() -> PathBuf {
    // Prefer the variable that `cargo run` sets over the value at compile time,
    // because the target directory may have been copied from another clone.
    let xtask = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    xtask.parent().unwrap_or(Path::new(".")).to_path_buf()
}

/// The directory that cargo builds in.
pub(crate) fn target_dir() -> PathBuf {
    let given = env::var_os("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty());
    workspace().join(given.as_deref().unwrap_or(OsStr::new("target")))
}

/// `cargo <args>` in the workspace, as if typed in a shell there.
pub(crate) fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(args).current_dir(workspace());
    // Build scripts such as ring's rerun when these variables change. If they were
    // passed on, `cargo xtask` and plain `cargo` would rebuild after each other.
    for (name, _) in env::vars_os() {
        if describes_xtask(&name.to_string_lossy()) {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Runs a named step; prints its command and how long it took.
pub(crate) fn step(name: &str, command: &mut Command) -> Result {
    print_command(name, command);
    let started = Instant::now();
    run_to_success(name, command)?;
    eprintln!("    {name}: ok, {}", took(started.elapsed()));
    Ok(())
}

/// Runs the last step of a task: prints nothing after the output of the command.
pub(crate) fn last_step(name: &str, command: &mut Command) -> Result {
    print_command(name, command);
    run_to_success(name, command)
}

/// Whether `command` runs and succeeds. Its output is discarded.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// A duration for people to read.
pub(crate) fn took(duration: Duration) -> String {
    match duration.as_secs() {
        0..60 => format!("{:.1}s", duration.as_secs_f64()),
        seconds => format!("{}m {:02}s", seconds / 60, seconds % 60),
    }
}

/// Prints the name of a step and the command to type to run it again.
pub(crate) fn print_command(name: &str, command: &Command) {
    eprintln!("==> {name}: {}", command_line(command));
}

fn run_to_success(name: &str, command: &mut Command) -> Result {
    let status = command
        .status()
        .map_err(|error| format!("{name}: cannot run `{}`: {error}", command_line(command)))?;
    if status.success() {
        return Ok(());
    }
    Err(format!("{name} failed ({status}): {}", command_line(command)).into())
}

/// The command line to type to run the step again.
fn command_line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut line = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    for arg in command.get_args() {
        line.push(' ');
        line.push_str(&arg.to_string_lossy());
    }
    line
}

/// Whether this is a variable that `cargo run` sets to describe this program.
fn describes_xtask(variable: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|prefix| variable.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_inherit_cargos_settings_but_not_the_variables_about_xtask() {
        assert!(describes_xtask("CARGO_PKG_NAME"));
        assert!(describes_xtask("CARGO_MANIFEST_DIR"));
        assert!(!describes_xtask("CARGO_TARGET_DIR"));
        assert!(!describes_xtask("CARGO_TERM_COLOR"));
        assert!(!describes_xtask("CARGO"));
    }

    #[test]
    fn a_command_line_names_the_program_without_its_directory() {
        let mut command = Command::new("/toolchain/bin/cargo");
        command.args(["fmt", "--all"]);
        assert_eq!(command_line(&command), "cargo fmt --all");
    }

    #[test]
    fn durations_from_a_minute_on_are_in_minutes() {
        assert_eq!(took(Duration::from_millis(1_240)), "1.2s");
        assert_eq!(took(Duration::from_secs(125)), "2m 05s");
    }

    #[test]
    fn the_error_of_a_failed_step_names_the_step() {
        let error = last_step("lints", &mut Command::new("false")).expect_err("false fails");
        assert!(error.to_string().starts_with("lints failed"), "{error}");
    }
}
