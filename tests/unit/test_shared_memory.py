"""Records of shared memory regions, and what is removed by them."""

import mmap
import os
import subprocess
import sys
import uuid

import pytest
from mtp_backend.serving.shared_memory import Regions


def region_name():
    return f"triton_mtp_backend_shm_region_{uuid.uuid4()}"


@pytest.fixture
def mapped(tmp_path):
    """Makes a file and maps it into this process, as the server does with a region."""
    kept = []

    def make(name):
        file = open(tmp_path / name, "w+b")  # noqa: SIM115
        file.write(b"0")
        file.flush()
        kept.append((file, mmap.mmap(file.fileno(), 1)))
        return tmp_path / name

    yield make
    for file, memory in kept:
        memory.close()
        file.close()


def killed(folder, lines):
    """Leaves the record of a process that was killed."""
    program = "import os, sys; from pathlib import Path; from mtp_backend.serving.shared_memory import Regions; "
    program += (
        "r = Regions(Path(sys.argv[1])); r._held.write(sys.argv[2]); r._held.flush(); print(r._record); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", program, folder, lines], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr


def test_own_regions_alone_are_removed(tmp_path, mapped):
    region, foreign = mapped(region_name()), mapped("triton_python_backend_shm_region_1")
    other = tmp_path / region_name()
    other.touch()
    regions = Regions(tmp_path)
    assert regions.clear() == 0
    regions.note(os.getpid())
    assert regions.clear() == 1
    assert not region.exists() and foreign.exists() and other.exists()
    regions.close()
    assert set(tmp_path.iterdir()) == {foreign, other}


def test_process_that_has_gone(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    regions = Regions(tmp_path)
    regions.note(gone.pid)
    assert regions.clear() == 0


def test_of_a_killed_process(tmp_path):
    left = tmp_path / region_name()
    left.touch()
    killed(tmp_path, f"{left.name}\n{region_name()}\n")
    assert left.exists()
    Regions(tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_of_a_living_process(tmp_path, mapped):
    region = mapped(region_name())
    living = Regions(tmp_path)
    living.note(os.getpid())
    Regions(tmp_path).close()
    assert region.exists()
    living.close()
    assert not list(tmp_path.iterdir())


def test_other_names_in_a_record(tmp_path):
    """Anybody can write into the folder: a record removes nothing but regions."""
    (tmp_path / "shm").mkdir()
    precious = tmp_path / "precious"
    precious.touch()
    (tmp_path / "shm" / "precious").touch()
    lines = f"../precious\nprecious\n{precious}\n../{region_name()}\n"
    (tmp_path / "shm" / f"mtp-{os.getuid()}-0.regions").write_text(lines)
    Regions(tmp_path / "shm").close()
    assert precious.exists() and [path.name for path in (tmp_path / "shm").iterdir()] == ["precious"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_record_of_another_user(tmp_path):
    left = tmp_path / region_name()
    left.touch()
    record = tmp_path / f"mtp-{os.getuid()}-0.regions"
    record.write_text(left.name)
    os.chown(record, 1234, 1234)
    Regions(tmp_path).close()
    assert left.exists() and record.exists()
