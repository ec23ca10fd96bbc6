//! `longshore config`: which settings a command would go by, and why.

use clap::ArgMatches;
use clap::parser::ValueSource;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{Config, Show, Shown};
use crate::config::{Configuration, Refused, Setting, TABLES, Takes};
use crate::failure::Code;
use crate::output::{Fit, Out, Table};
use crate::secret;

pub(crate) fn run(asked: &Config, configuration: &Configuration, out: &Out) -> Result<Code, Refused> {
    match asked {
        Config::Show(asked) => show(asked, configuration, out),
        Config::Check => check(configuration, out),
    }
}

fn show(asked: &Show, configuration: &Configuration, out: &Out) -> Result<Code, Refused> {
    let read = match asked.command {
        Some(Shown::Worker(_)) => vec![("worker", configuration.matches()?)],
        Some(Shown::Serve(_)) => vec![("serve", configuration.matches()?)],
        Some(Shown::Dev(_)) => vec![("dev", configuration.matches()?)],
        None => as_every_command(configuration)?,
    };
    let known = configuration.settings.iter();
    let shown: Vec<Effective> = known
        .filter_map(|setting| {
            let (_, matches) = read.iter().find(|(command, _)| setting.is_of(command))?;
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

fn check(configuration: &Configuration, out: &Out) -> Result<Code, Refused> {
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
            out.line(format_args!("{}: all can be read; settings: {}", file.path.display(), file.len()));
        }
        None => out.line("no configuration file; the variables can be read"),
    }
    Ok(Code::Done)
}

/// The line that was typed, read as that of each command with settings.
fn as_every_command(configuration: &Configuration) -> Result<Vec<(&'static str, ArgMatches)>, Refused> {
    TABLES.iter().map(|(command, _)| Ok((*command, configuration.matches_of(command)?))).collect()
}

/// One setting as a command would go by it.
#[derive(Debug, Serialize)]
struct Effective {
    key: String,
    value: Value,
    /// What sort of source: flag, variable, file or default.
    from: &'static str,
    /// Which one, like `longshore.toml:12`.
    source: String,
    flag: String,
    variable: String,
}

impl Effective {
    fn of(setting: &Setting, matches: &ArgMatches, configuration: &Configuration) -> Self {
        let raw = matches.get_raw(&setting.id).into_iter().flatten();
        let values: Vec<String> = raw.map(|value| value.to_string_lossy().into_owned()).collect();
        let (flag, variable) = (format!("--{}", setting.flag), setting.variable.clone());
        let written = || configuration.file.as_ref().and_then(|file| file.says(&variable, &values));
        let (from, source) = match matches.value_source(&setting.id) {
            Some(ValueSource::CommandLine) => ("flag", flag.clone()),
            Some(ValueSource::EnvVariable) => ("variable", format!("${variable}")),
            _ => match written() {
                Some(place) => ("file", place),
                None => ("default", "default".into()),
            },
        };
        let value = match setting.takes {
            Takes::Switch => matches.get_flag(&setting.id).into(),
            _ => shown(setting, &values),
        };
        Effective { key: setting.name(), value, from, source, flag, variable }
    }
}

/// The values as people and programs may see them.
fn shown(setting: &Setting, values: &[String]) -> Value {
    let show = |value: &String| if setting.secret { secret::mask(value) } else { value.clone() };
    match setting.takes {
        Takes::List => values.iter().map(show).collect(),
        Takes::One | Takes::Switch => values.first().map_or(Value::Null, |value| show(value).into()),
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
