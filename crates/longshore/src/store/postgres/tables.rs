//! The parts of statements that put jobs into `ready` and `finished`, with all columns of these tables.

/// Inserts jobs into `ready`. `$job` is the row in `$from` with what does not change: `id`, `timeout_ms`, `priority`,
/// `max_attempts`, `kind`, `queue`, `flags`, `grp` and `flow`.
macro_rules! insert_ready {
    (
        job: $job:literal,
        run_at: $run_at:expr,
        lease_no: $lease_no:literal,
        attempts: $attempts:literal,
        interruptions: $interruptions:literal,
        keyed: $keyed:literal,
        held: $held:literal,
        from: $from:expr $(,)?
    ) => {
        concat!(
            "
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts, interruptions, keyed, kind, queue,
              flags, grp, flow, held)
      select ", $job, ".id, ", $run_at, ", longshore.clock(), ", $job, ".timeout_ms, ", $lease_no, ",
             ", $job, ".priority, ", $attempts, ", ", $job, ".max_attempts,
             ", $interruptions, ", ", $keyed, ", ", $job, ".kind, ", $job, ".queue, ", $job, ".flags,
             ", $job, ".grp, ", $job, ".flow, ", $held, "
        from ", $from
        )
    };
}
pub(super) use insert_ready;

/// Inserts jobs into `finished`. `$job` is the row in `$from` with what does not change: `id`, `lease_no`, `max_attempts`
/// and `flow`.
macro_rules! insert_finished {
    (
        job: $job:literal,
        started_at: $started_at:literal,
        finished_by: $finished_by:literal,
        outcome: $outcome:literal,
        attempts: $attempts:literal,
        interruptions: $interruptions:literal,
        last_error: $last_error:expr,
        result: $result:literal,
        skipped: $skipped:literal,
        error_group: $error_group:literal,
        from: $from:literal $(,)?
    ) => {
        concat!(
            "
      insert into longshore.finished
             (id, started_at, finished_at, finished_by, lease_no, outcome, attempts, max_attempts, interruptions,
              last_error, result, flow, skipped, error_group)
      select ", $job, ".id, ", $started_at, ", longshore.clock(), ", $finished_by, ", ", $job, ".lease_no,
             ", $outcome, ", ", $attempts, ", ", $job, ".max_attempts, ", $interruptions, ",
             ", $last_error, ", ", $result, ", ", $job, ".flow, ", $skipped, ", ", $error_group, "
        from ", $from
        )
    };
}
pub(super) use insert_finished;
