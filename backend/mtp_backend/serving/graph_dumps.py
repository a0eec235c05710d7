"""Sizes that graph dumps leave open, and the operations that open them.

torchair writes a graph that it converts (`dynamo_*.txt`), and the graph engine those that it compiles
(`ge_proto_*.txt`), in the text format of protocol buffers: blocks `op` with a name, a type, the names of the inputs'
operations and a block `output_desc` with a shape for each output. In torchair's `dynamo_*.pbtxt` the blocks are `node`,
the type is `op`, and the text of an output_desc is an attribute. An open size is −1; −2 stands for an open number of
sizes. torchair gives numbers for a graph's inputs only, and for every output the shape that torch has for it, with a
symbol such as s77 for an open size.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mtp_backend.errors import InvalidArgument

ENDINGS = (".txt", ".pbtxt")
OPENING = re.compile(r"(\w+)\s*:?\s*\{$")
TORCH_SHAPE = re.compile(r"torch\.Size\(\[(.*?)\]\)")
VALUE = re.compile(r"(\w+)\s*:\s*(.+)$")


@dataclass
class OpenNode:
    """An operation with an output of open size.

    Attributes:
        shapes: of its outputs with open sizes, "[-1, 64]" or "[s77, 64]".
        made_here: no input has an open size, so it is this operation that opens it.
    """

    name: str
    kind: str
    shapes: list[str]
    made_here: bool


@dataclass
class _Message:
    """One block: values and blocks by their names, in the order of the file."""

    values: dict[str, list[str]] = field(default_factory=dict)
    blocks: dict[str, list[_Message]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        return self.values.get(name, [""])[0].strip('"')

    def all(self, name: str) -> Iterator[_Message]:
        """Blocks of a name, at any depth."""
        for key, blocks in self.blocks.items():
            for block in blocks:
                if key == name:
                    yield block
                else:
                    yield from block.all(name)


def dump_files(directory: Path) -> list[Path]:
    """The dumps in a folder.

    Raises:
        InvalidArgument: it is no folder, or has none.
    """
    files = sorted(path for path in directory.glob("*") if path.suffix in ENDINGS)
    if not files:
        raise InvalidArgument("--graphs", str(directory), "a folder with graph dumps (*.txt, *.pbtxt)")
    return files


def open_nodes(path: Path) -> list[OpenNode]:
    """The operations of a dump that have open sizes, in its order.

    Raises:
        InvalidArgument: the file is no dump of a graph.
    """
    where = str(path)
    top = _parse(path.read_text(encoding="utf-8", errors="replace"), where)
    operations = [*top.all("op"), *top.all("node")]
    if not operations:
        raise InvalidArgument("--graphs", where, "the dump of a graph with operations")
    open_names, found = set(), []
    for own in operations:
        shapes = [_sizes(output) for output in _outputs(own, where)]
        opened = [shape for shape in shapes if not all(size.isdigit() for size in shape)]
        if not opened:
            continue
        open_names.add(own.text("name"))
        sources = {source.strip('"').rpartition(":")[0] for source in own.values.get("input", [])}
        made_here = not sources & open_names
        found.append(
            OpenNode(
                own.text("name"),
                own.text("type") or own.text("op"),
                [f"[{', '.join(shape)}]" for shape in opened],
                made_here,
            )
        )
    return found


def _outputs(operation: _Message, where: str) -> Iterator[_Message]:
    yield from operation.blocks.get("output_desc", [])
    for attribute in operation.blocks.get("attr", []):
        if attribute.text("key").startswith("[o]"):
            try:
                text = ast.literal_eval(attribute.blocks["value"][0].values["s"][0])
            except (ValueError, SyntaxError, LookupError) as error:
                raise InvalidArgument("--graphs", where, f"outputs as quoted texts ({error})") from error
            yield _parse(text, where)


def _sizes(output: _Message) -> list[str]:
    for attribute in output.blocks.get("attr", []):
        if attribute.text("key") == "_meta" and (shape := TORCH_SHAPE.search(attribute.blocks["value"][0].text("s"))):
            return [size for size in shape[1].split(", ") if size]
    return [size for shape in output.blocks.get("shape", []) for size in shape.values.get("dim", [])]


def _parse(text: str, where: str) -> _Message:
    top = _Message()
    stack = [top]
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if opening := OPENING.match(line):
            block = _Message()
            stack[-1].blocks.setdefault(opening[1], []).append(block)
            stack.append(block)
        elif line == "}" and len(stack) > 1:
            stack.pop()
        elif value := VALUE.match(line):
            stack[-1].values.setdefault(value[1], []).append(value[2])
        elif line and not line.startswith("#"):
            raise InvalidArgument("--graphs", f"line {number} of {where}", "the text format of protocol buffers")
    if len(stack) > 1:
        raise InvalidArgument("--graphs", where, "a dump whose blocks are closed")
    return top
