"""The Triton server: where its binary lies, the backend directory that it needs, and its command line."""

from __future__ import annotations

import fcntl
import filecmp
import importlib.util
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mtp_backend.errors import MtpError

# python-based backends need copies: the server refuses a library that a link leads out of the backend directory.
RUNTIME = ("libtriton_python.so", "triton_python_backend_utils.py")
STUB = "triton_python_backend_stub"
MODEL = Path(__file__).resolve().parents[2] / "model.py"
LOCK = ".tritonserver.lock"
SERVER_MEMORY_KIB = 8 << 20  # with its threads' stacks it takes 1.4 GiB
LAUNCHER = """#!/bin/sh
# Runs the Triton server with this environment's Python and with the mtp backend.
# It takes the memory that a request's shape asks for before it looks at the shape: beyond this it ends, not the host.
ulimit -S -d {memory} 2>/dev/null || true
# Each connection is an open file. Without one to be had its HTTP port tries again at once, for ever, and logs it.
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true
PATH="{bin}:$PATH" LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" \\
  exec "{server}" --backend-directory="{backends}" "$@"
"""


@dataclass(frozen=True)
class ServerFiles:
    """Files of a Triton installation.

    Attributes:
        binary: the tritonserver program.
        backend: folder with the Python backend's runtime.
        stub: the program that runs Python models, built for this interpreter's version.
        libraries: folders for the library path.
    """

    binary: Path
    backend: Path
    stub: Path
    libraries: list[Path]


def locate() -> ServerFiles:
    """Finds the server that TRITONSERVER_BIN names, else the one in the nvidia-pytriton package.

    Raises:
        MtpError: a part is missing; the message says what to install.
    """
    python_library = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    chosen = os.environ.get("TRITONSERVER_BIN")
    if chosen:
        binary = Path(chosen)
        backend = binary.parent.parent / "backends" / "python"
        files = ServerFiles(binary, backend, backend / STUB, [python_library])
    else:
        package = importlib.util.find_spec("pytriton")
        if package is None or not package.submodule_search_locations:
            raise MtpError("no Triton server: install nvidia-pytriton==0.7.0, or set TRITONSERVER_BIN")
        root = Path(package.submodule_search_locations[0])
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        files = ServerFiles(
            root / "tritonserver" / "bin" / "tritonserver",
            root / "tritonserver" / "backends" / "python",
            root / "tritonserver" / "python_backend_stubs" / version / STUB,
            [root.parent / "nvidia_pytriton.libs", python_library],
        )
    for path in (files.binary, files.stub, *(files.backend / name for name in RUNTIME)):
        if not path.is_file():
            raise MtpError(f"no Triton server: {path} is missing")
    return files


def install(directory: Path) -> Path:
    """Lays out a backend directory with the mtp backend, and a launcher that runs the server with it.

    Does nothing where the same installation is there already: servers may be running from it.

    Args:
        directory: made, or replaced as a whole.

    Returns:
        The launcher, `directory`/tritonserver, to be called with the server's own options.
    """
    files = locate()
    launcher_text = LAUNCHER.format(
        bin=Path(sys.prefix) / "bin",
        libraries=":".join(map(str, files.libraries)),
        server=files.binary,
        backends=directory.resolve() / "backends",
        memory=SERVER_MEMORY_KIB,
    )
    directory.parent.mkdir(parents=True, exist_ok=True)
    if not _is_installed(directory, launcher_text):
        with open(directory.parent / LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # servers that start together after an update each install it
            if not _is_installed(directory, launcher_text):
                _lay_out(directory, files, launcher_text)
    return directory / "tritonserver"


def _is_installed(directory: Path, launcher_text: str) -> bool:
    try:
        same_launcher = (directory / "tritonserver").read_text() == launcher_text
        return same_launcher and filecmp.cmp(MODEL, directory / "backends" / "mtp" / "model.py", shallow=False)
    except OSError:  # nothing is there, or another process replaces it
        return False


def _lay_out(directory: Path, files: ServerFiles, launcher_text: str) -> None:
    new = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".tritonserver-"))
    new.chmod(0o755)
    for name in ("python", "mtp"):
        (new / "backends" / name).mkdir(parents=True)
    for source in (*(files.backend / name for name in RUNTIME), files.stub):
        shutil.copy(source, new / "backends" / "python")
    shutil.copy(MODEL, new / "backends" / "mtp" / "model.py")
    (new / "tritonserver").write_text(launcher_text)
    for program in (new / "tritonserver", new / "backends" / "python" / STUB):
        program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    shutil.rmtree(directory, ignore_errors=True)
    new.rename(directory)


def directory() -> Path:
    """Where this environment keeps its server."""
    return Path(sys.prefix) / "tritonserver"


def arguments(repository: Path, drain_seconds: int, traced: bool) -> list[str]:
    """The server's options but for who reaches it.

    Args:
        drain_seconds: the supervisor ends the server after this time; it shall not end by itself before.
        traced: the models get the header `traceparent` of a request, as a parameter.
    """
    headers = ("--http-header-forward-pattern", "--grpc-header-forward-pattern") if traced else ()
    return [
        f"--model-repository={repository}",
        "--model-control-mode=none",
        # The configurations are complete; completing them would start every model's process once more.
        "--disable-auto-complete-config",
        # The server gives a model's process a fixed time to come up: they shall not take it from each other.
        "--model-load-thread-count=1",
        f"--exit-timeout-secs={drain_seconds + 5}",
        *(f"{option}=traceparent" for option in headers),
    ]
