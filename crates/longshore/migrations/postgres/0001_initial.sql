-- The tables. Until the first release this script is edited in place, and a build refuses a database that another
-- revision of it has made. Afterwards it never changes: a later script changes what it made.
--
-- Runs inside one transaction, before functions.sql. `longshore.` is replaced by the configured schema.
--
-- Every table has a primary key or a replica identity. Without one, Postgres refuses to delete rows of a table that
-- is published, as upgrades by logical replication and programs that capture changes do it.

-- The engine's clock. Postgres inlines it, so it costs no more than now(). Tests
-- replace it.
create function longshore.clock() returns timestamptz
language sql stable parallel safe
as 'select now()';

create type longshore.outcome as enum ('succeeded', 'failed_permanent', 'cancelled');

-- ---- jobs -----------------------------------------------------------------

-- Requests: written once, and changed only by an operator's edit or a key
-- replacement while the job waits. The next three tables have no foreign keys
-- to this one, because those would lock the row here on every state change.
-- `grp`, `flow` and `task` are null for jobs without a group or a flow.
create table longshore.jobs (
    id               uuid primary key,
    created_at       timestamptz not null,
    run_at           timestamptz not null,
    timeout_ms       bigint check (timeout_ms > 0),
    priority         smallint not null,
    max_attempts     smallint not null check (max_attempts >= 1),
    kind             text not null check (octet_length(kind) between 1 and 128),
    queue            text not null check (octet_length(queue) between 1 and 128),
    payload          json not null,
    flags            text[],
    options          json,
    idempotency_key  text check (octet_length(idempotency_key) between 1 and 512),
    unique_key       text check (octet_length(unique_key) between 1 and 512),
    grp              text,
    flow             uuid,
    task             text
) with (
    -- Retention deletes as fast as jobs end, so vacuum must not be slower than that.
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

create unique index jobs_idempotency_key
    on longshore.jobs (idempotency_key)
 where idempotency_key is not null;
create index jobs_flow on longshore.jobs (flow, id) where flow is not null;
create index jobs_task on longshore.jobs (flow, task) where task is not null;

-- Waiting jobs. Rows are never updated: a change deletes and inserts, so a
-- concurrent claim sees either the whole old row or no row. `held`: a task that waits for
-- others of its flow; its time is the end of the year 9999.
create table longshore.ready (
    id               uuid primary key,
    run_at           timestamptz not null,
    since            timestamptz not null,
    timeout_ms       bigint,
    lease_no         integer not null check (lease_no >= 0),
    priority         smallint not null,
    attempt          smallint not null,
    max_attempts     smallint not null,
    interruptions    smallint not null check (interruptions >= 0),
    keyed            boolean not null,
    kind             text not null,
    queue            text not null,
    flags            text[],
    grp              text,
    flow             uuid,
    held             boolean,
    check (attempt >= 0 and attempt < max_attempts)
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.5,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

-- Jobs that were interrupted before have their own index: a claim takes at
-- most one of them. So have the jobs of groups: they are claimed by turns.
create index ready_claim
    on longshore.ready (queue, priority desc, run_at, id)
 where interruptions = 0 and grp is null;
create index ready_suspects
    on longshore.ready (queue, priority desc, run_at, id)
 where interruptions > 0 and grp is null;
create index ready_groups
    on longshore.ready (queue, grp, priority desc, run_at, id)
 where grp is not null;
create index ready_group_suspects
    on longshore.ready (queue, grp, priority desc, run_at, id)
 where grp is not null and interruptions > 0;

-- Live leases. The primary key allows at most one lease per job. `gate`: the limit of the group when the
-- job was claimed, null for none. If there was one, the end of the lease may let another job of the group start.
create table longshore.running (
    id               uuid primary key,
    worker           uuid not null,
    claimed_at       timestamptz not null,
    timeout_ms       bigint,
    lease_no         integer not null check (lease_no >= 1),
    priority         smallint not null,
    attempt          smallint not null,
    max_attempts     smallint not null,
    interruptions    smallint not null check (interruptions >= 0),
    cancel_requested boolean not null default false,
    superseded       boolean not null default false,
    keyed            boolean not null,
    kind             text not null,
    queue            text not null,
    flags            text[],
    started_at       timestamptz,
    progress         json,
    grp              text,
    flow             uuid,
    gate             integer,
    check (attempt >= 1 and attempt <= max_attempts)
) with (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

-- The leases whose jobs are to be cancelled, by worker. A worker reads them when it is
-- notified of a cancel. Almost all leases are in no such entry, so a claim does not
-- write to this index.
create index running_cancels
    on longshore.running (worker)
 where cancel_requested;
create index running_groups
    on longshore.running (queue, grp)
 where grp is not null;

-- Finished jobs. Append-only, except for retention and an operator's retry. `skipped`: a task that was
-- cancelled because it could never start. `error_group`: the fingerprint of the last error, as in `error_groups`.
create table longshore.finished (
    id               uuid primary key,
    started_at       timestamptz,
    finished_at      timestamptz not null,
    finished_by      uuid,
    lease_no         integer not null check (lease_no >= 0),
    outcome          longshore.outcome not null,
    attempts         smallint not null,
    max_attempts     smallint not null,
    interruptions    smallint not null check (interruptions >= 0),
    last_error       text,
    result           json,
    flow             uuid,
    skipped          boolean,
    error_group      bigint,
    check (attempts >= 0 and attempts <= max_attempts)
) with (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

-- Dead letters and cancelled jobs. Partial, so that successes cost nothing.
create index finished_unsuccessful
    on longshore.finished (outcome, id)
 where outcome <> 'succeeded';
create index finished_error_groups on longshore.finished (error_group, id) where error_group is not null;

-- Attempts that did not succeed. Each lease ends once, hence the primary key. `omitted`: how many older rows of the
-- job were removed when this row was written, including those that earlier rows counted; null means none.
create table longshore.attempts (
    job              uuid not null,
    lease_no         integer not null,
    attempt          smallint not null,
    what             text not null check (what in ('failed', 'interrupted', 'snoozed', 'released')),
    worker           uuid,
    started_at       timestamptz not null,
    ended_at         timestamptz not null,
    error            text,
    omitted          integer,
    error_group      bigint,
    primary key (job, lease_no)
) with (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

-- Unique keys of live jobs: the owner is waiting or running.
create table longshore.keys (
    key              text primary key,
    job              uuid not null unique
) with (vacuum_truncate = off);

-- Requests that were merged into another job: a replacement, or a deduplicated request
-- with an idempotency key. Their ids and keys return that job for as long as it is kept.
-- `replaced` says which of the two. A key is either in `jobs` or here; `merge_request` and
-- `has_merged_key` in functions.sql guarantee it.
create table longshore.merged_requests (
    id               uuid primary key,
    job              uuid not null,
    replaced         boolean not null,
    idempotency_key  text unique check (octet_length(idempotency_key) between 1 and 512)
) with (vacuum_truncate = off);

create index merged_requests_job on longshore.merged_requests (job);

create table longshore.checkpoints (
    job              uuid primary key,
    lease_no         integer not null,
    data             json not null,
    saved_at         timestamptz not null
);

-- ---- steps and events -----------------------------------------------------

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

-- ---- queues and groups ----------------------------------------------------

-- A queue that was paused or has a limit or a rate, and the defaults for its groups. A rate is `rate` starts per
-- `rate_ms` milliseconds, up to `burst` of them at once. `tat` is its state, as in `turns`.
create table longshore.queues (
    name             text primary key check (octet_length(name) between 1 and 128),
    paused           boolean not null default false,
    max_running      integer check (max_running >= 1),
    rate             integer check (rate >= 1),
    rate_ms          bigint check (rate_ms >= 1),
    burst            integer check (burst >= 1),
    tat              timestamptz,
    group_max_running integer check (group_max_running >= 1),
    group_rate       integer check (group_rate >= 1),
    group_rate_ms    bigint check (group_rate_ms >= 1),
    group_burst      integer check (group_burst >= 1),
    check ((rate is null) = (rate_ms is null) and (rate is null) = (burst is null)),
    check ((group_rate is null) = (group_rate_ms is null) and (group_rate is null) = (group_burst is null))
);

-- Groups whose settings differ from the defaults of their queue.
create table longshore.groups (
    queue            text not null check (octet_length(queue) between 1 and 128),
    name             text not null check (octet_length(name) between 1 and 128),
    paused           boolean not null default false,
    max_running      integer check (max_running >= 1),
    rate             integer check (rate >= 1),
    rate_ms          bigint check (rate_ms >= 1),
    burst            integer check (burst >= 1),
    primary key (queue, name),
    check ((rate is null) = (rate_ms is null) and (rate is null) = (burst is null))
);

-- Each group with waiting jobs has at least one turn per priority, due when its next job is.
-- Whatever adds a job inserts a turn; a claim deletes those of a group and inserts at most one
-- per priority. Rows are never updated. `tat` is the state of the group's rate: when the
-- jobs started so far would have started at an even pace.
create sequence longshore.turn_ids;
create table longshore.turns (
    id               bigint not null default nextval('longshore.turn_ids'),
    at               timestamptz not null,
    tat              timestamptz,
    priority         smallint not null,
    queue            text not null,
    grp              text not null
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

-- A primary key would be one more index for each claim and settle. This logs deleted rows entirely, and only
-- with `wal_level = logical`.
alter table longshore.turns replica identity full;

create index turns_line on longshore.turns (queue, priority desc, at, id);
create index turns_group on longshore.turns (queue, grp, priority desc, at);
-- The turns of groups with a rate.
create index turns_paced on longshore.turns (queue, grp, tat) where tat is not null;
create index turns_paced_at on longshore.turns (queue, at) where tat is not null;

-- ---- flows ----------------------------------------------------------------

-- Flows: graphs of jobs. `members` counts all jobs of the flow, `open` those that have not ended, `failed` those
-- that ended without success, except tasks that were skipped, and `links` how many tasks its tasks wait for. More
-- members can be added until the flow is `sealed`. `owned`: the members are the children of the job with the flow's
-- id. `cancelling_at`: when the cancel of the members last made a step, if it has not ended. The numbers lag behind
-- the jobs by what `flow_changes` contains.
create table longshore.flows (
    id               uuid primary key,
    created_at       timestamptz not null,
    deadline         timestamptz,
    ended_at         timestamptz,
    members          bigint not null check (members >= 0),
    open             bigint not null check (open >= 0),
    failed           bigint not null default 0 check (failed >= 0),
    links            bigint not null default 0,
    sealed           boolean not null,
    owned            boolean not null default false,
    cancelled        boolean not null default false,
    cancelling_at    timestamptz,
    name             text not null check (octet_length(name) between 1 and 128),
    key              text unique check (octet_length(key) between 1 and 512)
) with (fillfactor = 50);

create index flows_deadline on longshore.flows (deadline) where ended_at is null and not cancelled;
create index flows_cancelling on longshore.flows (cancelling_at) where cancelling_at is not null;
create index flows_ended on longshore.flows (ended_at) where ended_at is not null;

-- The parts of flows that were added under an idempotency key. The id is a hash of the key and the request. They are
-- kept as long as their flow.
create table longshore.flow_parts (
    flow             uuid not null,
    id               uuid not null,
    primary key (flow, id)
);

-- Which jobs wait for which: `child` waits until `parent`, a job or a flow, ends. `met` is null until
-- then, and says afterwards whether it ended as the condition requires.
create table longshore.links (
    parent           uuid not null,
    child            uuid not null,
    met              boolean,
    condition        text not null check (condition in ('succeeded', 'ended', 'failed')),
    primary key (parent, child)
) with (fillfactor = 70);

create index links_child on longshore.links (child, parent);

-- The ends of members of flows (`succeeded` is not null), and members that run again, until `advance` has
-- followed them. `failure`: it counts as a failure of the flow, or did. `counted`: the numbers of the flow contain it
-- already. Without a job: look at the flow.
create sequence longshore.flow_change_ids;
create table longshore.flow_changes (
    id               bigint not null primary key default nextval('longshore.flow_change_ids'),
    flow             uuid not null,
    job              uuid,
    succeeded        boolean,
    failure          boolean not null default false,
    counted          boolean not null default false
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

create index flow_changes_flow on longshore.flow_changes (flow, id);
-- Members that run again are followed first.
create index flow_changes_returns on longshore.flow_changes (flow, id) where job is not null and succeeded is null;

-- ---- workers and schedules ------------------------------------------------

-- `schema_version`: the one that the worker was built for. `host`, `pid` and `version` are null if they are unknown,
-- for example for a worker over HTTP.
create table longshore.workers (
    id               uuid primary key,
    name             text not null,
    queues           text[] not null,
    kinds            text[],
    concurrency      integer not null,
    stale_after_ms   bigint not null check (stale_after_ms > 0),
    started_at       timestamptz not null,
    heartbeat_at     timestamptz not null,
    dead_at          timestamptz,
    host             text,
    pid              bigint,
    version          text,
    schema_version   bigint not null
) with (fillfactor = 50);

-- A worker that a later migration does not allow any more cannot register or send a heartbeat.
create function longshore.refuse_old_worker() returns trigger
language plpgsql
as $$
declare
  oldest bigint := (select max(m.oldest_worker) from longshore.migrations m);
begin
  if new.dead_at is null and new.schema_version < oldest then
    raise exception 'worker %: it was built for schema version %, but these tables need % or later; upgrade it',
                    new.name, new.schema_version, oldest
      using errcode = '55000';
  end if;
  return new;
end
$$;

create trigger refuse_old_worker
    before insert or update of heartbeat_at on longshore.workers
    for each row execute function longshore.refuse_old_worker();

create table longshore.schedules (
    name             text primary key check (octet_length(name) between 1 and 128),
    expression       text not null,
    zone             text not null,
    missed           text not null,
    template         text not null,
    paused           boolean not null default false,
    next_at          timestamptz not null,
    last_at          timestamptz
);

-- ---- the server -----------------------------------------------------------

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

-- Logins of browsers, by the hash of the cookie. A session ends with its token.
create table longshore.sessions (
    hash             bytea primary key,
    token            uuid not null,
    created_at       timestamptz not null,
    expires_at       timestamptz not null
);

create index sessions_expires_at on longshore.sessions (expires_at);

-- What workers and operators have declared about each kind of job.
create table longshore.kinds (
    name             text primary key check (octet_length(name) between 1 and 128),
    schema           json,
    defaults         json,
    updated_at       timestamptz not null
);

-- The kinds that workers with a token limited to queues describe. They apply to jobs of one queue.
create table longshore.queue_kinds (
    queue            text not null check (octet_length(queue) between 1 and 128),
    name             text not null check (octet_length(name) between 1 and 128),
    schema           json,
    defaults         json,
    updated_at       timestamptz not null,
    primary key (name, queue)
);

-- Changes of any number of jobs. The process that works on one has taken it until `taken_until`; when that has passed,
-- another process continues behind `cursor`. `locked_cursor`: as in `operation_locked`.
create table longshore.operations (
    id               uuid primary key,
    action           text not null check (action in ('cancel', 'retry', 'delete')),
    filter           json,     -- as in GET /jobs
    ids              uuid[],   -- or these jobs, highest first
    queues           text[],   -- only jobs of these queues
    state            text not null check (state in ('running', 'stopped', 'done', 'failed')),
    created_at       timestamptz not null,
    created_by       text,     -- the name of the token
    updated_at       timestamptz not null,
    ended_at         timestamptz,
    cursor           uuid,
    examined         bigint not null default 0,
    changed          bigint not null default 0,
    skipped          bigint not null default 0,
    expected         bigint,   -- how many jobs matched at the beginning, if that is known
    error            text,     -- why it failed, or why a step has to be tried again
    taken_by         uuid,
    taken_until      timestamptz,
    locked_cursor    uuid,
    check ((filter is null) <> (ids is null))
);

create index operations_created_at on longshore.operations (created_at desc, id desc);
create index operations_running on longshore.operations (created_at, id) where state = 'running';
create index operations_ended on longshore.operations (updated_at) where state <> 'running';

-- The jobs that an operation has passed by, because another transaction had locked them. It visits them again at its
-- end, in rounds; `locked_cursor` is how far a round has come.
create table longshore.operation_locked (
    operation        uuid not null,
    job              uuid not null,
    primary key (operation, job)
);

-- ---- statistics -----------------------------------------------------------

-- Pre-aggregated counts, so that statistics need no scan of `finished`: how many
-- jobs ended in a minute, and by how much the number of kept jobs changed. Each
-- settle batch inserts rows at level 0. Upkeep folds them into minutes (1),
-- hours (2) and one row for everything older (3).
create table longshore.tallies (
    minute           timestamptz not null,
    ended            bigint not null,
    kept             bigint not null,
    outcome          longshore.outcome not null,
    run_bucket       smallint not null,
    level            smallint not null default 0,
    queue            text not null,
    kind             text not null
) with (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

-- As for `turns`.
alter table longshore.tallies replica identity full;

create index tallies_level on longshore.tallies (level, minute);

-- Logarithmic buckets, four per doubling of the duration: within a fifth of the
-- true value. Eight would be finer than anyone needs.
create function longshore.run_bucket(started timestamptz, ended timestamptz) returns smallint
language sql immutable parallel safe
as 'select floor(4 * ln(1 + 1000 * greatest(0, date_part(''epoch'', ended - started))) / ln(2.0::float8))::smallint';

-- Failures by their fingerprint: a hash of the kind and of the error without what differs from job to job. A settle
-- only adds a row to `error_notes`, because all settles would wait for the same row here while a dependency is down.
-- Upkeep folds the notes.
create table longshore.error_groups (
    fingerprint      bigint primary key,
    kind             text not null,
    attempts         bigint not null,
    first_seen       timestamptz not null,
    last_seen        timestamptz not null,
    job              uuid not null,   -- the newest one
    error            text not null    -- of that job
);

create index error_groups_last_seen on longshore.error_groups (last_seen desc, fingerprint);

create table longshore.error_notes (
    id               bigint generated always as identity primary key,
    fingerprint      bigint not null,
    attempts         bigint not null,
    seen_at          timestamptz not null,
    job              uuid not null,
    kind             text not null,
    error            text not null
) with (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

-- History for charts. Processes add what they have counted every few seconds, and one of them the state of the queues
-- once a minute. Upkeep folds minutes into hours, and removes them after eight days.
create table longshore.measures (
    minute           timestamptz not null,
    value            bigint not null,
    bucket           smallint not null,   -- of a waiting time, as in `tallies`
    what             text not null check (what in ('waited', 'failed', 'depth', 'overdue')),
    queue            text not null,       -- empty for all queues together
    kind             text not null,       -- empty if the value is about the whole queue
    primary key (minute, what, queue, kind, bucket)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

-- ---- upkeep ---------------------------------------------------------------

-- Which table `finished_ranges` describes: another one after the database was copied, and after `vacuum full`.
create function longshore.storage_of_finished() returns text
language plpgsql stable
as $$
declare
  server text;
begin
  begin
    server := (select system_identifier from pg_control_system());
  exception when others then   -- not permitted on this server
    server := '';
  end;
  return concat_ws('/', server, (select oid from pg_database where datname = current_database()),
                   pg_relation_filenode('longshore.finished'));
end
$$;

-- The state of the upkeep passes. A pass locks its row while it runs. `looked_at`: when retention last looked for ranges
-- that are new; jobs in new ranges ended later. `storage`: the one that
-- `finished_ranges` describes.
create table longshore.upkeep (
    name             text primary key,
    cursor           uuid,
    looked_at        timestamptz,
    storage          text
);

insert into longshore.upkeep (name) values ('retain'), ('fold'), ('error_groups'), ('measures'), ('samples');

-- What retention knows about each range of 16 blocks of `finished`: when the range
-- was last read, and the end of the oldest job of each outcome that it left there.
-- Rows are stored in the order in which jobs end, so a range holds jobs of about the
-- same age, and retention reads a range only when something in it may have expired.
-- An index on `finished_at` would do the same at 67 bytes of WAL per job.
create table longshore.finished_ranges (
    first_block      bigint primary key,
    read_at          timestamptz not null,
    succeeded        timestamptz,
    cancelled        timestamptz,
    failed_permanent timestamptz
) with (fillfactor = 50, autovacuum_vacuum_cost_delay = 0);

-- ---- size -----------------------------------------------------------------

-- Postgres plans a full scan for a table that is almost empty, and keeps that plan
-- after a million jobs have arrived, until the next autovacuum. So the tables are
-- never that small: each one is grown to a megabyte here and never truncated, and
-- the planner prefers the indexes from the first job on.
alter table longshore.jobs alter options set storage plain;
alter table longshore.ready alter flags set storage plain;
alter table longshore.running alter flags set storage plain;
alter table longshore.finished alter last_error set storage plain;
alter table longshore.attempts alter error set storage plain;
alter table longshore.keys alter key set storage plain;

insert into longshore.jobs (id, created_at, run_at, priority, max_attempts, kind, queue, payload, options)
select gen_random_uuid(), now(), now(), 0, 1, 'x', 'x', 'null', to_json(repeat('x', 7000))
  from generate_series(1, 128);
insert into longshore.ready (id, run_at, since, lease_no, priority, attempt, max_attempts, interruptions, keyed,
                             kind, queue, flags)
select id, now(), now(), 0, 0, 0, 1, 0, false, 'x', 'x', array[repeat('x', 7000)]
  from longshore.jobs;
insert into longshore.running (id, worker, claimed_at, lease_no, priority, attempt, max_attempts, interruptions,
                               keyed, kind, queue, flags)
select id, id, now(), 1, 0, 1, 1, 0, false, 'x', 'x', array[repeat('x', 7000)]
  from longshore.jobs;
insert into longshore.finished (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions, last_error)
select id, now(), 0, 'succeeded', 0, 1, 0, repeat('x', 7000)
  from longshore.jobs;
insert into longshore.attempts (job, lease_no, attempt, what, started_at, ended_at, error)
select id, 1, 1, 'failed', now(), now(), repeat('x', 7000)
  from longshore.jobs;
insert into longshore.keys (key, job)
select rpad(n::text, 2000, 'x'), gen_random_uuid()
  from generate_series(1, 512) as n;
insert into longshore.merged_requests (id, job, replaced, idempotency_key)
select gen_random_uuid(), gen_random_uuid(), false, rpad(n::text, 500, 'x')
  from generate_series(1, 1800) as n;
insert into longshore.turns (at, priority, queue, grp)
select now(), 0, rpad(n::text, 128, 'x'), rpad(n::text, 128, 'x')
  from generate_series(1, 3500) as n;

delete from longshore.jobs;
delete from longshore.ready;
delete from longshore.running;
delete from longshore.finished;
delete from longshore.attempts;
delete from longshore.keys;
delete from longshore.merged_requests;
delete from longshore.turns;

alter table longshore.jobs alter options set storage extended;
alter table longshore.ready alter flags set storage extended;
alter table longshore.running alter flags set storage extended;
alter table longshore.finished alter last_error set storage extended;
alter table longshore.attempts alter error set storage extended;
alter table longshore.keys alter key set storage extended;
