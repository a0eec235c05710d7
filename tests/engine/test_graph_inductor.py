"""graph_mode "inductor": the tokens of the eager engine in float32, one compilation for each bucket and pass."""

import math
from pathlib import Path

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.errors import InvalidArgument
from mtp_backend.graphs.compiled import CompiledGraph
from mtp_backend.graphs.inductor import InductorMode

pytestmark = pytest.mark.slow
DEMO = Path(__file__).resolve().parents[2] / "checkpoints"


def make_llm(name, k, **options):
    return LLM(
        str(DEMO / f"{name}-demo"),
        {"num_speculative_tokens": k} if k else None,
        "float32",
        max_model_len=128,
        max_num_seqs=8,
        num_threads=1,
        **options,
    )


def generate(llm):
    """Eight prompts that end one after the other; two of them sample, and soon end."""
    prompts = ["In the beginning", "And", "The king of Babylon sent", "God", "Israel", "a", "And it came", "b"]
    params = [
        SamplingParams(max_tokens=3 + index, ignore_eos=True, temperature=0.7 * (index in (1, 2)), seed=index)
        for index in range(8)
    ]
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected():
    """What the eager engine gives, for each checkpoint."""
    return {name: generate(make_llm(name, 0)) for name in ("deepseek", "glm")}


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_compiled_passes_equal_eager(monkeypatch, expected, name, k):
    """The compiler's front end alone, which traces the passes and makes them functional, and no C++."""
    compiled = []

    def backend(module, inputs):
        compiled.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    monkeypatch.setattr(InductorMode, "graph", lambda mode, function: CompiledGraph(function, backend))
    llm = make_llm(name, k, graph_mode="inductor", graph_capture_sizes=[2 * (1 + k), 8 * (1 + k)])
    assert generate(llm) == expected[name]
    chains = llm.engine._drafter.chain._chains if k else {}
    assert bool(chains) == bool(k)
    assert len(compiled) == len(llm.engine._runner._target._graphs) + len(chains)


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_padding_reaches_no_row(monkeypatch, expected, name):
    """Before each run of the target the rows and the block of dummy requests are NaN."""
    monkeypatch.setattr(InductorMode, "graph", lambda mode, function: CompiledGraph(function, "eager"))
    llm = make_llm(name, 2, graph_mode="inductor", graph_capture_sizes=[24])
    target, unused, original, poisoned = llm.engine._runner._target, llm.engine.vocab_size - 1, CompiledGraph.run, []
    context = target._context
    with torch.no_grad():
        context.networks.target.model.embed_tokens.weight[unused] = math.nan

    def run(graph, layouts):
        for layer in context.cache.layers:
            for tensor in layer:
                tensor[context.dummy_block] = math.nan
        for batch, own in target._graphs.values():
            if own is graph:
                dummies = batch.layout.slots // context.block_size == context.dummy_block
                batch.tokens[dummies] = unused
                poisoned.append(int(dummies.sum()))
        return original(graph, layouts)

    monkeypatch.setattr(CompiledGraph, "run", run)
    assert generate(llm) == expected[name]
    assert not any(unused in text for text in expected[name]) and max(poisoned) > 8


def test_inductor_equals_eager(expected):
    llm = make_llm("deepseek", 0, graph_mode="inductor", graph_capture_sizes=[8])
    assert generate(llm) == expected["deepseek"]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_bfloat16_is_refused(dtype):
    with pytest.raises(InvalidArgument, match="dtype: got torch.bfloat16; allowed: float32 with graph_mode inductor"):
        LLM(str(DEMO / "glm-demo"), dtype=dtype, graph_mode="inductor")
