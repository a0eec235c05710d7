"""Builds stand-ins for the CANN libraries that the torch_npu wheel is linked to.

    python stand_ins.py DIRECTORY

acl_host.c, ge_host.cpp and a function that returns 0 for every other missing symbol make one library; each library
name that the wheel asks for is an empty one that depends on it. With the directory in LD_LIBRARY_PATH, `import
torch_npu` works on a host without CANN.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

RUNTIME = Path(__file__).with_name("acl_host.c")
TEXTS = Path(__file__).with_name("ge_host.cpp")
CORE = "libcann_host.so"
SYSTEM = re.compile(r"(lib(stdc\+\+|m|c|gcc_s|pthread|dl|rt)\.so|ld-)")
# Virtual tables and type information are data, the rest are functions.
DATA = ("_ZTV", "_ZTI", "_ZTS")
# Functions that torch_npu looks up by name while it runs, and cannot do without.
LOOKED_UP = {
    "aclrtCtxSetSysParamOpt",
    "aclrtDestroyStreamForce",
    "aclrtSetDeviceSatMode",
    "aclmdlRIDestroy",
    "aclmdlRIExecuteAsync",
    "aclrtSetOpExecuteTimeOut",
    "aclrtSetStreamAttribute",
    "aclrtSetSysParamOpt",
}


def build(directory: Path) -> None:
    """Writes the libraries into `directory`."""
    packages = Path(sysconfig.get_path("purelib"))
    wheel = sorted((packages / "torch_npu").rglob("*.so"))
    torch = sorted((packages / "torch" / "lib").glob("*.so*"))
    directory.mkdir(parents=True, exist_ok=True)
    runtime, texts = directory / "acl_host.o", directory / "ge_host.o"
    headers = [f"-I{packages}/torch_npu/include", f"-I{packages}/torch_npu/include/third_party/acl/inc"]
    _run("gcc", "-O1", "-fPIC", "-Wall", "-Werror", *headers, "-c", RUNTIME, "-o", runtime)
    _run("g++", "-O1", "-fPIC", "-Wall", "-Werror", *headers, "-c", TEXTS, "-o", texts)
    defined = {line.split()[-1] for line in _run("nm", "--defined-only", runtime, texts).splitlines() if " " in line}
    wanted = set(LOOKED_UP)
    for library in [*wheel, *torch]:
        own, others = _symbols(library)
        defined |= own
        if library in wheel:
            wanted |= others
    source = directory / "stand_ins.c"
    source.write_text("".join(_stand_in(index, name) for index, name in enumerate(sorted(wanted - defined))))
    _run("gcc", "-shared", "-fPIC", f"-Wl,-soname,{CORE}", source, runtime, texts, "-lstdc++", "-o", directory / CORE)
    present = {path.name for path in [*wheel, *torch]}
    needed = {name for path in wheel for name in re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", path))}
    for name in sorted(needed - present):
        if not SYSTEM.match(name):
            links = [f"-Wl,-soname,{name}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-L{directory}"]
            _run("gcc", "-shared", *links, "-lcann_host", "-o", directory / name)


def _symbols(library: Path) -> tuple[set[str], set[str]]:
    """Names that a library defines, and those that it expects from others (without system and Python functions)."""
    own, others = set(), set()
    for line in _run("readelf", "-W", "--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        binding, section, name = fields[4], fields[6], fields[7]
        if section != "UND":
            own.add(name.split("@")[0])
        elif binding != "WEAK" and "@" not in name and not re.match("_?Py", name):
            others.add(name)
    return own, others


def _stand_in(index: int, name: str) -> str:
    if name.startswith(DATA):
        return f'char data_{index}[512] __asm__("{name}");\n'
    return f'long function_{index}(void) __asm__("{name}");\nlong function_{index}(void) {{ return 0; }}\n'


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    build(Path(sys.argv[1]))
