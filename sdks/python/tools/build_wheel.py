"""Builds a wheel that contains the `longshore` server, for the platform of the binary.

    python tools/build_wheel.py --binary target/release/longshore    # dist/longshore-0.1.0-py3-none-<platform>.whl
    python tools/build_wheel.py                                      # a wheel without a server, and an sdist

Publish everything in dist/ with one command: `python -m twine upload dist/*`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, help="the server to put into the wheel")
    parser.add_argument("--platform-tag", help="the platform tag; by default derived from the binary and this host")
    parser.add_argument("--out", type=Path, default=HERE / "dist", help="the folder for the result")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pure = build_pure(Path(folder))
        if arguments.binary is None:
            target = arguments.out / pure.name
            target.write_bytes(pure.read_bytes())
            print(target)
            print(build_sdist(arguments.out))
            return 0
        if not arguments.binary.is_file():
            print(f"{arguments.binary} does not exist; build it with `cargo build --release`", file=sys.stderr)
            return 1
        tag = arguments.platform_tag or platform_tag(arguments.binary.read_bytes())
        print(add_binary(pure, arguments.binary, tag, arguments.out))
    return 0


def build_pure(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(HERE)]
    if importlib.util.find_spec("hatchling") is not None:
        command.append("--no-build-isolation")  # needs no package index
    subprocess.run(command, check=True)
    [wheel] = folder.glob("longshore-*.whl")
    return wheel


def build_sdist(folder: Path) -> str:
    code = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)], check=True, cwd=HERE, capture_output=True, text=True
        )
    except subprocess.CalledProcessError:
        return "no sdist: hatchling is not installed (pip install hatchling)"
    return str(folder / done.stdout.strip().splitlines()[-1])


def platform_tag(binary: bytes) -> str:
    """The tag of a binary for this host. On Linux, the newest glibc symbol that the binary needs decides."""
    if sys.platform != "linux":
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    machine = platform.machine()
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", binary)]
    if not versions:  # linked statically
        return f"manylinux_2_17_{machine}.musllinux_1_1_{machine}"
    major, minor = max(max(versions), (2, 17))
    return f"manylinux_{major}_{minor}_{machine}"


def add_binary(pure: Path, binary: Path, tag: str, out: Path) -> Path:
    """Copies the wheel, with the binary, its platform tag, and hashes of the changed files."""
    name, version, *_ = pure.name.split("-")
    target = out / f"{name}-{version}-py3-none-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    suffix = ".exe" if sys.platform == "win32" else ""
    files: list[tuple[str, bytes, int]] = []
    with zipfile.ZipFile(pure) as source:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename == f"{info}/WHEEL":
                tags = "".join(f"Tag: py3-none-{part}\n" for part in tag.split("."))
                text = re.sub(r"Tag: .*\n", "", content.decode())
                content = (
                    text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").strip() + f"\n{tags}"
                ).encode()
            if entry.filename != f"{info}/RECORD":
                files.append((entry.filename, content, 0o644))
    files.append((f"longshore/bin/longshore{suffix}", binary.read_bytes(), 0o755))
    record = "".join(f"{path},{digest(content)},{len(content)}\n" for path, content, _ in files)
    files.append((f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode(), 0o644))
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content, mode in files:
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content)
    return target


def digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main())
