//! The complete table: every state × every event, with every case that flags, attempt limits
//! and suspects add. Transitions are compared as one line of text, so that a table reads as a
//! specification and a failure shows both lines.

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const INTERRUPTION: Interruption = Interruption { delay: Duration::from_secs(7), max_interruptions: 3 };

/// Attempt 2 of 5 under lease 40: all numbers differ, so that a mix-up is visible.
fn running() -> Running {
    Running {
        lease_no: 40,
        worker: WorkerId::new(),
        attempt: 2,
        max_attempts: 5,
        interruptions: 0,
        started: false,
        flags: LeaseFlags::default(),
    }
}

fn last_attempt() -> Running {
    Running { attempt: 5, ..running() }
}

fn cancel_requested() -> Running {
    Running { flags: LeaseFlags { cancel_requested: true, superseded: false }, ..running() }
}

fn superseded_job() -> Running {
    Running { flags: LeaseFlags { cancel_requested: false, superseded: true }, ..running() }
}

fn both_flags() -> Running {
    Running { flags: LeaseFlags { cancel_requested: true, superseded: true }, ..running() }
}

fn suspect(interruptions: u16, started: bool) -> Running {
    Running { interruptions, started, ..running() }
}

fn waiting() -> State {
    State::Waiting(Waiting { lease_no: 40, attempts: 2, max_attempts: 5, interruptions: 1, is_held: false })
}

fn finished(outcome: Outcome) -> State {
    State::Finished(Finished { lease_no: 40, outcome, is_needed: false })
}

fn succeeded() -> Ending {
    Ending::Succeeded { result: Some(RawValue::from_string("{\"n\":1}".into()).unwrap()) }
}

fn failed(retry_in: Option<Duration>) -> Ending {
    Ending::Failed { error: "boom".into(), retry_in }
}

fn self_cancelled() -> Ending {
    Ending::Cancelled { reason: Some("no longer needed".into()) }
}

fn snoozed() -> Ending {
    Ending::Snoozed { delay: 9 * SECOND }
}

fn not_started() -> Ending {
    Ending::NotStarted { run_at: DateTime::UNIX_EPOCH }
}

fn reschedule(attempts: Option<u16>) -> Recovery {
    Recovery::Reschedule { when: When::After(11 * SECOND), attempts, max_interruptions: 3 }
}

fn show(next: Result<Transition, Refusal>) -> String {
    match next {
        Err(refusal) => format!("refused: {refusal:?}"),
        Ok(Transition::Lease { attempt }) => format!("lease, attempt {attempt}"),
        Ok(Transition::Finish(finish)) => show_leave(Leave::Finish(finish)),
        Ok(Transition::Requeue(requeue)) => show_leave(Leave::Requeue(requeue)),
        Ok(
            plain @ (Transition::RequestCancel
            | Transition::Reopen
            | Transition::RunNow
            | Transition::Rewrite
            | Transition::Remove),
        ) => format!("{plain:?}"),
    }
}

fn show_leave(leave: Leave) -> String {
    match leave {
        Leave::Finish(Finish { outcome, attempts, interruptions, error, result, history }) => format!(
            "{} after {attempts}, {interruptions} interruptions, history {}, error {}, result {}",
            outcome.as_str(),
            history.map_or("-", AttemptEnd::as_str),
            error.as_deref().unwrap_or("-"),
            result.as_ref().map_or("-", |result| result.get()),
        ),
        Leave::Requeue(Requeue { attempts, interruptions, when, history, error }) => format!(
            "wait with {attempts} charged, {interruptions} interruptions, {}, history {}, error {}",
            match when {
                When::After(delay) => format!("in {}s", delay.as_secs()),
                When::At(at) => format!("at {at}"),
            },
            history.map_or("-", AttemptEnd::as_str),
            error.as_deref().unwrap_or("-"),
        ),
    }
}

/// Compares a whole table at once, so that one run shows every wrong line.
#[track_caller]
fn assert_table<T>(rows: Vec<(T, &str)>, show: impl Fn(T) -> String) {
    let (shown, expected): (Vec<_>, Vec<_>) = rows.into_iter().map(|(row, line)| (show(row), line)).unzip();
    assert_eq!(shown, expected);
}

#[track_caller]
fn assert_events(state: State, rows: Vec<(Event, &str)>) {
    assert_table(rows, |event| show(next(&state, event)));
}

#[track_caller]
fn assert_endings(job: Running, rows: Vec<(Ending, &str)>) {
    // `settle` and `next` with the same ending must agree.
    assert_table(rows, |ending| {
        let direct = show_leave(settle(&job, ending.clone()));
        assert_eq!(show(next(&State::Running(job.clone()), Event::Settle(ending))), direct);
        direct
    });
}

#[track_caller]
fn assert_recoveries(rows: Vec<((Running, Recovery), &str)>) {
    assert_table(rows, |(job, recovery)| {
        let direct = show_leave(recover(&job, recovery.clone()));
        assert_eq!(show(next(&State::Running(job), Event::Recover(recovery))), direct);
        direct
    });
}

// ---- state × event -----------------------------------------------------------

#[test]
fn a_waiting_job_can_be_claimed_cancelled_run_now_and_edited() {
    assert_events(
        waiting(),
        vec![
            (Event::Claim, "lease, attempt 3"),
            (Event::Cancel, "cancelled after 2, 1 interruptions, history -, error -, result -"),
            (Event::Retry, "RunNow"),
            (Event::Edit, "Rewrite"),
            (Event::Redrive, "refused: NotFinished"),
            (Event::Delete, "refused: NotFinished"),
            (Event::Settle(succeeded()), "refused: LeaseLost"),
            (Event::Settle(failed(Some(SECOND))), "refused: LeaseLost"),
            (Event::Settle(self_cancelled()), "refused: LeaseLost"),
            (Event::Settle(snoozed()), "refused: LeaseLost"),
            (Event::Settle(Ending::Released), "refused: LeaseLost"),
            (Event::Settle(not_started()), "refused: LeaseLost"),
            (Event::Settle(Ending::Interrupted(INTERRUPTION)), "refused: LeaseLost"),
            (Event::Recover(Recovery::Default(INTERRUPTION)), "refused: LeaseLost"),
            (Event::Recover(reschedule(None)), "refused: LeaseLost"),
            (Event::Recover(Recovery::Fail { retry_in: None }), "refused: LeaseLost"),
        ],
    );
}

#[test]
fn operators_can_only_cancel_a_running_job() {
    assert_events(
        State::Running(running()),
        vec![
            (Event::Claim, "refused: NotWaiting"),
            (Event::Cancel, "RequestCancel"),
            (Event::Retry, "refused: IsRunning"),
            (Event::Edit, "refused: IsRunning"),
            (Event::Redrive, "refused: NotFinished"),
            (Event::Delete, "refused: NotFinished"),
        ],
    );
}

#[test]
fn a_second_cancel_of_a_running_job_is_the_same_as_the_first() {
    assert_events(State::Running(cancel_requested()), vec![(Event::Cancel, "RequestCancel")]);
}

#[test]
fn a_finished_job_can_be_retried_and_deleted_regardless_of_its_outcome() {
    for outcome in Outcome::ALL {
        let already = format!("refused: AlreadyFinished({outcome:?})");
        let redriven = match outcome {
            Outcome::FailedPermanent => "Reopen".to_owned(),
            _ => format!("refused: NotDead({outcome:?})"),
        };
        assert_events(
            finished(outcome),
            vec![
                (Event::Claim, "refused: NotWaiting"),
                (Event::Cancel, &already),
                (Event::Retry, "Reopen"),
                (Event::Edit, &already),
                (Event::Redrive, &redriven),
                (Event::Delete, "Remove"),
                (Event::Settle(succeeded()), "refused: LeaseLost"),
                (Event::Settle(failed(Some(SECOND))), "refused: LeaseLost"),
                (Event::Settle(self_cancelled()), "refused: LeaseLost"),
                (Event::Settle(snoozed()), "refused: LeaseLost"),
                (Event::Settle(Ending::Released), "refused: LeaseLost"),
                (Event::Settle(not_started()), "refused: LeaseLost"),
                (Event::Settle(Ending::Interrupted(INTERRUPTION)), "refused: LeaseLost"),
                (Event::Recover(Recovery::Default(INTERRUPTION)), "refused: LeaseLost"),
                (Event::Recover(reschedule(None)), "refused: LeaseLost"),
                (Event::Recover(Recovery::Fail { retry_in: None }), "refused: LeaseLost"),
            ],
        );
    }
}

// ---- settle ------------------------------------------------------------------

#[test]
fn with_attempts_left_only_a_failure_is_charged_and_waits_for_its_backoff() {
    assert_endings(
        running(),
        vec![
            (succeeded(), "succeeded after 2, 0 interruptions, history -, error -, result {\"n\":1}"),
            (
                Ending::Succeeded { result: None },
                "succeeded after 2, 0 interruptions, history -, error -, result -",
            ),
            (
                failed(Some(4 * SECOND)),
                "wait with 2 charged, 0 interruptions, in 4s, history failed, error boom",
            ),
            (failed(None), "failed_permanent after 2, 0 interruptions, history failed, error boom, result -"),
            (
                self_cancelled(),
                "cancelled after 2, 0 interruptions, history -, error no longer needed, result -",
            ),
            (
                Ending::Cancelled { reason: None },
                "cancelled after 2, 0 interruptions, history -, error -, result -",
            ),
            (snoozed(), "wait with 1 charged, 0 interruptions, in 9s, history snoozed, error -"),
            (Ending::Released, "wait with 1 charged, 0 interruptions, in 0s, history released, error -"),
            (
                not_started(),
                "wait with 1 charged, 0 interruptions, at 1970-01-01 00:00:00 UTC, history -, error -",
            ),
            (
                Ending::Interrupted(INTERRUPTION),
                "wait with 1 charged, 1 interruptions, in 7s, history interrupted, \
                 error Job recovered after worker interruption",
            ),
        ],
    );
}

#[test]
fn on_the_last_attempt_a_failure_is_final_and_uncharged_endings_are_requeued() {
    assert_endings(
        last_attempt(),
        vec![
            (succeeded(), "succeeded after 5, 0 interruptions, history -, error -, result {\"n\":1}"),
            (
                failed(Some(4 * SECOND)),
                "failed_permanent after 5, 0 interruptions, history failed, error boom, result -",
            ),
            (failed(None), "failed_permanent after 5, 0 interruptions, history failed, error boom, result -"),
            (
                self_cancelled(),
                "cancelled after 5, 0 interruptions, history -, error no longer needed, result -",
            ),
            (snoozed(), "wait with 4 charged, 0 interruptions, in 9s, history snoozed, error -"),
            (Ending::Released, "wait with 4 charged, 0 interruptions, in 0s, history released, error -"),
            (
                not_started(),
                "wait with 4 charged, 0 interruptions, at 1970-01-01 00:00:00 UTC, history -, error -",
            ),
            (
                Ending::Interrupted(INTERRUPTION),
                "wait with 4 charged, 1 interruptions, in 7s, history interrupted, \
                 error Job recovered after worker interruption",
            ),
        ],
    );
}

#[test]
fn a_cancel_request_turns_every_ending_except_success_into_cancelled() {
    let table = || {
        vec![
            (succeeded(), "succeeded after 2, 0 interruptions, history -, error -, result {\"n\":1}"),
            (
                failed(Some(4 * SECOND)),
                "cancelled after 2, 0 interruptions, history failed, error boom, result -",
            ),
            (failed(None), "cancelled after 2, 0 interruptions, history failed, error boom, result -"),
            (
                self_cancelled(),
                "cancelled after 2, 0 interruptions, history -, error no longer needed, result -",
            ),
            (snoozed(), "cancelled after 1, 0 interruptions, history snoozed, error -, result -"),
            (Ending::Released, "cancelled after 1, 0 interruptions, history released, error -, result -"),
            (not_started(), "cancelled after 1, 0 interruptions, history -, error -, result -"),
            (
                Ending::Interrupted(INTERRUPTION),
                "cancelled after 1, 1 interruptions, history interrupted, \
                 error Job recovered after worker interruption, result -",
            ),
        ]
    };
    assert_endings(cancel_requested(), table());
    // The cancel request takes precedence over the loss of the unique key, because it is
    // explicit.
    assert_endings(both_flags(), table());
}

#[test]
fn a_superseded_job_may_finish_but_is_never_requeued() {
    assert_endings(
        superseded_job(),
        vec![
            (succeeded(), "succeeded after 2, 0 interruptions, history -, error -, result {\"n\":1}"),
            (
                failed(Some(4 * SECOND)),
                "failed_permanent after 2, 0 interruptions, history failed, error boom, result -",
            ),
            (failed(None), "failed_permanent after 2, 0 interruptions, history failed, error boom, result -"),
            (
                self_cancelled(),
                "cancelled after 2, 0 interruptions, history -, error no longer needed, result -",
            ),
            (
                Ending::Cancelled { reason: None },
                "cancelled after 2, 0 interruptions, history -, \
                 error superseded by a newer job with the same unique key, result -",
            ),
            (
                snoozed(),
                "cancelled after 1, 0 interruptions, history snoozed, \
                 error superseded by a newer job with the same unique key, result -",
            ),
            (
                Ending::Released,
                "cancelled after 1, 0 interruptions, history released, \
                 error superseded by a newer job with the same unique key, result -",
            ),
            (
                not_started(),
                "cancelled after 1, 0 interruptions, history -, \
                 error superseded by a newer job with the same unique key, result -",
            ),
            (
                Ending::Interrupted(INTERRUPTION),
                "cancelled after 1, 1 interruptions, history interrupted, \
                 error Job recovered after worker interruption, result -",
            ),
        ],
    );
}

#[test]
fn the_count_of_interruptions_survives_every_requeue() {
    assert_endings(
        suspect(2, true),
        vec![
            (
                failed(Some(4 * SECOND)),
                "wait with 2 charged, 2 interruptions, in 4s, history failed, error boom",
            ),
            (snoozed(), "wait with 1 charged, 2 interruptions, in 9s, history snoozed, error -"),
            (Ending::Released, "wait with 1 charged, 2 interruptions, in 0s, history released, error -"),
            (
                not_started(),
                "wait with 1 charged, 2 interruptions, at 1970-01-01 00:00:00 UTC, history -, error -",
            ),
        ],
    );
}

// ---- interruptions -----------------------------------------------------------

#[test]
fn after_the_first_an_interruption_counts_only_if_the_handler_had_started() {
    let line = |n| {
        format!(
            "wait with 1 charged, {n} interruptions, in 7s, history interrupted, \
             error Job recovered after worker interruption"
        )
    };
    for (interruptions, started, counted) in
        [(0, false, 1), (0, true, 1), (1, false, 1), (1, true, 2), (2, false, 2)]
    {
        let leave = settle(&suspect(interruptions, started), Ending::Interrupted(INTERRUPTION));
        assert_eq!(show_leave(leave), line(counted), "{interruptions} before, started {started}");
    }
}

#[test]
fn the_interruption_that_reaches_the_maximum_quarantines_the_job() {
    let quarantined = |n| {
        format!(
            "failed_permanent after 1, {n} interruptions, history interrupted, error Quarantined after {n} worker \
             interruptions; find out why its workers die, then retry it, result -"
        )
    };
    for (interruptions, max_interruptions, counted) in [(2, 3, 3), (0, 1, 1), (0, 0, 1), (5, 3, 6)] {
        let settings = Interruption { max_interruptions, ..INTERRUPTION };
        let leave = settle(&suspect(interruptions, true), Ending::Interrupted(settings));
        assert_eq!(show_leave(leave), quarantined(counted), "{interruptions} of {max_interruptions}");
    }
}

#[test]
fn an_interruption_before_the_start_never_quarantines_regardless_of_earlier_ones() {
    let leave = settle(&suspect(9, false), Ending::Interrupted(INTERRUPTION));
    assert_eq!(
        show_leave(leave),
        "wait with 1 charged, 9 interruptions, in 7s, history interrupted, \
         error Job recovered after worker interruption",
    );
}

#[test]
fn the_count_of_interruptions_cannot_overflow() {
    let settings = Interruption { max_interruptions: u16::MAX, ..INTERRUPTION };
    let leave = settle(&suspect(u16::MAX, true), Ending::Interrupted(settings));
    assert!(matches!(leave, Leave::Requeue(Requeue { interruptions: u16::MAX, .. })), "{leave:?}");
}

// ---- recover -----------------------------------------------------------------

#[test]
fn the_default_recovery_is_an_interruption_in_every_state() {
    let jobs = [
        running(),
        last_attempt(),
        cancel_requested(),
        superseded_job(),
        both_flags(),
        suspect(1, false),
        suspect(2, true),
    ];
    for job in jobs {
        let recovered = show_leave(recover(&job, Recovery::Default(INTERRUPTION)));
        assert_eq!(recovered, show_leave(settle(&job, Ending::Interrupted(INTERRUPTION))), "{job:?}");
    }
}

#[test]
fn a_failing_recovery_is_charged_as_a_worker_crash() {
    let fail = || Recovery::Fail { retry_in: Some(4 * SECOND) };
    assert_recoveries(vec![
        (
            (running(), fail()),
            "wait with 2 charged, 0 interruptions, in 4s, history failed, error WorkerCrashed",
        ),
        (
            (suspect(2, true), fail()),
            "wait with 2 charged, 2 interruptions, in 4s, history failed, error WorkerCrashed",
        ),
        (
            (running(), Recovery::Fail { retry_in: None }),
            "failed_permanent after 2, 0 interruptions, history failed, error WorkerCrashed, result -",
        ),
        (
            (last_attempt(), fail()),
            "failed_permanent after 5, 0 interruptions, history failed, error WorkerCrashed, result -",
        ),
        (
            (cancel_requested(), fail()),
            "cancelled after 2, 0 interruptions, history failed, error WorkerCrashed, result -",
        ),
        (
            (superseded_job(), fail()),
            "failed_permanent after 2, 0 interruptions, history failed, error WorkerCrashed, result -",
        ),
    ]);
}

#[test]
fn a_reschedule_keeps_the_charged_attempts_unless_it_sets_them_and_leaves_one() {
    let line = |attempts, interruptions| {
        format!(
            "wait with {attempts} charged, {interruptions} interruptions, in 11s, history interrupted, \
             error Job recovered after worker interruption"
        )
    };
    let (unchanged, none_charged, all_but_one) = (line(1, 1), line(0, 1), line(4, 1));
    assert_recoveries(vec![
        ((running(), reschedule(None)), &unchanged),
        ((running(), reschedule(Some(0))), &none_charged),
        ((running(), reschedule(Some(4))), &all_but_one),
        ((running(), reschedule(Some(5))), &all_but_one),
        ((running(), reschedule(Some(u16::MAX))), &all_but_one),
        ((last_attempt(), reschedule(None)), &all_but_one),
    ]);
}

#[test]
fn a_reschedule_never_quarantines_and_its_count_stops_at_the_maximum() {
    for (interruptions, started, counted) in
        [(0, false, 1), (2, true, 3), (3, true, 3), (3, false, 3), (8, true, 8)]
    {
        let leave = recover(&suspect(interruptions, started), reschedule(None));
        assert!(
            matches!(&leave, Leave::Requeue(requeue) if requeue.interruptions == counted),
            "{interruptions} before, started {started}: {leave:?}"
        );
    }
}

#[test]
fn a_reschedule_at_an_instant_keeps_that_instant() {
    let at = DateTime::from_timestamp(1_900_000_000, 0).unwrap();
    let recovery = Recovery::Reschedule { when: When::At(at), attempts: None, max_interruptions: 3 };
    let leave = recover(&running(), recovery);
    assert!(matches!(&leave, Leave::Requeue(requeue) if requeue.when == When::At(at)), "{leave:?}");
}

#[test]
fn a_flagged_job_ends_instead_of_being_rescheduled() {
    let cancelled = "cancelled after 1, 1 interruptions, history interrupted, \
                     error Job recovered after worker interruption, result -";
    assert_recoveries(vec![
        ((cancel_requested(), reschedule(None)), cancelled),
        ((superseded_job(), reschedule(Some(0))), cancelled),
        ((both_flags(), reschedule(None)), cancelled),
    ]);
}

// ---- error messages ----------------------------------------------------------

#[test]
fn every_refusal_is_a_conflict_that_names_the_job_and_most_name_the_remedy() {
    let message = |refusal: Refusal| {
        let error = refusal.into_error("J", &finished(Outcome::Cancelled));
        assert!(error.is_conflict());
        assert_eq!(error.status(), Some(Status::Cancelled));
        error.to_string()
    };
    assert_table(
        vec![
            (Refusal::LeaseLost, "job J: the lease is no longer held"),
            (Refusal::NotWaiting, "job J is not waiting"),
            (
                Refusal::AlreadyFinished(Outcome::Succeeded),
                "job J has already ended as succeeded; retry it if it should run again",
            ),
            (Refusal::IsRunning, "job J is running; wait for the attempt to end, or cancel it first"),
            (Refusal::NotFinished, "job J has not ended; cancel it first"),
            (
                Refusal::NotDead(Outcome::Cancelled),
                "job J ended as cancelled, not failed_permanent; retry it instead of redriving it",
            ),
        ],
        message,
    );
}
