"""Laying out the server, from an installation of empty files."""

import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from mtp_backend.errors import MtpError
from mtp_backend.serving import tritonserver


@pytest.fixture
def installation(tmp_path, monkeypatch):
    """A Triton of which TRITONSERVER_BIN tells; its program prints its arguments."""
    root = tmp_path / "triton"
    backend = root / "backends" / "python"
    backend.mkdir(parents=True)
    (root / "bin").mkdir()
    for name in (*tritonserver.RUNTIME, tritonserver.STUB):
        (backend / name).write_text(name)
    program = root / "bin" / "tritonserver"
    program.write_text(
        '#!/bin/sh\necho "$@"; echo "$PATH"; echo "$LD_LIBRARY_PATH"; ulimit -S -d; ulimit -H -d; ulimit -S -n\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("TRITONSERVER_BIN", str(program))
    return root


def test_install(installation, tmp_path):
    launcher = tritonserver.install(tmp_path / "server")
    python = tmp_path / "server" / "backends" / "python"
    for name in (*tritonserver.RUNTIME, tritonserver.STUB):
        assert (python / name).read_text() == name and not (python / name).is_symlink()
    assert os.access(python / tritonserver.STUB, os.X_OK)
    assert "class TritonPythonModel" in (tmp_path / "server" / "backends" / "mtp" / "model.py").read_text()
    few = ["sh", "-c", 'ulimit -S -n 200; ulimit -H -n 300; exec "$@"', "sh"]
    run = subprocess.run([*few, launcher, "--http-port=5"], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert lines[0] == f"--backend-directory={tmp_path}/server/backends --http-port=5"
    assert lines[1].startswith(f"{os.path.dirname(os.sys.executable)}:")
    assert lines[3:] == [str(tritonserver.SERVER_MEMORY_KIB), "unlimited", "300"]


def test_install_again(installation, tmp_path):
    """The same installation is left alone: servers may be running from it."""
    launcher = tritonserver.install(tmp_path / "server")
    before = launcher.stat().st_ino
    assert tritonserver.install(tmp_path / "server").stat().st_ino == before
    (tmp_path / "server" / "backends" / "mtp" / "model.py").write_text("old")
    assert tritonserver.install(tmp_path / "server").stat().st_ino != before
    assert "TritonPythonModel" in (tmp_path / "server" / "backends" / "mtp" / "model.py").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [tritonserver.LOCK, "server", "triton"]


def test_install_by_several_at_once(installation, tmp_path, monkeypatch):
    """The first one lays it out, and the others take what is there."""
    together, laid_out, lay_out = threading.Barrier(8), [], tritonserver._lay_out

    def slow(*arguments):
        laid_out.append(arguments)
        time.sleep(0.1)
        lay_out(*arguments)

    monkeypatch.setattr(tritonserver, "_lay_out", slow)

    def install(_):
        together.wait()
        return tritonserver.install(tmp_path / "server").read_text()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(install, range(8)))) == len(laid_out) == 1


@pytest.mark.parametrize("name", [*tritonserver.RUNTIME, tritonserver.STUB])
def test_part_missing(installation, tmp_path, name):
    (installation / "backends" / "python" / name).unlink()
    with pytest.raises(MtpError, match=f"no Triton server: .*{name} is missing"):
        tritonserver.install(tmp_path / "server")
    assert not (tmp_path / "server").exists()


def test_program_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITONSERVER_BIN", str(tmp_path / "none"))
    with pytest.raises(MtpError, match="none is missing"):
        tritonserver.locate()


def test_no_package(monkeypatch):
    monkeypatch.delenv("TRITONSERVER_BIN", raising=False)
    monkeypatch.setattr(tritonserver.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MtpError, match="install nvidia-pytriton==0.7.0, or set TRITONSERVER_BIN"):
        tritonserver.locate()


def test_arguments(tmp_path):
    options = tritonserver.arguments(tmp_path, drain_seconds=30, traced=False)
    assert f"--model-repository={tmp_path}" in options and options.count("--model-control-mode=none") == 1
    assert "--exit-timeout-secs=35" in options
    assert not [option for option in options if "address" in option or "port" in option or "header" in option]


def test_arguments_with_tracing(tmp_path):
    """Of all headers the models get one."""
    options = tritonserver.arguments(tmp_path, drain_seconds=30, traced=True)
    headers = [option for option in options if "header" in option]
    assert headers == [f"--{kind}-header-forward-pattern=traceparent" for kind in ("http", "grpc")]
