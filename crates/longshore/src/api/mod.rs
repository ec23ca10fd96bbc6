//! The HTTP API: a router to mount in your own server, and a server that runs it.
//!
//! Owns what is specific to HTTP: routes and scopes, request parsing, responses,
//! errors, and the OpenAPI document. Every queue operation goes through [`Client`];
//! nothing here calls the store. Rules about jobs are in `lifecycle` and `enqueue`.
//!
//! ```no_run
//! # #[tokio::main] async fn main() -> longshore::Result<()> {
//! use longshore::{Client, api::Api};
//!
//! let client = Client::connect("sqlite:queue.db").await?;
//! client.migrate().await?;
//! let app: axum::Router = axum::Router::new().nest("/queue", Api::new(client).router());
//! # Ok(()) }
//! ```

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use utoipa_axum::routes;

use crate::client::recovery::SweepOptions;
use crate::client::{Client, UnknownKinds, job_metrics};
use crate::store::Scope;

mod admission;
mod attempt_metrics;
pub(crate) mod auth;
mod batch;
mod bodies;
mod bulk;
mod connections;
mod cron;
mod enqueue;
mod events;
pub(crate) mod explain;
pub(crate) mod extract;
mod failures;
mod flows;
mod groups;
mod health;
mod job_ends;
mod jobs;
mod kinds;
mod leases;
pub(crate) mod middleware;
mod openapi;
mod operate;
mod operations;
pub(crate) mod problem;
mod refusals;
mod request_metrics;
mod returned;
pub(crate) mod route_table;
mod schemas;
mod serve;
pub(crate) mod session;
mod start_page;
pub(crate) mod stats;
mod steps;
#[cfg(feature = "swagger")]
mod swagger;
mod timed_stream;
mod token_lookup;
mod tokens;
pub(crate) mod url_parameters;
mod waiting_calls;

#[cfg(feature = "dashboard")]
pub use crate::dashboard::Dashboard;
pub use admission::Admission;
pub use auth::{Access, hash_token};
pub use bodies::BodyLimits;
pub use operations::Operations;
pub use problem::Cause;
pub use serve::{Limits, serve};

use auth::Guard;
use route_table::RouteTable;

/// The settings of the API. [`router`](Api::router) turns them into a router.
pub struct Api {
    client: Client,
    access: Access,
    admission: Admission,
    hosts: Option<Vec<String>>,
    metrics: Option<Arc<dyn Fn() -> String + Send + Sync>>,
    public: Vec<Public>,
    timeout: Duration,
    bodies: BodyLimits,
    waiting_calls: usize,
    sweep: SweepOptions,
    operations: Operations,
    ending: Option<tokio::sync::watch::Receiver<bool>>,
    #[cfg(feature = "dashboard")]
    dashboard: Option<Dashboard>,
}

/// What can be read without a token, in addition to `/health`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Public {
    /// `/metrics`.
    Metrics,
    /// `/docs` and the OpenAPI document.
    Docs,
}

impl Api {
    /// An API that requires no token and refuses jobs of unknown kinds.
    pub fn new(client: Client) -> Self {
        Api {
            client: client.unknown_kinds(UnknownKinds::Refuse),
            access: Access::Open,
            admission: Admission::default(),
            hosts: None,
            metrics: None,
            public: Vec::new(),
            timeout: Duration::from_secs(30),
            bodies: BodyLimits::default(),
            waiting_calls: waiting_calls::DEFAULT_LIMIT,
            sweep: SweepOptions::default(),
            operations: Operations::default(),
            ending: None,
            #[cfg(feature = "dashboard")]
            dashboard: None,
        }
    }

    /// Sets who may use the API.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Limits how much the API accepts. Without this there are no limits.
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// Sets the host names that requests may use; others are refused. This stops
    /// DNS rebinding: a foreign web page that reaches a loopback server under its
    /// own name.
    pub fn hosts<S: Into<String>>(mut self, hosts: impl IntoIterator<Item = S>) -> Self {
        self.hosts = Some(hosts.into_iter().map(Into::into).collect());
        self
    }

    /// Checks the payloads of kinds that are built into this program.
    pub fn check(
        mut self,
        check: impl Fn(&str, &str) -> Option<Result<(), String>> + Send + Sync + 'static,
    ) -> Self {
        self.client = self.client.check_payloads(check);
        self
    }

    /// Sets what happens to new jobs of a kind that is not registered.
    pub fn unknown_kinds(mut self, unknown: UnknownKinds) -> Self {
        self.client = self.client.unknown_kinds(unknown);
        self
    }

    /// Sets what `/metrics` returns. Without this there is no such route.
    pub fn metrics(mut self, render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.metrics = Some(Arc::new(render));
        self
    }

    /// Makes this readable without a token.
    pub fn public(mut self, part: Public) -> Self {
        self.public.push(part);
        self
    }

    /// Sets how long a request may take; 30 s by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Limits how slowly the bodies of requests may arrive, and how many bytes of them are kept at once.
    ///
    /// Above the limit, clients with fewer bytes come first. This needs the clients'
    /// addresses. [`serve`] adds them to requests; in your own server, use
    /// `into_make_service_with_connect_info::<SocketAddr>()`.
    pub fn bodies(mut self, limits: BodyLimits) -> Self {
        self.bodies = limits;
        self
    }

    /// Sets how many calls may wait at once for work, for the end of a job, or as a stream; 512 by default. One
    /// token may have half of them, each of two tokens a third, and so on. A call above the limit returns at once, with the header `Retry-After`. Use at most half of
    /// [`Limits::connections`], because each of them occupies a connection.
    pub fn waiting_calls(mut self, limit: usize) -> Self {
        self.waiting_calls = limit;
        self
    }

    /// Sets the defaults of `POST /sweep`, such as the flags of resilient jobs. Use the same as in
    /// the workers.
    pub fn sweep(mut self, options: SweepOptions) -> Self {
        self.sweep = options;
        self
    }

    /// Sets who executes operations.
    pub fn operations(mut self, operations: Operations) -> Self {
        self.operations = operations;
        self
    }

    /// Once this value is true, requests that wait for work or stream events return
    /// at once, and operations are left to other processes, so that the server can stop.
    pub fn ending(mut self, ending: tokio::sync::watch::Receiver<bool>) -> Self {
        self.ending = Some(ending);
        self
    }

    /// Adds the dashboard: pages under `/ui`. A browser that opens `/` is sent there.
    #[cfg(feature = "dashboard")]
    pub fn dashboard(mut self, dashboard: Dashboard) -> Self {
        self.dashboard = Some(dashboard);
        self
    }

    /// Builds the router, to serve or to nest in another one.
    pub fn router(self) -> Router {
        job_metrics::describe();
        auth::register_counters();
        refusals::register_counters();
        let limiter = Arc::new(admission::Limiter::new(self.admission.clone()));
        let guard = Guard::new(self.access, self.client.clone(), limiter.clone());
        let (routes, document) = self.route_table(guard.clone()).finish();
        let layer = middleware::RequestLayer::new(self.hosts, self.timeout, self.bodies);
        let server = Server(Arc::new(Shared {
            client: self.client,
            metrics: self.metrics,
            document: openapi::render(document),
            sessions: leases::Sessions::default(),
            hub: events::Hub::default(),
            kinds: attempt_metrics::KnownKinds::default(),
            job_ends: job_ends::JobEnds::default(),
            guard,
            limiter,
            waiting_calls: waiting_calls::WaitingCalls::new(self.waiting_calls),
            announcements: leases::Announcements::default(),
            sweep: self.sweep,
            operations: operations::Executor::new(self.operations),
            ending: self.ending,
            timeout: self.timeout,
            #[cfg(feature = "dashboard")]
            dashboard: self.dashboard.map(crate::dashboard::State::new),
        }));
        // Without a runtime, the first request about operations starts it.
        if tokio::runtime::Handle::try_current().is_ok() {
            server.start_executor();
        }
        routes
            .fallback(middleware::not_found)
            .method_not_allowed_fallback(middleware::method_not_allowed)
            .with_state(server)
            .layer(layer)
    }

    /// The page at `/`. It sends browsers to the dashboard, which asks for a token if it needs one.
    fn redirecting(&self, page: axum::routing::MethodRouter<Server>) -> axum::routing::MethodRouter<Server> {
        #[cfg(feature = "dashboard")]
        if let Some(dashboard) = &self.dashboard {
            return crate::dashboard::redirect_browsers(page, dashboard);
        }
        page
    }

    /// Every route, under the scope that it requires.
    fn route_table(&self, guard: Arc<Guard>) -> RouteTable {
        let scope = |part: Public| (!self.public.contains(&part)).then_some(Scope::Read);
        let mut table = RouteTable::new(guard, openapi::document())
            .public([routes!(health::health), routes!(session::log_in, session::get, session::log_out)])
            .scoped(
                Scope::Enqueue,
                [
                    routes!(enqueue::enqueue),
                    routes!(batch::enqueue),
                    routes!(flows::enqueue),
                    routes!(flows::add),
                    routes!(flows::seal),
                    routes!(steps::emit),
                ],
            )
            .scoped(
                Scope::Read,
                [
                    routes!(jobs::list),
                    routes!(jobs::get),
                    routes!(explain::explain),
                    routes!(flows::list),
                    routes!(flows::get),
                    routes!(flows::tasks),
                    routes!(operations::list),
                    routes!(operations::get),
                    routes!(stats::stats),
                    routes!(events::events),
                    routes!(steps::get),
                    routes!(steps::steps),
                    routes!(operate::queues),
                    routes!(groups::find),
                    routes!(groups::list),
                    routes!(groups::get),
                    routes!(operate::workers),
                    routes!(operate::dead_letters),
                    routes!(failures::list),
                    routes!(failures::get),
                    routes!(cron::list),
                    routes!(cron::get),
                    routes!(kinds::list),
                ],
            )
            .scoped(
                Scope::Operate,
                [
                    routes!(jobs::edit),
                    routes!(bulk::bulk),
                    routes!(jobs::delete),
                    routes!(jobs::cancel),
                    routes!(jobs::retry),
                    routes!(flows::cancel),
                    routes!(flows::retry),
                    routes!(operations::start),
                    routes!(operations::stop),
                    routes!(operations::resume),
                    routes!(operate::pause),
                    routes!(operate::resume),
                    routes!(operate::limit),
                    routes!(groups::change),
                    routes!(groups::rate),
                    routes!(groups::defaults),
                    routes!(operate::sweep),
                    routes!(operate::redrive_all),
                    routes!(operate::redrive),
                    routes!(cron::put),
                    routes!(cron::remove),
                    routes!(cron::pause),
                    routes!(cron::resume),
                    routes!(cron::run),
                ],
            )
            .scoped(
                Scope::Admin,
                [routes!(kinds::put), routes!(kinds::remove), routes!(tokens::list), routes!(tokens::revoke)],
            )
            .scoped(
                Scope::Work,
                [
                    routes!(leases::lease),
                    routes!(leases::renew),
                    routes!(leases::settle),
                    routes!(leases::save_steps),
                    routes!(leases::journal),
                    routes!(leases::wait),
                    routes!(leases::inputs),
                    routes!(leases::spawn),
                    routes!(leases::join),
                    routes!(leases::sign_off),
                ],
            );
        let (schemas, paths, start_page) = routes!(start_page::start_page);
        table = match scope(Public::Docs) {
            Some(scope) => table.scoped(scope, openapi::routes()).scoped_within(
                scope,
                [(schemas, paths, start_page)],
                |page| self.redirecting(page),
            ),
            None => table.public(openapi::routes()).public([(schemas, paths, self.redirecting(start_page))]),
        };
        #[cfg(feature = "dashboard")]
        if let Some(dashboard) = &self.dashboard {
            table = crate::dashboard::add_routes(table, dashboard);
        }
        if self.metrics.is_some() {
            table = match scope(Public::Metrics) {
                Some(scope) => table.scoped(scope, [routes!(health::metrics)]),
                None => table.public([routes!(health::metrics)]),
            };
        }
        table
    }
}

/// The state that handlers share.
#[derive(Clone)]
pub(crate) struct Server(Arc<Shared>);

pub(crate) struct Shared {
    pub(crate) client: Client,
    metrics: Option<Arc<dyn Fn() -> String + Send + Sync>>,
    document: String,
    sessions: leases::Sessions,
    hub: events::Hub,
    kinds: attempt_metrics::KnownKinds,
    job_ends: job_ends::JobEnds,
    pub(crate) guard: Arc<Guard>,
    limiter: Arc<admission::Limiter>,
    waiting_calls: Arc<waiting_calls::WaitingCalls>,
    announcements: leases::Announcements,
    sweep: SweepOptions,
    operations: operations::Executor,
    ending: Option<tokio::sync::watch::Receiver<bool>>,
    timeout: Duration,
    #[cfg(feature = "dashboard")]
    pub(crate) dashboard: Option<crate::dashboard::State>,
}

/// The longest time that a call waits for work or for the end of a job.
const MAX_WAIT: Duration = Duration::from_secs(20);

impl Server {
    /// The longest time that a call of this server waits. It leaves enough of the request timeout for the
    /// statements of the call.
    fn max_wait(&self) -> Duration {
        MAX_WAIT.min(self.timeout * 2 / 3)
    }

    /// Waits until the server starts to stop.
    async fn stopping(&self) {
        reached_end(self.ending.clone()).await;
    }
}

/// Waits until this value is true.
async fn reached_end(ending: Option<tokio::sync::watch::Receiver<bool>>) {
    if let Some(mut ending) = ending
        && ending.wait_for(|ending| *ending).await.is_ok()
    {
        return;
    }
    // The sender is gone or was never set, so nothing can stop the server.
    std::future::pending().await
}

impl std::ops::Deref for Server {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}
