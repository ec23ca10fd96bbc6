//! Stored cron schedules, and moving one to its next tick exactly once.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use super::db::{Engine, How, Row, Rows, Sql, Statement, args, one};
use crate::error::Result;
use crate::rules::enqueue::{Enqueued, MAX_PAYLOAD, ValidJob, check_json, check_name};

/// A stored schedule. The store keeps the next tick and lets one caller fire it; `client/schedules`
/// interprets the expression.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Schedule {
    /// Its name.
    pub name: String,
    /// The cron expression.
    pub expression: String,
    /// The IANA time zone of the expression.
    pub zone: String,
    /// The policy for missed ticks, as `client/schedules` encodes it.
    pub missed: String,
    /// The job that each tick enqueues, as `client/schedules` encodes it: JSON text.
    pub template: String,
    /// Whether the schedule is paused: its ticks do not fire.
    pub paused: bool,
    /// The next tick. While the schedule is paused, or no process fires it, this stays
    /// at the first tick that did not fire.
    pub next_at: DateTime<Utc>,
    /// The last tick that fired.
    pub last_at: Option<DateTime<Utc>>,
}

impl Schedule {
    pub(crate) fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        check_name("expression", &self.expression)?;
        check_name("zone", &self.zone)?;
        check_name("missed", &self.missed)?;
        check_json("template", &self.template, MAX_PAYLOAD)
    }
}

/// Whether a schedule's ticks fire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ticking {
    /// They fire.
    Running,
    /// They do not fire.
    Paused,
}

/// The result of firing a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ticked {
    /// The schedule moved to its next tick, and these are the results of its jobs.
    Fired(Vec<Enqueued>),
    /// Nothing changed: the schedule is paused, or is no longer as it was seen.
    Moved,
    /// Nothing changed: another client's open transaction has locked the schedule or holds
    /// a key of its jobs. Try again later.
    Locked,
}

/// Cron schedules.
#[async_trait]
pub trait Schedules {
    /// Creates a schedule, or replaces the expression, policy and template of the one
    /// with that name. An existing schedule keeps its last tick and stays paused or
    /// active. It also keeps its next tick, unless the expression or the time zone
    /// changes, so that many processes can store the same schedule at any time
    /// without effect. Returns the stored schedule.
    async fn put_schedule(&self, schedule: &Schedule) -> Result<Schedule>;

    /// Lists all schedules, ordered by name.
    async fn schedules(&self) -> Result<Vec<Schedule>>;

    /// Pauses or resumes a schedule. Returns whether it exists.
    async fn set_ticking(&self, name: &str, ticking: Ticking) -> Result<bool>;

    /// Removes a schedule. Returns whether it existed.
    async fn remove_schedule(&self, name: &str) -> Result<bool>;

    /// Moves a schedule from the tick in `seen` to `next` and enqueues `jobs`, in one
    /// transaction. `fired` is the newest tick that has a job in `jobs`, or `None` if
    /// all ticks were skipped. Changes nothing if the schedule is paused or is no longer
    /// as `seen`, so exactly one caller fires each tick. Does not wait for another
    /// client's transaction, so that one schedule cannot delay the others.
    async fn fire(
        &self,
        seen: &Schedule,
        next: DateTime<Utc>,
        fired: Option<DateTime<Utc>>,
        jobs: &[ValidJob],
    ) -> Result<Ticked>;
}

/// How long a tick waits for a row or a key that another client's transaction holds. Long
/// enough for another process that fires the same tick; short enough that a pass over many
/// locked schedules does not delay the others.
const MAX_LOCK_WAIT: Duration = Duration::from_millis(50);

#[async_trait]
impl<E: Engine> Schedules for E {
    async fn put_schedule(&self, schedule: &Schedule) -> Result<Schedule> {
        schedule.validate()?;
        self.call(How::SLOW, schedule.clone(), |rows, schedule| Box::pin(put_schedule(rows, schedule))).await
    }

    async fn schedules(&self) -> Result<Vec<Schedule>> {
        self.call(How::READ, (), |rows, ()| Box::pin(schedules(rows))).await
    }

    async fn set_ticking(&self, name: &str, ticking: Ticking) -> Result<bool> {
        let args = (name.to_owned(), ticking);
        self.call(How::SLOW, args, |rows, (name, ticking)| Box::pin(set_ticking(rows, name, *ticking))).await
    }

    async fn remove_schedule(&self, name: &str) -> Result<bool> {
        self.call(How::SLOW, name.to_owned(), |rows, name| Box::pin(remove_schedule(rows, name))).await
    }

    async fn fire(
        &self,
        seen: &Schedule,
        next: DateTime<Utc>,
        fired: Option<DateTime<Utc>>,
        jobs: &[ValidJob],
    ) -> Result<Ticked> {
        let args = (seen.clone(), next, fired, jobs.to_vec());
        let fired =
            self.call(How::SLOW.waiting_up_to(MAX_LOCK_WAIT), args, |rows, (seen, next, fired, jobs)| {
                Box::pin(fire(rows, seen, *next, *fired, jobs))
            });
        match fired.await {
            Err(error) if error.is_locked() => Ok(Ticked::Locked),
            done => done,
        }
    }
}

static PUT_SCHEDULE: Statement = Statement::new(
    "
    insert into longshore.schedules as s (name, expression, zone, missed, template, paused, next_at, last_at)
    values ($1, $2, $3, $4, $5, $6, $7, $8)
        on conflict (name) do update
       set expression = excluded.expression,
           zone = excluded.zone,
           missed = excluded.missed,
           template = excluded.template,
           next_at = case
             when (s.expression, s.zone) = (excluded.expression, excluded.zone) then s.next_at
             else excluded.next_at
           end
    returning name, expression, zone, missed, template, paused, next_at, last_at",
);

async fn put_schedule(rows: &mut dyn Rows, schedule: &Schedule) -> Sql<Schedule> {
    let Schedule { name, expression, zone, missed, template, paused, next_at, last_at } = schedule;
    let args = args![name, expression, zone, missed, template, *paused, *next_at, *last_at];
    read_schedule(one(rows.row(&PUT_SCHEDULE, args).await?)?)
}

static SCHEDULES: Statement = Statement::new(
    "
    select name, expression, zone, missed, template, paused, next_at, last_at
      from longshore.schedules
     order by name collate \"C\"",
);

async fn schedules(rows: &mut dyn Rows) -> Sql<Vec<Schedule>> {
    rows.rows(&SCHEDULES, &[]).await?.into_iter().map(read_schedule).collect()
}

static SET_TICKING: Statement = Statement::new(
    "
    update longshore.schedules
       set paused = $2
     where name = $1",
);

async fn set_ticking(rows: &mut dyn Rows, name: &str, ticking: Ticking) -> Sql<bool> {
    Ok(rows.execute(&SET_TICKING, args![name, ticking == Ticking::Paused]).await? > 0)
}

static REMOVE_SCHEDULE: Statement = Statement::new("delete from longshore.schedules where name = $1");

async fn remove_schedule(rows: &mut dyn Rows, name: &str) -> Sql<bool> {
    Ok(rows.execute(&REMOVE_SCHEDULE, args![name]).await? > 0)
}

/// Compare and set: of all processes that see this tick, one moves the schedule on. The
/// expression and the other fields are compared too: a next tick computed from an old
/// expression would be wrong for a new one.
static MOVE_ON: Statement = Statement::new(
    "
    update longshore.schedules
       set next_at = $3,
           last_at = coalesce($4, last_at)
     where name = $1
       and next_at = $2
       and expression = $5
       and zone = $6
       and missed = $7
       and template = $8
       and not paused",
);

async fn fire(
    rows: &mut dyn Rows,
    seen: &Schedule,
    next: DateTime<Utc>,
    fired: Option<DateTime<Utc>>,
    jobs: &[ValidJob],
) -> Sql<Ticked> {
    let Schedule { name, expression, zone, missed, template, next_at, .. } = seen;
    let args = args![name, *next_at, next, fired, expression, zone, missed, template];
    if rows.execute(&MOVE_ON, args).await? == 0 {
        return Ok(Ticked::Moved);
    }
    Ok(Ticked::Fired(rows.insert_jobs(jobs).await?.results))
}

fn read_schedule(mut row: Row) -> Sql<Schedule> {
    Ok(Schedule {
        name: row.take("name")?,
        expression: row.take("expression")?,
        zone: row.take("zone")?,
        missed: row.take("missed")?,
        template: row.take("template")?,
        paused: row.take("paused")?,
        next_at: row.take("next_at")?,
        last_at: row.take("last_at")?,
    })
}
