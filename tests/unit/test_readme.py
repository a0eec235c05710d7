"""The README's tensor tables say what the model configurations say."""

import dataclasses
import re
from pathlib import Path

import pytest
from mtp_backend import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TENSORS = README + (ROOT / "docs" / "requests.md").read_text(encoding="utf-8")
TENSOR = re.compile(r'name: "(\w+)"\s+data_type: TYPE_(\w+)\s+dims: \[ (-?\d+(?:, -?\d+)*) \]')


def configured(model: str, batched: bool) -> list[tuple[str, str]]:
    """(name, "TYPE [shape]") of every tensor of a model, as the README writes it."""
    config = (ROOT / "model_repository" / "templates" / model / "config.pbtxt").read_text()
    found = TENSOR.findall(config)
    assert len(found) == config.count("data_type"), "a tensor that this test cannot read"
    # Of two dimensions that are open in the configuration the first is 1 on the wire.
    sizes = [size.replace("-1, -1", "1, n").replace("-1", "n") for _, _, size in found]
    return [
        (name, f"{kind} [{'1, ' if batched else ''}{size}]") for (name, kind, _), size in zip(found, sizes, strict=True)
    ]


def documented() -> set[tuple[str, str]]:
    """(name, "TYPE [shape]") of every table row."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (\w+ \[[^\]]+\]) \|", TENSORS, re.MULTILINE)
    return {(name, kind) for names, kind in rows for name in re.findall(r"\w+", names)}


@pytest.mark.parametrize(
    ("model", "batched"),
    [("main", True), ("draft", True), ("speculative", True), ("generate", False), ("ensemble", False)],
)
def test_every_tensor_is_documented(model, batched):
    missing = [tensor for tensor in configured(model, batched) if tensor not in documented()]
    assert not missing


def test_no_other_tensor_is_documented():
    models = {"main": True, "draft": True, "speculative": True, "generate": False, "ensemble": False}
    known = {tensor for model, batched in models.items() for tensor in configured(model, batched)}
    assert documented() <= known


def test_every_sampling_parameter_is_documented():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", README, re.MULTILINE))
    words = {"none": None, "all": None, "drawn": None, "no bound": None, "false": False}
    for field in dataclasses.fields(SamplingParams):
        if field.init:
            default = getattr(SamplingParams(), field.name)
            shown = rows[field.name]
            assert (words[shown] if shown in words else float(shown)) == (default if default not in ((), {}) else None)


def test_named_files_exist():
    for name in re.findall(
        r"(?:\]\(|(?<=\s))((?:docs|tests|checkpoints|model_repository)/[\w./-]+?)(?:\)|(?=[\s\\]))", README
    ):
        assert (ROOT / name.rstrip(".")).exists(), name
