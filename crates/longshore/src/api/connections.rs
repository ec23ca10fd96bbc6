//! Open connections and how long each has been waiting for its client. When all are in
//! use, the server closes one that waits for its client, so that slow or silent clients
//! cannot keep others out.
//!
//! A connection waits for its client while it has no complete request: between two
//! requests, and while headers or a slow body arrive. It also waits while a client reads
//! a response that is already complete, and while the server looks up a token that it does not
//! know. A connection whose request is being handled is never closed. Timeouts are in `bodies`
//! and `timed_stream`; `waiting_calls` limits the requests that take long on purpose.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use hyper::body::{Frame, SizeHint};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::refusals::{self, Refusal};
use super::serve::Limits;
use crate::network::Network;

/// A connection is closed in favour of a new one only after it has waited for its client
/// for this long. A client sends its first request immediately, so a flood of new
/// connections does not close the connections of such clients.
const MIN_WAIT: Duration = Duration::from_millis(100);
/// How soon to look again for a connection to close.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// The connections of a server.
pub(super) struct Connections {
    slots: Arc<Semaphore>,
    /// How many connections one address may have; `None` means all.
    share: Option<usize>,
    /// The addresses that this does not apply to.
    trusted_proxies: Vec<Network>,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    connections: Vec<Arc<Connection>>,
    /// How many each client has. Every new connection needs to know.
    by_client: HashMap<ClientKey, usize>,
}

impl Open {
    fn add(&mut self, connection: Arc<Connection>) {
        *self.by_client.entry(connection.client).or_default() += 1;
        self.connections.push(connection);
    }

    fn remove(&mut self, i: usize) -> Arc<Connection> {
        let connection = self.connections.swap_remove(i);
        if let Entry::Occupied(mut count) = self.by_client.entry(connection.client) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        connection
    }
}

impl Connections {
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        let limit = limits.connections.max(1);
        Arc::new(Connections {
            slots: Arc::new(Semaphore::new(limit)),
            // With very few connections, nothing would be left for others.
            share: Some(share_of(limit)).filter(|share| *share < limit),
            trusted_proxies: limits.trusted_proxies.clone(),
            open: Mutex::default(),
        })
    }

    /// Waits until this client may have one more connection. Closes another one if necessary.
    /// Returns `None` if the client has its share of connections and all of them handle requests.
    pub(super) async fn slot(&self, client: IpAddr) -> Option<OwnedSemaphorePermit> {
        // Do not wait for one of its connections here: nobody else could connect meanwhile.
        if self.has_its_share(client) && !self.close_waiting(Some(ClientKey::of(client))) {
            refusals::report(Refusal::AddressLimit);
            return None;
        }
        if let Ok(slot) = self.slots.clone().try_acquire_owned() {
            return Some(slot);
        }
        loop {
            if !self.close_waiting(None) {
                refusals::report_all_busy();
            }
            if let Ok(slot) = tokio::time::timeout(LOOK_AGAIN, self.slots.clone().acquire_owned()).await {
                // Cannot fail: the semaphore is never closed.
                return slot.ok();
            }
        }
    }

    fn has_its_share(&self, client: IpAddr) -> bool {
        let Some(share) = self.share else { return false };
        self.open().by_client.get(&ClientKey::of(client)).is_some_and(|count| *count >= share)
            && !self.trusted_proxies.iter().any(|network| network.contains(client))
    }

    /// Adds a connection until the result is dropped.
    pub(super) fn add(self: &Arc<Self>, client: IpAddr, slot: OwnedSemaphorePermit) -> OpenConnection {
        let connection = Arc::new(Connection {
            client: ClientKey::of(client),
            opened: Instant::now(),
            waiting_since: AtomicU64::new(WAITING_SINCE_OPENED),
            request_since: AtomicU64::new(NO_REQUEST),
            is_known: AtomicBool::new(false),
            close: Notify::new(),
        });
        self.open().add(connection.clone());
        OpenConnection { connections: self.clone(), connection, _slot: slot }
    }

    /// Closes the connection that has waited for its client the longest; with a client, the longest of this
    /// client. Connections that never sent a valid token come first, so that nobody can close those of
    /// others without one. Returns whether one was closed.
    pub(super) fn close_waiting(&self, of: Option<ClientKey>) -> bool {
        let mut open = self.open();
        let now = Instant::now();
        let waiting = open.connections.iter().enumerate().filter_map(|(i, connection)| {
            let since = connection.waiting_since()?;
            let turn = match now.saturating_duration_since(since) >= MIN_WAIT {
                true => Turn::Waited { is_known: connection.is_known.load(Ordering::Relaxed) },
                // A client with many connections need not be protected from itself.
                false => of.map(|_| Turn::New)?,
            };
            of.is_none_or(|of| of == connection.client).then_some((turn, connection.client, since, i))
        });
        let waiting: Vec<_> = waiting.collect();
        let first = waiting.iter().map(|(turn, ..)| *turn).min();
        let waiting = waiting.into_iter().filter(|(turn, ..)| Some(*turn) == first);
        let Some(chosen) = longest_waiting(waiting.map(|(_, client, since, i)| (client, 1, since, i))) else {
            return false;
        };
        open.remove(chosen).close.notify_one();
        refusals::report(Refusal::ConnectionLimit);
        true
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which connections are closed first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    /// Those that have waited for a while, and of these, those that never sent a valid token.
    Waited {
        is_known: bool,
    },
    New,
}

/// How many of all connections one address may have: three quarters.
fn share_of(limit: usize) -> usize {
    limit - limit / 4
}

/// Of the client whose entries have the largest weight in total, the one that waits the longest. So a
/// client that opens many connections, or sends many bytes, affects itself and not the others.
pub(super) fn longest_waiting<C: Eq + Hash, T>(
    waiting: impl Iterator<Item = (C, usize, Instant, T)>,
) -> Option<T> {
    let mut by_client: HashMap<C, (usize, Instant, T)> = HashMap::new();
    for (client, weight, since, item) in waiting {
        match by_client.get_mut(&client) {
            None => {
                by_client.insert(client, (weight, since, item));
            }
            Some((total, oldest, oldest_item)) => {
                *total += weight;
                if since < *oldest {
                    (*oldest, *oldest_item) = (since, item);
                }
            }
        }
    }
    let most = by_client.into_values().max_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    most.map(|(_, _, item)| item)
}

/// What identifies a client: its IPv4 address, or its IPv6 network of 64 bits, which is what
/// one host usually has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ClientKey(IpAddr);

impl ClientKey {
    pub(super) fn of(address: IpAddr) -> Self {
        ClientKey(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
            address => address,
        })
    }
}

/// One connection. Its requests have it in their extensions.
pub(super) struct Connection {
    client: ClientKey,
    opened: Instant,
    /// Since when it waits for its client: milliseconds after `opened`, or `BUSY`. An
    /// atomic, because every request changes it.
    waiting_since: AtomicU64,
    /// Since when the headers of a request arrive: milliseconds after `opened`, `NO_REQUEST` or `HANDLED`.
    request_since: AtomicU64,
    /// Whether a request had a valid token.
    is_known: AtomicBool,
    close: Notify,
}

const WAITING_SINCE_OPENED: u64 = 0;
const BUSY: u64 = u64::MAX;
const NO_REQUEST: u64 = u64::MAX;
/// The headers are complete.
const HANDLED: u64 = u64::MAX - 1;

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaits {
    /// The first byte of a request.
    Request { since: Instant },
    /// The rest of the headers.
    Headers { since: Instant },
    /// Nothing: a request is being handled, or its body arrives.
    Nothing,
}

impl Connection {
    pub(super) fn client(&self) -> ClientKey {
        self.client
    }

    pub(super) fn awaits(&self) -> Awaits {
        match self.request_since.load(Ordering::Relaxed) {
            NO_REQUEST => match self.waiting_since() {
                Some(since) => Awaits::Request { since },
                None => Awaits::Nothing,
            },
            HANDLED => Awaits::Nothing,
            millis => Awaits::Headers { since: self.opened + Duration::from_millis(millis) },
        }
    }

    /// Notes that the client has sent something: the first byte of a request, if the connection waits for one.
    pub(super) fn note_received(&self) {
        if self.request_since.load(Ordering::Relaxed) == NO_REQUEST {
            self.request_since.store(self.millis(), Ordering::Relaxed);
        }
    }

    /// Milliseconds since the connection was opened.
    fn millis(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX).min(HANDLED - 1)
    }

    fn waiting_since(&self) -> Option<Instant> {
        match self.waiting_since.load(Ordering::Relaxed) {
            BUSY => None,
            millis => Some(self.opened + Duration::from_millis(millis)),
        }
    }

    fn wait_for_client(&self) {
        self.waiting_since.store(self.millis(), Ordering::Relaxed);
    }

    fn handle_request(&self) {
        self.waiting_since.store(BUSY, Ordering::Relaxed);
    }

    /// Notes that a request had a valid token.
    pub(super) fn note_known(&self) {
        self.is_known.store(true, Ordering::Relaxed);
    }

    /// Lets the server close this connection in favour of another one until the result is dropped: its request
    /// is not complete, or nobody knows yet whether it is permitted.
    pub(super) fn wait_for_request(self: &Arc<Self>) -> impl Drop + use<> {
        struct Waiting(Arc<Connection>);
        impl Drop for Waiting {
            fn drop(&mut self) {
                self.0.handle_request();
            }
        }
        self.wait_for_client();
        Waiting(self.clone())
    }
}

/// An open connection. Dropping it removes it from the list and frees its slot.
pub(super) struct OpenConnection {
    connections: Arc<Connections>,
    connection: Arc<Connection>,
    _slot: OwnedSemaphorePermit,
}

impl OpenConnection {
    pub(super) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Waits until the server closes this connection in favour of another one.
    pub(super) async fn closed(&self) {
        self.connection.close.notified().await;
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let mut open = self.connections.open();
        // It is no longer there if the server has closed it.
        let position = open.connections.iter().position(|open| Arc::ptr_eq(open, &self.connection));
        position.map(|position| open.remove(position));
    }
}

/// The time in which a connection handles a request: until the response is complete.
pub(super) struct Handling(Arc<Connection>);

impl Handling {
    pub(super) fn begin(connection: Arc<Connection>) -> Self {
        connection.request_since.store(HANDLED, Ordering::Relaxed);
        connection.handle_request();
        Handling(connection)
    }
}

impl Drop for Handling {
    fn drop(&mut self) {
        self.0.wait_for_client();
        self.0.request_since.store(NO_REQUEST, Ordering::Relaxed);
    }
}

/// The body of a response. The request is handled until this is dropped.
pub(super) struct ResponseBody {
    pub(super) body: Body,
    pub(super) _handling: Handling,
}

impl hyper::body::Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_with_the_most_connections_loses_its_oldest() {
        let at = |seconds: u64| Instant::now() + Duration::from_secs(seconds);
        let client = |last: u8| ClientKey::of(IpAddr::from([10, 0, 0, last]));
        let waiting = [(client(1), 1, at(1), "a"), (client(2), 1, at(3), "b"), (client(2), 1, at(2), "c")];
        assert_eq!(longest_waiting(waiting.into_iter()), Some("c"));
        let waiting = [(client(1), 1, at(1), "a"), (client(2), 1, at(3), "b"), (client(3), 1, at(2), "c")];
        assert_eq!(longest_waiting(waiting.into_iter()), Some("a"));
        let waiting = [(client(1), 1, at(1), "a"), (client(2), 9, at(3), "b"), (client(1), 7, at(2), "c")];
        assert_eq!(longest_waiting(waiting.into_iter()), Some("b"));
        assert_eq!(longest_waiting::<ClientKey, u8>(std::iter::empty()), None);
    }

    #[tokio::test]
    async fn an_address_has_a_share_unless_it_is_a_trusted_proxy() {
        let limits = Limits {
            connections: 8,
            trusted_proxies: vec!["10.0.0.2".parse().unwrap()],
            ..Limits::default()
        };
        let connections = Connections::new(&limits);
        let (address, proxy) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let mut open = Vec::new();
        for client in [[address; 6], [proxy; 6]].concat() {
            let Some(slot) = connections.slot(client).await else { panic!("{client} is refused") };
            let connection = connections.add(client, slot);
            // Otherwise it could be closed in favour of the next one.
            connection.connection().handle_request();
            open.push(connection);
            if open.len() == 8 {
                break;
            }
        }
        assert!(connections.slot(address).await.is_none(), "an address has more than its share");
        // A connection that waits for its client makes room.
        open[3].connection().waiting_since.store(WAITING_SINCE_OPENED, Ordering::Relaxed);
        let closed = open[3].connection().clone();
        drop(open.split_off(6));
        assert!(connections.slot(address).await.is_some());
        closed.close.notified().await;
    }

    #[tokio::test]
    async fn connections_without_a_valid_token_are_closed_first() {
        let connections = Connections::new(&Limits { connections: 3, ..Limits::default() });
        let client = |last: u8| IpAddr::from([10, 0, 0, last]);
        let mut open = Vec::new();
        for last in [1, 1, 2] {
            let Some(slot) = connections.slot(client(last)).await else { panic!("refused") };
            open.push(connections.add(client(last), slot));
        }
        open[0].connection().note_known();
        open[1].connection().note_known();
        tokio::time::sleep(MIN_WAIT).await;
        assert!(connections.close_waiting(None));
        open[2].closed().await;
        assert!(connections.close_waiting(None));
        open[0].closed().await;
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_client() {
        let key = |text: &str| ClientKey::of(text.parse().unwrap());
        assert_eq!(key("2001:db8:1:2::1"), key("2001:db8:1:2:ffff::9"));
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        assert_eq!(key("::ffff:10.0.0.1"), key("10.0.0.1"));
        assert_ne!(key("10.0.0.2"), key("10.0.0.1"));
    }
}
