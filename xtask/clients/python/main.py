"""Enqueues, lists, leases and settles a job with the client that openapi-python-client
generates from docs/openapi.json. LONGSHORE_URL and LONGSHORE_TOKEN name the server."""

import os

from longshore_client import AuthenticatedClient
from longshore_client.api.cron import put_schedule
from longshore_client.api.jobs import enqueue_job, enqueue_jobs, get_job, list_jobs
from longshore_client.api.leases import lease_jobs, settle_leases
from longshore_client.api.workers import sweep_workers
from longshore_client.models import (
    AttemptOutcome,
    BatchOutcome,
    BatchResponse,
    Job,
    LeaseRequest,
    LeaseResponse,
    NewJob,
    NewSchedule,
    NoTimeout,
    RetryFixed,
    RetryFixedPolicy,
    Schedule,
    SettleItem,
    SettleRequest,
    SettleResponse,
    SettleResult,
    Status,
    SweepResponse,
)

QUEUE = "python"


def main() -> None:
    client = AuthenticatedClient(base_url=os.environ["LONGSHORE_URL"], token=os.environ["LONGSHORE_TOKEN"])

    job = enqueue_job.sync(
        client=client,
        body=NewJob(
            kind="greet",
            payload={"name": "Ada"},
            queue=QUEUE,
            retry=RetryFixed(policy=RetryFixedPolicy.FIXED, delay_ms=1500),
            timeout_seconds=NoTimeout.NONE,
        ),
    )
    assert isinstance(job, Job), job
    assert (job.status, job.attempts, job.timeout_seconds) == (Status.QUEUED, 0, None), job
    assert isinstance(job.retry, RetryFixed) and job.retry.delay_ms == 1500, job

    batch = enqueue_jobs.sync(client=client, body=[NewJob(kind="greet", payload=None, queue=QUEUE)])
    assert isinstance(batch, BatchResponse), batch
    assert batch.created == 1 and batch.items[0].outcome is BatchOutcome.CREATED, batch

    listed = list_jobs.sync(client=client, queue=QUEUE, limit=10)
    assert isinstance(listed, list), listed
    assert len(listed) == 2 and job.id in [each.id for each in listed], listed

    leased = lease_jobs.sync(client=client, body=LeaseRequest(queues=[QUEUE], kinds=["greet"], limit=10))
    assert isinstance(leased, LeaseResponse) and len(leased.jobs) == 2, leased

    items = [
        SettleItem(id=each.id, lease_no=each.lease_no, outcome=AttemptOutcome.SUCCEEDED, result={"by": "python"})
        for each in leased.jobs
    ]
    settled = settle_leases.sync(client=client, body=SettleRequest(worker_id=leased.worker_id, items=items))
    assert isinstance(settled, SettleResponse), settled
    assert all(item.settled is SettleResult.STORED for item in settled.items), settled

    done = get_job.sync(job.id, client=client)
    assert isinstance(done, Job) and (done.status, done.attempts) == (Status.SUCCEEDED, 1), done

    schedule = put_schedule.sync(
        "python", client=client, body=NewSchedule(cron="0 3 * * *", job=NewJob(kind="greet", payload=None))
    )
    assert isinstance(schedule, Schedule) and isinstance(schedule.job, NewJob), schedule
    assert (schedule.job.kind, schedule.job.queue) == ("greet", "default"), schedule

    # The body is optional.
    swept = sweep_workers.sync(client=client)
    assert isinstance(swept, SweepResponse) and swept.recovered == 0, swept
    print(f"python: enqueued, listed, leased and settled {len(leased.jobs)} jobs")


main()
