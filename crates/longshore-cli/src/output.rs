//! The output of commands: tables and lines for people, one JSON document for programs.
//!
//! All stored data passes through [`clean`] (text) or [`escape`] (JSON), so that a payload
//! cannot send control sequences to the user's terminal. If the reader closes the pipe
//! (`| head`), that is no error; any other failure to write is.

mod progress;
mod raw_object;
mod screen;
mod table;
mod time;

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;

use crate::failure::Code;

pub(crate) use progress::Progress;
pub(crate) use raw_object::RawObject;
pub(crate) use screen::Cursor;
use table::Colours;
pub(crate) use table::{Fit, Table};

/// Writes a command's output, as text or JSON.
#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) json: bool,
    times: Times,
    mode: Mode,
    /// The text of the next frame, if output is redrawn.
    frame: RefCell<String>,
    /// Shared by all outputs of one command.
    reader: Rc<Cell<Reader>>,
}

/// How text shows times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Times {
    /// How long ago, or how soon.
    Relative,
    /// In UTC, to the second.
    Utc,
}

/// The state of whatever reads standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    Reading,
    /// The reader closed the pipe; nobody needs the rest.
    Closed,
    /// A write failed, for example because the disk is full.
    Failed,
}

/// Whether the command prints its output once or repeatedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Printed once.
    Once,
    /// Repeated, each below the last. A JSON document takes one line.
    Appended,
    /// Repeated, each over the last.
    Redrawn,
}

impl Out {
    /// Output that is printed once. Tables are cut to the width of the terminal, and are
    /// complete if standard output is not a terminal.
    pub(crate) fn new(json: bool, times: Times) -> Self {
        let reader = Rc::new(Cell::new(Reader::Reading));
        Out { json, times, mode: Mode::Once, frame: RefCell::default(), reader }
    }

    /// Repeated output: redrawn in place on a terminal, otherwise appended.
    pub(crate) fn repeated(&self) -> Self {
        let redrawn = !self.json && has_escapes(&io::stdout());
        let mode = if redrawn { Mode::Redrawn } else { Mode::Appended };
        Out { mode, reader: self.reader.clone(), ..Out::new(self.json, self.times) }
    }

    /// Output that grows line by line.
    pub(crate) fn appended(&self) -> Self {
        Out { mode: Mode::Appended, reader: self.reader.clone(), ..Out::new(self.json, self.times) }
    }

    /// Output as one JSON document per line, to go with a JSON log.
    pub(crate) fn json_lines(&self) -> Self {
        Out { mode: Mode::Appended, reader: self.reader.clone(), ..Out::new(true, self.times) }
    }

    /// Whether output is redrawn in place.
    pub(crate) fn is_redrawn(&self) -> bool {
        self.mode == Mode::Redrawn
    }

    /// Ends one repetition: draws the collected frame.
    pub(crate) fn end_frame(&self) {
        if self.is_redrawn() {
            screen::draw(&self.frame.take(), terminal().map(|(_, height)| height));
        }
    }

    /// Whether standard output accepts no more.
    pub(crate) fn is_closed(&self) -> bool {
        self.reader.get() != Reader::Reading
    }

    /// Whether output was lost because a write failed.
    pub(crate) fn write_failed(&self) -> bool {
        self.reader.get() == Reader::Failed
    }

    /// The exit code: a command whose output was lost has not succeeded.
    pub(crate) fn exit(&self, code: Code) -> Code {
        if code == Code::Done && self.write_failed() { Code::Problem } else { code }
    }

    /// Prints one JSON document.
    pub(crate) fn document(&self, value: &impl Serialize) {
        let text = match self.mode {
            Mode::Once => serde_json::to_string_pretty(value),
            // A raw payload may contain line breaks between its tokens. Replacing them is safe,
            // because inside JSON strings line breaks are escaped.
            Mode::Appended | Mode::Redrawn => {
                serde_json::to_string(value).map(|text| text.replace(['\n', '\r'], " "))
            }
        };
        match text {
            Ok(text) => self.print(&escape(&text)),
            // A bug: every document can be serialised.
            Err(error) => self.note(format_args!("error: cannot serialise the output: {error}")),
        }
    }

    /// Prints a table, or `when_empty` if it has no rows.
    pub(crate) fn table(&self, table: &Table, when_empty: &str) {
        if table.is_empty() {
            return self.print(when_empty);
        }
        let rendered = table.render(terminal().map(|(width, _)| width), colours());
        self.print(rendered.text.trim_end_matches('\n'));
        if !rendered.omitted.is_empty() {
            self.note(format_args!(
                "not shown: {} (use a wider terminal or --json)",
                rendered.omitted.join(", ")
            ));
        }
    }

    /// A time: how long ago or how soon, or exact with `--utc`; a dash if there is none.
    pub(crate) fn time(&self, at: impl Into<Option<DateTime<Utc>>>) -> String {
        match (at.into(), self.times) {
            (Some(at), Times::Relative) => time::relative(Utc::now() - at),
            (at, _) => instant(at),
        }
    }

    /// The age of something since this time, or the time itself with `--utc`.
    pub(crate) fn age(&self, since: DateTime<Utc>) -> String {
        match self.times {
            Times::Relative => time::rounded(Utc::now() - since),
            Times::Utc => instant(since),
        }
    }

    /// Whether people read the output, at a terminal.
    pub(crate) fn is_terminal(&self) -> bool {
        terminal().is_some()
    }

    /// Prints one line of text.
    pub(crate) fn line(&self, line: impl Display) {
        self.print(&clean(&line.to_string()));
    }

    /// Prints a text of this program's own unchanged, such as a completion script.
    pub(crate) fn script(&self, text: &str) {
        self.print(text.trim_end_matches('\n'));
    }

    /// Prints one line to standard error.
    pub(crate) fn note(&self, line: impl Display) {
        if self.is_redrawn() { self.line(line) } else { note(line) }
    }

    fn print(&self, text: &str) {
        if self.is_redrawn() {
            let mut frame = self.frame.borrow_mut();
            frame.push_str(text);
            frame.push('\n');
            return;
        }
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.reader.set(Reader::Closed),
            Err(error) => {
                // Report it once; a worker may have many more lines to print.
                if !self.write_failed() {
                    note(write_error(&error));
                }
                self.reader.set(Reader::Failed);
            }
            Ok(()) => {}
        }
    }
}

/// The message for output that could not be written.
pub(crate) fn write_error(error: &io::Error) -> String {
    format!("error: the output could not be written to standard output: {error}")
}

/// The width and height of standard output, if it is a terminal.
fn terminal() -> Option<(usize, usize)> {
    let size = io::stdout().is_terminal().then(terminal_size::terminal_size).flatten()?;
    let (terminal_size::Width(columns), terminal_size::Height(lines)) = size;
    Some((columns.into(), lines.into()))
}

/// Whether [`note`] prints JSON.
static JSON_NOTES: AtomicBool = AtomicBool::new(false);

/// Sets whether notes are JSON. In a command with a JSON log, programs read standard error line by
/// line.
pub(crate) fn print_notes_as_json(json: bool) {
    JSON_NOTES.store(json, Ordering::Relaxed);
}

pub(crate) fn prints_notes_as_json() -> bool {
    JSON_NOTES.load(Ordering::Relaxed)
}

/// Whether escape sequences may be written here: it is a terminal that understands them.
pub(crate) fn has_escapes(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && !is_dumb()
}

/// Whether colours may be written here. The user can turn them off: see no-color.org.
pub(crate) fn has_colours(stream: &impl IsTerminal) -> bool {
    has_escapes(stream) && !is_without_colours()
}

/// The colours of help and of errors about arguments. By itself, clap would use colours on a
/// terminal that cannot show them if the variable `CI` is set.
pub(crate) fn help_colours() -> clap::ColorChoice {
    if is_dumb() || is_without_colours() { clap::ColorChoice::Never } else { clap::ColorChoice::Auto }
}

fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|name| name == "dumb")
}

fn is_without_colours() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

fn colours() -> Colours {
    if has_colours(&io::stdout()) { Colours::On } else { Colours::Off }
}

/// Prints one line to standard error.
pub(crate) fn note(line: impl Display) {
    let line = clean(&line.to_string());
    let line = if prints_notes_as_json() { log_line(&line) } else { line };
    // If standard error is closed, there is nowhere to report that.
    let _ = writeln!(io::stderr(), "{line}");
}

/// A note in the format of a JSON log line.
fn log_line(note: &str) -> String {
    let (level, message) = match note.split_once(": ") {
        Some(("error", message)) => ("ERROR", message),
        Some(("warning", message)) => ("WARN", message),
        _ => ("INFO", note),
    };
    let timestamp = Utc::now().to_rfc3339_opts(SecondsFormat::Micros, true);
    let fields = serde_json::json!({ "message": message });
    serde_json::json!({ "timestamp": timestamp, "level": level, "fields": fields }).to_string()
}

/// Removes characters that could move the cursor, change colours, ring the bell or reorder
/// text. Line breaks and tabs become spaces.
pub(crate) fn clean(text: &str) -> String {
    let kept = text.chars().filter_map(|c| match c {
        '\n' | '\r' | '\t' => Some(' '),
        c if is_unsafe(c) => None,
        c => Some(c),
    });
    kept.collect()
}

/// Escapes the same characters in JSON. They can only be inside strings, where the escape
/// has the same meaning.
pub(crate) fn escape(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\n' | '\r' | '\t' => escaped.push(c),
            c if is_unsafe(c) => escaped.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => escaped.push(c),
        }
    }
    escaped
}

fn is_unsafe(c: char) -> bool {
    let reorders =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let breaks_line = matches!(c, '\u{2028}' | '\u{2029}');
    c.is_control() || reorders || breaks_line
}

/// An instant to the second, or a dash.
pub(crate) fn instant(at: impl Into<Option<DateTime<Utc>>>) -> String {
    at.into().map_or_else(|| "-".into(), |at| at.to_rfc3339_opts(SecondsFormat::Secs, true))
}

/// A text, or a dash.
pub(crate) fn or_dash(text: Option<&str>) -> &str {
    text.unwrap_or("-")
}

/// `1 job`, `2 jobs`.
pub(crate) fn counted(n: u64, thing: &str) -> String {
    match n {
        1 => format!("1 {thing}"),
        n => format!("{n} {thing}s"),
    }
}

/// Quotes a word so that a shell reads it as one word.
pub(crate) fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn stored_text_cannot_control_the_terminal() {
        let hostile = "\u{1b}[31mred\u{7}\u{9b}2J\r\nnext\u{202e}txt\u{0}\u{7f}";
        assert_eq!(clean(hostile), "[31mred2J  nexttxt");
    }

    #[test]
    fn json_keeps_its_meaning_without_raw_control_characters() {
        let hostile = "\u{1b}[2J\u{9b}2J\u{7f}\u{202e}ü";
        let raw =
            serde_json::value::RawValue::from_string(format!("{{\"a\":\n\"{}\"}}", &hostile[1..])).unwrap();
        for text in [serde_json::to_string(hostile).unwrap(), serde_json::to_string(&raw).unwrap()] {
            let escaped = escape(&text);
            assert!(!escaped.chars().any(|c| c != '\n' && is_unsafe(c)), "{escaped}");
            let (before, after): (serde_json::Value, serde_json::Value) =
                (serde_json::from_str(&text).unwrap(), serde_json::from_str(&escaped).unwrap());
            assert_eq!(before, after);
        }
    }

    #[test]
    fn a_shell_reads_a_quoted_word_as_one_word() {
        assert_eq!(quote("mail"), "mail");
        assert_eq!(quote("two words"), "'two words'");
        assert_eq!(quote("it's"), r"'it'\''s'");
        assert_eq!(quote("$(rm)"), "'$(rm)'");
        assert_eq!(quote(""), "''");
    }

    #[test]
    fn instants_are_shown_to_the_second() {
        assert_eq!(instant(DateTime::from_timestamp(1_700_000_000, 5_000_000)), "2023-11-14T22:13:20Z");
        assert_eq!(instant(None), "-");
    }
}
