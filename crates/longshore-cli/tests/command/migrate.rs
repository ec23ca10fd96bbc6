//! `migrate`: from nothing to a queue.

use serde_json::json;

use crate::bench::{Bench, on_every_engine};

on_every_engine!(
    migrate_does_its_work_once,
    a_check_tells_a_pending_migration_and_changes_nothing,
    before_migration_every_command_says_to_migrate,
);

fn migrate_does_its_work_once(bench: &Bench) {
    assert_eq!(bench.run("migrate --json").json(), json!({ "from": 0, "to": 2 }));
    assert_eq!(bench.run("migrate").ok().out, "already at schema version 2; nothing to do\n");
    assert_eq!(bench.run("migrate --check").ok().out, "up to date at schema version 2\n");
    assert_eq!(
        bench.run("migrate --check --json").json(),
        json!({ "version": 2, "wanted": 2, "pending": false })
    );
}

fn a_check_tells_a_pending_migration_and_changes_nothing(bench: &Bench) {
    for _ in 0..2 {
        let check = bench.run("migrate --check");
        assert_eq!(check.code, 1);
        assert_eq!(check.out, "pending: schema version 0, wanted 2; run `longshore migrate`\n");
    }
    let check = bench.run("migrate --check --json");
    assert_eq!((check.code, check.document()["pending"].clone()), (1, json!(true)));
    assert!(bench.file().is_none_or(|file| !file.exists()), "no file is made");
}

fn before_migration_every_command_says_to_migrate(bench: &Bench) {
    let lines = [
        "enqueue greet",
        "jobs list",
        "queues list",
        "dead list",
        "workers list",
        "sweep",
        "counts",
        "check",
    ];
    for line in lines {
        bench.run(line).refused(6, &["longshore migrate"]);
    }
    assert!(bench.file().is_none_or(|file| !file.exists()), "no file is made");
}
