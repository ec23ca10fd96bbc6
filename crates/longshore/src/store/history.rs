//! History for charts: what processes have counted or seen, by minute. Jobs that ended are in the tallies.

use std::collections::BTreeMap;

use async_trait::async_trait;
use chrono::{DateTime, TimeDelta, Utc};

use super::db::{Engine, How, Row, Rows, Sql, Statement, args, now};
use super::start_of;
use super::stats::bucket_end_ms;
use super::upkeep::lock_pass;
use crate::error::{Error, Result};

/// What a measure is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum What {
    /// How many jobs were claimed after a time in this bucket since they were due.
    Waited,
    /// How many attempts failed.
    Failed,
    /// How many jobs waited.
    Depth,
    /// For how many milliseconds the oldest waiting job had been due.
    Overdue,
}

impl What {
    /// Everything that is measured.
    pub const ALL: [What; 4] = [What::Waited, What::Failed, What::Depth, What::Overdue];

    /// The name in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            What::Waited => "waited",
            What::Failed => "failed",
            What::Depth => "depth",
            What::Overdue => "overdue",
        }
    }

    pub(crate) fn from_stored(name: &str) -> Result<Self> {
        What::ALL.into_iter().find(|what| what.as_str() == name).ok_or_else(|| {
            Error::internal(format!("the database has a measure of the unknown kind `{name}`"))
        })
    }
}

/// One value to add to the current minute.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NewMeasure {
    /// What was measured.
    pub what: What,
    /// The queue; empty for all queues together.
    pub queue: String,
    /// The kind; empty if the value is about the whole queue.
    pub kind: String,
    /// The bucket of a waiting time, as in the tallies; otherwise 0.
    pub bucket: i16,
    /// The value. Numbers of jobs and attempts are added up; of depths and ages, the largest is kept.
    pub value: i64,
}

/// Which part of the history to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryFilter {
    /// From when on. Starts with the whole minute or hour that contains this time.
    pub since: DateTime<Utc>,
    /// Only these queues; `None` means all.
    pub queues: Option<Vec<String>>,
    /// How much detail to return.
    pub detail: Detail,
}

impl HistoryFilter {
    /// Everything since then, by queue and kind.
    pub fn since(since: DateTime<Utc>) -> Self {
        HistoryFilter { since, queues: None, detail: Detail::QueuesAndKinds }
    }
}

/// How much detail a history has. A name that it leaves out is empty, and the values are added up. With
/// thousands of queues, this keeps charts fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// One history of everything.
    Total,
    /// One history per queue.
    Queues,
    /// One history per kind.
    Kinds,
    /// One history per queue and kind.
    QueuesAndKinds,
}

impl Detail {
    pub(crate) fn has_queues(self) -> bool {
        matches!(self, Detail::Queues | Detail::QueuesAndKinds)
    }

    pub(crate) fn has_kinds(self) -> bool {
        matches!(self, Detail::Kinds | Detail::QueuesAndKinds)
    }
}

/// One value of a minute or an hour.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Measured {
    /// The start of the minute, or of the hour if its minutes were folded.
    pub minute: DateTime<Utc>,
    /// What was measured.
    pub what: What,
    /// The queue; empty for all queues together.
    pub queue: String,
    /// The kind; empty if the value is about the whole queue.
    pub kind: String,
    /// The upper bound of a waiting time, in milliseconds; otherwise 0.
    pub up_to_ms: f64,
    /// The value.
    pub value: u64,
}

/// A measure, and the minute in which it was stored.
type Stored = (DateTime<Utc>, NewMeasure);

impl From<Stored> for Measured {
    fn from((minute, NewMeasure { what, queue, kind, bucket, value }): Stored) -> Self {
        let up_to_ms = if what == What::Waited { bucket_end_ms(bucket.into()) } else { 0.0 };
        Measured { minute, what, queue, kind, up_to_ms, value: value.unsigned_abs() }
    }
}

/// The bucket of a time, as in the tallies.
pub(crate) fn bucket_of(time: chrono::TimeDelta) -> i16 {
    let millis = time.num_microseconds().map_or(f64::MAX, |micros| micros.max(0) as f64 / 1000.0);
    (4.0 * (1.0 + millis).log2()).floor() as i16
}

/// How long measures are kept.
const KEPT_DAYS: i64 = 8;
/// Minutes that are older than this are folded into hours.
const MINUTES_KEPT_HOURS: i64 = 2;

/// The history for charts.
#[async_trait]
pub trait History {
    /// Adds measures to the current minute.
    async fn put_measures(&self, measures: &[NewMeasure]) -> Result<()>;

    /// As [`put_measures`](History::put_measures), but only if no process has done so in this minute. Returns whether
    /// it did.
    async fn put_samples(&self, samples: &[NewMeasure]) -> Result<bool>;

    /// Returns what was measured, oldest first. If the detail leaves out queues, their depths are added up,
    /// and the age is that of the oldest due job of all queues.
    async fn measured(&self, filter: &HistoryFilter) -> Result<Vec<Measured>>;

    /// Folds up to `step` measures into hours, and removes old ones. Returns how many it folded or removed.
    async fn fold_measures(&self, step: u32) -> Result<u64>;
}

#[async_trait]
impl<E: Engine> History for E {
    async fn put_measures(&self, measures: &[NewMeasure]) -> Result<()> {
        self.call(How::QUICK.together(), measures.to_vec(), |rows, measures| {
            Box::pin(put_measures(rows, measures))
        })
        .await
    }

    async fn put_samples(&self, samples: &[NewMeasure]) -> Result<bool> {
        self.call(How::QUICK.together(), samples.to_vec(), |rows, samples| {
            Box::pin(put_samples(rows, samples))
        })
        .await
    }

    async fn measured(&self, filter: &HistoryFilter) -> Result<Vec<Measured>> {
        self.call(How::VIEW, filter.clone(), |rows, filter| Box::pin(measured(rows, filter))).await
    }

    async fn fold_measures(&self, step: u32) -> Result<u64> {
        self.call(How::SLOW.together(), step, |rows, step| Box::pin(fold_measures(rows, *step))).await
    }
}

/// Numbers are added up; of depths and ages, the largest is kept.
static PUT: Statement = Statement::new(
    "
    insert into longshore.measures as m (minute, what, queue, kind, bucket, value)
    select i.minute, i.what, i.queue, i.kind, i.bucket, i.value
      from unnest($1::timestamptz[], $2::text[], $3::text[], $4::text[], $5::int2[], $6::int8[])
             as i(minute, what, queue, kind, bucket, value)
     where true
        on conflict (minute, what, queue, kind, bucket) do update
       set value = case when m.what in ('waited', 'failed') then m.value + excluded.value
                        when m.value > excluded.value then m.value
                        else excluded.value end",
);

async fn put_measures(rows: &mut dyn Rows, measures: &[NewMeasure]) -> Sql<()> {
    let minute = start_of(60, now(rows).await?);
    let stored: Vec<Stored> = measures.iter().map(|measure| (minute, measure.clone())).collect();
    put(rows, &stored).await
}

/// Stores measures, each at most once.
async fn put(rows: &mut dyn Rows, measures: &[Stored]) -> Sql<()> {
    let mut sorted: Vec<&Stored> = measures.iter().collect();
    // So that two processes lock the rows in the same order.
    sorted.sort_by_key(|(minute, measure)| {
        (*minute, measure.what.as_str(), measure.queue.as_str(), measure.kind.as_str(), measure.bucket)
    });
    for part in sorted.chunks(500) {
        let measures = || part.iter().map(|(_, measure)| measure);
        let args = args![
            part.iter().map(|(minute, _)| *minute).collect::<Vec<_>>(),
            measures().map(|measure| measure.what.as_str()).collect::<Vec<_>>(),
            measures().map(|measure| measure.queue.as_str()).collect::<Vec<_>>(),
            measures().map(|measure| measure.kind.as_str()).collect::<Vec<_>>(),
            measures().map(|measure| measure.bucket).collect::<Vec<_>>(),
            measures().map(|measure| measure.value).collect::<Vec<_>>(),
        ];
        rows.execute(&PUT, args).await?;
    }
    Ok(())
}

static TAKE_MINUTE: Statement = Statement::new(
    "
    update longshore.upkeep
       set looked_at = $1
     where name = 'samples'
       and looked_at is distinct from $1",
);

async fn put_samples(rows: &mut dyn Rows, samples: &[NewMeasure]) -> Sql<bool> {
    let minute = start_of(60, now(rows).await?);
    let is_first = rows.execute(&TAKE_MINUTE, args![minute]).await? > 0;
    if is_first {
        put_measures(rows, samples).await?;
    }
    Ok(is_first)
}

static MEASURED: Statement = Statement::new(
    "
    select minute, what, queue, kind, bucket,
           case when what = 'overdue' then max(value) else sum(value)::int8 end as value
      from (select minute,
                   what,
                   case when $4 then queue else '' end as queue,
                   case when $5 then kind else '' end as kind,
                   bucket,
                   value
              from longshore.measures
             where (minute >= $1
                 or (minute = $2 and minute < $3))   -- minutes folded into an hour
               and ($6::text[] is null or queue = any($6::text[]))
               -- Depths and ages are also stored for all queues together.
               and (what in ('waited', 'failed') or $4 or $6::text[] is not null or queue = '')) m
     group by minute, what, queue, kind, bucket
     order by minute, what, queue collate \"C\", kind collate \"C\", bucket",
);

async fn measured(rows: &mut dyn Rows, filter: &HistoryFilter) -> Sql<Vec<Measured>> {
    let (minutes_from, _) = bounds(now(rows).await?);
    let args = args![
        start_of(60, filter.since),
        start_of(60 * 60, filter.since),
        minutes_from,
        filter.detail.has_queues(),
        filter.detail.has_kinds(),
        &filter.queues,
    ];
    let found = rows.rows(&MEASURED, args).await?;
    found.into_iter().map(|row| Ok(read_measure(row)?.into())).collect()
}

fn read_measure(mut row: Row) -> Sql<Stored> {
    let minute = row.take("minute")?;
    let measure = NewMeasure {
        what: row.parse("what", What::from_stored)?,
        queue: row.take("queue")?,
        kind: row.take("kind")?,
        bucket: row.take("bucket")?,
        value: row.take("value")?,
    };
    Ok((minute, measure))
}

/// How far back the minutes reach, and how far back the hours reach.
fn bounds(now: DateTime<Utc>) -> (DateTime<Utc>, DateTime<Utc>) {
    let before = |hours| start_of(60 * 60, now - TimeDelta::hours(hours));
    (before(MINUTES_KEPT_HOURS), before(24 * KEPT_DAYS))
}

static REMOVE: Statement = Statement::new(
    "
    delete from longshore.measures
     where (minute, what, queue, kind, bucket) in (
             select minute, what, queue, kind, bucket
               from longshore.measures
              where minute < $1
              limit $2)",
);

/// Does not take the rows that are whole hours already.
static TAKE_MINUTES: Statement = Statement::new(
    "
    delete from longshore.measures
     where (minute, what, queue, kind, bucket) in (
             select minute, what, queue, kind, bucket
               from longshore.measures
              where minute < $1
                and not (minute = any($3::timestamptz[]))
              order by minute
              limit $2)
    returning minute, what, queue, kind, bucket, value",
);

async fn fold_measures(rows: &mut dyn Rows, step: u32) -> Sql<u64> {
    if !lock_pass(rows, "measures").await? {
        return Ok(0);
    }
    let (minutes_from, hours_from) = bounds(now(rows).await?);
    let removed = rows.execute(&REMOVE, args![hours_from, step]).await?;
    let hours = (0..=24 * KEPT_DAYS).map(|hour| hours_from + TimeDelta::hours(hour)).collect::<Vec<_>>();
    let taken = rows.rows(&TAKE_MINUTES, args![minutes_from, step, hours]).await?;
    let minutes = taken.into_iter().map(read_measure).collect::<Sql<Vec<_>>>()?;
    let folded = minutes.len() as u64;
    put(rows, &by_hour(minutes)).await?;
    Ok(removed + folded)
}

/// Folds minutes into hours, in the same way as [`PUT`] adds a value to a stored one.
fn by_hour(minutes: Vec<Stored>) -> Vec<Stored> {
    let mut hours = BTreeMap::<_, i64>::new();
    for (minute, NewMeasure { what, queue, kind, bucket, value }) in minutes {
        let hour = hours.entry((start_of(60 * 60, minute), what, queue, kind, bucket)).or_default();
        *hour = match what {
            What::Waited | What::Failed => *hour + value,
            What::Depth | What::Overdue => value.max(*hour),
        };
    }
    let measure =
        |((hour, what, queue, kind, bucket), value)| (hour, NewMeasure { what, queue, kind, bucket, value });
    hours.into_iter().map(measure).collect()
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    #[test]
    fn a_time_is_in_a_bucket_that_ends_after_it() {
        for micros in [0, 1, 900, 1_000, 33_333, 59_000_000, 86_400_000_000] {
            let end = bucket_end_ms(bucket_of(TimeDelta::microseconds(micros)).into());
            let millis = micros as f64 / 1000.0;
            assert!(end > millis && end <= (millis + 1.0) * 1.2, "{micros}: {end}");
        }
        assert_eq!(bucket_of(TimeDelta::seconds(-5)), 0);
        assert!(bucket_of(TimeDelta::MAX) > 0);
    }
}
