"""Making model repositories, and a lint of the templates."""

import json
import re
from pathlib import Path

import pytest
from mtp_backend.config import EngineConfig
from mtp_backend.errors import InvalidArgument
from mtp_backend.serving.cli import main
from mtp_backend.serving.repository import check_models, create_repository

ROOT = Path(__file__).resolve().parents[2] / "model_repository"
TEMPLATES = ROOT / "templates"
CONFIGS = sorted(TEMPLATES.glob("*/config.pbtxt"))
VALUES = sorted((ROOT / "values").glob("*.toml"))
DEMO = ROOT / "values" / "deepseek-demo.toml"


def create(output, *settings, values=DEMO, templates=TEMPLATES):
    arguments = ["repository", "create", str(output), "--templates", str(templates), "--values", str(values)]
    return main([*arguments, *(part for setting in settings for part in ("--set", setting))])


@pytest.fixture
def values(tmp_path):
    """A values file with lines replaced, left out (None) or added."""

    def make(**changes):
        lines = [line for line in DEMO.read_text().splitlines() if line.split(" =")[0] not in changes]
        lines = [
            f'model = "{ROOT.parent}/checkpoints/deepseek-demo"' if line.startswith("model =") else line
            for line in lines
        ]
        lines += [f"{name} = {value}" for name, value in changes.items() if value is not None]
        file = tmp_path / "values.toml"
        file.write_text("\n".join(lines))
        return file

    return make


@pytest.mark.parametrize("file", VALUES, ids=lambda file: file.stem)
def test_create(tmp_path, capsys, file):
    output = tmp_path / "new" / "repository"
    assert create(output, values=file) == 0
    assert capsys.readouterr().out == f"{output}\n"
    config = EngineConfig.from_json(output / "engine.json")
    assert Path(config.model).is_absolute() and Path(config.model).name == file.stem
    assert {path.name for path in output.iterdir()} == {
        "engine.json",
        "main",
        "draft",
        "generate",
        "ensemble",
        "speculative",
    }
    for model in ("main", "draft", "generate", "ensemble", "speculative"):
        assert (output / model / "1").is_dir()
        assert "${" not in (output / model / "config.pbtxt").read_text()
    assert [path.name for path in output.parent.iterdir()] == ["repository"]


def test_override(tmp_path):
    assert create(tmp_path / "r", "num_speculative_tokens=3", "dtype=float32", "max_candidate_sequences=7") == 0
    engine = json.loads((tmp_path / "r" / "engine.json").read_text())
    assert engine["speculative"]["num_speculative_tokens"] == 3 and engine["dtype"] == "float32"
    assert engine["max_sequences"] == 7
    for model in ("main", "draft"):
        assert "max_candidate_sequences: 7 }" in (tmp_path / "r" / model / "config.pbtxt").read_text()


@pytest.mark.parametrize("name", ['a "model" \\ of mine', "漢字", "$HOME ${dtype}"])
def test_any_path_of_a_model(tmp_path, monkeypatch, name):
    """What stands in a value is a value, whatever the files' syntax makes of its characters."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert create(tmp_path / "r", f"model={name}") == 0
    assert EngineConfig.from_json(tmp_path / "r" / "engine.json").model == str(tmp_path / name)


def test_model_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT.parent)
    assert create(tmp_path / "r", "model=checkpoints/glm-demo") == 0
    assert EngineConfig.from_json(tmp_path / "r" / "engine.json").model == str(ROOT.parent / "checkpoints" / "glm-demo")


def test_draft_model(tmp_path, monkeypatch, values):
    """Empty for the model's own MTP layer; a path starts at the working directory, or at the file of the values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    assert create(tmp_path / "own") == 0
    assert create(tmp_path / "given", "draft_model=draft") == 0
    assert create(tmp_path / "listed", values=values(draft_model='"draft"')) == 0
    for output, expected in (("own", ""), ("given", str(tmp_path / "draft")), ("listed", str(tmp_path / "draft"))):
        assert EngineConfig.from_json(tmp_path / output / "engine.json").speculative.draft_model == expected


@pytest.mark.parametrize(
    "setting, message",
    [
        ("num_speculative_tokens=16", "speculative.num_speculative_tokens: got 16; allowed: an integer in 0 … 15"),
        ("num_speculative_tokens=-1", "speculative.num_speculative_tokens: got -1"),
        ("num_speculative_tokens=two", "num_speculative_tokens: got 'two'; allowed: a number"),
        ("num_speculative_tokens=1.5", "speculative.num_speculative_tokens: got 1.5; allowed: an integer"),
        ("kv_cache_bytes=", "kv_cache_bytes: got ''; allowed: a number"),
        ("dtype=float16", "dtype: got 'float16'; allowed: one of auto, bfloat16, float32"),
        ("device=gpu", "device: got 'gpu'; allowed: one of cpu, npu"),
        ("max_num_seqs=0", "max_num_seqs: got 0; allowed: an integer in 1 … 4096"),
        ("max_num_batched_tokens=10", "max_num_batched_tokens: got 10; allowed: an integer ≥ 48"),
        ("kv_cache_bytes=0", "kv_cache_bytes: got 0"),
        ("num_threads=0", "num_threads: got 0"),
        ("sequence_ttl_seconds=0", "sequence_ttl_seconds: got 0; allowed: a number in (0,"),
        ("sequence_ttl_seconds=inf", "sequence_ttl_seconds: got inf; allowed: a number in (0,"),
        ("max_candidate_sequences=0", "max_candidate_sequences: got 0; allowed: an integer in 1 … 1048576"),
        ("max_batch_size=0", "max_batch_size: got 0; allowed: an integer in 1 … 2147483647"),
        ("max_sequence_idle_microseconds=-1", "max_sequence_idle_microseconds: got -1; allowed: an integer in 1 …"),
        ("model=no/such/folder", "no/such/folder'; allowed: an existing checkpoint directory"),
        ("draft_model=no/such/folder", "no/such/folder'; allowed: an existing checkpoint directory"),
        ("no_such_name=1", "no_such_name: got '1'; allowed: not a value of the templates; known: "),
        ("num_threads", "--set: got 'num_threads'; allowed: NAME=VALUE"),
    ],
)
def test_wrong_value(tmp_path, capsys, setting, message):
    assert create(tmp_path / "r", setting) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": None}, "dtype: got None; allowed: a value for the template's ${dtype}"),
        ({"max_batch_size": None}, "max_batch_size: got None"),
        ({"colour": 5}, "colour: got 5; allowed: not a value of the templates"),
        ({"num_threads": "true"}, "num_threads: got True; allowed: a number or a text"),
        ({"num_threads": "[1]"}, "num_threads: got [1]; allowed: a number or a text"),
        ({"num_threads": ""}, "values: got"),
    ],
)
def test_wrong_file(tmp_path, capsys, values, changes, message):
    assert create(tmp_path / "r", values=values(**changes)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_missing_files(tmp_path, capsys):
    assert create(tmp_path / "r", values=tmp_path / "none.toml") == 2
    assert "values: got" in capsys.readouterr().err
    assert create(tmp_path / "r", templates=tmp_path) == 2
    assert "templates: got" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "full folder"])
def test_output_in_use(tmp_path, capsys, kind):
    output = tmp_path / "r"
    if kind == "file":
        output.write_text("mine")
    else:
        output.mkdir()
        (output / "mine").write_text("mine")
    assert create(output) == 2
    assert "output: got" in capsys.readouterr().err
    assert (output if kind == "file" else output / "mine").read_text() == "mine"


@pytest.mark.parametrize("output", ["/proc/repository", "/dev/null/x/repository"])
def test_output_that_cannot_be_made(capsys, output):
    """It is told in a line, by its name."""
    assert create(output) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("mtp: ") and error.count("\n") == 1 and str(Path(output).parts[1]) in error


def test_empty_output(tmp_path):
    (tmp_path / "r").mkdir()
    assert create(tmp_path / "r") == 0


def test_complete_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        create_repository(TEMPLATES, DEMO, {}, tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


# Lint


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.parent.name)
def test_template(file):
    text = file.read_text()
    assert f'name: "{file.parent.name}"' in text
    # A declared CORRID control crashes servers before 25.01 when a client sends a long string as its id.
    code = re.sub(r"#.*", "", text)
    assert "control_input" not in code and "CORRID" not in code
    assert "KIND_GPU" not in code
    if 'platform: "ensemble"' not in code:
        assert "kind: KIND_CPU" in code and 'backend: "mtp"' in code


def tensors(text, block):
    found = re.search(rf"^{block} \[\n(.*?)^\]", text, re.S | re.M)[1]
    return {
        name: (kind, dims)
        for name, kind, dims in re.findall(r'name: "(\w+)"\s+data_type: (\w+)\s+dims: \[ (.*?) \]', found)
    }


def test_ensemble_matches_its_models():
    """Tensors of an ensemble share one namespace; types and dimensions are those of its models."""
    config = {file.parent.name: file.read_text() for file in CONFIGS}
    ensemble = config["speculative"]
    inputs, outputs = tensors(ensemble, "input"), tensors(ensemble, "output")
    assert len(inputs) == 6 and len(outputs) == 7
    assert not inputs.keys() & outputs.keys()
    assert inputs == tensors(config["main"], "input")
    models = tensors(config["main"], "output") | {"next_draft_ids": ("TYPE_INT64", "-1")}
    assert outputs == {name: models[name] for name in outputs}
    assert '"next_draft_ids" data_type: TYPE_INT64 dims: [ -1 ]' in config["draft"]


def test_both_forms_of_generate():
    """The model with TensorRT-LLM's wire shapes takes and gives what `generate` does, and says which prompt it is."""
    generate, ensemble = ((TEMPLATES / model / "config.pbtxt").read_text() for model in ("generate", "ensemble"))
    assert "max_batch_size: 0" in generate and "max_batch_size: 1" in ensemble
    assert tensors(ensemble, "input") == tensors(generate, "input")
    which = dict.fromkeys(("batch_index", "sequence_index"), ("TYPE_INT32", "1"))
    assert tensors(ensemble, "output") == tensors(generate, "output") | which


def test_same_sequence_settings():
    """main and draft keep the same sequences, or they would disagree about which are alive."""
    settings = [
        re.search(r"sequence_batching \{.*?\n\}", (TEMPLATES / m / "config.pbtxt").read_text(), re.S)[0]
        for m in ("main", "draft")
    ]
    assert settings[0] == settings[1]


ENVIRONMENT = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/tmp/a.tar.gz" } }'


def test_no_sequence_id_as_control_input():
    """A long text as id overwrites memory of servers before 25.01 where a model declares such an input."""
    check_models(TEMPLATES)
    for config in ROOT.parent.rglob("*.pbtxt"):
        assert "CONTROL_SEQUENCE_CORRID" not in config.read_text(encoding="utf-8"), config


def test_sequence_id_as_control_input_is_refused(tmp_path):
    assert create(tmp_path / "repository") == 0
    config = tmp_path / "repository" / "draft" / "config.pbtxt"
    control = 'control_input [ { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ]'
    config.write_text(config.read_text().replace("  oldest", f"  {control}\n  oldest"))
    with pytest.raises(InvalidArgument, match="draft/config.pbtxt: got 'CONTROL_SEQUENCE_CORRID'; allowed: no control"):
        check_models(tmp_path / "repository")


def test_archive_of_an_environment_is_refused(tmp_path):
    """Servers before 26.06 unpack it to wherever its entries say."""
    assert create(tmp_path / "repository") == 0
    config = tmp_path / "repository" / "draft" / "config.pbtxt"
    config.write_text(config.read_text() + "# EXECUTION_ENV_PATH\n")
    check_models(tmp_path / "repository")
    config.write_text(config.read_text() + ENVIRONMENT + "\n")
    with pytest.raises(InvalidArgument, match="draft/config.pbtxt: got 'EXECUTION_ENV_PATH'"):
        check_models(tmp_path / "repository")
