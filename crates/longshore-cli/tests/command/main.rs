//! The real `longshore` binary against real databases: every case runs on
//! SQLite, and on Postgres when `LONGSHORE_TEST_DATABASE_URL` names one.
#![allow(clippy::unwrap_used)]

mod bench;
mod builtin;
mod config;
mod enqueue;
mod guide;
mod jobs;
#[path = "../mail/server.rs"]
mod mail;
mod operate;
mod packaging;
mod process;
mod security;
mod serve;
mod terminal;
mod worker;
