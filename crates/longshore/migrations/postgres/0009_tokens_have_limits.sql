-- Kinds that apply to jobs of one queue: workers with a token that is limited to queues describe them.
--
-- Workers of version 8 may go on. They ignore these kinds.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

create table longshore.queue_kinds (
    queue            text not null check (octet_length(queue) between 1 and 128),
    name             text not null check (octet_length(name) between 1 and 128),
    schema           json,
    defaults         json,
    updated_at       timestamptz not null,
    primary key (name, queue)
);
