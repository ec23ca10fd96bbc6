"""Finds the `longshore` server binary, and runs it as the console script `longshore`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_NAME = "longshore.exe" if os.name == "nt" else "longshore"
#: Where a wheel with the server has it.
PACKAGED = Path(__file__).resolve().parent / "bin" / _NAME
MISSING = (
    "this installation of the Python package has no server. Install a wheel for your platform "
    "(pip install --only-binary :all: longshore), put the `longshore` binary on PATH, or set LONGSHORE_BIN to it"
)


def find_binary() -> Path | None:
    """LONGSHORE_BIN, the binary of the wheel, or one on PATH."""
    named = os.environ.get("LONGSHORE_BIN")
    if named:
        return Path(named)
    if PACKAGED.exists():
        return PACKAGED
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        found = shutil.which(_NAME, path=folder)
        if found and not _is_script(Path(found)):
            return Path(found)
    return None


def _is_script(path: Path) -> bool:
    """Whether this is the console script that runs this module."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True


def main() -> None:
    binary = find_binary()
    if binary is None or not binary.exists():
        where = f"LONGSHORE_BIN names {binary}, which does not exist" if binary else MISSING
        print(f"longshore: {where}", file=sys.stderr)
        raise SystemExit(127)
    arguments = [str(binary), *sys.argv[1:]]
    if os.name == "nt":
        raise SystemExit(subprocess.call(arguments))
    os.execv(binary, arguments)
