-- The view and the functions for programs that use SQL. Every migration runs this
-- script after its numbered scripts, so each definition exists once, here. Older
-- workers and callers keep using the functions: only add arguments at the end, with
-- a default.
--
-- Runs inside the migration's transaction. `longshore.` is replaced by the
-- configured schema.

create or replace view longshore.job_status as
select j.id,
       j.kind,
       j.queue,
       case
         when w.id is not null and w.attempt = 0 and w.interruptions = 0 then 'queued'
         when w.id is not null then 'retrying'
         when r.id is not null then 'running'
         else f.outcome::text
       end as status,
       j.priority,
       coalesce(w.attempt, r.attempt, f.attempts) as attempts,
       j.max_attempts,
       coalesce(w.run_at, j.run_at) as run_at,
       r.worker as locked_by,
       r.claimed_at as locked_at,
       coalesce(r.cancel_requested, f.outcome = 'cancelled', false) as cancel_requested,
       j.created_at,
       coalesce(r.claimed_at, f.started_at) as started_at,
       f.finished_at,
       coalesce(f.last_error, (
         select a.error
           from longshore.attempts a
          where a.job = j.id
            and a.error is not null
          order by a.lease_no desc
          limit 1)) as last_error
  from longshore.jobs j
  left join longshore.ready w on w.id = j.id
  left join longshore.running r on r.id = j.id
  left join longshore.finished f on f.id = j.id;

-- A UUID v7, which sorts by creation time, like the ids the library creates.
create or replace function longshore.new_id() returns uuid
language sql volatile
as $$
select encode(
         set_bit(set_bit(
           overlay(uuid_send(gen_random_uuid())
                   placing substring(int8send((date_part('epoch', clock_timestamp()) * 1000)::bigint) from 3)
                   from 1 for 6),
           52, 1), 53, 1),
         'hex')::uuid
$$;

-- The nesting depth of arrays and objects.
create or replace function longshore.json_depth(value json) returns integer
language plpgsql immutable
as $$
declare
  brackets text := regexp_replace(
    regexp_replace(value::text, '"(\\.|[^"\\])*"', '', 'g'), '[^][{}]', '', 'g');
  depth integer := 0;
  deepest integer := 0;
  bracket text;
begin
  foreach bracket in array string_to_array(brackets, null) loop
    if bracket in ('[', '{') then
      depth := depth + 1;
      deepest := greatest(deepest, depth);
    else
      depth := depth - 1;
    end if;
  end loop;
  return deepest;
end
$$;

-- Finds NUL and unpaired surrogates, which the type json accepts. Escaped
-- backslashes are replaced first, then complete pairs are removed.
create or replace function longshore.has_bad_characters(value json) returns boolean
language sql immutable
as $$
select regexp_replace(
         regexp_replace(value::text, '\\\\', 'x', 'g'),
         '\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}', '', 'g')
       ~ '\\u(0000|[dD][89a-fA-F])'
$$;

-- Whether these strings are valid as flags or tags.
create or replace function longshore.are_labels(labels text[]) returns boolean
language sql immutable
as $$
select count(*) <= 64
   and coalesce(bool_and(coalesce(octet_length(label) between 1 and 128, false)), true)
  from unnest(labels) as label
$$;

-- A whole number of milliseconds, up to ten years.
create or replace function longshore.is_millis(value json) returns boolean
language sql immutable
as $$
select case
         when json_typeof(value) = 'number' and value::text ~ '^[0-9]{1,20}$'
         then value::text::numeric <= 315360000000
         else false
       end
$$;

-- The sorted list of parts is compared as a whole, which detects missing,
-- unknown and repeated parts.
create or replace function longshore.is_retry_policy(value json) returns boolean
language plpgsql immutable
as $$
declare
  parts text[];
begin
  if json_typeof(value) <> 'object' then
    return false;
  end if;
  parts := array(select part.key from json_each(value) as part order by part.key collate "C");
  return coalesce(
    case value ->> 'policy'
      when 'jitter' then
        parts = array['base_ms', 'cap_ms', 'policy']
        and longshore.is_millis(value -> 'base_ms')
        and longshore.is_millis(value -> 'cap_ms')
        and (value ->> 'base_ms')::numeric <= (value ->> 'cap_ms')::numeric
      when 'exponential' then
        parts = array['cap_ms', 'policy']
        and longshore.is_millis(value -> 'cap_ms')
      when 'fixed' then
        parts = array['delay_ms', 'policy']
        and longshore.is_millis(value -> 'delay_ms')
      when 'list' then
        parts = array['delays_ms', 'policy']
        and json_typeof(value -> 'delays_ms') = 'array'
        and json_array_length(value -> 'delays_ms') between 1 and 1000
        and not exists (
              select 1
                from json_array_elements(value -> 'delays_ms') as delay
               where not longshore.is_millis(delay))
      when 'none' then
        parts = array['policy']
    end, false);
end
$$;

-- What is wrong with the payload of a job or of an event; null if nothing is.
create or replace function longshore.wrong_with_payload(payload json, max_bytes integer) returns text
language sql immutable
as $$
  select case
    when payload is null
      then 'payload: must not be null; pass any JSON value (''null'' is one)'
    when octet_length(payload::text) > max_bytes
      then format('payload: %s bytes of JSON exceed the limit of %s', octet_length(payload::text), max_bytes)
    when longshore.json_depth(payload) > 64
      then 'payload: nested more than 64 deep; flatten it'
    when longshore.has_bad_characters(payload)
      then 'payload: a string contains a NUL character or half a surrogate pair; remove it'
  end
$$;

-- Returns why the library would reject the options, or null if they are valid. A
-- claim must be able to decode whatever is stored.
create or replace function longshore.wrong_with_options(options json) returns text
language plpgsql immutable
as $$
declare
  name text;
  part json;
begin
  if json_typeof(options) <> 'object' then
    return 'options: not an object; use tags, context, metadata, retry and trace';
  end if;
  if longshore.has_bad_characters(options) then
    return 'options: a string contains a NUL character or half a surrogate pair; remove it';
  end if;
  if (select count(*) <> count(distinct each.key) from json_each(options) as each) then
    return 'options: a field is set twice';
  end if;
  for name, part in select * from json_each(options) loop
    case name
      when 'tags' then
        if json_typeof(part) <> 'array'
           or exists (select 1 from json_array_elements(part) as tag where json_typeof(tag) <> 'string')
           or not longshore.are_labels(array(select json_array_elements_text(part))) then
          return 'tags: use an array of at most 64 strings, each of 1 to 128 bytes';
        end if;
      when 'context' then
        if json_typeof(part) <> 'string' or octet_length(part #>> '{}') > 16384 then
          return 'context: use a string of at most 16384 bytes';
        end if;
      when 'trace' then
        if json_typeof(part) <> 'string' or octet_length(part #>> '{}') not between 1 and 512 then
          return 'trace: use a string of 1 to 512 bytes';
        end if;
      when 'metadata' then
        if octet_length(part::text) > 65536 or longshore.json_depth(part) > 64 then
          return 'metadata: use at most 65536 bytes of JSON, nested at most 64 deep';
        end if;
      when 'retry' then
        if not longshore.is_retry_policy(part) then
          return 'retry: use one of the policies jitter (base_ms, and cap_ms not below it), exponential (cap_ms), '
                 'fixed (delay_ms), list (1 to 1000 delays_ms) and none, with whole numbers up to ten years';
        end if;
      else
        return format('options: `%s` does not exist; use tags, context, metadata, retry and trace', name);
    end case;
  end loop;
  return null;
end
$$;

-- Whether one of these idempotency keys belongs to a request that was merged into a job.
-- A statement that stores a job with an idempotency key calls this after the insert. The
-- insert may have waited for a transaction that merged a request with the same key. The
-- function is volatile, so it has a newer snapshot than the statement and sees the key.
create or replace function longshore.has_merged_key(keys text[]) returns boolean
language plpgsql volatile
as $$
begin
  return exists (
    select 1
      from longshore.merged_requests m
      join longshore.jobs j on j.id = m.job
     where m.idempotency_key = any(keys));
end
$$;

-- Stores that a request was merged into a job. Fails with 40001 if the idempotency key
-- was taken meanwhile; the caller rolls back and tries again.
create or replace function longshore.merge_request(
    request          uuid,
    job              uuid,
    replaced         boolean,
    idempotency_key  text
) returns void
language plpgsql
as $$
#variable_conflict use_column
begin
  -- A job that was removed at the same moment as a request was merged into it leaves its
  -- row behind. Such a row has no effect, but would be in the way here.
  delete from longshore.merged_requests m
   where (m.id = merge_request.request or m.idempotency_key = merge_request.idempotency_key)
     and not exists (
       select 1
         from longshore.jobs j
        where j.id = m.job);
  if merge_request.idempotency_key is not null then
    -- The key must not be in both tables. The insert waits for a transaction that stores
    -- a job with this key. A later one waits for this transaction, although the row is
    -- deleted again, and then calls `has_merged_key`.
    insert into longshore.jobs (id, created_at, run_at, priority, max_attempts, kind, queue, payload, idempotency_key)
    values (merge_request.request, now(), now(), 0, 1, 'merged', 'merged', 'null', merge_request.idempotency_key)
        on conflict do nothing;
    if not found then
      raise exception 'idempotency_key: taken at the same moment; try again' using errcode = '40001';
    end if;
    delete from longshore.jobs j where j.id = merge_request.request;
  end if;
  insert into longshore.merged_requests (id, job, replaced, idempotency_key)
  values (merge_request.request, merge_request.job, merge_request.replaced, merge_request.idempotency_key)
      on conflict do nothing;
  if not found then
    raise exception 'idempotency_key: taken at the same moment; try again' using errcode = '40001';
  end if;
end
$$;

-- Adds a turn for a job that was inserted into `ready`. Does nothing without a group.
create or replace function longshore.add_turn(queue text, grp text, priority integer, run_at timestamptz) returns void
language sql
as $$
  insert into longshore.turns (at, priority, queue, grp)
  select greatest(add_turn.run_at, longshore.clock()), add_turn.priority, add_turn.queue, add_turn.grp
   where add_turn.grp is not null
$$;

-- Adds a task to a flow, which is created if it does not exist, and locks the flow until the transaction
-- ends. `after` names tasks that must have succeeded. Returns true if the task has to wait for one of them.
create or replace function longshore.join_flow(flow uuid, job uuid, name text, task text, after text[]) returns boolean
language plpgsql
as $$
#variable_conflict use_column
declare
  parent  text;
  found_id uuid;
  outcome text;
  is_held boolean := null;
  new_links bigint := (select count(distinct n) from unnest(join_flow.after) as n);
begin
  perform 1 from longshore.jobs j where j.id = join_flow.flow;
  if found or join_flow.flow = join_flow.job then
    raise exception 'flow: a job has the id %; use longshore.new_id()', join_flow.flow using errcode = '22023';
  end if;
  insert into longshore.flows (id, name, created_at, members, open, sealed)
  values (join_flow.flow, join_flow.name, longshore.clock(), 0, 0, true)
      on conflict do nothing;
  update longshore.flows f
     set members = f.members + 1,
         open = f.open + 1,
         links = f.links + new_links
   where f.id = join_flow.flow
     and f.ended_at is null
     and not f.cancelled
     and f.members < 1000000
     and (new_links = 0 or f.links + new_links <= 100000);
  if not found then
    raise exception 'flow: % has ended, was cancelled, or has 1000000 members or 100000 links; enqueue all tasks of a flow in one transaction, or use a new flow', join_flow.flow
      using errcode = '22023';
  end if;
  perform 1 from longshore.jobs j where j.id = join_flow.job;
  if found then
    -- Another transaction stored the same job while this one waited for the flow.
    raise exception 'id: the job was stored at the same moment; try again' using errcode = '40001';
  end if;
  perform 1 from longshore.jobs j where j.flow = join_flow.flow and j.task = join_flow.task;
  if found then
    raise exception 'task: `%` is used twice in the flow; give each task its own name', join_flow.task
      using errcode = '22023';
  end if;
  for parent in select distinct n from unnest(join_flow.after) as n loop
    select j.id, (select f.outcome::text from longshore.finished f where f.id = j.id)
      into found_id, outcome
      from longshore.jobs j
     where j.flow = join_flow.flow
       and j.task = parent;
    if not found then
      raise exception 'after: there is no task `%` in the flow; enqueue it first, or correct the name', parent
        using errcode = '22023';
    end if;
    if outcome <> 'succeeded' then
      raise exception 'after: task `%` has ended without success; retry it first', parent
        using errcode = '22023';
    end if;
    if outcome is null then
      is_held := true;
      perform 1 from longshore.flow_changes c where c.flow = join_flow.flow and c.job = found_id;
      if found then
        -- An earlier end of the parent is followed later, and would release the new task.
        raise exception 'after: task `%` was retried a moment ago; try again', parent using errcode = '40001';
      end if;
    end if;
    insert into longshore.links (parent, child, condition, met)
    values (found_id, join_flow.job, 'succeeded', outcome = 'succeeded');
  end loop;
  return is_held;
end
$$;

-- Enqueue from SQL: from triggers, migrations or any language. Contains the same key
-- rules as `rules/keys.rs`; the conformance suite compares the two.
create or replace function longshore.enqueue(
    kind             text,
    payload          json default '{}',
    queue            text default 'default',
    priority         integer default 0,
    max_attempts     integer default 3,
    run_at           timestamptz default null,
    delay            interval default null,
    idempotency_key  text default null,
    unique_key       text default null,
    unique_mode      text default 'dedupe',
    timeout          interval default '2 hours',
    flags            text[] default null,
    options          json default null,
    id               uuid default null,
    wake             boolean default true,
    grp              text default null,
    flow             uuid default null,
    task             text default null,
    after            text[] default null
) returns table (job uuid, how text)
language plpgsql
as $$
#variable_conflict use_column
declare
  new_id         uuid := coalesce(enqueue.id, longshore.new_id());
  moment         timestamptz := longshore.clock();
  mode           text := coalesce(enqueue.unique_mode, 'dedupe');
  due            timestamptz;
  timeout_in_ms  bigint;
  labels         text[];
  bad_payload    text := longshore.wrong_with_payload(enqueue.payload, 1048576);
  wrong          text;
  holder         uuid;
  was            record;
  merged         record;
  own_key        text;
  is_held        boolean := null;
begin
  -- The same checks as `NewJob::validate`, which also run before any key lookup.
  wrong := case
    when new_id in ('00000000-0000-0000-0000-000000000000', 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      then 'id: a job cannot have the nil or the max UUID; leave the id out to get a new one'
    when coalesce(octet_length(enqueue.kind), 0) not between 1 and 128
      then 'kind: must have 1 to 128 bytes'
    when coalesce(octet_length(enqueue.queue), 0) not between 1 and 128
      then 'queue: must have 1 to 128 bytes'
    when enqueue.queue = '*'
      then 'queue: `*` means every queue, and only a worker can use it; name one queue'
    when octet_length(enqueue.grp) not between 1 and 128
      then 'grp: must have 1 to 128 bytes'
    when enqueue.flow is null and (enqueue.task is not null or enqueue.after is not null)
      then 'flow: name the flow that the task belongs to; longshore.new_id() makes a new one'
    when enqueue.flow in ('00000000-0000-0000-0000-000000000000', 'ffffffff-ffff-ffff-ffff-ffffffffffff')
      then 'flow: a flow cannot have the nil or the max UUID; longshore.new_id() makes a new one'
    when octet_length(enqueue.task) not between 1 and 128
      then 'task: must have 1 to 128 bytes'
    when enqueue.flow is not null and enqueue.idempotency_key is not null
      then 'idempotency_key: tasks of a flow cannot have keys'
    when enqueue.flow is not null and enqueue.unique_key is not null
      then 'unique_key: tasks of a flow cannot have keys'
    when bad_payload is not null
      then bad_payload
    when coalesce(enqueue.priority, 40000) not between -32768 and 32767
      then format('priority: %s is out of range; use -32768 to 32767', enqueue.priority)
    when coalesce(enqueue.max_attempts, 0) not between 1 and 32767
      then format('max_attempts: %s is out of range; use 1 to 32767', enqueue.max_attempts)
    when enqueue.run_at < '1970-01-01 00:00:00+00' or enqueue.run_at >= '10000-01-01 00:00:00+00'
      then format('run_at: %s is out of range; use the years 1970 to 9999', enqueue.run_at)
    when date_part('epoch', enqueue.delay) not between 0 and 315360000
      then format('delay: %s is out of range; use 0 to 3650 days', enqueue.delay)
    when octet_length(enqueue.idempotency_key) not between 1 and 512
      then 'idempotency_key: must have 1 to 512 bytes'
    when starts_with(enqueue.idempotency_key, 'cron:')
      then 'idempotency_key: `cron:` is reserved for the ticks of schedules; use another prefix'
    when starts_with(enqueue.idempotency_key, chr(31))
      then 'idempotency_key: starts with the control character U+001F, which is reserved; remove it'
    when octet_length(enqueue.unique_key) not between 1 and 512
      then 'unique_key: must have 1 to 512 bytes'
    when starts_with(enqueue.unique_key, chr(31))
      then 'unique_key: starts with the control character U+001F, which is reserved; remove it'
    when mode not in ('dedupe', 'replace', 'preserve_run_at')
      then format('unique_mode: `%s` does not exist; use dedupe, replace or preserve_run_at', mode)
    when enqueue.timeout < '1 ms' or date_part('epoch', enqueue.timeout) > 315360000
      then format('timeout: %s is out of range; use 1 ms to 3650 days, or null for none', enqueue.timeout)
    when enqueue.flags is not null and not longshore.are_labels(enqueue.flags)
      then 'flags: use at most 64, each of 1 to 128 bytes'
    when enqueue.options is not null
      then longshore.wrong_with_options(enqueue.options)
  end;
  if wrong is not null then
    raise exception '%', wrong using errcode = '22023';
  end if;
  due := coalesce(enqueue.run_at, moment + coalesce(enqueue.delay, '0'));
  timeout_in_ms := date_part('epoch', enqueue.timeout) * 1000;
  if enqueue.flags is not null then
    -- Normalise: the library cannot decode an array with several dimensions or
    -- with a lower bound other than 1.
    labels := nullif(array(select unnest(enqueue.flags)), '{}');
  end if;

  -- An earlier try may already have stored this id. Its unique key may be free
  -- again by now, and must not be assigned to a job that has ended.
  perform 1 from longshore.jobs j where j.id = new_id;
  if found then
    return query select new_id, 'created'::text;
    return;
  end if;
  select m.job, m.replaced into merged
    from longshore.merged_requests m
    join longshore.jobs j on j.id = m.job
   where m.id = new_id;
  if found then
    return query select merged.job, case when merged.replaced then 'replaced' else 'existing' end;
    return;
  end if;
  if enqueue.flow is not null then
    is_held := longshore.join_flow(enqueue.flow, new_id, coalesce(enqueue.task, enqueue.kind), enqueue.task, enqueue.after);
  end if;
  if enqueue.idempotency_key is not null then
    select j.id into holder
      from longshore.jobs j
     where j.idempotency_key = enqueue.idempotency_key
     union all
    select j.id
      from longshore.merged_requests m
      join longshore.jobs j on j.id = m.job
     where m.idempotency_key = enqueue.idempotency_key;
    if found then
      return query select holder, 'existing'::text;
      return;
    end if;
  end if;

  -- Lock order, as everywhere: ready or running first, then keys.
  for round in 1..10 loop
    holder := null;
    if enqueue.unique_key is not null then
      insert into longshore.keys (key, job)
      values (enqueue.unique_key, new_id)
          on conflict (key) do nothing;
      if not found then
        select k.job into holder
          from longshore.keys k
         where k.key = enqueue.unique_key;
        continue when not found;  -- the owner has just ended
        if holder = new_id then
          return query select holder, 'created'::text;
          return;
        end if;
        if mode = 'dedupe' then
          -- The work of a job that is being cancelled may never be done.
          perform 1 from longshore.running r where r.id = holder and r.cancel_requested;
          if not found then
            if enqueue.idempotency_key is not null then
              perform longshore.merge_request(new_id, holder, false, enqueue.idempotency_key);
            end if;
            return query select holder, 'existing'::text;
            return;
          end if;
        end if;

        delete from longshore.ready w
         where w.id = holder
           and mode <> 'dedupe'
        returning w.* into was;
        if found then
          update longshore.jobs j
             set kind = enqueue.kind,
                 payload = enqueue.payload,
                 queue = enqueue.queue,
                 priority = enqueue.priority,
                 max_attempts = enqueue.max_attempts,
                 run_at = case when mode = 'preserve_run_at' then j.run_at else due end,
                 timeout_ms = timeout_in_ms,
                 flags = labels,
                 options = enqueue.options,
                 grp = enqueue.grp,
                 -- a repeated request must find this job
                 idempotency_key = coalesce(j.idempotency_key, enqueue.idempotency_key)
           where j.id = holder
          returning j.idempotency_key into own_key;
          perform longshore.merge_request(new_id, holder, true, nullif(enqueue.idempotency_key, own_key));
          -- They belong to the old contents.
          delete from longshore.checkpoints c where c.job = holder;
          perform 1 from longshore.steps s where s.job = holder and s.value is null;
          if found then
            was.run_at := least(was.run_at, moment);  -- it was suspended, and nothing else would wake it
          end if;
          delete from longshore.steps s where s.job = holder;
          delete from longshore.waits w where w.job = holder;
          if mode = 'preserve_run_at' then
            due := was.run_at;
          end if;
          insert into longshore.ready
                 (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
                  interruptions, keyed, kind, queue, flags, grp)
          values (holder, due, moment, timeout_in_ms, was.lease_no, enqueue.priority, 0, enqueue.max_attempts,
                  was.interruptions, true, enqueue.kind, enqueue.queue, labels, enqueue.grp);
          perform longshore.add_turn(enqueue.queue, enqueue.grp, enqueue.priority, due);
          if own_key = enqueue.idempotency_key and longshore.has_merged_key(array[own_key]) then
            raise exception 'idempotency_key: taken at the same moment; try again' using errcode = '40001';
          end if;
          if enqueue.wake then
            perform pg_notify('longshore.wake', enqueue.queue);
          end if;
          return query select holder, 'replaced'::text;
          return;
        end if;

        -- The owner is running: the key moves to the new job. The old job may
        -- finish, but never returns to `ready`.
        update longshore.running r
           set superseded = true
         where r.id = holder
           and not r.superseded;
        continue when not found;  -- the owner changed state in between
        update longshore.keys k
           set job = new_id
         where k.key = enqueue.unique_key
           and k.job = holder;
        if not found then
          raise exception 'unique_key: the key moved to another job; try again' using errcode = '40001';
        end if;
      end if;
    end if;

    insert into longshore.jobs
           (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue,
            payload, flags, options, idempotency_key, unique_key, grp, flow, task)
    values (new_id, moment, due, timeout_in_ms, enqueue.priority, enqueue.max_attempts, enqueue.kind, enqueue.queue,
            enqueue.payload, labels, enqueue.options, enqueue.idempotency_key, enqueue.unique_key, enqueue.grp,
            enqueue.flow, enqueue.task)
        on conflict do nothing;
    if not found then
      -- Either an earlier try already stored this job, or a concurrent enqueue
      -- stored another job with the same idempotency key.
      select j.id into holder
        from longshore.jobs j
       where j.id = new_id
          or j.idempotency_key = enqueue.idempotency_key;
      if not found or (holder <> new_id and enqueue.unique_key is not null) then
        -- Roll back, so that the unique key taken above is freed; the caller retries.
        raise exception 'idempotency_key: taken at the same moment; try again' using errcode = '40001';
      end if;
      return query select holder, case when holder = new_id then 'created' else 'existing' end;
      return;
    end if;
    if enqueue.idempotency_key is not null and longshore.has_merged_key(array[enqueue.idempotency_key]) then
      raise exception 'idempotency_key: taken at the same moment; try again' using errcode = '40001';
    end if;
    insert into longshore.ready
           (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue, flags, grp, flow, held)
    values (new_id, case when is_held then '9999-12-31 23:59:59+00' else due end, moment, timeout_in_ms, 0,
            enqueue.priority, 0, enqueue.max_attempts, 0, enqueue.unique_key is not null, enqueue.kind, enqueue.queue,
            labels, enqueue.grp, enqueue.flow, is_held);
    perform longshore.add_turn(enqueue.queue, enqueue.grp, enqueue.priority, due);
    if enqueue.wake and due <= moment then
      perform pg_notify('longshore.wake', enqueue.queue);
    end if;
    return query select new_id, 'created'::text;
    return;
  end loop;
  raise exception 'unique_key: the job that owns the key keeps changing state; try again' using errcode = '40001';
end
$$;

-- Cancel from SQL. Returns `cancelled`, `pending` (the job is running, its cancel flag
-- is now set, and its worker is notified when the transaction commits), `finished`
-- (nothing to do) or `not_found`.
create or replace function longshore.cancel(id uuid) returns text
language plpgsql
as $$
#variable_conflict use_column
declare
  taken bigint;
  holder uuid;
begin
  for round in 1..5 loop
    with gone as (
      delete from longshore.ready w
       where w.id = cancel.id
      returning w.*),
    ended as (
      insert into longshore.finished
             (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions, last_error, flow)
      select g.id, longshore.clock(), g.lease_no, 'cancelled', g.attempt, g.max_attempts, g.interruptions, (
               select a.error
                 from longshore.attempts a
                where a.job = g.id
                  and a.error is not null
                order by a.lease_no desc
                limit 1), g.flow
        from gone g),
    noted as (
      insert into longshore.flow_changes (flow, job, succeeded, failure)
      select g.flow, g.id, false, true
        from gone g
       where g.flow is not null
      returning pg_notify('longshore.emit', '')),
    counted as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 1, 1, 'cancelled', 0, g.queue, g.kind
        from gone g),
    turns_of_removed as (   -- somebody has to find that the group has no jobs left
      insert into longshore.turns (at, priority, queue, grp)
      select longshore.clock(), g.priority, g.queue, g.grp
        from gone g
       where g.grp is not null
         and g.run_at > longshore.clock()),
    freed as (
      delete from longshore.keys k
       using gone g
       where k.job = g.id)
    select count(*) into taken from gone;
    if taken > 0 then
      return 'cancelled';
    end if;
    update longshore.running r
       set cancel_requested = true
     where r.id = cancel.id
    returning r.worker into holder;
    if found then
      perform pg_notify('longshore.stop', holder::text);
      return 'pending';
    end if;
    perform 1 from longshore.finished f where f.id = cancel.id;
    if found then
      return 'finished';
    end if;
    perform 1 from longshore.jobs j where j.id = cancel.id;
    if not found then
      return 'not_found';
    end if;
  end loop;
  raise exception 'job % kept changing its state; try again', cancel.id using errcode = '40001';
end
$$;

-- Retry from SQL: a finished job is queued again with a fresh attempt budget, and
-- a waiting job becomes due now. Returns `queued`, `running` (nothing to do),
-- `key_taken` (another live job owns its unique key), `held` (it waits for other tasks of its flow) or
-- `not_found`.
create or replace function longshore.retry(id uuid) returns text
language plpgsql
as $$
#variable_conflict use_column
declare
  was longshore.finished;
  request longshore.jobs;
  finished boolean;
  moved record;
begin
  for round in 1..5 loop
    select f.* into was from longshore.finished f where f.id = retry.id for update;
    finished := found;
    -- Read the request after taking the lock, when no other transaction can change it.
    select j.* into request from longshore.jobs j where j.id = retry.id;
    if not found then
      return 'not_found';
    end if;
    if finished then
      if request.unique_key is not null then
        insert into longshore.keys (key, job)
        values (request.unique_key, retry.id)
            on conflict (key) do nothing;
        if not found then
          return 'key_taken';
        end if;
      end if;
      delete from longshore.finished f where f.id = retry.id;
      if request.flow is not null then
        insert into longshore.flow_changes (flow, job, failure)
        values (request.flow, retry.id, was.outcome <> 'succeeded' and was.skipped is not true);
        perform pg_notify('longshore.emit', '');
      end if;
      if was.outcome = 'succeeded' then
        delete from longshore.steps s where s.job = retry.id;  -- it starts over
      end if;
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      values (date_trunc('minute', longshore.clock()), 0, -1, was.outcome, 0, request.queue, request.kind);
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags, grp, flow)
      values (retry.id, longshore.clock(), longshore.clock(), request.timeout_ms, was.lease_no, request.priority,
              0, request.max_attempts, 0, request.unique_key is not null, request.kind, request.queue, request.flags,
              request.grp, request.flow);
      perform longshore.add_turn(request.queue, request.grp, request.priority, longshore.clock());
      perform pg_notify('longshore.wake', request.queue);
      return 'queued';
    end if;
    perform 1 from longshore.ready w where w.id = retry.id and w.held;
    if found then
      return 'held';
    end if;
    with gone as (
      delete from longshore.ready w
       where w.id = retry.id
         and w.held is not true
      returning w.*)
    insert into longshore.ready
           (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue, flags, grp, flow)
    select g.id, least(g.run_at, longshore.clock()), longshore.clock(), g.timeout_ms, g.lease_no, g.priority,
           g.attempt, g.max_attempts, g.interruptions, g.keyed, g.kind, g.queue, g.flags, g.grp, g.flow
      from gone g
    returning queue, grp, priority into moved;
    if found then
      perform longshore.add_turn(moved.queue, moved.grp, moved.priority, longshore.clock());
      perform pg_notify('longshore.wake', request.queue);
      return 'queued';
    end if;
    perform 1 from longshore.running r where r.id = retry.id;
    if found then
      return 'running';
    end if;
  end loop;
  raise exception 'job % kept changing its state; try again', retry.id using errcode = '40001';
end
$$;

-- Emit from SQL: stores an event, unless one with its name exists. Returns whether this call
-- stored it. After the commit, workers wake the jobs that wait for it. An event counts as absent if
-- it is older than 7 days, is delivered, and no job that it woke still has to read it.
create or replace function longshore.emit(name text, payload json default 'null') returns boolean
language plpgsql
as $$
#variable_conflict use_column
declare
  wrong text;
begin
  wrong := case
    when coalesce(octet_length(emit.name), 0) not between 1 and 128
      then 'name: must have 1 to 128 bytes'
    when starts_with(emit.name, 'flow-ended:')
      then 'name: `flow-ended:` is reserved for the ends of flows; use another prefix'
    else longshore.wrong_with_payload(emit.payload, 65536)
  end;
  if wrong is not null then
    raise exception '%', wrong using errcode = '22023';
  end if;
  insert into longshore.events as e (name, emitted_at, payload)
  values (emit.name, longshore.clock(), emit.payload)
      on conflict (name) do update
     set emitted_at = excluded.emitted_at,
         payload = excluded.payload,
         fresh = true
   where e.emitted_at < longshore.clock() - interval '7 days'
     and not e.fresh
     and not exists (
           select 1
             from longshore.waits w
            where w.event = e.name
              and w.woken);
  if not found then
    return false;
  end if;
  -- Without a payload, so that many events of one transaction are one notification.
  perform pg_notify('longshore.emit', '');
  return true;
end
$$;
