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
