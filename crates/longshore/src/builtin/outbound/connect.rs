//! How the client connects: it resolves a name and checks the addresses in one step,
//! and its TLS trusts the root certificates of the system.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use rustls::{ClientConfig, RootCertStore};

use super::rules::Rules;
use crate::error::{Error, Result};

/// Resolves a name to addresses. Tests replace it.
pub(super) type Lookup = dyn Fn(String) -> LookupFuture + Send + Sync;
pub(super) type LookupFuture = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;

pub(super) fn system_lookup() -> Box<Lookup> {
    Box::new(|name: String| -> LookupFuture {
        Box::pin(async move {
            let addrs = tokio::net::lookup_host((name.as_str(), 0)).await?;
            Ok(addrs.map(|addr| addr.ip()).collect())
        })
    })
}

/// The client's only resolver. The client connects to the very addresses that passed
/// the rules, so a name that later resolves to another address (DNS rebinding) cannot
/// get around them.
pub(super) struct Resolver {
    pub(super) rules: Arc<Rules>,
    pub(super) lookup: Box<Lookup>,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let lookup = (self.lookup)(name.as_str().to_owned());
        let rules = self.rules.clone();
        Box::pin(async move {
            let addrs = rules.filter(name.as_str(), lookup.await?)?;
            // The client replaces port 0 by the URL's port.
            let addrs: Addrs = Box::new(addrs.into_iter().map(|addr| SocketAddr::new(addr, 0)));
            Ok(addrs)
        })
    }
}

/// TLS with the system's root certificates. If there are none, jobs that make no
/// HTTPS calls still run; the others fail with an unknown issuer.
pub fn tls() -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if added == 0 {
        tracing::warn!("this machine has no root certificates, so every HTTPS call will fail; install them");
    }
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::internal(format!("cannot set up TLS: {error}")))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}
