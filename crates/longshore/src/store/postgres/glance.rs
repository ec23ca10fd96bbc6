//! What is new and what runs, without its contents.

use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::{Done, PostgresStore};
use crate::job::JobId;
use crate::store::Glance;

const GLANCE: &str = "
    select s.id, s.kind, s.queue, s.status, s.attempts, s.cancel_requested
      from ((select id from longshore.jobs order by id desc limit $1)
            union
            (select id from longshore.running order by id desc limit $1)
            union
            select unnest($2::uuid[])) e
      join longshore.job_status s on s.id = e.id
     where s.status is not null   -- out of place: `check` finds it
     order by s.id";

impl PostgresStore {
    pub(super) async fn glance_on(
        &self,
        connection: &mut PgConnection,
        most: u32,
        also: &[JobId],
    ) -> Done<Vec<Glance>> {
        let also: Vec<Uuid> = also.iter().map(|id| id.0).collect();
        let rows =
            sqlx::query(self.sql(GLANCE)).bind(i64::from(most)).bind(also).fetch_all(connection).await?;
        let glance = |row: sqlx::postgres::PgRow| {
            Ok(Glance {
                id: JobId(row.try_get(0)?),
                kind: row.try_get(1)?,
                queue: row.try_get(2)?,
                status: row.try_get::<String, _>(3)?.parse()?,
                attempts: row.try_get::<i16, _>(4)? as u16,
                cancel_requested: row.try_get(5)?,
            })
        };
        rows.into_iter().map(glance).collect()
    }
}
