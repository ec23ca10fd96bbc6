//! Runs the real `longshore` binary against real databases: SQLite always, and Postgres if
//! `LONGSHORE_TEST_DATABASE_URL` is set.
#![allow(clippy::unwrap_used)]

mod bench;
mod builtin;
mod bulk;
mod config;
mod documents;
mod endpoint;
mod enqueue;
mod events;
mod fixture;
mod flows;
mod jobs;
#[path = "../../../longshore/tests/mail/server.rs"]
mod mail;
mod maintenance;
#[path = "../../../longshore/tests/missing/mod.rs"]
mod missing;
mod openapi_examples;
mod operate;
mod operations;
mod packaging;
mod process;
mod repeat;
mod security;
mod serve;
mod telemetry;
mod terminal;
mod wait;
mod worker;
