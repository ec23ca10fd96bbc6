//! `longshore enqueue` and `longshore enqueue-many`.

use serde_json::{Value, json};

use crate::fixture::{CommandOutput, Fixture, binary, on_every_target};

on_every_target!(
    every_option_is_stored,
    a_job_needs_only_a_kind,
    payloads_come_from_the_command_line_a_file_or_standard_input,
    an_existing_key_is_reported,
    errors_name_the_field_and_the_remedy,
    payloads_of_built_in_kinds_are_checked,
    enqueue_many_reads_json_lines,
    invalid_lines_are_reported_and_the_others_are_stored,
);

fn every_option_is_stored(fixture: &Fixture) {
    let output = fixture.migrated().run_args(&[
        "enqueue",
        "send_email",
        "--payload",
        r#"{"to": "ada@example.com", "subject": "Hi", "body": "…"}"#,
        "--queue=mail",
        "--priority=-5",
        "--max-attempts=7",
        "--run-at=2030-01-31T10:00:00+01:00",
        "--idempotency-key=invoice 7",
        "--unique-key=ada",
        "--unique-mode=replace",
        "--timeout=90s",
        "--retry=list:1s,5s",
        "--tag=nightly",
        "--tag=blue",
        "--flag=infrastructure_resilient",
        "--context=because",
        "--metadata=[1]",
        "--json",
    ]);
    let enqueued = output.json();
    assert_eq!(enqueued["how"], "created");
    let job = fixture.run(&format!("jobs show {} --json", enqueued["job_id"].as_str().unwrap())).json();
    let expected = json!({
        "id": enqueued["job_id"],
        "kind": "send_email",
        "queue": "mail",
        "status": "queued",
        "priority": -5,
        "attempts": 0,
        "max_attempts": 7,
        "payload": { "to": "ada@example.com", "subject": "Hi", "body": "…" },
        "run_at": "2030-01-31T09:00:00Z",
        "idempotency_key": "invoice 7",
        "unique_key": "ada",
        "tags": ["nightly", "blue"],
        "flags": ["infrastructure_resilient"],
        "context": "because",
        "metadata": [1],
        "timeout_seconds": 90.0,
        "retry": { "policy": "list", "delays_ms": [1000, 5000] },
        "errors": [],
    });
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&job[field], value, "{field}");
    }
}

fn a_job_needs_only_a_kind(fixture: &Fixture) {
    let output = fixture.migrated().with_kinds(&["greet"]).run("enqueue greet").ok().out;
    let id = output.strip_prefix("created ").unwrap().trim_end();
    let job = fixture.run(&format!("jobs show {id} --json")).json();
    let defaults = [
        ("queue", json!("default")),
        ("priority", json!(0)),
        ("max_attempts", json!(3)),
        ("payload", json!({})),
        ("timeout_seconds", json!(7200.0)),
        ("retry", Value::Null),
    ];
    for (field, value) in defaults {
        assert_eq!(job[field], value, "{field}");
    }
    let forever = fixture.enqueue("greet --timeout none --retry none --delay 1h");
    let job = fixture.run(&format!("jobs show {forever} --json")).json();
    assert_eq!((&job["timeout_seconds"], &job["retry"]), (&Value::Null, &json!({ "policy": "none" })));
    assert!(job["run_at"].as_str() > job["created_at"].as_str(), "{job}");
}

fn payloads_come_from_the_command_line_a_file_or_standard_input(fixture: &Fixture) {
    fixture.migrated().with_kinds(&["a"]);
    // Text that would change if it were parsed and written again.
    let payload = r#"{"z": 1.00, "a": 123456789012345678901234567890}"#;
    let file = std::env::temp_dir().join(format!("longshore-cli-{}.json", longshore::JobId::new()));
    std::fs::write(&file, format!("{payload}\n")).unwrap();
    let from_file = fixture.run_args(&["enqueue", "a", "--payload", &format!("@{}", file.display())]).ok();
    std::fs::remove_file(&file).unwrap();
    let from_line = fixture.run_args(&["enqueue", "a", "--payload", payload]).ok();
    let from_input =
        fixture.run_with_input("enqueue a --payload -", format!("\n {payload} \n").as_bytes()).ok();
    for output in [from_file, from_line, from_input] {
        let id = output.out.trim_start_matches("created ").trim_end().to_owned();
        let shown = fixture.run(&format!("jobs show {id}")).ok().out;
        assert!(shown.contains(&format!("payload          {payload}\n")), "{shown}");
        assert!(fixture.run(&format!("jobs show {id} --json")).ok().out.contains(payload));
    }
    fixture
        .run_args(&["enqueue", "a", "--payload", "@/no/such/file"])
        .fails_with(2, &["payload", "/no/such/file", "@FILE"]);
    fixture.run_with_input("enqueue a --payload -", b"{oops").fails_with(2, &["payload", "not JSON"]);
    fixture.run_with_input("enqueue a --payload -", b"\xff").fails_with(2, &["payload", "standard input"]);
    fixture.run_with_input("enqueue a --payload -", &[b' '; 3 << 20]).fails_with(2, &["payload", "1048576"]);
}

fn an_existing_key_is_reported(fixture: &Fixture) {
    fixture.migrated().with_kinds(&["pay", "refund", "index"]);
    let first = fixture.run("enqueue pay --idempotency-key invoice-7").ok().out;
    let second = fixture.run("enqueue refund --idempotency-key invoice-7").ok().out;
    assert_eq!(second, first.replace("created", "existing"));

    let first = fixture.run("enqueue index --unique-key doc-7 --priority 1").ok().out;
    let id = first.trim_start_matches("created ").trim_end();
    let second = fixture.run("enqueue index --unique-key doc-7 --unique-mode replace --priority 2").ok().out;
    assert_eq!(second, format!("replaced {id}\n"));
    assert_eq!(fixture.run(&format!("jobs show {id} --json")).json()["priority"], 2);
    let third = fixture.run("enqueue index --unique-key doc-7 --json").json();
    assert_eq!(third, json!({ "job_id": id, "how": "existing" }));
}

fn errors_name_the_field_and_the_remedy(fixture: &Fixture) {
    let long = "x".repeat(129);
    fixture.migrated();
    let cases: &[(&[&str], &[&str])] = &[
        (&["enqueue", ""], &["kind", "1 to 128 bytes"]),
        (&["enqueue", &long], &["kind", "at most 128"]),
        (&["enqueue", "a", "--queue", ""], &["queue", "1 to 128 bytes"]),
        (&["enqueue", "a", "--payload", "{oops"], &["payload", "give any JSON value"]),
        (&["enqueue", "a", "--payload", ""], &["payload", "give any JSON value"]),
        (&["enqueue", "a", "--priority", "40000"], &["priority", "-32768 to 32767"]),
        (&["enqueue", "a", "--priority", "high"], &["--priority"]),
        (&["enqueue", "a", "--max-attempts", "0"], &["max_attempts", "use 1 to"]),
        (&["enqueue", "a", "--max-attempts", "-1"], &["max_attempts", "use 1 to"]),
        (&["enqueue", "a", "--delay", "5"], &["--delay", "like 500ms"]),
        (&["enqueue", "a", "--delay", "4000d"], &["delay", "at most ten years"]),
        (&["enqueue", "a", "--run-at", "noon"], &["--run-at", "RFC 3339"]),
        (&["enqueue", "a", "--idempotency-key", ""], &["idempotency_key", "1 to 512 bytes"]),
        (&["enqueue", "a", "--unique-key", ""], &["unique_key", "1 to 512 bytes"]),
        (&["enqueue", "a", "--unique-mode", "replace"], &["--unique-key"]),
        (&["enqueue", "a", "--timeout", "0s"], &["timeout", "or none"]),
        (&["enqueue", "a", "--retry", "sometimes"], &["--retry", "exponential"]),
        (&["enqueue", "a", "--tag", ""], &["tags", "1 to 128 bytes"]),
        (&["enqueue", "a", "--flag", &long], &["flags", "at most 128"]),
        (&["enqueue", "a", "--metadata", "{"], &["metadata", "give any JSON value"]),
        (&["enqueue"], &["<KIND>"]),
        (&["enqueue", "a", "--colour", "red"], &["--colour"]),
    ];
    for (args, expected) in cases {
        let output = fixture.run_args(args).fails_with(2, expected);
        assert_eq!(output.out, "", "{args:?}");
    }
    assert_eq!(fixture.run("jobs list --json").json()["jobs"], json!([]), "nothing was stored");
}

fn payloads_of_built_in_kinds_are_checked(fixture: &Fixture) {
    fixture.migrated();
    fixture.run("enqueue send_email").fails_with(2, &["payload: does not match kind `send_email`", "`to`"]);
    let wrong = r#"{"to":"ada","subject":"Hi","body":""}"#;
    fixture.run_args(&["enqueue", "send_email", "--payload", wrong]).fails_with(2, &["payload: to: "]);
    fixture.run_args(&["cron", "add", "x", "* * * * *", "send_email"]).fails_with(2, &["send_email"]);
    assert_eq!(fixture.run("jobs list --json").json()["jobs"], json!([]), "nothing was stored");
}

fn enqueue_many_reads_json_lines(fixture: &Fixture) {
    fixture.migrated();
    // More than one request holds.
    let lines: String = (0..1001).map(|i| format!("{{\"kind\":\"greet\",\"payload\":{i}.00}}\n")).collect();
    let output = fixture.run_with_input("enqueue-many - --json", lines.as_bytes()).json();
    assert_eq!(output, json!({ "created": 1001, "existing": 0, "refused": 0 }));
    let newest = fixture.run("jobs list --limit 1 --json").ok().out;
    assert!(newest.contains(".00"), "payloads are unchanged: {newest}");
    assert_eq!(fixture.run("counts --json").json()[0]["jobs"], 1001);

    let file = std::env::temp_dir().join(format!("longshore-many-{}.ndjson", longshore::JobId::new()));
    std::fs::write(&file, "\n{\"kind\":\"pay\",\"payload\":1,\"idempotency_key\":\"k\"}\n".repeat(2))
        .unwrap();
    let output = fixture.run_args(&["enqueue-many", file.to_str().unwrap()]).ok().out;
    std::fs::remove_file(&file).unwrap();
    assert_eq!(output, "created: 1, existing: 1, refused: 0\n");
    fixture.run("enqueue-many /no/such/file").fails_with(2, &["/no/such/file", "JSON lines"]);
    assert_eq!(
        fixture.run_with_input("enqueue-many -", b"").ok().out,
        "created: 0, existing: 0, refused: 0\n"
    );
}

fn invalid_lines_are_reported_and_the_others_are_stored(fixture: &Fixture) {
    fixture.migrated();
    let lines = [
        r#"{"kind":"greet","payload":1}"#,
        "{oops",
        "",
        r#"{"kind":"greet","payload":1,"priority":99999}"#,
        r#"{"kind":"send_email","payload":{}}"#,
        r#"{"kind":"greet","payload":2}"#,
    ];
    let output = fixture.run_with_input("enqueue-many - --json", lines.join("\n").as_bytes());
    let output = output.fails_with(2, &["line 2: not JSON", "line 4: priority", "line 5: payload"]);
    assert_eq!(output.document(), json!({ "created": 2, "existing": 0, "refused": 3 }));
    assert_eq!(output.err.lines().count(), 3, "{output:?}");
}

#[test]
fn without_a_database_the_error_shows_both_forms_of_url() {
    for url in [None, Some("")] {
        let mut command = binary();
        command.arg("check").envs(url.map(|url| ("DATABASE_URL", url)));
        crate::fixture::CommandOutput::of(command.output().unwrap())
            .fails_with(2, &["DATABASE_URL", "--database-url", "postgres://", "sqlite:./jobs.db"]);
    }
}

#[test]
fn an_invalid_database_url_is_rejected_without_quoting_it() {
    for url in ["mysql://ada:s3cret@db/jobs", "s3cret", "postgres://ada:s3cret@db:port/jobs", "sqlite:"] {
        let output = binary().args(["--database-url", url, "check"]).output().unwrap();
        let output = crate::fixture::CommandOutput::of(output).fails_with(2, &["database URL"]);
        assert!(!output.err.contains("s3cret"), "{output:?}");
    }
}

#[test]
fn an_unregistered_kind_is_accepted_with_a_warning_on_a_database_and_rejected_by_a_server() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let warning = "warning: kind `gret` is not registered";
    let add = ["cron", "add", "nightly", "30 2 * * *", "gret"];
    for line in [["enqueue", "gret"].as_slice(), &add] {
        let accepted = fixture.run_args(line);
        assert_eq!(accepted.code, 0, "{accepted:?}");
        assert!(accepted.err.starts_with(warning) && accepted.err.contains("kinds list"), "{accepted:?}");
        assert!(!accepted.err.contains("did you mean"), "{accepted:?}");
        fixture.run_args(&[line, &["--json"]].concat()).ok();
        let (_server, url) = fixture.serve("");
        let args = [line, &["--server", &url]].concat();
        CommandOutput::of(binary().args(args).output().unwrap()).fails_with(2, &["kind", "gret"]);
    }
    let mistyped = fixture.run("enqueue sned_email");
    assert!(mistyped.err.contains("(did you mean `send_email`?)"), "{mistyped:?}");
    // Registered and built-in kinds cause no warning.
    fixture.with_kinds(&["gret"]).run("enqueue gret").ok();
    fixture.run_args(&["enqueue", "summarize_text", "--payload", "{\"text\":\"Ships come.\"}"]).ok();
}

#[test]
fn a_new_queue_with_a_similar_name_to_a_known_one_is_pointed_out() {
    let fixture = Fixture::sqlite();
    fixture.migrated().with_kinds(&["greet"]).enqueue("greet --queue mail");
    let mistyped = fixture.run("enqueue greet --queue mial");
    assert_eq!(mistyped.code, 0, "{mistyped:?}");
    assert!(
        mistyped.err.starts_with("warning: queue `mial`") && mistyped.err.contains("`mail`"),
        "{mistyped:?}"
    );
    fixture.run("enqueue greet --queue reports").ok();
    fixture.run("enqueue greet --queue mail").ok();
    fixture.run("enqueue greet --queue mial").ok();

    // A queue whose jobs have finished is not new.
    let finished = fixture.enqueue("greet --queue maul");
    fixture.run(&format!("jobs cancel {finished}")).ok();
    fixture.run("enqueue greet --queue maul").ok();
    // The default queue is always known.
    let mistyped = fixture.run("enqueue greet --queue defualt");
    assert!(mistyped.err.contains("did you mean `default`?"), "{mistyped:?}");
    fixture.run("enqueue greet --queue default").ok();
}
