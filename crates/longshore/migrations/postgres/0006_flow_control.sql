-- Groups (limits, rates, fair turns) and flows (jobs that wait for other jobs).
--
-- Workers of earlier versions would ignore the limits of groups. So `migrate` refuses this
-- migration while one of them is alive, and none can register or send a heartbeat afterwards.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

-- Workers whose heartbeat is too old may still run. They must not claim any more.
update longshore.workers set dead_at = longshore.clock() where dead_at is null;

-- The schema version that the worker was built for. Null: before version 6.
alter table longshore.workers add column schema_version integer;

create function longshore.refuse_old_worker() returns trigger
language plpgsql
as $$
begin
  raise exception 'worker %: this version of longshore is older than the database and would ignore the limits of groups; upgrade it', new.name
    using errcode = '55000';
end
$$;

create trigger refuse_old_worker
    before insert or update of heartbeat_at on longshore.workers
    for each row
    when (coalesce(new.schema_version, 0) < 6 and new.dead_at is null)
    execute function longshore.refuse_old_worker();

-- Null for jobs without a group or a flow.
alter table longshore.jobs add column grp text, add column flow uuid, add column task text;
alter table longshore.ready add column grp text, add column flow uuid;
alter table longshore.running add column grp text, add column flow uuid;
alter table longshore.finished add column flow uuid;
-- A task that waits for others of its flow. Its time is the end of the year 9999.
alter table longshore.ready add column held boolean;
-- A task that was cancelled because it could never start.
alter table longshore.finished add column skipped boolean;
-- The limit of the group when the job was claimed, null for none. If there was one, the end of the
-- lease may let another job of the group start.
alter table longshore.running add column gate integer;

create index jobs_flow on longshore.jobs (flow, id) where flow is not null;
create index jobs_task on longshore.jobs (flow, task) where task is not null;

-- The jobs of groups have an index of their own: they are claimed by turns.
drop index longshore.ready_claim;
create index ready_claim
    on longshore.ready (queue, priority desc, run_at, id)
 where interruptions = 0 and grp is null;
drop index longshore.ready_suspects;
create index ready_suspects
    on longshore.ready (queue, priority desc, run_at, id)
 where interruptions > 0 and grp is null;
create index ready_groups
    on longshore.ready (queue, grp, priority desc, run_at, id)
 where grp is not null;
create index ready_group_suspects
    on longshore.ready (queue, grp, priority desc, run_at, id)
 where grp is not null and interruptions > 0;
create index running_groups
    on longshore.running (queue, grp)
 where grp is not null;

-- Each group with waiting jobs has at least one turn per priority, due when its next job is.
-- Whatever adds a job inserts a turn; a claim deletes those of a group and inserts at most one
-- per priority. Rows are never updated. `tat` is the state of the group's rate: when the
-- jobs started so far would have started at an even pace. `allowance` is how many jobs the group
-- may still start before it goes to the end of the line, if a claim stopped in between.
create sequence longshore.turn_ids;
create table longshore.turns (
    id               bigint not null default nextval('longshore.turn_ids'),
    at               timestamptz not null,
    tat              timestamptz,
    allowance        integer,
    priority         smallint not null,
    queue            text not null,
    grp              text not null
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

create index turns_line on longshore.turns (queue, priority desc, at, id);
create index turns_group on longshore.turns (queue, grp, priority desc, at);
-- The turns of groups with a rate.
create index turns_paced on longshore.turns (queue, grp, tat) where tat is not null;
create index turns_paced_at on longshore.turns (queue, at) where tat is not null;

-- Grown to a megabyte, like the tables of the first migration, and for the same reason.
insert into longshore.turns (at, priority, queue, grp)
select now(), 0, rpad(n::text, 128, 'x'), rpad(n::text, 128, 'x')
  from generate_series(1, 3500) as n;
delete from longshore.turns;

-- The rate of a whole queue, its state, and the defaults for the queue's groups. A rate is
-- `rate` starts per `rate_ms` milliseconds, up to `burst` of them at once.
alter table longshore.queues
    add column rate             integer check (rate >= 1),
    add column rate_ms          bigint check (rate_ms >= 1),
    add column burst            integer check (burst >= 1),
    add column tat              timestamptz,
    add column group_max_running integer check (group_max_running >= 1),
    add column group_rate       integer check (group_rate >= 1),
    add column group_rate_ms    bigint check (group_rate_ms >= 1),
    add column group_burst      integer check (group_burst >= 1),
    add check ((rate is null) = (rate_ms is null) and (rate is null) = (burst is null)),
    add check ((group_rate is null) = (group_rate_ms is null) and (group_rate is null) = (group_burst is null));

-- Groups whose settings differ from the defaults of their queue.
create table longshore.groups (
    queue            text not null check (octet_length(queue) between 1 and 128),
    name             text not null check (octet_length(name) between 1 and 128),
    paused           boolean not null default false,
    max_running      integer check (max_running >= 1),
    rate             integer check (rate >= 1),
    rate_ms          bigint check (rate_ms >= 1),
    burst            integer check (burst >= 1),
    weight           integer not null default 1 check (weight between 1 and 100),
    primary key (queue, name),
    check ((rate is null) = (rate_ms is null) and (rate is null) = (burst is null))
);

-- Flows: graphs of jobs. `members` counts all jobs of the flow, `open` those that have not ended, and `failed`
-- those that ended without success, except tasks that were skipped. More members can be added until the
-- flow is `sealed`. `owned`: the members are the children of the job with the flow's id. `cancelling_at`: when the
-- cancel of the members last made a step, if it has not ended. The numbers lag behind the jobs by what `flow_changes` contains.
create table longshore.flows (
    id               uuid primary key,
    created_at       timestamptz not null,
    deadline         timestamptz,
    ended_at         timestamptz,
    members          bigint not null check (members >= 0),
    open             bigint not null check (open >= 0),
    failed           bigint not null default 0 check (failed >= 0),
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
-- followed them. `failure`: it counts as a failure of the flow, or did. Without a job: look at the flow.
create sequence longshore.flow_change_ids;
create table longshore.flow_changes (
    id               bigint not null primary key default nextval('longshore.flow_change_ids'),
    flow             uuid not null,
    job              uuid,
    succeeded        boolean,
    failure          boolean not null default false
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

create index flow_changes_flow on longshore.flow_changes (flow, id);

-- It gets more parameters; functions.sql creates it again.
drop function if exists longshore.enqueue(
    text, json, text, integer, integer, timestamptz, interval, text, text, text, interval, text[], json, uuid, boolean);
