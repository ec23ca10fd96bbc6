-- What the server needs in addition to the queue: who may call it (tokens), and
-- what is known about each kind of job (kinds). Only adds tables, so older workers
-- may keep running. They cannot be restarted, because a build refuses a database
-- that is newer than itself.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

-- The secret itself is not stored: a presented token is looked up by its hash.
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

-- What workers and operators have declared about each kind of job.
create table longshore.kinds (
    name             text primary key check (octet_length(name) between 1 and 128),
    schema           json,
    defaults         json,
    updated_at       timestamptz not null
);
