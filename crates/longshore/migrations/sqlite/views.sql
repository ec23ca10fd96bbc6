-- The view, replaced by every migration: it contains no data, so a newer version may
-- change it.

drop view if exists job_status;

create view job_status as
select j.id,
       j.kind,
       j.queue,
       case
         when w.id is not null and w.attempt = 0 and w.interruptions = 0 then 'queued'
         when w.id is not null then 'retrying'
         when r.id is not null then 'running'
         else f.outcome
       end as status,
       j.priority,
       coalesce(w.attempt, r.attempt, f.attempts) as attempts,
       j.max_attempts,
       coalesce(w.run_at, j.run_at) as run_at,
       r.worker as locked_by,
       r.claimed_at as locked_at,
       coalesce(r.cancel_requested, f.outcome = 'cancelled', 0) as cancel_requested,
       j.created_at,
       coalesce(r.claimed_at, f.started_at) as started_at,
       f.finished_at,
       coalesce(f.last_error, (
         select a.error
           from attempts a
          where a.job = j.id
            and a.error is not null
          order by a.lease_no desc
          limit 1)) as last_error
  from jobs j
  left join ready w on w.id = j.id
  left join running r on r.id = j.id
  left join finished f on f.id = j.id;
