"""Shared fixtures of the engine's tests: the demo checkpoints, engines over them, and sequences driven step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.cache import bytes_per_block
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.config import SpeculativeConfig
from mtp_backend.engine.engine import Engine
from mtp_backend.engine.sequence import Sequence, Status
from mtp_backend.models.build import family_of
from tokenizers import Tokenizer

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
DEMO_MODELS = {name: str(CHECKPOINTS / f"{name}-demo") for name in ("deepseek", "glm")}
SPECULATIVE = {field.name for field in dataclasses.fields(SpeculativeConfig)}
MOST_LOADED = 12  # engines kept in memory, the least recently used one goes
SCRIPTURE = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness "
    "was upon the face of the deep. And the Spirit of God moved upon the face of the waters."
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=sorted(DEMO_MODELS))
def model(request: pytest.FixtureRequest) -> str:
    """Each demo checkpoint in turn."""
    return DEMO_MODELS[request.param]


@pytest.fixture(scope="session")
def deepseek() -> str:
    return DEMO_MODELS["deepseek"]


@pytest.fixture(scope="session")
def _loaded() -> dict[tuple, LLM]:
    return {}


@pytest.fixture
def make_llm(_loaded: dict[tuple, LLM]) -> Iterator[Callable[..., LLM]]:
    """make_llm(model, k, **options): an `LLM` in float32 on one thread, kept for the next call with these arguments.

    Options that are keys of the speculative configuration go there.
    Each test must leave the engines it used without work and with every KV block free.
    """
    used = {}

    def make(model: str, k: int = 0, **options: object) -> LLM:
        options = {"dtype": "float32", "num_threads": 1, "max_model_len": 256, "max_num_seqs": 8, **options}
        key = (model, k, *sorted(options.items()))
        speculative = {"num_speculative_tokens": k}
        speculative |= {name: options.pop(name) for name in SPECULATIVE & options.keys()}
        _loaded[key] = _loaded.pop(key, None) or LLM(model, speculative if k else None, **options)
        if len(_loaded) > MOST_LOADED:
            del _loaded[next(iter(_loaded))]
        used[key] = _loaded[key]
        return _loaded[key]

    yield make
    left = {key: llm.engine for key, llm in used.items() if not _is_idle(llm.engine)}
    for key in left:
        _loaded.pop(key, None)
    assert not left, "engines with work or blocks that are not free"


def _is_idle(engine: Engine) -> bool:
    return not engine.has_work and engine.pool.num_free == engine.pool.num_blocks


@pytest.fixture(scope="session")
def prompt_of() -> Callable[..., list[int]]:
    """prompt_of(length, start=0): token ids of that length, scripture from token `start` on, repeated as needed."""
    # Both demo tokenizers have 1,024 entries, so the ids of one are valid for the other.
    scripture = (
        Tokenizer.from_file(f"{DEMO_MODELS['deepseek']}/tokenizer.json").encode(SCRIPTURE, add_special_tokens=False).ids
    )

    def prompt(length: int, start: int = 0) -> list[int]:
        return [scripture[(start + index) % len(scripture)] for index in range(length)]

    return prompt


@pytest.fixture(scope="session")
def _references() -> dict[tuple, list[int]]:
    return {}


@pytest.fixture
def plain(make_llm: Callable[..., LLM], _references: dict[tuple, list[int]]) -> Callable[..., list[int]]:
    """plain(model, prompt, params): the tokens of a request that runs alone without speculation."""

    def reference(model: str, prompt: list[int], params: SamplingParams) -> list[int]:
        key = (model, tuple(prompt), params)
        if key not in _references:
            _references[key] = make_llm(model).generate(prompt, params)[0].token_ids
        return _references[key]

    return reference


@pytest.fixture(scope="session")
def _greedy_texts() -> dict[tuple, list[int]]:
    return {}


@pytest.fixture
def greedy(plain: Callable[..., list[int]], _greedy_texts: dict[tuple, list[int]]) -> Callable[..., list[int]]:
    """greedy(model, prompt, count): `plain` for the most likely tokens, past end tokens; a long one has the shorter."""

    def reference(model: str, prompt: list[int], count: int) -> list[int]:
        key = (model, tuple(prompt))
        if len(_greedy_texts.get(key, ())) < count:
            _greedy_texts[key] = plain(model, prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        return _greedy_texts[key][:count]

    return reference


@pytest.fixture(scope="session")
def tight_pool() -> Callable[..., int]:
    """tight_pool(model, k, block_size, blocks): kv_cache_bytes for a pool of that many blocks in float32.

    With `vanilla` every draft has a layer.
    """

    def kv_cache_bytes(model: str, k: int, block_size: int, blocks: int, vanilla: bool = False) -> int:
        checkpoint = Checkpoint(model)
        config = family_of(checkpoint).config.from_dict(checkpoint.config)
        return blocks * bytes_per_block(config.cache_shapes(k if vanilla else min(k, 1)), block_size, torch.float32)

    return kv_cache_bytes


@pytest.fixture(scope="session")
def preemptions() -> Callable[..., AbstractContextManager[list[Sequence]]]:
    """with preemptions(engine) as preempted: the list of the sequences that lost computed tokens meanwhile."""

    @contextmanager
    def watch(engine: Engine) -> Iterator[list[Sequence]]:
        scheduler, lost = engine.scheduler, []
        drop = scheduler.drop_cache

        def watched(sequence: Sequence) -> None:
            if sequence.status is not Status.FINISHED and sequence.num_computed:
                lost.append(sequence)
            drop(sequence)

        scheduler.drop_cache = watched
        try:
            yield lost
        finally:
            del scheduler.drop_cache

    return watch
