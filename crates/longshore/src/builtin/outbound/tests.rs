//! Tests of complete calls, against a server on this machine.
#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use super::address::tests::SPECIAL;
use super::connect::LookupFuture;
use super::*;
use crate::builtin::Settings;
use crate::builtin::testing::Server;

/// A client whose lookups return each of `results` in turn, and then always the last
/// one.
fn outbound_resolving_to(rules: Rules, results: &[&[&str]]) -> Outbound {
    let mut results: Vec<Vec<IpAddr>> =
        results.iter().rev().map(|addrs| addrs.iter().map(|addr| addr.parse().unwrap()).collect()).collect();
    let last = results[0].clone();
    results.remove(0);
    let results = Mutex::new(results);
    let lookup = move |_: String| -> LookupFuture {
        let result = results.lock().unwrap().pop().unwrap_or_else(|| last.clone());
        Box::pin(async move { Ok(result) })
    };
    Outbound::with_lookup(rules, Box::new(lookup)).unwrap()
}

async fn fetch(outbound: &Outbound, url: &str) -> Result<Vec<u8>, String> {
    let result = async { outbound.get(&outbound.target("source_url", url)?, 100).await };
    result.await.map_err(|failure| format!("{failure:?}"))
}

#[track_caller]
fn assert_refused(result: Result<Vec<u8>, String>, message_start: &str) {
    let error = result.unwrap_err();
    assert!(error.starts_with(&format!("permanent: {message_start}")), "{error}");
    assert!(error.contains("--allow-outbound"), "{error}");
}

#[tokio::test]
async fn a_name_that_resolves_to_a_special_address_is_refused() {
    for addr in SPECIAL {
        let outbound = outbound_resolving_to(Rules::allowing(&[]), &[&[addr]]);
        assert_refused(fetch(&outbound, "http://hooks.example.com/").await, "hooks.example.com resolves to ");
    }
}

#[tokio::test]
async fn a_special_address_in_a_url_is_refused_in_every_notation() {
    let unused = |_: String| -> LookupFuture { panic!("an address needs no lookup") };
    let outbound = Outbound::with_lookup(Rules::allowing(&[]), Box::new(unused)).unwrap();
    for addr in SPECIAL {
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
async fn a_name_that_later_resolves_to_a_special_address_is_refused() {
    let response = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nopen";
    let mut server = Server::responding(&[response, response]).await;
    let url = format!("http://rebind.example.com:{}/", server.port());
    // 127.0.0.2 is allowed and represents a public address.
    let outbound = outbound_resolving_to(Rules::allowing(&["127.0.0.2"]), &[&["127.0.0.2"], &["127.0.0.1"]]);
    assert_eq!(fetch(&outbound, &url).await.unwrap(), b"open");
    assert!(server.next_request().await.starts_with("GET / HTTP/1.1"));
    assert_refused(fetch(&outbound, &url).await, "rebind.example.com resolves to a loopback");
    assert_eq!(server.pending_request(), None, "the second call did not connect");
}

#[tokio::test]
async fn of_several_addresses_only_the_allowed_ones_are_called() {
    let mut server = Server::responding(&["HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nopen"]).await;
    let url = format!("http://mixed.example.com:{}/", server.port());
    // 127.0.0.2 is allowed and represents a public address.
    let outbound = outbound_resolving_to(
        Rules::allowing(&["127.0.0.2"]),
        &[&["127.0.0.1", "10.0.0.1", "127.0.0.2", "::1"]],
    );
    assert_eq!(fetch(&outbound, &url).await.unwrap(), b"open");
    assert_eq!(server.next_local_address().await, "127.0.0.2", "the address that was called");
    assert_refused(
        fetch(&outbound_resolving_to(Rules::allowing(&[]), &[&["127.0.0.1", "10.0.0.1", "::1"]]), &url).await,
        "mixed.example.com",
    );
}

#[tokio::test]
async fn an_allowed_address_network_or_host_is_called() {
    for allowed in ["127.0.0.1", "127.0.0.0/8", "0.0.0.0/0", "hooks.internal"] {
        let server = Server::responding(&["HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"]).await;
        let outbound = outbound_resolving_to(Rules::allowing(&[allowed]), &[&["127.0.0.1"]]);
        let result = fetch(&outbound, &format!("http://Hooks.Internal:{}/", server.port())).await;
        assert_eq!(result.unwrap(), b"hi", "{allowed}");
    }
}

#[tokio::test]
async fn http_needs_permission_and_other_schemes_are_always_refused() {
    let outbound = Outbound::new(Rules::of(&Settings::default())).unwrap();
    let error = fetch(&outbound, "http://ada:s3cret@example.com/token").await.unwrap_err();
    assert!(error.starts_with("permanent: example.com: only https"), "{error}");
    assert!(error.contains("--allow-http"), "{error}");
    assert!(!error.contains("s3cret") && !error.contains("token"), "{error}");
    let error = fetch(&outbound, "ftp://example.com/").await.unwrap_err();
    assert!(error.starts_with("permanent: example.com: only https and http"), "{error}");
}

#[tokio::test]
async fn messages_name_the_host_and_no_other_part_of_the_url() {
    let closed_port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let outbound = outbound_resolving_to(Rules::allowing(&["127.0.0.1"]), &[&["127.0.0.1"]]);
    let url = format!("http://ada:s3cret@hooks.example.com:{closed_port}/token?key=s3cret");
    let error = fetch(&outbound, &url).await.unwrap_err();
    assert!(
        error.starts_with(&format!("retry: the call to hooks.example.com:{closed_port} failed: ")),
        "{error}"
    );
    for hidden in ["ada", "s3cret", "token", "key"] {
        assert!(!error.contains(hidden), "{error}");
    }
}

#[tokio::test]
async fn the_status_decides_the_outcome_of_the_attempt() {
    for (status, expected) in [
        ("204 No Content", Ok(())),
        ("200 OK", Ok(())),
        ("302 Found\r\nLocation: http://127.0.0.1/", Err("retry: h responded 302 Found; redirects are not")),
        ("404 Not Found", Err("retry: h responded 404 Not Found")),
        ("410 Gone", Err("permanent: h responded 410 Gone: it accepts no more")),
        ("429 Too Many Requests", Err("retry: h responded 429 Too Many Requests")),
        ("429 Too Many Requests\r\nRetry-After: 7", Err("retry after 7s: h responded 429")),
        ("503 Service Unavailable\r\nRetry-After: 8", Err("retry after 8s: h responded 503")),
        ("503 Service Unavailable\r\nRetry-After: 99999999", Err("retry after 86400s: h responded 503")),
        ("500 Internal Server Error\r\nRetry-After: 9", Err("retry: h responded 500")),
    ] {
        let server = Server::responding(&[&format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n")]).await;
        let outbound = outbound_resolving_to(Rules::allowing(&["127.0.0.1"]), &[&["127.0.0.1"]]);
        let url = format!("http://h.example.com:{}/", server.port());
        let target = outbound.target("url", &url).unwrap();
        let result = outbound.post(&target, HeaderMap::new(), b"{}".into()).await;
        let result = result.map(|_| ()).map_err(|failure| format!("{failure:?}"));
        let host = format!("h.example.com:{}", server.port());
        match (result, expected) {
            (Ok(()), Ok(())) => {}
            (Err(error), Err(start)) => assert!(error.replace(&host, "h").starts_with(start), "{error}"),
            (result, expected) => panic!("{status}: expected {expected:?}, got {result:?}"),
        }
    }
}

#[test]
fn retry_after_is_a_number_of_seconds_or_a_date() {
    let now = "2030-01-31T09:00:00Z".parse().unwrap();
    let seconds = |text: &str| {
        let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]);
        retry_after(&headers, now).map(|delay| delay.as_secs())
    };
    assert_eq!(seconds("120"), Some(120));
    assert_eq!(seconds("Thu, 31 Jan 2030 09:01:30 GMT"), Some(90));
    assert_eq!(seconds("Thu, 31 Jan 2030 08:00:00 GMT"), Some(0), "in the past");
    assert_eq!(seconds("Fri, 31 Jan 2031 09:00:00 GMT"), Some(86_400));
    for invalid in ["", "soon", "-1", "1.5"] {
        assert_eq!(seconds(invalid), None, "{invalid}");
    }
    assert_eq!(retry_after(&HeaderMap::new(), now), None);
}

#[tokio::test]
async fn a_response_is_read_only_up_to_the_limit() {
    let long = format!("HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n{}", "x".repeat(101));
    let server = Server::responding(&[&long]).await;
    let outbound = outbound_resolving_to(Rules::allowing(&["127.0.0.1"]), &[&["127.0.0.1"]]);
    let error = fetch(&outbound, &format!("http://a.example.com:{}/", server.port())).await.unwrap_err();
    assert!(error.starts_with("permanent: ") && error.contains("larger than 100 bytes"), "{error}");

    // The server announces more than it sends and keeps the connection open, so the
    // call returns only if the reader stops by itself.
    let endless =
        format!("HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n{}", "x".repeat(MAX_POST_RESPONSE + 1));
    let server = Server::responding(&[&endless]).await;
    let target = outbound.target("url", &format!("http://a.example.com:{}/", server.port())).unwrap();
    let status = outbound.post(&target, HeaderMap::new(), b"{}".into()).await.unwrap();
    assert_eq!(status, StatusCode::OK);
}
