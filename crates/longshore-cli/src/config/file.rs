//! The configuration file: where it is looked for, what it may say, and the
//! line on which it says it. Whether a value fits its setting is for the
//! argument to judge, as on the command line.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Arg;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::settings::{Setting, Settings, Takes};
use crate::failure::Failure;
use crate::secret;

/// Where it is looked for when nobody names one.
const PLACES: [&str; 2] = ["longshore.toml", "/etc/longshore/longshore.toml"];

/// A file that could be read.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) path: PathBuf,
    entries: Vec<Entry>,
}

/// What it says of one setting.
#[derive(Debug)]
struct Entry {
    name: String,
    flag: String,
    variable: String,
    values: Vec<String>,
    line: usize,
    secret: bool,
}

impl File {
    /// The file that was asked for, or the first that is there. An empty name
    /// asks for none.
    pub(super) fn find(asked: Option<&OsStr>, settings: &Settings) -> Result<Option<Self>, Failure> {
        match asked {
            Some(asked) if asked.is_empty() => Ok(None),
            Some(asked) => File::read(Path::new(asked), settings)?
                .map(Some)
                .ok_or_else(|| unreadable(Path::new(asked), "it does not exist")),
            None => {
                for place in PLACES {
                    if let Some(file) = File::read(Path::new(place), settings)? {
                        return Ok(Some(file));
                    }
                }
                Ok(None)
            }
        }
    }

    /// `None` if it is not there.
    fn read(path: &Path, settings: &Settings) -> Result<Option<Self>, Failure> {
        match std::fs::read_to_string(path) {
            Ok(text) => File::parse(path.to_owned(), &text, settings).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unreadable(path, error)),
        }
    }

    pub(super) fn parse(path: PathBuf, text: &str, settings: &Settings) -> Result<Self, Failure> {
        let line = |at: usize| text[..at].matches('\n').count() + 1;
        let refused =
            |at: usize, why: String| Failure::usage(format_args!("{}:{}: {why}", path.display(), line(at)));
        // Its own rendering shows the line, which may hold a password.
        let document = DeTable::parse(text).map_err(|error| {
            refused(error.span().map_or(0, |span| span.start), format!("not TOML: {}", error.message()))
        })?;
        let mut entries = Vec::new();
        for (at, name, value) in leaves(document.get_ref(), settings) {
            let Some(setting) = settings.get(&name) else {
                return Err(refused(at, unknown(&name, settings)));
            };
            let values = values(setting, value).map_err(|why| refused(at, format!("`{name}` {why}")))?;
            entries.push(Entry {
                name,
                flag: format!("--{}", setting.flag),
                variable: setting.variable.clone(),
                values,
                line: line(at),
                secret: setting.secret,
            });
        }
        Ok(File { path, entries })
    }

    /// What it says of this argument.
    pub(super) fn values(&self, arg: &Arg) -> Option<&[String]> {
        let variable = arg.get_env()?.to_str()?;
        self.entry(variable).map(|entry| entry.values.as_slice())
    }

    /// Where it says `values` of the setting with this variable, like `longshore.toml:12`.
    pub(crate) fn says(&self, variable: &str, values: &[String]) -> Option<String> {
        let entry = self.entry(variable)?;
        // The argument has taken lists apart.
        let whole = |values: &[String]| values.join(",");
        (whole(&entry.values) == whole(values)).then(|| format!("{}:{}", self.path.display(), entry.line))
    }

    fn entry(&self, variable: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.variable == variable)
    }

    /// The place of an argument as clap names it, like `--bind <ADDR>`.
    pub(super) fn place_of(&self, argument: &str) -> String {
        let flag = argument.split([' ', '=']).next().unwrap_or(argument);
        match self.entries.iter().find(|entry| entry.flag == flag) {
            Some(entry) => format!("{}:{}: `{}`", self.path.display(), entry.line, entry.name),
            None => self.path.display().to_string(),
        }
    }

    /// How many settings it has.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// What to say if it holds a secret and more than its owner may read it.
    pub(super) fn too_open(&self) -> Option<String> {
        let hides =
            |entry: &&Entry| entry.secret && entry.values.iter().any(|value| secret::mask(value) != *value);
        let entry = self.entries.iter().find(hides)?;
        readable_by_others(&self.path).then(|| {
            let path = self.path.display();
            format!(
                "{path}:{}: `{}` is a secret that others can read; chmod 600 {path}",
                entry.line, entry.name
            )
        })
    }
}

#[cfg(unix)]
fn readable_by_others(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|about| about.permissions().mode() & 0o044 != 0)
}

#[cfg(not(unix))]
fn readable_by_others(_: &Path) -> bool {
    false
}

fn unreadable(path: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::usage(format_args!(
        "the configuration file `{}` cannot be read: {why}; name another with --config (LONGSHORE_CONFIG), \
         or none with LONGSHORE_CONFIG=",
        path.display()
    ))
}

fn unknown(name: &str, settings: &Settings) -> String {
    match settings.nearest(name) {
        Some(nearest) => format!("no setting is called `{name}`; the nearest is `{}`", nearest.name()),
        None => format!("no setting is called `{name}`"),
    }
}

/// Everything that is said, with where and of what. Tables hold settings and no
/// further tables, so what lies deeper is the value of a setting and refused
/// as that.
fn leaves<'a>(document: &'a DeTable<'a>, known: &Settings) -> Vec<(usize, String, &'a DeValue<'a>)> {
    let mut leaves = Vec::new();
    for (table, value) in document {
        match value.get_ref() {
            DeValue::Table(settings) if !settings.is_empty() || known.has_table(table.get_ref()) => leaves
                .extend(settings.iter().map(|(key, value)| {
                    (key.span().start, format!("{}.{}", table.get_ref(), key.get_ref()), value.get_ref())
                })),
            value => leaves.push((table.span().start, table.get_ref().to_string(), value)),
        }
    }
    leaves
}

/// The values as the argument reads them, or why they are of the wrong sort.
fn values(setting: &Setting, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let wrong = |form: &str| format!("is {}; write {form}", sort(value));
    match (setting.takes, value) {
        (Takes::Switch, DeValue::Boolean(on)) => Ok(vec![on.to_string()]),
        (Takes::Switch, _) => Err(wrong("true or false")),
        (Takes::List, DeValue::Array(items)) => {
            let texts: Option<Vec<String>> = items.iter().map(Spanned::get_ref).map(text).collect();
            texts.ok_or_else(|| {
                "holds what is neither text nor number; write a list like [\"a\", \"b\"]".into()
            })
        }
        (Takes::List, _) => {
            text(value).map(|text| vec![text]).ok_or_else(|| wrong("a list like [\"a\", \"b\"]"))
        }
        (Takes::One, _) => {
            text(value).map(|text| vec![text]).ok_or_else(|| wrong("a text or a whole number"))
        }
    }
}

fn text(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            i128::from_str_radix(number.as_str(), number.radix()).ok().map(|number| number.to_string())
        }
        _ => None,
    }
}

fn sort(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
