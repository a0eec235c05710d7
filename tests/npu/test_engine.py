"""The engine on the emulated NPU gives the tokens of the engine on the CPU."""

import math
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.cache import KVCache
from mtp_backend.errors import InvalidArgument
from mtp_backend.graphs import PlainPasses
from npu_host.device import traced

from npu.conforming import DEMO, expandable

TEXT = (
    "And it came to pass in those days, that the king of Babylon sent unto the children of Israel, saying, Thus saith "
    "the LORD of hosts, the God of Israel, Behold, I will bring evil upon this city, and upon all that dwell therein."
)


def requests(llm):
    """Eight prompts of 1 … 120 tokens; they end one after the other, so the batch shrinks from 8 sequences to 1."""
    ids = llm.engine.tokenizer.encode(TEXT * 4, add_special_tokens=False).ids
    lengths = [20, 1, 120, 7, 17, 60, 2, 33]
    prompts = [ids[3 * index : 3 * index + length] for index, length in enumerate(lengths)]
    params = [
        SamplingParams(max_tokens=2 + 2 * index, ignore_eos=True, temperature=0.7 * (index % 3 == 1), seed=index)
        for index in range(8)
    ]
    return prompts, params


def generate(llm):
    return [output.token_ids for output in llm.generate(*requests(llm))]


@pytest.fixture(scope="module")
def expected():
    """What the engine on the CPU gives, for each checkpoint and type."""
    return {}


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_float32_equals_cpu(make_llm, expected, name, k):
    if name not in expected:
        expected[name] = generate(make_llm(name, "cpu", 0, "float32"))
    assert generate(make_llm(name, "npu", k, "float32")) == expected[name]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_bfloat16_equals_cpu(make_llm, name, k):
    assert generate(make_llm(name, "npu", k, "bfloat16")) == generate(make_llm(name, "cpu", k, "bfloat16"))


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_batch_expansion_equals_cpu(make_llm, expected, name):
    if name not in expected:
        expected[name] = generate(make_llm(name, "cpu", 0, "float32"))
    assert generate(make_llm(name, "npu", 3, "float32", attention_strategy="batch_expansion")) == expected[name]


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_gathered_keys_equal_cpu(checkpoint, make_llm, trace, tmp_path, name):
    """Also latent attention whose keys and values are computed; the CPU's is absorbed."""
    path = str(expandable(Path(checkpoint(name)), tmp_path)) if name == "deepseek" else None
    on_cpu = generate(make_llm(name, "cpu", 0, "float32", path))
    trace.operations.clear()
    assert generate(make_llm(name, "npu", 3, "float32", path, attention_strategy="chunked_prefill")) == on_cpu
    assert trace.operations["npu::npu_fused_infer_attention_score_v2"] > 20


def test_keys_that_cannot_be_expanded_are_refused(checkpoint):
    with pytest.raises(InvalidArgument, match="query: got 'D 32'; allowed: D 128 .qk_nope_head_dim."):
        LLM(checkpoint("deepseek"), device="npu", attention_strategy="chunked_prefill")


class Poisoning(PlainPasses):
    """Fills every slot without a computed key with NaN before each pass."""

    def __init__(self, cache, sequences, block_size):
        super().__init__(block_size, torch.device("npu"))
        self.cache, self.sequences = cache, sequences

    def run(self, function, batch):
        if not batch.hidden:
            self.poison(self.cache.layers[:-1], [(own.block_table, own.num_computed) for own in self.sequences])
        else:
            own = [(sequence.block_table, sequence.num_drafted) for sequence in self.sequences]
            self.poison(self.cache.layers[-1:], own + [(span.block_table, span.start) for span in batch.spans[0]])
        return super().run(function, batch)

    def poison(self, layers, lengths):
        written = torch.zeros(layers[0][0].shape[:2], dtype=torch.bool)
        for table, length in lengths:
            for place in range(length):
                written[table[place // written.shape[1]], place % written.shape[1]] = True
        for layer in layers:
            for tensor in layer:
                tensor[(~written).to("npu")] = math.nan


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_unused_slots_reach_no_row(make_llm, name):
    made = []

    class Recorded(KVCache):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    with patch("mtp_backend.engine.loading.KVCache", Recorded):
        llm = make_llm(name, "npu", 3, "bfloat16", enable_prefix_caching=False)  # or it would find the poison
    prompts, params = requests(llm)
    prompts, params = prompts[3:7], [SamplingParams(max_tokens=6, ignore_eos=True)] * 4

    def run(poisoned):
        engine = llm.engine
        sequences = [engine.new_sequence(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        if poisoned:
            passes = Poisoning(made[0], sequences, engine.config.block_size)
            engine._runner._target._context.passes = engine._drafter._passes = passes
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_work:
            engine.step()
        return [sequence.token_ids for sequence in sequences]

    assert run(poisoned=False) == run(poisoned=True)


# Of one decoding step with 2 drafts: 4 target layers, and the draft layer twice. One layer of each target is dense.
LAYERS, SPARSE_LAYERS, PASSES = 6, 5, 3
NPU_OPERATIONS = {
    "npu_fused_infer_attention_score_v2": LAYERS,
    # In front of the attention and behind it, and the target's last one; the first layer of a pass has nothing to add.
    "npu_add_rms_norm": 2 * LAYERS - PASSES + 1,
    "npu_moe_gating_top_k": SPARSE_LAYERS,
    "npu_moe_init_routing_v2": SPARSE_LAYERS,
    "npu_grouped_matmul": 2 * SPARSE_LAYERS,
    "_npu_moe_token_unpermute": SPARSE_LAYERS,
    "npu_swiglu": LAYERS + SPARSE_LAYERS,  # the dense layer's, the routed and the shared experts'
}
FIRST_NORMS = PASSES + 3 * 2  # those of the first layers, and three more of each draft pass
OF_FAMILY = {
    "deepseek": {
        "npu_kv_rmsnorm_rope_cache": LAYERS,
        "npu_rotary_mul": LAYERS,
        "npu_rms_norm": LAYERS + FIRST_NORMS,
    },
    "glm": {
        "npu_scatter_nd_update_": 2 * LAYERS,  # key and value
        "npu_rotary_mul": 2 * LAYERS,
        "npu_rms_norm": 2 * LAYERS + FIRST_NORMS,
    },
}


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_operations_and_copies_of_a_step(make_llm, name):
    llm = make_llm(name, "npu", 2, "bfloat16")
    engine = llm.engine
    prompts, _ = requests(llm)
    for prompt in prompts[:3]:
        engine.add(engine.new_sequence(prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    with traced() as trace:
        assert len(engine.step()) == 3
    npu = {key.removeprefix("npu::"): count for key, count in trace.operations.items() if key.startswith("npu::")}
    assert npu == NPU_OPERATIONS | OF_FAMILY[name]
    assert sum(trace.operations.values()) < 50 * LAYERS
    # Each pass takes its tokens and its layout, each draft pass the rows that it goes on from, the first of them their
    # layout too, the head its rows; and it gives back its tokens.
    assert len(trace.copies["host to device"]) <= 2 * PASSES + 3 + 1
    assert len(trace.copies["device to host"]) <= PASSES
    blocks = max(len(sequence.block_table) for sequence in engine.scheduler._running)
    layout = 2 * 9 + 3 * blocks  # positions and slots of 3 sequences' tokens and drafts, and block tables
    assert max(sum(trace.copies.values(), [])) <= 8 * layout


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("deepseek", {"dtype": "float32"}, "query: got torch.float32"),
        ("deepseek", {"block_size": 32}, "block_size: got 32"),
        ("deepseek", {}, "group_count: got 4; allowed: equal groups of more than 2"),
        ("glm", {}, "D 64'; allowed: D 128 .head_dim."),
    ],
)
def test_demo_checkpoints_are_refused_with_the_rule(name, options, named):
    with pytest.raises(InvalidArgument, match=named):
        LLM(str(DEMO / f"{name}-demo"), device="npu", **options)
