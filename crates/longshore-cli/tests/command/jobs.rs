//! `longshore jobs`: list, show, explain, cancel, retry, delete and edit.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::mpsc;

use longshore::{Ending, NewJob};
use serde_json::{Value, json};

use crate::fixture::{CommandOutput, Fixture, UNKNOWN_ID, binary, on_every_target};
use crate::process::Process;

on_every_target!(
    lists_filter_and_page_to_the_end,
    a_list_is_a_table_with_the_command_for_the_next_page,
    an_unknown_id_is_not_found,
    jobs_are_named_by_their_whole_ids,
    a_mistyped_kind_or_queue_in_a_filter_is_pointed_out,
    a_waiting_job_is_cancelled_once,
    cancelling_a_running_job_is_pending,
    each_of_several_ids_is_tried,
    a_finished_job_can_be_retried_and_a_running_one_cannot,
    only_a_finished_job_can_be_deleted,
    a_waiting_job_can_be_edited_and_a_running_one_cannot,
    show_includes_the_history,
    explain_gives_the_reason_and_the_remedy,
);

fn ids(document: &Value) -> Vec<String> {
    document["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect()
}

/// A server that sends these pages, one per connection, and does not respond to further
/// requests. A page is a list of jobs and the parameters of the next page. Returns the URL of
/// the server, and a channel with the URLs that were requested.
pub(crate) fn serve_pages(
    pages: &'static [(&'static str, &'static str)],
) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, requested) = mpsc::channel();
    std::thread::spawn(move || {
        let mut pages = pages.iter();
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept() {
            let mut head =
                BufReader::new(&stream).lines().map(Result::unwrap).take_while(|line| !line.is_empty());
            let first = head.next().unwrap_or_default();
            head.for_each(drop);
            let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
            if let Some((jobs, next)) = pages.next() {
                let link =
                    if next.is_empty() { "" } else { &format!("link: </jobs?{next}>; rel=\"next\"\r\n") };
                let response = format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{link}content-length: {}\r\n\
                     connection: close\r\n\r\n{jobs}",
                    jobs.len()
                );
                stream.write_all(response.as_bytes()).unwrap();
            } else {
                open.push(stream);
            }
            let _ = sender.send(path);
        }
    });
    (url, requested)
}

const FIRST_CURSOR: &str = "cursor=01990000-0000-7000-8000-00000000000a";
const SECOND_CURSOR: &str = "limit=2&cursor=01990000-0000-7000-8000-00000000000b&offset=1";
const THIRD_CURSOR: &str = "cursor=01990000-0000-7000-8000-00000000000c";

#[test]
fn a_list_follows_short_pages_until_it_is_full() {
    for command in ["jobs", "dead"] {
        let (url, requested) = serve_pages(&[
            ("[]", FIRST_CURSOR),
            ("[{\"id\":\"x\"}]", SECOND_CURSOR),
            ("[{\"id\": \"y\"}]", THIRD_CURSOR),
        ]);
        let line = [command, "list", "--queue", "rare", "--limit", "2", "--offset", "3", "--json"];
        let output = binary().env("LONGSHORE_SERVER", url).args(line).output().unwrap();
        let page = CommandOutput::of(output).json();
        assert_eq!(ids(&page), ["x", "y"]);
        assert_eq!(page["next"], "01990000-0000-7000-8000-00000000000c");
        let requested: Vec<String> = requested.try_iter().collect();
        assert_eq!(requested.len(), 3, "{requested:?}");
        assert!(requested[0].contains("limit=2&offset=3"), "{requested:?}");
        assert!(requested[1].contains("limit=2") && requested[1].ends_with("00a"), "{requested:?}");
        assert!(requested[2].contains("limit=1&offset=1") && requested[2].ends_with("00b"), "{requested:?}");
        assert!(requested.iter().all(|url| url.contains("queue=rare")), "{requested:?}");
    }
}

#[test]
fn a_list_that_is_interrupted_shows_the_jobs_found_so_far() {
    let (url, requested) = serve_pages(&[("[{\"id\":\"x\"}]", FIRST_CURSOR)]);
    let mut command = binary();
    let mut list = Process::start(command.env("LONGSHORE_SERVER", url).args(["jobs", "list", "--json"]));
    for _ in 0..2 {
        requested.recv().unwrap();
    }
    list.signal("INT");
    let (code, out, err) = list.ended();
    assert_eq!((code, err.as_str()), (Some(0), ""), "{out}");
    let page: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (ids(&page), &page["next"]),
        (vec!["x".to_owned()], &json!("01990000-0000-7000-8000-00000000000a"))
    );
}

fn lists_filter_and_page_to_the_end(fixture: &Fixture) {
    fixture.migrated();
    let mut all: Vec<String> =
        (0..5).map(|i| fixture.enqueue(&format!("greet --tag t{i} --queue q{}", i % 2))).collect();
    all.reverse();
    assert_eq!(ids(&fixture.run("jobs list --json").json()), all, "newest first");

    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = fixture.run(&format!("jobs list --limit 2 --json {cursor}")).json();
        seen.extend(ids(&page));
        match page["next"].as_str() {
            Some(next) => cursor = format!("--cursor {next}"),
            None => break,
        }
    }
    assert_eq!(seen, all);

    assert_eq!(ids(&fixture.run("jobs list --offset 3 --json").json()), all[3..]);
    assert_eq!(ids(&fixture.run("jobs list --tag t1 --json").json()), [all[3].clone()]);
    assert_eq!(ids(&fixture.run("jobs list --queue q0 --json").json()).len(), 3);
    assert_eq!(ids(&fixture.run("jobs list --kind greet --status queued --json").json()).len(), 5);
    assert_eq!(fixture.run("jobs list --kind nobody --json").json(), json!({ "jobs": [], "next": null }));
    assert_eq!(fixture.run("jobs list --status running").ok().out, "no jobs match\n");
    fixture.run("jobs list --offset 10001").fails_with(2, &["offset", "--cursor"]);
    fixture.run("jobs list --status done").fails_with(2, &["--status", "failed_permanent"]);
    fixture.run("jobs list --cursor 7").fails_with(2, &["--cursor", "UUID"]);
    fixture.run("jobs list --limit -1").fails_with(2, &["--limit"]);
}

fn a_list_is_a_table_with_the_command_for_the_next_page(fixture: &Fixture) {
    fixture.migrated();
    fixture.enqueue("greet");
    let id = fixture.enqueue("greet --priority 4");
    let page = fixture.run("jobs list --kind greet --limit 1");
    assert_eq!(page.code, 0);
    let lines: Vec<&str> = page.out.lines().collect();
    assert_eq!(lines.len(), 2, "{page:?}");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let titles = ["ID", "STATUS", "KIND", "AGE", "LAST", "ERROR", "ATTEMPTS", "QUEUE", "DUE", "PRIORITY"];
    assert_eq!(words(lines[0]), titles);
    let row = words(lines[1]);
    assert_eq!(row[..3], [id.as_str(), "queued", "greet"], "without a terminal, ids are whole");
    assert!(row[3].ends_with('s'), "an age: {row:?}");
    assert_eq!(row[4..7], ["-", "0/3", "default"]);
    assert_eq!((row[8].as_str(), row[9].as_str()), ("ago", "4"));
    assert_eq!(page.err, format!("next page: longshore jobs list --kind greet --limit 1 --cursor {id}\n"));
    let exact = fixture.run("jobs list --kind greet --utc").ok().out;
    let created = words(exact.lines().nth(1).unwrap()).remove(3);
    assert!(created.ends_with('Z') && created.contains('T'), "{exact}");
}

fn jobs_are_named_by_their_whole_ids(fixture: &Fixture) {
    fixture.migrated();
    let ids = [fixture.enqueue("greet"), fixture.enqueue("greet")];
    let part = &ids[0][..35];
    for line in ["jobs show", "jobs explain", "jobs steps", "jobs cancel", "jobs retry", "dead redrive"] {
        let given =
            if line.ends_with("show") { part.to_owned() } else { format!("{}..{}", &part[..8], &part[29..]) };
        fixture.run(&format!("{line} {given}")).fails_with(2, &[&given, "longshore jobs list"]);
    }
    let cancelled = fixture.run(&format!("jobs cancel {} {} --json", ids[0], ids[1])).json();
    assert_eq!(
        cancelled,
        json!([{ "job_id": ids[0], "status": "cancelled" }, { "job_id": ids[1], "status": "cancelled" }])
    );
    let missing = fixture.run(&format!("jobs delete {UNKNOWN_ID} --json"));
    assert_eq!((missing.code, &missing.document()[0]["job_id"]), (3, &json!(UNKNOWN_ID)));
}

fn a_mistyped_kind_or_queue_in_a_filter_is_pointed_out(fixture: &Fixture) {
    fixture.migrated().with_kinds(&["greet"]);
    fixture.enqueue("greet --queue mail");
    let listed = fixture.run("jobs list --kind gret --queue mial");
    assert_eq!((listed.code, listed.out.as_str()), (0, "no jobs match\n"));
    assert!(listed.err.contains("no kind `gret` is known; did you mean `greet`?"), "{listed:?}");
    assert!(listed.err.contains("no queue `mial` is known; did you mean `mail`?"), "{listed:?}");
    let dead = fixture.run("dead list --kind grete");
    assert!(dead.err.contains("did you mean `greet`?"), "{dead:?}");
    fixture.run("jobs list --kind greet --queue default").ok();

    // The default queue and the queues and kinds of finished jobs are known.
    let finished = fixture.enqueue("sweep_floor --queue night");
    fixture.run(&format!("jobs cancel {finished}")).ok();
    for (line, expected) in [
        ("jobs list --queue defualt", "no queue `defualt` is known; did you mean `default`?\n"),
        ("dead list --queue defualt", "no queue `defualt` is known; did you mean `default`?\n"),
        ("jobs list --queue nihgt", "no queue `nihgt` is known; did you mean `night`?\n"),
        ("jobs list --kind sweep_flor", "no kind `sweep_flor` is known; did you mean `sweep_floor`?\n"),
    ] {
        assert!(fixture.run(line).err.ends_with(expected), "{line}");
        fixture.run(&format!("{line} --json")).ok();
    }
    fixture.run("jobs list --status queued --kind sweep_floor --queue night").ok();
}

fn an_unknown_id_is_not_found(fixture: &Fixture) {
    fixture.migrated();
    let edit = format!("jobs edit {UNKNOWN_ID} --priority 1");
    let redrive = format!("dead redrive {UNKNOWN_ID}");
    fixture.run(&edit).fails_with(3, &[UNKNOWN_ID, "does not exist"]);
    fixture.run(&redrive).fails_with(3, &[UNKNOWN_ID, "does not exist"]);
    for verb in ["show", "explain", "cancel", "retry", "delete"] {
        fixture.run(&format!("jobs {verb} {UNKNOWN_ID}")).fails_with(3, &[UNKNOWN_ID, "does not exist"]);
        fixture.run(&format!("jobs {verb} 7")).fails_with(2, &["ID", "ids are UUIDs"]);
        fixture.run(&format!("jobs {verb}")).fails_with(2, &["<ID"]);
    }
}

fn a_waiting_job_is_cancelled_once(fixture: &Fixture) {
    fixture.migrated();
    let id = fixture.enqueue("greet");
    assert_eq!(fixture.run(&format!("jobs cancel {id}")).ok().out, format!("cancelled {id}\n"));
    fixture.run(&format!("jobs cancel {id}")).fails_with(4, &[&id, "already ended as cancelled", "retry"]);
}

fn cancelling_a_running_job_is_pending(fixture: &Fixture) {
    fixture.migrated();
    let id = fixture.enqueue("greet");
    fixture.claim(1);
    let output = fixture.run(&format!("jobs cancel {id} --json")).json();
    assert_eq!(output, json!([{ "job_id": id, "status": "pending" }]));
    let job = fixture.run(&format!("jobs show {id} --json")).json();
    assert_eq!((&job["status"], &job["cancel_requested"]), (&json!("running"), &json!(true)));
    assert!(fixture.run(&format!("jobs show {id}")).ok().out.contains("cancel requested yes\n"));
}

fn each_of_several_ids_is_tried(fixture: &Fixture) {
    fixture.migrated();
    let (first, second) = (fixture.enqueue("greet"), fixture.enqueue("greet"));
    let output = fixture.run(&format!("jobs cancel {first} {UNKNOWN_ID} {second} {first} --json"));
    assert_eq!(output.code, 3, "the first failure sets the code: {output:?}");
    let document = output.document();
    assert_eq!(document[0], json!({ "job_id": first, "status": "cancelled" }));
    assert_eq!((&document[1]["job_id"], &document[1]["error"]), (&json!(UNKNOWN_ID), &json!("not_found")));
    assert_eq!(document[2], json!({ "job_id": second, "status": "cancelled" }));
    assert_eq!(document[3]["error"], "conflict");
    assert_eq!(output.err.lines().count(), 2, "{output:?}");
}

fn a_finished_job_can_be_retried_and_a_running_one_cannot(fixture: &Fixture) {
    fixture.migrated();
    let id = fixture.finished_job(NewJob::new("greet", &()), Ending::Succeeded { result: None }).to_string();
    assert_eq!(fixture.run(&format!("jobs retry {id}")).ok().out, format!("queued {id}\n"));
    let job = fixture.run(&format!("jobs show {id} --json")).json();
    assert_eq!((&job["status"], &job["attempts"]), (&json!("queued"), &json!(0)));
    fixture.claim(1);
    fixture.run(&format!("jobs retry {id}")).fails_with(4, &[&id, "is running", "cancel it first"]);
}

fn only_a_finished_job_can_be_deleted(fixture: &Fixture) {
    fixture.migrated();
    let id = fixture.enqueue("greet");
    fixture.run(&format!("jobs delete {id}")).fails_with(4, &[&id, "cancel it first"]);
    fixture.run(&format!("jobs cancel {id}")).ok();
    let output = fixture.run(&format!("jobs delete {id} --json")).json();
    assert_eq!(output, json!([{ "job_id": id, "status": "deleted" }]));
    fixture.run(&format!("jobs show {id}")).fails_with(3, &[&id]);
}

fn a_waiting_job_can_be_edited_and_a_running_one_cannot(fixture: &Fixture) {
    fixture.migrated();
    let id = fixture.enqueue("greet --delay 1h");
    let edited = fixture
        .run_args(&["jobs", "edit", &id, "--priority=-3", "--payload", r#"{"n": 2}"#, "--json"])
        .json();
    assert_eq!((&edited["priority"], &edited["payload"]), (&json!(-3), &json!({ "n": 2 })));
    let edited = fixture.run(&format!("jobs edit {id} --run-at 2001-02-03T04:05:06Z")).ok().out;
    assert!(edited.contains("run at           2001-02-03T04:05:06Z\n"), "{edited}");
    assert!(edited.contains("priority         -3\n"), "fields that are not given stay unchanged: {edited}");

    fixture.run(&format!("jobs edit {id}")).fails_with(2, &["--priority", "--payload"]);
    fixture.run(&format!("jobs edit {id} --priority 99999")).fails_with(2, &["priority", "-32768 to 32767"]);
    fixture
        .run(&format!("jobs edit {id} --payload {{oops"))
        .fails_with(2, &["payload", "give any JSON value"]);
    fixture.claim(1);
    fixture.run(&format!("jobs edit {id} --priority 1")).fails_with(4, &[&id, "is running"]);
}

fn show_includes_the_history(fixture: &Fixture) {
    let id = fixture.migrated().failed_job("greet", "the crane is stuck");
    let job = fixture.run(&format!("jobs show {id} --json")).json();
    assert_eq!(
        (&job["status"], &job["last_error"]),
        (&json!("failed_permanent"), &json!("the crane is stuck"))
    );
    assert_eq!(job["errors"][0]["what"], "failed");
    let shown = fixture.run(&format!("jobs show {id}")).ok().out;
    assert!(shown.contains("attempts         1 of 3\n"), "{shown}");
    let history = shown.lines().last().unwrap();
    assert!(history.starts_with("1        failed  ") && history.contains("the crane is stuck"), "{shown}");
}

fn explain_gives_the_reason_and_the_remedy(fixture: &Fixture) {
    fixture.migrated();
    let later = fixture.enqueue("greet --run-at 2100-01-31T09:00:00Z");
    let explained = fixture.run(&format!("jobs explain {later}")).ok().out;
    for line in [
        "status     queued\n",
        "reason     no_worker_for_queue\n",
        "; and it is not due before 2100-01-31 09:00:00 UTC\n",
        "due        in ",
    ] {
        assert!(explained.contains(line), "{line}: {explained}");
    }
    assert!(!explained.contains("starts in"), "no worker can run it: {explained}");
    let now = fixture.enqueue("greet --queue lonely");
    let explained = fixture.run(&format!("jobs explain {now}")).ok().out;
    assert!(
        explained.contains("no_worker_for_queue")
            && explained.contains("start one with `longshore worker --queues lonely`"),
        "{explained}"
    );
    assert!(explained.contains("ahead      0 jobs\n"), "{explained}");
    let document = fixture.run(&format!("jobs explain {now} --json")).json();
    assert_eq!((&document["job_id"], &document["reason"]), (&json!(now), &json!("no_worker_for_queue")));
    assert_eq!((&document["ahead"], &document["due_at"]), (&json!(0), &Value::Null));
}
