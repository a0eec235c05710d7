"""Real servers, shared by the tests of a session."""

import os

import pytest
from server.running import running_server

GLIBC = (2, 35)  # what the packaged server is built for


@pytest.fixture(scope="session")
def server_factory():
    """`running_server`, where the host can run the server."""
    version = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[-1].split(".")))
    if version < GLIBC and not os.environ.get("TRITONSERVER_BIN"):
        pytest.skip(
            f"the packaged Triton server needs glibc {GLIBC[0]}.{GLIBC[1]}, this host has {version[0]}.{version[1]}"
        )
    return running_server


@pytest.fixture(scope="session")
def triton_server(server_factory):
    """deepseek-demo in float32 with two drafts a step."""
    with server_factory() as server:
        yield server


@pytest.fixture(scope="session")
def glm_server(server_factory):
    """glm-demo in float32, run by Triton's own command line."""
    with server_factory("glm-demo.toml", plain=True) as server:
        yield server
