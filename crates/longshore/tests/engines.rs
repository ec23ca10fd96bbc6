//! The functions that both engines have are in the same files and in the same order, so
//! that two files can be read side by side. The files and functions that only one engine
//! has are listed here with a reason. The test fails on a difference that is not listed,
//! and on an entry that is no longer needed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const ENGINES: [&str; 2] = ["postgres", "sqlite"];

/// Files that one engine has and the other does not.
const FILES: &[(&str, &str, &str)] = &[
    (
        "postgres",
        "claim_sql.rs",
        "three long statements; SQLite claims with short ones, beside their functions",
    ),
    ("postgres", "connect.rs", "hosts and failover"),
    ("postgres", "listen.rs", "LISTEN and NOTIFY; SQLite watches data_version in engine.rs"),
    ("postgres", "pool.rs", "connections to a server"),
    ("postgres", "run.rs", "deadlines and retries; SQLite runs operations on its threads, in engine.rs"),
    ("postgres", "step_in.rs", "steps in a transaction of the user's"),
    ("sqlite", "engine.rs", "one writing thread and a few readers"),
    ("sqlite", "tests.rs", "tests of internals: shared commits, file locks"),
];

/// Functions that one engine has and the other does not.
const FUNCTIONS: &[(&str, &str, &[&str], &str)] = &[
    (
        "postgres",
        "mod.rs",
        &["default", "open_with", "schema", "assert_lease_in", "take_parameter"],
        "options of the connection; a transaction of the caller's can lock a lease",
    ),
    ("sqlite", "mod.rs", &["location"], "file or memory"),
    (
        "postgres",
        "tx.rs",
        &[
            "sql",
            "fill",
            "limit_lock_waits",
            "begin",
            "begin_indexed",
            "begin_unless_begun",
            "begin_step",
            "begin_view",
            "begin_snapshot",
            "tx",
            "commit",
            "rollback",
            "is_lost_race",
            "is_duplicate",
            "is_unsound_row",
            "is_lock_timeout",
            "is_broken_connection",
            "was_refused_by_a_standby",
            "is_mixed_up_statement",
            "is_statement_pooling",
            "is_timeout",
            "code",
            "from",
            "translate",
        ],
        "the schema has a name, and operations begin their own transactions",
    ),
    (
        "sqlite",
        "tx.rs",
        &[
            "prepare",
            "execute",
            "row",
            "rows",
            "now",
            "due",
            "host_clock",
            "micros",
            "instant",
            "uuid",
            "job",
            "flow",
            "worker",
            "time",
            "maybe_time",
            "timeout",
            "outcome",
            "condition",
            "list",
            "maybe_list",
            "json",
            "decoded",
            "stored_list",
            "json_list",
            "from",
        ],
        "the host's clock, and columns that Postgres has types for",
    ),
    ("postgres", "store.rs", &["claim_and_move_cursor"], "a closure cannot name the lifetimes"),
    ("postgres", "migrate.rs", &["new", "sql", "fill", "channel"], "the name of the schema"),
    (
        "postgres",
        "enqueue.rs",
        &[
            "held_key",
            "insert_parts",
            "insert_any",
            "insert_plain",
            "insert_step",
            "insert_new",
            "unless_merged",
            "enqueue_unique",
            "bind",
            "of",
            "split",
        ],
        "jobs are stored in batches, as arrays",
    ),
    (
        "sqlite",
        "enqueue.rs",
        &["enqueue_plain", "enqueue_keyed", "of", "store"],
        "jobs are stored row by row",
    ),
    (
        "postgres",
        "claim.rs",
        &[
            "skip_unsound",
            "claim_once",
            "claim_from_head",
            "discover",
            "take_any",
            "lock",
            "of",
            "count",
            "store",
            "take",
            "statement",
            "bind_filter",
            "may_take_suspect",
            "taken",
            "bind_take_from_one",
            "bind_take",
            "read_taken",
            "new",
            "read",
            "explain_claim",
            "explain",
        ],
        "one statement chooses, locks and moves a batch",
    ),
    (
        "sqlite",
        "claim.rs",
        &[
            "claim_once",
            "worker_is_alive",
            "order",
            "as_taken",
            "begin",
            "find_suspects",
            "replace_skipped",
            "skipped_too_many",
            "is_current",
            "may_take_suspect",
            "take",
            "take_plain",
            "find_lines",
            "store_rates",
            "enter_running",
            "count_entry",
            "is_full",
            "take_from_head",
            "find_segments",
            "pick",
            "next_due",
            "first_suspect",
            "handles",
            "admit",
            "lease",
            "skip",
            "claimed",
            "into_claims",
            "read_options",
            "free_slots",
        ],
        "the writer chooses row by row; nothing needs a lock",
    ),
    ("sqlite", "lease.rs", &["raised_flags"], "settle and the heartbeat read the flags row by row"),
    (
        "postgres",
        "settle.rs",
        &[
            "lease_key",
            "end_together",
            "finish_uniform",
            "flags_differ",
            "of",
            "remember_refusal",
            "add",
            "take_uniform",
            "bind_leases",
            "failures",
            "sparse_column",
            "pairs",
        ],
        "leases end in batches, grouped by what they have in common",
    ),
    (
        "sqlite",
        "settle.rs",
        &[
            "end_alone",
            "settled",
            "end_lease",
            "take_lease",
            "record_attempt",
            "prune_history",
            "enter_finished",
            "finished_by",
            "newest_error",
            "free_key",
            "add_end",
            "store",
            "tally",
            "add_tally",
            "run_bucket",
        ],
        "leases end row by row; Postgres does these steps in one statement",
    ),
    (
        "postgres",
        "recover.rs",
        &["mark_dead_one_by_one", "select_workers", "read_interrupted", "recover_together"],
        "the statements say which workers are dead and why a lease may be taken; leases end in batches",
    ),
    (
        "sqlite",
        "recover.rs",
        &["resilient_holders", "readable_flags", "may_be_taken", "retry_policy"],
        "Postgres decides this in the statements",
    ),
    ("postgres", "check.rs", &["jobs", "miscounted"], "reads the rows of one statement each"),
    ("sqlite", "check.rs", &["miscounted"], "Postgres does this within its statements"),
    ("postgres", "operate.rs", &["bind_waiting", "operated"], "statements return how many rows they changed"),
    (
        "sqlite",
        "operate.rs",
        &[
            "wake",
            "as_ready",
            "leave_ready",
            "leave_ready_of",
            "was_ready",
            "is_still_finished",
            "leave_finished",
        ],
        "several short statements; Postgres has one per command",
    ),
    ("sqlite", "steps.rs", &["delete_progress"], "Postgres has a macro, a part of its statements"),
    (
        "postgres",
        "claim_groups.rs",
        &["key", "lock_groups", "take", "add", "keep", "insert"],
        "groups are locked, and served together",
    ),
    (
        "sqlite",
        "claim_groups.rs",
        &["read_line", "take_from_group", "insert_turn"],
        "groups are served one by one; nothing needs a lock",
    ),
    ("postgres", "groups.rs", &["read_group"], "two statements return the columns of a group"),
    ("postgres", "queues.rs", &["bind_rate"], "SQLite binds all columns in one place"),
    (
        "sqlite",
        "turns.rs",
        &["add_turn", "add_turn_of_removed", "add_turn_of_freed"],
        "Postgres has macros, parts of its statements",
    ),
    (
        "sqlite",
        "advance.rs",
        &["note_end", "note_reopened", "delete_links"],
        "Postgres has macros, parts of its statements",
    ),
    ("sqlite", "advance.rs", &["follow_changes"], "a savepoint instead of a transaction"),
    (
        "postgres",
        "advance.rs",
        &["changed", "lock_changed", "lock"],
        "SQLite has one writer, so flows need no lock",
    ),
    (
        "postgres",
        "flows.rs",
        &["put_flow_in", "store_flow", "bind_lease"],
        "a transaction of the caller's is not committed; SQLite's engine commits all of them",
    ),
    ("postgres", "enqueue.rs", &["insert_members"], "one statement stores many members"),
    ("sqlite", "enqueue.rs", &["insert_member"], "members are stored one by one"),
    ("sqlite", "events.rs", &["oldest_kept"], "the host's clock; Postgres compares in its statements"),
    ("sqlite", "queues.rs", &["entry"], "Postgres joins the parts in one statement"),
    (
        "postgres",
        "inspect.rs",
        &["whole", "small_only", "bounded", "raw"],
        "the statement is put together from parts, and a second one reads large values",
    ),
    (
        "sqlite",
        "inspect.rs",
        &["matches", "has_request", "has_error", "has_failure", "has_text"],
        "rows are filtered while they are walked",
    ),
    ("sqlite", "failures.rs", &["note_failure"], "a part of the settle statements on Postgres"),
    (
        "sqlite",
        "history.rs",
        &["put", "time"],
        "rows are merged one by one; Postgres does a batch in one statement",
    ),
    ("postgres", "retain.rs", &["takes_turn"], "SQLite has one writer at a time"),
    ("sqlite", "stats.rs", &["is_surely_above", "scaled"], "the exact total of waiting jobs is cheap"),
    (
        "sqlite",
        "retain.rs",
        &[
            "add_ranges_between",
            "kept_by_flow",
            "delete_request",
            "delete_rows",
            "minutes_fold_before",
            "hour_of",
        ],
        "the walk runs row by row; Postgres does a step in one statement",
    ),
];

fn folder(engine: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store").join(engine)
}

fn files(engine: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder(engine)).expect("the engine's folder");
    entries.map(|entry| entry.expect("entry").file_name().into_string().expect("UTF-8")).collect()
}

/// The names of the functions in a file, in order, without its tests.
fn functions(source: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
    let mut names = Vec::new();
    for line in lines {
        let modifiers = ["pub(super) ", "pub(crate) ", "pub ", "async ", "const "];
        let mut rest = line;
        while let Some(shorter) = modifiers.iter().find_map(|modifier| rest.strip_prefix(modifier)) {
            rest = shorter;
        }
        if let Some(signature) = rest.strip_prefix("fn ") {
            let end = signature.find(['(', '<']).unwrap_or(signature.len());
            names.push(signature[..end].to_owned());
        }
    }
    names
}

/// The functions of one engine's file without those that only this engine has.
/// Returns the names of needless entries too.
fn shared_functions(engine: &str, file: &str) -> (Vec<String>, Vec<String>) {
    let source = fs::read_to_string(folder(engine).join(file)).expect("source");
    let all = functions(&source);
    let listed: Vec<&str> = FUNCTIONS
        .iter()
        .filter(|(of, in_file, ..)| *of == engine && *in_file == file)
        .flat_map(|(_, _, names, _)| names.iter().copied())
        .collect();
    let needless = listed.iter().filter(|name| !all.iter().any(|found| found == *name));
    let needless = needless.map(|name| format!("{engine}/{file}: fn {name}")).collect();
    (all.into_iter().filter(|name| !listed.contains(&name.as_str())).collect(), needless)
}

/// What is wrong with the pair of files, if anything.
fn compare(file: &str, postgres: &[String], sqlite: &[String]) -> Option<String> {
    (postgres != sqlite).then(|| {
        format!(
            "{file}: the functions or their order differ\n  postgres: {}\n  sqlite:   {}",
            postgres.join(", "),
            sqlite.join(", ")
        )
    })
}

#[test]
fn the_engines_have_the_same_functions_in_the_same_order() {
    let mut problems = Vec::new();
    let [postgres, sqlite] = ENGINES.map(files);
    for file in postgres.union(&sqlite) {
        let listed: Vec<&str> =
            FILES.iter().filter(|(_, name, _)| name == file).map(|(engine, ..)| *engine).collect();
        match (postgres.contains(file), sqlite.contains(file)) {
            (true, true) => {
                if !listed.is_empty() {
                    problems.push(format!("{file}: both engines have it; remove it from FILES"));
                }
                let (ours, needless) = shared_functions("postgres", file);
                problems.extend(needless.into_iter().map(|name| format!("{name} does not exist")));
                let (theirs, needless) = shared_functions("sqlite", file);
                problems.extend(needless.into_iter().map(|name| format!("{name} does not exist")));
                problems.extend(compare(file, &ours, &theirs));
            }
            (has_postgres, _) => {
                let engine = if has_postgres { "postgres" } else { "sqlite" };
                if listed != [engine] {
                    problems
                        .push(format!("{file}: only {engine} has it; add the other, or a reason to FILES"));
                }
            }
        }
    }
    for (engine, file, _) in FILES {
        if !files(engine).contains(*file) {
            problems.push(format!("{engine}/{file} does not exist; remove it from FILES"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn every_difference_has_a_reason() {
    assert!(FILES.iter().all(|(.., reason)| !reason.is_empty()));
    assert!(FUNCTIONS.iter().all(|(.., reason)| !reason.is_empty()));
}

#[test]
fn a_moved_or_missing_function_is_a_difference() {
    let names = |text: &str| functions(&text.replace(';', "\n"));
    let source = "pub(super) fn a() {};async fn b<T>(x: T) {};    pub const fn c() {};// fn d()";
    assert_eq!(names(source), ["a", "b", "c"]);
    assert_eq!(compare("x.rs", &names("fn a();fn b()"), &names("fn a();fn b()")), None);
    assert!(compare("x.rs", &names("fn a();fn b()"), &names("fn b();fn a()")).is_some(), "another order");
    assert!(compare("x.rs", &names("fn a();fn b()"), &names("fn a()")).is_some(), "one is missing");
}
