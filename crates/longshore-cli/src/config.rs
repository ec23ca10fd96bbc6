//! Combines the command line, environment variables and the configuration file. Every
//! command uses the same precedence: flag, variable, file, default.
//!
//! The command line is parsed twice. The first pass finds the file; then the file's
//! values replace clap's defaults, and the second pass produces the final values. So the
//! flags remain the only list of settings, and code that reads an argument does not need
//! to know where its value came from. The keys are in [`settings`]; finding and parsing
//! the file is in [`file`].

mod file;
mod settings;

use std::ffi::OsString;

use clap::error::ContextKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches};

use crate::args::Cli;
use crate::failure::Failure;
use crate::output::note;

pub(crate) use file::File;
pub(crate) use settings::{Setting, Settings, TABLES, Takes};

/// The command line and the configuration file.
#[derive(Debug)]
pub(crate) struct Configuration {
    args: Vec<OsString>,
    pub(crate) settings: Settings,
    pub(crate) file: Option<File>,
}

/// Why the command did not complete.
#[derive(Debug)]
pub(crate) enum Error {
    /// Help or the version was requested, or the command line is invalid.
    CommandLine(clap::Error),
    /// The file is invalid, or the command failed.
    Failed(Failure),
}

impl From<clap::Error> for Error {
    fn from(error: clap::Error) -> Self {
        Error::CommandLine(error)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Error::Failed(failure)
    }
}

/// Parses the command line and, for settings that neither the command line nor a
/// variable sets, the file.
pub(crate) fn read(args: impl IntoIterator<Item = OsString>) -> Result<(Cli, Configuration), Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let settings = Settings::of(&Cli::command());
    // The first pass ignores the file. It finds out which file to read, prints help even
    // if the file is invalid, and reports errors in flags and variables as such.
    let typed = without_file(Cli::command()).try_get_matches_from(&args)?;
    let file = File::find(typed.get_one::<OsString>("config").map(OsString::as_os_str), &settings)?;
    if let Some(warning) = file.as_ref().and_then(File::permission_warning) {
        note(format_args!("warning: {warning}"));
    }
    let configuration = Configuration { args, settings, file };
    let matches = configuration.matches()?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    cli.target.record_sources(&matches);
    Ok((cli, configuration))
}

/// Whether this is a command with a JSON log, as far as can be seen before the command line and
/// the file are parsed: the error of an invalid command line or file is JSON too.
pub(crate) fn requests_json_log(args: &[OsString]) -> bool {
    let words: Vec<&str> = args.iter().skip(1).filter_map(|word| word.to_str()).collect();
    let has_log = |word: &&str| ["dev", "serve", "worker"].contains(word);
    // Another command can have such a word as an argument, like `config show worker`.
    let command = || {
        let root = Cli::command();
        words.iter().find(|word| root.find_subcommand(word).is_some())
    };
    if !words.iter().any(has_log) || !command().is_some_and(has_log) {
        return false;
    }
    let flag = |name: &str| {
        let value_at = |at: usize| match words[at].strip_prefix(name)? {
            "" => words.get(at + 1).copied(),
            value => value.strip_prefix('='),
        };
        (0..words.len()).find_map(value_at).map(OsString::from)
    };
    let setting = |name: &str, variable: &str| flag(name).or_else(|| std::env::var_os(variable));
    match setting("--log-format", "RUST_LOG_FORMAT") {
        Some(format) => format == "json",
        None => {
            File::log_format(setting("--config", "LONGSHORE_CONFIG").as_deref()).as_deref() == Some("json")
        }
    }
}

impl Configuration {
    /// The matches of the actual command line, including the file's values.
    pub(crate) fn matches(&self) -> Result<ArgMatches, Error> {
        self.matches_for(&self.args)
    }

    /// The matches as if `command` had been run with only the global flags of the actual
    /// command line.
    pub(crate) fn matches_of(&self, command: &str) -> Result<ArgMatches, Error> {
        let typed = self.matches()?;
        let mut args: Vec<OsString> = vec!["longshore".into(), command.into()];
        for arg in Cli::command().get_arguments().filter(|arg| arg.get_env().is_some()) {
            let (id, flag) = (arg.get_id().as_str(), arg.get_long().unwrap_or_default());
            if typed.value_source(id) == Some(ValueSource::CommandLine) {
                for value in typed.get_raw(id).into_iter().flatten() {
                    args.extend([format!("--{flag}").into(), value.to_owned()]);
                }
            }
        }
        self.matches_for(&args)
    }

    fn matches_for(&self, args: &[OsString]) -> Result<ArgMatches, Error> {
        let Some(file) = &self.file else { return Ok(Cli::command().try_get_matches_from(args)?) };
        let typed = without_file(Cli::command()).try_get_matches_from(args)?;
        let command = with_values(Cli::command(), file, Some(&typed));
        Ok(command.try_get_matches_from(args).map_err(|error| locate_in_file(file, &error))?)
    }
}

/// The command for the first pass. Nothing with a variable is required, because the file
/// may provide it.
fn without_file(command: Command) -> Command {
    let command = command.mut_subcommands(without_file);
    command.mut_args(|arg| if arg.get_env().is_some() { arg.required(false) } else { arg })
}

/// The command with the file's values as defaults. `typed` has the values from the
/// command line and the variables, if this is the command being run.
fn with_values(command: Command, file: &File, typed: Option<&ArgMatches>) -> Command {
    let excluded = typed.map(|typed| excluded(&command, typed)).unwrap_or_default();
    let chosen = typed.and_then(ArgMatches::subcommand);
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    let command = names.into_iter().fold(command, |command, name| {
        let typed = chosen.filter(|(chosen, _)| *chosen == name).map(|(_, typed)| typed);
        command.mut_subcommand(name, |sub| with_values(sub, file, typed))
    });
    command.mut_args(|arg| match file.values(&arg) {
        Some(values) if !excluded.contains(arg.get_id()) => {
            arg.required(false).default_values(values.to_vec())
        }
        _ => arg,
    })
}

/// The arguments that conflict with one given on the command line or in a variable. The
/// stronger source wins, so the file's values for these arguments are ignored.
fn excluded(command: &Command, typed: &ArgMatches) -> Vec<clap::Id> {
    let given: Vec<&Arg> = command
        .get_arguments()
        .filter(|arg| {
            typed
                .value_source(arg.get_id().as_str())
                .is_some_and(|source| source != ValueSource::DefaultValue)
        })
        .collect();
    let conflicts = |one: &Arg, other: &Arg| {
        command.get_arg_conflicts_with(one).iter().any(|arg| arg.get_id() == other.get_id())
    };
    command
        .get_arguments()
        .filter(|arg| given.iter().any(|given| conflicts(given, arg) || conflicts(arg, given)))
        .map(|arg| arg.get_id().clone())
        .collect()
}

/// Turns clap's error about a value from the file into one that names the file and line.
fn locate_in_file(file: &File, error: &clap::Error) -> Failure {
    let argument = error.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default();
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let text = text.split("\n\n").next().unwrap_or(text);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Failure::usage(format_args!("{}: {text}", file.location_of(&argument)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A command with a required setting and two that exclude each other. No real command
    /// has these yet.
    fn crane() -> Command {
        Command::new("crane")
            .arg(Arg::new("load").long("load").env("CRANE_TEST_LOAD").required(true))
            .arg(Arg::new("hook").long("hook").env("CRANE_TEST_HOOK"))
            .arg(Arg::new("belt").long("belt").env("CRANE_TEST_BELT").conflicts_with("hook"))
    }

    /// The values of load, hook and belt for this file and these arguments.
    fn parsed(text: &str, args: &[&str]) -> Result<[Option<String>; 3], String> {
        let file = File::parse("crane.toml".into(), text, &Settings::of(&crane())).unwrap();
        let args: Vec<&str> = std::iter::once("crane").chain(args.iter().copied()).collect();
        let typed = without_file(crane()).try_get_matches_from(&args);
        let typed = typed.map_err(|error| error.to_string())?;
        let matches = with_values(crane(), &file, Some(&typed)).try_get_matches_from(&args);
        let matches = matches.map_err(|error| error.to_string())?;
        Ok(["load", "hook", "belt"].map(|id| matches.get_one::<String>(id).cloned()))
    }

    #[test]
    fn a_json_log_is_recognised_on_an_invalid_command_line() {
        for (line, expected) in [
            ("worker --log-format json --nonsense", true),
            ("--nonsense serve --log-format=json", true),
            ("worker --log-format pretty", false),
            ("worker --log-format", false),
            ("jobs list --log-format json", false),
            ("config show worker --log-format json", false),
        ] {
            let words: Vec<OsString> = format!("longshore {line}").split(' ').map(Into::into).collect();
            assert_eq!(requests_json_log(&words), expected, "{line}");
        }
    }

    #[test]
    fn a_required_setting_can_come_from_the_file() {
        let [load, ..] = parsed("client.load = '3t'", &[]).unwrap();
        assert_eq!(load.as_deref(), Some("3t"));
        assert!(parsed("", &[]).unwrap_err().contains("--load"), "no file provides it");
    }

    #[test]
    fn a_flag_overrides_conflicting_settings_of_the_file() {
        let file = "[client]\nload = '3t'\nhook = 'big'";
        let [_, hook, belt] = parsed(file, &["--belt", "wide"]).unwrap();
        assert_eq!((hook.as_deref(), belt.as_deref()), (None, Some("wide")));
        let [_, hook, belt] = parsed(file, &[]).unwrap();
        assert_eq!((hook.as_deref(), belt.as_deref()), (Some("big"), None));
        let error = parsed(file, &["--belt", "wide", "--hook", "small"]).unwrap_err();
        assert!(error.contains("cannot be used with"), "{error}");
    }
}
