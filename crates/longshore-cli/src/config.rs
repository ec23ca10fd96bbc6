//! One precedence for every command: the flag, the variable, the file, the
//! default.
//!
//! What the file says takes the place of clap's defaults before the line is
//! read again. So the flags stay the one list of settings, and whoever reads an
//! argument need not know where it came from. Which keys there are is in
//! [`settings`], how the file is found and read in [`file`].

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

/// What was typed and what the file says.
#[derive(Debug)]
pub(crate) struct Configuration {
    words: Vec<OsString>,
    pub(crate) settings: Settings,
    pub(crate) file: Option<File>,
}

/// Why nothing came of it.
#[derive(Debug)]
pub(crate) enum Refused {
    /// Help was asked for, or the command line is wrong.
    Line(clap::Error),
    /// The file is wrong, or the command did not do what was asked.
    Failed(Failure),
}

impl From<clap::Error> for Refused {
    fn from(error: clap::Error) -> Self {
        Refused::Line(error)
    }
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Refused::Failed(failure)
    }
}

/// Reads the command line, and the file where the line and the variables are
/// silent.
pub(crate) fn read(words: impl IntoIterator<Item = OsString>) -> Result<(Cli, Configuration), Refused> {
    let words: Vec<OsString> = words.into_iter().collect();
    let settings = Settings::of(&Cli::command());
    // Once without the file: it says which file, help needs none, and what is
    // wrong now is wrong on the command line or in a variable.
    let typed = without_file(Cli::command()).try_get_matches_from(&words)?;
    let file = File::find(typed.get_one::<OsString>("config").map(OsString::as_os_str), &settings)?;
    if let Some(warning) = file.as_ref().and_then(File::too_open) {
        note(format_args!("warning: {warning}"));
    }
    let configuration = Configuration { words, settings, file };
    let matches = configuration.matches()?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    cli.target.note_sources(&matches);
    Ok((cli, configuration))
}

impl Configuration {
    /// What was typed, with the values of the file.
    pub(crate) fn matches(&self) -> Result<ArgMatches, Refused> {
        self.matches_for(&self.words)
    }

    /// The same if `command` had been typed, with no flags but the global ones.
    pub(crate) fn matches_of(&self, command: &str) -> Result<ArgMatches, Refused> {
        let typed = self.matches()?;
        let mut words: Vec<OsString> = vec!["longshore".into(), command.into()];
        for arg in Cli::command().get_arguments().filter(|arg| arg.get_env().is_some()) {
            let (id, flag) = (arg.get_id().as_str(), arg.get_long().unwrap_or_default());
            if typed.value_source(id) == Some(ValueSource::CommandLine) {
                for value in typed.get_raw(id).into_iter().flatten() {
                    words.extend([format!("--{flag}").into(), value.to_owned()]);
                }
            }
        }
        self.matches_for(&words)
    }

    fn matches_for(&self, words: &[OsString]) -> Result<ArgMatches, Refused> {
        let Some(file) = &self.file else { return Ok(Cli::command().try_get_matches_from(words)?) };
        let typed = without_file(Cli::command()).try_get_matches_from(words)?;
        let command = with_values(Cli::command(), file, Some(&typed));
        Ok(command.try_get_matches_from(words).map_err(|error| blame(file, &error))?)
    }
}

/// The command before the file is known: it may have what is required.
fn without_file(command: Command) -> Command {
    let command = command.mut_subcommands(without_file);
    command.mut_args(|arg| if arg.get_env().is_some() { arg.required(false) } else { arg })
}

/// The command with the file's values for defaults. `typed` is what the command
/// line and the variables say to it, if it is the one that was asked for.
fn with_values(command: Command, file: &File, typed: Option<&ArgMatches>) -> Command {
    let outdone = typed.map(|typed| outdone(&command, typed)).unwrap_or_default();
    let asked = typed.and_then(ArgMatches::subcommand);
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    let command = names.into_iter().fold(command, |command, name| {
        let typed = asked.filter(|(asked, _)| *asked == name).map(|(_, typed)| typed);
        command.mut_subcommand(name, |sub| with_values(sub, file, typed))
    });
    command.mut_args(|arg| match file.values(&arg) {
        Some(values) if !outdone.contains(arg.get_id()) => {
            arg.required(false).default_values(values.to_vec())
        }
        _ => arg,
    })
}

/// The arguments that may not stand beside one that was typed: what is nearer
/// wins, so the file does not speak for them.
fn outdone(command: &Command, typed: &ArgMatches) -> Vec<clap::Id> {
    let given: Vec<&Arg> = command
        .get_arguments()
        .filter(|arg| {
            typed
                .value_source(arg.get_id().as_str())
                .is_some_and(|source| source != ValueSource::DefaultValue)
        })
        .collect();
    let forbids = |one: &Arg, other: &Arg| {
        command.get_arg_conflicts_with(one).iter().any(|arg| arg.get_id() == other.get_id())
    };
    command
        .get_arguments()
        .filter(|arg| given.iter().any(|given| forbids(given, arg) || forbids(arg, given)))
        .map(|arg| arg.get_id().clone())
        .collect()
}

/// Says where in the file the value stands that was refused.
fn blame(file: &File, error: &clap::Error) -> Failure {
    let argument = error.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default();
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let text = text.split("\n\n").next().unwrap_or(text);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Failure::usage(format_args!("{}: {text}", file.place_of(&argument)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Like commands to come: a required setting, and two that exclude each other.
    fn crane() -> Command {
        Command::new("crane")
            .arg(Arg::new("load").long("load").env("CRANE_TEST_LOAD").required(true))
            .arg(Arg::new("hook").long("hook").env("CRANE_TEST_HOOK"))
            .arg(Arg::new("belt").long("belt").env("CRANE_TEST_BELT").conflicts_with("hook"))
    }

    fn lifted(text: &str, words: &[&str]) -> Result<[Option<String>; 3], String> {
        let file = File::parse("crane.toml".into(), text, &Settings::of(&crane())).unwrap();
        let words: Vec<&str> = std::iter::once("crane").chain(words.iter().copied()).collect();
        let typed = without_file(crane()).try_get_matches_from(&words);
        let typed = typed.map_err(|error| error.to_string())?;
        let matches = with_values(crane(), &file, Some(&typed)).try_get_matches_from(&words);
        let matches = matches.map_err(|error| error.to_string())?;
        Ok(["load", "hook", "belt"].map(|id| matches.get_one::<String>(id).cloned()))
    }

    #[test]
    fn a_required_setting_may_come_from_the_file() {
        let [load, ..] = lifted("client.load = '3t'", &[]).unwrap();
        assert_eq!(load.as_deref(), Some("3t"));
        assert!(lifted("", &[]).unwrap_err().contains("--load"), "without a file it is missing");
    }

    #[test]
    fn what_excludes_a_setting_of_the_file_silences_it() {
        let file = "[client]\nload = '3t'\nhook = 'big'";
        let [_, hook, belt] = lifted(file, &["--belt", "wide"]).unwrap();
        assert_eq!((hook.as_deref(), belt.as_deref()), (None, Some("wide")));
        let [_, hook, belt] = lifted(file, &[]).unwrap();
        assert_eq!((hook.as_deref(), belt.as_deref()), (Some("big"), None));
        let refused = lifted(file, &["--belt", "wide", "--hook", "small"]).unwrap_err();
        assert!(refused.contains("cannot be used with"), "{refused}");
    }
}
