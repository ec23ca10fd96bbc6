-- What the server needs beside the queue: who may call it (tokens), and what is
-- known of each kind of job (kinds). Only new tables, so older workers may keep
-- running. Once stopped they do not start again: a build refuses a database that
-- is newer than itself.

-- The secret itself is nowhere: whoever shows one is found by its hash.
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

-- What workers and operators have said about a kind of job.
create table kinds (
    name             text not null primary key check (length(cast(name as blob)) between 1 and 128),
    schema           text,
    defaults         text,
    updated_at       integer not null
) strict;
