//! The HTTP API.

mod auth;
mod bodies;
pub(crate) mod client;
mod connections;
#[cfg(feature = "dashboard")]
mod dashboard;
mod events;
mod explain;
mod failures;
mod flows;
mod groups;
mod jobs;
mod lease_steps;
mod leases;
mod operate;
mod operations;
mod requests;
mod sessions;
mod steps;
