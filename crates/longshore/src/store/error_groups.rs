//! Error groups: failures with the same fingerprint. [`fingerprint`](crate::rules::fingerprint) decides which
//! failures belong together.
//!
//! A settle adds a row to `error_notes`, without a lock: while a dependency is down, all settles would wait for the row
//! of the same group. Upkeep folds the notes into `error_groups`. Readers add both.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use super::db::{Engine, How, Row, Rows, Sql, Statement, args};
use super::upkeep::lock_pass;
use crate::error::Result;
use crate::job::JobId;
use crate::rules::fingerprint::Fingerprint;

/// Which groups of failures to list.
#[derive(Clone, Debug)]
pub struct FailureFilter {
    /// Only this group.
    pub fingerprint: Option<Fingerprint>,
    /// Only groups of this kind.
    pub kind: Option<String>,
    /// Only groups with a failure at this instant or later.
    pub seen_after: Option<DateTime<Utc>>,
    /// Continue after this group: those that were last seen earlier.
    pub after: Option<(DateTime<Utc>, Fingerprint)>,
    /// The maximum number of groups, 1 to 200.
    pub limit: u32,
}

impl FailureFilter {
    /// The maximum number of groups on a page.
    pub const MAX_LIMIT: u32 = 200;

    /// Reads what [`FailureRecord::cursor`] wrote; `None` if it is something else, or a time that Postgres cannot store.
    #[cfg_attr(not(feature = "api"), expect(dead_code, reason = "for URLs"))]
    pub(crate) fn read_cursor(text: &str) -> Option<(DateTime<Utc>, Fingerprint)> {
        // The year 5138, in microseconds.
        const MAX_CURSOR: i64 = 100_000_000_000_000_000;
        let (micros, fingerprint) = text.split_once('.')?;
        let micros = micros.parse().ok().filter(|micros| (0..MAX_CURSOR).contains(micros))?;
        Some((DateTime::from_timestamp_micros(micros)?, fingerprint.parse().ok()?))
    }

    /// `limit`, clamped to 1..=200.
    pub(crate) fn page_size(&self) -> u32 {
        self.limit.clamp(1, FailureFilter::MAX_LIMIT)
    }
}

impl Default for FailureFilter {
    fn default() -> Self {
        FailureFilter { fingerprint: None, kind: None, seen_after: None, after: None, limit: 50 }
    }
}

/// A group of failures: attempts of one kind that failed in the same way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FailureRecord {
    /// What the failures have in common.
    pub fingerprint: Fingerprint,
    /// The kind of their jobs.
    pub kind: String,
    /// How many attempts have failed.
    pub attempts: u64,
    /// How many dead letters belong to the group now. At most [`MAX_DEAD`](Self::MAX_DEAD) are counted.
    pub dead: u64,
    /// Whether there are more dead letters than `dead`.
    pub dead_or_more: bool,
    /// When the first attempt failed.
    pub first_seen: DateTime<Utc>,
    /// When the newest attempt failed.
    pub last_seen: DateTime<Utc>,
    /// The job of the newest failure. It may no longer be kept.
    pub job: JobId,
    /// The error of the newest failure, or its beginning.
    pub error: String,
}

impl FailureRecord {
    /// Where a list continues after this group, for URLs.
    #[cfg_attr(not(feature = "api"), expect(dead_code, reason = "for URLs"))]
    pub(crate) fn cursor(&self) -> String {
        format!("{}.{}", self.last_seen.timestamp_micros(), self.fingerprint)
    }

    /// How many dead letters of a group are counted. An exact number of a million would take too long.
    pub const MAX_DEAD: u64 = 1_000;
    /// How much of an error is kept with its group, in characters.
    #[cfg_attr(
        not(feature = "sqlite"),
        expect(dead_code, reason = "a literal in the statements of Postgres")
    )]
    pub(crate) const MAX_ERROR: usize = 2_000;
    /// The maximum number of groups. If there are more, because errors contain words that differ from job to job, those that
    /// were last seen earliest are forgotten.
    const MAX_GROUPS: i64 = 10_000;
    /// A group is forgotten when this time has passed since its newest failure and no dead letter is left.
    const KEPT: Duration = Duration::from_secs(30 * 24 * 60 * 60);
}

/// Error groups.
#[async_trait]
pub trait ErrorGroups {
    /// Lists error groups, those with the newest failure first.
    async fn error_groups(&self, filter: &FailureFilter) -> Result<Vec<FailureRecord>>;

    /// Adds up to `step` failures to the numbers of their groups, and removes groups that were last seen 30 days
    /// ago and have no dead letter. Returns how many failures it added. The numbers that
    /// [`error_groups`](ErrorGroups::error_groups) returns do not change.
    async fn fold_error_groups(&self, step: u32) -> Result<u64>;
}

#[async_trait]
impl<E: Engine> ErrorGroups for E {
    async fn error_groups(&self, filter: &FailureFilter) -> Result<Vec<FailureRecord>> {
        self.call(How::VIEW, filter.clone(), |rows, filter| Box::pin(error_groups(rows, filter))).await
    }

    async fn fold_error_groups(&self, step: u32) -> Result<u64> {
        self.call(How::SLOW.together(), step, |rows, step| Box::pin(fold_error_groups(rows, *step))).await
    }
}

/// The newest of the rows of a group has its job and its error.
static PAGE: Statement = Statement::new(
    "
    with parts as (
      select fingerprint, kind, attempts, first_seen, last_seen, job, error
        from longshore.error_groups
       where ($1::int8 is null or fingerprint = $1)
         and ($2::text is null or kind = $2)
       union all
      select fingerprint, kind, attempts, seen_at, seen_at, job, error
        from longshore.error_notes
       where ($1::int8 is null or fingerprint = $1)
         and ($2::text is null or kind = $2)),
    ranked as (
      select fingerprint,
             sum(attempts) over (partition by fingerprint) as attempts,
             min(first_seen) over (partition by fingerprint) as first_seen,
             kind, last_seen, job, error,
             row_number() over (partition by fingerprint order by last_seen desc, job desc) as nth
        from parts),
    page as (
      select *
        from ranked
       where nth = 1
         and ($3::timestamptz is null or last_seen >= $3)
         and ($4::timestamptz is null or (last_seen, fingerprint) < ($4, $5))
       order by last_seen desc, fingerprint desc
       limit $6)
    select p.fingerprint, p.kind, p.attempts::int8 as attempts, p.first_seen, p.last_seen, p.job, p.error, (
             select count(*)
               from (select 1
                       from longshore.finished f
                      where f.error_group = p.fingerprint
                      limit $7) d) as dead
      from page p
     order by p.last_seen desc, p.fingerprint desc",
);

async fn error_groups(rows: &mut dyn Rows, filter: &FailureFilter) -> Sql<Vec<FailureRecord>> {
    let (before, after) = filter.after.unzip();
    let args = args![
        filter.fingerprint.map(|fingerprint| fingerprint.0),
        &filter.kind,
        filter.seen_after,
        before,
        after.map(|fingerprint| fingerprint.0),
        filter.page_size(),
        FailureRecord::MAX_DEAD + 1,
    ];
    rows.rows(&PAGE, args).await?.into_iter().map(read_group).collect()
}

fn read_group(mut row: Row) -> Sql<FailureRecord> {
    let dead: u64 = row.take("dead")?;
    Ok(FailureRecord {
        fingerprint: Fingerprint(row.take("fingerprint")?),
        kind: row.take("kind")?,
        attempts: row.take("attempts")?,
        dead: dead.min(FailureRecord::MAX_DEAD),
        dead_or_more: dead > FailureRecord::MAX_DEAD,
        first_seen: row.take("first_seen")?,
        last_seen: row.take("last_seen")?,
        job: row.take("job")?,
        error: row.take("error")?,
    })
}

static TAKE_NOTES: Statement = Statement::new(
    "
    delete from longshore.error_notes
     where id = any(array(
             select id
               from longshore.error_notes
              order by id
              limit $1))
    returning fingerprint, attempts, seen_at, job, kind, error",
);

static ADD: Statement = Statement::new(
    "
    insert into longshore.error_groups as g (fingerprint, kind, attempts, first_seen, last_seen, job, error)
    values ($1, $2, $3, $4, $5, $6, $7)
        on conflict (fingerprint) do update
       set attempts = g.attempts + excluded.attempts,
           first_seen = case when excluded.first_seen < g.first_seen then excluded.first_seen else g.first_seen end,
           last_seen = case when excluded.last_seen > g.last_seen then excluded.last_seen else g.last_seen end,
           job = case when (excluded.last_seen, excluded.job) >= (g.last_seen, g.job) then excluded.job else g.job end,
           error = case when (excluded.last_seen, excluded.job) >= (g.last_seen, g.job) then excluded.error
                        else g.error end",
);

/// Old groups, and the oldest ones if there are too many.
static FORGET: Statement = Statement::new(
    "
    delete from longshore.error_groups
     where fingerprint = any(array(
             select g.fingerprint
               from longshore.error_groups g
              where g.last_seen < longshore.clock() - $1
                and not exists (
                      select 1
                        from longshore.finished f
                       where f.error_group = g.fingerprint)
              order by g.last_seen
              limit $2))
        or fingerprint = any(array(
             select g.fingerprint
               from longshore.error_groups g
              order by g.last_seen desc, g.fingerprint
              limit $2 offset $3))",
);

/// The failures of a group that are added together.
struct Noted {
    attempts: i64,
    first_seen: DateTime<Utc>,
    /// Those of the newest failure.
    newest: (DateTime<Utc>, JobId),
    kind: String,
    error: String,
}

async fn fold_error_groups(rows: &mut dyn Rows, step: u32) -> Sql<u64> {
    if !lock_pass(rows, "error_groups").await? {
        return Ok(0);
    }
    let notes = rows.rows(&TAKE_NOTES, args![step]).await?;
    let folded = notes.len() as u64;
    for (fingerprint, group) in by_group(notes)? {
        let Noted { attempts, first_seen, newest: (last_seen, job), kind, error } = group;
        rows.execute(&ADD, args![fingerprint, &kind, attempts, first_seen, last_seen, job, &error]).await?;
    }
    rows.execute(&FORGET, args![FailureRecord::KEPT, step, FailureRecord::MAX_GROUPS]).await?;
    Ok(folded)
}

fn by_group(notes: Vec<Row>) -> Sql<BTreeMap<i64, Noted>> {
    let mut groups = BTreeMap::<i64, Noted>::new();
    for mut note in notes {
        let seen_at = note.take("seen_at")?;
        let noted = Noted {
            attempts: note.take("attempts")?,
            first_seen: seen_at,
            newest: (seen_at, note.take("job")?),
            kind: note.take("kind")?,
            error: note.take("error")?,
        };
        let fingerprint = note.take("fingerprint")?;
        let both = match groups.remove(&fingerprint) {
            None => noted,
            Some(other) => other.and(noted),
        };
        groups.insert(fingerprint, both);
    }
    Ok(groups)
}

impl Noted {
    fn and(self, other: Noted) -> Noted {
        let attempts = self.attempts + other.attempts;
        let first_seen = self.first_seen.min(other.first_seen);
        let newest = if other.newest >= self.newest { other } else { self };
        Noted { attempts, first_seen, ..newest }
    }
}

#[cfg(all(test, feature = "api"))]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        let at = "2031-05-06T07:00:00.123456Z".parse().unwrap();
        let group = FailureRecord {
            fingerprint: Fingerprint::of("mail", "x"),
            kind: "mail".into(),
            attempts: 1,
            dead: 0,
            dead_or_more: false,
            first_seen: at,
            last_seen: at,
            job: JobId::new(),
            error: "x".into(),
        };
        assert_eq!(FailureFilter::read_cursor(&group.cursor()), Some((at, group.fingerprint)));
        for text in
            ["x", "1.2", "-569079415675717826.06f70e3890ab79ad", "100000000000000000.06f70e3890ab79ad"]
        {
            assert_eq!(FailureFilter::read_cursor(text), None, "{text}");
        }
    }
}
