//! What goes to the screen: tables for people, one JSON document for programs.
//!
//! Everything that was ever stored by somebody else passes through [`clean`]
//! (tables) or [`escape`] (JSON), so that a payload cannot drive the terminal
//! of whoever looks at it. A reader that went away (`| head`) is no error; an
//! answer that could not be written is one.

mod progress;
mod raw_object;
mod screen;

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::rc::Rc;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;

use crate::failure::Code;

pub(crate) use progress::{Progress, is_wanted};
pub(crate) use raw_object::RawObject;
pub(crate) use screen::Cursor;

/// Where a command's answer goes, and in which form.
#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) json: bool,
    pace: Pace,
    /// What the next frame will show, if frames are drawn.
    frame: RefCell<String>,
    /// Shared by all that write for one command.
    reader: Rc<Cell<Reader>>,
}

/// Who takes what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    Reads,
    /// Went away: has seen enough.
    Left,
    /// Cannot take more, like a full disk.
    Full,
}

/// Whether there is one answer or one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// One, and it is printed.
    Once,
    /// Many, one below the other; documents take a line each.
    Appended,
    /// Many, each in the place of the last.
    Redrawn,
}

impl Out {
    /// For standard output: cut to the terminal's width if it is one, whole if
    /// a file or another program reads.
    pub(crate) fn new(json: bool) -> Self {
        Out { json, pace: Pace::Once, frame: RefCell::default(), reader: Rc::new(Cell::new(Reader::Reads)) }
    }

    /// For answers that come again and again: drawn in place on a terminal, else
    /// appended.
    pub(crate) fn repeated(&self) -> Self {
        let redrawn = !self.json && io::stdout().is_terminal();
        let pace = if redrawn { Pace::Redrawn } else { Pace::Appended };
        Out { pace, reader: self.reader.clone(), ..Out::new(self.json) }
    }

    /// For answers of which each is one line.
    pub(crate) fn appended(&self) -> Self {
        Out { pace: Pace::Appended, reader: self.reader.clone(), ..Out::new(self.json) }
    }

    /// Whether answers are drawn in place.
    pub(crate) fn is_redrawn(&self) -> bool {
        self.pace == Pace::Redrawn
    }

    /// Ends one of many answers: what was gathered is drawn.
    pub(crate) fn end_frame(&self) {
        if self.is_redrawn() {
            screen::draw(&self.frame.take(), terminal().map(|(_, height)| height));
        }
    }

    /// Whether nobody reads any more, or can.
    pub(crate) fn reader_left(&self) -> bool {
        self.reader.get() != Reader::Reads
    }

    /// Whether something could not be written that somebody waits for.
    pub(crate) fn is_lost(&self) -> bool {
        self.reader.get() == Reader::Full
    }

    /// How to exit: what nobody could be told is not done.
    pub(crate) fn exit(&self, code: Code) -> Code {
        if code == Code::Done && self.is_lost() { Code::Problem } else { code }
    }

    /// One JSON document.
    pub(crate) fn document(&self, value: &impl Serialize) {
        let text = match self.pace {
            Pace::Once => serde_json::to_string_pretty(value),
            // Line breaks stand in payloads as they were given, and there mean
            // nothing: inside strings they are escaped.
            Pace::Appended | Pace::Redrawn => {
                serde_json::to_string(value).map(|text| text.replace(['\n', '\r'], " "))
            }
        };
        match text {
            Ok(text) => self.print(&escape(&text)),
            // Every answer serialises; this would be a bug of ours.
            Err(error) => self.note(format_args!("error: the answer does not serialise: {error}")),
        }
    }

    /// A table, or what to say when it has no rows.
    pub(crate) fn table(&self, table: &Table, when_empty: &str) {
        if table.rows.is_empty() {
            self.print(when_empty)
        } else {
            let width = terminal().map(|(width, _)| width);
            self.print(table.render(width).trim_end_matches('\n'));
        }
    }

    /// One line for people.
    pub(crate) fn line(&self, line: impl Display) {
        self.print(&clean(&line.to_string()));
    }

    /// A text of ours that programs read, as it is.
    pub(crate) fn script(&self, text: &str) {
        self.print(text.trim_end_matches('\n'));
    }

    /// One line beside the answer, on standard error.
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
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.reader.set(Reader::Left),
            Err(error) => {
                // Once is enough; a worker may have many lines to tell.
                if !self.is_lost() {
                    note(unwritten(&error));
                }
                self.reader.set(Reader::Full);
            }
            Ok(()) => {}
        }
    }
}

/// What to say of an answer that could not be written.
pub(crate) fn unwritten(error: &io::Error) -> String {
    format!("error: the answer could not be written to standard output: {error}")
}

/// The columns and lines of standard output, if it is a terminal.
fn terminal() -> Option<(usize, usize)> {
    let size = io::stdout().is_terminal().then(terminal_size::terminal_size).flatten()?;
    let (terminal_size::Width(columns), terminal_size::Height(lines)) = size;
    Some((columns.into(), lines.into()))
}

/// One line on standard error.
pub(crate) fn note(line: impl Display) {
    // Nobody is left to be told that standard error is gone.
    let _ = writeln!(io::stderr(), "{}", clean(&line.to_string()));
}

/// Text without anything that moves a cursor, changes a colour, rings a bell or
/// reorders what is read. Line breaks and tabs become spaces.
pub(crate) fn clean(text: &str) -> String {
    let kept = text.chars().filter_map(|c| match c {
        '\n' | '\r' | '\t' => Some(' '),
        c if is_unsafe(c) => None,
        c => Some(c),
    });
    kept.collect()
}

/// JSON that says the same without a raw character of that sort. They can only
/// stand inside strings, where an escape means the same.
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

/// Quotes a word so that a shell reads it back as one.
pub(crate) fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+=,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// What a column does when the terminal is narrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Stays whole: what people copy.
    Whole,
    /// Is cut.
    Cut,
    /// Stays whole or is left out, rightmost first.
    WholeOrOut,
    /// Is cut, and left out when even that is not enough.
    CutOrOut,
}

impl Fit {
    fn least(self, width: usize, narrowest: usize) -> usize {
        match self {
            Fit::Whole | Fit::WholeOrOut => width,
            Fit::Cut | Fit::CutOrOut => width.min(narrowest),
        }
    }
}

/// A table whose columns are as wide as what is in them.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Fit)>,
    rows: Vec<Vec<String>>,
}

const GAP: usize = 2;
/// How narrow a column is cut: first to what can still be read, and if nothing
/// is left to leave out, further.
const NARROWEST: [usize; 2] = [8, 4];

impl Table {
    pub(crate) fn new(columns: impl IntoIterator<Item = (&'static str, Fit)>) -> Self {
        Table { columns: columns.into_iter().collect(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let row: Vec<String> = cells.into_iter().map(|cell| clean(&cell)).collect();
        debug_assert_eq!(row.len(), self.columns.len(), "a cell for each column");
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

    /// How wide each column is shown; `None` leaves it out.
    fn widths(&self, room: usize) -> Vec<Option<usize>> {
        let content = |at: usize| {
            let cells = self.rows.iter().map(|row| row[at].chars().count());
            cells.chain([self.columns[at].0.len()]).max().unwrap_or(0)
        };
        let mut widths: Vec<Option<usize>> = (0..self.columns.len()).map(|at| Some(content(at))).collect();
        while self.total(&widths, NARROWEST[0]) > room {
            let may_go = |at: &usize| {
                widths[*at].is_some() && matches!(self.columns[*at].1, Fit::WholeOrOut | Fit::CutOrOut)
            };
            let Some(at) = (0..widths.len()).rev().find(may_go) else { break };
            widths[at] = None;
        }
        for narrowest in NARROWEST {
            while self.total(&widths, usize::MAX) > room {
                let cuttable = |at: &usize| {
                    widths[*at].is_some_and(|width| width > self.columns[*at].1.least(width, narrowest))
                };
                let Some(widest) = (0..widths.len()).filter(cuttable).max_by_key(|at| widths[*at]) else {
                    break;
                };
                widths[widest] = widths[widest].map(|width| width - 1);
            }
        }
        widths
    }

    /// How wide the table is with columns cut to `narrowest`.
    fn total(&self, widths: &[Option<usize>], narrowest: usize) -> usize {
        let shown = widths.iter().zip(&self.columns);
        let shown = shown.filter_map(|(width, (_, fit))| Some(fit.least((*width)?, narrowest) + GAP));
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
            ("attempts", Fit::WholeOrOut),
            ("last error", Fit::CutOrOut),
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
    fn a_narrow_terminal_cuts_the_widest_first_and_never_the_id() {
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
    fn a_very_narrow_terminal_leaves_columns_out() {
        for (room, kind) in [(26, "send_emai…"), (22, "send_…")] {
            let shown = table().render(Some(room));
            let lines: Vec<&str> = shown.lines().collect();
            assert_eq!(lines[..2], ["ID              KIND", &format!("0199-aaaa-bbbb  {kind}")], "{room}");
            assert!(lines.iter().all(|line| line.chars().count() <= room), "{shown}");
        }
        assert!(table().render(Some(3)).contains("0199-cccc-dddd"), "ids stay whole whatever happens");
    }

    #[test]
    fn nothing_from_the_database_drives_the_terminal() {
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
    fn a_shell_reads_a_quoted_word_back_as_one() {
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
