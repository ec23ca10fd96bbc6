//! Private Postgres clusters: the server programs ([`binaries`]), the account that
//! they run as ([`owner`]), a cluster in its own directory ([`cluster`]), and a
//! cluster that is removed when this program ends ([`temporary_cluster`]).
//!
//! Nothing here touches a cluster that it did not create.

mod binaries;
mod cluster;
mod owner;
mod temporary_cluster;

pub(crate) use binaries::Binaries;
pub(crate) use cluster::{Cluster, Tuning, random_hex};
pub(crate) use owner::Owner;
pub(crate) use temporary_cluster::{Location, TemporaryCluster};
