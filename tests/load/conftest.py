"""The load generators, installed below `.venv`, and a server that they may ask for statistics."""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parents[1] / ".venv"
NOT_POSSIBLE = 3  # an installation's exit code on a host that cannot have the program


def install(script, folder):
    done = subprocess.run(
        [HERE / script, folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200
    )
    if done.returncode == NOT_POSSIBLE:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="session")
def perf_analyzer():
    install("install_perf_analyzer.sh", TOOLS / "perf_analyzer")
    return TOOLS / "perf_analyzer" / "perf_analyzer"


@pytest.fixture(scope="session")
def genai_perf():
    install("install_genai_perf.sh", TOOLS / "genai_perf")
    return TOOLS / "genai_perf" / "bin" / "genai-perf"


@pytest.fixture(scope="session")
def open_server(server_factory):
    """Triton's own command line: perf_analyzer asks for statistics, which `mtp serve` restricts."""
    with server_factory(plain=True) as server:
        yield server
