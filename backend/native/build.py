"""Compiles mtp_backend._native beside the Python sources, if they or torch have changed since the last time.

Run by the Python that will import it. Without a C++ compiler or Python's headers it says so and leaves the package
as it is: the CPU then runs the plain-torch operations.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODULE = HERE.parent / "mtp_backend" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
BUILD = HERE.parents[1] / "build" / "native"
KERNELS = [
    "linear",
    "heads",
    "heads_pairs",
    "experts",
    "elementwise",
    "routing",
    "most_likely",
    "attention",
]  # for each level, without torch
BINDINGS = ["bindings", "bind_elementwise", "bind_attention", "attention_plan", "program", "levels"]
AVX2 = "-mavx2 -mfma -mf16c -mbmi -mbmi2".split()
AVX512 = [*AVX2, *"-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mprefer-vector-width=512".split()]
LEVELS = {"amx": [*AVX512, "-mamx-tile", "-mamx-bf16"], "avx512": AVX512, "avx2": AVX2, "portable": []}
FLAGS = "-std=c++17 -fPIC -fvisibility=hidden -Wall -Wno-psabi -Wno-uninitialized -Wno-maybe-uninitialized".split()


def main() -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    headers = Path(sysconfig.get_path("include"))
    if not compiler or not (headers / "Python.h").exists():
        missing = f"Python.h in {headers}" if compiler else "a C++ compiler (g++)"
        print(f"native operations: not built, {missing} is missing. The CPU runs the plain-torch operations, which are "
              "much slower", file=sys.stderr)  # fmt: skip
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    stamp = BUILD / f"{MODULE.name}.built"
    wanted = _digest(compiler, [], HERE.iterdir())
    if MODULE.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    print("native operations: compiling", file=sys.stderr)
    torch = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    includes = [
        "-isystem",
        headers,
        "-isystem",
        torch / "include",
        "-isystem",
        torch / "include/torch/csrc/api/include",
    ]
    levels = _levels(compiler)
    has = [f"-DMTP_HAS_{level.upper()}" for level in levels]
    jobs = [_job(compiler, name, name, "-O1", "-fopenmp", *has, *includes) for name in BINDINGS]
    for level in levels:
        own = ["-O3", *LEVELS[level], f"-DMTP_{level.upper()}", f"-DMTP_LEVEL={level}"]
        jobs += [_job(compiler, name, f"{name}.{level}", *own) for name in KERNELS]
    objects = [to for to, _ in jobs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: job[0].exists() or _compile(*job), jobs))
    # torch's own OpenMP library: with a second one in the process torch.set_num_threads would not govern the kernels.
    libraries = [torch / "lib" / f"lib{name}.so" for name in ("c10", "torch_cpu", "torch_python")]
    openmp = [*(torch / "lib").glob("libgomp*"), *(torch.parent / "torch.libs").glob("libgomp*")][:1]
    _compile(MODULE, [compiler, "-shared", *objects, *libraries, *openmp])
    stamp.write_text(wanted)


def _job(compiler: str, source: str, name: str, *flags: str | Path) -> tuple[Path, list[str | Path]]:
    """An object file, whose name changes with all that it is made of, and the command that makes it."""
    command = [compiler, "-c", HERE / f"{source}.cpp", *FLAGS, *flags]
    listed = subprocess.run([*command, "-MM"], capture_output=True, check=True, text=True).stdout
    sources = map(Path, listed.replace("\\", " ").split()[1:])
    return BUILD / f"{name}.{_digest(compiler, command, sources)[:16]}.o", command


def _digest(compiler: str, command: list[str | Path], sources: Iterable[Path]) -> str:
    """Changes with the sources, the command, the compiler and torch."""
    digest = hashlib.sha256(" ".join(map(str, command)).encode())
    digest.update(importlib.metadata.version("torch").encode())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout)
    for path in sorted({path for path in sources if path.is_file()}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile(to: Path, command: list[str | Path]) -> None:
    """The file appears only when it is complete."""
    part = BUILD / f"{to.name}.part"
    subprocess.run([*map(str, command), "-o", str(part)], check=True)
    part.replace(to)


def _levels(compiler: str) -> list[str]:
    """Those that the compiler knows."""
    if platform.machine() != "x86_64":
        return ["portable"]
    probe = [compiler, "-E", "-x", "c++", "-o", os.devnull, os.devnull]
    return [name for name, flags in LEVELS.items() if not subprocess.run(probe + flags, capture_output=True).returncode]


if __name__ == "__main__":
    main()
