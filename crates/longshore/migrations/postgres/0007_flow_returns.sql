-- Flows: how many links one has, which changes its numbers contain already, and members that run again.
--
-- Workers of version 6 would count a task that comes back twice. So `migrate` refuses this migration while one of
-- them is alive, and none can register or send a heartbeat afterwards.
--
-- Runs inside one transaction. `longshore.` is replaced by the configured schema.

update longshore.workers set dead_at = longshore.clock() where dead_at is null;

create or replace function longshore.refuse_old_worker() returns trigger
language plpgsql
as $$
begin
  raise exception 'worker %: this version of longshore is older than the database and would ignore limits of groups or changes of flows; upgrade it', new.name
    using errcode = '55000';
end
$$;

drop trigger refuse_old_worker on longshore.workers;
create trigger refuse_old_worker
    before insert or update of heartbeat_at on longshore.workers
    for each row
    when (coalesce(new.schema_version, 0) < 7 and new.dead_at is null)
    execute function longshore.refuse_old_worker();

-- How many tasks the tasks of the flow wait for.
alter table longshore.flows add column links bigint not null default 0;

update longshore.flows f
   set links = l.links
  from (select j.flow, count(*) as links
          from longshore.links l
          join longshore.jobs j on j.id = l.child
         group by j.flow) as l
 where f.id = l.flow;

-- Whether the numbers of the flow contain the change already.
alter table longshore.flow_changes add column counted boolean not null default false;

-- Members that run again are followed first.
create index flow_changes_returns on longshore.flow_changes (flow, id) where job is not null and succeeded is null;
