//! The HTTP API, row by row.

mod access;
mod edge;
mod events;
mod explain;
mod jobs;
mod leases;
mod operate;
mod shape;
mod strangers;
mod web;

pub(crate) use access::*;
pub(crate) use edge::*;
pub(crate) use events::*;
pub(crate) use explain::*;
pub(crate) use jobs::*;
pub(crate) use leases::*;
pub(crate) use operate::*;
pub(crate) use shape::*;
pub(crate) use strangers::*;
