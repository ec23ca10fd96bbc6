//! The Postgres engine.
