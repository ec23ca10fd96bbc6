-- The queue: requests (jobs) and the state of each job (ready, running,
-- finished). This is the first version, so there are no older workers.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

create type longshore.outcome as enum ('succeeded', 'failed_permanent', 'cancelled');

-- The engine's clock. Postgres inlines it, so it costs no more than now(). Tests
-- replace it.
create function longshore.clock() returns timestamptz
language sql stable parallel safe
as 'select now()';

-- Requests: written once, and changed only by an operator's edit or a key
-- replacement while the job waits. The next three tables have no foreign keys
-- to this one, because those would lock the row here on every state change.
create table longshore.jobs (
    id               uuid primary key,
    created_at       timestamptz not null,
    run_at           timestamptz not null,
    timeout_ms       bigint check (timeout_ms > 0),
    priority         smallint not null,
    max_attempts     smallint not null check (max_attempts >= 1),
    kind             text not null check (octet_length(kind) between 1 and 128),
    queue            text not null check (octet_length(queue) between 1 and 128),
    payload          json not null,
    flags            text[],
    options          json,
    idempotency_key  text check (octet_length(idempotency_key) between 1 and 512),
    unique_key       text check (octet_length(unique_key) between 1 and 512)
);

create unique index jobs_idempotency_key
    on longshore.jobs (idempotency_key)
 where idempotency_key is not null;

-- Waiting jobs. Rows are never updated: a change deletes and inserts, so a
-- concurrent claim sees either the whole old row or no row.
create table longshore.ready (
    id               uuid primary key,
    run_at           timestamptz not null,
    since            timestamptz not null,
    timeout_ms       bigint,
    lease_no         integer not null check (lease_no >= 0),
    priority         smallint not null,
    attempt          smallint not null,
    max_attempts     smallint not null,
    interruptions    smallint not null check (interruptions >= 0),
    keyed            boolean not null,
    kind             text not null,
    queue            text not null,
    flags            text[],
    check (attempt >= 0 and attempt < max_attempts)
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.5,
    autovacuum_vacuum_cost_delay = 0
);

create index ready_claim
    on longshore.ready (queue, priority desc, run_at, id)
 where interruptions = 0;

-- Jobs that were interrupted before have their own index: a claim takes at
-- most one of them.
create index ready_suspects
    on longshore.ready (queue, priority desc, run_at, id)
 where interruptions > 0;

-- Live leases. The primary key allows at most one lease per job.
create table longshore.running (
    id               uuid primary key,
    worker           uuid not null,
    claimed_at       timestamptz not null,
    timeout_ms       bigint,
    lease_no         integer not null check (lease_no >= 1),
    priority         smallint not null,
    attempt          smallint not null,
    max_attempts     smallint not null,
    interruptions    smallint not null check (interruptions >= 0),
    cancel_requested boolean not null default false,
    superseded       boolean not null default false,
    keyed            boolean not null,
    kind             text not null,
    queue            text not null,
    flags            text[],
    started_at       timestamptz,
    progress         json,
    check (attempt >= 1 and attempt <= max_attempts)
) with (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

-- Finished jobs. Append-only, except for retention and an operator's retry.
create table longshore.finished (
    id               uuid primary key,
    started_at       timestamptz,
    finished_at      timestamptz not null,
    finished_by      uuid,
    lease_no         integer not null check (lease_no >= 0),
    outcome          longshore.outcome not null,
    attempts         smallint not null,
    max_attempts     smallint not null,
    interruptions    smallint not null check (interruptions >= 0),
    last_error       text,
    result           json,
    check (attempts >= 0 and attempts <= max_attempts)
);

-- Dead letters and cancelled jobs. Partial, so that successes cost nothing.
create index finished_unsuccessful
    on longshore.finished (outcome, id)
 where outcome <> 'succeeded';

-- Attempts that did not succeed. Each lease ends once, hence the primary key.
create table longshore.attempts (
    job              uuid not null,
    lease_no         integer not null,
    attempt          smallint not null,
    what             text not null check (what in ('failed', 'interrupted', 'snoozed', 'released')),
    worker           uuid,
    started_at       timestamptz not null,
    ended_at         timestamptz not null,
    error            text,
    primary key (job, lease_no)
);

-- Unique keys of live jobs: the owner is waiting or running.
create table longshore.keys (
    key              text primary key,
    job              uuid not null unique
);

create table longshore.checkpoints (
    job              uuid primary key,
    lease_no         integer not null,
    data             json not null,
    saved_at         timestamptz not null
);

-- Pre-aggregated counts, so that statistics need no scan of `finished`: how many
-- jobs ended in a minute, and by how much the number of kept jobs changed. Each
-- settle batch inserts rows at level 0. Upkeep folds them into minutes (1),
-- hours (2) and one row for everything older (3).
create table longshore.tallies (
    minute           timestamptz not null,
    ended            bigint not null,
    kept             bigint not null,
    outcome          longshore.outcome not null,
    run_bucket       smallint not null,
    level            smallint not null default 0,
    queue            text not null,
    kind             text not null
) with (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

create index tallies_level on longshore.tallies (level, minute);

-- Logarithmic buckets, four per doubling of the duration: within a fifth of the
-- true value. Eight would be finer than anyone needs.
create function longshore.run_bucket(started timestamptz, ended timestamptz) returns smallint
language sql immutable parallel safe
as 'select floor(4 * ln(1 + 1000 * greatest(0, date_part(''epoch'', ended - started))) / ln(2.0::float8))::smallint';

create table longshore.workers (
    id               uuid primary key,
    name             text not null,
    queues           text[] not null,
    kinds            text[],
    concurrency      integer not null,
    stale_after_ms   bigint not null check (stale_after_ms > 0),
    started_at       timestamptz not null,
    heartbeat_at     timestamptz not null,
    dead_at          timestamptz
) with (fillfactor = 50);

create table longshore.queues (
    name             text primary key check (octet_length(name) between 1 and 128),
    paused           boolean not null default false,
    max_running      integer check (max_running >= 1)
);

create table longshore.schedules (
    name             text primary key check (octet_length(name) between 1 and 128),
    expression       text not null,
    zone             text not null,
    missed           text not null,
    template         text not null,
    paused           boolean not null default false,
    next_at          timestamptz not null,
    last_at          timestamptz
);

-- Cursors of the upkeep passes. A pass locks its row while it runs.
create table longshore.upkeep (
    name             text primary key,
    cursor           uuid
);

insert into longshore.upkeep (name) values ('retain'), ('fold');

-- Postgres plans a full scan for a table that is almost empty, and keeps that plan
-- after a million jobs have arrived, until the next autovacuum. So the tables are
-- never that small: each one is grown to a megabyte here and never truncated, and
-- the planner prefers the indexes from the first job on.
alter table longshore.jobs set (vacuum_truncate = off);
alter table longshore.ready set (vacuum_truncate = off);
alter table longshore.running set (vacuum_truncate = off);
alter table longshore.finished set (vacuum_truncate = off);
alter table longshore.attempts set (vacuum_truncate = off);
alter table longshore.keys set (vacuum_truncate = off);

alter table longshore.jobs alter options set storage plain;
alter table longshore.ready alter flags set storage plain;
alter table longshore.running alter flags set storage plain;
alter table longshore.finished alter last_error set storage plain;
alter table longshore.attempts alter error set storage plain;
alter table longshore.keys alter key set storage plain;

insert into longshore.jobs (id, created_at, run_at, priority, max_attempts, kind, queue, payload, options)
select gen_random_uuid(), now(), now(), 0, 1, 'x', 'x', 'null', to_json(repeat('x', 7000))
  from generate_series(1, 128);
insert into longshore.ready (id, run_at, since, lease_no, priority, attempt, max_attempts, interruptions, keyed,
                             kind, queue, flags)
select id, now(), now(), 0, 0, 0, 1, 0, false, 'x', 'x', array[repeat('x', 7000)]
  from longshore.jobs;
insert into longshore.running (id, worker, claimed_at, lease_no, priority, attempt, max_attempts, interruptions,
                               keyed, kind, queue, flags)
select id, id, now(), 1, 0, 1, 1, 0, false, 'x', 'x', array[repeat('x', 7000)]
  from longshore.jobs;
insert into longshore.finished (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions, last_error)
select id, now(), 0, 'succeeded', 0, 1, 0, repeat('x', 7000)
  from longshore.jobs;
insert into longshore.attempts (job, lease_no, attempt, what, started_at, ended_at, error)
select id, 1, 1, 'failed', now(), now(), repeat('x', 7000)
  from longshore.jobs;
insert into longshore.keys (key, job)
select rpad(n::text, 2000, 'x'), gen_random_uuid()
  from generate_series(1, 512) as n;

delete from longshore.jobs;
delete from longshore.ready;
delete from longshore.running;
delete from longshore.finished;
delete from longshore.attempts;
delete from longshore.keys;

alter table longshore.jobs alter options set storage extended;
alter table longshore.ready alter flags set storage extended;
alter table longshore.running alter flags set storage extended;
alter table longshore.finished alter last_error set storage extended;
alter table longshore.attempts alter error set storage extended;
alter table longshore.keys alter key set storage extended;
