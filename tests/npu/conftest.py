"""Tests on the emulated NPU. They are collected only in the environment that `./build.sh test npu` makes."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

if (Path(sys.prefix) / "cann").is_dir():
    import torch
    from mtp_backend import LLM
    from mtp_backend.ops import Ops, ReferenceOps, npu_cache_rules, npu_rules, npu_sparse_rules, ops_for
    from npu_host import attention, device, documented, experts, graph_engine, references, sparse, unpaged  # noqa: F401

    from npu.conforming import conforming, without_upper_layers

    torch.set_num_threads(1)
    device.install()
    graph_engine.install()
else:
    collect_ignore_glob = ["test_*.py"]

BLOCK_SIZE = {"deepseek": 16, "glm": 128}


@pytest.fixture
def float32_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the attention take float32, which no device does: the one rule that is relaxed, to compare exactly."""
    monkeypatch.setattr(npu_rules, "LATENT_TYPES", npu_rules.VECTOR_TYPES)
    monkeypatch.setattr(npu_cache_rules, "TYPES", npu_rules.VECTOR_TYPES)
    monkeypatch.setattr(npu_rules, "GROUPED_TYPES", npu_rules.VECTOR_TYPES)
    monkeypatch.setattr(npu_sparse_rules, "TYPES", npu_rules.VECTOR_TYPES)
    monkeypatch.setattr(attention, "LATENT_ATTENTION_TYPES", documented.FLOATS)
    monkeypatch.setattr(references, "LATENT_CACHE_TYPES", documented.FLOATS)
    monkeypatch.setattr(attention, "GROUPED_ATTENTION_TYPES", documented.FLOATS)
    monkeypatch.setattr(sparse, "TYPES", documented.FLOATS)
    monkeypatch.setattr(unpaged, "TYPES", documented.FLOATS)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """checkpoint(name): the demo checkpoint "deepseek" or "glm" with sizes that the rules allow."""
    made: dict[str, str] = {}

    def path(name: str) -> str:
        if name not in made:
            made[name] = str(conforming(name, tmp_path_factory.mktemp(name)))
        return made[name]

    return path


@pytest.fixture(scope="session")
def shallow(checkpoint: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """shallow(name): the same with the first layer of the target alone, and its MTP layer."""

    def path(name: str) -> str:
        return str(without_upper_layers(Path(checkpoint(name)), tmp_path_factory.mktemp(name)))

    return path


@pytest.fixture
def make_llm(checkpoint: Callable[[str], str]) -> Callable[..., "LLM"]:
    """make_llm(name, device, k, dtype): an LLM over a conforming checkpoint; prompts enter in chunks of 40 tokens.

    Device cpu takes the reference operations, or those that are given: the native ones round elsewhere than the
    emulated device.
    """

    def make(
        name: str, device: str, k: int, dtype: str, path: str | None = None, ops: "Ops | None" = None, **options: object
    ) -> LLM:
        own = ops or ReferenceOps()
        sizes = {"max_model_len": 256, "max_num_seqs": 8, "prefill_chunk_size": 40, "num_threads": 1}
        with patch("mtp_backend.engine.loading.ops_for", (lambda *_: own) if device == "cpu" else ops_for):
            return LLM(
                path or checkpoint(name),
                {"num_speculative_tokens": k} if k else None,
                dtype,
                device,
                block_size=BLOCK_SIZE[name],
                **sizes | options,
            )

    return make


@pytest.fixture
def trace() -> Iterator["device.Trace"]:
    """Counts what runs on the device during the test."""
    with device.traced() as trace:
        yield trace
