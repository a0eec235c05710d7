"""Graph modes on the emulated NPU: the CPU engine's tokens, one graph for each bucket, padding that is inert."""

import math
import random
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.cache import Span
from mtp_backend.graphs import Bucket
from mtp_backend.graphs.chain import DraftChain
from mtp_backend.graphs.compiled import CompiledGraph
from mtp_backend.graphs.npugraph import CapturedGraph
from mtp_backend.graphs.piecewise import PiecewiseGraph
from mtp_backend.graphs.static_batch import StaticBatch
from npu_host import capture, graph_engine
from npu_host.device import traced

from npu.test_engine import requests as mixed_requests

MODES = {"npugraph": CapturedGraph, "npugraph_piecewise": PiecewiseGraph, "torchair": CompiledGraph}


def requests(llm):
    """Those of test_engine, but the last of them that samples ends soon: the draft chains behind it are graphs."""
    prompts, params = mixed_requests(llm)
    return prompts, [replace(own, max_tokens=min(own.max_tokens, 5)) if own.temperature else own for own in params]


def generate(llm):
    return [output.token_ids for output in llm.generate(*requests(llm))]


def graphs_of(llm):
    """The target's graphs and the draft chains that an engine has made, by their buckets."""
    drafter = llm.engine._drafter
    return llm.engine._runner._target._graphs, drafter.chain._chains if drafter else {}


def num_made():
    """Graphs that were captured or compiled until now."""
    return capture.state.captures + len(graph_engine.compiled)


@pytest.fixture(scope="module")
def expected():
    """What the engine on the CPU gives, for each checkpoint."""
    return {}


def test_batches_are_copied_from_page_locked_memory():
    """Not written again before the device has read it."""
    batch = StaticBatch(Bucket(2, 3), 4, 16, 8, torch.device("npu"), tensor_lengths=True)
    waited, event = [], batch._read

    class Watched:
        record = event.record

        def synchronize(self):
            waited.append(batch._host[:2].tolist())
            event.synchronize()

    batch._read = Watched()
    for first in (5, 50):
        batch.fill([first, first + 1], 2, Bucket(2, 3).padded([Span([1], 0, 1), Span([2], 3, 1)], 8))
        assert batch.tokens.cpu()[:2].tolist() == [first, first + 1]
    assert batch._host.is_pinned() and waited == [[0, 0], [5, 6]]


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_float32_equals_cpu(make_llm, expected, name, k):
    if name not in expected:
        expected[name] = generate(make_llm(name, "cpu", 0, "float32"))
    llm = make_llm(name, "npu", k, "float32", graph_mode="npugraph")
    assert generate(llm) == expected[name]
    targets, chains = graphs_of(llm)
    assert len(targets) > 1 and bool(chains) == bool(k)


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_compiled_graphs_equal_cpu(shallow, make_llm, expected, name, k):
    """One bucket for 1 … 8 sequences. What was compiled has sizes only, and no copy of a cache."""
    options = {"path": shallow(name)}
    if ("shallow", name) not in expected:
        expected["shallow", name] = generate(make_llm(name, "cpu", 0, "float32", **options))
    before = len(graph_engine.compiled)
    options |= {"graph_mode": "torchair", "graph_capture_sizes": [8 * (1 + k)]}
    assert generate(make_llm(name, "npu", k, "float32", **options)) == expected["shallow", name]
    target, *chain = made = graph_engine.compiled[before:]
    assert len(chain) == bool(k)
    for graph, attentions in zip(made, [1, k], strict=False):
        operations = Counter(operation.type for operation in graph.graph.op)
        assert operations["FusedInferAttentionScore"] == attentions
        assert operations["ScatterNdUpdate"] == 2 * attentions
        assert not operations.keys() & {"TensorMove", "Assign"}
        assert min(graph_engine.dimensions(graph)) >= 0
        assert sum(map(int, graph_engine.options(graph)["frozenInput"].split(","))) >= 10


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_pieces_equal_cpu(shallow, make_llm, expected, name, k):
    """What is captured has no attention, and no task that waits for an update; each attention stands between two."""
    options = {"path": shallow(name)}
    if ("shallow", name) not in expected:
        expected["shallow", name] = generate(make_llm(name, "cpu", 0, "float32", **options))
    llm = make_llm(name, "npu", k, "float32", graph_mode="npugraph_piecewise", **options)
    assert generate(llm) == expected["shallow", name]
    targets, chains = graphs_of(llm)
    assert len(targets) > 1 and bool(chains) == bool(k)
    graphs = [(graph, 1) for _, graph in targets.values()] + [(chain.graph, k) for chain in chains.values()]
    for graph, attentions in graphs:
        assert len(graph._pieces) == attentions + 1
        for piece in graph._pieces:
            captured = {getattr(entry, "name", "an event") for entry in piece.recorded}
            assert captured and not captured & {"an event", "npu::npu_fused_infer_attention_score_v2"}


@pytest.mark.parametrize("mode", ["npugraph_piecewise", "torchair"])
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_graphs_of_all_layers_equal_cpu(make_llm, expected, name, mode):
    if ("bfloat16", name) not in expected:
        expected["bfloat16", name] = generate(make_llm(name, "cpu", 2, "bfloat16"))
    sizes = [24] if mode == "torchair" else None
    llm = make_llm(name, "npu", 2, "bfloat16", graph_mode=mode, graph_capture_sizes=sizes)
    assert generate(llm) == expected["bfloat16", name]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_bfloat16_equals_cpu(make_llm, name, k):
    llm = make_llm(name, "npu", k, "bfloat16", graph_mode="npugraph")
    assert generate(llm) == generate(make_llm(name, "cpu", k, "bfloat16"))


NUM_STEPS = {"deepseek": 100, "glm": 500}


def serve(llm, num_steps):
    """Steps with 1 … 4 sequences that come and go; returns the texts, and for each step how many sequences decoded."""
    rng, engine, sequences, sizes = random.Random(1), llm.engine, [], []
    ids = engine.tokenizer.encode("In the beginning God created the heaven and the earth. " * 4).ids
    for _ in range(num_steps):
        if sum(not sequence.finish_reason for sequence in sequences) < rng.randint(1, 4):
            start = rng.randrange(20)
            params = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True)
            sequences.append(engine.new_sequence(ids[start : start + rng.randint(1, 20)], params))
            engine.add(sequences[-1])
        sizes.append(len(engine.step()))
    return [sequence.token_ids for sequence in sequences], sizes


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_one_graph_for_a_bucket(shallow, make_llm, expected, name, mode):
    """Drafts of a network without its upper layers are accepted and rejected, so that lengths change in any order."""
    path, num_steps = shallow(name), NUM_STEPS[name]
    if ("served", name) not in expected:
        expected["served", name] = serve(make_llm(name, "cpu", 2, "float32", path=path), num_steps)
    llm = make_llm(name, "npu", 2, "float32", path=path, graph_mode=mode, graph_capture_sizes=[3, 6, 12])
    before, runs, original = num_made(), [], MODES[mode].run

    def counted(graph, layouts):
        runs.append(graph)
        return original(graph, layouts)

    with patch.object(MODES[mode], "run", counted):
        texts, sizes = serve(llm, num_steps)
    targets, chains = graphs_of(llm)
    assert [bucket.num_tokens for bucket in sorted(targets)] == [3, 6, 12] == [own.num_tokens for own in sorted(chains)]
    assert len(set(runs)) == 6
    # In pieces: 2 of each target pass of one layer, 3 of each chain of two drafts.
    assert num_made() - before == (3 * (2 + 3) if mode == "npugraph_piecewise" else 6)
    assert len(runs) > len(sizes)  # most steps are two runs
    speculation = llm.engine.totals.speculation
    assert 0 < speculation.num_accepted_draft_tokens < speculation.num_draft_tokens
    assert (texts, sizes) == expected["served", name]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_padding_reaches_no_row(shallow, make_llm, name, mode):
    """Before each run whatever belongs to dummy requests is NaN: their block, their rows and their embeddings."""
    path = shallow(name)
    llm = make_llm(name, "npu", 2, "bfloat16", path=path, graph_mode=mode, graph_capture_sizes=[12])
    context = llm.engine._runner._target._context
    unused = llm.engine.vocab_size - 1
    prompts, params = requests(llm)
    prompts, params = prompts[3:6], [SamplingParams(max_tokens=8 + index, ignore_eos=True) for index in range(3)]

    def run():
        return [output.token_ids for output in llm.generate(prompts, params)]

    original, clean = MODES[mode].run, run()
    assert not any(unused in text for text in clean)
    poisoned = []

    def poison(graph, layouts):
        for layer in context.cache.layers:
            for tensor in layer:
                tensor[context.dummy_block :] = math.nan
        for batch, own in graphs_of(llm)[0].values():
            if own is graph:
                dummies = (batch.layout.slots // context.block_size >= context.dummy_block).nonzero()[:, 0]
                batch.tokens[dummies] = unused
                poisoned.append(len(dummies))
        for chain in graphs_of(llm)[1].values():
            if chain.graph is graph:
                dummies = (chain.batches[0].layout.slots // context.block_size >= context.dummy_block).nonzero()[:, 0]
                chain.hidden[dummies] = math.nan
        return original(graph, layouts)

    embeddings = [context.networks.target.model.embed_tokens, context.networks.mtp[0].embed_tokens]
    assert context.networks.target.lm_head.weight.data_ptr() != embeddings[0].weight.data_ptr()
    with torch.no_grad():
        for embedding in embeddings:
            embedding.weight[unused] = math.nan
    with patch.object(MODES[mode], "run", poison):
        assert run() == clean
    assert min(poisoned) >= 3


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("mode", MODES)
def test_dummies_longer_than_any_sequence(shallow, make_llm, mode):
    """A dummy request takes all positions up to 15, of which the longest sequence may have fewer."""
    options = {"path": shallow("deepseek"), "max_model_len": 9}
    texts = []
    for device, graphs in [("cpu", {}), ("npu", {"graph_mode": mode, "graph_capture_sizes": [24]})]:
        llm = make_llm("deepseek", device, 2, "float32", **options, **graphs)
        prompts = [[7, 8, 9][: 1 + index] for index in range(3)]
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        texts.append([output.token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1] and sum(map(len, texts[0])) == 18
    assert [bucket.num_tokens for bucket in graphs_of(llm)[0]] == [24]


def test_no_draft_goes_beyond_a_sequence_s_blocks(make_llm):
    """A text of 16 tokens has one block of 16: of the 4 drafts that a chain makes, the last ones have no place in it."""
    prompt, params = [5, 6, 7, 8, 9, 10, 11, 12], SamplingParams(max_tokens=8, ignore_eos=True)
    texts = []
    for device, options in [("cpu", {}), ("npu", {"graph_mode": "npugraph"})]:
        llm = make_llm("deepseek", device, 4, "bfloat16", max_model_len=16, **options)
        texts.append(llm.generate([prompt], params)[0].token_ids)
    assert texts[0] == texts[1] and graphs_of(llm)[1]


def test_copies_of_a_step(make_llm):
    """A step is two graphs, and reads back the target's tokens and the drafts."""
    llm = make_llm("deepseek", "npu", 3, "bfloat16", graph_mode="npugraph")
    engine = llm.engine
    for prompt in requests(llm)[0][:3]:
        engine.add(engine.new_sequence(prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    replays = capture.state.replays
    with traced() as trace, patch.object(DraftChain, "_make", side_effect=AssertionError):
        assert len(engine.step()) == 3
    assert capture.state.replays - replays == 2
    assert len(trace.copies["device to host"]) == 2
    assert len(trace.copies["host to device"]) <= 1 + 3 + 1  # each pass its batch, the head its rows


def test_larger_batches_run_without_a_graph(make_llm):
    llm = make_llm("glm", "npu", 1, "bfloat16", graph_mode="npugraph", graph_capture_sizes=[4])
    assert generate(llm) == generate(make_llm("glm", "cpu", 1, "bfloat16"))
    assert [bucket.num_sequences for bucket in graphs_of(llm)[0]] == [2]
