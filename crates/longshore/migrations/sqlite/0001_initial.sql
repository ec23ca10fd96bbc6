-- The tables. Until the first release this script is edited in place, and a build refuses a database that another
-- revision of it has made. Afterwards it never changes: a later script changes what it made.
--
-- The same tables as on Postgres, in the same words, with these differences of the dialect: ids are 16-byte
-- blobs, which sort like the UUIDs; times are microseconds since 1970 in UTC;
-- lists are JSON text; booleans are 0 and 1. No rows are identified for publications.
--
-- Runs inside one transaction, before views.sql.

-- The engine's clock is the host's, unless a test pins it here.
create table clock (
    id               integer primary key check (id = 1),
    pinned           integer
) strict;

insert into clock (id) values (1);

-- ---- jobs -----------------------------------------------------------------

-- Requests: written once, and changed only by an operator's edit or a key
-- replacement while the job waits. Payloads are large, so this is a rowid table:
-- rows are stored in order of arrival, with a narrow index on the id. The payload
-- is the last column, so that reading the others never follows its overflow pages.
-- `grp`, `flow` and `task` are null for jobs without a group or a flow.
create table jobs (
    id               blob not null unique check (length(id) = 16),
    created_at       integer not null,
    run_at           integer not null,
    timeout_ms       integer check (timeout_ms > 0),
    priority         integer not null check (priority between -32768 and 32767),
    max_attempts     integer not null check (max_attempts between 1 and 32767),
    kind             text not null check (length(cast(kind as blob)) between 1 and 128),
    queue            text not null check (length(cast(queue as blob)) between 1 and 128),
    flags            text,
    options          text,
    idempotency_key  text check (length(cast(idempotency_key as blob)) between 1 and 512),
    unique_key       text check (length(cast(unique_key as blob)) between 1 and 512),
    grp              text,
    flow             blob check (length(flow) = 16),
    task             text,
    payload          text not null
) strict;

create unique index jobs_idempotency_key
    on jobs (idempotency_key)
 where idempotency_key is not null;
create index jobs_flow on jobs (flow, id) where flow is not null;

-- Waiting jobs. Rows are never updated: a change deletes and inserts. `held`: a task that waits for
-- others of its flow; its time is the end of the year 9999.
create table ready (
    id               blob not null primary key check (length(id) = 16),
    run_at           integer not null,
    since            integer not null,
    timeout_ms       integer,
    lease_no         integer not null check (lease_no >= 0),
    priority         integer not null,
    attempt          integer not null,
    max_attempts     integer not null,
    interruptions    integer not null check (interruptions >= 0),
    keyed            integer not null check (keyed in (0, 1)),
    kind             text not null,
    queue            text not null,
    flags            text,
    grp              text,
    flow             blob,
    held             integer check (held in (0, 1)),
    check (attempt >= 0 and attempt < max_attempts)
) strict, without rowid;

-- Jobs that were interrupted before have their own index: a claim takes at
-- most one of them. So have the jobs of groups: they are claimed by turns.
-- The indexes end with the kind, so that a claim can skip jobs of kinds it does not handle
-- without reading their rows. The first two include `grp`, although it is null, because SQLite would
-- read the table otherwise.
create index ready_claim
    on ready (queue, priority desc, run_at, id, kind, grp)
 where interruptions = 0 and grp is null;
create index ready_suspects
    on ready (queue, priority desc, run_at, id, kind, grp)
 where interruptions > 0 and grp is null;
create index ready_groups
    on ready (queue, grp, priority desc, run_at, id, kind, interruptions)
 where grp is not null;
create index ready_group_suspects
    on ready (queue, grp, priority desc, run_at, id, kind)
 where grp is not null and interruptions > 0;

-- Live leases. The primary key allows at most one lease per job. `gate`: the limit of the group when the
-- job was claimed, null for none. If there was one, the end of the lease may let another job of the group start.
create table running (
    id               blob not null primary key check (length(id) = 16),
    worker           blob not null check (length(worker) = 16),
    claimed_at       integer not null,
    timeout_ms       integer,
    lease_no         integer not null check (lease_no >= 1),
    priority         integer not null,
    attempt          integer not null,
    max_attempts     integer not null,
    interruptions    integer not null check (interruptions >= 0),
    cancel_requested integer not null default 0 check (cancel_requested in (0, 1)),
    superseded       integer not null default 0 check (superseded in (0, 1)),
    keyed            integer not null check (keyed in (0, 1)),
    kind             text not null,
    queue            text not null,
    flags            text,
    started_at       integer,
    progress         text,
    grp              text,
    flow             blob,
    gate             integer,
    check (attempt >= 1 and attempt <= max_attempts)
) strict, without rowid;

-- The leases whose jobs are to be cancelled, by worker. A worker reads them when it is
-- notified of a cancel. Almost all leases are in no such entry, so a claim does not
-- write to this index.
create index running_cancels
    on running (worker)
 where cancel_requested;
create index running_groups
    on running (queue, grp)
 where grp is not null;

-- Finished jobs. Append-only, except for retention and an operator's retry. `skipped`: a task that was
-- cancelled because it could never start. `error_group`: the fingerprint of the last error, as in `error_groups`.
create table finished (
    id               blob not null primary key check (length(id) = 16),
    started_at       integer,
    finished_at      integer not null,
    finished_by      blob check (length(finished_by) = 16),
    lease_no         integer not null check (lease_no >= 0),
    outcome          text not null check (outcome in ('succeeded', 'failed_permanent', 'cancelled')),
    attempts         integer not null,
    max_attempts     integer not null,
    interruptions    integer not null check (interruptions >= 0),
    last_error       text,
    result           text,
    flow             blob,
    skipped          integer check (skipped in (0, 1)),
    error_group      integer,
    check (attempts >= 0 and attempts <= max_attempts)
) strict, without rowid;

-- Dead letters and cancelled jobs. Partial, so that successes cost nothing.
create index finished_unsuccessful
    on finished (outcome, id)
 where outcome <> 'succeeded';
create index finished_error_groups on finished (error_group, id) where error_group is not null;

-- Attempts that did not succeed. Each lease ends once, hence the primary key. `omitted`: how many older rows of the
-- job were removed when this row was written, including those that earlier rows counted; null means none.
create table attempts (
    job              blob not null check (length(job) = 16),
    lease_no         integer not null,
    attempt          integer not null,
    what             text not null check (what in ('failed', 'interrupted', 'snoozed', 'released')),
    worker           blob check (length(worker) = 16),
    started_at       integer not null,
    ended_at         integer not null,
    error            text,
    omitted          integer,
    error_group      integer,
    primary key (job, lease_no)
) strict, without rowid;

-- Unique keys of live jobs: the owner is waiting or running.
create table keys (
    key              text not null primary key,
    job              blob not null unique check (length(job) = 16)
) strict, without rowid;

-- Requests that were merged into another job: a replacement, or a deduplicated request
-- with an idempotency key. Their ids and keys return that job for as long as it is kept.
-- `replaced` says which of the two. A key is either in `jobs` or here.
create table merged_requests (
    id               blob not null primary key check (length(id) = 16),
    job              blob not null check (length(job) = 16),
    replaced         integer not null check (replaced in (0, 1)),
    idempotency_key  text unique check (length(cast(idempotency_key as blob)) between 1 and 512)
) strict, without rowid;

create index merged_requests_job on merged_requests (job);

create table checkpoints (
    job              blob not null primary key check (length(job) = 16),
    lease_no         integer not null,
    data             text not null,
    saved_at         integer not null
) strict;

-- ---- steps and events -----------------------------------------------------

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

create index events_fresh on events (emitted_at) where fresh;
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
create index waits_pending on waits (event, job) where not woken;

-- ---- queues and groups ----------------------------------------------------

-- A queue that was paused or has a limit or a rate, and the defaults for its groups. A rate is `rate` starts per
-- `rate_ms` milliseconds, up to `burst` of them at once. `tat` is its state, as in `turns`.
create table queues (
    name             text not null primary key check (length(cast(name as blob)) between 1 and 128),
    paused           integer not null default 0 check (paused in (0, 1)),
    max_running      integer check (max_running >= 1),
    rate             integer check (rate >= 1),
    rate_ms          integer check (rate_ms >= 1),
    burst            integer check (burst >= 1),
    tat              integer,
    group_max_running integer check (group_max_running >= 1),
    group_rate       integer check (group_rate >= 1),
    group_rate_ms    integer check (group_rate_ms >= 1),
    group_burst      integer check (group_burst >= 1),
    check ((rate is null) = (rate_ms is null) and (rate is null) = (burst is null)),
    check ((group_rate is null) = (group_rate_ms is null) and (group_rate is null) = (group_burst is null))
) strict, without rowid;

-- Groups whose settings differ from the defaults of their queue.
create table groups (
    queue            text not null check (length(cast(queue as blob)) between 1 and 128),
    name             text not null check (length(cast(name as blob)) between 1 and 128),
    paused           integer not null default 0 check (paused in (0, 1)),
    max_running      integer check (max_running >= 1),
    rate             integer check (rate >= 1),
    rate_ms          integer check (rate_ms >= 1),
    burst            integer check (burst >= 1),
    primary key (queue, name),
    check ((rate is null) = (rate_ms is null) and (rate is null) = (burst is null))
) strict, without rowid;

-- Each group with waiting jobs has at least one turn per priority, due when its next job is.
-- Whatever adds a job inserts a turn; a claim deletes those of a group and inserts at most one
-- per priority. Rows are never updated. `tat` is the state of the group's rate: when the
-- jobs started so far would have started at an even pace.
create table turns (
    id               integer primary key autoincrement,   -- an id is never used again
    at               integer not null,
    tat              integer,
    priority         integer not null,
    queue            text not null,
    grp              text not null
) strict;

create index turns_line on turns (queue, priority desc, at, id, grp);
create index turns_group on turns (queue, grp, priority desc, at);
-- The turns of groups with a rate.
create index turns_paced on turns (queue, grp, tat) where tat is not null;
create index turns_paced_at on turns (queue, at) where tat is not null;

-- ---- flows ----------------------------------------------------------------

-- Flows: graphs of jobs. `members` counts all jobs of the flow, `open` those that have not ended, `failed` those
-- that ended without success, except tasks that were skipped, and `links` how many tasks its tasks wait for. More
-- members can be added until the flow is `sealed`. `owned`: the members are the children of the job with the flow's
-- id. `cancelling_at`: when the cancel of the members last made a step, if it has not ended. The numbers lag behind
-- the jobs by what `flow_changes` contains.
create table flows (
    id               blob not null primary key check (length(id) = 16),
    created_at       integer not null,
    deadline         integer,
    ended_at         integer,
    members          integer not null check (members >= 0),
    open             integer not null check (open >= 0),
    failed           integer not null default 0 check (failed >= 0),
    links            integer not null default 0,
    sealed           integer not null check (sealed in (0, 1)),
    owned            integer not null default 0 check (owned in (0, 1)),
    cancelled        integer not null default 0 check (cancelled in (0, 1)),
    cancelling_at    integer,
    name             text not null check (length(cast(name as blob)) between 1 and 128),
    key              text unique check (length(cast(key as blob)) between 1 and 512)
) strict, without rowid;

create index flows_deadline on flows (deadline) where ended_at is null and not cancelled;
create index flows_cancelling on flows (cancelling_at) where cancelling_at is not null;
create index flows_ended on flows (ended_at) where ended_at is not null;

-- The parts of flows that were added under an idempotency key. The id is a hash of the key and the request. They are
-- kept as long as their flow.
create table flow_parts (
    flow             blob not null check (length(flow) = 16),
    id               blob not null check (length(id) = 16),
    primary key (flow, id)
) strict, without rowid;

-- Which jobs wait for which: `child` waits until `parent`, a job or a flow, ends. `met` is null until
-- then, and says afterwards whether it ended as the condition requires.
create table links (
    parent           blob not null check (length(parent) = 16),
    child            blob not null check (length(child) = 16),
    met              integer check (met in (0, 1)),
    condition        text not null check (condition in ('succeeded', 'ended', 'failed')),
    primary key (parent, child)
) strict, without rowid;

create index links_child on links (child, parent);

-- The ends of members of flows (`succeeded` is not null), and members that run again, until `advance` has
-- followed them. `failure`: it counts as a failure of the flow, or did. `counted`: the numbers of the flow contain it
-- already. Without a job: look at the flow.
create table flow_changes (
    id               integer primary key autoincrement,   -- an id is never used again
    flow             blob not null check (length(flow) = 16),
    job              blob check (length(job) = 16),
    succeeded        integer check (succeeded in (0, 1)),
    failure          integer not null default 0 check (failure in (0, 1)),
    counted          integer not null default 0 check (counted in (0, 1))
) strict;

create index flow_changes_flow on flow_changes (flow, id);
-- Members that run again are followed first.
create index flow_changes_returns on flow_changes (flow, id) where job is not null and succeeded is null;

-- ---- workers and schedules ------------------------------------------------

-- `schema_version`: the one that the worker was built for. `host`, `pid` and `version` are null if they are unknown,
-- for example for a worker over HTTP.
create table workers (
    id               blob not null primary key check (length(id) = 16),
    name             text not null,
    queues           text not null,
    kinds            text,
    concurrency      integer not null,
    stale_after_ms   integer not null check (stale_after_ms > 0),
    started_at       integer not null,
    heartbeat_at     integer not null,
    dead_at          integer,
    host             text,
    pid              integer,
    version          text,
    schema_version   integer not null
) strict, without rowid;

-- A worker that a later migration does not allow any more cannot register or send a heartbeat.
create trigger refuse_old_worker
before insert on workers
  when new.dead_at is null and new.schema_version < (select max(oldest_worker) from migrations)
begin
    select raise(abort, 'this worker was built for an older schema version than these tables need; upgrade it');
end;

create trigger refuse_old_heartbeat
before update of heartbeat_at on workers
  when new.dead_at is null and new.schema_version < (select max(oldest_worker) from migrations)
begin
    select raise(abort, 'this worker was built for an older schema version than these tables need; upgrade it');
end;

create table schedules (
    name             text not null primary key check (length(cast(name as blob)) between 1 and 128),
    expression       text not null,
    zone             text not null,
    missed           text not null,
    template         text not null,
    paused           integer not null default 0 check (paused in (0, 1)),
    next_at          integer not null,
    last_at          integer
) strict, without rowid;

-- ---- the server -----------------------------------------------------------

-- The secret itself is not stored: a presented token is looked up by its hash.
create table tokens (
    id               blob not null primary key check (length(id) = 16),
    name             text not null check (length(cast(name as blob)) between 1 and 128),
    hash             blob not null unique check (length(hash) = 32),
    scopes           text not null,
    queues           text,
    created_at       integer not null,
    expires_at       integer,
    revoked_at       integer
) strict, without rowid;

-- Logins of browsers, by the hash of the cookie. A session ends with its token.
create table sessions (
    hash             blob not null primary key,
    token            blob not null check (length(token) = 16),
    created_at       integer not null,
    expires_at       integer not null
) strict, without rowid;

create index sessions_expires_at on sessions (expires_at);

-- What workers and operators have declared about each kind of job.
create table kinds (
    name             text not null primary key check (length(cast(name as blob)) between 1 and 128),
    schema           text,
    defaults         text,
    updated_at       integer not null
) strict;

-- The kinds that workers with a token limited to queues describe. They apply to jobs of one queue.
create table queue_kinds (
    queue            text not null check (length(cast(queue as blob)) between 1 and 128),
    name             text not null check (length(cast(name as blob)) between 1 and 128),
    schema           text,
    defaults         text,
    updated_at       integer not null,
    primary key (name, queue)
) strict, without rowid;

-- Changes of any number of jobs. The process that works on one has taken it until `taken_until`; when that has passed,
-- another process continues behind `cursor`. `locked_cursor`: as in `operation_locked`.
create table operations (
    id               blob not null primary key check (length(id) = 16),
    action           text not null check (action in ('cancel', 'retry', 'delete')),
    filter           text,     -- as in GET /jobs
    ids              text,     -- or these jobs, highest first, as JSON
    queues           text,     -- only jobs of these queues, as JSON
    state            text not null check (state in ('running', 'stopped', 'done', 'failed')),
    created_at       integer not null,
    created_by       text,     -- the name of the token
    updated_at       integer not null,
    ended_at         integer,
    cursor           blob,
    examined         integer not null default 0,
    changed          integer not null default 0,
    skipped          integer not null default 0,
    expected         integer,  -- how many jobs matched at the beginning, if that is known
    error            text,     -- why it failed, or why a step has to be tried again
    taken_by         blob,
    taken_until      integer,
    locked_cursor    blob,
    check ((filter is null) <> (ids is null))
) strict, without rowid;

create index operations_created_at on operations (created_at desc, id desc);
create index operations_running on operations (created_at, id) where state = 'running';
create index operations_ended on operations (updated_at) where state <> 'running';

-- The jobs that an operation has passed by, because another transaction had locked them. It visits them again at its
-- end, in rounds; `locked_cursor` is how far a round has come.
create table operation_locked (
    operation        blob not null check (length(operation) = 16),
    job              blob not null check (length(job) = 16),
    primary key (operation, job)
) strict, without rowid;

-- ---- statistics -----------------------------------------------------------

-- Pre-aggregated counts, so that statistics need no scan of `finished`: how many
-- jobs ended in a minute, and by how much the number of kept jobs changed. There
-- is one writer at a time, so each batch updates its minute's row. Upkeep folds
-- minutes into hours, and old hours into one row.
create table tallies (
    minute           integer not null,
    queue            text not null,
    kind             text not null,
    outcome          text not null check (outcome in ('succeeded', 'failed_permanent', 'cancelled')),
    run_bucket       integer not null,
    ended            integer not null,
    kept             integer not null,
    primary key (minute, queue, kind, outcome, run_bucket)
) strict, without rowid;

-- Failures by their fingerprint: a hash of the kind and of the error without what differs from job to job. A settle only
-- adds a row to `error_notes`. Upkeep folds the notes.
create table error_groups (
    fingerprint      integer primary key,
    kind             text not null,
    attempts         integer not null,
    first_seen       integer not null,
    last_seen        integer not null,
    job              blob not null,   -- the newest one
    error            text not null    -- of that job
) strict;

create index error_groups_last_seen on error_groups (last_seen desc, fingerprint);

create table error_notes (
    id               integer primary key,
    fingerprint      integer not null,
    attempts         integer not null,
    seen_at          integer not null,
    job              blob not null,
    kind             text not null,
    error            text not null
) strict;

-- History for charts. Processes add what they have counted every few seconds, and one of them the state of the queues
-- once a minute. Upkeep folds minutes into hours, and removes them after eight days.
create table measures (
    minute           integer not null,
    value            integer not null,
    bucket           integer not null,   -- of a waiting time, as in `tallies`
    what             text not null check (what in ('waited', 'failed', 'depth', 'overdue')),
    queue            text not null,      -- empty for all queues together
    kind             text not null,      -- empty if the value is about the whole queue
    primary key (minute, what, queue, kind, bucket)
) strict, without rowid;

-- ---- upkeep ---------------------------------------------------------------

-- The state of the upkeep passes. `looked_at`: when retention last looked for ranges that are new; jobs in new ranges
-- ended later.
create table upkeep (
    name             text not null primary key,
    cursor           blob,
    looked_at        integer
) strict, without rowid;

insert into upkeep (name) values ('retain'), ('fold'), ('error_groups'), ('measures'), ('samples');

-- What retention knows about each range of 1,000 rows of `jobs`: when the range was
-- last read, and the end of the oldest job of each outcome that it left there. Rows
-- are stored in the order in which jobs arrive, so a range holds jobs of about the
-- same age, and retention reads a range only when something in it may have expired.
-- An index on `finished_at` would do the same, but every settle would have to write it.
create table finished_ranges (
    first_row        integer primary key,
    read_at          integer not null,
    succeeded        integer,
    cancelled        integer,
    failed_permanent integer
) strict;
