//! What both engines promise, case by case, in the order of a job's life.
//!
//! A case is an `async fn` that takes a [`Bench`](bench::Bench) and knows no
//! engine. The list below makes it two tests, `postgres::module::case` and
//! `sqlite::module::case`; a case that is not on the list is dead code, which
//! the compiler tells. Run them with `cargo xtask test`.

mod access;
mod bench;
mod cancel;
mod claim;
mod counts;
mod cursor;
mod enqueue;
mod fence;
mod hooks;
mod input;
mod inspect;
mod keys;
mod leases;
mod limits;
mod locks;
mod matrix;
mod migrate;
mod mishaps;
mod operate;
mod outage;
mod races;
mod recovery;
mod retention;
mod schedules;
mod settle;
mod sql;
mod transactions;
mod wake;
mod walk;
mod worker;
mod workers;

/// Makes a test of every case, for each of the engines named.
macro_rules! cases {
    (on $($engine:ident as $tests:ident),+: $list:tt) => {
        $(cases!(@engine $engine $tests $list);)+
    };
    (@engine $engine:ident $tests:ident { $($module:ident { $($case:ident,)+ })+ }) => {
        mod $tests {
            $(mod $module {
                $(
                    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                    async fn $case() {
                        crate::bench::run(crate::bench::Engine::$engine, crate::$module::$case).await;
                    }
                )+
            })+
        }
    };
}

cases!(on Postgres as postgres, Sqlite as sqlite: {
    migrate {
        migrating_again_changes_nothing,
        a_database_without_tables_is_at_version_zero,
        a_database_of_the_first_version_keeps_its_jobs,
        what_the_first_version_lacks_says_to_migrate,
        processes_that_migrate_at_once_all_succeed,
        without_tables_a_verb_says_to_migrate,
        a_schema_newer_than_this_build_is_refused,
        a_schema_newer_than_this_build_is_refused_at_connect,
        a_pinned_clock_stands_still_for_every_process,
        an_unpinned_clock_is_the_real_one,
        the_clock_keeps_microseconds,
    }
    enqueue {
        a_job_that_asks_for_nothing_gets_the_defaults,
        everything_asked_survives_exactly,
        a_claim_carries_what_was_asked,
        a_payload_keeps_its_very_bytes,
        the_largest_payload_is_stored,
        answers_come_in_the_order_of_the_jobs,
        a_repeated_id_is_answered_as_created_and_stored_once,
        a_repeated_id_within_one_batch_is_stored_once,
        a_repeated_keyed_id_is_answered_as_created,
        a_repeated_id_with_another_idempotency_key_is_answered_as_created,
        a_repeated_id_does_not_revive_a_job_that_has_moved_on,
        a_delay_counts_from_the_engines_clock,
        a_time_in_the_past_is_due_and_kept,
        a_time_is_kept_to_the_microsecond,
        the_extremes_of_priority_are_kept,
        an_empty_batch_is_no_error,
        many_jobs_are_stored_in_one_call,
        one_invalid_job_among_many_stores_none,
        concurrent_enqueues_each_get_their_own_job,
        a_bad_neighbour_harms_nobody,
        jobs_wait_in_the_queue_they_name,
    }
    keys {
        the_same_idempotency_key_returns_the_first_job_unchanged,
        an_idempotency_key_outlives_the_end_of_its_job,
        an_idempotency_key_is_free_again_when_its_job_is_deleted,
        an_idempotency_key_is_free_again_when_its_job_is_retained_away,
        a_job_is_checked_before_its_key_is_looked_at,
        twins_within_a_batch_become_the_first_of_them,
        a_twin_within_a_batch_takes_no_unique_key_of_its_own,
        a_batch_finds_keys_taken_before_it,
        keys_differ_by_case_and_by_trailing_space,
        an_idempotent_answer_takes_no_unique_key,
        an_idempotent_answer_replaces_nothing,
        the_idempotency_key_of_a_replacement_is_remembered,
        dedupe_returns_a_waiting_holder_unchanged,
        dedupe_returns_a_running_holder,
        dedupe_holds_across_kinds_and_queues,
        replace_gives_a_waiting_holder_the_new_contents_and_time,
        a_replaced_job_is_claimed_with_its_new_contents,
        preserve_run_at_gives_a_waiting_holder_the_contents_but_not_the_time,
        a_replaced_retry_starts_over_under_the_same_fence,
        replace_and_preserve_move_the_key_of_a_running_holder_to_a_new_job,
        every_mode_makes_a_new_job_when_the_holder_has_ended,
        a_unique_key_is_released_by_every_end,
        a_unique_key_is_released_by_an_end_that_leaves_nothing_behind,
        a_unique_key_is_released_by_a_requested_cancel_once_it_is_carried_out,
        a_unique_key_is_released_by_quarantine,
        a_unique_key_is_kept_by_every_way_back_to_the_queue,
        an_operators_retry_takes_the_unique_key_again,
        a_retry_whose_unique_key_is_taken_is_a_conflict_naming_the_holder,
        a_superseded_job_may_succeed,
        a_superseded_job_that_gives_up_says_why,
        a_superseded_failure_is_final,
        a_superseded_snooze_release_or_interruption_ends_cancelled,
        a_superseded_job_of_a_dead_worker_ends_cancelled,
        a_list_by_unique_key_finds_the_live_owner_only,
    }
    claim {
        higher_priority_comes_first_across_queues,
        within_a_priority_the_earliest_due_comes_first,
        jobs_due_at_the_same_instant_come_in_the_order_of_their_ids,
        the_order_across_queues_of_one_priority_is_by_time,
        a_future_job_of_a_higher_priority_is_passed_over,
        a_foreign_kind_of_a_higher_priority_is_passed_over,
        a_job_is_due_at_its_very_instant,
        a_claim_brings_no_more_than_asked_and_says_that_there_are_more,
        a_claim_of_none_gets_none,
        an_empty_queue_gives_nothing_and_no_promise_of_more,
        a_claimed_job_is_not_claimed_again,
        a_claim_shows_who_holds_the_lease_since_when,
        attempt_and_lease_number_rise_with_every_claim,
        kinds_without_a_handler_are_left_alone,
        a_worker_without_handlers_gets_nothing,
        a_worker_without_queues_gets_nothing,
        a_queue_named_twice_counts_once,
        accepted_flags_bring_jobs_with_one_of_them_only,
        forbidden_flags_keep_jobs_with_any_of_them_away,
        a_flag_both_accepted_and_forbidden_is_forbidden,
        flags_match_whole_and_exactly,
        a_paused_queue_is_left_alone_until_resumed,
        a_pause_binds_a_claimer_that_has_begun,
        a_pause_binds_a_claimer_of_many_priorities_that_has_begun,
        a_pause_lets_running_jobs_go_on,
        an_unknown_worker_gets_nothing,
        a_worker_declared_dead_gets_nothing,
        a_dead_worker_with_a_warm_cursor_gets_nothing,
        a_retired_worker_gets_nothing,
        at_most_one_suspect_is_among_the_claimed,
        at_most_one_suspect_comes_from_all_queues_together,
        the_suspect_takes_its_place_in_the_order,
        a_process_that_runs_a_suspect_leaves_the_others,
        suspects_are_claimed_one_by_one_when_nothing_else_waits,
        suspects_obey_the_same_filters,
        a_suspect_that_is_not_due_waits,
        a_claim_of_one_is_one_even_with_a_suspect_due,
        a_claim_whose_caller_went_away_leaves_nothing_running,
        a_claim_given_up_after_its_answer_came_leaves_nothing_running,
    }
    cursor {
        jobs_of_one_instant_are_each_claimed_once_across_the_cursor,
        a_job_that_arrives_behind_the_cursor_is_found,
        a_job_of_a_new_higher_priority_is_found,
        a_job_of_a_queue_that_was_empty_is_found,
        jobs_that_come_due_behind_the_cursor_are_found,
        a_retried_job_is_found_again,
        an_edited_job_is_found_at_its_new_place,
        thousands_of_foreign_kinds_in_front_do_not_hide_a_job,
        a_question_about_other_kinds_starts_at_the_head,
        a_cursor_that_always_starts_at_the_head_finds_the_same,
        two_claimers_with_memories_share_all_jobs_between_them,
    }
    limits {
        a_serial_queue_runs_one_job_at_a_time_across_handles,
        a_serial_queue_keeps_the_order_of_its_jobs,
        a_limit_holds_across_priorities_and_kinds,
        concurrent_claimers_never_overdraw_a_limit,
        every_ending_frees_the_slot,
        a_requested_cancel_holds_the_slot_until_it_is_carried_out,
        recovery_frees_the_slot,
        a_lost_lease_frees_its_slot_once,
        a_limit_set_while_jobs_run_counts_them,
        a_raised_limit_lets_more_run_and_a_lifted_one_all,
        a_limit_holds_for_a_claimer_that_has_begun_without_one,
        a_full_queue_does_not_hold_up_its_neighbours,
        a_suspect_needs_a_slot_like_any_other,
        a_limit_below_one_is_refused_by_name,
        queues_show_their_settings_and_their_live_jobs,
        a_change_of_one_setting_leaves_the_other,
    }
    settle {
        success_is_final_and_keeps_its_result,
        success_without_a_result_has_none,
        failure_with_attempts_left_waits_its_backoff,
        failure_on_the_last_attempt_is_final,
        failure_without_a_retry_is_final_with_attempts_left,
        an_observed_cancel_is_final_and_keeps_its_reason,
        a_snooze_is_not_charged_and_waits_as_long_as_asked,
        a_release_is_not_charged_and_is_due_at_once,
        a_workers_own_interruption_is_counted_but_not_charged,
        the_history_tells_every_attempt_that_did_not_succeed,
        the_last_error_is_kept_after_a_later_success,
        a_success_that_leaves_nothing_behind_keeps_what_was_counted,
        the_default_backoff_stays_between_one_second_and_its_ceiling,
        a_jobs_own_policy_decides_its_backoff,
        a_repeated_settle_says_stored_and_changes_nothing,
        a_repeated_settle_is_known_even_after_the_next_claim,
        a_repeated_settle_makes_no_second_follow_up,
        a_repeated_settle_does_not_try_its_follow_ups_again,
        a_final_failure_is_known_even_after_an_operators_retry,
        a_job_ends_once_however_often_its_end_is_counted,
        follow_ups_are_stored_with_the_end,
        follow_ups_of_a_lost_lease_are_never_stored,
        follow_ups_with_keys_obey_them,
        follow_ups_survive_a_cancel_that_changes_the_end,
        a_follow_up_that_the_database_refuses_harms_its_own_settle_only,
        an_error_with_nul_is_stored_cleaned,
        an_over_long_error_is_stored_cut_at_a_character,
        a_result_the_database_could_choke_on_does_not_stop_the_settle,
        an_over_long_result_does_not_stop_the_settle,
        an_absurd_delay_does_not_stop_the_settle,
        a_reason_with_nul_is_stored_cleaned,
        a_batch_is_answered_item_by_item,
        an_empty_batch_is_no_error,
        a_lease_settled_twice_in_one_batch_ends_once,
        a_large_batch_of_successes_is_stored,
        results_and_errors_of_a_batch_stay_with_their_jobs,
        a_move_decided_without_a_raised_flag_is_sent_back,
        a_success_is_stored_whatever_the_flags,
        a_follow_up_is_not_stored_while_the_flag_sends_its_settle_back,
        the_end_names_who_stored_it,
    }
    fence {
        a_holder_whose_job_runs_elsewhere_is_powerless,
        a_holder_whose_job_waits_again_is_powerless,
        a_late_settle_is_not_mistaken_for_the_sweepers,
        a_late_settle_is_not_mistaken_for_the_sweepers_quarantine,
        a_late_failure_is_not_mistaken_for_the_one_a_hook_decided,
        a_holder_from_before_an_operators_retry_is_powerless,
        a_finished_holder_does_not_own_the_retried_job,
        the_right_number_in_the_wrong_hands_is_powerless,
        a_holder_is_powerless_over_its_own_later_lease,
        a_plain_success_of_an_old_lease_does_not_end_a_later_one_of_its_worker,
        plain_successes_of_one_batch_end_what_their_worker_holds,
        a_number_from_the_future_is_powerless,
        a_waiting_job_has_no_holder,
        an_unknown_job_has_no_holder,
        a_deleted_job_has_no_holder,
        the_live_holder_can_do_everything,
        the_claims_behind_live_leases_are_as_they_were_given,
        a_suspect_is_found_by_its_lease_as_a_suspect,
        claims_are_answered_lease_by_lease,
        progress_is_answered_report_by_report,
        the_newest_of_two_reports_in_one_batch_shows,
        what_the_database_could_choke_on_is_refused_by_name_and_harms_nothing,
        a_checkpoint_outlives_the_attempt_and_is_replaced_by_the_next,
        a_checkpoint_goes_with_its_job,
        a_released_lease_is_gone_at_once,
    }
    leases {
        a_lease_alone_settles_as_its_claim_does,
        a_lease_settled_again_is_held_again_and_nothing_changes,
        a_last_failure_and_a_quarantine_settled_again_are_held_again,
        another_word_about_an_ended_lease_is_lost,
        a_lost_lease_alone_settles_nothing,
        leases_settled_in_one_batch_are_answered_one_by_one,
    }
    cancel {
        a_waiting_job_is_cancelled_at_once,
        a_job_due_tomorrow_is_cancelled_at_once,
        a_retrying_job_keeps_its_error_and_its_attempts_when_cancelled,
        a_suspect_is_cancelled_with_its_interruptions,
        a_running_job_is_told_to_stop,
        a_second_cancel_of_a_running_job_is_pending_too,
        a_requested_cancel_yields_to_success,
        a_requested_cancel_outranks_every_other_ending,
        a_requested_cancel_outranks_recovery,
        a_cancel_does_not_stay_with_a_retried_job,
        a_finished_job_cannot_be_cancelled_and_the_refusal_names_the_remedy,
        an_unknown_job_is_not_found,
        a_beat_names_cancels_and_losses_of_held_leases_only,
    }
    operate {
        a_finished_job_runs_again_with_a_fresh_budget,
        a_quarantined_job_is_no_suspect_after_a_retry,
        the_history_stays_after_a_retry,
        the_result_of_an_earlier_success_is_gone_after_a_retry,
        a_waiting_job_is_due_now_and_keeps_its_attempts,
        a_job_already_due_keeps_its_place_when_hurried,
        a_running_job_cannot_be_retried,
        only_dead_letters_are_redriven,
        dead_letters_are_listed_oldest_first_and_by_filter,
        many_dead_letters_are_redriven_by_filter,
        a_redrive_of_many_passes_over_taken_keys,
        an_edit_changes_what_it_names_and_nothing_else,
        an_edited_job_is_claimed_as_edited,
        an_edit_keeps_attempts_interruptions_and_fence,
        running_and_finished_jobs_cannot_be_edited,
        a_bad_edit_is_refused_by_name,
        a_finished_job_is_deleted_with_its_history,
        live_jobs_cannot_be_deleted,
        an_unknown_job_is_not_found_by_any_command,
        an_operation_on_a_job_that_has_moved_changes_nothing,
        an_operation_decided_before_a_run_changes_nothing,
        an_operation_decided_before_a_replacement_changes_nothing,
    }
    workers {
        a_worker_is_shown_as_it_registered,
        workers_are_listed_newest_first_with_their_leases,
        a_worker_is_stale_past_its_own_threshold_or_the_one_asked_for,
        a_worker_is_declared_dead_past_its_own_threshold_only,
        a_threshold_asked_for_overrides_the_workers_own,
        a_beat_keeps_a_worker_alive,
        a_late_beat_before_the_sweep_saves_the_worker,
        the_dead_stay_dead,
        an_unknown_worker_is_told_that_it_is_dead,
        a_beat_names_every_lost_lease,
        a_dead_worker_without_leases_is_forgotten,
        a_dead_worker_is_kept_while_a_lease_names_it,
        a_worker_that_retires_is_gone,
        a_worker_that_retires_with_leases_is_dead_and_recovered,
        a_repeated_registration_is_no_error,
        leases_are_told_by_their_worker,
        leases_a_worker_does_not_know_of_are_given_back_uncharged,
    }
    recovery {
        a_dead_workers_job_goes_back_to_the_queue,
        a_live_workers_leases_are_never_taken,
        each_worker_dies_by_its_own_threshold,
        a_resilient_job_waits_three_times_as_long,
        a_manual_sweep_honours_resilience_too,
        the_flags_and_the_factor_of_resilience_can_be_chosen,
        a_lease_without_a_worker_row_is_taken_past_the_threshold,
        a_hung_handlers_lease_is_taken_from_a_live_worker,
        a_job_without_a_timeout_never_counts_as_hung,
        a_job_without_a_timeout_is_still_recovered_from_the_dead,
        a_dry_run_tells_what_a_sweep_would_do_and_changes_nothing,
        a_dry_run_names_dead_workers_that_hold_nothing,
        a_dry_run_goes_by_the_threshold_asked_for,
        a_sweep_walks_through_every_page,
        candidates_come_by_id_after_the_one_named,
        a_candidate_shows_the_whole_lease,
        a_reschedule_names_the_time,
        a_reschedule_may_name_the_attempts,
        a_failing_decision_charges_the_attempt_with_the_jobs_backoff,
        a_failing_decision_on_the_last_attempt_is_final,
        a_skipped_job_stays_with_its_holder_uncounted,
        after_the_first_only_started_runs_are_counted,
        a_poison_job_is_quarantined_with_a_reason_that_says_so,
        innocent_neighbours_of_a_poison_job_are_not_quarantined,
        the_maximum_of_interruptions_can_be_chosen,
        mark_started_shows_in_the_located_state_once,
        a_recovery_from_a_worker_that_is_not_dead_is_refused,
        a_listed_worker_that_beat_in_time_keeps_its_lease,
        a_recovery_of_a_lease_that_was_settled_is_refused,
        a_recovery_blind_to_a_raised_flag_is_sent_back,
        a_recovery_of_many_is_answered_item_by_item,
        a_hung_handler_is_taken_though_its_worker_lives,
        a_worker_that_comes_back_registers_anew_and_claims,
        a_reschedule_to_an_absurd_time_stores_something,
        an_absurd_threshold_recovers_nobody,
    }
    inspect {
        a_list_is_newest_first_over_every_status,
        a_list_by_status_finds_that_status_only,
        a_list_agrees_with_the_single_view,
        a_list_by_kind_queue_tag_or_key_finds_the_matching,
        a_list_by_key_obeys_the_other_filters_too,
        pages_follow_one_another_without_gap_or_overlap,
        a_page_holds_between_one_and_two_hundred,
        an_offset_passes_over_matches_up_to_its_bound,
        a_rare_match_is_found_by_following_short_pages,
        a_cursor_of_a_job_that_is_gone_still_works,
        the_jobs_ahead_are_those_a_claim_would_take_first,
        interrupted_jobs_count_among_those_ahead,
        those_ahead_are_counted_up_to_a_bound,
        a_job_that_does_not_wait_has_nobody_ahead,
        a_healthy_queue_has_no_problems,
        a_job_in_no_place_is_found,
        a_job_in_two_places_is_found,
        a_waiting_row_without_a_job_is_found,
        a_lease_without_a_job_is_found,
        an_end_without_a_job_is_found,
        a_key_without_a_live_owner_is_found,
        a_live_job_that_lost_its_key_is_found,
        a_tally_that_disagrees_with_the_rows_is_found,
        a_waiting_row_that_disagrees_with_its_job_is_found,
    }
    counts {
        an_empty_queue_counts_nothing,
        jobs_are_counted_by_status_queue_and_kind,
        a_retry_takes_the_job_out_of_its_outcome,
        counts_agree_with_the_list_after_a_walk,
        folding_keeps_the_sums,
        folding_ends_and_leaves_few_rows,
        a_job_moved_to_another_queue_by_its_key_is_counted_there,
        ends_are_tallied_by_minute_queue_kind_and_outcome,
        tallies_tell_how_long_the_attempts_took,
        an_end_stays_tallied_whatever_becomes_of_the_job,
        minutes_that_were_added_up_are_told_by_the_hour,
        minutes_of_the_present_hour_are_told_apart,
    }
    retention {
        each_outcome_is_kept_for_its_own_time,
        the_defaults_are_a_week_and_ninety_days,
        age_counts_from_the_end_not_from_the_enqueue,
        for_ever_is_for_ever,
        live_jobs_are_never_removed,
        a_retried_job_is_live_again,
        history_and_checkpoint_go_with_the_job,
        a_step_looks_at_so_many_rows_and_the_walk_begins_anew,
        tallies_follow_what_is_removed,
        two_processes_may_retain_at_once,
        retention_works_by_a_running_clock,
    }
    schedules {
        schedules_are_kept_as_given_and_listed_by_name,
        a_schedule_of_the_same_name_is_replaced,
        a_schedule_put_again_keeps_its_ticks_and_its_pause,
        a_removed_schedule_is_gone_and_says_so,
        a_tick_fires_once_and_stores_its_jobs,
        another_tick_than_the_next_does_not_fire,
        a_paused_schedule_does_not_fire,
        a_tick_decided_from_what_is_no_longer_so_does_not_fire,
        a_tick_that_is_let_go_is_not_the_last_that_fired,
        an_unknown_schedule_does_not_fire,
        of_many_callers_one_gets_each_tick,
        a_ticks_jobs_obey_their_keys_and_are_answered,
        a_pass_fires_what_is_due_and_says_when_to_look_again,
        without_schedules_there_is_nothing_to_wake_for,
        a_tick_has_what_the_template_says_and_tells_its_origin,
        a_tick_found_within_a_minute_is_on_time,
        skipped_ticks_leave_no_job,
        one_job_makes_up_for_all_missed_ticks,
        the_newest_missed_ticks_are_backfilled,
        many_processes_fire_each_tick_once,
        a_tick_that_is_fired_again_makes_no_second_job,
        putting_what_is_there_disturbs_nothing,
        another_line_or_zone_counts_from_now,
        a_paused_schedule_holds_its_ticks_until_it_is_resumed,
        a_run_by_hand_is_extra,
        an_unknown_schedule_is_not_found,
        a_refused_schedule_is_not_stored,
        a_schedule_that_cannot_be_understood_does_not_stop_the_others,
        whoever_makes_the_pass_may_veto_or_reshape_a_tick,
    }
    access {
        a_token_is_found_by_its_hash_as_it_was_given,
        a_token_never_shows_its_hash,
        a_revoked_token_is_dead_and_stays_listed,
        a_token_revoked_again_stays_revoked_since_the_first_time,
        a_token_is_good_until_the_instant_it_expires,
        tokens_are_listed_newest_first,
        the_same_token_again_changes_nothing,
        an_id_or_a_hash_of_another_token_is_a_conflict,
        a_bad_token_is_refused_by_name,
        kinds_are_kept_as_given_and_listed_by_name,
        a_kind_put_again_is_replaced,
        a_kind_put_without_a_schema_keeps_the_one_it_has,
        of_two_words_about_a_kind_in_one_call_the_last_counts,
        a_removed_kind_is_gone_and_says_so,
        a_bad_kind_is_refused_by_name_and_nothing_is_written,
        many_may_put_the_same_kinds_at_once,
    }
    wake {
        a_subscriber_hears_a_wake_of_its_own_handle,
        every_subscriber_hears_every_wake,
        a_wake_among_many_at_once_is_heard,
        a_subscriber_hears_an_enqueue_of_another_handle,
        an_enqueue_through_the_client_wakes,
        a_keyed_enqueue_wakes,
        a_retry_and_a_resume_wake,
        a_follow_up_wakes,
        a_wake_carries_any_name,
    }
    transactions {
        jobs_of_a_committed_transaction_exist,
        jobs_of_a_rolled_back_transaction_never_existed,
        keys_are_answered_inside_a_transaction_too,
        a_replacement_rolls_back_with_the_transaction,
        an_invalid_job_is_refused_before_it_reaches_the_transaction,
    }
    races {
        a_cancel_and_a_claim_agree_on_who_was_first,
        a_cancel_and_a_failure_end_cancelled_whoever_is_first,
        a_cancel_and_a_success_end_succeeded,
        a_cancel_and_an_operators_retry_never_lose_the_job,
        an_accepted_cancel_is_never_followed_by_another_run,
        a_settle_is_never_lost_to_a_report_of_the_same_moment,
        a_sweep_takes_the_lease_of_a_zombie_that_reports,
        a_claim_gets_the_old_job_whole_or_the_new_one,
        a_limit_set_beside_a_claim_is_not_overdrawn_afterwards,
        two_sweepers_recover_each_job_once,
        of_a_sweep_and_a_settle_exactly_one_wins,
        a_beat_in_time_and_a_sweep_agree,
        ten_enqueues_with_one_idempotency_key_make_one_job,
        ten_enqueues_with_one_unique_key_make_one_job,
        ten_replacing_enqueues_leave_one_job_with_one_of_their_contents,
        ten_replacing_enqueues_of_a_running_holder_make_one_new_job,
        keys_in_any_order_never_surface_a_deadlock,
        everything_at_once_leaves_no_damage,
        thirty_two_claimers_take_each_of_twenty_thousand_jobs_once,
        a_claimer_killed_in_mid_transaction_loses_nothing,
    }
    matrix {
        a_fresh_job_follows_the_table,
        a_retrying_job_follows_the_table,
        a_waiting_suspect_follows_the_table,
        a_running_job_follows_the_table,
        a_job_on_its_last_attempt_follows_the_table,
        a_job_told_to_stop_follows_the_table,
        a_superseded_job_follows_the_table,
        a_suspect_that_has_not_started_follows_the_table,
        a_suspect_that_has_started_follows_the_table,
        a_suspect_on_its_last_life_follows_the_table,
        a_succeeded_job_follows_the_table,
        a_dead_letter_follows_the_table,
        a_cancelled_job_follows_the_table,
        a_located_state_tells_what_the_rules_ask_for,
        the_status_view_says_the_same_as_the_library,
        a_long_life_ends_where_the_rules_say,
    }
    input {
        every_bad_field_is_refused_by_name_and_nothing_is_written,
        the_limits_themselves_are_stored,
        the_earliest_and_the_latest_times_are_stored,
        a_question_with_nul_is_no_internal_error,
        a_queue_without_a_proper_name_is_refused,
        a_queue_setting_that_changes_nothing_is_no_error,
        a_job_id_that_is_none_is_refused_by_name,
        an_unknown_scheme_is_refused_without_repeating_the_password,
        a_database_that_is_not_there_is_told_and_not_made,
        a_read_only_database_says_so_and_still_answers_questions,
        the_largest_numbers_are_no_error,
        a_number_of_any_size_is_stored_as_written,
        steps_of_nothing_are_no_error,
        a_job_with_an_odd_id_lives_like_any_other,
    }
    walk {
        any_order_of_operations_follows_the_model,
        a_walk_of_one_job_to_the_end_of_its_budget,
    }
    hooks {
        hooks_are_told_and_have_their_say,
        hooks_decide_about_jobs_of_dead_workers,
        recovery_can_be_switched_off,
    }
    mishaps {
        a_backoff_that_panics_leaves_it_to_the_policy,
        a_handler_that_panics_when_dropped_costs_its_own_attempt_only,
        a_cancelled_job_takes_none_of_its_batch_along,
        a_batch_handler_gets_batches_however_few_its_slots,
        a_hook_that_hangs_has_no_longer_than_the_job,
        a_stop_hook_that_hangs_ends_with_the_grace,
        hooks_have_heard_of_every_end_before_a_drain_returns,
        nobody_left_to_ask_for_haste_leaves_the_grace,
        jobs_of_a_limited_queue_follow_one_another_without_a_poll,
    }
    worker {
        a_typed_job_is_enqueued_with_its_defaults_and_runs_with_its_state,
        the_dynamic_executor_takes_what_has_no_handler,
        a_kind_without_a_handler_is_left_alone,
        a_batch_is_one_call_and_each_job_ends_by_itself,
        any_error_is_a_failed_attempt_with_its_causes,
        a_handler_may_say_when_to_retry_or_never,
        a_panic_is_a_failed_attempt_with_its_message,
        a_payload_of_an_old_shape_is_a_dead_letter,
        a_result_is_kept_with_the_job,
        follow_ups_exist_only_after_a_success,
        a_checkpoint_is_there_for_the_next_attempt,
        progress_is_seen_while_the_job_runs,
        a_cancel_reaches_the_handler_and_ends_the_job,
        a_timeout_is_a_failed_attempt,
        a_stop_lets_running_jobs_finish,
        what_outlives_the_grace_goes_back_uncharged,
        a_worker_declared_dead_stops_its_handlers_and_begins_anew,
        a_thousand_jobs_run_once_each,
        a_queues_own_limit_holds,
        suspects_start_one_at_a_time_and_their_start_is_written_down,
        suspects_follow_one_another_without_a_poll,
        what_is_announced_is_found_without_a_poll,
        what_is_announced_together_starts_in_order_of_priority,
        a_schedule_declared_in_code_ticks_in_a_running_worker,
        an_invalid_schedule_is_refused_when_the_worker_starts,
        what_is_wrong_with_a_worker_is_named_when_it_is_built,
        a_worker_publishes_its_kinds_when_it_starts,
        a_worker_that_cannot_publish_its_kinds_works_all_the_same,
        a_schema_that_cannot_be_kept_is_refused_when_the_worker_is_built,
    }
});

// What only Postgres has: functions for callers that speak SQL.
cases!(on Postgres as postgres_only: {
    locks {
        a_claim_that_finds_due_jobs_locked_takes_no_others_in_their_place,
        nor_does_one_from_many_places,
        a_claim_does_not_wait_for_rows_that_others_hold,
        a_locked_job_holds_up_none_below_it,
        a_locked_job_of_a_limited_queue_gives_its_place_to_one_other,
        a_locked_suspect_holds_up_no_other,
        a_settle_stores_the_neighbours_of_a_locked_lease,
        what_a_handler_reports_does_not_wait_long_for_a_locked_lease,
        a_sweep_recovers_the_neighbours_of_a_locked_lease,
        retention_passes_over_a_locked_job,
        a_key_that_a_transaction_holds_holds_up_no_other,
        a_batch_with_a_key_that_a_transaction_holds_is_stored_whole_or_not_at_all,
        a_claim_in_flight_counts_against_the_limit_set_meanwhile,
        a_retry_beside_a_replacement_queues_the_new_contents,
    }
    mishaps {
        a_locked_row_holds_up_no_other_end,
        a_database_that_takes_no_writes_for_a_while_costs_nobody_an_attempt,
    }
    sql {
        the_cancel_function_follows_the_table,
        the_retry_function_follows_the_table,
        a_retry_whose_key_is_taken_says_so,
        a_job_enqueued_from_sql_is_like_one_of_the_library,
        every_argument_of_the_sql_enqueue_is_stored,
        the_sql_enqueue_answers_for_keys,
        the_sql_enqueue_refuses_what_the_library_refuses,
        the_sql_enqueue_has_the_librarys_limits,
        what_the_library_takes_the_function_takes_from_it,
        flags_of_any_shape_are_stored_as_one_list,
        the_sql_enqueue_refuses_what_could_not_be_read_back,
        the_sql_enqueue_takes_the_payloads_that_the_library_takes,
        half_pairs_around_a_backslash_are_no_pair,
        the_sql_enqueue_refuses_options_that_lack_or_repeat_a_part,
        a_unique_mode_of_null_is_dedupe,
        a_job_with_unreadable_options_is_claimed_with_its_neighbours,
        brackets_in_strings_do_not_count_as_depth,
        ids_made_in_sql_are_version_seven_and_sort_with_the_librarys,
        a_job_enqueued_from_sql_wakes_subscribers,
        a_rolled_back_sql_enqueue_leaves_nothing,
        any_proper_schema_name_works_from_end_to_end,
        a_schema_name_that_postgres_keeps_to_itself_is_refused_by_name,
        a_role_that_may_make_no_schema_can_migrate_its_own,
    }
    outage {
        a_heartbeat_given_up_leaves_room_for_the_next,
        a_heartbeat_that_nobody_gives_up_ends_by_itself,
        a_worker_is_soon_done_with_dead_connections,
    }
});

// What only SQLite has: connections on which nothing was begun.
cases!(on Sqlite as sqlite_only: {
    transactions {
        a_failed_enqueue_on_a_bare_connection_stores_nothing,
    }
});
