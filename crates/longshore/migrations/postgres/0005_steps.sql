-- Durable steps, and the events that jobs wait for. Only adds tables, so older workers may
-- keep running until steps are used: they know nothing of them. They cannot be restarted,
-- because a build refuses a database that is newer than itself.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

-- What handlers have journaled. A step is done (`value` is its value) or waits for a time or
-- an event; `until` is then the deadline, null for none.
create table longshore.steps (
    job              uuid not null,
    name             text not null check (octet_length(name) between 1 and 256),
    lease_no         integer not null,
    saved_at         timestamptz not null,
    until            timestamptz,
    value            json,
    primary key (job, name)
);

-- Events by name. The first one wins. `fresh` means that the jobs that wait for it have not
-- been woken yet.
create table longshore.events (
    name             text primary key check (octet_length(name) between 1 and 128),
    emitted_at       timestamptz not null,
    fresh            boolean not null default true,
    payload          json not null
);

create index events_fresh on longshore.events (emitted_at) where fresh;
create index events_age on longshore.events (emitted_at);

-- Which suspended jobs wait for which events. A wait belongs to the lease that was suspended,
-- so one that was left behind wakes nothing. It stays after the job was woken, so that its
-- event is kept until the job has read it.
create table longshore.waits (
    event            text not null,
    job              uuid not null,
    lease_no         integer not null,
    woken            boolean not null default false,
    primary key (event, job)
);

create index waits_job on longshore.waits (job);
create index waits_pending on longshore.waits (event, job) where not woken;
