//! The configuration file: finding it, parsing it, and remembering the line of each
//! value for error messages. Does not check that a value is valid for its setting; the
//! argument's own parser does that, as it does for the command line.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Arg;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::settings::{Setting, Settings, Takes};
use crate::failure::Failure;
use crate::secret;

/// Where the file is looked for if `--config` is not given.
const DEFAULT_PATHS: [&str; 2] = ["longshore.toml", "/etc/longshore/longshore.toml"];

/// A parsed configuration file.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) path: PathBuf,
    entries: Vec<Entry>,
}

/// One setting in the file.
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
    /// The requested file, or the first default path that exists. An empty name means no
    /// file.
    pub(super) fn find(requested: Option<&OsStr>, settings: &Settings) -> Result<Option<Self>, Failure> {
        match requested {
            Some(path) if path.is_empty() => Ok(None),
            Some(path) => File::read(Path::new(path), settings)?
                .map(Some)
                .ok_or_else(|| unreadable(Path::new(path), "it does not exist")),
            None => {
                for path in DEFAULT_PATHS {
                    if let Some(file) = File::read(Path::new(path), settings)? {
                        return Ok(Some(file));
                    }
                }
                Ok(None)
            }
        }
    }

    /// `None` if the file does not exist.
    fn read(path: &Path, settings: &Settings) -> Result<Option<Self>, Failure> {
        match std::fs::read_to_string(path) {
            Ok(text) => File::parse(path.to_owned(), &text, settings).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unreadable(path, error)),
        }
    }

    pub(super) fn parse(path: PathBuf, text: &str, settings: &Settings) -> Result<Self, Failure> {
        let line = |at: usize| text[..at].matches('\n').count() + 1;
        let error_at =
            |at: usize, why: String| Failure::usage(format_args!("{}:{}: {why}", path.display(), line(at)));
        // Use only the parser's message: its full rendering quotes the line, which may
        // contain a password.
        let document = DeTable::parse(text).map_err(|error| {
            error_at(error.span().map_or(0, |span| span.start), format!("not TOML: {}", error.message()))
        })?;
        let mut entries = Vec::new();
        for (at, name, value) in leaves(document.get_ref(), settings) {
            let Some(setting) = settings.get(&name) else {
                return Err(error_at(at, unknown(&name, settings)));
            };
            let values = values(setting, value).map_err(|why| error_at(at, format!("`{name}` {why}")))?;
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

    /// The value of `log.format` in the file that [`find`](File::find) reads, even if other parts of
    /// the file are invalid. `None` if it cannot be read.
    pub(super) fn log_format(requested: Option<&OsStr>) -> Option<String> {
        let read = |path: &OsStr| std::fs::read_to_string(path).ok();
        let file = match requested {
            Some(path) => read(path),
            None => DEFAULT_PATHS.iter().find_map(|path| read(path.as_ref())),
        }?;
        let (document, _errors) = DeTable::parse_recoverable(&file);
        match document.get_ref().get("log")?.get_ref() {
            DeValue::Table(log) => text(log.get("format")?.get_ref()),
            _ => None,
        }
    }

    /// The file's values for this argument.
    pub(super) fn values(&self, arg: &Arg) -> Option<&[String]> {
        let variable = arg.get_env()?.to_str()?;
        self.entry(variable).map(|entry| entry.values.as_slice())
    }

    /// The location of the setting with this variable, like `longshore.toml:12`, if the
    /// file sets it to `values`.
    pub(crate) fn location_of_values(&self, variable: &str, values: &[String]) -> Option<String> {
        let entry = self.entry(variable)?;
        // The argument's parser may have split a value at commas.
        let joined = |values: &[String]| values.join(",");
        (joined(&entry.values) == joined(values)).then(|| format!("{}:{}", self.path.display(), entry.line))
    }

    fn entry(&self, variable: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.variable == variable)
    }

    /// The location of an argument that clap calls, for example, `--bind <ADDR>`.
    pub(super) fn location_of(&self, argument: &str) -> String {
        let flag = argument.split([' ', '=']).next().unwrap_or(argument);
        match self.entries.iter().find(|entry| entry.flag == flag) {
            Some(entry) => format!("{}:{}: `{}`", self.path.display(), entry.line, entry.name),
            None => self.path.display().to_string(),
        }
    }

    /// The number of settings in the file.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// A warning if the file contains a secret and users other than its owner can read it.
    pub(super) fn permission_warning(&self) -> Option<String> {
        let has_secret =
            |entry: &&Entry| entry.secret && entry.values.iter().any(|value| secret::mask(value) != *value);
        let entry = self.entries.iter().find(has_secret)?;
        readable_by_others(&self.path).then(|| {
            let path = self.path.display();
            format!(
                "{path}:{}: `{}` is a secret, and other users can read the file; run chmod 600 {path}",
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
        "cannot read the configuration file `{}`: {why}; name another with --config (LONGSHORE_CONFIG), \
         or use none with LONGSHORE_CONFIG=",
        path.display()
    ))
}

fn unknown(name: &str, settings: &Settings) -> String {
    match settings.nearest(name) {
        Some(nearest) => format!("unknown setting `{name}`; did you mean `{}`?", nearest.name()),
        None => format!("unknown setting `{name}`; `longshore config show` lists them all"),
    }
}

/// Every value in the document, with its offset and its full name. A table contains only
/// settings, so a nested table is treated as the value of a setting and rejected as such.
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

/// The values in the form the argument's parser takes, or why they have the wrong type.
fn values(setting: &Setting, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let wrong_type = |expected: &str| format!("is {}; write {expected}", type_name(value));
    match (setting.takes, value) {
        (Takes::Switch, DeValue::Boolean(on)) => Ok(vec![on.to_string()]),
        (Takes::Switch, _) => Err(wrong_type("true or false")),
        (Takes::List, DeValue::Array(items)) => {
            let texts: Option<Vec<String>> = items.iter().map(Spanned::get_ref).map(text).collect();
            texts.ok_or_else(|| {
                "has items that are neither strings nor whole numbers; write a list like [\"a\", \"b\"]"
                    .into()
            })
        }
        (Takes::List, _) => {
            text(value).map(|text| vec![text]).ok_or_else(|| wrong_type("a list like [\"a\", \"b\"]"))
        }
        (Takes::One, _) => {
            text(value).map(|text| vec![text]).ok_or_else(|| wrong_type("a string or a whole number"))
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

fn type_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
