//! The commands that run until a signal stops them: `longshore worker`,
//! `longshore serve` and `longshore dev`. Owns how each is put together from the
//! library's worker and API. Logs and metrics are set up in
//! [`telemetry`](super::telemetry).

use std::net::SocketAddr;
use std::path::Path;

use longshore::api::{self, Access, Admission, Api, BodyLimits, Dashboard};
use longshore::worker::{Builder, RecoverySettings, Settings, Signals, Summary, Worker};
use longshore::{Client, Interruption, SweepOptions, SweepScope, UnknownKinds, builtin};
use tokio::net::{TcpListener, TcpSocket};
use tracing::Level;

use super::telemetry::{self, JobLines, by_flag};
use crate::args::{self, Auth, Listen, Redaction};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Out, quote};
use crate::traces::Traces;

/// Claims and runs jobs until a signal, or until nothing is due with `--drain`.
pub(super) async fn worker(
    client: Client,
    args: args::Worker,
    traces: Option<&Traces>,
    out: &Out,
) -> Outcome {
    telemetry::start_logging(&args.work.logging, JobLines::Fields, traces)?;
    let client = client.log_successes_at(Level::INFO);
    let settings = args.work.settings();
    let builder = Worker::builder(client.clone()).settings(settings.clone());
    let builder = with_built_in_kinds(builder, args.work.simulate, &args.work.builtin.settings())?;
    let worker = builder.build().map_err(by_flag)?;
    super::require_durability(&client).await?;
    if let Some((addr, port)) = args.metrics_addr() {
        telemetry::serve_metrics(addr, port).await?;
    }
    tracing::info!(
        queues = settings.queues.join(","),
        concurrency = settings.concurrency,
        simulate = args.work.simulate,
        "worker starting"
    );
    let summary = if args.drain { worker.run_drain().await? } else { worker.run().await? };
    print_summary(&summary, out);
    Ok(Code::Done)
}

fn print_summary(summary: &Summary, out: &Out) {
    if out.json {
        return out.document(summary);
    }
    let Summary { succeeded, retrying, failed_permanent, cancelled, put_back, .. } = summary;
    out.line(format_args!(
        "succeeded {succeeded}, retrying {retrying}, failed_permanent {failed_permanent}, \
         cancelled {cancelled}, released {put_back}"
    ));
}

/// Adds the handlers of the built-in kinds, real or simulated.
fn with_built_in_kinds(
    builder: Builder,
    simulate: bool,
    settings: &builtin::Settings,
) -> Result<Builder, Failure> {
    if simulate {
        Ok(builtin::simulate(builder))
    } else {
        builtin::register(builder, settings).map_err(by_flag)
    }
}

/// Runs the API, upkeep and a worker in one process on SQLite.
pub(super) async fn dev(args: args::Dev, traces: Option<&Traces>, out: &Out) -> Outcome {
    telemetry::start_logging(&args.logging, JobLines::Short, traces)?;
    let (client, url) = open(&args.data_dir).await?;
    let client = client.log_successes_at(Level::INFO);
    let settings = Settings {
        queues: args.queues.clone(),
        shutdown_grace: args.shutdown_grace,
        recovery: args.recovery.settings(),
        ..Settings::default()
    };
    let sweep = sweep_options(&settings);
    let builder = Worker::builder(client.clone()).settings(settings);
    let builtin = args.builtin.settings();
    let builtin = builtin::Settings {
        // Absolute paths stay as they are.
        outbox: args.data_dir.join(&builtin.outbox),
        image_output: args.data_dir.join(&builtin.image_output),
        ..builtin
    };
    let builder = with_built_in_kinds(builder, args.simulate, &builtin)?;
    let listener = bind(&args.listen).await?;
    greet(&listener, &args.data_dir, &url, out)?;
    run_server(client, builder.build().map_err(by_flag)?, listener, &args.listen, sweep).await
}

/// Creates the data folder and the database in it. Also returns the URL of the database, which
/// is valid in every folder.
async fn open(folder: &Path) -> Result<(Client, String), Failure> {
    let unusable = |error: &dyn std::fmt::Display| {
        Failure::new(
            Code::Problem,
            format_args!(
                "cannot use the data folder `{}`: {error}; name another with --data-dir",
                folder.display()
            ),
        )
    };
    let mut folders = std::fs::DirBuilder::new();
    // Only the owner may read payloads.
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut folders, 0o700);
    folders.recursive(true).create(folder).map_err(|error| unusable(&error))?;
    let file = std::path::absolute(folder.join("queue.db")).map_err(|error| unusable(&error))?;
    let file = file.to_str().ok_or_else(|| unusable(&"its name is not UTF-8"))?;
    let url = format!("sqlite:{file}");
    let client = Client::connect(&url).await?;
    client.migrate().await?;
    Ok((client, url))
}

/// Prints the address and some commands to try.
fn greet(listener: &TcpListener, folder: &Path, database: &str, out: &Out) -> Result<(), Failure> {
    let address = local_address(listener)?;
    if out.json {
        out.document(&serde_json::json!({
            "url": format!("http://{address}"),
            "data_dir": folder,
            "database_url": database,
        }));
        return Ok(());
    }
    let job = r#"{"kind":"summarize_text","payload":{"text":"Ships bring goods. Longshoremen unload ships. Nothing is lost.","max_words":5}}"#;
    let lines = [
        format!("Longshore is listening on http://{address}"),
        format!("  dashboard http://{address}/ui"),
        format!("  API       http://{address}/docs"),
        format!("  data      {}", folder.display()),
        format!("  database  {database}"),
        String::new(),
        "Try it:".into(),
        format!("  curl -s http://{address}/jobs -H 'content-type: application/json' -d '{job}'"),
        format!("  curl -s 'http://{address}/jobs?limit=1'"),
        format!("  longshore jobs list --server http://{address}"),
        String::new(),
        "For the other commands, in another terminal:".into(),
        format!("  export DATABASE_URL={}", quote(database)),
        String::new(),
        "Press Ctrl-C to stop.".into(),
    ];
    lines.iter().for_each(|line| out.line(line));
    Ok(())
}

/// Runs the API and upkeep, and a worker with `--with-worker`.
pub(super) async fn serve(client: Client, args: args::Serve, traces: Option<&Traces>, out: &Out) -> Outcome {
    telemetry::start_logging(&args.work.logging, JobLines::Fields, traces)?;
    let client = client.log_successes_at(Level::INFO);
    if args.migrate {
        client.migrate().await?;
    }
    super::require_schema(&client).await?;
    let settings = args.work.settings();
    let sweep = sweep_options(&settings);
    let builder = Worker::builder(client.clone());
    let builder = if args.with_worker {
        with_built_in_kinds(builder.settings(settings), args.work.simulate, &args.work.builtin.settings())?
    } else {
        builder.upkeep_only().settings(Settings { name_prefix: "server".into(), concurrency: 1, ..settings })
    };
    let worker = builder.build().map_err(by_flag)?;
    let listener = bind(&args.listen).await?;
    super::require_durability(&client).await?;
    let address = local_address(&listener)?;
    if out.json {
        out.document(&serde_json::json!({ "url": format!("http://{address}") }));
    } else {
        out.line(format_args!("listening on http://{address}"));
    }
    run_server(client, worker, listener, &args.listen, sweep).await
}

/// The dashboard, which also shows the settings of the server.
fn dashboard(listen: &Listen) -> Dashboard {
    let limit = |limit: Option<u32>| limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
    let list = |items: &[String]| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
    let mut dashboard = Dashboard::new().configuration([
        ("bind", listen.bind.to_string()),
        ("host", list(&listen.hosts)),
        ("allow-unknown-kinds", listen.allow_unknown_kinds.to_string()),
        ("request-timeout", format!("{:?}", listen.request_timeout)),
        ("max-connections", listen.max_connections.to_string()),
        ("rate-limit", limit(listen.rate_limit.0)),
        ("queue-depth-limit", limit(listen.queue_depth_limit.0)),
    ]);
    for Redaction { kind, path } in &listen.redact {
        dashboard = dashboard.redact(kind, [path]);
    }
    if listen.hide_payloads {
        dashboard = dashboard.hide_payloads();
    }
    match &listen.base_path {
        Some(base) => dashboard.base_path(base),
        None => dashboard,
    }
}

/// The defaults of `POST /sweep`: those of the server's own sweeper.
fn sweep_options(settings: &Settings) -> SweepOptions {
    let RecoverySettings { delay, max_interruptions, resilient_flags, resilient_factor, .. } =
        settings.recovery.clone();
    SweepOptions {
        scope: SweepScope {
            orphan_after: settings.stale_after,
            resilient_flags,
            resilient_factor,
            ..SweepScope::default()
        },
        interruption: Interruption { delay, max_interruptions },
        ..SweepOptions::default()
    }
}

/// Runs the API and the worker until a signal, then stops both.
async fn run_server(
    client: Client,
    worker: Worker,
    listener: TcpListener,
    listen: &Listen,
    sweep: SweepOptions,
) -> Outcome {
    let metrics = telemetry::record_metrics()?;
    let mut api = Api::new(client)
        .access(match listen.auth {
            Auth::Off => Access::Open,
            Auth::Tokens => Access::Tokens,
        })
        .unknown_kinds(if listen.allow_unknown_kinds { UnknownKinds::Allow } else { UnknownKinds::Refuse })
        .admission(Admission {
            requests_per_second: listen.rate_limit.0,
            waiting_jobs: listen.queue_depth_limit.0.map(u64::from),
        })
        .check(builtin::check_payload)
        .sweep(sweep)
        .timeout(listen.request_timeout)
        .bodies(BodyLimits {
            timeout: listen.body_timeout,
            in_total: listen.max_body_bytes,
            ..BodyLimits::default()
        })
        // The other half is for calls that do not wait.
        .waiting_calls(listen.max_connections / 2)
        .metrics(metrics)
        .dashboard(dashboard(listen));
    for public in &listen.public {
        api = api.public(match public {
            args::Public::Metrics => api::Public::Metrics,
            args::Public::Docs => api::Public::Docs,
        });
    }
    if let Some(hosts) = hosts(&listener, listen)? {
        api = api.hosts(hosts);
    }
    let stop = tokio::sync::watch::Sender::new(false);
    let api = api.ending(stop.subscribe());
    let limits = api::Limits {
        connections: listen.max_connections,
        trusted_proxies: listen.trusted_proxies.clone(),
        ..api::Limits::default()
    };
    let signals = Signals::new()?;
    let running = worker.start().await?;
    let mut stopped = stop.subscribe();
    let server = tokio::spawn(api::serve(listener, api.router(), limits, async move {
        let _ = stopped.wait_for(|stopped| *stopped).await;
    }));
    let stopping = signals.stop(running.stopper(), move || {
        stop.send_replace(true);
    });
    // Completes on the second signal, which interrupts requests that are still open.
    let second_signal = tokio::spawn(stopping);
    running.wait().await;
    tokio::select! {
        served = server => match served {
            Ok(()) => Ok(Code::Done),
            Err(error) => Err(Failure::new(Code::Problem, format_args!("the server task panicked: {error}"))),
        },
        _ = second_signal => Ok(Code::Done),
    }
}

/// Opens the listening socket. Refuses an address that other machines can reach unless
/// tokens are required.
async fn bind(listen: &Listen) -> Result<TcpListener, Failure> {
    let address = listen.bind;
    if !address.ip().is_loopback() && listen.auth == Auth::Off {
        return Err(Failure::usage(format_args!(
            "--bind {address}: other machines could use the API without a token; \
             add --auth tokens (LONGSHORE_AUTH=tokens) and create a token with `longshore tokens create`, \
             or bind to 127.0.0.1"
        )));
    }
    listen_on(address).map_err(|error| {
        Failure::new(
            Code::Problem,
            format_args!(
                "cannot listen on {address}: {error}; choose another address with --bind (API_BIND_ADDR)"
            ),
        )
    })
}

/// How many new connections the kernel keeps until they are accepted. A client whose connection does not fit
/// tries again after a second. With the 128 of `TcpListener::bind`, 500 clients that reconnect keep others out.
const BACKLOG: u32 = 4096;

fn listen_on(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn local_address(listener: &TcpListener) -> Result<SocketAddr, Failure> {
    listener.local_addr().map_err(|error| {
        Failure::new(Code::Problem, format_args!("cannot read the listener's address: {error}"))
    })
}

/// The host names that requests may use; `None` allows any. On loopback only the server's
/// own names are allowed. Otherwise a web page could reach the server through a host name
/// that resolves to loopback (DNS rebinding).
fn hosts(listener: &TcpListener, listen: &Listen) -> Result<Option<Vec<String>>, Failure> {
    let address = local_address(listener)?;
    if listen.hosts.iter().any(|host| host == "*") {
        return Ok(None);
    }
    if !address.ip().is_loopback() && listen.hosts.is_empty() {
        return Ok(None);
    }
    let own = match address.ip() {
        std::net::IpAddr::V4(ip) => ip.to_string(),
        std::net::IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let loopback = ["localhost", "127.0.0.1", "[::1]"].map(str::to_owned);
    Ok(Some(loopback.into_iter().chain([own]).chain(listen.hosts.iter().cloned()).collect()))
}
