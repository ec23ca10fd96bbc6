//! Shell completion: the scripts, and the words that can complete a command line. The scripts
//! of bash, zsh and fish only call `longshore complete`, so that there is one implementation,
//! and it can offer what the queue contains. The other shells get clap's own scripts.

use std::time::Duration;

use clap::{Arg, ArgAction, Command, CommandFactory, FromArgMatches};
use clap_complete::Shell;
use longshore::{DEFAULT_QUEUE, builtin};

use super::find;
use crate::args::{Cli, TargetArgs};
use crate::endpoint::Endpoint;
use crate::failure::Code;
use crate::output::{Out, clean};

/// How long the queue may take to reply. After that, only the built-in words are offered.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// Prints the completion script for a shell.
pub(super) fn print_script(shell: Shell, out: &Out) -> Code {
    match shell {
        Shell::Bash => out.script(include_str!("complete/longshore.bash")),
        Shell::Zsh => out.script(include_str!("complete/longshore.zsh")),
        Shell::Fish => out.script(include_str!("complete/longshore.fish")),
        _ => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "longshore", &mut script);
            out.script(&String::from_utf8_lossy(&script));
        }
    }
    Code::Done
}

/// Prints the words that can complete the last of these words: one per line, followed by a tab
/// and a description if there is one. Prints nothing where a file name is expected.
pub(super) async fn print_candidates(target: &TargetArgs, words: &[String], out: &Out) -> Code {
    let mut root = Cli::command();
    root.build();
    let position = Position::of(&root, words);
    let mut candidates = position.known_words();
    if let Some(source) = position.source() {
        let typed = typed_target(words);
        let found = tokio::time::timeout(MAX_WAIT, fetch(source, typed.as_ref().unwrap_or(target))).await;
        let found = found.ok().flatten().unwrap_or_else(|| source.builtin_words());
        candidates.extend(found.into_iter().map(Candidate::plain));
    }
    let lines: Vec<String> = candidates
        .into_iter()
        .filter(|candidate| candidate.word.starts_with(position.typed()))
        .map(|Candidate { word, help }| match help {
            Some(help) => format!("{}{}\t{}", position.kept(), clean(&word), clean(&help)),
            None => format!("{}{}", position.kept(), clean(&word)),
        })
        .collect();
    if !lines.is_empty() {
        out.script(&lines.join("\n"));
    }
    Code::Done
}

/// A word to offer.
#[derive(Debug)]
struct Candidate {
    word: String,
    help: Option<String>,
}

impl Candidate {
    fn plain(word: String) -> Self {
        Candidate { word, help: None }
    }

    /// With the first line of a help text.
    fn with_help(word: impl Into<String>, help: Option<&clap::builder::StyledStr>) -> Self {
        let help = help.map(|help| help.to_string().lines().next().unwrap_or_default().to_owned());
        Candidate { word: word.into(), help }
    }
}

/// What the last word of a command line is.
#[derive(Debug)]
struct Position<'c> {
    command: &'c Command,
    /// The names of the subcommands that led to `command`.
    path: Vec<&'c str>,
    expects: Expects<'c>,
    /// The last word. A part of it that stays as it is, like the first items of a list, is in
    /// `kept`.
    typed: String,
    kept: String,
}

#[derive(Debug)]
enum Expects<'c> {
    Flag,
    /// A value of this option.
    Value(&'c Arg),
    /// A subcommand, or the next positional argument.
    Positional(Option<&'c Arg>),
}

/// What the queue can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Kinds,
    Queues,
    Schedules,
}

impl Source {
    /// The words that every queue knows, for when the queue does not reply.
    fn builtin_words(self) -> Vec<String> {
        match self {
            Source::Kinds => builtin::names().map(str::to_owned).collect(),
            Source::Queues => vec![DEFAULT_QUEUE.to_owned()],
            Source::Schedules => Vec::new(),
        }
    }
}

impl<'c> Position<'c> {
    /// Reads a command line up to its last word, which is being typed.
    fn of(root: &'c Command, words: &[String]) -> Self {
        let (last, before) =
            words.split_last().map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
        let (mut command, mut path, mut positionals) = (root, Vec::new(), 0);
        // The option that takes the next word.
        let mut open: Option<&Arg> = None;
        let mut only_positionals = false;
        for word in before {
            if open.take().is_some() {
                // The value of the option before it.
            } else if only_positionals {
                positionals += 1;
            } else if word == "--" {
                only_positionals = true;
            } else if word.starts_with('-') && word.len() > 1 {
                let name = word.split('=').next().unwrap_or(word);
                open = option(command, name).filter(|arg| takes_next_word(arg) && !word.contains('='));
            } else if let Some(found) = command.find_subcommand(word) {
                (command, positionals) = (found, 0);
                path.push(found.get_name());
            } else {
                positionals += 1;
            }
        }
        let mut position = Position {
            command,
            path,
            expects: Expects::Positional(positional(command, positionals)),
            typed: last.to_owned(),
            kept: String::new(),
        };
        if let Some(arg) = open {
            position.expects = Expects::Value(arg);
        } else if last.starts_with('-') && !only_positionals {
            position.expects = Expects::Flag;
            if let Some((name, value)) = last.split_once('=')
                && let Some(arg) = option(command, name)
            {
                position.expects = Expects::Value(arg);
                (position.kept, position.typed) = (format!("{name}="), value.to_owned());
            }
        }
        if position.value_of().is_some_and(|arg| arg.get_value_delimiter() == Some(',')) {
            let at = position.typed.rfind(',').map_or(0, |at| at + 1);
            let rest = position.typed.split_off(at);
            position.kept.push_str(&std::mem::replace(&mut position.typed, rest));
        }
        position
    }

    /// What was typed of the word.
    fn typed(&self) -> &str {
        &self.typed
    }

    /// What stays in front of the word.
    fn kept(&self) -> &str {
        &self.kept
    }

    /// The argument whose value is being typed.
    fn value_of(&self) -> Option<&'c Arg> {
        match self.expects {
            Expects::Flag => None,
            Expects::Value(arg) => Some(arg),
            Expects::Positional(arg) => arg,
        }
    }

    /// The words that do not depend on the queue.
    fn known_words(&self) -> Vec<Candidate> {
        let mut words = Vec::new();
        match self.expects {
            Expects::Flag => {
                let flags = self.command.get_arguments().filter(|arg| !arg.is_hide_set());
                words.extend(flags.filter_map(|arg| {
                    Some(Candidate::with_help(format!("--{}", arg.get_long()?), arg.get_help()))
                }));
            }
            Expects::Positional(_) => {
                let commands = self.command.get_subcommands().filter(|command| !command.is_hide_set());
                words.extend(
                    commands.map(|command| Candidate::with_help(command.get_name(), command.get_about())),
                );
            }
            Expects::Value(_) => {}
        }
        if let Some(arg) = self.value_of() {
            let possible = arg.get_possible_values().into_iter().filter(|value| !value.is_hide_set());
            words.extend(possible.map(|value| Candidate::with_help(value.get_name(), value.get_help())));
            let forms: &[&str] = match arg.get_id().as_str() {
                "retry" => &["jitter", "exponential", "fixed:10s", "list:1s,5s", "none"],
                "missed" => &["skip", "one", "all:24"],
                _ => &[],
            };
            words.extend(forms.iter().map(|form| Candidate::plain((*form).to_owned())));
        }
        words
    }

    /// What the queue knows about the value.
    fn source(&self) -> Option<Source> {
        match self.value_of()?.get_id().as_str() {
            "kind" => Some(Source::Kinds),
            "queue" | "queues" => Some(Source::Queues),
            "name" if self.path.first() == Some(&"cron") => Some(Source::Schedules),
            _ => None,
        }
    }
}

/// The option with this name, like `--status` or `-y`.
fn option<'c>(command: &'c Command, name: &str) -> Option<&'c Arg> {
    command.get_arguments().find(|arg| match name.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long),
        None => arg.get_short().is_some_and(|short| name.ends_with(short)),
    })
}

/// Whether the word after this option is always its value.
fn takes_next_word(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
        && arg.get_num_args().is_none_or(|range| range.min_values() > 0)
}

/// The positional argument at this index. The last one may take all further words.
fn positional(command: &Command, index: usize) -> Option<&Arg> {
    let all: Vec<&Arg> = command.get_positionals().collect();
    let is_list = |arg: &&&Arg| arg.get_num_args().is_some_and(|range| range.max_values() > 1);
    all.get(index).or_else(|| all.last().filter(is_list)).copied()
}

/// The database or the server that the unfinished command line names, if it does.
fn typed_target(words: &[String]) -> Option<TargetArgs> {
    let names_target = |word: &String| word.starts_with("--server") || word.starts_with("--database-url");
    if !words.iter().any(names_target) {
        return None;
    }
    let words = std::iter::once("longshore").chain(words.iter().map(String::as_str));
    let matches = Cli::command().ignore_errors(true).try_get_matches_from(words).ok()?;
    let mut target = TargetArgs::from_arg_matches(&matches).ok()?;
    target.record_sources(&matches);
    Some(target)
}

/// The words of the queue; `None` if there is no queue. Completion must not print errors.
async fn fetch(source: Source, target: &TargetArgs) -> Option<Vec<String>> {
    let endpoint = Endpoint::open(target).await.ok()?;
    Some(match source {
        Source::Kinds => find::kinds(&endpoint).await,
        Source::Queues => find::queues(&endpoint).await,
        Source::Schedules => find::names(&endpoint, "cron").await,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words offered for a command line, whose last word is after the last space.
    fn offered(line: &str) -> (Vec<String>, Option<Source>) {
        let mut root = Cli::command();
        root.build();
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let position = Position::of(&root, &words);
        let known = position.known_words().into_iter().map(|candidate| candidate.word);
        let known = known.filter(|word| word.starts_with(position.typed()));
        (known.map(|word| format!("{}{word}", position.kept())).collect(), position.source())
    }

    fn words(line: &str) -> Vec<String> {
        offered(line).0
    }

    #[test]
    fn commands_and_flags_are_offered() {
        assert_eq!(words("jo"), ["jobs"]);
        assert_eq!(words("dead "), ["list", "groups", "redrive", "purge", "help"]);
        assert_eq!(words("jobs list --sta"), ["--status"]);
        assert_eq!(words("jobs list --ut"), ["--utc"], "global flags too");
        assert!(!words("").contains(&"complete".to_owned()), "hidden commands are not offered");
        assert_eq!(words("--ser"), ["--server"]);
    }

    #[test]
    fn values_are_offered() {
        let statuses = ["queued", "running", "succeeded", "retrying", "failed_permanent", "cancelled"];
        assert_eq!(words("jobs list --status "), statuses);
        assert_eq!(words("jobs list --status r"), ["running", "retrying"]);
        assert_eq!(words("jobs list --status=r"), ["--status=running", "--status=retrying"]);
        assert_eq!(words("jobs list --status="), statuses.map(|status| format!("--status={status}")));
        assert_eq!(words("tokens create ci --scope "), ["enqueue", "work", "read", "operate", "admin"]);
        assert_eq!(words("tokens create ci --scope read,op"), ["read,operate"]);
        assert_eq!(words("enqueue greet --unique-mode "), ["dedupe", "replace", "preserve_run_at"]);
        assert_eq!(words("enqueue greet --retry e"), ["exponential"]);
        assert_eq!(words("serve --auth "), ["off", "tokens"]);
        assert_eq!(words("worker --log-format "), ["pretty", "json"]);
        assert_eq!(words("completions b"), ["bash"]);
        assert_eq!(words("jobs cancel -y --status q"), ["queued"]);
    }

    #[test]
    fn kinds_queues_and_schedules_come_from_the_queue() {
        for line in
            ["enqueue ", "enqueue --priority 3 gr", "jobs list --kind ", "cron add a b ", "kinds remove "]
        {
            assert_eq!(offered(line).1, Some(Source::Kinds), "{line}");
        }
        for line in ["worker --queues a,", "queues pause ", "enqueue greet --queue=", "jobs list --queue m"] {
            assert_eq!(offered(line).1, Some(Source::Queues), "{line}");
        }
        assert_eq!(offered("cron run ").1, Some(Source::Schedules));
        for line in
            ["tokens create ", "enqueue greet --payload ", "jobs list --kind greet ", "--config ", "jobs "]
        {
            assert_eq!(offered(line).1, None, "{line}");
        }
    }

    #[test]
    fn nothing_is_offered_where_a_file_is_expected() {
        assert_eq!(words("enqueue greet --payload "), Vec::<String>::new());
        assert_eq!(words("jobs list --config "), Vec::<String>::new());
        assert_eq!(words("enqueue-many "), Vec::<String>::new());
    }

    #[test]
    fn the_command_line_can_name_the_target() {
        let target = |line: &str| typed_target(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(target("jobs list --kind ").is_none());
        for line in ["jobs list --server http://a --kind ", "--database-url=sqlite:a enqueue "] {
            assert!(target(line).is_some_and(|target| target.resolve().is_ok()), "{line}");
        }
    }
}
