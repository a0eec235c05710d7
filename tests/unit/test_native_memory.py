"""The kernels under the compiler's address and undefined-behaviour sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = [
    f"{name}.cpp" for name in ("linear", "heads", "heads_pairs", "experts", "elementwise", "routing", "most_likely")
]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_kernels_keep_to_their_memory(tmp_path):
    native, program = ROOT / "backend/native", tmp_path / "sanitized"
    flags = "-std=c++17 -O1 -fsanitize=address,undefined -fno-sanitize-recover -Wno-psabi".split()
    level = ["-DMTP_PORTABLE", "-DMTP_LEVEL=portable", "-I", native]
    sources = [ROOT / "tests/native/sanitized.cpp", *(native / name for name in KERNELS)]
    subprocess.run(["g++", *flags, *level, *sources, "-o", program], check=True)
    subprocess.run([program], check=True)
