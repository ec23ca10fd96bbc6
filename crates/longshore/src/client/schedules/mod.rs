//! Schedules: jobs that are enqueued by the clock, one for each tick, regardless of how many
//! processes run.
//!
//! A schedule is a row: a [`CronLine`], a policy for [`Missed`] ticks, a job as template, and
//! the next tick. [`Client::fire_due`](crate::Client::fire_due) makes one pass over all
//! schedules. There is no leader and no state outside the row: the process that finds a tick
//! due enqueues its job in the transaction that moves the row to the next tick, if the row is
//! still at this tick. The engine's clock decides.
//!
//! `rules/schedules` decides when a line ticks and which due ticks get a job. This module stores schedules
//! and fires their ticks. The caller decides when to make a pass (a worker's upkeep does); the engine makes
//! each tick exclusive to one caller ([`fire`](crate::store::Schedules::fire)).
//!
//! # Time zones and clock changes
//!
//! A cron line refers to the wall clock of its zone. On days when clocks are set forward or
//! back, not every reading of the wall clock occurs exactly once:
//!
//! - **A line that names hours** (`30 2 * * *`, `0 9-17 * * *`, also `0 */2 * * *`) **means times
//!   of day, and each ticks once a day.** A time that is skipped in spring ticks at the first
//!   instant after the gap (02:30 at 03:00); if several are skipped, they tick once, together. A
//!   time that occurs twice in autumn ticks the first time only.
//! - **A line for every hour** (`*/5 * * * *`, `30 * * * *`, `@hourly`) **follows real time:** it
//!   ticks whenever the wall clock shows a matching time. Skipped times do not tick; times in the
//!   repeated hour tick twice. So `*/5 * * * *` ticks every five minutes throughout.
//!
//! The zone rules come from the IANA database contained in this build.
//!
//! # Missed ticks
//!
//! A tick is on time until the next one is due, but for at most one minute ([`ON_TIME`]). A tick
//! found on time always gets its job. A tick found later, because no process ran or the
//! schedule was paused, is missed, and [`Missed`] decides. All ticks of one schedule that a pass
//! finds due are handled in one transaction.
//!
//! # Module map
//!
//! | Module | Owns |
//! |---|---|
//! | `template` | the job that a schedule stores, and the job of one tick |
//! | `schedule` | [`NewSchedule`] and the client's methods to manage schedules |
//! | `fire` | the client's methods that fire due ticks |

mod fire;
mod schedule;
mod template;

pub use crate::rules::schedules::line::CronLine;
pub use crate::rules::schedules::missed::{MAX_BACKFILL, Missed, ON_TIME};
pub use fire::{Fired, FiredReport, Skipped, Tick, TickHook};
pub use schedule::{NewSchedule, Undeclared};
#[cfg(feature = "api")]
pub(crate) use template::Template;
