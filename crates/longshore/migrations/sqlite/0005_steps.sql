-- Durable steps, and the events that jobs wait for. Only adds tables, so older workers may
-- keep running until steps are used: they know nothing of them. They cannot be restarted,
-- because a build refuses a database that is newer than itself.
--
-- Runs inside one transaction.

-- What handlers have journaled. A step is done (`value` is its value) or waits for a time or
-- an event; `until` is then the deadline, null for none.
create table steps (
    job              blob not null check (length(job) = 16),
    name             text not null check (length(cast(name as blob)) between 1 and 256),
    lease_no         integer not null,
    saved_at         integer not null,
    until            integer,
    value            text,
    primary key (job, name)
) strict, without rowid;

-- Events by name. The first one wins. `fresh` means that the jobs that wait for it have not
-- been woken yet.
create table events (
    name             text not null primary key check (length(cast(name as blob)) between 1 and 128),
    emitted_at       integer not null,
    fresh            integer not null default 1 check (fresh in (0, 1)),
    payload          text not null
) strict;

create index events_fresh on events (emitted_at) where fresh = 1;
create index events_age on events (emitted_at);

-- Which suspended jobs wait for which events. A wait belongs to the lease that was suspended,
-- so one that was left behind wakes nothing. It stays after the job was woken, so that its
-- event is kept until the job has read it.
create table waits (
    event            text not null,
    job              blob not null check (length(job) = 16),
    lease_no         integer not null,
    woken            integer not null default 0 check (woken in (0, 1)),
    primary key (event, job)
) strict, without rowid;

create index waits_job on waits (job);
create index waits_pending on waits (event, job) where woken = 0;
