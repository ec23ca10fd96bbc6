//! Durable steps: journals the steps of handlers, and reads them. What a suspended job waits for is stored by
//! its settle, in each engine.

use std::collections::HashMap;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;

use super::db::{Engine, How, Row, Rows, Sql, Statement, args, one};
use super::{Fenced, Lease};
use crate::error::Result;
use crate::job::JobId;

/// The maximum length of a step's value, in bytes of JSON.
pub const MAX_STEP_VALUE: usize = 1024 * 1024;

/// The maximum number of steps of a job. Every attempt after the first reads all of them.
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) const MAX_STEPS: usize = 10_000;
/// The maximum number of bytes of all steps of a job.
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) const MAX_JOURNAL: usize = 16 << 20;

/// Why a job cannot have this many steps with this many bytes.
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) fn check_journal(steps: usize, bytes: usize) -> std::result::Result<(), String> {
    if steps > MAX_STEPS {
        Err(format!("the job has more than {MAX_STEPS} steps; split it into several jobs"))
    } else if bytes > MAX_JOURNAL {
        Err(format!(
            "the values of the job's steps exceed {MAX_JOURNAL} bytes; store them elsewhere and return where they are"
        ))
    } else {
        Ok(())
    }
}

/// A journaled step of a job.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StepRecord {
    /// Its name, unique within the job.
    pub name: String,
    /// The lease that stored it.
    pub lease_no: i32,
    /// When it was stored.
    pub saved_at: DateTime<Utc>,
    /// Whether it is done.
    pub state: StepState,
}

impl StepRecord {
    /// The bytes of its name and of its value.
    #[cfg(feature = "api")]
    pub(crate) fn bytes(&self) -> usize {
        let value = match &self.state {
            StepState::Done(value) => value.get().len(),
            StepState::Waiting { .. } => 0,
        };
        self.name.len() + value
    }
}

/// The state of a journaled step.
#[derive(Clone, Debug)]
pub enum StepState {
    /// It is done, with this value.
    Done(Box<RawValue>),
    /// The job waits here.
    Waiting {
        /// The deadline; `None`: no deadline; only an event ends the wait.
        until: Option<DateTime<Utc>>,
    },
}

/// What earlier attempts of a job saved.
#[derive(Clone, Debug)]
pub struct SavedWork {
    /// The newest checkpoint.
    pub checkpoint: Option<Box<RawValue>>,
    /// The journaled steps, ordered by name; `None` if they were left out because of their size.
    pub steps: Option<Vec<StepRecord>>,
}

/// A job that was never leased before has saved nothing.
impl Default for SavedWork {
    fn default() -> Self {
        SavedWork { checkpoint: None, steps: Some(Vec::new()) }
    }
}

/// Which journals of these sizes, in this order, fit together into `max_bytes`. After the first one that
/// does not, only empty ones do.
fn journals_that_fit(sizes: impl Iterator<Item = usize>, max_bytes: usize) -> Vec<bool> {
    let mut left = Some(max_bytes);
    let mut fits = |size: usize| {
        if size == 0 {
            return true;
        }
        left = left.and_then(|left| left.checked_sub(size));
        left.is_some()
    };
    sizes.map(&mut fits).collect()
}

/// A part of a job's journal.
#[derive(Clone, Debug, Default)]
pub struct Journaled {
    /// How many steps the job has journaled.
    pub steps: usize,
    /// The bytes of their values.
    pub bytes: usize,
    /// Those whose names were given, in the order of the names.
    pub named: Vec<StepRecord>,
}

/// A step to journal: it is done.
#[derive(Clone, Debug)]
pub struct NewStep {
    /// The lease under which it was done.
    pub lease: Lease,
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: Box<RawValue>,
}

/// The journals of jobs.
#[async_trait]
pub trait Steps {
    /// Returns the journaled steps of a job, ordered by name.
    async fn steps(&self, id: JobId) -> Result<Vec<StepRecord>>;

    /// Returns what earlier attempts of jobs saved, in the order of the ids. Together, the steps have
    /// at most `max_bytes`; those of the other jobs are left out.
    async fn saved_work(&self, ids: &[JobId], max_bytes: usize) -> Result<Vec<SavedWork>>;

    /// Returns how large the journal of a job is, and its steps with these names.
    async fn journaled(&self, id: JobId, names: &[String]) -> Result<Journaled>;

    /// Journals steps that are done, each under its lease. From then on, the attempts and
    /// interruptions of the job count from this attempt. A step that is done already keeps
    /// its value, so the call may be repeated when its reply was lost.
    async fn save_steps(&self, steps: &[NewStep]) -> Result<Vec<Fenced>>;
}

#[async_trait]
impl<E: Engine> Steps for E {
    async fn steps(&self, id: JobId) -> Result<Vec<StepRecord>> {
        self.call(How::READ, id, |rows, id| Box::pin(steps(rows, *id))).await
    }

    async fn saved_work(&self, ids: &[JobId], max_bytes: usize) -> Result<Vec<SavedWork>> {
        self.call(How::READ, (ids.to_vec(), max_bytes), |rows, (ids, max_bytes)| {
            Box::pin(saved_work(rows, ids, *max_bytes))
        })
        .await
    }

    async fn journaled(&self, id: JobId, names: &[String]) -> Result<Journaled> {
        self.call(How::READ, (id, names.to_vec()), |rows, (id, names)| Box::pin(journaled(rows, *id, names)))
            .await
    }

    async fn save_steps(&self, steps: &[NewStep]) -> Result<Vec<Fenced>> {
        self.call(How::QUICK, steps.to_vec(), |rows, steps| rows.save_steps(steps)).await
    }
}

static STEPS: Statement = Statement::new(
    "
    select name, lease_no, saved_at, until, value::text as value
      from longshore.steps
     where job = $1
     order by name",
);

async fn steps(rows: &mut dyn Rows, id: JobId) -> Sql<Vec<StepRecord>> {
    rows.rows(&STEPS, args![id]).await?.into_iter().map(step).collect()
}

fn step(mut row: Row) -> Sql<StepRecord> {
    Ok(StepRecord {
        name: row.take("name")?,
        lease_no: row.take("lease_no")?,
        saved_at: row.take("saved_at")?,
        state: match row.take("value")? {
            Some(value) => StepState::Done(value),
            None => StepState::Waiting { until: row.take("until")? },
        },
    })
}

/// Makes an index probe for each job, whatever the planner assumes about the tables. The length of a value is known
/// without reading the value.
static SAVED_WORK: Statement = Statement::new(
    "
    select i.id,
           (select c.data::text
              from longshore.checkpoints c
             where c.job = i.id) as checkpoint,
           (select coalesce(sum(octet_length(s.name) + coalesce(octet_length(s.value::text), 0)), 0)::int8
              from longshore.steps s
             where s.job = i.id) as bytes
      from unnest((select $1::uuid[])) as i(id)",
);

static STEPS_OF: Statement = Statement::new(
    "
    select job, name, lease_no, saved_at, until, value::text as value
      from longshore.steps
     where job = any($1::uuid[])
     order by name",
);

async fn saved_work(rows: &mut dyn Rows, ids: &[JobId], max_bytes: usize) -> Sql<Vec<SavedWork>> {
    let mut checkpoints = HashMap::<JobId, Option<Box<RawValue>>>::new();
    let mut sizes = HashMap::<JobId, u64>::new();
    for mut row in rows.rows(&SAVED_WORK, args![ids]).await? {
        let id = row.take("id")?;
        checkpoints.insert(id, row.take("checkpoint")?);
        sizes.insert(id, row.take("bytes")?);
    }
    let size = |id: &JobId| sizes.get(id).map_or(0, |bytes| *bytes as usize);
    let fits = journals_that_fit(ids.iter().map(size), max_bytes);
    let is_read = |(id, fits): &(&JobId, &bool)| **fits && size(id) > 0;
    let read: Vec<JobId> = ids.iter().zip(&fits).filter(is_read).map(|(id, _)| *id).collect();
    let mut steps = HashMap::<JobId, Vec<StepRecord>>::new();
    if !read.is_empty() {
        for mut row in rows.rows(&STEPS_OF, args![&read]).await? {
            steps.entry(row.take("job")?).or_default().push(step(row)?);
        }
    }
    let saved = |(id, fits): (&JobId, bool)| SavedWork {
        checkpoint: checkpoints.remove(id).flatten(),
        steps: fits.then(|| steps.remove(id).unwrap_or_default()),
    };
    Ok(ids.iter().zip(fits).map(saved).collect())
}

/// The length of a value is known without reading the value.
static JOURNAL_SIZE: Statement = Statement::new(
    "
    select count(*) as steps, coalesce(sum(octet_length(value::text)), 0)::int8 as bytes
      from longshore.steps
     where job = $1",
);

static NAMED_STEPS: Statement = Statement::new(
    "
    select name, lease_no, saved_at, until, value::text as value
      from longshore.steps
     where job = $1
       and name = any($2::text[])
     order by name",
);

async fn journaled(rows: &mut dyn Rows, id: JobId, names: &[String]) -> Sql<Journaled> {
    let mut size = one(rows.row(&JOURNAL_SIZE, args![id]).await?)?;
    let named = rows.rows(&NAMED_STEPS, args![id, names]).await?;
    Ok(Journaled {
        steps: size.take::<u64>("steps")? as usize,
        bytes: size.take::<u64>("bytes")? as usize,
        named: named.into_iter().map(step).collect::<Sql<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::journals_that_fit;

    #[test]
    fn journals_fit_until_the_first_that_does_not() {
        let fit = |sizes: &[usize]| journals_that_fit(sizes.iter().copied(), 10);
        assert_eq!(fit(&[4, 6, 0]), [true, true, true]);
        assert_eq!(fit(&[4, 7, 1, 0]), [true, false, false, true]);
        assert_eq!(fit(&[11]), [false]);
    }
}
