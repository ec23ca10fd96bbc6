-- Kinds that apply to jobs of one queue: workers with a token that is limited to queues describe them.
--
-- Workers of version 8 may go on. They ignore these kinds.
--
-- Runs inside one transaction.

create table queue_kinds (
    queue            text not null check (length(cast(queue as blob)) between 1 and 128),
    name             text not null check (length(cast(name as blob)) between 1 and 128),
    schema           text,
    defaults         text,
    updated_at       integer not null,
    primary key (name, queue)
) strict, without rowid;
