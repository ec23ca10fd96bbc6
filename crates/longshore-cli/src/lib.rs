//! The `longshore` command: reads the command line and the configuration, runs one
//! command against a database or a server, and exits with a documented code.
//!
//! It is a library, because Cargo compiles a library while its dependencies are still being
//! optimised. A program waits until they are complete.

mod args;
mod commands;
mod config;
mod duration;
mod endpoint;
mod failure;
mod output;
mod secret;
mod traces;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use args::{ApiCommand, Cli, Command, LogFormat};
use config::{Configuration, Error};
use failure::{Code, Failure};
use output::{Out, Times, note, write_error};
use secret::redact;

/// Runs the command named by this process's arguments, and returns its exit code.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    output::print_notes_as_json(config::requests_json_log(&args));
    let ran = config::read(args).and_then(|(cli, configuration)| run(cli, &configuration));
    match ran {
        Ok(code) => ExitCode::from(code as u8),
        Err(Error::CommandLine(error)) => print_clap_error(&error),
        Err(Error::Failed(failure)) => {
            note(format_args!("error: {failure}"));
            ExitCode::from(failure.code as u8)
        }
    }
}

fn run(cli: Cli, configuration: &Configuration) -> Result<Code, Error> {
    let out = Out::new(cli.json, if cli.utc { Times::Utc } else { Times::Relative });
    let has_json_log = cli.command.log_format() == Some(LogFormat::Json);
    let out = if has_json_log { out.json_lines() } else { out };
    output::print_notes_as_json(has_json_log);
    let mut builder = match cli.command {
        Command::Api(ApiCommand::Bench(_)) | Command::Dev(_) | Command::Serve(_) | Command::Worker(_) => {
            tokio::runtime::Builder::new_multi_thread()
        }
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().build().map_err(|error| {
        Failure::new(Code::Problem, format_args!("the async runtime failed to start: {error}"))
    })?;
    let ran = runtime.block_on(commands::run(cli, configuration, &out));
    // Do not wait for handlers that block their thread: the worker has already stopped.
    runtime.shutdown_background();
    Ok(out.exit(ran?))
}

/// Prints help and version to standard output unchanged. An error goes to standard
/// error and is redacted, because it may quote an argument that contains a password.
fn print_clap_error(error: &clap::Error) -> ExitCode {
    if error.use_stderr() && output::prints_notes_as_json() {
        note(redact(&error.to_string()));
        return ExitCode::from(Code::Usage as u8);
    }
    if error.use_stderr() {
        eprint!("{}", redact(&error.to_string()));
        return ExitCode::from(Code::Usage as u8);
    }
    match error.print().and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            note(write_error(&error));
            ExitCode::from(Code::Problem as u8)
        }
        _ => ExitCode::from(Code::Done as u8),
    }
}
