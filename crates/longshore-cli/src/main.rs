//! The `longshore` command: reads the command line, finds the queue (a database
//! or a server), runs one command and exits with a code that programs can act on.

mod args;
mod builtin;
mod commands;
mod config;
mod duration;
mod endpoint;
mod failure;
mod output;
mod secret;

use std::io::{self, Write};
use std::process::ExitCode;

use args::{ApiCommand, Cli, Command};
use config::{Configuration, Refused};
use failure::{Code, Failure};
use output::{Out, note, unwritten};
use secret::redact;

fn main() -> ExitCode {
    let ran = config::read(std::env::args_os()).and_then(|(cli, configuration)| run(cli, &configuration));
    match ran {
        Ok(code) => ExitCode::from(code as u8),
        Err(Refused::Line(error)) => explain(&error),
        Err(Refused::Failed(failure)) => {
            note(format_args!("error: {failure}"));
            ExitCode::from(failure.code as u8)
        }
    }
}

fn run(cli: Cli, configuration: &Configuration) -> Result<Code, Refused> {
    let out = Out::new(cli.json);
    let mut builder = match cli.command {
        Command::Api(ApiCommand::Bench(_)) | Command::Dev(_) | Command::Serve(_) | Command::Worker(_) => {
            tokio::runtime::Builder::new_multi_thread()
        }
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Code::Problem, format_args!("the runtime does not start: {error}")))?;
    let ran = runtime.block_on(commands::run(cli, configuration, &out));
    // A handler that blocks its thread must not keep a worker that has ended.
    runtime.shutdown_background();
    Ok(out.exit(ran?))
}

/// Help and version go to standard output as they are; a refused command line
/// may repeat what was typed, and that may hold a password.
fn explain(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        eprint!("{}", redact(&error.to_string()));
        return ExitCode::from(Code::Usage as u8);
    }
    match error.print().and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            note(unwritten(&error));
            ExitCode::from(Code::Problem as u8)
        }
        _ => ExitCode::from(Code::Done as u8),
    }
}
