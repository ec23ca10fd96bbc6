"""Servers that require tokens."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longshore import Flow, Longshore, LongshoreError, NewJob, Unauthorized, _operations, new_id
from longshore._http import Reply

from .conftest import LIMIT, clean_environment, eventually, serving

CreateToken = Callable[..., str]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, CreateToken]]:
    folder: Path = tmp_path_factory.mktemp("tokens")
    with serving("sqlite", folder, "--auth", "tokens") as server:

        def create(*arguments: str) -> str:
            command = [server.binary, "tokens", "create", "test", *arguments, "--json"]
            command += ["--database-url", server.database_url, "--config", ""]
            done = subprocess.run(command, capture_output=True, check=True, env=clean_environment(), timeout=LIMIT)
            return str(json.loads(done.stdout)["token"])

        yield server.url, create


def define(url: str, token: str | None, queue: str) -> Longshore:
    app = Longshore(url, token)

    @app.job("secured", queue=queue)
    async def secured(n: int = 0) -> int:
        return n + 1

    return app


def test_a_missing_token_is_reported(secured: tuple[str, CreateToken]) -> None:
    url, _ = secured
    with pytest.raises(Unauthorized) as refused:
        Longshore(url).sync.queues()
    assert refused.value.status == 401
    with pytest.raises(LongshoreError, match="refuses this worker"):
        define(url, "longshore_wrong", "mail").worker().run()


def test_the_short_replies_to_a_token_that_may_only_enqueue_are_enough() -> None:
    id = new_id()
    short = {"id": id, "status": "running", "enqueued_as": "existing"}
    reply = Reply(200, {"enqueued-as": "existing"}, json.dumps(short).encode())
    assert _operations.enqueue(NewJob("greet", {})).result(reply) == _operations.Enqueued(id, "existing")
    assert _operations.start_flow(Flow("greetings")).result(reply)["id"] == id


def test_tokens_with_scopes_are_enough(secured: tuple[str, CreateToken]) -> None:
    url, create = secured
    worker_token = create("--scope", "work", "--scope", "enqueue", "--queue", "mail")
    client_token = create("--scope", "enqueue", "--scope", "read", "--queue", "mail")
    worker_app = define(url, worker_token, "mail")
    client = define(url, client_token, "mail")
    with worker_app.worker() as worker:
        assert worker.wait_until_registered(LIMIT)
        assert client.registry["secured"].enqueue_sync(n=1).result_sync(LIMIT) == 2
    # A token of another queue may work too, although it cannot change how the kind is described.
    other = define(url, create("--scope", "work", "--queue", "other"), "other")
    with other.worker() as worker:
        assert worker.wait_until_registered(LIMIT)


def test_a_worker_stores_schedules_with_the_scope_operate_and_works_without_it(
    secured: tuple[str, CreateToken], caplog: pytest.LogCaptureFixture
) -> None:
    url, create = secured
    reader = Longshore(url, create("--scope", "read"))

    def names() -> list[str]:
        return [schedule["name"] for schedule in reader.sync.schedules()]

    limited = define(url, create("--scope", "work", "--scope", "enqueue", "--queue", "mail"), "mail")
    limited.cron("secured", "0 0 1 1 *", limited.registry["secured"].new())
    with limited.worker():
        eventually(lambda: "the schedule `secured` is not stored" in caplog.text, "the refusal is logged")
        assert limited.registry["secured"].enqueue_sync(n=1).id
    assert "operate" in caplog.text
    assert names() == []

    allowed = define(url, create("--scope", "work", "--scope", "operate"), "mail")
    allowed.cron("secured", "0 0 1 1 *", allowed.registry["secured"].new())
    with allowed.worker():
        eventually(lambda: names() == ["secured"], "the schedule is stored")


def test_the_token_is_read_from_the_environment(
    secured: tuple[str, CreateToken], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, create = secured
    file = tmp_path / "token"
    file.write_text(create("--scope", "read") + "\n")
    monkeypatch.setenv("LONGSHORE_SERVER", url)
    monkeypatch.setenv("LONGSHORE_TOKEN_FILE", str(file))
    monkeypatch.delenv("LONGSHORE_TOKEN", raising=False)
    assert isinstance(Longshore().sync.queues(), list)
