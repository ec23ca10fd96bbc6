//! `bench flow --only held`: as `bench held`, with jobs of groups.

use std::time::Duration;

use serde_json::json;

use super::{Backend, Bar, Figure, GROUPS, Options, SCHEMA, grouped_job};
use crate::Result;
use crate::held_snapshot::{Claims, Run, Snapshot, Workload, process_jobs};
use crate::report::{median, thousands};

const JOBS: u64 = 500_000;
/// Stop a run that takes longer.
const TIME_LIMIT: Duration = Duration::from_secs(300);
/// A limit that no group reaches: its running jobs are counted all the same.
const GROUP_LIMIT: u32 = 100_000;

pub(super) async fn measure(options: &Options, backend: &mut Backend) -> Result<Vec<Figure>> {
    let Backend::Postgres(admin) = backend else {
        eprintln!("not measured: SQLite has no vacuum that a snapshot could hold up");
        return Ok(Vec::new());
    };
    let workload =
        Workload { jobs: options.jobs(JOBS), job: grouped_job, group_limit: None, limit: TIME_LIMIT };
    let limited = Workload { jobs: options.jobs(JOBS) / 5, group_limit: Some(GROUP_LIMIT), ..workload };
    let mut figures = Vec::new();
    for (name, workload, bars) in [
        ("no limits", workload, Some((Bar::AtLeast(0.9), Bar::AtLeast(0.8)))),
        ("with limits", limited, None),
    ] {
        let (mut free, mut held) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            for (runs, snapshot) in [(&mut free, Snapshot::None), (&mut held, Snapshot::Held)] {
                runs.push(process_jobs(admin, SCHEMA, snapshot, Claims::FromCursor, workload).await?);
            }
        }
        let (level, whole) = bars.unzip();
        let last: Vec<f64> = held.iter().filter_map(Run::last_to_first).collect();
        let to_free: Vec<f64> =
            held.iter().zip(&free).map(|(held, free)| held.rate() / free.rate()).collect();
        let rate = |runs: &[Run]| thousands(median(runs.iter().map(Run::rate).collect()).unwrap_or(0.0));
        let jobs = thousands(workload.jobs as f64);
        let tenths = |runs: &[Run]| runs.iter().map(|run| run.tenths.clone()).collect::<Vec<_>>();
        figures.push(
            Figure::median(format!("last tenth / first, {name}"), &last, level)
                .note(format!("snapshot held, {jobs} jobs of {GROUPS} groups"))
                .details(
                    json!({ "rounds": last, "tenths_held": tenths(&held), "tenths_free": tenths(&free) }),
                ),
        );
        figures.push(
            Figure::median(format!("held / without snapshot, {name}"), &to_free, whole).note(format!(
                "jobs/s: {} and {}",
                rate(&held),
                rate(&free)
            )),
        );
    }
    Ok(figures)
}
