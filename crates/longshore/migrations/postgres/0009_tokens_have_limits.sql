-- Nobody stops the work of others.
--
-- Workers of version 7 or 8 may go on.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

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
