"""Files that are written tensor by tensor are what the safetensors library reads, and writes itself."""

import hashlib
import json

import pytest
import torch
from mtp_backend.checkpoint.tensor_writer import DTYPES, TensorHeader, write_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def values(kind, shape):
    torch.manual_seed(len(kind) + len(shape))
    return (torch.randn(shape) * 50).to(DTYPES[kind])


@pytest.fixture
def tensors():
    """Every number format, shapes of odd sizes, none and one; one not contiguous."""
    made = {f"{kind}.{index}": values(kind, shape) for kind in DTYPES for index, shape in enumerate([(3, 5), (7,), ()])}
    return made | {"transposed": values("F32", (3, 4)).T, "empty": torch.empty(0, 4), "name with é": torch.ones(1)}


def test_written_as_the_library_would(tmp_path, tensors):
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    headers = [TensorHeader(name, kinds[t.dtype], list(t.shape)) for name, t in reversed(tensors.items())]
    read = []
    digest = write_tensors(tmp_path / "ours", headers, lambda name: read.append(name) or tensors[name])
    assert sorted(read) == sorted(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, tensor in load_file(tmp_path / "theirs").items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() is None
    assert digest == hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest()


def test_values_are_aligned(tmp_path, tensors):
    """Mapped files need it: each tensor starts at a multiple of its number's size."""
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    write_tensors(
        tmp_path / "f", [TensorHeader(n, kinds[t.dtype], list(t.shape)) for n, t in tensors.items()], tensors.get
    )
    content = (tmp_path / "f").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(content[8 : 8 + length]).items():
        assert entry["data_offsets"][0] % tensors[name].dtype.itemsize == 0


def test_no_tensors(tmp_path):
    write_tensors(tmp_path / "f", [], lambda name: None)
    assert load_file(tmp_path / "f") == {}


def test_another_tensor_than_announced(tmp_path):
    with pytest.raises(ValueError, match="float16"):
        write_tensors(tmp_path / "f", [TensorHeader("a", "F32", [1])], lambda name: torch.ones(1, dtype=torch.float16))
