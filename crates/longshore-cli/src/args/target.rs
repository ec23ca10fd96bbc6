//! Where the queue is: a database, or a server in front of one.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args};

use crate::failure::Failure;
use crate::secret::Secret;

/// Where the queue is, as it was typed or as variables say.
#[derive(Debug, Default, Args)]
pub(crate) struct TargetArgs {
    /// The database: postgres://user@host/database or sqlite:./jobs.db
    // Hidden values: the variable usually holds a password.
    #[arg(
        long,
        global = true,
        env = "DATABASE_URL",
        hide_env_values = true,
        value_name = "URL",
        help_heading = "Global options"
    )]
    database_url: Option<String>,

    /// Or a server, like http://127.0.0.1:8080; its token is in LONGSHORE_TOKEN
    #[arg(
        long,
        global = true,
        env = "LONGSHORE_SERVER",
        hide_env_values = true,
        value_name = "URL",
        help_heading = "Global options"
    )]
    server: Option<String>,

    /// A file with the server's token, instead of LONGSHORE_TOKEN
    #[arg(
        long,
        global = true,
        env = "LONGSHORE_TOKEN_FILE",
        value_name = "FILE",
        help_heading = "Global options"
    )]
    token_file: Option<PathBuf>,

    #[arg(skip)]
    database_by: Source,
    #[arg(skip)]
    server_by: Source,
}

/// Where a value comes from; the nearest wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    #[default]
    File,
    Variable,
    Flag,
}

/// What a command speaks to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Target<'a> {
    Database(&'a str),
    Server(&'a str),
}

impl TargetArgs {
    /// Takes note of where the values come from: what is nearer beats the other.
    pub(crate) fn note_sources(&mut self, matches: &ArgMatches) {
        let source = |name| match matches.value_source(name) {
            Some(ValueSource::CommandLine) => Source::Flag,
            Some(ValueSource::EnvVariable) => Source::Variable,
            _ => Source::File,
        };
        (self.database_by, self.server_by) = (source("database_url"), source("server"));
    }

    /// The database or the server that was asked for.
    pub(crate) fn resolve(&self) -> Result<Target<'_>, Failure> {
        let database = self.database_url.as_deref().filter(|url| !url.is_empty());
        let server = self.server.as_deref().filter(|url| !url.is_empty());
        match (database, server) {
            (Some(url), Some(_)) if self.database_by > self.server_by => Ok(Target::Database(url)),
            (Some(_), Some(url)) if self.database_by < self.server_by => Ok(Target::Server(url)),
            (Some(_), Some(_)) => Err(Failure::usage(match self.server_by {
                Source::Flag => "--server and --database-url are two places; give the one that is meant",
                Source::Variable => {
                    "DATABASE_URL and LONGSHORE_SERVER are both set, and they are two places; \
                     unset one, or say which is meant by --database-url or --server"
                }
                Source::File => {
                    "the configuration file has url under [database] and server under [client], and they are two \
                     places; remove one, or say which is meant by --database-url or --server"
                }
            })),
            (Some(url), None) => Ok(Target::Database(url)),
            (None, Some(url)) => Ok(Target::Server(url)),
            (None, None) => Err(Failure::usage(
                "no database and no server given; set DATABASE_URL, pass --database-url or write url under \
                 [database] in longshore.toml, as postgres://user@host/database or sqlite:./jobs.db, \
                 or set LONGSHORE_SERVER or pass --server, as http://127.0.0.1:8080",
            )),
        }
    }

    /// The database, for a command that no server can carry out.
    pub(crate) fn database(&self, command: &str) -> Result<&str, Failure> {
        if self.server_by == Source::Flag {
            return Err(Failure::usage(format_args!(
                "`longshore {command}` works on the database itself; give --database-url instead of --server"
            )));
        }
        self.database_url.as_deref().filter(|url| !url.is_empty()).ok_or_else(|| {
            Failure::usage(format_args!(
                "no database given, and `longshore {command}` works on the database itself; set DATABASE_URL, \
                 pass --database-url or write url under [database] in longshore.toml, \
                 as postgres://user@host/database or sqlite:./jobs.db"
            ))
        })
    }

    /// The server's token. There is no flag for the token itself: everybody on a
    /// machine can read its command lines.
    pub(crate) fn token(&self) -> Result<Option<Secret>, Failure> {
        let text = match &self.token_file {
            Some(file) => Some(std::fs::read_to_string(file).map_err(|error| {
                Failure::usage(format_args!(
                    "--token-file: cannot read {}: {error}; give the file that holds the token, or set LONGSHORE_TOKEN",
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
            database_by: database.map(|(_, by)| by).unwrap_or_default(),
            server: server.map(|(url, _)| url.into()),
            server_by: server.map(|(_, by)| by).unwrap_or_default(),
            token_file: None,
        }
    }

    #[test]
    fn what_is_nearer_beats_the_other() {
        let both = |database, server| target_args(Some(("sqlite:a", database)), Some(("http://a", server)));
        let (file, variable, flag) = (Source::File, Source::Variable, Source::Flag);
        for (far, near) in [(file, variable), (file, flag), (variable, flag)] {
            assert_eq!(both(far, near).resolve().unwrap(), Target::Server("http://a"));
            assert_eq!(both(near, far).resolve().unwrap(), Target::Database("sqlite:a"));
        }
        for (by, words) in [(file, "[client]"), (variable, "unset one"), (flag, "the one that is meant")] {
            let told = both(by, by).resolve().unwrap_err().to_string();
            assert!(told.contains(words) && told.contains("--server"), "{told}");
        }
    }

    #[test]
    fn an_empty_variable_is_none() {
        let by = Source::Variable;
        let served = target_args(Some(("", by)), Some(("http://a", by)));
        assert_eq!(served.resolve().unwrap(), Target::Server("http://a"));
        let told = target_args(None, Some(("", by))).resolve().unwrap_err().to_string();
        assert!(told.contains("DATABASE_URL") && told.contains("LONGSHORE_SERVER"), "{told}");
    }

    #[test]
    fn a_command_that_needs_the_database_says_so() {
        let (database, by) = (Some(("sqlite:a", Source::Variable)), Source::Variable);
        let served = target_args(database, Some(("http://a", Source::Flag)));
        assert!(served.database("worker").unwrap_err().to_string().contains("`longshore worker` works on"));
        assert!(target_args(None, Some(("http://a", by))).database("check").is_err());
        assert_eq!(target_args(database, Some(("http://a", by))).database("check").unwrap(), "sqlite:a");
    }
}
