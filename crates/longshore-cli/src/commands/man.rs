//! `longshore man`: the manual pages, generated from the definition of the command line, so that
//! they and `--help` cannot differ.

use std::fs;

use clap::{Arg, ArgAction, Command, CommandFactory};

use crate::args::{Cli, Man};
use crate::failure::{Code, Failure, Outcome};
use crate::output::Out;

pub(super) fn run(args: &Man, out: &Out) -> Outcome {
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    if let Some(folder) = &args.output {
        let failed = |error| {
            Failure::usage(format_args!(
                "--output: cannot write to the folder `{}`: {error}; name another one",
                folder.display()
            ))
        };
        fs::create_dir_all(folder).map_err(failed)?;
        for (path, command) in all(&root) {
            let file = folder.join(format!("{}.1", path.join("-")));
            fs::write(file, page(&path, command)).map_err(failed)?;
        }
        return Ok(Code::Done);
    }
    let (mut path, mut command) = (vec!["longshore"], &root);
    for name in &args.command {
        command = command.find_subcommand(name).ok_or_else(|| {
            let names: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
            let meant = longshore::nearest::suggestion(name, names);
            Failure::usage(format_args!(
                "no command `{} {name}`{meant}; `longshore --help` lists the commands",
                path.join(" ")
            ))
        })?;
        path.push(command.get_name());
    }
    out.script(&page(&path, command));
    Ok(Code::Done)
}

/// Every command with the names that lead to it.
fn all(root: &Command) -> Vec<(Vec<&str>, &Command)> {
    let mut pages = vec![(vec!["longshore"], root)];
    let mut next = 0;
    while next < pages.len() {
        let (path, command) = pages[next].clone();
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            pages.push((path.iter().copied().chain([sub.get_name()]).collect(), sub));
        }
        next += 1;
    }
    pages
}

/// The page of one command, as roff.
fn page(path: &[&str], command: &Command) -> String {
    let name = path.join("-");
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut page = format!(
        ".TH {} 1 \"\" \"longshore {}\" \"Longshore\"\n.SH NAME\n{} \\- {}\n",
        text(&name.to_uppercase()),
        env!("CARGO_PKG_VERSION"),
        text(&name),
        text(&about)
    );
    page.push_str(".SH SYNOPSIS\n.nf\n");
    let usage = command.clone().render_usage().to_string();
    for line in usage.trim().trim_start_matches("Usage:").trim().lines() {
        page.push_str(&format!("{}\n", text(line.trim())));
    }
    page.push_str(".fi\n");
    page.push_str(".SH DESCRIPTION\n");
    let long = command.get_long_about().map(ToString::to_string);
    page.push_str(&paragraphs(&long.unwrap_or(about)));
    page.push_str(&commands(path, command));
    page.push_str(&options(command));
    let after = command.get_after_long_help().or(command.get_after_help());
    if let Some(after) = after {
        let after = after.to_string();
        let examples = after.strip_prefix("Examples:\n").unwrap_or(&after);
        page.push_str(&format!(".SH EXAMPLES\n.nf\n{}\n.fi\n", text(examples.trim_end())));
    }
    if let [parents @ .., _] = path
        && !parents.is_empty()
    {
        page.push_str(&format!(".SH SEE ALSO\n.BR {} (1)\n", text(&parents.join("-"))));
    }
    page
}

fn commands(path: &[&str], command: &Command) -> String {
    let mut section = String::new();
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
        let name = format!("{}-{}", path.join("-"), sub.get_name());
        section.push_str(&format!(".TP\n.BR {} (1)\n{}\n", text(&name), text(&about)));
    }
    if section.is_empty() { section } else { format!(".SH COMMANDS\n{section}") }
}

/// The arguments under their headings, in the order of the help.
fn options(command: &Command) -> String {
    let heading = |arg: &Arg| match arg.get_help_heading() {
        Some(heading) => heading.to_owned(),
        None if arg.is_positional() => "Arguments".to_owned(),
        None => "Options".to_owned(),
    };
    let shown: Vec<&Arg> = command.get_arguments().filter(|arg| !arg.is_hide_set()).collect();
    let mut headings: Vec<String> = Vec::new();
    for arg in &shown {
        if !headings.contains(&heading(arg)) {
            headings.push(heading(arg));
        }
    }
    let mut sections = String::new();
    for title in headings {
        sections.push_str(&format!(".SH {}\n", text(&title.to_uppercase())));
        for arg in shown.iter().filter(|arg| heading(arg) == title) {
            sections.push_str(&format!(".TP\n{}\n{}", text(&spelling(arg)), details(arg)));
        }
    }
    sections
}

/// How an argument is written, like `-y, --yes` or `--status <STATUS>`.
fn spelling(arg: &Arg) -> String {
    if arg.is_positional() {
        return arg.to_string();
    }
    let short = arg.get_short().map(|short| format!("-{short}, ")).unwrap_or_default();
    format!("{short}{arg}")
}

fn details(arg: &Arg) -> String {
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut details = paragraphs(&help);
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    let mut notes = Vec::new();
    let values: Vec<String> =
        arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    if takes_value && !values.is_empty() {
        notes.push(format!("[possible values: {}]", values.join(", ")));
    }
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if takes_value && !defaults.is_empty() {
        notes.push(format!("[default: {}]", defaults.join(",")));
    }
    if let Some(variable) = arg.get_env() {
        notes.push(format!("[env: {}]", variable.to_string_lossy()));
    }
    if !notes.is_empty() {
        details.push_str(&format!("{}\n", text(&notes.join(" "))));
    }
    details
}

/// Text with a new paragraph after each empty line.
fn paragraphs(plain: &str) -> String {
    plain.trim().split("\n\n").map(|part| text(part) + "\n").collect::<Vec<_>>().join(".sp\n")
}

/// Escapes what roff would interpret.
fn text(plain: &str) -> String {
    let escaped = plain.replace('\\', "\\e").replace('-', "\\-");
    let lines: Vec<String> = escaped
        .lines()
        .map(|line| if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line.to_owned() })
        .collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_with_its_flags_and_examples() {
        let mut root = Cli::command().disable_help_subcommand(true);
        root.build();
        let pages = all(&root);
        assert!(pages.len() > 40, "{} pages", pages.len());
        for (path, command) in pages {
            let page = page(&path, command);
            assert!(page.starts_with(".TH LONGSHORE"), "{page}");
            for part in [".SH NAME\n", ".SH SYNOPSIS\n", ".SH DESCRIPTION\n"] {
                assert!(page.contains(part), "{path:?}: {part}");
            }
            assert!(page.contains("\\-\\-database\\-url"), "{path:?}: global options");
            assert!(command.has_subcommands() || page.contains(".SH EXAMPLES\n"), "{path:?}");
            assert!(!page.contains("longshore\\-complete (1)"), "hidden commands have no page");
        }
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(text("--a \\ b"), "\\-\\-a \\e b");
        assert_eq!(text(".TH x\n'y"), "\\&.TH x\n\\&'y");
    }

    #[test]
    fn values_defaults_and_variables_are_shown() {
        let mut root = Cli::command();
        root.build();
        let worker = page(&["longshore", "worker"], root.find_subcommand("worker").expect("worker"));
        for part in ["[possible values: pretty, json]", "[default: 500ms]", "[env: WORKER_CONCURRENCY]"] {
            assert!(worker.contains(part), "{part}: {worker}");
        }
    }
}
