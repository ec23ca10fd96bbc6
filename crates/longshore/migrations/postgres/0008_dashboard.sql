-- What the dashboard needs: changes of many jobs, groups of failures, history, and sessions.
--
-- Workers of version 7 may go on. The failures that they store belong to no group.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

-- Changes of any number of jobs. The process that works on one holds it until `held_until`; when that has passed,
-- another process continues behind `cursor`.
create table longshore.operations (
    id               uuid primary key,
    action           text not null check (action in ('cancel', 'retry', 'delete')),
    filter           json,     -- as in GET /jobs
    ids              uuid[],   -- or these jobs, highest first
    queues           text[],   -- only jobs of these queues
    state            text not null check (state in ('running', 'stopped', 'done', 'failed')),
    created_at       timestamptz not null,
    created_by       text,     -- the name of the token
    updated_at       timestamptz not null,
    ended_at         timestamptz,
    cursor           uuid,
    examined         bigint not null default 0,
    changed          bigint not null default 0,
    skipped          bigint not null default 0,
    expected         bigint,   -- how many jobs matched at the beginning, if that is known
    error            text,     -- why it failed, or why a step has to be tried again
    holder           uuid,
    held_until       timestamptz,
    check ((filter is null) <> (ids is null))
);

create index operations_created_at on longshore.operations (created_at desc, id desc);
create index operations_running on longshore.operations (created_at, id) where state = 'running';
create index operations_ended on longshore.operations (updated_at) where state <> 'running';

-- The fingerprint of a failure: a hash of its kind and its error without what differs from job to job.
alter table longshore.finished add column failure bigint;
alter table longshore.attempts add column failure bigint;

create index finished_failures on longshore.finished (failure, id) where failure is not null;

-- Failures by their fingerprint. A settle only adds a row to `failure_notes`, because all settles would wait for
-- the same row here while a dependency is down. Upkeep folds the notes.
create table longshore.failures (
    fingerprint      bigint primary key,
    kind             text not null,
    attempts         bigint not null,
    first_seen       timestamptz not null,
    last_seen        timestamptz not null,
    job              uuid not null,   -- the newest one
    error            text not null    -- of that job
);

create index failures_last_seen on longshore.failures (last_seen desc, fingerprint);

create table longshore.failure_notes (
    id               bigint generated always as identity primary key,
    fingerprint      bigint not null,
    attempts         bigint not null,
    seen_at          timestamptz not null,
    job              uuid not null,
    kind             text not null,
    error            text not null
) with (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

-- History for charts. Processes add what they have counted every few seconds, and one of them the state of the queues
-- once a minute. Upkeep folds minutes into hours, and removes them after eight days.
create table longshore.measures (
    minute           timestamptz not null,
    value            bigint not null,
    bucket           smallint not null,   -- of a waiting time, as in `tallies`
    what             text not null check (what in ('waited', 'failed', 'depth', 'overdue')),
    queue            text not null,       -- empty for all queues together
    kind             text not null,       -- empty if the value is about the whole queue
    primary key (minute, what, queue, kind, bucket)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

insert into longshore.upkeep (name) values ('failures'), ('measures'), ('samples');

-- Logins of browsers, by the hash of the cookie. A session ends with its token.
create table longshore.sessions (
    hash             bytea primary key,
    token            uuid not null,
    created_at       timestamptz not null,
    expires_at       timestamptz not null
);

create index sessions_expires_at on longshore.sessions (expires_at);
