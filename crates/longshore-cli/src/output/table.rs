//! Tables: how columns adapt to the width of the terminal, and the colours of states.

use super::clean;

/// How a column adapts to a narrow terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Never cut, for values that people copy.
    Whole,
    /// Cut.
    Cut,
    /// Cut, but only after the columns that can be omitted, for what matters most.
    CutLast,
    /// Never cut, but omitted if there is no room, rightmost column first.
    WholeOrOmitted,
    /// Never cut, and omitted before all others, for what says little.
    WholeOrOmittedFirst,
    /// Cut, and omitted if that is not enough.
    CutOrOmitted,
}

impl Fit {
    /// The width to which a column can be cut. Titles are never cut: a title that is wider than
    /// its column would move the titles after it.
    fn min_width(self, title: &str, width: usize, narrowest: usize) -> usize {
        match self {
            Fit::Whole | Fit::WholeOrOmitted | Fit::WholeOrOmittedFirst => width,
            Fit::Cut | Fit::CutLast | Fit::CutOrOmitted => width.min(narrowest.max(title.len())),
        }
    }

    /// The width that is reserved before a column is omitted.
    fn reserved_width(self, title: &str, width: usize) -> usize {
        self.min_width(title, width, if self == Fit::CutLast { RESERVED } else { NARROWEST[0] })
    }

    fn can_be_omitted(self) -> bool {
        matches!(self, Fit::WholeOrOmitted | Fit::WholeOrOmittedFirst | Fit::CutOrOmitted)
    }
}

/// Whether states are coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colours {
    On,
    Off,
}

/// A table whose columns are as wide as their content.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Fit)>,
    rows: Vec<Vec<String>>,
}

/// A table as text.
#[derive(Debug)]
pub(super) struct Rendered {
    pub(super) text: String,
    /// The titles of the columns for which there was no room.
    pub(super) omitted: Vec<&'static str>,
}

const GAP: usize = 2;
/// How narrow a column may be cut: first to a readable width, and further if there is
/// still no room after omitting columns.
const NARROWEST: [usize; 2] = [8, 4];
/// How many characters of a [`Fit::CutLast`] column matter more than another column.
const RESERVED: usize = 30;

impl Table {
    pub(crate) fn new(columns: impl IntoIterator<Item = (&'static str, Fit)>) -> Self {
        Table { columns: columns.into_iter().collect(), rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let row: Vec<String> = cells.into_iter().map(|cell| clean(&cell)).collect();
        debug_assert_eq!(row.len(), self.columns.len(), "one cell per column");
        self.rows.push(row);
    }

    /// Removes the columns with these titles.
    pub(crate) fn without(mut self, titles: &[&str]) -> Self {
        for at in (0..self.columns.len()).rev() {
            if titles.contains(&self.columns[at].0) {
                self.columns.remove(at);
                self.rows.iter_mut().for_each(|row| drop(row.remove(at)));
            }
        }
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn render(&self, width: Option<usize>, colours: Colours) -> Rendered {
        let widths = self.widths(width.unwrap_or(usize::MAX));
        let shown: Vec<(usize, usize)> =
            widths.iter().enumerate().filter_map(|(at, width)| Some((at, (*width)?))).collect();
        let mut text = String::new();
        let mut add = |cells: &mut dyn Iterator<Item = String>| {
            let line: Vec<String> = cells.collect();
            text.push_str(line.join(&" ".repeat(GAP)).trim_end());
            text.push('\n');
        };
        add(&mut shown.iter().map(|(at, width)| format!("{:<width$}", self.columns[*at].0.to_uppercase())));
        for row in &self.rows {
            add(&mut shown.iter().map(|(at, width)| {
                let cell = truncate(&row[*at], *width);
                let padding = " ".repeat(width - cell.chars().count());
                match colour(self.columns[*at].0, &row[*at]).filter(|_| colours == Colours::On) {
                    Some(code) => format!("\x1b[{code}m{cell}\x1b[0m{padding}"),
                    None => cell + &padding,
                }
            }));
        }
        let omitted = widths.iter().zip(&self.columns).filter(|(width, _)| width.is_none());
        Rendered { text, omitted: omitted.map(|(_, (title, _))| *title).collect() }
    }

    /// The width of each column; `None` omits it.
    fn widths(&self, room: usize) -> Vec<Option<usize>> {
        let content = |at: usize| {
            let cells = self.rows.iter().map(|row| row[at].chars().count());
            cells.chain([self.columns[at].0.len()]).max().unwrap_or(0)
        };
        let mut widths: Vec<Option<usize>> = (0..self.columns.len()).map(|at| Some(content(at))).collect();
        while self.total(&widths, |(title, fit), width| fit.reserved_width(title, width)) > room {
            let can_omit = |at: &usize| widths[*at].is_some() && self.columns[*at].1.can_be_omitted();
            let order = |at: &usize| (self.columns[*at].1 == Fit::WholeOrOmittedFirst, *at);
            let Some(at) = (0..widths.len()).filter(can_omit).max_by_key(order) else { break };
            widths[at] = None;
        }
        for narrowest in NARROWEST {
            while self.total(&widths, |_, width| width) > room {
                let cuttable = |at: &usize| {
                    let (title, fit) = self.columns[*at];
                    widths[*at].is_some_and(|width| width > fit.min_width(title, width, narrowest))
                };
                let Some(widest) = (0..widths.len()).filter(cuttable).max_by_key(|at| widths[*at]) else {
                    break;
                };
                widths[widest] = widths[widest].map(|width| width - 1);
            }
        }
        widths
    }

    /// The width of the table if each column has the width that `of` returns for it.
    fn total(&self, widths: &[Option<usize>], of: impl Fn((&str, Fit), usize) -> usize) -> usize {
        let shown = widths.iter().zip(&self.columns);
        let shown = shown.filter_map(|(width, column)| Some(of(*column, (*width)?) + GAP));
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

/// The colour of a state, as the number in its escape sequence: green is well, yellow waits
/// for something, red needs attention.
fn colour(title: &str, cell: &str) -> Option<&'static str> {
    if !matches!(title, "status" | "state") {
        return None;
    }
    match cell.split(' ').next().unwrap_or_default() {
        "succeeded" | "alive" | "active" => Some("32"),
        "retrying" | "silent" | "paused" => Some("33"),
        "failed_permanent" | "dead" => Some("31"),
        "running" => Some("36"),
        "cancelled" | "revoked" | "expired" => Some("2"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::is_unsafe;
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

    fn text(table: &Table, width: Option<usize>) -> String {
        table.render(width, Colours::Off).text
    }

    #[test]
    fn columns_are_as_wide_as_their_content() {
        let expected = "\
ID              KIND                     ATTEMPTS  LAST ERROR
0199-aaaa-bbbb  send_email_to_everybody  1/3       connection refused
0199-cccc-dddd  greet                    -         -
";
        assert_eq!(text(&table(), None), expected);
        assert_eq!(table().render(None, Colours::Off).omitted, Vec::<&str>::new());
    }

    #[test]
    fn on_a_narrow_terminal_the_widest_column_is_cut_first_and_never_the_id() {
        let expected = "\
ID              KIND        ATTEMPTS  LAST ERROR
0199-aaaa-bbbb  send_emai…  1/3       connectio…
0199-cccc-dddd  greet       -         -
";
        let shown = text(&table(), Some(48));
        assert_eq!(shown, expected);
        assert!(shown.lines().all(|line| line.chars().count() <= 48));
    }

    #[test]
    fn on_a_very_narrow_terminal_columns_are_omitted_and_named() {
        for (room, kind) in [(26, "send_emai…"), (22, "send_…")] {
            let rendered = table().render(Some(room), Colours::Off);
            let lines: Vec<&str> = rendered.text.lines().collect();
            assert_eq!(lines[..2], ["ID              KIND", &format!("0199-aaaa-bbbb  {kind}")], "{room}");
            assert!(lines.iter().all(|line| line.chars().count() <= room), "{rendered:?}");
            assert_eq!(rendered.omitted, ["attempts", "last error"], "{room}");
        }
        assert!(text(&table(), Some(3)).contains("0199-cccc-dddd"), "ids are never cut");
    }

    #[test]
    fn a_title_is_as_wide_as_its_column_and_the_omitted_column_is_named() {
        let mut table = Table::new([
            ("id", Fit::Whole),
            ("kind", Fit::Cut),
            ("age", Fit::Whole),
            ("last error", Fit::CutLast),
            ("attempts", Fit::WholeOrOmitted),
            ("queue", Fit::CutOrOmitted),
            ("due", Fit::WholeOrOmitted),
            ("priority", Fit::WholeOrOmitted),
        ]);
        let row = ["0123456789abcdef", "summarize_text", "13m", "-", "0/3", "default", "in 2m", "0"];
        table.row(row.map(Into::into));
        let expected = "\
ID                KIND       AGE  LAST ERROR  ATTEMPTS  QUEUE    DUE    PRIORITY
0123456789abcdef  summariz…  13m  -           0/3       default  in 2m  0
";
        assert_eq!(text(&table, Some(80)), expected);
        let rendered = table.render(Some(78), Colours::Off);
        let expected = "\
ID                KIND            AGE  LAST ERROR  ATTEMPTS  QUEUE    DUE
0123456789abcdef  summarize_text  13m  -           0/3       default  in 2m
";
        assert_eq!((rendered.text.as_str(), rendered.omitted), (expected, vec!["priority"]));
    }

    /// The start of every column in the title line: after two spaces.
    fn starts(titles: &[&str]) -> Vec<usize> {
        let line: Vec<char> = titles[0].chars().collect();
        (0..line.len())
            .filter(|at| line[*at] != ' ' && (*at == 0 || line[at.saturating_sub(GAP)..*at] == [' ', ' ']))
            .collect()
    }

    #[test]
    fn every_line_fits_and_every_column_is_aligned() {
        // Titles shorter and longer than what a column can be cut to, as in the real tables.
        let titles = ["id", "kind", "last error", "failed_permanent", "queue"];
        let fits = [Fit::Whole, Fit::Cut, Fit::CutLast, Fit::WholeOrOmitted, Fit::CutOrOmitted];
        let lengths = [1, 7, 9, 12, 40];
        let mut checked = 0;
        // The ten digits of a number to base 5 choose a fit and a length for each column.
        for choice in (0..5_usize.pow(10)).step_by(3_001) {
            let digit = |at: usize| choice / 5_usize.pow(at as u32) % 5;
            let columns: Vec<(&str, Fit)> = (0..5).map(|at| (titles[at], fits[digit(at)])).collect();
            let cells: Vec<String> = (0..5).map(|at| "x".repeat(lengths[digit(at + 5)])).collect();
            let mut table = Table::new(columns.clone());
            table.row(cells.clone());
            table.row(titles.map(|_| "y".to_owned()));
            // Less room is not enough even if everything is cut and omitted.
            let least: usize = columns
                .iter()
                .zip(&cells)
                .filter(|((_, fit), _)| !fit.can_be_omitted())
                .map(|((title, fit), cell)| {
                    let width = cell.len().max(title.len());
                    GAP + if *fit == Fit::Whole { width } else { width.min(title.len().max(4)) }
                })
                .sum();
            for room in [least.saturating_sub(GAP), 40, 60, 79, 80, 81, 120] {
                if room + GAP < least || room == 0 {
                    continue;
                }
                let rendered = table.render(Some(room), Colours::Off);
                let lines: Vec<&str> = rendered.text.lines().collect();
                assert!(lines.iter().all(|line| line.chars().count() <= room), "{room}: {rendered:?}");
                let shown: Vec<usize> =
                    (0..titles.len()).filter(|at| !rendered.omitted.contains(&titles[*at])).collect();
                let starts = starts(&lines);
                assert_eq!(starts.len(), shown.len(), "{room}: {rendered:?}");
                for (at, start) in shown.into_iter().zip(starts) {
                    for (line, text) in lines.iter().zip([&titles[at].to_uppercase(), &cells[at], "y"]) {
                        let line: Vec<char> = line.chars().collect();
                        assert_eq!(line[start], text.chars().next().unwrap_or(' '), "{room}: {rendered:?}");
                        assert!(line[..start].ends_with(&[' ', ' ']) || start == 0, "{room}: {rendered:?}");
                    }
                    assert!(lines[0].contains(&titles[at].to_uppercase()), "{room}: {rendered:?}");
                }
                checked += 1;
            }
        }
        assert!(checked > 5_000, "{checked}");
    }

    #[test]
    fn what_matters_most_is_cut_only_after_other_columns_are_omitted() {
        let mut table = Table::new([
            ("id", Fit::Whole),
            ("last error", Fit::CutLast),
            ("queue", Fit::CutOrOmitted),
            ("priority", Fit::WholeOrOmitted),
        ]);
        let long = "connection refused by mail.example.com:465";
        table.row(["0199", long, "default", "0"].map(Into::into));
        let rendered = table.render(Some(50), Colours::Off);
        assert_eq!(rendered.omitted, ["priority"]);
        assert!(
            rendered.text.contains("0199  connection refused by mail.example…  default\n"),
            "{rendered:?}"
        );
        let rendered = table.render(Some(40), Colours::Off);
        assert_eq!(rendered.omitted, ["queue", "priority"]);
        assert!(rendered.text.contains("0199  connection refused by mail.exampl…\n"), "{rendered:?}");
    }

    #[test]
    fn what_says_little_is_omitted_before_columns_to_the_right() {
        let mut table = Table::new([
            ("queue", Fit::Cut),
            ("running", Fit::Whole),
            ("succeeded", Fit::WholeOrOmittedFirst),
            ("retrying", Fit::WholeOrOmittedFirst),
            ("cancelled", Fit::WholeOrOmitted),
        ]);
        table.row(["default", "0", "0", "0", "12"].map(Into::into));
        for (room, omitted) in [
            (48, vec![]),
            (47, vec!["retrying"]),
            (37, vec!["succeeded", "retrying"]),
            (26, vec!["succeeded", "retrying", "cancelled"]),
        ] {
            assert_eq!(table.render(Some(room), Colours::Off).omitted, omitted, "{room}");
        }
    }

    #[test]
    fn states_are_coloured_and_columns_stay_aligned() {
        let mut table = Table::new([("status", Fit::Whole), ("error", Fit::Whole)]);
        table.row(["failed_permanent", "failed_permanent"].map(Into::into));
        table.row(["queued", "-"].map(Into::into));
        table.row(["running", "-"].map(Into::into));
        let coloured = table.render(None, Colours::On).text;
        let expected = "\
STATUS            ERROR
\u{1b}[31mfailed_permanent\u{1b}[0m  failed_permanent
queued            -
\u{1b}[36mrunning\u{1b}[0m           -
";
        assert_eq!(coloured, expected);
        assert!(!table.render(None, Colours::Off).text.contains('\u{1b}'));
    }

    #[test]
    fn a_column_that_says_nothing_can_be_removed() {
        let shown = text(&table().without(&["kind", "attempts"]), None);
        assert!(
            shown.starts_with("ID              LAST ERROR\n0199-aaaa-bbbb  connection refused\n"),
            "{shown}"
        );
    }

    #[test]
    fn stored_text_cannot_control_the_terminal() {
        let hostile = "\u{1b}[31mred\u{7}\u{9b}2J\r\nnext\u{202e}txt\u{0}\u{7f}";
        let mut table = Table::new([("error", Fit::Whole)]);
        table.row([hostile.to_owned()]);
        assert!(!text(&table, None).chars().any(|c| c != '\n' && is_unsafe(c)));
    }
}
