//! How the client connects: resolving a name and judging its addresses are one
//! step, and TLS trusts the roots of the system.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use rustls::{ClientConfig, RootCertStore};

use super::rules::Rules;
use crate::failure::{self, Code};

pub(super) type Found = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;
pub(super) type Lookup = dyn Fn(String) -> Found + Send + Sync;

pub(super) fn system_lookup() -> Box<Lookup> {
    Box::new(|name: String| -> Found {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            Ok(found.map(|addr| addr.ip()).collect())
        })
    })
}

/// The one resolver that the client connects by. What it lets through is what
/// is connected to, so a name that changes its mind gains nothing.
pub(super) struct Resolver {
    pub(super) rules: Arc<Rules>,
    pub(super) lookup: Box<Lookup>,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let found = (self.lookup)(name.as_str().to_owned());
        let rules = self.rules.clone();
        Box::pin(async move {
            let addrs = rules.filter(name.as_str(), found.await?)?;
            // The client puts in the port of the URL.
            let addrs: Addrs = Box::new(addrs.into_iter().map(|addr| SocketAddr::new(addr, 0)));
            Ok(addrs)
        })
    }
}

/// The system's roots. None at all is no reason to refuse the jobs that call
/// nobody; who does call will hear of an unknown issuer.
pub(crate) fn tls() -> Result<ClientConfig, failure::Failure> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if added == 0 {
        tracing::warn!("this machine has no root certificates, so no https URL can be called");
    }
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| failure::Failure::new(Code::Problem, format_args!("TLS does not start: {error}")))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}
