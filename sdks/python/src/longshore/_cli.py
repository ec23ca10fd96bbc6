"""`longshore-worker app:ls`: runs the worker of an application."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from ._app import Longshore
from ._errors import LongshoreError
from ._version import VERSION
from ._worker import WorkerSettings

#: How long what is registered with `atexit` and threads of handlers may take.
_EXIT_TIMEOUT = 5.0
_SKIPPED = {".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache"}


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.reload:
        raise SystemExit(_reload(arguments if arguments is not None else sys.argv[1:]))
    logging.basicConfig(level=options.log.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        app = load(options.app)
    except LongshoreError as error:
        _exit(error)
    try:
        settings: WorkerSettings = {"concurrency": options.concurrency, "grace": options.grace}
        settings["stale_after"] = options.stale_after
        if options.queues:
            settings["queues"] = options.queues.split(",")
        if options.kinds:
            settings["kinds"] = options.kinds.split(",")
        if options.name:
            settings["name"] = options.name
        worker = app.worker(**settings)
    except (LongshoreError, ValueError) as error:
        _exit(error)
    # Other errors come from the application, and their traceback says where.
    try:
        worker.run()
    except LongshoreError as error:
        _exit(error)
    _end_soon()


def _end_soon() -> None:
    """Python waits for the threads of `asyncio.to_thread` before it exits. The job of such a thread was released and
    may run elsewhere, so the process does not wait for long."""
    timer = threading.Timer(_EXIT_TIMEOUT, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _exit(error: Exception) -> NoReturn:
    print(f"longshore-worker: {error}", file=sys.stderr)
    raise SystemExit(1) from None


def _parser() -> argparse.ArgumentParser:
    # Without abbreviations: `--reload` is removed from the arguments of the child by its full name.
    parser = argparse.ArgumentParser(
        prog="longshore-worker", description="Run the jobs of an application.", allow_abbrev=False
    )
    parser.add_argument("app", help="where the Longshore object is, like `shop.jobs:ls`; `:ls` is the default")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=os.environ.get("WORKER_CONCURRENCY", "10"),
        help="how many jobs run at once; WORKER_CONCURRENCY, or 10",
    )
    parser.add_argument("--queues", help="queues to lease from, separated by commas; * for every queue")
    parser.add_argument("--kinds", help="kinds to run, separated by commas; all by default")
    parser.add_argument("--name", help="a display name")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds that jobs may continue after a signal")
    parser.add_argument(
        "--stale-after", type=float, default=60.0, help="seconds until a silent worker counts as dead"
    )
    parser.add_argument("--reload", action="store_true", help="restart when a .py file changes")
    parser.add_argument("--log", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--version", action="version", version=f"longshore-worker {VERSION}")
    return parser


def load(reference: str) -> Longshore:
    """The `Longshore` object that `module:name` names."""
    module_name, _, name = reference.partition(":")
    name = name or "ls"
    # Like `python -m`: modules of the current folder can be imported.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the application imports is another matter: its traceback says where.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise LongshoreError(f"there is no module `{module_name}` in {os.getcwd()} or on PYTHONPATH") from None
    app = getattr(module, name, None)
    if not isinstance(app, Longshore):
        raise LongshoreError(f"`{module_name}` has no Longshore object `{name}`; name it like `{module_name}:app`")
    return app


def _reload(arguments: list[str]) -> int:
    """Runs the worker as a child, and restarts it when a file changes. The child drains before it exits."""
    command = [sys.executable, "-m", "longshore", *(a for a in arguments if a != "--reload")]
    is_stopped = False
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        if child is not None:
            child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while True:
        seen = _snapshot()
        # In a session of its own: Ctrl-C in the terminal would otherwise reach it in addition to the signal from
        # here, and a second signal ends the grace period.
        child = subprocess.Popen(command, start_new_session=True)
        if is_stopped:  # the signal came before there was a child
            child.send_signal(signal.SIGTERM)
        while not is_stopped and _snapshot() == seen:
            time.sleep(0.3)
        if not is_stopped and child.poll() is None:
            child.send_signal(signal.SIGTERM)
        code = child.wait()
        if is_stopped:
            return max(code, 0)
        print("longshore-worker: a file changed; restarting", file=sys.stderr)


def _snapshot() -> dict[str, float]:
    files = {}
    for folder, folders, names in os.walk(Path.cwd()):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                try:
                    files[path] = os.stat(path).st_mtime
                except OSError:
                    continue
    return files


if __name__ == "__main__":
    main()
