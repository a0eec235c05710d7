"""The files that a measuring command leaves: JSON and a picture."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mtp_backend.errors import InvalidArgument


def make_folder(directory: Path) -> None:
    """Makes the folder that `--output` names.

    Raises:
        InvalidArgument: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument("--output", str(directory), f"a folder that can be made ({error})") from error


def write_json(report: Any, file: Path) -> None:
    """Writes a report and prints where."""
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(file)


def write_picture(module: str, data: Any, file: Path) -> None:
    """Has `draw(data, file)` of a module make a picture and prints where; says so where matplotlib is missing."""
    try:
        draw = import_module(module).draw
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != "matplotlib":
            raise
        print("mtp: no picture: matplotlib is missing; pip install 'mtp-backend[plot]'", file=sys.stderr)
        return
    draw(data, file)
    print(file)
