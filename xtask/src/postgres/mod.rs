//! Private Postgres clusters: the programs ([`binaries`]), the account they run
//! as ([`owner`]), a cluster in a directory of its own ([`cluster`]), and one
//! that cannot outlive us ([`temporary_cluster`]).
//!
//! Nothing here touches a cluster that it did not make.

mod binaries;
mod cluster;
mod owner;
mod temporary_cluster;

pub(crate) use binaries::Binaries;
pub(crate) use cluster::{Cluster, Tuning, random_hex};
pub(crate) use owner::Owner;
pub(crate) use temporary_cluster::{Location, TemporaryCluster};
