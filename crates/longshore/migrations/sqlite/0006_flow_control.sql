-- Groups (limits, rates, fair turns) and flows (jobs that wait for other jobs).
--
-- Workers of earlier versions would ignore the limits of groups. So `migrate` refuses this
-- migration while one of them is alive, and none can register or send a heartbeat afterwards.
--
-- Runs inside one transaction.

-- Workers whose heartbeat is too old may still run. They must not claim any more.
update workers set dead_at = heartbeat_at where dead_at is null;

-- The schema version that the worker was built for. Null: before version 6.
alter table workers add column schema_version integer;

create trigger refuse_old_worker
before insert on workers
  when coalesce(new.schema_version, 0) < 6 and new.dead_at is null
begin
    select raise(abort, 'this version of longshore is older than the database and would ignore the limits of groups; upgrade it');
end;

create trigger refuse_old_heartbeat
before update of heartbeat_at on workers
  when coalesce(new.schema_version, 0) < 6 and new.dead_at is null
begin
    select raise(abort, 'this version of longshore is older than the database and would ignore the limits of groups; upgrade it');
end;

-- Null for jobs without a group or a flow.
alter table jobs add column grp text;
alter table jobs add column flow blob;
alter table jobs add column task text;
alter table ready add column grp text;
alter table ready add column flow blob;
alter table running add column grp text;
alter table running add column flow blob;
alter table finished add column flow blob;
-- A task that waits for others of its flow. Its time is the end of the year 9999.
alter table ready add column held integer;
-- A task that was cancelled because it could never start.
alter table finished add column skipped integer;
-- The limit of the group when the job was claimed, null for none. If there was one, the end of the
-- lease may let another job of the group start.
alter table running add column gate integer;

create index jobs_flow on jobs (flow, id) where flow is not null;

-- The jobs of groups have an index of their own: they are claimed by turns. The other two include
-- `grp`, although it is null, because SQLite would read the table otherwise.
drop index ready_claim;
create index ready_claim
    on ready (queue, priority desc, run_at, id, kind, grp)
 where interruptions = 0 and grp is null;
drop index ready_suspects;
create index ready_suspects
    on ready (queue, priority desc, run_at, id, kind, grp)
 where interruptions > 0 and grp is null;
create index ready_groups
    on ready (queue, grp, priority desc, run_at, id, kind, interruptions)
 where grp is not null;
create index ready_group_suspects
    on ready (queue, grp, priority desc, run_at, id, kind)
 where grp is not null and interruptions > 0;
create index running_groups
    on running (queue, grp)
 where grp is not null;

-- Each group with waiting jobs has at least one turn per priority, due when its next job is.
-- Whatever adds a job inserts a turn; a claim deletes those of a group and inserts at most one
-- per priority. Rows are never updated. `tat` is the state of the group's rate: when the
-- jobs started so far would have started at an even pace. `allowance` is how many jobs the group
-- may still start before it goes to the end of the line, if a claim stopped in between.
create table turns (
    id               integer primary key autoincrement,   -- an id is never used again
    at               integer not null,
    tat              integer,
    allowance        integer,
    priority         integer not null,
    queue            text not null,
    grp              text not null
) strict;

create index turns_line on turns (queue, priority desc, at, id, grp);
create index turns_group on turns (queue, grp, priority desc, at);
-- The turns of groups with a rate.
create index turns_paced on turns (queue, grp, tat) where tat is not null;
create index turns_paced_at on turns (queue, at) where tat is not null;

-- The rate of a whole queue, its state, and the defaults for the queue's groups. A rate is
-- `rate` starts per `rate_ms` milliseconds, up to `burst` of them at once.
alter table queues add column rate integer check (rate >= 1);
alter table queues add column rate_ms integer check (rate_ms >= 1);
alter table queues add column burst integer check (burst >= 1);
alter table queues add column tat integer;
alter table queues add column group_max_running integer check (group_max_running >= 1);
alter table queues add column group_rate integer check (group_rate >= 1);
alter table queues add column group_rate_ms integer check (group_rate_ms >= 1);
alter table queues add column group_burst integer check (group_burst >= 1);

-- Groups whose settings differ from the defaults of their queue.
create table groups (
    queue            text not null check (length(cast(queue as blob)) between 1 and 128),
    name             text not null check (length(cast(name as blob)) between 1 and 128),
    paused           integer not null default 0 check (paused in (0, 1)),
    max_running      integer check (max_running >= 1),
    rate             integer check (rate >= 1),
    rate_ms          integer check (rate_ms >= 1),
    burst            integer check (burst >= 1),
    weight           integer not null default 1 check (weight between 1 and 100),
    primary key (queue, name)
) strict, without rowid;

-- Flows: graphs of jobs. `members` counts all jobs of the flow, `open` those that have not ended, and `failed`
-- those that ended without success, except tasks that were skipped. More members can be added until the
-- flow is `sealed`. `owned`: the members are the children of the job with the flow's id. `cancelling_at`: when the
-- cancel of the members last made a step, if it has not ended. The numbers lag behind the jobs by what `flow_changes` contains.
create table flows (
    id               blob not null primary key check (length(id) = 16),
    created_at       integer not null,
    deadline         integer,
    ended_at         integer,
    members          integer not null check (members >= 0),
    open             integer not null check (open >= 0),
    failed           integer not null default 0 check (failed >= 0),
    sealed           integer not null check (sealed in (0, 1)),
    owned            integer not null default 0 check (owned in (0, 1)),
    cancelled        integer not null default 0 check (cancelled in (0, 1)),
    cancelling_at    integer,
    name             text not null check (length(cast(name as blob)) between 1 and 128),
    key              text unique check (length(cast(key as blob)) between 1 and 512)
) strict, without rowid;

create index flows_deadline on flows (deadline) where ended_at is null and cancelled = 0;
create index flows_cancelling on flows (cancelling_at) where cancelling_at is not null;
create index flows_ended on flows (ended_at) where ended_at is not null;

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
-- followed them. `failure`: it counts as a failure of the flow, or did. Without a job: look at the flow.
create table flow_changes (
    id               integer primary key autoincrement,   -- an id is never used again
    flow             blob not null check (length(flow) = 16),
    job              blob check (length(job) = 16),
    succeeded        integer check (succeeded in (0, 1)),
    failure          integer not null default 0 check (failure in (0, 1))
) strict;

create index flow_changes_flow on flow_changes (flow, id);
