//! The consistency check: what it reports, and the faults that it looks for. Each fault is written
//! once, for both engines: the statement that finds it, the sentence that names it, and the
//! remedy. The statements run in one snapshot, in the words of the engine's [`Dialect`].
//!
//! The check changes nothing, and neither does the library: an operator decides, and runs the remedy. Also
//! reports whether commits are durable.

mod flows;
mod jobs;

use std::fmt;

use async_trait::async_trait;
use serde::Serialize;
use uuid::Uuid;

use super::db::{Engine, How, Rows, Sql, Statement, one};
use crate::error::Result;
use crate::rules::enqueue::Options;

/// The maximum number of jobs listed whose options cannot be read.
const MAX_UNREADABLE: usize = 100;

/// The result of [`Checks::check`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CheckReport {
    /// The number of jobs checked.
    pub jobs: u64,
    /// The problems found, at most a hundred of each type. Empty if the tables are consistent.
    pub problems: Vec<Problem>,
}

/// A problem that the check found, and its remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// What is wrong, one sentence.
    pub problem: String,
    /// What to do about it, and what that costs.
    pub remedy: String,
    /// The statements of the remedy, for psql or sqlite3. Workers may keep running: the statements leave
    /// alone what they have changed meanwhile. Empty if the remedy is a command.
    pub sql: Vec<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.fmt(f)
    }
}

/// Whether stored jobs survive a crash of the database server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Durability {
    /// Settings of the server with which a crash may lose stored jobs, one sentence each.
    pub risks: Vec<String>,
    /// Settings that are safe only on some file systems, one sentence each.
    pub warnings: Vec<String>,
    /// Whether the database URL accepts the risks: `?durability=relaxed`.
    pub accepted: bool,
}

/// Checks.
#[async_trait]
pub trait Checks {
    /// Verifies, in one snapshot, that every job is in exactly one table, that keys
    /// belong to live jobs and that the tallies match the rows. Changes nothing.
    async fn check(&self) -> Result<CheckReport>;

    /// Reports the settings of the database with which a crash may lose stored jobs.
    async fn durability(&self) -> Result<Durability>;
}

#[async_trait]
impl<E: Engine> Checks for E {
    async fn check(&self) -> Result<CheckReport> {
        self.call(How::ALL_TABLES, (), |rows, ()| Box::pin(check(rows))).await
    }

    async fn durability(&self) -> Result<Durability> {
        self.call(How::READ, (), |rows, ()| rows.durability()).await
    }
}

static JOBS: Statement = Statement::new("select count(*) as jobs from longshore.jobs");

async fn check(rows: &mut dyn Rows) -> Sql<CheckReport> {
    let dialect = rows.dialect()?;
    let jobs = one(rows.row(&JOBS, &[]).await?)?.take("jobs")?;
    let mut report = CheckReport { jobs, problems: Vec::new() };
    for fault in faults() {
        let found = rows.texts(dialect.sql(fault.find, &[])).await?;
        report.problems.extend(found.iter().map(|values| dialect.problem(fault, values)));
    }
    let mut unreadable = Vec::new();
    let mut after = Uuid::nil().to_string();
    loop {
        let page = rows.texts(dialect.sql(OPTIONS, &[after])).await?;
        let Some(last) = page.last() else { break };
        after = last[0].clone();
        unreadable.extend(page.iter().filter_map(|row| unreadable_options(&dialect, &row[0], &row[1])));
        unreadable.truncate(MAX_UNREADABLE);
    }
    report.problems.extend(unreadable);
    Ok(report)
}

/// A fault of the rows, with its statements in the words of [`Dialect`]. In the texts, `{0}` is the
/// first value of a row that `find` returns; `{0:id}` and `{0:text}` are SQL literals of it,
/// and `{0:shell}` is a word of a shell.
struct Fault {
    /// Returns one row of values for each problem.
    find: &'static str,
    says: &'static str,
    remedy: &'static str,
    sql: &'static [&'static str],
}

/// All faults, except options that cannot be read.
fn faults() -> impl Iterator<Item = &'static Fault> {
    jobs::FAULTS.iter().chain(flows::FAULTS)
}

/// The jobs with options, for [`unreadable_options`].
const OPTIONS: &str = "
    select id, options
      from longshore.jobs
     where options is not null
       and id > {0:id}
     order by id
     limit 5000";

/// The problem of a job whose options the library cannot read, if it is one.
fn unreadable_options(dialect: &Dialect, id: &str, options: &str) -> Option<Problem> {
    let error = Options::from_stored(Some(options)).err()?;
    Some(dialect.problem(&jobs::UNREADABLE_OPTIONS, &[id.to_owned(), error.to_string()]))
}

/// The words in which the engines differ.
pub(crate) struct Dialect {
    /// Replaces `longshore.` before the names of tables.
    pub(crate) schema: String,
    pub(crate) now: String,
    pub(crate) ten_seconds: &'static str,
    pub(crate) seven_days: &'static str,
    /// The due time of a job that waits for other tasks.
    pub(crate) never: String,
    /// The literal of an id.
    pub(crate) id: fn(&str) -> String,
}

impl Dialect {
    /// A statement for this engine, with these values.
    pub(crate) fn sql(&self, statement: &str, values: &[String]) -> String {
        self.fill(&statement.replace("longshore.", &self.schema), values)
    }

    fn problem(&self, fault: &Fault, values: &[String]) -> Problem {
        Problem {
            problem: self.fill(fault.says, values),
            remedy: self.fill(fault.remedy, values),
            sql: fault.sql.iter().map(|sql| self.sql(&dedented(sql), values)).collect(),
        }
    }

    /// Replaces what is in braces. The words are our own; a test checks that all are known.
    fn fill(&self, text: &str, values: &[String]) -> String {
        let mut pieces = text.split('{');
        let mut filled = pieces.next().unwrap_or_default().to_owned();
        for piece in pieces {
            let (word, rest) = piece.split_once('}').unwrap_or((piece, ""));
            filled.push_str(&self.word(word, values));
            filled.push_str(rest);
        }
        filled
    }

    fn word(&self, word: &str, values: &[String]) -> String {
        let value =
            |at: &str| at.parse().ok().and_then(|at: usize| values.get(at)).map_or("?", String::as_str);
        match word.split_once(':') {
            Some((at, "id")) => (self.id)(value(at)),
            Some((at, "shell")) => format!("'{}'", value(at).replace('\'', "'\\''")),
            Some((at, _)) => format!("'{}'", value(at).replace('\'', "''")),
            None => match word {
                "now" => self.now.clone(),
                "10 seconds" => self.ten_seconds.into(),
                "7 days" => self.seven_days.into(),
                "never" => self.never.clone(),
                at => value(at).to_owned(),
            },
        }
    }
}

/// A statement without the indentation of the source code.
fn dedented(sql: &str) -> String {
    let lines = sql.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("\n  ") + ";"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dialect() -> Dialect {
        Dialect {
            schema: "\"jobs\".".into(),
            now: "now()".into(),
            ten_seconds: "10",
            seven_days: "7",
            never: "'9999'".into(),
            id: |id| format!("<{id}>"),
        }
    }

    #[test]
    fn values_cannot_end_a_literal_or_change_a_table() {
        let fault = Fault {
            find: "",
            says: "queue `{0}` has {1}",
            remedy: "remove {1}",
            sql: &["
                delete from longshore.ready
                 where queue = {0:text}
                   and id = {1:id}
                   and run_at < {now} - {10 seconds}"],
        };
        let values = ["it's longshore.mail {now}".to_owned(), "7".to_owned()];
        let problem = dialect().problem(&fault, &values);
        assert_eq!(problem.to_string(), "queue `it's longshore.mail {now}` has 7");
        assert_eq!(problem.remedy, "remove 7");
        assert_eq!(
            problem.sql,
            ["delete from \"jobs\".ready\n  where queue = 'it''s longshore.mail {now}'\n  and id = <7>\n  \
              and run_at < now() - 10;"]
        );
    }

    #[test]
    fn every_fault_has_a_remedy_in_known_words() {
        let values: Vec<String> = (0..5).map(|n| format!("value {n}")).collect();
        for fault in faults().chain([&jobs::UNREADABLE_OPTIONS]) {
            let problem = dialect().problem(fault, &values);
            assert!(problem.remedy.ends_with('.'), "{problem:?}");
            assert!(!problem.sql.is_empty() || problem.remedy.contains("`longshore "), "{problem:?}");
            let find = dialect().sql(fault.find, &values);
            for text in problem.sql.iter().chain([&problem.problem, &problem.remedy, &find]) {
                assert!(!text.contains(['{', '}', '?']), "{text}");
            }
        }
    }
}
