-- A week of finished jobs, waiting times and queue depths, for the charts of screenshots. The API cannot create
-- them: it stores what happens now.

set search_path = :"schema";

with kinds (kind, queue, per_minute, failing, bucket) as (
    values ('email_customer', 'mail', 150, 0.04, 34),
           ('make_thumbnail', 'images', 90, 0.005, 30),
           ('charge_card', 'payments', 45, 0.02, 38),
           ('notify_partner', 'webhooks', 70, 0.01, 32),
           ('index_document', 'search', 55, 0.004, 22)
),
minutes as (
    select minute,
           -- Busy by day, and a peak half an hour ago.
           1 + 0.5 * sin(extract(epoch from minute) / 86400 * 6.283)
             + 1.2 * exp(-least(99, power(extract(epoch from now() - minute) / 60 - 30, 2) / 40)) as load,
           abs(hashtext(minute::text)) % 100 / 100.0 as luck
      from generate_series(date_trunc('minute', now()) - interval '7 days', date_trunc('minute', now()) - interval '1 minute',
                           interval '1 minute') as minute
),
ended as (
    insert into tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
    select minute, greatest(1, (per_minute * load * share * (0.8 + 0.4 * luck))::bigint), 0, outcome::outcome,
           bucket + shift, queue, kind
      from minutes
      cross join kinds
      cross join lateral (values ('succeeded', 0.8, 0), ('succeeded', 0.15, 4), ('failed_permanent', failing * (1 + load), 6))
           as part (outcome, share, shift)
     where outcome = 'succeeded' or luck < failing * 8
    returning 1
),
waited as (
    insert into measures (minute, value, bucket, what, queue, kind)
    select minute, (per_minute * load * share)::bigint, (12 + 7 * load + shift)::smallint, 'waited', queue, kind
      from minutes
      cross join kinds
      cross join (values (0.9, 0), (0.1, 6)) as part (share, shift)
        on conflict do nothing
    returning 1
)
insert into measures (minute, value, bucket, what, queue, kind)
select minute, (per_minute * load * load * (1 + luck) / 2)::bigint, 0, 'depth', queue, ''
  from minutes
 cross join kinds;
