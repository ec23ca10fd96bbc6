-- Bounds and repairs for long-running systems. Only adds tables, columns and indexes,
-- so older workers may keep running. They cannot be restarted, because a build refuses
-- a database that is newer than itself.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

-- Requests that were merged into another job: a replacement, or a deduplicated request
-- with an idempotency key. Their ids and keys return that job for as long as it is kept.
-- `replaced` says which of the two. A key is either in `jobs` or here; `merge_request` and
-- `has_merged_key` in functions.sql guarantee it.
create table longshore.merged_requests (
    id               uuid primary key,
    job              uuid not null,
    replaced         boolean not null,
    idempotency_key  text unique check (octet_length(idempotency_key) between 1 and 512)
);

create index merged_requests_job on longshore.merged_requests (job);

-- Grown to a megabyte, like the tables of the first migration, and for the same reason.
alter table longshore.merged_requests set (vacuum_truncate = off);

insert into longshore.merged_requests (id, job, replaced, idempotency_key)
select gen_random_uuid(), gen_random_uuid(), false, rpad(n::text, 500, 'x')
  from generate_series(1, 1800) as n;

delete from longshore.merged_requests;

-- The leases whose jobs are to be cancelled, by worker. A worker reads them when it is
-- notified of a cancel. Almost all leases are in no such entry, so a claim does not
-- write to this index.
create index running_cancels
    on longshore.running (worker)
    where cancel_requested;
-- What retention knows about each range of 16 blocks of `finished`: when the range
-- was last read, and the end of the oldest job of each outcome that it left there.
-- Rows are stored in the order in which jobs end, so a range holds jobs of about the
-- same age, and retention reads a range only when something in it may have expired.
-- An index on `finished_at` would do the same at 67 bytes of WAL per job.
create table longshore.finished_ranges (
    first_block      bigint primary key,
    read_at          timestamptz not null,
    succeeded        timestamptz,
    cancelled        timestamptz,
    failed_permanent timestamptz
) with (fillfactor = 50, autovacuum_vacuum_cost_delay = 0);

-- When retention last looked for ranges that are new. Jobs in new ranges ended later.
alter table longshore.upkeep add column looked_at timestamptz;

-- How many older rows of the job's history were removed when this row was written,
-- including those that earlier rows counted. Null means none.
alter table longshore.attempts add column omitted integer;

-- Retention deletes as fast as jobs end, so vacuum must not be slower than that.
alter table longshore.jobs set (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0);
alter table longshore.finished set (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0);
alter table longshore.attempts set (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0);
