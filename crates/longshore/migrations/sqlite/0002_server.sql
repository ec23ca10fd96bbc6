-- What the server needs in addition to the queue: who may call it (tokens), and
-- what is known about each kind of job (kinds). Only adds tables, so older workers
-- may keep running. They cannot be restarted, because a build refuses a database
-- that is newer than itself.

-- The secret itself is not stored: a presented token is looked up by its hash.
create table tokens (
    id               blob not null primary key check (length(id) = 16),
    name             text not null check (length(cast(name as blob)) between 1 and 128),
    hash             blob not null unique check (length(hash) = 32),
    scopes           text not null,
    queues           text,
    created_at       integer not null,
    expires_at       integer,
    revoked_at       integer
) strict, without rowid;

-- What workers and operators have declared about each kind of job.
create table kinds (
    name             text not null primary key check (length(cast(name as blob)) between 1 and 128),
    schema           text,
    defaults         text,
    updated_at       integer not null
) strict;
