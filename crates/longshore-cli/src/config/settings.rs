//! Which settings there are, and by which key the file knows each: every
//! argument that has a variable.

use clap::{Arg, ArgAction, Command};

/// The commands whose settings the file has, and the table of each. A setting
/// that two of them share stands in the table of the first.
pub(crate) const TABLES: [(&str, &str); 3] = [("worker", "worker"), ("serve", "server"), ("dev", "dev")];

/// One setting: an argument with a variable.
#[derive(Debug)]
pub(crate) struct Setting {
    /// What clap calls the argument.
    pub(crate) id: String,
    /// Which commands have it; none means all.
    commands: Vec<String>,
    pub(crate) table: String,
    pub(crate) key: String,
    /// Without its dashes.
    pub(crate) flag: String,
    pub(crate) variable: String,
    pub(crate) takes: Takes,
    /// No message shows it.
    pub(crate) secret: bool,
}

/// What can be said of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    /// True or false.
    Switch,
    /// A text or a number.
    One,
    /// Any number of them.
    List,
}

impl Setting {
    /// As in `worker.concurrency`.
    pub(crate) fn name(&self) -> String {
        format!("{}.{}", self.table, self.key)
    }

    pub(crate) fn is_of(&self, command: &str) -> bool {
        self.commands.is_empty() || self.commands.iter().any(|name| name == command)
    }

    fn of(arg: &Arg, home: &str) -> Option<Self> {
        let flag = arg.get_long()?;
        let variable = arg.get_env()?.to_str()?.to_owned();
        // It names the file.
        if arg.get_id() == "config" {
            return None;
        }
        let (table, key) = place(flag, home);
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

/// The table and the key of a flag: those of its command and its own name, but
/// where a reader of the file would look for it elsewhere.
fn place<'a>(flag: &'a str, home: &'a str) -> (&'a str, &'a str) {
    match flag {
        "database-url" => ("database", "url"),
        "log" => ("log", "filter"),
        "log-format" => ("log", "format"),
        "worker-id-prefix" => ("worker", "id-prefix"),
        "smtp-url" | "outbox" => ("mail", flag),
        "mail-from" => ("mail", "from"),
        "image-root" => ("images", "root"),
        "image-output" => ("images", "output"),
        "webhook-secret" => ("webhooks", "secret"),
        "allow-http" | "allow-outbound" => ("outbound", flag),
        _ => (home, flag),
    }
}

/// Every setting, in the order of the commands.
#[derive(Debug)]
pub(crate) struct Settings(Vec<Setting>);

impl Settings {
    /// Collects them from the definition of the command line.
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

    fn add(&mut self, command: &Command, home: &str) {
        for setting in command.get_arguments().filter_map(|arg| Setting::of(arg, home)) {
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

    /// What was probably meant: the same key of another table, or what is
    /// spelled most like it.
    pub(crate) fn nearest(&self, name: &str) -> Option<&Setting> {
        let key = name.rsplit('.').next().unwrap_or(name);
        let likeness = |setting: &&Setting| strsim::jaro_winkler(&setting.name(), name);
        self.0
            .iter()
            .find(|setting| setting.key == key || setting.flag == key)
            .or_else(|| self.0.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other))))
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
    fn every_variable_has_one_key_and_every_key_one_variable() {
        fn walk(command: &Command, variables: &mut BTreeSet<String>) {
            let settings = command.get_arguments().filter(|arg| arg.get_id() != "config");
            variables.extend(settings.filter_map(Arg::get_env).map(|name| name.to_str().unwrap().to_owned()));
            command.get_subcommands().for_each(|sub| walk(sub, variables));
        }
        let (mut variables, settings) = (BTreeSet::new(), Settings::of(&Cli::command()));
        walk(&Cli::command(), &mut variables);
        let known: BTreeSet<String> = settings.iter().map(|setting| setting.variable.clone()).collect();
        assert_eq!(known, variables, "an argument with a variable is in none of the tables");
        let names: BTreeSet<String> = settings.iter().map(Setting::name).collect();
        assert_eq!(names.len(), known.len(), "two settings share a key: {names:?}");
    }

    #[test]
    fn every_flag_of_the_commands_that_stay_is_a_setting_or_an_act() {
        // What is asked for once, and would be wrong as a habit.
        let acts = ["help", "drain", "migrate"];
        let settings = Settings::of(&Cli::command());
        for (name, _) in TABLES {
            for arg in Cli::command().find_subcommand(name).unwrap().get_arguments() {
                let flag = arg.get_long().unwrap();
                let known = settings.iter().any(|setting| setting.flag == flag);
                assert!(known || acts.contains(&flag), "{name} --{flag} has no variable and no key");
            }
        }
    }

    #[test]
    fn what_was_meant_is_found() {
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
    fn lists_switches_and_secrets_are_known_as_such() {
        let settings = Settings::of(&Cli::command());
        let takes = |name: &str| settings.get(name).unwrap().takes;
        assert_eq!(takes("worker.queues"), Takes::List);
        assert_eq!(takes("worker.simulate"), Takes::Switch);
        assert_eq!(takes("worker.concurrency"), Takes::One);
        let secrets: Vec<String> =
            settings.iter().filter(|setting| setting.secret).map(Setting::name).collect();
        assert_eq!(secrets, ["database.url", "client.server", "mail.smtp-url", "webhooks.secret"]);
    }
}
