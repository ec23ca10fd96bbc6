//! How routes are put together: each under a scope, which guards it and is
//! written into the OpenAPI document in one go.

use std::sync::Arc;

use utoipa::openapi::path::Operation;
use utoipa::openapi::security::SecurityRequirement;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use super::Server;
use super::auth::{Guard, RequireScope};
use crate::store::Scope;

/// The name of the token scheme in the OpenAPI document.
pub(super) const TOKEN: &str = "token";

/// Routes so far.
pub(super) struct RouteTable {
    guard: Arc<Guard>,
    router: OpenApiRouter<Server>,
}

impl RouteTable {
    pub(super) fn new(guard: Arc<Guard>, document: utoipa::openapi::OpenApi) -> Self {
        RouteTable { guard, router: OpenApiRouter::with_openapi(document) }
    }

    /// Routes for who has this scope.
    pub(super) fn scoped(
        self,
        scope: Scope,
        routes: impl IntoIterator<Item = UtoipaMethodRouter<Server>>,
    ) -> Self {
        let mut group = OpenApiRouter::new();
        for route in routes {
            group = group.routes(route);
        }
        for operation in operations(group.get_openapi_mut()) {
            let token = SecurityRequirement::new(TOKEN, [scope.as_str()]);
            // An open server says that it does without.
            let none = (!self.guard.requires_tokens()).then(SecurityRequirement::default);
            operation.security = Some(none.into_iter().chain([token]).collect());
        }
        let guarded = group.route_layer(RequireScope { guard: self.guard.clone(), scope });
        RouteTable { router: self.router.merge(guarded), ..self }
    }

    /// Routes for everybody. Each is a decision of its own.
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

    pub(super) fn finish(self) -> (axum::Router<Server>, utoipa::openapi::OpenApi) {
        self.router.split_for_parts()
    }
}

pub(super) fn operations(document: &mut utoipa::openapi::OpenApi) -> impl Iterator<Item = &mut Operation> {
    document.paths.paths.values_mut().flat_map(|item| {
        let methods = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        methods.into_iter().flatten()
    })
}
