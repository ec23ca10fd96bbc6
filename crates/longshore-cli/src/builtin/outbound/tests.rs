//! Outbound calls as a whole, against a server on this machine.
#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use super::address::tests::INNER;
use super::connect::Found;
use super::*;
use crate::builtin::Settings;
use crate::builtin::testing::Server;

/// The way out for names that resolve to each of `answers` in turn, the last
/// one for ever.
fn lying(rules: Rules, answers: &[&[&str]]) -> Outbound {
    let mut answers: Vec<Vec<IpAddr>> =
        answers.iter().rev().map(|addrs| addrs.iter().map(|addr| addr.parse().unwrap()).collect()).collect();
    let last = answers[0].clone();
    answers.remove(0);
    let answers = Mutex::new(answers);
    let lookup = move |_: String| -> Found {
        let answer = answers.lock().unwrap().pop().unwrap_or_else(|| last.clone());
        Box::pin(async move { Ok(answer) })
    };
    Outbound::resolving(rules, Box::new(lookup)).unwrap()
}

async fn fetch(outbound: &Outbound, url: &str) -> Result<Vec<u8>, String> {
    let fetched = async { outbound.get(&outbound.target("source_url", url)?, 100).await };
    fetched.await.map_err(|failure| format!("{failure:?}"))
}

#[track_caller]
fn assert_refused(answer: Result<Vec<u8>, String>, host: &str) {
    let refused = answer.unwrap_err();
    assert!(refused.starts_with(&format!("permanent: {host}")), "{refused}");
    assert!(refused.contains("--allow-outbound"), "{refused}");
}

#[tokio::test]
async fn no_name_leads_inside() {
    for addr in INNER {
        let outbound = lying(Rules::allowing(&[]), &[&[addr]]);
        assert_refused(fetch(&outbound, "http://hooks.example.com/").await, "hooks.example.com leads to ");
    }
}

#[tokio::test]
async fn no_form_of_address_in_a_url_leads_inside() {
    let unasked = |_: String| -> Found { panic!("an address needs no resolver") };
    let outbound = Outbound::resolving(Rules::allowing(&[]), Box::new(unasked)).unwrap();
    for addr in INNER {
        let host = if addr.contains(':') { format!("[{addr}]") } else { (*addr).to_owned() };
        assert_refused(fetch(&outbound, &format!("http://{host}:8080/")).await, "");
    }
    for (host, shown) in [
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0x7f.1", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("%31%32%37.0.0.1", "127.0.0.1"),
        ("１２７.0.0.1", "127.0.0.1"),
        ("127。0。0。1", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
        ("[0:0:0:0:0:ffff:7f00:1]", "[::ffff:7f00:1]"),
        ("example.com@127.0.0.1", "127.0.0.1"),
        ("example.com:80@[::1]", "[::1]"),
        ("127.0.0.1\\@example.com", "127.0.0.1"),
        ("127.0.0.1#@example.com", "127.0.0.1"),
    ] {
        assert_refused(fetch(&outbound, &format!("http://{host}/")).await, shown);
    }
}

#[tokio::test]
async fn a_name_that_changes_its_mind_gains_nothing() {
    let answer = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nopen";
    let mut server = Server::answering(&[answer, answer]).await;
    let url = format!("http://rebind.example.com:{}/", server.port());
    // 127.0.0.2 is allowed and stands for an open address.
    let outbound = lying(Rules::allowing(&["127.0.0.2"]), &[&["127.0.0.2"], &["127.0.0.1"]]);
    assert_eq!(fetch(&outbound, &url).await.unwrap(), b"open");
    assert!(server.heard().await.starts_with("GET / HTTP/1.1"));
    assert_refused(fetch(&outbound, &url).await, "rebind.example.com leads to a loopback");
    assert_eq!(server.heard_so_far(), None, "nobody knocked");
}

#[tokio::test]
async fn of_mixed_answers_only_the_open_ones_are_called() {
    let mut server = Server::answering(&["HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nopen"]).await;
    let url = format!("http://mixed.example.com:{}/", server.port());
    // 127.0.0.2 is allowed and stands for an open address.
    let outbound = lying(Rules::allowing(&["127.0.0.2"]), &[&["127.0.0.1", "10.0.0.1", "127.0.0.2", "::1"]]);
    assert_eq!(fetch(&outbound, &url).await.unwrap(), b"open");
    let host = server.heard_from().await;
    assert_eq!(host, "127.0.0.2", "the address that was called");
    assert_refused(
        fetch(&lying(Rules::allowing(&[]), &[&["127.0.0.1", "10.0.0.1", "::1"]]), &url).await,
        "mixed.example.com",
    );
}

#[tokio::test]
async fn what_is_allowed_is_called() {
    for allowed in ["127.0.0.1", "127.0.0.0/8", "0.0.0.0/0", "hooks.internal"] {
        let server = Server::answering(&["HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"]).await;
        let outbound = lying(Rules::allowing(&[allowed]), &[&["127.0.0.1"]]);
        let answer = fetch(&outbound, &format!("http://Hooks.Internal:{}/", server.port())).await;
        assert_eq!(answer.unwrap(), b"hi", "{allowed}");
    }
}

#[tokio::test]
async fn http_is_called_only_if_allowed_and_nothing_else_ever_is() {
    let outbound = Outbound::new(Rules::of(&Settings::default())).unwrap();
    let refused = fetch(&outbound, "http://ada:s3cret@example.com/token").await.unwrap_err();
    assert!(refused.starts_with("permanent: example.com: only https"), "{refused}");
    assert!(refused.contains("--allow-http"), "{refused}");
    assert!(!refused.contains("s3cret") && !refused.contains("token"), "{refused}");
    let refused = fetch(&outbound, "ftp://example.com/").await.unwrap_err();
    assert!(refused.starts_with("permanent: example.com: only https and http"), "{refused}");
}

#[tokio::test]
async fn messages_name_the_host_and_nothing_else_of_the_url() {
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let outbound = lying(Rules::allowing(&["127.0.0.1"]), &[&["127.0.0.1"]]);
    let url = format!("http://ada:s3cret@hooks.example.com:{gone}/token?key=s3cret");
    let failed = fetch(&outbound, &url).await.unwrap_err();
    assert!(
        failed.starts_with(&format!("retry: hooks.example.com:{gone} could not be called: ")),
        "{failed}"
    );
    for hidden in ["ada", "s3cret", "token", "key"] {
        assert!(!failed.contains(hidden), "{failed}");
    }
}

#[tokio::test]
async fn answers_decide_what_becomes_of_the_job() {
    for (answer, becomes) in [
        ("204 No Content", Ok(())),
        ("200 OK", Ok(())),
        ("302 Found\r\nLocation: http://127.0.0.1/", Err("retry: h answered 302 Found; redirects are not")),
        ("404 Not Found", Err("retry: h answered 404 Not Found")),
        ("410 Gone", Err("permanent: h answered 410 Gone: it wants no more of these")),
        ("429 Too Many Requests", Err("retry: h answered 429 Too Many Requests")),
        ("429 Too Many Requests\r\nRetry-After: 7", Err("retry after 7s: h answered 429")),
        ("503 Service Unavailable\r\nRetry-After: 8", Err("retry after 8s: h answered 503")),
        ("503 Service Unavailable\r\nRetry-After: 99999999", Err("retry after 86400s: h answered 503")),
        ("500 Internal Server Error\r\nRetry-After: 9", Err("retry: h answered 500")),
    ] {
        let server = Server::answering(&[&format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n")]).await;
        let outbound = lying(Rules::allowing(&["127.0.0.1"]), &[&["127.0.0.1"]]);
        let url = format!("http://h.example.com:{}/", server.port());
        let target = outbound.target("url", &url).unwrap();
        let posted = outbound.post(&target, HeaderMap::new(), b"{}".into()).await;
        let posted = posted.map(|_| ()).map_err(|failure| format!("{failure:?}"));
        let host = format!("h.example.com:{}", server.port());
        match (posted, becomes) {
            (Ok(()), Ok(())) => {}
            (Err(told), Err(begin)) => assert!(told.replace(&host, "h").starts_with(begin), "{told}"),
            (posted, becomes) => panic!("{answer}: {posted:?} and not {becomes:?}"),
        }
    }
}

#[test]
fn a_wait_is_read_in_seconds_or_as_a_time() {
    let now = "2030-01-31T09:00:00Z".parse().unwrap();
    let wait = |text: &str| {
        let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]);
        retry_after(&headers, now).map(|wait| wait.as_secs())
    };
    assert_eq!(wait("120"), Some(120));
    assert_eq!(wait("Thu, 31 Jan 2030 09:01:30 GMT"), Some(90));
    assert_eq!(wait("Thu, 31 Jan 2030 08:00:00 GMT"), Some(0), "in the past");
    assert_eq!(wait("Fri, 31 Jan 2031 09:00:00 GMT"), Some(86_400));
    for none in ["", "soon", "-1", "1.5"] {
        assert_eq!(wait(none), None, "{none}");
    }
    assert_eq!(retry_after(&HeaderMap::new(), now), None);
}

#[tokio::test]
async fn a_long_answer_is_not_read_to_its_end() {
    let long = format!("HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n{}", "x".repeat(101));
    let server = Server::answering(&[&long]).await;
    let outbound = lying(Rules::allowing(&["127.0.0.1"]), &[&["127.0.0.1"]]);
    let refused = fetch(&outbound, &format!("http://a.example.com:{}/", server.port())).await.unwrap_err();
    assert!(refused.starts_with("permanent: ") && refused.contains("over 100 bytes"), "{refused}");

    // It promises more than it sends and keeps the line open: only a reader
    // that stops by itself comes back.
    let endless = format!("HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n{}", "x".repeat(ANSWER + 1));
    let server = Server::answering(&[&endless]).await;
    let target = outbound.target("url", &format!("http://a.example.com:{}/", server.port())).unwrap();
    let status = outbound.post(&target, HeaderMap::new(), b"{}".into()).await.unwrap();
    assert_eq!(status, StatusCode::OK);
}
