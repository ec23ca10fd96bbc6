//! The target of a command: which one is chosen, and the errors when a server is unreachable
//! or requires a token.

use std::io::{Read, Write};
use std::net::TcpListener;

use crate::fixture::{CommandOutput, Fixture, UNKNOWN_ID, binary};

/// An address where nothing listens.
const NOWHERE: &str = "http://127.0.0.1:1";

fn run(variables: &[(&str, &str)], line: &str) -> CommandOutput {
    let mut command = binary();
    command.envs(variables.iter().copied()).args(line.split_whitespace());
    CommandOutput::of(command.output().unwrap())
}

#[test]
fn a_target_flag_beats_the_variable_of_the_other_target() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let (_server, url) = fixture.serve("");
    let both = [("DATABASE_URL", "sqlite:/no/such.db"), ("LONGSHORE_SERVER", NOWHERE)];
    let note = format!("using the server {NOWHERE} (LONGSHORE_SERVER), not DATABASE_URL");
    let neither = run(&both, "queues list");
    assert_eq!(neither.code, 5, "{neither:?}");
    assert!(neither.err.starts_with(&note) && neither.err.contains("--database-url"), "{neither:?}");
    run(&both, &format!("queues list --server {url}")).ok();
    run(&both, &format!("queues list --database-url {}", fixture.url)).ok();
    run(&[], &format!("--server {url} queues list --database-url {}", fixture.url))
        .fails_with(2, &["--server and --database-url", "only one"]);
    run(&[], "queues list").fails_with(2, &["LONGSHORE_SERVER", "DATABASE_URL", "sqlite:./jobs.db"]);
}

#[test]
fn commands_that_need_the_database_reject_a_server() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    for line in ["migrate", "worker --drain", "serve", "check", "tokens list"] {
        let command = line.split(' ').next().unwrap();
        let expected =
            [format!("`longshore {command}` works on the database itself"), "--database-url".into()];
        let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
        run(&[("DATABASE_URL", &fixture.url)], &format!("{line} --server {NOWHERE}"))
            .fails_with(2, &expected);
        run(&[("LONGSHORE_SERVER", NOWHERE)], line).fails_with(2, &expected[1..]);
    }
    // These commands can use only one of the two variables, so both may be set.
    run(&[("DATABASE_URL", &fixture.url), ("LONGSHORE_SERVER", NOWHERE)], "check").ok();
}

#[test]
fn a_response_without_an_end_is_an_error() {
    for status in ["200 OK", "500 Internal Server Error"] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let sending = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            stream.write_all(format!("HTTP/1.1 {status}\r\n\r\n[").as_bytes()).unwrap();
            // Ends at 128 MiB, so that a command that reads everything fails instead of filling the memory.
            let part = vec![b' '; 64 * 1024];
            let _ = (0..2048).try_for_each(|_| stream.write_all(&part));
        });
        let listed = run(&[("LONGSHORE_SERVER", &url)], "jobs list");
        listed.fails_with(1, &["larger than 64 MiB", &url, "--server"]);
        sending.join().unwrap();
    }
}

#[test]
fn an_unreachable_server_is_unavailable() {
    let listed = run(&[("LONGSHORE_SERVER", NOWHERE)], "jobs list");
    listed.fails_with(5, &[NOWHERE, "does not respond", "longshore serve"]);
    run(&[("LONGSHORE_SERVER", NOWHERE)], "health").fails_with(5, &[NOWHERE]);
    let several = run(&[("LONGSHORE_SERVER", NOWHERE)], &format!("jobs cancel {UNKNOWN_ID} {UNKNOWN_ID}"));
    assert_eq!((several.code, several.err.lines().count()), (5, 1), "tried only once: {several:?}");
}

#[test]
fn a_server_that_is_not_longshore_is_detected() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let responses = std::thread::spawn(move || {
        for response in [
            "HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\nconnection: close\r\n\r\n<htm>",
            "HTTP/1.1 302 Found\r\nlocation: http://elsewhere.example/\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}",
        ] {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            stream.write_all(response.as_bytes()).unwrap();
        }
    });
    let list = || run(&[("LONGSHORE_SERVER", &url)], "queues list");
    list().fails_with(1, &["404", "--server"]);
    list().fails_with(2, &["http://elsewhere.example/", "--server"]);
    list().fails_with(1, &["cannot understand the server's response", "version"]);
    responses.join().unwrap();
}

#[test]
fn a_missing_or_insufficient_token_is_an_error_with_a_remedy() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let (_server, url) = fixture.serve("--auth tokens");
    let token = |scopes: &str| {
        let created = fixture.run(&format!("tokens create ci --scope {scopes} --json")).json();
        created["token"].as_str().unwrap().to_owned()
    };
    let (reader, operator) = (token("read"), token("read,operate"));
    let with = |token: &str, line: &str| {
        let output = run(&[("LONGSHORE_SERVER", &url), ("LONGSHORE_TOKEN", token)], line);
        assert!(token.is_empty() || !format!("{output:?}").contains(token), "{output:?}");
        output
    };
    let remedies = ["LONGSHORE_TOKEN", "--token-file", "longshore tokens create"];
    with("", "queues list").fails_with(7, &remedies);
    with("longshore_guessed", "queues list").fails_with(7, &["unknown, expired or revoked"]);
    with("two words", "queues list").fails_with(2, &["LONGSHORE_TOKEN", "one line"]);
    with(&reader, "queues list").ok();
    with(&reader, "queues pause mail").fails_with(7, &["`operate`", "longshore tokens list"]);
    with(&operator, "queues pause mail --json").ok();

    let file = std::env::temp_dir().join(format!("longshore-token-{}", longshore::JobId::new()));
    std::fs::write(&file, format!("{operator}\n")).unwrap();
    let with_file = format!("queues resume mail --token-file {}", file.display());
    with(&reader, &with_file).ok();
    std::fs::remove_file(&file).unwrap();
    with(&reader, &with_file).fails_with(2, &["--token-file", "LONGSHORE_TOKEN"]);
}

#[test]
fn a_server_url_that_contains_a_secret_is_rejected_without_quoting_it() {
    for url in ["http://ada:s3cret@127.0.0.1:1", "s3cret", "http://127.0.0.1:1/?token=s3cret"] {
        let output =
            run(&[("LONGSHORE_SERVER", url)], "queues list").fails_with(2, &["--server", "http://127.0.0.1"]);
        assert!(!output.err.contains("s3cret"), "{output:?}");
    }
}

#[test]
fn the_path_of_the_server_url_is_a_prefix_of_the_api() {
    // The error for a wrong prefix comes from the server.
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let (_server, url) = fixture.serve("");
    run(&[("LONGSHORE_SERVER", &format!("{url}/"))], "queues list").ok();
    run(&[("LONGSHORE_SERVER", &format!("{url}/queue"))], "queues list").fails_with(3, &["/queue/queues"]);
}

#[test]
fn https_to_an_http_server_says_so() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let (_server, url) = fixture.serve("");
    let https = url.replace("http://", "https://");
    run(&[("LONGSHORE_SERVER", &https)], "queues list")
        .fails_with(2, &[&https, "speaks http, not https", &format!("give {url}")]);
}

#[test]
fn a_file_that_cannot_be_opened_is_not_reported_as_missing() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    // A path below a file: it cannot exist, but the reason is another one.
    let below = format!("{}/jobs.db", fixture.url);
    let output =
        run(&[("DATABASE_URL", &below)], "queues list").fails_with(5, &["cannot be opened", "permissions"]);
    assert!(!output.err.contains("does not exist"), "{output:?}");
}
