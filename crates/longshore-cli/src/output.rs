//! The output of commands: tables and lines for people, one JSON document for programs.
//!
//! All stored data passes through [`clean`] (text) or [`escape`] (JSON), so that a payload
//! cannot send control sequences to the user's terminal. If the reader closes the pipe
//! (`| head`), that is no error; any other failure to write is.

mod progress;
mod raw_object;
mod screen;

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

/// Writes a command's output, as text or JSON.
#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) json: bool,
    mode: Mode,
    /// The text of the next frame, if output is redrawn.
    frame: RefCell<String>,
    /// Shared by all outputs of one command.
    reader: Rc<Cell<Reader>>,
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
    pub(crate) fn new(json: bool) -> Self {
        Out { json, mode: Mode::Once, frame: RefCell::default(), reader: Rc::new(Cell::new(Reader::Reading)) }
    }

    /// Repeated output: redrawn in place on a terminal, otherwise appended.
    pub(crate) fn repeated(&self) -> Self {
        let redrawn = !self.json && io::stdout().is_terminal();
        let mode = if redrawn { Mode::Redrawn } else { Mode::Appended };
        Out { mode, reader: self.reader.clone(), ..Out::new(self.json) }
    }

    /// Output that grows line by line.
    pub(crate) fn appended(&self) -> Self {
        Out { mode: Mode::Appended, reader: self.reader.clone(), ..Out::new(self.json) }
    }

    /// Output as one JSON document per line, to go with a JSON log.
    pub(crate) fn json_lines(&self) -> Self {
        Out { mode: Mode::Appended, reader: self.reader.clone(), ..Out::new(true) }
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
        if table.rows.is_empty() {
            self.print(when_empty)
        } else {
            let width = terminal().map(|(width, _)| width);
            self.print(table.render(width).trim_end_matches('\n'));
        }
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
fn escape(json: &str) -> String {
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

/// How a column adapts to a narrow terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Never cut, for values that people copy.
    Whole,
    /// Cut.
    Cut,
    /// Never cut, but omitted if there is no room, rightmost column first.
    WholeOrOmitted,
    /// Cut, and omitted if that is not enough.
    CutOrOmitted,
}

impl Fit {
    fn min_width(self, width: usize, narrowest: usize) -> usize {
        match self {
            Fit::Whole | Fit::WholeOrOmitted => width,
            Fit::Cut | Fit::CutOrOmitted => width.min(narrowest),
        }
    }
}

/// A table whose columns are as wide as their content.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Fit)>,
    rows: Vec<Vec<String>>,
}

const GAP: usize = 2;
/// How narrow a column may be cut: first to a readable width, and further if there is
/// still no room after omitting columns.
const NARROWEST: [usize; 2] = [8, 4];

impl Table {
    pub(crate) fn new(columns: impl IntoIterator<Item = (&'static str, Fit)>) -> Self {
        Table { columns: columns.into_iter().collect(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let row: Vec<String> = cells.into_iter().map(|cell| clean(&cell)).collect();
        debug_assert_eq!(row.len(), self.columns.len(), "one cell per column");
        self.rows.push(row);
    }

    fn render(&self, width: Option<usize>) -> String {
        let widths = self.widths(width.unwrap_or(usize::MAX));
        let mut text = String::new();
        let titles: Vec<String> = self.columns.iter().map(|(title, _)| title.to_uppercase()).collect();
        for row in std::iter::once(&titles).chain(&self.rows) {
            let shown = widths.iter().zip(row).filter_map(|(width, cell)| Some((*width.as_ref()?, cell)));
            let line: Vec<String> =
                shown.map(|(width, cell)| format!("{:<width$}", truncate(cell, width))).collect();
            text.push_str(line.join(&" ".repeat(GAP)).trim_end());
            text.push('\n');
        }
        text
    }

    /// The width of each column; `None` omits it.
    fn widths(&self, room: usize) -> Vec<Option<usize>> {
        let content = |at: usize| {
            let cells = self.rows.iter().map(|row| row[at].chars().count());
            cells.chain([self.columns[at].0.len()]).max().unwrap_or(0)
        };
        let mut widths: Vec<Option<usize>> = (0..self.columns.len()).map(|at| Some(content(at))).collect();
        while self.total(&widths, NARROWEST[0]) > room {
            let can_omit = |at: &usize| {
                widths[*at].is_some()
                    && matches!(self.columns[*at].1, Fit::WholeOrOmitted | Fit::CutOrOmitted)
            };
            let Some(at) = (0..widths.len()).rev().find(can_omit) else { break };
            widths[at] = None;
        }
        for narrowest in NARROWEST {
            while self.total(&widths, usize::MAX) > room {
                let cuttable = |at: &usize| {
                    widths[*at].is_some_and(|width| width > self.columns[*at].1.min_width(width, narrowest))
                };
                let Some(widest) = (0..widths.len()).filter(cuttable).max_by_key(|at| widths[*at]) else {
                    break;
                };
                widths[widest] = widths[widest].map(|width| width - 1);
            }
        }
        widths
    }

    /// The width of the table if columns are cut to `narrowest`.
    fn total(&self, widths: &[Option<usize>], narrowest: usize) -> usize {
        let shown = widths.iter().zip(&self.columns);
        let shown = shown.filter_map(|(width, (_, fit))| Some(fit.min_width((*width)?, narrowest) + GAP));
        shown.sum::<usize>().saturating_sub(GAP)
    }
}

fn truncate(cell: &str, width: usize) -> String {
    if cell.chars().count() <= width {
        cell.to_owned()
    } else {
        cell.chars().take(width.saturating_sub(1)).chain(['…']).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new([
            ("id", Fit::Whole),
            ("kind", Fit::Cut),
            ("attempts", Fit::WholeOrOmitted),
            ("last error", Fit::CutOrOmitted),
        ]);
        table.row(["0199-aaaa-bbbb", "send_email_to_everybody", "1/3", "connection refused"].map(Into::into));
        table.row(["0199-cccc-dddd", "greet", "-", "-"].map(Into::into));
        table
    }

    #[test]
    fn columns_are_as_wide_as_their_content() {
        let expected = "\
ID              KIND                     ATTEMPTS  LAST ERROR
0199-aaaa-bbbb  send_email_to_everybody  1/3       connection refused
0199-cccc-dddd  greet                    -         -
";
        assert_eq!(table().render(None), expected);
    }

    #[test]
    fn on_a_narrow_terminal_the_widest_column_is_cut_first_and_never_the_id() {
        let expected = "\
ID              KIND        ATTEMPTS  LAST ERROR
0199-aaaa-bbbb  send_emai…  1/3       connectio…
0199-cccc-dddd  greet       -         -
";
        let shown = table().render(Some(48));
        assert_eq!(shown, expected);
        assert!(shown.lines().all(|line| line.chars().count() <= 48));
    }

    #[test]
    fn on_a_very_narrow_terminal_columns_are_omitted() {
        for (room, kind) in [(26, "send_emai…"), (22, "send_…")] {
            let shown = table().render(Some(room));
            let lines: Vec<&str> = shown.lines().collect();
            assert_eq!(lines[..2], ["ID              KIND", &format!("0199-aaaa-bbbb  {kind}")], "{room}");
            assert!(lines.iter().all(|line| line.chars().count() <= room), "{shown}");
        }
        assert!(table().render(Some(3)).contains("0199-cccc-dddd"), "ids are never cut");
    }

    #[test]
    fn stored_text_cannot_control_the_terminal() {
        let hostile = "\u{1b}[31mred\u{7}\u{9b}2J\r\nnext\u{202e}txt\u{0}\u{7f}";
        assert_eq!(clean(hostile), "[31mred2J  nexttxt");
        let mut table = Table::new([("error", Fit::Whole)]);
        table.row([hostile.to_owned()]);
        assert!(!table.render(None).chars().any(|c| c != '\n' && is_unsafe(c)));
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
