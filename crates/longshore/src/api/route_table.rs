//! Assembles the routes. Every route is added either under a scope or as public; the
//! same call guards the route and writes the scope into the OpenAPI document. A guarded route
//! refuses URL parameters that the document does not name.

use std::sync::Arc;

use axum::routing::MethodRouter;
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::SecurityRequirement;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use super::Server;
use super::auth::{Guard, RequireScope};
use super::url_parameters::UrlParameters;
use crate::store::Scope;

/// The name of the token scheme in the OpenAPI document.
pub(super) const TOKEN: &str = "token";

/// The routes added so far.
pub(crate) struct RouteTable {
    guard: Arc<Guard>,
    router: OpenApiRouter<Server>,
}

impl RouteTable {
    pub(super) fn new(guard: Arc<Guard>, document: utoipa::openapi::OpenApi) -> Self {
        RouteTable { guard, router: OpenApiRouter::with_openapi(document) }
    }

    /// Adds routes that require this scope.
    pub(super) fn scoped(
        self,
        scope: Scope,
        routes: impl IntoIterator<Item = UtoipaMethodRouter<Server>>,
    ) -> Self {
        self.scoped_within(scope, routes, |methods| methods)
    }

    /// As [`scoped`](Self::scoped). `around` adds what also applies to requests that the scope check refuses.
    pub(super) fn scoped_within(
        self,
        scope: Scope,
        routes: impl IntoIterator<Item = UtoipaMethodRouter<Server>>,
        around: impl Fn(MethodRouter<Server>) -> MethodRouter<Server>,
    ) -> Self {
        let mut group = OpenApiRouter::new();
        for (schemas, paths, methods) in routes {
            let parameters = UrlParameters::of(&paths);
            let guarded = methods.layer(RequireScope { guard: self.guard.clone(), scope, parameters });
            group = group.routes((schemas, paths, around(guarded)));
        }
        for operation in operations(group.get_openapi_mut()) {
            let token = SecurityRequirement::new(TOKEN, [scope.as_str()]);
            // An open server also accepts requests without a token.
            let none = (!self.guard.requires_tokens()).then(SecurityRequirement::default);
            operation.security = Some(none.into_iter().chain([token]).collect());
        }
        RouteTable { router: self.router.merge(group), ..self }
    }

    /// Adds routes that require no token.
    pub(super) fn public(self, routes: impl IntoIterator<Item = UtoipaMethodRouter<Server>>) -> Self {
        let mut group = OpenApiRouter::new();
        for route in routes {
            group = group.routes(route);
        }
        for operation in operations(group.get_openapi_mut()) {
            operation.security = Some(Vec::new());
        }
        RouteTable { router: self.router.merge(group), ..self }
    }

    /// Adds a page for people, which is not part of the OpenAPI document. `around` adds what also
    /// applies to requests that the scope check refuses.
    #[cfg(feature = "dashboard")]
    pub(crate) fn page(
        self,
        path: &str,
        scope: Option<Scope>,
        page: MethodRouter<Server>,
        around: impl FnOnce(MethodRouter<Server>) -> MethodRouter<Server>,
    ) -> Self {
        let guarded = match scope {
            Some(scope) => {
                // People may add parameters of their own, for example to bypass a cache.
                let parameters = UrlParameters::of(&utoipa::openapi::path::Paths::new());
                page.layer(RequireScope { guard: self.guard.clone(), scope, parameters })
            }
            None => page,
        };
        RouteTable { router: self.router.route(path, around(guarded)), ..self }
    }

    pub(super) fn finish(self) -> (axum::Router<Server>, utoipa::openapi::OpenApi) {
        self.router.split_for_parts()
    }
}

/// Every operation of an OpenAPI document.
pub(super) fn operations(document: &mut utoipa::openapi::OpenApi) -> impl Iterator<Item = &mut Operation> {
    document.paths.paths.values_mut().flat_map(|item| {
        let methods = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        methods.into_iter().flatten()
    })
}
