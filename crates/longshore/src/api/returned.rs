//! What a call that changes something returns of a job or a flow. Reading requires the scope `read`: a token without
//! it gets all of what the call has created, but of what existed before only the id and the status.

use serde::Serialize;
use utoipa::openapi::schema::{OneOfBuilder, Schema};
use utoipa::openapi::{Ref, RefOr};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::problem::ApiResult;
use super::schemas::{EnqueuedAsSchema, FlowSchema, FlowStatusSchema, JobSchema, StatusSchema};
use crate::job::{FlowId, JobId, JobRecord, Status};
use crate::rules::enqueue::EnqueuedAs;
use crate::store::{FlowRecord, FlowStatus, Scope};

/// A job, as far as the caller may see it.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum ReturnedJob {
    Whole(Box<JobRecord>),
    Reference(JobReference),
}

/// What a token without the scope `read` gets instead of a job that existed before.
#[derive(Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct JobReference {
    id: Uuid,
    #[schema(value_type = StatusSchema)]
    status: Status,
    /// What the request did. Absent if it did not enqueue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, value_type = Option<EnqueuedAsSchema>)]
    enqueued_as: Option<EnqueuedAs>,
}

/// A flow, as far as the caller may see it.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum ReturnedFlow {
    Whole(Box<FlowRecord>),
    Reference(FlowReference),
}

/// What a token without the scope `read` gets instead of a flow that existed before.
#[derive(Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FlowReference {
    id: Uuid,
    #[schema(value_type = FlowStatusSchema)]
    status: FlowStatus,
    /// What the request did. Absent if it did not enqueue a flow.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, value_type = Option<EnqueuedAsSchema>)]
    enqueued_as: Option<EnqueuedAs>,
}

impl ReturnedJob {
    /// A job that the call has enqueued.
    pub(super) fn enqueued(caller: &Caller, job: JobRecord, how: EnqueuedAs) -> Self {
        match how {
            EnqueuedAs::Created => ReturnedJob::Whole(Box::new(job)),
            EnqueuedAs::Existing | EnqueuedAs::Replaced => ReturnedJob::of(caller, job, Some(how)),
        }
    }

    /// A job that the call has changed.
    pub(super) async fn changed(server: &Server, caller: &Caller, id: JobId) -> ApiResult<Self> {
        Ok(ReturnedJob::of(caller, server.client.get(id).await?, None))
    }

    fn of(caller: &Caller, job: JobRecord, enqueued_as: Option<EnqueuedAs>) -> Self {
        if may_read(caller) {
            return ReturnedJob::Whole(Box::new(job));
        }
        ReturnedJob::Reference(JobReference { id: job.id.0, status: job.status, enqueued_as })
    }
}

impl ReturnedFlow {
    /// A flow that the call has enqueued.
    pub(super) fn enqueued(caller: &Caller, flow: FlowRecord, enqueued_as: EnqueuedAs) -> Self {
        match enqueued_as {
            EnqueuedAs::Created => ReturnedFlow::Whole(Box::new(flow)),
            EnqueuedAs::Existing | EnqueuedAs::Replaced => ReturnedFlow::of(caller, flow, Some(enqueued_as)),
        }
    }

    /// A flow that the call has changed.
    pub(super) async fn changed(server: &Server, caller: &Caller, id: FlowId) -> ApiResult<Self> {
        Ok(ReturnedFlow::of(caller, server.client.flow(id).await?, None))
    }

    fn of(caller: &Caller, flow: FlowRecord, enqueued_as: Option<EnqueuedAs>) -> Self {
        if may_read(caller) {
            return ReturnedFlow::Whole(Box::new(flow));
        }
        ReturnedFlow::Reference(FlowReference { id: flow.id.0, status: flow.status, enqueued_as })
    }
}

/// Whether the caller may see all of what existed before the call.
pub(super) fn may_read(caller: &Caller) -> bool {
    caller.must_have(Scope::Read).is_ok()
}

impl PartialSchema for ReturnedJob {
    fn schema() -> RefOr<Schema> {
        either(
            "The job. A token without the scope `read` gets only its id and status.",
            "Job",
            "JobReference",
        )
    }
}

impl ToSchema for ReturnedJob {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        add::<JobSchema>(schemas);
        add::<JobReference>(schemas);
    }
}

impl PartialSchema for ReturnedFlow {
    fn schema() -> RefOr<Schema> {
        either(
            "The flow. A token without the scope `read` gets only its id and status.",
            "Flow",
            "FlowReference",
        )
    }
}

impl ToSchema for ReturnedFlow {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        add::<FlowSchema>(schemas);
        add::<FlowReference>(schemas);
    }
}

fn either(description: &str, whole: &str, reference: &str) -> RefOr<Schema> {
    let [whole, reference] = [whole, reference].map(Ref::from_schema_name);
    OneOfBuilder::new().description(Some(description)).item(whole).item(reference).into()
}

fn add<T: ToSchema>(schemas: &mut Vec<(String, RefOr<Schema>)>) {
    schemas.push((T::name().into_owned(), T::schema()));
    T::schemas(schemas);
}
