-- What the server needs beside the queue: who may call it (tokens), and what is
-- known of each kind of job (kinds). Only new tables, so older workers may keep
-- running. Once stopped they do not start again: a build refuses a database that
-- is newer than itself.
--
-- Run inside one transaction. `longshore.` stands for the configured schema.

-- The secret itself is nowhere: whoever shows one is found by its hash.
create table longshore.tokens (
    id               uuid primary key,
    name             text not null check (octet_length(name) between 1 and 128),
    hash             bytea not null unique check (octet_length(hash) = 32),
    scopes           text[] not null,
    queues           text[],
    created_at       timestamptz not null,
    expires_at       timestamptz,
    revoked_at       timestamptz
);

-- What workers and operators have said about a kind of job.
create table longshore.kinds (
    name             text primary key check (octet_length(name) between 1 and 128),
    schema           json,
    defaults         json,
    updated_at       timestamptz not null
);
