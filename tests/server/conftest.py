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
