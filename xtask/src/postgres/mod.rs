//! Private Postgres clusters: the programs ([`binaries`]), the account they run
//! as ([`owner`]), a cluster in a directory of its own ([`cluster`]), and one
//! that cannot outlive us ([`throw_away`]).
//!
//! Nothing here touches a cluster that it did not make.

mod binaries;
mod cluster;
mod owner;
mod throw_away;

pub(crate) use binaries::Binaries;
pub(crate) use cluster::{Cluster, Tuning, random_hex};
pub(crate) use owner::Owner;
pub(crate) use throw_away::{Scratch, ThrowAway};
