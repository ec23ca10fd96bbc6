-- What the dashboard needs: changes of many jobs, groups of failures, history, and sessions.
--
-- Workers of version 7 may go on. The failures that they store belong to no group.
--
-- Runs inside one transaction.

-- Changes of any number of jobs. The process that works on one holds it until `held_until`; when that has passed,
-- another process continues behind `cursor`.
create table operations (
    id               blob primary key,
    action           text not null check (action in ('cancel', 'retry', 'delete')),
    filter           text,     -- as in GET /jobs
    ids              text,     -- or these jobs, highest first, as JSON
    queues           text,     -- only jobs of these queues, as JSON
    state            text not null check (state in ('running', 'stopped', 'done', 'failed')),
    created_at       integer not null,
    created_by       text,     -- the name of the token
    updated_at       integer not null,
    ended_at         integer,
    cursor           blob,
    examined         integer not null default 0,
    changed          integer not null default 0,
    skipped          integer not null default 0,
    expected         integer,  -- how many jobs matched at the beginning, if that is known
    error            text,     -- why it failed, or why a step has to be tried again
    holder           blob,
    held_until       integer,
    check ((filter is null) <> (ids is null))
) strict, without rowid;

create index operations_created_at on operations (created_at desc, id desc);
create index operations_running on operations (created_at, id) where state = 'running';
create index operations_ended on operations (updated_at) where state <> 'running';

-- The fingerprint of a failure: a hash of its kind and its error without what differs from job to job.
alter table finished add column failure integer;
alter table attempts add column failure integer;

create index finished_failures on finished (failure, id) where failure is not null;

-- Failures by their fingerprint. There is one writer, so settles change these rows directly.
create table failures (
    fingerprint      integer primary key,
    kind             text not null,
    attempts         integer not null,
    first_seen       integer not null,
    last_seen        integer not null,
    job              blob not null,   -- the newest one
    error            text not null    -- of that job
) strict;

create index failures_last_seen on failures (last_seen desc, fingerprint);

-- History for charts. Processes add what they have counted every few seconds, and one of them the state of the queues
-- once a minute. Upkeep folds minutes into hours, and removes them after eight days.
create table measures (
    minute           integer not null,
    value            integer not null,
    bucket           integer not null,   -- of a waiting time, as in `tallies`
    what             text not null check (what in ('waited', 'failed', 'depth', 'overdue')),
    queue            text not null,      -- empty for all queues together
    kind             text not null,      -- empty if the value is about the whole queue
    primary key (minute, what, queue, kind, bucket)
) strict, without rowid;

insert into upkeep (name) values ('samples');

-- Logins of browsers, by the hash of the cookie. A session ends with its token.
create table sessions (
    hash             blob primary key,
    token            blob not null,
    created_at       integer not null,
    expires_at       integer not null
) strict, without rowid;

create index sessions_expires_at on sessions (expires_at);
