//! Queues, schedules, dead letters and counts.

use longshore::{Ending, NewJob};
use serde_json::json;

use crate::bench::{Bench, by_every_way};

by_every_way!(
    queues_are_paused_resumed_and_limited,
    schedules_are_put_paused_run_and_removed,
    dead_letters_are_listed_and_redriven,
    dead_letters_are_redriven_by_filter,
    counts_tell_queue_kind_and_status,
    a_queue_says_that_it_is_well,
    stats_tell_what_ended_and_how_fast,
    kinds_are_put_listed_and_removed,
);

fn queues_are_paused_resumed_and_limited(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("queues list --json").json(), json!([]));
    assert!(bench.run("queues list").ok().out.starts_with("no queues"));
    bench.enqueue("greet --queue mail");

    let paused = bench.run("queues pause mail --json").json();
    assert_eq!(
        (&paused["name"], &paused["paused"], &paused["waiting"]),
        (&json!("mail"), &json!(true), &json!(1))
    );
    let limited = bench.run("queues limit mail 3").ok().out;
    let words: Vec<&str> = limited.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(words, ["mail", "paused", "3", "1", "0"]);
    let resumed = bench.run("queues resume mail --json").json();
    assert_eq!((&resumed["paused"], &resumed["limit"]), (&json!(false), &json!(3)));
    assert_eq!(bench.run("queues limit mail none --json").json()["limit"], json!(null));
    assert_eq!(bench.run("queues list --json").json()[0]["name"], "mail");

    bench.run("queues limit mail 0").refused(2, &["mail", "at least 1", "pause"]);
    bench.run("queues limit mail some").refused(2, &["N|none", "or none"]);
    bench.run(&format!("queues pause {}", "x".repeat(129))).refused(2, &["queue", "at most 128"]);
    bench.words(&["queues", "resume", ""]).refused(2, &["queue", "1 to 128 bytes"]);
}

fn schedules_are_put_paused_run_and_removed(bench: &Bench) {
    bench.migrated().announced(&["report"]);
    assert_eq!(bench.run("cron list --json").json(), json!([]));
    assert!(bench.run("cron list").ok().out.starts_with("no schedules"));

    let nightly =
        ["cron", "add", "nightly", "30 2 * * *", "report", "--zone", "Europe/Berlin", "--missed", "all:7"];
    let put = bench.words(&nightly).ok().out;
    assert!(put.contains("nightly") && put.contains("Europe/Berlin") && put.contains("all:7"), "{put}");
    let listed = bench.run("cron list --json").json();
    assert_eq!((&listed[0]["name"], &listed[0]["paused"]), (&json!("nightly"), &json!(false)));
    bench.words(&nightly).ok();
    assert_eq!(bench.run("cron list --json").json()[0]["next_at"], listed[0]["next_at"]);
    let shown = bench.run("cron show nightly --json").json();
    assert_eq!((&shown["cron"], &shown["job"]["kind"]), (&json!("30 2 * * *"), &json!("report")));
    assert!(bench.run("cron show nightly").ok().out.contains("Europe/Berlin"));
    bench.run("cron show daily").refused(3, &["no schedule"]);

    assert_eq!(bench.run("cron pause nightly --json").json()["paused"], json!(true));
    assert!(bench.run("cron run nightly").ok().out.starts_with("created "));
    assert_eq!(bench.run("cron resume nightly --json").json()["paused"], json!(false));
    assert_eq!(bench.run("jobs list --kind report --json").json()["jobs"].as_array().unwrap().len(), 1);
    assert_eq!(bench.run("cron remove nightly").ok().out, "removed nightly\n");

    bench.run("cron pause nightly").refused(3, &["nightly"]);
    bench.words(&["cron", "add", "x", "99 * * * *", "report"]).refused(2, &["99"]);
    bench.words(&["cron", "add", "x", "* * * * *", "report", "--zone", "Mars/Base"]).refused(2, &["zone"]);
    bench.words(&["cron", "add", "x", "* * * * *", "report", "--missed", "some"]).refused(2, &["missed"]);
}

fn dead_letters_are_listed_and_redriven(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("dead list").ok().out, "no dead letters match\n");
    let done = bench.ended(NewJob::new("greet", &()), Ending::Succeeded { result: None });
    let id = bench.failed("send_email", "mailbox full").to_string();

    let dead = bench.run("dead list --json").json();
    assert_eq!((dead["jobs"].as_array().unwrap().len(), &dead["jobs"][0]["id"]), (1, &json!(id)));
    assert!(bench.run("dead list --kind send_email").ok().out.contains("mailbox full"));
    assert_eq!(bench.run("dead list --kind greet --json").json()["jobs"], json!([]));

    assert_eq!(bench.run(&format!("dead redrive {id}")).ok().out, format!("queued {id}\n"));
    bench.run(&format!("dead redrive {id}")).refused(4, &[&id, "has not ended"]);
    bench.run(&format!("dead redrive {done}")).refused(4, &["ended as succeeded", "retry it instead"]);
    bench.run("dead redrive").refused(2, &["--kind", "--queue", "--all"]);
    bench.run(&format!("dead redrive {id} --all")).refused(2, &["--all"]);
}

fn dead_letters_are_redriven_by_filter(bench: &Bench) {
    bench.migrated();
    for kind in ["a", "a", "a", "b"] {
        bench.failed(kind, "no");
    }
    assert_eq!(
        bench.run("dead redrive --kind a --limit 2 --json").json(),
        json!({ "redriven": 2, "skipped": 0 })
    );
    assert_eq!(bench.run("dead redrive --queue elsewhere").ok().out, "redriven: 0\n");
    assert_eq!(bench.run("dead redrive --all").ok().out, "redriven: 2\n");
    assert_eq!(bench.run("dead list --json").json()["jobs"], json!([]));
}

fn counts_tell_queue_kind_and_status(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("counts").ok().out, "no jobs\n");
    bench.failed("pay", "no");
    bench.enqueue("pay");
    bench.enqueue("pay");
    bench.enqueue("greet --queue mail");
    let counts = bench.run("counts --json").json();
    let count =
        json!({ "status": "queued", "queue": "default", "kind": "pay", "jobs": 2, "estimated": false });
    assert!(counts.as_array().unwrap().contains(&count), "{counts}");
    let table = bench.run("counts").ok().out;
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][2..], ["QUEUED", "RUNNING", "SUCCEEDED", "RETRYING", "FAILED_PERMANENT", "CANCELLED"]);
    assert_eq!(rows[1], ["default", "pay", "2", "0", "0", "0", "1", "0"]);
    assert_eq!(rows[2], ["mail", "greet", "1", "0", "0", "0", "0", "0"]);
}

fn a_queue_says_that_it_is_well(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("health").ok().out, "ok\n");
    assert_eq!(bench.run("health --json").json(), json!({ "status": "ok" }));
}

fn stats_tell_what_ended_and_how_fast(bench: &Bench) {
    bench.migrated();
    let idle = bench.run("stats").ok().out;
    assert!(idle.contains("run time  p50 -, p95 -, p99 -\n"), "{idle}");
    bench.failed("pay", "no");
    bench.ended(NewJob::new("greet", &()), Ending::Succeeded { result: None });
    bench.enqueue("greet");
    let told = bench.run("stats").ok().out;
    assert!(told.contains("now       1 queued, 0 retrying, 0 running\n"), "{told}");
    assert!(
        told.contains("ended     1 succeeded, 1 failed_permanent, 0 cancelled in 60 minutes\n"),
        "{told}"
    );
    assert!(told.contains("MINUTE"), "{told}");
    let of_kind = bench.run("stats --kind pay --minutes 5").ok().out;
    assert!(of_kind.contains("0 succeeded, 1 failed_permanent, 0 cancelled in 5 minutes\n"), "{of_kind}");
    let document = bench.run("stats --queue default --json").json();
    assert!(document["per_second"].as_f64().unwrap() > 0.0, "{document}");
    assert_eq!(document["counts"].as_array().unwrap().len(), 3, "{document}");
    bench.run("stats --minutes 0").refused(2, &["--minutes", "1..=1440"]);
}

fn kinds_are_put_listed_and_removed(bench: &Bench) {
    bench.migrated();
    assert_eq!(bench.run("kinds list --json").json(), json!([]));
    assert!(bench.run("kinds list").ok().out.starts_with("no kinds"));
    let schema = r#"{"type":"object","required":["pages"]}"#;
    let put =
        bench.words(&["kinds", "put", "report", "--schema", schema, "--defaults", r#"{"queue":"slow"}"#]);
    assert!(put.ok().out.contains(r#"{"queue":"slow"}"#));
    let kept = bench.run("kinds put report --json").json();
    assert_eq!(kept["schema"]["required"], json!(["pages"]), "what is not named stays");

    bench.run("enqueue report").refused(2, &["payload", "pages"]);
    let id =
        bench.words(&["enqueue", "report", "--payload", r#"{"pages":3}"#, "--json"]).json()["job_id"].clone();
    let job = bench.run(&format!("jobs show {} --json", id.as_str().unwrap())).json();
    assert_eq!(job["queue"], "slow", "the kind's default, as nothing else was said");

    bench.run("kinds put report --schema {oops").refused(2, &["schema", "not JSON"]);
    bench.words(&["kinds", "put", "report", "--schema", r#"{"type":7}"#]).refused(2, &["schema"]);
    bench
        .words(&["kinds", "put", "report", "--defaults", r#"{"colour":1}"#])
        .refused(2, &["defaults", "colour"]);
    assert_eq!(bench.run("kinds remove report").ok().out, "removed report\n");
    bench.run("kinds remove report").refused(3, &["nobody has announced"]);
}
