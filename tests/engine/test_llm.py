"""The offline API: what it gives, and what it refuses with the engine still working afterwards."""

import math

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.config import EngineConfig
from mtp_backend.engine.engine import Engine
from mtp_backend.errors import CheckpointError, InvalidArgument
from mtp_backend.sampling.noise import sample_seed

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm(deepseek, make_llm):
    return make_llm(deepseek, 2)


@pytest.fixture
def works(llm, deepseek, prompt_of, greedy):
    """Checks that the engine generates as ever."""

    def check():
        assert not llm.engine.has_work and llm.engine.pool.num_free == llm.engine.pool.num_blocks
        assert llm.generate(prompt_of(9), PARAMS)[0].token_ids == greedy(deepseek, prompt_of(9), 24)[:8]

    yield check
    check()


def test_outputs(llm, prompt_of):
    tokens = prompt_of(5)
    outputs = llm.generate(["In the beginning", tokens], [PARAMS, SamplingParams(max_tokens=3)])
    tokenizer = llm.engine.tokenizer
    assert outputs[0].prompt_token_ids == tokenizer.encode("In the beginning").ids
    assert outputs[1].prompt_token_ids == tokens
    assert [len(output.token_ids) for output in outputs] == [8, 3]
    for output in outputs:
        assert output.text == tokenizer.decode(output.token_ids)
        assert output.finish_reason == "length"


def test_one_prompt_or_several(llm, prompt_of):
    one = llm.generate("In the beginning", PARAMS)
    assert one == llm.generate(["In the beginning"], [PARAMS])
    assert llm.generate(prompt_of(4), PARAMS) == llm.generate([prompt_of(4)], PARAMS)
    assert llm.generate(("In the beginning",), PARAMS) == one
    assert [len(output.token_ids) for output in llm.generate(["a", "b", "c"], PARAMS)] == [8, 8, 8]
    assert llm.generate([], PARAMS) == []


def test_default_parameters_go_on_to_the_models_limit(deepseek, make_llm, prompt_of, greedy):
    output = make_llm(deepseek, 2, max_model_len=32).generate(prompt_of(20))[0]
    assert output.token_ids == greedy(deepseek, prompt_of(20), 24)[: len(output.token_ids)]
    assert (len(output.token_ids), output.finish_reason) == (12, "length") or output.finish_reason == "stop"


@pytest.mark.parametrize("k", [0, 2])
def test_several_samples(deepseek, k, make_llm, prompt_of):
    """Each sample is a request of its own; the first has the request's seed, the same seed gives the same samples."""
    llm, sampling = make_llm(deepseek, k), {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True}
    prompts = [prompt_of(5), prompt_of(7)]
    params = [SamplingParams(**sampling, seed=3, n=4), SamplingParams(**sampling, seed=4, n=2)]
    outputs = llm.generate(prompts, params)
    assert [output.index for output in outputs] == [0, 1, 2, 3, 0, 1]
    assert [output.prompt_token_ids for output in outputs] == [prompts[0]] * 4 + [prompts[1]] * 2
    texts = [tuple(output.token_ids) for output in outputs]
    assert len(set(texts)) == 6
    assert list(texts[0]) == llm.generate(prompts[0], SamplingParams(**sampling, seed=3))[0].token_ids
    again = llm.generate(prompts[0], SamplingParams(**sampling, seed=3, n=2))
    assert [tuple(output.token_ids) for output in again] == texts[:2]
    seeds = {sample_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(128)}
    assert len(seeds) == 3 * 128 and all(0 <= seed < 2**64 for seed in seeds)
    alone = SamplingParams(**sampling, seed=sample_seed(3, 2))
    assert llm.generate(prompts[0], alone)[0].token_ids == list(texts[2])
    with pytest.raises(InvalidArgument, match="^n: got 2; allowed: 1 .*offline API"):
        llm.engine.new_sequence(prompts[0], SamplingParams(**sampling, n=2))


WRONG_PROMPTS = {
    "nothing": (None, "prompts"),
    "number": (5, "prompts"),
    "float": (1.5, "prompts"),
    "bytes": (b"abc", "prompts"),
    "mapping": ({"prompt": "a"}, "prompts"),
    "set": ({"a"}, "prompts"),
    "tensor": (torch.tensor([5, 6]), "prompts"),
    "empty text": ("", "prompts"),
    "empty text among others": (["a", ""], "prompts"),
    "surrogate": ("\ud800", "prompts"),
    "empty tokens": ([[]], "input_ids"),
    "nested too deeply": ([[[5]]], "prompts"),
    "float tokens": ([[5.0]], "prompts"),
    "flat float tokens": ([5, 6.0], "prompts"),
    "bool tokens": ([[True]], "prompts"),
    "flat bool tokens": ([True, False], "prompts"),
    "mixed": ([5, "a"], "prompts"),
    "number among texts": (["a", 5], "prompts"),
    "nothing among texts": (["a", None], "prompts"),
    "tuple of tokens": ([(5, 6)], "prompts"),
    "negative token": ([5, -1], "input_ids"),
    "token beyond the vocabulary": ([5, 1024], "input_ids"),
    "huge token": ([10**30], "input_ids"),
    "too long": ([5] * 256, "input_ids"),
    "too long among others": (["a", [5] * 300, "b"], "input_ids"),
    "too long text": ("In the beginning " * 100, "input_ids"),
}


@pytest.mark.parametrize("case", WRONG_PROMPTS)
def test_wrong_prompts(llm, works, case, monkeypatch):
    prompts, field = WRONG_PROMPTS[case]
    monkeypatch.setattr(llm.engine, "step", None)  # nothing is generated
    with pytest.raises(InvalidArgument, match=f"^{field}: got .*; allowed: .+"):
        llm.generate(prompts, PARAMS)
    monkeypatch.undo()


def test_messages_name_the_limit(llm, works):
    with pytest.raises(
        InvalidArgument, match=r"^input_ids: got '256 tokens'; allowed: 1 … 255 tokens \(max_model_len − 1\)$"
    ):
        llm.generate([5] * 256, PARAMS)
    with pytest.raises(InvalidArgument, match="^input_ids: got 1024; allowed: token ids 0 … 1023$"):
        llm.generate([5, 1024], PARAMS)
    with pytest.raises(InvalidArgument, match="^stop_token_ids: got 1024; allowed: token ids 0 … 1023$"):
        llm.generate("a", SamplingParams(stop_token_ids=[5, 1024]))


def test_the_longest_prompt(llm, works):
    output = llm.generate([5] * 255, PARAMS)[0]
    assert len(output.token_ids) == 1 and output.num_draft_tokens == 0


@pytest.mark.parametrize(
    "params", [[PARAMS], [PARAMS] * 3, [], [PARAMS, None], [PARAMS, {"max_tokens": 3}], "ab", 5, {"max_tokens": 3}]
)
def test_wrong_parameters(llm, works, params, monkeypatch):
    monkeypatch.setattr(llm.engine, "step", None)
    with pytest.raises(InvalidArgument, match="^params: got .*; allowed: "):
        llm.generate(["a", "b"], params)
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 4097}, r"^max_model_len: got 4097; allowed: 2 … 4096 \(the checkpoint's limit\)$"),
        ({"max_model_len": 1}, "^max_model_len: got 1; allowed: an integer ≥ 2$"),
        ({"kv_cache_bytes": 1}, "^kv_cache_bytes: got 1; allowed: at least [0-9]+ .*max_model_len = 4096"),
        ({"block_size": 0}, "^block_size: got 0; "),
        ({"num_threads": 10**9}, "^num_threads: got 1000000000; allowed: an integer in 1 … [0-9]+$"),
        ({"num_threads": 10**30}, "^num_threads: got 10{30}; allowed: an integer in 1 … [0-9]+$"),
        ({"dtype": "float16"}, "^dtype: got 'float16'; allowed: one of auto, bfloat16, float32$"),
        ({"device": "npu"}, "^device: got 'npu'; "),
        (
            {"speculative": {"num_speculative_tokens": 16}},
            "^speculative.num_speculative_tokens: got 16; allowed: .*0 … 15$",
        ),
        ({"speculative": {"method": "eagle"}}, "^speculative.method: got 'eagle'; allowed: one of mtp$"),
        ({"speculative": True}, "^speculative: got True; "),
        ({"tensor_parallel_size": 2}, "^engine.tensor_parallel_size: got 2; allowed: no such key"),
    ],
)
def test_wrong_options(deepseek, options, message, monkeypatch):
    """Refused before anything is loaded."""
    monkeypatch.setattr("mtp_backend.engine.loading.build_networks", None)
    with pytest.raises(InvalidArgument, match=message):
        LLM(deepseek, **options)


@pytest.mark.parametrize("int8_weights", [False, True])
def test_more_than_memory_holds(deepseek, int8_weights, monkeypatch):
    """The bounds are those of the weights and the pool that an engine really has."""
    options = {"dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 2, "int8_weights": int8_weights}
    networks = Engine(EngineConfig(deepseek, num_threads=1, **options))._runner._target._context
    weights = sum(parameter.nbytes for parameter in networks.networks.target.parameters())
    pool = sum(part.nbytes for layer in networks.target_caches for part in layer)
    monkeypatch.setattr("mtp_backend.engine.loading.build_networks", None)
    monkeypatch.setattr("mtp_backend.engine.loading.available_memory", lambda: weights + pool - 1)
    message = (
        rf"^kv_cache_bytes: got {10**30}; allowed: at most {pool - 1} \(available memory, {weights + pool - 1} bytes"
    )
    with pytest.raises(InvalidArgument, match=message):
        LLM(deepseek, kv_cache_bytes=10**30, **options)
    monkeypatch.setattr("mtp_backend.engine.loading.available_memory", lambda: weights - 1)
    with pytest.raises(CheckpointError, match=f"weights take {weights} bytes; available memory: {weights - 1} bytes$"):
        LLM(deepseek, **options)
    monkeypatch.setattr("mtp_backend.engine.loading.available_memory", lambda: weights + pool)
    with pytest.raises(TypeError, match="NoneType.*callable"):  # so far as to build the networks
        LLM(deepseek, **options)


def test_the_models_own_limit_is_the_default(deepseek):
    engine = Engine(EngineConfig(deepseek, num_threads=1, max_num_seqs=1))
    assert engine.rules.max_model_len == 4096
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("k", [0, 1, 3])
def test_bfloat16(model, k, make_llm, prompt_of, greedy):
    """The checkpoint's own type: the first tokens are those of float32, later ones may part where two are close."""
    outputs = make_llm(model, k, dtype="auto").generate([prompt_of(length) for length in (4, 9, 20)], PARAMS)
    for output in outputs:
        wanted = greedy(model, output.prompt_token_ids, 24)[:8]
        assert output.token_ids[:2] == wanted[:2] and len(output.token_ids) == 8


def test_checkpoint_without_tokenizer(deepseek, make_llm, tmp_path, prompt_of, greedy):
    from pathlib import Path

    for path in Path(deepseek).iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    llm = make_llm(str(tmp_path), 2)
    output = llm.generate(prompt_of(9), PARAMS)[0]
    assert (output.token_ids, output.text) == (greedy(deepseek, prompt_of(9), 24)[:8], "")
    with pytest.raises(
        InvalidArgument, match="^prompts: got 'a'; allowed: nothing: the checkpoint has no tokenizer.json"
    ):
        llm.generate("a", PARAMS)
    with pytest.raises(InvalidArgument, match="^stop: .*no tokenizer.json"):
        llm.generate(prompt_of(9), SamplingParams(stop="a"))


def test_numbers_that_are_no_numbers_stay_out(llm, works):
    """Values that comparisons cannot order are refused where they are given."""
    for name in ("temperature", "top_p", "min_p"):
        with pytest.raises(InvalidArgument, match=f"^{name}: got nan"):
            SamplingParams(**{"temperature": 1.0, name: math.nan})
