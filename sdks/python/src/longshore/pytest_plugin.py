"""Pytest fixtures, available in every project that has this package installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .testing import DevServer


@pytest.fixture(scope="session")
def longshore_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `longshore dev` server with an empty SQLite database, for the whole session.

    The binary is LONGSHORE_BIN, the one of the installed wheel, or `longshore` on PATH.
    """
    folder: Path = tmp_path_factory.mktemp("longshore")
    with DevServer(folder) as server:
        yield server.url
