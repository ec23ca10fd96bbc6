//! `longshore config`: shows and checks the effective settings and where they come from.

use clap::ArgMatches;
use clap::parser::ValueSource;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{Config, Show, Shown};
use crate::config::{Configuration, Error, Setting, TABLES, Takes};
use crate::failure::Code;
use crate::output::{Fit, Out, Table};
use crate::secret;

pub(crate) fn run(command: &Config, configuration: &Configuration, out: &Out) -> Result<Code, Error> {
    match command {
        Config::Show(args) => show(args, configuration, out),
        Config::Check => check(configuration, out),
    }
}

fn show(args: &Show, configuration: &Configuration, out: &Out) -> Result<Code, Error> {
    let parsed = match args.command {
        Some(Shown::Worker(_)) => vec![("worker", configuration.matches()?)],
        Some(Shown::Serve(_)) => vec![("serve", configuration.matches()?)],
        Some(Shown::Dev(_)) => vec![("dev", configuration.matches()?)],
        None => as_every_command(configuration)?,
    };
    let known = configuration.settings.iter();
    let shown: Vec<Effective> = known
        .filter_map(|setting| {
            let (_, matches) = parsed.iter().find(|(command, _)| setting.belongs_to(command))?;
            Some(Effective::of(setting, innermost(matches), configuration))
        })
        .collect();
    if out.json {
        let file = configuration.file.as_ref().map(|file| &file.path);
        out.document(&json!({ "file": file, "settings": shown }));
        return Ok(Code::Done);
    }
    let mut table = Table::new([("setting", Fit::Whole), ("value", Fit::Cut), ("from", Fit::Cut)]);
    for setting in shown {
        table.row([setting.key, text(&setting.value), setting.source]);
    }
    out.table(&table, "no settings");
    Ok(Code::Done)
}

fn check(configuration: &Configuration, out: &Out) -> Result<Code, Error> {
    as_every_command(configuration)?;
    let file = configuration.file.as_ref();
    if out.json {
        out.document(&json!({
            "file": file.map(|file| &file.path),
            "settings": file.map_or(0, |file| file.len()),
        }));
        return Ok(Code::Done);
    }
    match file {
        Some(file) => {
            out.line(format_args!("{} is valid; settings: {}", file.path.display(), file.len()));
        }
        None => out.line("no configuration file; the environment variables are valid"),
    }
    Ok(Code::Done)
}

/// The command line parsed as each command that has settings.
fn as_every_command(configuration: &Configuration) -> Result<Vec<(&'static str, ArgMatches)>, Error> {
    TABLES.iter().map(|(command, _)| Ok((*command, configuration.matches_of(command)?))).collect()
}

/// The effective value of one setting.
#[derive(Debug, Serialize)]
struct Effective {
    key: String,
    value: Value,
    /// The type of source: flag, variable, file or default.
    from: &'static str,
    /// The exact source, like `longshore.toml:12`.
    source: String,
    flag: String,
    variable: String,
}

impl Effective {
    fn of(setting: &Setting, matches: &ArgMatches, configuration: &Configuration) -> Self {
        let raw = matches.get_raw(&setting.id).into_iter().flatten();
        let values: Vec<String> = raw.map(|value| value.to_string_lossy().into_owned()).collect();
        let (flag, variable) = (format!("--{}", setting.flag), setting.variable.clone());
        let in_file =
            || configuration.file.as_ref().and_then(|file| file.location_of_values(&variable, &values));
        let (from, source) = match matches.value_source(&setting.id) {
            Some(ValueSource::CommandLine) => ("flag", flag.clone()),
            Some(ValueSource::EnvVariable) => ("variable", format!("${variable}")),
            _ => match in_file() {
                Some(location) => ("file", location),
                None => ("default", "default".into()),
            },
        };
        let value = match setting.takes {
            Takes::Switch => matches.get_flag(&setting.id).into(),
            _ => masked(setting, &values),
        };
        Effective { key: setting.name(), value, from, source, flag, variable }
    }
}

/// The values with secrets masked.
fn masked(setting: &Setting, values: &[String]) -> Value {
    let mask = |value: &String| if setting.secret { secret::mask(value) } else { value.clone() };
    match setting.takes {
        Takes::List => values.iter().map(mask).collect(),
        Takes::One | Takes::Switch => values.first().map_or(Value::Null, |value| mask(value).into()),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        Value::Array(values) if values.is_empty() => "-".into(),
        Value::Array(values) => values.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(","),
        value => value.to_string(),
    }
}

fn innermost(matches: &ArgMatches) -> &ArgMatches {
    matches.subcommand().map_or(matches, |(_, matches)| innermost(matches))
}
