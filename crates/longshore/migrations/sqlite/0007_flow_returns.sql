-- Flows: how many links one has, which changes its numbers contain already, and members that run again.
--
-- Workers of version 6 would count a task that comes back twice. So `migrate` refuses this migration while one of
-- them is alive, and none can register or send a heartbeat afterwards.
--
-- Runs inside one transaction.

update workers set dead_at = heartbeat_at where dead_at is null;

drop trigger refuse_old_worker;
create trigger refuse_old_worker
before insert on workers
  when coalesce(new.schema_version, 0) < 7 and new.dead_at is null
begin
    select raise(abort, 'this version of longshore is older than the database and would ignore limits of groups or changes of flows; upgrade it');
end;

drop trigger refuse_old_heartbeat;
create trigger refuse_old_heartbeat
before update of heartbeat_at on workers
  when coalesce(new.schema_version, 0) < 7 and new.dead_at is null
begin
    select raise(abort, 'this version of longshore is older than the database and would ignore limits of groups or changes of flows; upgrade it');
end;

-- How many tasks the tasks of the flow wait for.
alter table flows add column links integer not null default 0;

update flows
   set links = (select count(*)
                  from links l
                  join jobs j on j.id = l.child
                 where j.flow = flows.id);

-- Whether the numbers of the flow contain the change already.
alter table flow_changes add column counted integer not null default 0 check (counted in (0, 1));

-- Members that run again are followed first.
create index flow_changes_returns on flow_changes (flow, id) where job is not null and succeeded is null;
