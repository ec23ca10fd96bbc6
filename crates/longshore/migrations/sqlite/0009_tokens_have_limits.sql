-- Nobody stops the work of others. SQLite has no publications, so there is nothing to change for them.
--
-- Workers of version 7 or 8 may go on.
--
-- Runs inside one transaction.

-- The parts of flows that were added under an idempotency key. The id is a hash of the key and the request. They are kept as
-- long as their flow.
create table flow_parts (
    flow             blob not null,
    id               blob not null,
    primary key (flow, id)
) strict, without rowid;

-- The jobs that an operation has passed by, because another transaction had locked them, as JSON. It visits them again at its end.
alter table operations add column locked text not null default '[]';
