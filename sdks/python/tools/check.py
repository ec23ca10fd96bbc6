"""Everything a change of this package has to pass: ruff, mypy, the wire types, and the tests.

    LONGSHORE_BIN=… LONGSHORE_TEST_DATABASE_URL=postgres://… python tools/check.py [pytest arguments]

LONGSHORE_BIN is the server binary. Without LONGSHORE_TEST_DATABASE_URL, the tests use SQLite only. Install the
packages of requirements-dev.txt first.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def is_installed() -> bool:
    try:
        importlib.metadata.distribution("longshore")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> int:
    environment = dict(os.environ)
    plugin = []
    if not is_installed():
        paths = [str(HERE / "src"), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        plugin = ["-p", "longshore.pytest_plugin"]  # pytest finds it by itself if the package is installed
    checks = [
        ["ruff", "format", "--check", "."],
        ["ruff", "check", "."],
        ["mypy"],
        [str(HERE / "tools" / "generate_wire.py"), "--check"],
        ["pytest", *plugin, *sys.argv[1:]],
    ]
    for name, *arguments in checks:
        command = [sys.executable, *([] if name.endswith(".py") else ["-m"]), name, *arguments]
        print(">", " ".join([Path(name).name, *arguments]), flush=True)
        if subprocess.run(command, cwd=HERE, env=environment).returncode:
            print(f"{Path(name).name} failed", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
