-- The queue: requests (jobs) and the state of each job (ready, running,
-- finished). This is the first version, so there are no older workers.
--
-- The same tables as on Postgres, with these dialect differences: ids are 16-byte
-- blobs, which sort like the UUIDs; times are microseconds since 1970 in UTC;
-- lists are JSON text; booleans are 0 and 1.

-- The engine's clock is the host's, unless a test pins it here.
create table clock (
    id               integer primary key check (id = 1),
    pinned           integer
) strict;

insert into clock (id) values (1);

-- Requests: written once, and changed only by an operator's edit or a key
-- replacement while the job waits. Payloads are large, so this is a rowid table:
-- rows are stored in order of arrival, with a narrow index on the id. The payload
-- is the last column, so that reading the others never follows its overflow pages.
create table jobs (
    id               blob not null unique check (length(id) = 16),
    created_at       integer not null,
    run_at           integer not null,
    timeout_ms       integer check (timeout_ms > 0),
    priority         integer not null check (priority between -32768 and 32767),
    max_attempts     integer not null check (max_attempts between 1 and 32767),
    kind             text not null check (length(cast(kind as blob)) between 1 and 128),
    queue            text not null check (length(cast(queue as blob)) between 1 and 128),
    flags            text,
    options          text,
    idempotency_key  text check (length(cast(idempotency_key as blob)) between 1 and 512),
    unique_key       text check (length(cast(unique_key as blob)) between 1 and 512),
    payload          text not null
) strict;

create unique index jobs_idempotency_key
    on jobs (idempotency_key)
 where idempotency_key is not null;

-- Waiting jobs. Rows are never updated: a change deletes and inserts.
create table ready (
    id               blob not null primary key check (length(id) = 16),
    run_at           integer not null,
    since            integer not null,
    timeout_ms       integer,
    lease_no         integer not null check (lease_no >= 0),
    priority         integer not null,
    attempt          integer not null,
    max_attempts     integer not null,
    interruptions    integer not null check (interruptions >= 0),
    keyed            integer not null check (keyed in (0, 1)),
    kind             text not null,
    queue            text not null,
    flags            text,
    check (attempt >= 0 and attempt < max_attempts)
) strict, without rowid;

-- Ends with the kind, so that a claim can skip jobs of kinds it does not handle
-- without reading their rows.
create index ready_claim
    on ready (queue, priority desc, run_at, id, kind)
 where interruptions = 0;

-- Jobs that were interrupted before have their own index: a claim takes at
-- most one of them.
create index ready_suspects
    on ready (queue, priority desc, run_at, id, kind)
 where interruptions > 0;

-- Live leases. The primary key allows at most one lease per job.
create table running (
    id               blob not null primary key check (length(id) = 16),
    worker           blob not null check (length(worker) = 16),
    claimed_at       integer not null,
    timeout_ms       integer,
    lease_no         integer not null check (lease_no >= 1),
    priority         integer not null,
    attempt          integer not null,
    max_attempts     integer not null,
    interruptions    integer not null check (interruptions >= 0),
    cancel_requested integer not null default 0 check (cancel_requested in (0, 1)),
    superseded       integer not null default 0 check (superseded in (0, 1)),
    keyed            integer not null check (keyed in (0, 1)),
    kind             text not null,
    queue            text not null,
    flags            text,
    started_at       integer,
    progress         text,
    check (attempt >= 1 and attempt <= max_attempts)
) strict, without rowid;

-- Finished jobs. Append-only, except for retention and an operator's retry.
create table finished (
    id               blob not null primary key check (length(id) = 16),
    started_at       integer,
    finished_at      integer not null,
    finished_by      blob check (length(finished_by) = 16),
    lease_no         integer not null check (lease_no >= 0),
    outcome          text not null check (outcome in ('succeeded', 'failed_permanent', 'cancelled')),
    attempts         integer not null,
    max_attempts     integer not null,
    interruptions    integer not null check (interruptions >= 0),
    last_error       text,
    result           text,
    check (attempts >= 0 and attempts <= max_attempts)
) strict, without rowid;

-- Dead letters and cancelled jobs. Partial, so that successes cost nothing.
create index finished_unsuccessful
    on finished (outcome, id)
 where outcome <> 'succeeded';

-- Attempts that did not succeed. Each lease ends once, hence the primary key.
create table attempts (
    job              blob not null check (length(job) = 16),
    lease_no         integer not null,
    attempt          integer not null,
    what             text not null check (what in ('failed', 'interrupted', 'snoozed', 'released')),
    worker           blob check (length(worker) = 16),
    started_at       integer not null,
    ended_at         integer not null,
    error            text,
    primary key (job, lease_no)
) strict, without rowid;

-- Unique keys of live jobs: the owner is waiting or running.
create table keys (
    key              text not null primary key,
    job              blob not null unique check (length(job) = 16)
) strict, without rowid;

create table checkpoints (
    job              blob not null primary key check (length(job) = 16),
    lease_no         integer not null,
    data             text not null,
    saved_at         integer not null
) strict;

-- Pre-aggregated counts, so that statistics need no scan of `finished`: how many
-- jobs ended in a minute, and by how much the number of kept jobs changed. There
-- is one writer at a time, so each batch updates its minute's row. Upkeep folds
-- minutes into hours, and old hours into one row.
create table tallies (
    minute           integer not null,
    queue            text not null,
    kind             text not null,
    outcome          text not null check (outcome in ('succeeded', 'failed_permanent', 'cancelled')),
    run_bucket       integer not null,
    ended            integer not null,
    kept             integer not null,
    primary key (minute, queue, kind, outcome, run_bucket)
) strict, without rowid;

create table workers (
    id               blob not null primary key check (length(id) = 16),
    name             text not null,
    queues           text not null,
    kinds            text,
    concurrency      integer not null,
    stale_after_ms   integer not null check (stale_after_ms > 0),
    started_at       integer not null,
    heartbeat_at     integer not null,
    dead_at          integer
) strict, without rowid;

create table queues (
    name             text not null primary key check (length(cast(name as blob)) between 1 and 128),
    paused           integer not null default 0 check (paused in (0, 1)),
    max_running      integer check (max_running >= 1)
) strict, without rowid;

create table schedules (
    name             text not null primary key check (length(cast(name as blob)) between 1 and 128),
    expression       text not null,
    zone             text not null,
    missed           text not null,
    template         text not null,
    paused           integer not null default 0 check (paused in (0, 1)),
    next_at          integer not null,
    last_at          integer
) strict, without rowid;

-- Cursors of the upkeep passes.
create table upkeep (
    name             text not null primary key,
    cursor           blob
) strict, without rowid;

insert into upkeep (name) values ('retain'), ('fold');

create view job_status as
select j.id,
       j.kind,
       j.queue,
       case
         when w.id is not null and w.attempt = 0 and w.interruptions = 0 then 'queued'
         when w.id is not null then 'retrying'
         when r.id is not null then 'running'
         else f.outcome
       end as status,
       j.priority,
       coalesce(w.attempt, r.attempt, f.attempts) as attempts,
       j.max_attempts,
       coalesce(w.run_at, j.run_at) as run_at,
       r.worker as locked_by,
       r.claimed_at as locked_at,
       coalesce(r.cancel_requested, 0) as cancel_requested,
       j.created_at,
       coalesce(r.claimed_at, f.started_at) as started_at,
       f.finished_at,
       coalesce(f.last_error, (
         select a.error
           from attempts a
          where a.job = j.id
            and a.error is not null
          order by a.lease_no desc
          limit 1)) as last_error
  from jobs j
  left join ready w on w.id = j.id
  left join running r on r.id = j.id
  left join finished f on f.id = j.id;
