"""The Python code of README and the guides runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest

from longshore import Longshore, testing

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT.parent.parent / "docs" / "guides"


def blocks(path: Path) -> list[tuple[str, str]]:
    """The info strings and the code of the Python blocks."""
    return re.findall(r"^```python([^\n]*)\n(.*?)^```$", path.read_text(), re.M | re.S)


@pytest.mark.parametrize("path", [ROOT / "README.md", GUIDES / "python.md", GUIDES / "from-celery.md"], ids=str)
def test_every_block_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGSHORE_SERVER", raising=False)
    module = types.ModuleType("app")
    monkeypatch.setitem(__import__("sys").modules, "app", module)
    namespace = module.__dict__
    ran = 0

    async def run_all() -> None:
        nonlocal ran
        with_queue: Any = None
        for number, (info, code) in enumerate(blocks(path), 1):
            name = f"{path.name}, block {number}"
            compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            if "no-run" in info or code.startswith("# Celery"):
                continue
            result = eval(compiled, namespace)
            if inspect.isawaitable(result):
                await result
            ran += 1
            if with_queue is None and isinstance(namespace.get("ls"), Longshore):
                with_queue = testing.inline(namespace["ls"])
                with_queue.__enter__()
        with_queue.__exit__(None, None, None)

    asyncio.run(run_all())
    assert ran > 1
    for name, value in list(namespace.items()):
        if name.startswith("test_"):
            value()
