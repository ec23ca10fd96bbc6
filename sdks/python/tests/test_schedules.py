"""Schedules that an application declares with `ls.cron`, against a real server."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from longshore import Longshore

from .conftest import eventually

YEARLY = "0 0 1 1 *"


def stored(ls: Longshore, name: str) -> Any:
    return next((schedule for schedule in ls.sync.schedules() if schedule["name"] == name), None)


@pytest.mark.smoke
def test_a_worker_stores_the_schedules_of_its_kinds_after_it_has_registered_them(ls: Longshore, queue: str) -> None:
    kind, other = f"new-{queue}", f"other-{queue}"

    @ls.job(kind, queue=queue)
    def report(shop: str) -> None: ...

    @ls.job(other, queue=queue)
    def elsewhere() -> None: ...

    ls.cron(f"a-{queue}", YEARLY, elsewhere.new())
    ls.cron(f"b-{queue}", YEARLY, report.new(shop="berlin"), zone="Europe/Berlin")
    with ls.worker(kinds=[kind]):
        schedule = eventually(lambda: stored(ls, f"b-{queue}"), "the schedule is stored")
    assert (schedule["cron"], schedule["zone"], schedule["job"]["payload"]) == (
        YEARLY,
        "Europe/Berlin",
        {"shop": "berlin"},
    )
    # It comes first, so it would be there by now.
    assert stored(ls, f"a-{queue}") is None


def test_a_schedule_that_the_server_refuses_is_logged_by_name_and_others_are_stored(
    ls: Longshore, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    @ls.job(f"kind-{queue}", queue=queue)
    def report() -> None: ...

    ls.cron(f"never-{queue}", "0 0 30 2 *", report.new())
    ls.cron(f"good-{queue}", YEARLY, report.new())
    with caplog.at_level(logging.ERROR, logger="longshore.worker"), ls.worker():
        eventually(lambda: stored(ls, f"good-{queue}"), "the other schedule is stored")
    assert [f"never-{queue}" in record.getMessage() for record in caplog.records] == [True]


def test_a_schedule_is_declared_once() -> None:
    ls = Longshore()

    @ls.job()
    def report() -> None: ...

    ls.cron("nightly", YEARLY, report.new())
    with pytest.raises(ValueError, match="`nightly` is declared twice"):
        ls.cron("nightly", "@daily", report.new())
