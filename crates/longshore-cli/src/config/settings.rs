//! The list of settings and their keys in the configuration file. Every argument with an
//! environment variable is a setting.

use clap::{Arg, ArgAction, Command};

/// The commands that have settings in the file, each with its table. A setting that
/// several commands share is in the table of the first.
pub(crate) const TABLES: [(&str, &str); 3] = [("worker", "worker"), ("serve", "server"), ("dev", "dev")];

/// One setting: an argument with an environment variable.
#[derive(Debug)]
pub(crate) struct Setting {
    /// clap's id of the argument.
    pub(crate) id: String,
    /// The commands that have this setting; empty means all.
    commands: Vec<String>,
    pub(crate) table: String,
    pub(crate) key: String,
    /// The flag, without its dashes.
    pub(crate) flag: String,
    pub(crate) variable: String,
    pub(crate) takes: Takes,
    /// Whether the value is masked in messages.
    pub(crate) secret: bool,
}

/// The type of value that a setting takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// `true` or `false`.
    Switch,
    /// A string or a number.
    One,
    /// A list of strings or numbers.
    List,
}

impl Setting {
    /// The full name, like `worker.concurrency`.
    pub(crate) fn name(&self) -> String {
        format!("{}.{}", self.table, self.key)
    }

    pub(crate) fn belongs_to(&self, command: &str) -> bool {
        self.commands.is_empty() || self.commands.iter().any(|name| name == command)
    }

    fn of(arg: &Arg, default_table: &str) -> Option<Self> {
        let flag = arg.get_long()?;
        let variable = arg.get_env()?.to_str()?.to_owned();
        // Names the file itself, so it cannot be in the file.
        if arg.get_id() == "config" {
            return None;
        }
        let (table, key) = table_and_key(flag, default_table);
        let takes = match arg.get_action() {
            ArgAction::SetTrue | ArgAction::SetFalse => Takes::Switch,
            ArgAction::Append => Takes::List,
            _ => Takes::One,
        };
        let secret = arg.is_hide_env_values_set();
        Some(Setting {
            id: arg.get_id().to_string(),
            commands: Vec::new(),
            table: table.into(),
            key: key.into(),
            flag: flag.into(),
            variable,
            takes,
            secret,
        })
    }
}

/// The table and key of a flag. The default is the command's table and the flag's own
/// name; the others are where a reader of the file would look for them.
fn table_and_key<'a>(flag: &'a str, default_table: &'a str) -> (&'a str, &'a str) {
    match flag {
        "database-url" => ("database", "url"),
        "log" => ("log", "filter"),
        "log-format" => ("log", "format"),
        "otlp-endpoint" => ("traces", flag),
        "worker-id-prefix" => ("worker", "id-prefix"),
        "smtp-url" | "outbox" => ("mail", flag),
        "mail-from" => ("mail", "from"),
        "image-root" => ("images", "root"),
        "image-output" => ("images", "output"),
        "webhook-secret" => ("webhooks", "secret"),
        "allow-http" | "allow-outbound" => ("outbound", flag),
        _ => (default_table, flag),
    }
}

/// Every setting, in the order of the commands.
#[derive(Debug)]
pub(crate) struct Settings(Vec<Setting>);

impl Settings {
    /// Collects the settings from the definition of the command line.
    pub(crate) fn of(command: &Command) -> Self {
        let mut settings = Settings(Vec::new());
        settings.0.extend(command.get_arguments().filter_map(|arg| Setting::of(arg, "client")));
        for (name, table) in TABLES {
            if let Some(command) = command.find_subcommand(name) {
                settings.add(command, table);
            }
        }
        settings
    }

    fn add(&mut self, command: &Command, table: &str) {
        for setting in command.get_arguments().filter_map(|arg| Setting::of(arg, table)) {
            let name = command.get_name().to_owned();
            match self.0.iter_mut().find(|known| known.variable == setting.variable) {
                Some(known) => known.commands.push(name),
                None => self.0.push(Setting { commands: vec![name], ..setting }),
            }
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Setting> {
        self.0.iter()
    }

    /// The setting with this name, like `worker.concurrency`.
    pub(crate) fn get(&self, name: &str) -> Option<&Setting> {
        self.0.iter().find(|setting| setting.name() == name)
    }

    pub(super) fn has_table(&self, name: &str) -> bool {
        self.0.iter().any(|setting| setting.table == name)
    }

    /// The setting that was probably meant: one with the same key in another table, or the
    /// one with the most similar spelling.
    pub(crate) fn nearest(&self, name: &str) -> Option<&Setting> {
        let key = name.rsplit('.').next().unwrap_or(name);
        let similarity = |setting: &&Setting| strsim::jaro_winkler(&setting.name(), name);
        self.0
            .iter()
            .find(|setting| setting.key == key || setting.flag == key)
            .or_else(|| self.0.iter().max_by(|one, other| similarity(one).total_cmp(&similarity(other))))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use crate::args::Cli;

    use super::*;

    #[test]
    fn every_variable_has_exactly_one_key_and_every_key_one_variable() {
        fn walk(command: &Command, variables: &mut BTreeSet<String>) {
            let settings = command.get_arguments().filter(|arg| arg.get_id() != "config");
            variables.extend(settings.filter_map(Arg::get_env).map(|name| name.to_str().unwrap().to_owned()));
            command.get_subcommands().for_each(|sub| walk(sub, variables));
        }
        let (mut variables, settings) = (BTreeSet::new(), Settings::of(&Cli::command()));
        walk(&Cli::command(), &mut variables);
        let known: BTreeSet<String> = settings.iter().map(|setting| setting.variable.clone()).collect();
        assert_eq!(known, variables, "an argument with a variable has no key");
        let names: BTreeSet<String> = settings.iter().map(Setting::name).collect();
        assert_eq!(names.len(), known.len(), "two settings share a key: {names:?}");
    }

    #[test]
    fn every_flag_of_a_long_running_command_is_a_setting_or_a_one_off_action() {
        // Actions for one run, which would be wrong as a permanent setting.
        let actions = ["help", "drain", "migrate"];
        let settings = Settings::of(&Cli::command());
        for (name, _) in TABLES {
            for arg in Cli::command().find_subcommand(name).unwrap().get_arguments() {
                let flag = arg.get_long().unwrap();
                let known = settings.iter().any(|setting| setting.flag == flag);
                assert!(known || actions.contains(&flag), "{name} --{flag} has no variable and no key");
            }
        }
    }

    #[test]
    fn the_nearest_setting_to_a_typo_is_the_one_that_was_meant() {
        let settings = Settings::of(&Cli::command());
        for (written, meant) in [
            ("worker.poll_interval", "worker.poll-interval"),
            ("serve.bind", "server.bind"),
            ("worker.bind", "server.bind"),
            ("bind", "server.bind"),
            ("database-url", "database.url"),
            ("databse.url", "database.url"),
            ("server.rate-limits", "server.rate-limit"),
        ] {
            assert_eq!(settings.nearest(written).unwrap().name(), meant, "{written}");
        }
    }

    #[test]
    fn lists_switches_and_secrets_are_detected() {
        let settings = Settings::of(&Cli::command());
        let takes = |name: &str| settings.get(name).unwrap().takes;
        assert_eq!(takes("worker.queues"), Takes::List);
        assert_eq!(takes("worker.simulate"), Takes::Switch);
        assert_eq!(takes("worker.concurrency"), Takes::One);
        let secrets: Vec<String> =
            settings.iter().filter(|setting| setting.secret).map(Setting::name).collect();
        let expected =
            ["database.url", "client.server", "traces.otlp-endpoint", "mail.smtp-url", "webhooks.secret"];
        assert_eq!(secrets, expected);
    }
}
