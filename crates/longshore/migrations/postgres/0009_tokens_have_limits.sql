-- Nobody stops the work of others: kinds that limited tokens describe, parts of flows, jobs that an operation passes by, and
-- replica identities.
--
-- Workers of version 8 may go on. They ignore the kinds of queues, and do not return to jobs that an operation has passed by.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

-- The kinds that workers with a token limited to queues describe. They apply to jobs of one queue.
create table longshore.queue_kinds (
    queue            text not null check (octet_length(queue) between 1 and 128),
    name             text not null check (octet_length(name) between 1 and 128),
    schema           json,
    defaults         json,
    updated_at       timestamptz not null,
    primary key (name, queue)
);

-- A publication, as upgrades by logical replication and programs that capture changes make it, refuses to delete from a
-- table whose rows it cannot identify. All other tables have a primary key. Here it would be one more index for each claim
-- and settle. With `full`, they only log deleted rows entirely, and only with `wal_level = logical`.
alter table longshore.turns replica identity full;
alter table longshore.tallies replica identity full;

-- The parts of flows that were added under an idempotency key. The id is a hash of the key and the request. They are kept as
-- long as their flow.
create table longshore.flow_parts (
    flow             uuid not null,
    id               uuid not null,
    primary key (flow, id)
);

-- The jobs that an operation has passed by, because another transaction had locked them. It visits them again at its end.
alter table longshore.operations add column locked uuid[] not null default '{}';
