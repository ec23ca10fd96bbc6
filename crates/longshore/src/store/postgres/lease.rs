//! Reads the claims behind live leases. What else workers do under a lease is in `store/lease.rs`.

use sqlx::Row;

use super::claim_rows::Reader;
use super::tx::{Sql, Tx};
use crate::store::{Claimed, Lease};

/// Makes one index probe per lease, whatever the planner assumes about the table. The
/// columns are those of a claim, followed by the position of the lease in the input.
const CLAIMS: &str = "
    select r.claimed_at, r.id, r.kind, r.attempt::int4, r.max_attempts, r.lease_no, r.timeout_ms, r.flags,
           j.run_at, j.payload::text, j.options::text,
           r.flow, r.queue, r.priority, r.interruptions, i.nth, r.grp, r.gate
      from unnest((select $1::uuid[]), (select $2::int4[]), (select $3::uuid[])) with ordinality
        as i(id, lease_no, worker, nth)
     cross join lateral (
             select *
               from longshore.running h
              where h.id = i.id
                and h.lease_no = i.lease_no   -- fence: a newer lease owns the row
                and h.worker = i.worker
              limit 1) as r
     cross join lateral (
             select run_at, payload, options
               from longshore.jobs
              where id = r.id
              limit 1) as j";

pub(super) async fn claims(tx: &mut Tx<'_>, leases: &[Lease]) -> Sql<Vec<Option<Claimed>>> {
    let rows = sqlx::query(tx.sql(CLAIMS))
        .bind(leases.iter().map(|lease| lease.id.0).collect::<Vec<_>>())
        .bind(leases.iter().map(|lease| lease.lease_no).collect::<Vec<_>>())
        .bind(leases.iter().map(|lease| lease.worker.0).collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    let mut claims: Vec<_> = leases.iter().map(|_| None).collect();
    for row in &rows {
        let nth = row.try_get::<i64, _>(15)? as usize - 1;
        let mut reader = Reader::new(leases[nth].worker, row.try_get(0)?);
        let Some(mut claim) = reader.read(row)? else { continue };
        claim.group = row.try_get::<Option<&str>, _>(16)?.map(Into::into);
        claim.gated = row.try_get::<Option<i32>, _>(17)?.is_some();
        claims[nth] = Some(claim);
    }
    Ok(claims)
}
