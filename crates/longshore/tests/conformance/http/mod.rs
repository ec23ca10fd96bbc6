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
