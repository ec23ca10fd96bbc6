-- Bounds and repairs for long-running systems. Only adds tables, columns and indexes,
-- so older workers may keep running. They cannot be restarted, because a build refuses
-- a database that is newer than itself.
--
-- Runs inside one transaction.

-- Requests that were merged into another job: a replacement, or a deduplicated request
-- with an idempotency key. Their ids and keys return that job for as long as it is kept.
-- `replaced` says which of the two. A key is either in `jobs` or here.
create table merged_requests (
    id               blob not null primary key check (length(id) = 16),
    job              blob not null check (length(job) = 16),
    replaced         integer not null check (replaced in (0, 1)),
    idempotency_key  text unique check (length(cast(idempotency_key as blob)) between 1 and 512)
) strict, without rowid;

create index merged_requests_job on merged_requests (job);

-- The leases whose jobs are to be cancelled, by worker. A worker reads them when it is
-- notified of a cancel. Almost all leases are in no such entry, so a claim does not
-- write to this index.
create index running_cancels
    on running (worker)
    where cancel_requested = 1;
-- What retention knows about each range of 1,000 rows of `jobs`: when the range was
-- last read, and the end of the oldest job of each outcome that it left there. Rows
-- are stored in the order in which jobs arrive, so a range holds jobs of about the
-- same age, and retention reads a range only when something in it may have expired.
-- An index on `finished_at` would do the same, but every settle would have to write it.
create table finished_ranges (
    first_row        integer primary key,
    read_at          integer not null,
    succeeded        integer,
    cancelled        integer,
    failed_permanent integer
) strict;

-- When retention last looked for ranges that are new. Jobs in new ranges ended later.
alter table upkeep add column looked_at integer;

-- How many older rows of the job's history were removed when this row was written,
-- including those that earlier rows counted. Null means none.
alter table attempts add column omitted integer;
