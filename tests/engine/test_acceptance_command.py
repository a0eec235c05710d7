"""`mtp acceptance`: its figures are those of the offline API, and what it refuses."""

import json
import re
import sys
from pathlib import Path

import pytest
from mtp_backend import LLM, SamplingParams
from mtp_backend.serving.cli import main

PROMPTS = ["In the beginning God", "And it came to pass"]
COUNTS = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")


@pytest.fixture
def prompts(tmp_path):
    """A file with a blank line, which is no prompt."""
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPTS[0]}\n \n{PROMPTS[1]}\n")
    return file


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_report(deepseek, prompts, tmp_path, capsys, temperature):
    options = ["--num-speculative-tokens", "0", "2", "--max-tokens", "16", "--temperature", str(temperature)]
    assert (
        main(["acceptance", deepseek, "--prompts", str(prompts), *options, "--output", str(tmp_path / "new/out")]) == 0
    )
    report = json.loads((tmp_path / "new/out/acceptance.json").read_text())
    assert (report["num_prompts"], report["max_tokens"], report["temperature"]) == (2, 16, temperature)
    none, two = report["runs"]
    assert [none["num_speculative_tokens"], two["num_speculative_tokens"]] == [0, 2]
    assert none["num_spec_steps"] == none["seconds"]["draft"] == 0 and none["mean_acceptance_length"] == 1
    params = [SamplingParams(max_tokens=16, temperature=temperature, seed=seed) for seed in range(2)]
    wanted = LLM(deepseek, {"num_speculative_tokens": 2}, max_model_len=32).generate(PROMPTS, params)
    assert len(two["requests"]) == 2
    for request, output in zip(two["requests"], wanted, strict=True):
        assert request["num_generated_tokens"] == len(output.token_ids)
        assert [request[name] for name in COUNTS] == [getattr(output, name) for name in COUNTS]
        assert request["acceptance_rate_per_position"] == output.acceptance_rate_per_position
    for name in ("num_generated_tokens", *COUNTS):
        assert two[name] == sum(request[name] for request in two["requests"]) > 0
    assert two["mean_acceptance_length"] == 1 + two["num_accepted_draft_tokens"] / two["num_spec_steps"]
    assert sum(two["acceptance_histogram"].values()) == two["num_spec_steps"]
    for run in (none, two):
        parts = [run["seconds_per_token"][part] for part in ("draft", "verify", "manage")]
        assert run["seconds_per_token"]["total"] == pytest.approx(sum(parts)) and parts[1] > 0
        assert run["seconds"]["total"] == pytest.approx(sum(parts) * run["num_generated_tokens"])
    picture = (tmp_path / "new/out/acceptance.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 10_000
    printed = capsys.readouterr().out.splitlines()
    shown = printed[2].split()
    assert shown[:5] == ["2", *(str(two[name]) for name in ("num_generated_tokens", *COUNTS))]
    assert shown[5:7] == [f"{two['draft_acceptance_rate']:.3f}", f"{two['mean_acceptance_length']:.3f}"]
    assert shown[7:9] == [f"{rate:.3f}" for rate in two["acceptance_rate_per_position"]]
    assert printed[3:] == [str(tmp_path / "new/out" / name) for name in ("acceptance.json", "acceptance.png")]


def test_without_matplotlib(deepseek, prompts, tmp_path, capsys, monkeypatch):
    """The table and the JSON are there, and the message says what the picture needs."""
    for name in ("mtp_backend.serving.acceptance_plot", "matplotlib.figure"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ["acceptance", deepseek, "--prompts", str(prompts), "--max-tokens", "4", "--output", str(tmp_path)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.err.endswith("mtp: no picture: matplotlib is missing; pip install 'mtp-backend[plot]'\n")
    assert "ms/token" in printed.out and not (tmp_path / "acceptance.png").exists()
    assert json.loads((tmp_path / "acceptance.json").read_text())["runs"][0]["num_speculative_tokens"] == 1


@pytest.mark.parametrize("content", [None, b"", b" \n\n", b"\xff\xfe", "directory"])
def test_wrong_prompts_file(deepseek, tmp_path, capsys, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("my prompts.txt")
    if content == "directory":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    assert main(["acceptance", deepseek, "--prompts", str(file)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"mtp: --prompts: got '{file}'; allowed: a file of UTF-8 text with one prompt a line (")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-speculative-tokens", "1", "16"], "num_speculative_tokens: got 16; allowed: "),
        (["--max-tokens", "0"], "max_tokens: got 0; allowed: "),
        (["--temperature", "-1"], "temperature: got -1.0; allowed: "),
        (["--output", __file__], f"--output: got '{__file__}'; allowed: a folder that can be made"),
        (["--max-tokens", "4096"], "max_model_len: got 410[0-9]; allowed: "),
    ],
)
def test_wrong_values(deepseek, prompts, capsys, options, message, monkeypatch):
    monkeypatch.setattr("mtp_backend.engine.loading.build_networks", None)  # refused before anything is loaded
    assert main(["acceptance", deepseek, "--prompts", str(prompts), *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_no_checkpoint(prompts, capsys):
    assert main(["acceptance", "/nowhere", "--prompts", str(prompts)]) == 1
    assert "'/nowhere' is not a directory" in capsys.readouterr().err
