//! Opens connections: which hosts a URL names, in which order they are tried, how long
//! each may take, and which of them the queue can use. Does not keep connections; the
//! pool does.
//!
//! The driver understands one host per URL. Like libpq, this module also accepts
//! several, so that a failover needs no proxy:
//! `postgres://user@one:5432,two:5432/database?target_session_attrs=read-write`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};

use super::tx::{Fault, MIXED_UP_STATEMENTS, Sql};
use super::{OWN_PARAMETERS, take_parameter};
use crate::error::{Error, Result};
use crate::nearest::nearest;

/// How long one host may take until a session is ready for use.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// The same if the URL names several hosts: the next one may reply at once.
const CONNECT_TIMEOUT_PER_HOST: Duration = Duration::from_secs(2);
/// How long the check for a transaction pooler may take.
const POOLER_CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// How long its second connection may take. In session mode, a pooler without a free server
/// connection lets it wait.
const SECOND_CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// The hosts of one URL.
#[derive(Debug)]
pub(super) struct Connector {
    hosts: Vec<PgConnectOptions>,
    target: Target,
    /// The host to try first: the last one that worked.
    preferred: AtomicUsize,
}

/// The servers that the queue may use: `target_session_attrs` in the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Any,
    ReadWrite,
    Primary,
}

/// A connection, and the index of its host for [`Connector::avoid`].
pub(super) struct Connected {
    pub(super) connection: PgConnection,
    pub(super) host: usize,
}

impl Connector {
    /// Reads the hosts and `target_session_attrs` from a URL. Errors never repeat the
    /// URL, which may contain a password.
    pub(super) fn parse(url: &str) -> Result<Self> {
        let mut target = None;
        let url = take_parameter(url, "target_session_attrs", |value| {
            target = Some(match value {
                "any" => Target::Any,
                "read-write" => Target::ReadWrite,
                "primary" => Target::Primary,
                _ => {
                    return Err(Error::invalid(
                        "target_session_attrs",
                        "database URL: target_session_attrs must be `read-write`, `primary` or `any`: \
                         the queue writes to its database",
                    ));
                }
            });
            Ok(())
        })?;
        check_parameters(&url)?;
        let hosts: Vec<PgConnectOptions> = split_hosts(&url)?
            .iter()
            // The parse error contains the URL with its password, so it is left out.
            .map(|url| url.parse().map_err(|_| invalid_url()))
            // PgBouncer refuses this startup parameter by default. It only concerns floats
            // as text, and we read none.
            .map(|options: Result<PgConnectOptions>| Ok(options?.extra_float_digits(None)))
            .collect::<Result<_>>()?;
        // With several hosts the default differs from libpq's `any`: a queue on a standby
        // could do nothing.
        let target = target.unwrap_or(if hosts.len() > 1 { Target::ReadWrite } else { Target::Any });
        Ok(Connector { hosts, target, preferred: AtomicUsize::new(0) })
    }

    /// Opens a connection to the first host that accepts it, beginning with the one that
    /// worked last. The error names every host that was tried.
    pub(super) async fn connect(&self) -> Sql<Connected> {
        let first = self.preferred.load(Ordering::Relaxed);
        let timeout = if self.hosts.len() > 1 { CONNECT_TIMEOUT_PER_HOST } else { CONNECT_TIMEOUT };
        let mut errors = Vec::new();
        for offset in 0..self.hosts.len() {
            let host = (first + offset) % self.hosts.len();
            let options = &self.hosts[host];
            let fault = match tokio::time::timeout(timeout, self.connect_to(options)).await {
                Ok(Ok(connection)) => {
                    self.preferred.store(host, Ordering::Relaxed);
                    return Ok(Connected { connection, host });
                }
                Ok(Err(fault)) => fault,
                Err(_) => Fault::Timeout(timeout),
            };
            errors.push((name(options), Error::from(fault)));
        }
        Err(combined(errors).into())
    }

    /// Opens a session and checks that the queue can use its server.
    async fn connect_to(&self, options: &PgConnectOptions) -> Sql<PgConnection> {
        let mut connection = sqlx::ConnectOptions::connect(options).await?;
        // Our statements are short, but the planner overestimates some: compiling one
        // took forty times as long as running it.
        let (setup, refusal) = match self.target {
            Target::Any => ("set jit = off", ""),
            Target::ReadWrite => (
                "set jit = off; select current_setting('transaction_read_only') = 'on'",
                "it accepts no writes, but target_session_attrs is `read-write`",
            ),
            Target::Primary => (
                "set jit = off; select pg_is_in_recovery()",
                "it is a standby, but target_session_attrs is `primary`",
            ),
        };
        let rows = sqlx::raw_sql(setup).fetch_all(&mut connection).await?;
        // By its place: such a script returns no names of columns.
        match rows.first().map(|row| row.try_get::<bool, _>(0)).transpose()? {
            Some(true) => Err(Error::read_only(refusal).into()),
            Some(false) | None => Ok(connection),
        }
    }

    /// Refuses a pooler that gives the statements of one client to several server connections
    /// and does not track which of them are prepared where: PgBouncer in transaction mode
    /// before version 1.21, or with `max_prepared_statements = 0`. As soon as two clients use
    /// it at the same time, statements fail, or another client's statement runs instead.
    /// Returns the connection if it can still be used.
    pub(super) async fn check_pooler(&self, mut first: Connected) -> Sql<Option<Connected>> {
        let keeps = self.keeps_statements(&mut first.connection);
        match tokio::time::timeout(POOLER_CHECK_TIMEOUT, keeps).await {
            Ok(Ok(true)) => Ok(Some(first)),
            Ok(Ok(false)) => Err(Error::unavailable(MIXED_UP_STATEMENTS).into()),
            Ok(Err(fault)) if fault.is_statement_pooling() => Err(fault),
            // The same error happens again in the first operation.
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    }

    /// Whether a prepared statement stays with its connection. Two connections prepare
    /// different statements. The driver numbers the statements of each connection, so both
    /// have the same name. The second connection opens a transaction, which occupies the
    /// server connection that was used last. If that is the one of `first`, it has a statement
    /// of this name already, and `first` moves to a server connection that does not have its
    /// statement.
    async fn keeps_statements(&self, first: &mut PgConnection) -> Sql<bool> {
        // Different processes use different numbers.
        let number = i64::from(std::process::id()) * 2;
        if !returns_number(first, number).await? {
            return Ok(false);
        }
        // The server may have no room for a second connection, and can be used all the same.
        let second = tokio::time::timeout(SECOND_CONNECTION_TIMEOUT, self.connect()).await;
        let Ok(Ok(Connected { connection: mut second, .. })) = second else { return Ok(true) };
        sqlx::raw_sql("begin").execute(&mut second).await?;
        // If another client's statement runs instead, it must not write anything.
        let keeps = returns_number(&mut second, number + 1).await? && {
            sqlx::raw_sql("begin read only").execute(&mut *first).await?;
            let keeps = returns_number(first, number).await?;
            sqlx::raw_sql("rollback").execute(&mut *first).await?;
            keeps
        };
        sqlx::raw_sql("rollback").execute(&mut second).await?;
        drop(second.close().await);
        Ok(keeps)
    }

    /// Tries another host first from now on, because this one stopped replying or
    /// accepts no more writes.
    pub(super) fn avoid(&self, host: usize) {
        let next = (host + 1) % self.hosts.len();
        // Only the first report about a host counts: a second one must not skip the next
        // host too.
        let _ = self.preferred.compare_exchange(host, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The host that a new connection would use, for the driver's own pools. With several
    /// hosts, finds it by connecting.
    pub(super) async fn options(&self) -> Sql<PgConnectOptions> {
        let host = if self.hosts.len() > 1 { self.connect().await?.host } else { 0 };
        Ok(self.hosts[host].clone())
    }
}

/// Runs a prepared statement. Returns false if it was not found, or another one was.
async fn returns_number(connection: &mut PgConnection, number: i64) -> Sql<bool> {
    let statement = sqlx::query_scalar::<_, i64>(AssertSqlSafe(format!("select {number}::int8")));
    match statement.fetch_one(connection).await.map_err(Fault::from) {
        Ok(found) => Ok(found == number),
        Err(fault) if fault.is_mixed_up_statement() => Ok(false),
        Err(fault) => Err(fault),
    }
}

/// How messages name a host. A host name is not secret.
fn name(options: &PgConnectOptions) -> String {
    match options.get_socket() {
        Some(socket) => format!("{}:{}", socket.display(), options.get_port()),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    }
}

fn combined(mut errors: Vec<(String, Error)>) -> Error {
    let message =
        errors.iter().map(|(host, error)| format!("{host}: {error}")).collect::<Vec<_>>().join("; ");
    let all_read_only = errors.iter().all(|(_, error)| error.is_read_only());
    let error = if all_read_only { Error::read_only(message) } else { Error::unreachable(message) };
    match errors.pop() {
        Some((_, source)) => error.with_source(source),
        None => error,
    }
}

fn invalid_url() -> Error {
    Error::invalid(
        "url",
        "database URL: not a valid Postgres URL; use postgres://user:password@host:5432/database, \
         and separate several hosts by commas",
    )
}

/// Quotes nothing of the URL.
fn unencoded_password() -> Error {
    Error::invalid(
        "url",
        "database URL: an `@` follows a `?`, and the parameters are not known; if the password contains `?`, `#`, `/` \
         or `@`, write %3F, %23, %2F or %40",
    )
}

/// The parameters of a URL that the driver understands.
const DRIVER_PARAMETERS: [&str; 18] = [
    "application_name",
    "dbname",
    "host",
    "hostaddr",
    "options",
    "password",
    "port",
    "ssl-ca",
    "ssl-cert",
    "ssl-key",
    "ssl-mode",
    "ssl-root-cert",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "statement-cache-capacity",
    "user",
];
const SSL_MODES: [&str; 6] = ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"];

/// Refuses parameters that neither this crate nor the driver understands. The driver ignores
/// them, so a typo could mean a connection without TLS, or other tables.
fn check_parameters(url: &str) -> Result<()> {
    let query = url.split_once('?').map_or("", |(_, query)| query);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if name == "sslmode" || name == "ssl-mode" {
            if !SSL_MODES.contains(&value) {
                let modes = SSL_MODES.join(", ");
                let message = format!("database URL: {name} must be one of {modes}");
                return Err(Error::invalid("sslmode", message));
            }
        } else if !DRIVER_PARAMETERS.contains(&name) && !name.starts_with("options[") {
            // The name may be the rest of a password that contains `?`.
            if query.contains('@') {
                return Err(unencoded_password());
            }
            let name = &name[..name.floor_char_boundary(64)];
            let known = DRIVER_PARAMETERS.iter().chain(&OWN_PARAMETERS).copied();
            let meant = match nearest(name, known) {
                Some(nearest) => format!("did you mean `{nearest}`?"),
                None => "remove it".to_owned(),
            };
            let message = format!("database URL: the parameter `{name}` is unknown; {meant}");
            return Err(Error::invalid("url", message));
        }
    }
    Ok(())
}

/// One URL per host. The hosts are between `@` and the path, or in the parameters `host`
/// and `port`, which take precedence.
fn split_hosts(url: &str) -> Result<Vec<String>> {
    let (mut hosts, mut ports) = (None, None);
    let rest = take_parameter(url, "host", |value| {
        hosts = Some(value.to_owned());
        Ok(())
    })?;
    let rest = take_parameter(&rest, "port", |value| {
        ports = Some(value.to_owned());
        Ok(())
    })?;
    let (scheme, rest) = rest.split_once("://").ok_or_else(invalid_url)?;
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (user, listed) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
    let is_list = |text: &Option<String>| text.as_deref().is_some_and(|text| decoded(text).contains(','));
    if !listed.contains(',') && !is_list(&hosts) && !is_list(&ports) {
        return Ok(vec![url.to_owned()]);
    }
    let listed: Vec<(String, Option<String>)> = match &hosts {
        Some(hosts) => decoded(hosts).split(',').map(|host| (in_authority(host), None)).collect(),
        None => listed.split(',').map(split_port).collect(),
    };
    let ports: Vec<String> = ports
        .iter()
        .flat_map(|ports| decoded(ports).split(',').map(str::to_owned).collect::<Vec<_>>())
        .collect();
    if ports.len() > 1 && ports.len() != listed.len() {
        return Err(Error::invalid(
            "port",
            format!(
                "database URL: port lists {} ports for {} hosts; list one port, or one per host",
                ports.len(),
                listed.len()
            ),
        ));
    }
    let url_of = |(i, (host, own_port)): (usize, (String, Option<String>))| {
        if host.is_empty() {
            return Err(Error::invalid(
                "host",
                "database URL: a host in the list of hosts is empty; remove a comma",
            ));
        }
        let port = ports.get(if ports.len() == 1 { 0 } else { i }).cloned().or(own_port);
        let port = port.filter(|port| !port.is_empty()).map(|port| format!(":{port}")).unwrap_or_default();
        Ok(format!("{scheme}://{user}{host}{port}{path}"))
    };
    listed.into_iter().enumerate().map(url_of).collect()
}

/// Splits `host:port`; the host may be an IPv6 address in brackets.
fn split_port(host: &str) -> (String, Option<String>) {
    let address_end = host.rfind(']').map_or(0, |at| at + 1);
    match host[address_end..].find(':') {
        Some(at) => (host[..address_end + at].into(), Some(host[address_end + at + 1..].into())),
        None => (host.into(), None),
    }
}

/// A host of the parameter `host` in the form that a URL has before its path.
fn in_authority(host: &str) -> String {
    if host.starts_with('/') {
        host.replace('/', "%2F")
    } else if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]")
    } else {
        host.to_owned()
    }
}

/// Decodes the only escapes that a list of hosts or ports can need: commas, the slashes of
/// sockets and the colons of IPv6 addresses.
fn decoded(text: &str) -> String {
    let escapes = [("%2C", ","), ("%2c", ","), ("%2F", "/"), ("%2f", "/"), ("%3A", ":"), ("%3a", ":")];
    escapes.iter().fold(text.to_owned(), |text, (escape, character)| text.replace(escape, character))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(url: &str) -> Vec<String> {
        Connector::parse(url).expect(url).hosts.iter().map(name).collect()
    }

    #[test]
    fn unknown_parameters_are_refused_with_the_nearest_known_one() {
        for (parameter, expected) in [
            ("sslmod=require", "the parameter `sslmod` is unknown; did you mean `sslmode`?"),
            ("shema=jobs", "the parameter `shema` is unknown; did you mean `schema`?"),
            ("channel_binding=require", "the parameter `channel_binding` is unknown; remove it"),
            ("sslmode=yes", "sslmode must be one of disable, allow, prefer"),
            ("sslmode", "sslmode must be one of disable, allow, prefer"),
        ] {
            let error = Connector::parse(&format!("postgres://ada:s3@one/jobs?{parameter}")).unwrap_err();
            assert!(error.to_string().contains(expected), "{parameter}: {error}");
            assert!(!error.to_string().contains("s3"), "{error}");
        }
        for parameter in ["", "application_name=shop&sslmode=disable", "options[statement_timeout]=9s"] {
            assert_eq!(hosts(&format!("postgres://one/jobs?{parameter}")), ["one:5432"]);
        }
    }

    #[test]
    fn a_url_may_name_several_hosts() {
        for (url, expected) in [
            ("postgres://ada:s3@one:5001,two:5002/jobs", ["one:5001", "two:5002"]),
            ("postgres://ada@one,two:5002/jobs?sslmode=disable", ["one:5432", "two:5002"]),
            ("postgres://ada@[::1]:5001,[::2]:5002/jobs", ["[::1]:5001", "[::2]:5002"]),
            ("postgres://ada:s3@/jobs?host=one,two&port=5001,5002", ["one:5001", "two:5002"]),
            ("postgres:///jobs?host=one%2Ctwo&port=5001", ["one:5001", "two:5001"]),
            ("postgres://ada@ignored/jobs?port=5003&host=/tmp,::1", ["/tmp:5003", "[::1]:5003"]),
            ("postgres:///jobs?host=%3A%3A1%2c%3a%3a2&port=5001", ["[::1]:5001", "[::2]:5001"]),
        ] {
            assert_eq!(hosts(url), expected, "{url}");
        }
    }

    #[test]
    fn a_url_with_one_host_is_left_to_the_driver() {
        for url in ["postgres://ada:s3@one:5001/jobs", "postgres:///jobs?host=/tmp&port=5001", "postgres://"]
        {
            assert_eq!(split_hosts(url).unwrap(), [url]);
        }
    }

    #[test]
    fn several_hosts_keep_the_user_the_password_and_the_other_parameters() {
        let urls = split_hosts("postgres://a:p@x:1,y:2/db?sslmode=disable&application_name=q").unwrap();
        assert_eq!(urls[0], "postgres://a:p@x:1/db?sslmode=disable&application_name=q");
        assert_eq!(urls[1], "postgres://a:p@y:2/db?sslmode=disable&application_name=q");
    }

    #[test]
    fn errors_name_the_parameter_and_never_show_the_password() {
        for (url, field) in [
            ("postgres://a:s3cret@x,y/db?target_session_attrs=standby", "target_session_attrs"),
            ("postgres://a:s3cret@x,y,z/db?port=1,2", "port"),
            ("postgres://a:s3cret@x,,z/db", "host"),
            ("postgres://a:s3cret@x:one,y/db", "url"),
            ("postgres://a:x?s3cret@x/db", "url"),
            ("postgres://a:1?s3cret@x/db", "url"),
            ("postgres://a:1?s3cret&b@x,y/db?sslmode=disable", "url"),
            ("postgres://a:1?b=s3cret=@x/db", "url"),
        ] {
            let error = Connector::parse(url).unwrap_err();
            assert_eq!(error.field(), Some(field), "{error}");
            assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
        }
        assert!(Connector::parse("postgres://x/db?user=a&password=b@c").is_ok());
    }

    #[test]
    fn several_hosts_are_tried_for_one_that_accepts_writes() {
        let target = |url: &str| Connector::parse(url).unwrap().target;
        assert_eq!(target("postgres://one/db"), Target::Any);
        assert_eq!(target("postgres://one,two/db"), Target::ReadWrite);
        assert_eq!(target("postgres://one,two/db?target_session_attrs=any"), Target::Any);
        assert_eq!(target("postgres://one/db?target_session_attrs=primary"), Target::Primary);
    }

    #[test]
    fn a_host_is_avoided_once() {
        let connector = Connector::parse("postgres://one,two,three/db").unwrap();
        connector.avoid(0);
        connector.avoid(0);
        assert_eq!(connector.preferred.load(Ordering::Relaxed), 1);
        connector.avoid(2);
        assert_eq!(connector.preferred.load(Ordering::Relaxed), 1);
    }
}
