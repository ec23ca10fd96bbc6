//! The HTTP API.

mod access;
mod announced_kinds;
mod auth;
mod awaited_ends;
mod bodies;
mod chosen_ids;
pub(crate) mod client;
mod connections;
#[cfg(feature = "dashboard")]
mod dashboard;
mod events;
mod exchange;
mod exchange_faults;
mod explain;
mod failures;
mod flows;
mod groups;
mod jobs;
mod lease_flows;
mod lease_steps;
mod leases;
mod lost_leases;
mod operate;
mod operations;
mod requests;
mod sessions;
mod steps;
mod token_keys;
