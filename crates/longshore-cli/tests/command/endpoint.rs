//! Where commands get their answers: which place is meant, and what is told
//! when a server is away or wants a token.

use std::io::{Read, Write};
use std::net::TcpListener;

use crate::fixture::{CommandOutput, Fixture, UNKNOWN_ID, binary};

/// Where nobody listens.
const NOWHERE: &str = "http://127.0.0.1:1";

fn run(variables: &[(&str, &str)], line: &str) -> CommandOutput {
    let mut command = binary();
    command.envs(variables.iter().copied()).args(line.split_whitespace());
    CommandOutput::of(command.output().unwrap())
}

#[test]
fn a_typed_place_beats_the_others_variable() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let (_server, url) = fixture.serve("");
    let both = [("DATABASE_URL", "sqlite:/no/such.db"), ("LONGSHORE_SERVER", NOWHERE)];
    run(&both, "queues list").fails_with(2, &["DATABASE_URL and LONGSHORE_SERVER", "unset one", "--server"]);
    run(&both, &format!("queues list --server {url}")).ok();
    run(&both, &format!("queues list --database-url {}", fixture.url)).ok();
    run(&[], &format!("--server {url} queues list --database-url {}", fixture.url))
        .fails_with(2, &["--server and --database-url", "the one that is meant"]);
    run(&[], "queues list").fails_with(2, &["LONGSHORE_SERVER", "DATABASE_URL", "sqlite:./jobs.db"]);
}

#[test]
fn what_no_server_can_do_says_so() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    for line in ["migrate", "worker --drain", "serve", "check", "tokens list"] {
        let command = line.split(' ').next().unwrap();
        let told = [format!("`longshore {command}` works on the database itself"), "--database-url".into()];
        let told: Vec<&str> = told.iter().map(String::as_str).collect();
        run(&[("DATABASE_URL", &fixture.url)], &format!("{line} --server {NOWHERE}")).fails_with(2, &told);
        run(&[("LONGSHORE_SERVER", NOWHERE)], line).fails_with(2, &told[1..]);
    }
    // With both variables there is no doubt which one these mean.
    run(&[("DATABASE_URL", &fixture.url), ("LONGSHORE_SERVER", NOWHERE)], "check").ok();
}

#[test]
fn a_server_that_is_away_is_unavailable() {
    let refused = run(&[("LONGSHORE_SERVER", NOWHERE)], "jobs list");
    run(&[("LONGSHORE_SERVER", NOWHERE)], "health").fails_with(5, &[NOWHERE]);
    refused.fails_with(5, &[NOWHERE, "does not answer", "longshore serve"]);
    let several = run(&[("LONGSHORE_SERVER", NOWHERE)], &format!("jobs cancel {UNKNOWN_ID} {UNKNOWN_ID}"));
    assert_eq!((several.code, several.err.lines().count()), (5, 1), "asked once: {several:?}");
}

#[test]
fn who_does_not_speak_our_language_is_told_apart() {
    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", stranger.local_addr().unwrap());
    let answers = std::thread::spawn(move || {
        for answer in [
            "HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\nconnection: close\r\n\r\n<htm>",
            "HTTP/1.1 302 Found\r\nlocation: http://elsewhere.example/\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}",
        ] {
            let (mut stream, _) = stranger.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let ask = || run(&[("LONGSHORE_SERVER", &url)], "queues list");
    ask().fails_with(1, &["404", "--server"]);
    ask().fails_with(2, &["http://elsewhere.example/", "--server"]);
    ask().fails_with(1, &["not what this program understands", "version"]);
    answers.join().unwrap();
}

#[test]
fn a_server_that_wants_a_token_teaches_how_to_bring_one() {
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let (_server, url) = fixture.serve("--auth tokens");
    let token = |scopes: &str| {
        let made = fixture.run(&format!("tokens create ci --scope {scopes} --json")).json();
        made["token"].as_str().unwrap().to_owned()
    };
    let (reader, operator) = (token("read"), token("read,operate"));
    let with = |token: &str, line: &str| {
        let said = run(&[("LONGSHORE_SERVER", &url), ("LONGSHORE_TOKEN", token)], line);
        assert!(token.is_empty() || !format!("{said:?}").contains(token), "{said:?}");
        said
    };
    let taught = ["LONGSHORE_TOKEN", "--token-file", "longshore tokens create"];
    with("", "queues list").fails_with(7, &taught);
    with("longshore_guessed", "queues list").fails_with(7, &["unknown, expired or revoked"]);
    with("two words", "queues list").fails_with(2, &["LONGSHORE_TOKEN", "one line"]);
    with(&reader, "queues list").ok();
    with(&reader, "queues pause mail").fails_with(7, &["`operate`", "longshore tokens list"]);
    with(&operator, "queues pause mail").ok();

    let file = std::env::temp_dir().join(format!("longshore-token-{}", longshore::JobId::new()));
    std::fs::write(&file, format!("{operator}\n")).unwrap();
    let by_file = format!("queues resume mail --token-file {}", file.display());
    with(&reader, &by_file).ok();
    std::fs::remove_file(&file).unwrap();
    with(&reader, &by_file).fails_with(2, &["--token-file", "LONGSHORE_TOKEN"]);
}

#[test]
fn a_server_url_that_holds_a_secret_is_refused_without_repeating_it() {
    for url in ["http://ada:s3cret@127.0.0.1:1", "s3cret", "http://127.0.0.1:1/?token=s3cret"] {
        let refused =
            run(&[("LONGSHORE_SERVER", url)], "queues list").fails_with(2, &["--server", "http://127.0.0.1"]);
        assert!(!refused.err.contains("s3cret"), "{refused:?}");
    }
}

#[test]
fn a_mounted_api_is_found_behind_its_prefix() {
    // The server's path goes before the API's; a wrong one is told by the server.
    let fixture = Fixture::sqlite();
    fixture.migrated();
    let (_server, url) = fixture.serve("");
    run(&[("LONGSHORE_SERVER", &format!("{url}/"))], "queues list").ok();
    run(&[("LONGSHORE_SERVER", &format!("{url}/queue"))], "queues list").fails_with(3, &["/queue/queues"]);
}
