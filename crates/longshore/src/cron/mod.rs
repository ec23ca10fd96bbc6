//! Schedules: jobs that come by the clock, one for each tick, however many
//! processes look.
//!
//! A schedule is a row: a [`CronLine`], what to do about [`Missed`] ticks, a job
//! as template, and the next tick. [`Client::fire_due`](crate::Client::fire_due) is one pass over all of
//! them. There is no leader and nothing to remember: whoever finds a tick due
//! enqueues its job in the transaction that moves the row to the next tick, if
//! it still stands at this one. Time is the engine's.
//!
//! Owns what a tick means and which ticks get a job. When to make a pass is the
//! caller's business (a worker's upkeep); how a tick is given to one caller is
//! the engine's ([`Store::fire`](crate::store::Store::fire)).
//!
//! # Time zones and the change of the clocks
//!
//! A line means the wall clocks of its zone. On the days when they are put
//! forward or back, not every reading comes exactly once:
//!
//! - **A line that names hours** (`30 2 * * *`, `0 9-17 * * *`, also `0 */2 * * *`)
//!   **means times of day, and each comes once a day.** One that is skipped in
//!   spring ticks at the first instant after the gap (02:30 at 03:00); if several
//!   are skipped, they tick together, once. One that is doubled in autumn ticks
//!   the first time.
//! - **A line of every hour** (`*/5 * * * *`, `30 * * * *`, `@hourly`) **follows
//!   real time:** it ticks whenever the clock reads so. What is skipped has not
//!   been; the doubled hour has its ticks twice. So `*/5 * * * *` ticks every
//!   five minutes throughout.
//!
//! The zones' rules are those of the IANA database that this build contains.
//!
//! # Missed ticks
//!
//! A tick is on time until the next one is due, but for no longer than a minute
//! ([`ON_TIME`]); one that is found on time has its job, whatever the policy. A
//! tick found later, because no process ran or the schedule was paused, is
//! missed, and [`Missed`] decides.
//! The ticks of one schedule that a pass finds due are dealt with in one
//! transaction.
//!
//! # Module map
//!
//! | Module | Owns |
//! |---|---|
//! | `line` | [`CronLine`]: when an expression ticks in its time zone; pure |
//! | `missed` | [`Missed`]: which due ticks get a job; pure |
//! | `template` | the job that a schedule stores, and the job of one tick |
//! | `schedule` | [`NewSchedule`] and the client's methods to manage schedules |
//! | `fire` | the client's methods that fire due ticks |

mod fire;
mod line;
mod missed;
mod schedule;
mod template;

pub use fire::{Fired, FiredReport, Tick, TickHook};
pub use line::CronLine;
pub use missed::{MAX_BACKFILL, Missed, ON_TIME};
pub use schedule::NewSchedule;
