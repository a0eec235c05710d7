"""`mtp npu doctor` on the emulated device."""

import re
from unittest.mock import patch

import torch_npu
from mtp_backend.ops.npu_operations import OPERATIONS
from mtp_backend.serving.cli import main


def test_nothing_is_missing(capsys):
    assert main(["npu", "doctor"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"torch_npu +2\.13\.0", output) and re.search(r"npu:0 +.*GiB free of", output)
    assert len(re.findall("npu_.* there$", output, re.M)) == len(OPERATIONS)
    assert "missing" not in output


def test_a_missing_operation(capsys, monkeypatch):
    monkeypatch.delattr(torch_npu, "npu_swiglu")
    assert main(["npu", "doctor"]) == 1
    assert "missing: npu_swiglu: torch_npu 2.13.0" in capsys.readouterr().out


def test_no_device(capsys):
    with patch("torch.npu.device_count", return_value=0):
        assert main(["npu", "doctor"]) == 1
    assert "missing: devices: a device" in capsys.readouterr().out
