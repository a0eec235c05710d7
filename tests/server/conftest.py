import shutil
import subprocess

import pytest

from server.helpers import PROMPTS, Connection, tokens
from server.running import ROOT, running_gateway


@pytest.fixture(params=["grpc", "http"])
def connection(request, triton_server):
    with Connection(triton_server, request.param) as connection:
        yield connection


@pytest.fixture
def grpc(triton_server):
    with Connection(triton_server) as connection:
        yield connection


@pytest.fixture(scope="session")
def gateway(triton_server, tmp_path_factory):
    """Address of an OpenAI gateway."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    with running_gateway(triton_server, ROOT / "checkpoints" / "deepseek-demo", log) as url:
        yield url


@pytest.fixture(scope="session")
def llm():
    """The offline API on the server's checkpoint and in its precision: what each request gives when it is alone."""
    from mtp_backend import LLM

    return LLM(
        str(ROOT / "checkpoints" / "deepseek-demo"),
        speculative={"num_speculative_tokens": 2},
        dtype="float32",
        num_threads=1,
    )


@pytest.fixture(scope="session")
def alone(llm):
    """Generates one prompt, a text or token ids, in this process."""
    from mtp_backend import SamplingParams

    return lambda prompt, **params: llm.generate(prompt, SamplingParams(**params))[0]


@pytest.fixture
def undisturbed(grpc, alone):
    """A sequence that lives while the test runs and has the right tokens at its end."""
    wanted = alone(PROMPTS[0], max_tokens=12, ignore_eos=True).token_ids
    steps = [grpc.step("undisturbed", start=True, text_input=PROMPTS[0], sampling_parameters={"ignore_eos": True})]
    yield
    while len(tokens(steps)) < len(wanted):
        steps.append(grpc.step("undisturbed", step=len(steps)))
    grpc.end("undisturbed")
    assert tokens(steps)[: len(wanted)] == wanted


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """An authority, certificates of it for the server and a client, and another authority's client, made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for authority in ("ca", "other-ca"):
        openssl("req", "-x509", *new_key, "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-days", "2",
                "-subj", f"/CN={authority}")  # fmt: skip
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other-ca")):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
                "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "names")  # fmt: skip
    return folder
