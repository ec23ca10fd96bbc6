-- Nobody stops the work of others: kinds that limited tokens describe, parts of flows, and jobs that an
-- operation passes by. SQLite has no publications, so it needs no replica identities.
--
-- Workers of version 8 may go on. They ignore the kinds of queues, and do not return to jobs that an operation has passed by.
--
-- Runs inside one transaction.

-- The kinds that workers with a token limited to queues describe. They apply to jobs of one queue.
create table queue_kinds (
    queue            text not null check (length(cast(queue as blob)) between 1 and 128),
    name             text not null check (length(cast(name as blob)) between 1 and 128),
    schema           text,
    defaults         text,
    updated_at       integer not null,
    primary key (name, queue)
) strict, without rowid;

-- The parts of flows that were added under an idempotency key. The id is a hash of the key and the request. They are kept as
-- long as their flow.
create table flow_parts (
    flow             blob not null,
    id               blob not null,
    primary key (flow, id)
) strict, without rowid;

-- The jobs that an operation has passed by, because another transaction had locked them, as JSON. It visits them again at its end.
alter table operations add column locked text not null default '[]';
