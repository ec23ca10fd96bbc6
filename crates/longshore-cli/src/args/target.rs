//! The target of a command: a database, or a server in front of one. Owns the flags that
//! name it and the rule for which one wins.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args};

use crate::failure::Failure;
use crate::secret::{self, Secret};

/// The flags, variables and file settings that name the target.
#[derive(Debug, Default, Args)]
pub(crate) struct TargetArgs {
    /// The database: postgres://user@host/database or sqlite:./jobs.db
    // The help hides the variable's value, which usually contains a password.
    #[arg(
        long,
        global = true,
        env = "DATABASE_URL",
        hide_env_values = true,
        value_name = "URL",
        help_heading = "Global options"
    )]
    database_url: Option<String>,

    /// A server to use instead of a database, like http://127.0.0.1:8080. Its token is read from
    /// LONGSHORE_TOKEN
    #[arg(
        long,
        global = true,
        env = "LONGSHORE_SERVER",
        hide_env_values = true,
        value_name = "URL",
        help_heading = "Global options"
    )]
    server: Option<String>,

    /// A file that contains the server's token, instead of LONGSHORE_TOKEN
    #[arg(
        long,
        global = true,
        env = "LONGSHORE_TOKEN_FILE",
        value_name = "FILE",
        help_heading = "Global options"
    )]
    token_file: Option<PathBuf>,

    #[arg(skip)]
    database_source: Source,
    #[arg(skip)]
    server_source: Source,
}

/// Where a value comes from, weakest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    #[default]
    File,
    Variable,
    Flag,
}

/// The database or server that a command talks to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Target<'a> {
    Database(&'a str),
    Server(&'a str),
}

impl TargetArgs {
    /// Records where the values come from, so that [`resolve`](Self::resolve) can prefer a flag to a
    /// variable and a variable to the file.
    pub(crate) fn record_sources(&mut self, matches: &ArgMatches) {
        let source = |name| match matches.value_source(name) {
            Some(ValueSource::CommandLine) => Source::Flag,
            Some(ValueSource::EnvVariable) => Source::Variable,
            _ => Source::File,
        };
        (self.database_source, self.server_source) = (source("database_url"), source("server"));
    }

    /// The database or the server to use. If both are given, the stronger source wins.
    pub(crate) fn resolve(&self) -> Result<Target<'_>, Failure> {
        let database = self.database_url.as_deref().filter(|url| !url.is_empty());
        let server = self.server.as_deref().filter(|url| !url.is_empty());
        match (database, server) {
            (Some(url), Some(_)) if self.database_source > self.server_source => Ok(Target::Database(url)),
            (Some(_), Some(url)) if self.database_source < self.server_source => Ok(Target::Server(url)),
            // Many programs use DATABASE_URL, but LONGSHORE_SERVER is meant for this command.
            (Some(_), Some(url)) if self.server_source == Source::Variable => Ok(Target::Server(url)),
            (Some(_), Some(_)) => Err(Failure::usage(match self.server_source {
                Source::Flag => "--server and --database-url exclude each other; give only one of them",
                Source::Variable | Source::File => {
                    "the configuration file has both url under [database] and server under [client]; \
                     remove one of them, or choose with --database-url or --server"
                }
            })),
            (Some(url), None) => Ok(Target::Database(url)),
            (None, Some(url)) => Ok(Target::Server(url)),
            (None, None) => Err(Failure::usage(
                "no database and no server given; for a database, set DATABASE_URL, pass --database-url, or \
                 write url under [database] in longshore.toml, like postgres://user@host/database or \
                 sqlite:./jobs.db; for a server, set LONGSHORE_SERVER or pass --server, like \
                 http://127.0.0.1:8080",
            )),
        }
    }

    /// Which of two variables was used, if both are set and no flag chooses.
    pub(crate) fn choice_note(&self) -> Option<String> {
        let is_set = |url: &Option<String>, source| {
            url.as_deref().is_some_and(|url| !url.is_empty()) && source == Source::Variable
        };
        let both =
            is_set(&self.database_url, self.database_source) && is_set(&self.server, self.server_source);
        both.then(|| {
            format!(
                "using the server {} (LONGSHORE_SERVER), not DATABASE_URL, which is also set; \
                 choose with --server or --database-url, or unset one of them",
                secret::mask(self.server.as_deref().unwrap_or_default())
            )
        })
    }

    /// The database, for a command that works only on the database itself.
    pub(crate) fn database(&self, command: &str) -> Result<&str, Failure> {
        if self.server_source == Source::Flag {
            return Err(Failure::usage(format_args!(
                "`longshore {command}` works on the database itself; give --database-url instead of --server"
            )));
        }
        self.database_url.as_deref().filter(|url| !url.is_empty()).ok_or_else(|| {
            Failure::usage(format_args!(
                "no database given, and `longshore {command}` works on the database itself; set DATABASE_URL, \
                 pass --database-url, or write url under [database] in longshore.toml, \
                 like postgres://user@host/database or sqlite:./jobs.db"
            ))
        })
    }

    /// The server's token. There is no flag for the token itself, because every user of
    /// a machine can read its command lines.
    pub(crate) fn token(&self) -> Result<Option<Secret>, Failure> {
        let text = match &self.token_file {
            Some(file) => Some(std::fs::read_to_string(file).map_err(|error| {
                Failure::usage(format_args!(
                    "--token-file: cannot read {}: {error}; name the file that contains the token, or set LONGSHORE_TOKEN",
                    file.display()
                ))
            })?),
            None => std::env::var("LONGSHORE_TOKEN").ok().filter(|token| !token.is_empty()),
        };
        Ok(text.map(|text| Secret::read(&text).unwrap_or_else(|never| match never {})))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn target_args(database: Option<(&str, Source)>, server: Option<(&str, Source)>) -> TargetArgs {
        TargetArgs {
            database_url: database.map(|(url, _)| url.into()),
            database_source: database.map(|(_, source)| source).unwrap_or_default(),
            server: server.map(|(url, _)| url.into()),
            server_source: server.map(|(_, source)| source).unwrap_or_default(),
            token_file: None,
        }
    }

    #[test]
    fn a_flag_beats_a_variable_and_a_variable_beats_the_file() {
        let both = |database, server| target_args(Some(("sqlite:a", database)), Some(("http://a", server)));
        let (file, variable, flag) = (Source::File, Source::Variable, Source::Flag);
        for (weak, strong) in [(file, variable), (file, flag), (variable, flag)] {
            assert_eq!(both(weak, strong).resolve().unwrap(), Target::Server("http://a"));
            assert_eq!(both(strong, weak).resolve().unwrap(), Target::Database("sqlite:a"));
        }
        for (source, part) in [(file, "[client]"), (flag, "give only one")] {
            let message = both(source, source).resolve().unwrap_err().to_string();
            assert!(message.contains(part) && message.contains("--server"), "{message}");
        }
    }

    #[test]
    fn with_both_variables_the_server_is_used_and_the_choice_is_named() {
        let (file, variable, flag) = (Source::File, Source::Variable, Source::Flag);
        let both = |database, server| target_args(Some(("sqlite:a", database)), Some(("http://a", server)));
        assert_eq!(both(variable, variable).resolve().unwrap(), Target::Server("http://a"));
        let note = both(variable, variable).choice_note().unwrap();
        assert!(note.contains("using the server http://a") && note.contains("--database-url"), "{note}");
        for (database, server) in [(file, variable), (variable, file), (flag, variable), (variable, flag)] {
            assert_eq!(both(database, server).choice_note(), None, "{database:?} {server:?}");
        }
        let empty = target_args(Some(("", variable)), Some(("http://a", variable)));
        assert_eq!(empty.choice_note(), None);
    }

    #[test]
    fn an_empty_variable_counts_as_unset() {
        let variable = Source::Variable;
        let args = target_args(Some(("", variable)), Some(("http://a", variable)));
        assert_eq!(args.resolve().unwrap(), Target::Server("http://a"));
        let message = target_args(None, Some(("", variable))).resolve().unwrap_err().to_string();
        assert!(message.contains("DATABASE_URL") && message.contains("LONGSHORE_SERVER"), "{message}");
    }

    #[test]
    fn a_command_that_needs_the_database_rejects_a_server() {
        let database = Some(("sqlite:a", Source::Variable));
        let typed = target_args(database, Some(("http://a", Source::Flag)));
        assert!(typed.database("worker").unwrap_err().to_string().contains("`longshore worker` works on"));
        let server = Some(("http://a", Source::Variable));
        assert!(target_args(None, server).database("check").is_err());
        assert_eq!(target_args(database, server).database("check").unwrap(), "sqlite:a");
    }
}
