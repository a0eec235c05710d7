"""Making a Triton model repository from templates and values."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

from mtp_backend import checks
from mtp_backend.config import EngineConfig
from mtp_backend.errors import InvalidArgument

ENGINE_FILE = "engine.json"
# Values for the server alone, as the engine's configuration does not check them; with the least and the greatest.
# Triton takes 1.4 kB of memory for each sequence that there may be, whether it is there or not.
SERVER_VALUES = {
    "max_batch_size": (1, 2**31 - 1),
    "max_candidate_sequences": (1, 2**20),
    "max_sequence_idle_microseconds": (1, 2**63 - 1),
}

# In configurations of models, with what is allowed.
FORBIDDEN = {
    "CONTROL_SEQUENCE_CORRID": "no control input for the sequence id",
    "EXECUTION_ENV_PATH": "no archive of a Python environment: the models run in the server's",
}


def create_repository(templates: Path, values_file: Path, overrides: dict[str, str], output: Path) -> None:
    """Fills every template with the values and writes the repository, complete or not at all.

    Args:
        templates: folder with engine.json and MODEL/config.pbtxt, in which ${name} stands for a value.
        values_file: TOML file with one value for each name.
        overrides: name → value as text, in place of the file's; a number if the file's is one.
        output: folder to make; it must not exist or be empty.

    Raises:
        InvalidArgument: a name without value, a value without name, a wrong value, or an output that is in use.
        OSError: the output cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidArgument("output", str(output), "a folder that does not exist or is empty")
    files = {path.relative_to(templates): path.read_text(encoding="utf-8") for path in sorted(_templates(templates))}
    values = _values(values_file, overrides)
    wanted = {name for text in files.values() for name in Template(text).get_identifiers()}
    for name in sorted(wanted - values.keys()):
        raise InvalidArgument(name, None, f"a value for the template's ${{{name}}} in {values_file} or by --set")
    for name in sorted(values.keys() - wanted):
        raise InvalidArgument(name, values[name], "not a value of the templates; known: " + ", ".join(sorted(wanted)))
    for name in SERVER_VALUES.keys() & values.keys():
        checks.integer(name, values[name], *SERVER_VALUES[name])
    written = {name: _written(value) for name, value in values.items()}
    filled = {path: Template(text).substitute(written) for path, text in files.items()}
    _check_engine(filled[Path(ENGINE_FILE)])
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=output.parent, prefix=".repository-"))
    try:
        for path, text in filled.items():
            target = temporary / path
            target.parent.mkdir(exist_ok=True)
            target.write_text(text, encoding="utf-8")
            if path.parent != Path():
                (target.parent / "1").mkdir()
        temporary.chmod(0o755)
        temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _templates(folder: Path) -> list[Path]:
    found = [folder / ENGINE_FILE, *folder.glob("*/config.pbtxt")]
    if not found[0].is_file() or len(found) == 1:
        raise InvalidArgument("templates", str(folder), f"a folder with {ENGINE_FILE} and MODEL/config.pbtxt files")
    return found


def _written(value: float | str) -> str:
    """A value as it stands in the files, a text between quotes there."""
    text = json.dumps(value, ensure_ascii=False)
    return text[1:-1] if isinstance(value, str) else text


def _number(name: str, text: str) -> int | float:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise InvalidArgument(name, text, "a number")


def _values(file: Path, overrides: dict[str, str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument("values", str(file), f"a readable TOML file ({error})") from error
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise InvalidArgument(name, value, "a number or a text")
    given = {
        name: text if isinstance(values.get(name, ""), str) else _number(name, text) for name, text in overrides.items()
    }
    # The repository may lie anywhere, so the paths of checkpoints become absolute.
    for chosen, folder in ((values, file.parent), (given, Path())):
        for name in ("model", "draft_model"):
            if isinstance(chosen.get(name), str) and chosen[name]:
                chosen = chosen | {name: str((folder / chosen[name]).resolve())}
        values = values | chosen
    return values


def _check_engine(text: str) -> None:
    """Refuses values that the engine would refuse."""
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(ENGINE_FILE, text, f"valid JSON when filled ({error})") from error
    config = EngineConfig.from_dict(parsed)
    draft_model = config.speculative.draft_model if config.speculative else ""
    for field, path in (("model", config.model), ("draft_model", draft_model or config.model)):
        if not Path(path).is_dir():
            raise InvalidArgument(field, path, "an existing checkpoint directory")


def check_models(repository: Path) -> None:
    """Refuses model configurations that open a fault of the server.

    Raises:
        InvalidArgument: one declares a control input for the sequence id (Triton before 25.01 copies an id that is a
            text into it whatever its length), or names an archive of a Python environment (Triton before 26.06 unpacks
            it to wherever its entries say).
    """
    for path in sorted(repository.glob("*/config.pbtxt")):
        text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
        for word, allowed in FORBIDDEN.items():
            if word in text:
                raise InvalidArgument(str(path), word, allowed)
