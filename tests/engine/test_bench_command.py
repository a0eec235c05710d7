"""`mtp bench`: its table, JSON and picture over a demo model with tiny loads, and what it refuses."""

import json
import re

import pytest
from mtp_backend import LLM, SamplingParams
from mtp_backend.engine.measure import Bench
from mtp_backend.serving import cli
from mtp_backend.serving.bench import Load, batch_prompts
from mtp_backend.serving.bench_table import best_drafts
from mtp_backend.serving.cli import main


@pytest.fixture(autouse=True)
def _this_process_stays(monkeypatch):
    monkeypatch.setattr(cli, "start_again", lambda: None)


def test_report(deepseek, tmp_path, capsys):
    options = ["--concurrency", "2", "1", "--num-speculative-tokens", "2", "--prompt-tokens", "5", "--max-tokens", "12"]
    command = ["bench", deepseek, *options, "--rounds", "2", "--num-threads", "1", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    report = json.loads((tmp_path / "out/bench.json").read_text())
    rows = report["rows"]
    assert [(row["concurrency"], row["num_drafts"]) for row in rows] == [(2, 0), (2, 2), (1, 0), (1, 2)]
    assert report["bandwidth_bytes_per_second"] > 1e6 and report["num_threads"] == 1
    for row in rows:
        low, middle, high = row["tokens_per_second"]
        assert 0 < low <= middle <= high
        assert row["milliseconds_per_token"] == pytest.approx(1000 * row["concurrency"] / middle)
        assert row["first_token_milliseconds"] > 0 and row["verify_milliseconds"] > 0
        assert row["share_of_limit"] == pytest.approx(row["limit_milliseconds"] / row["step_milliseconds"])
        if row["num_drafts"]:
            assert len(row["rates"]) == 2 and row["rates"][0] >= row["rates"][1] >= 0
            assert 1 <= row["tokens_per_step"] <= 3 and row["draft_milliseconds"] > 0
        else:
            assert (row["rates"], row["tokens_per_step"], row["draft_milliseconds"]) == ([], 1, 0)
            assert row["speedup"] == [1, 1, 1] and row["predicted_speedup"] == 1
    assert set(report["operation_seconds_per_step"]) == {"1", "2"}
    assert all(any(name.startswith("mtp::") for name in own) for own in report["operation_seconds_per_step"].values())
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    printed = capsys.readouterr().out
    assert printed.startswith("read bandwidth ") and "prompts were random tokens" in printed
    assert len(re.findall(r"^concurrency \d: k = [02] pays most$", printed, re.M)) == 2


def test_a_run_is_what_the_engine_generates(deepseek):
    load = Load([3], [0, 2], [], 6, 10, 1)
    bench = Bench(deepseek, 2, dtype="float32", max_model_len=32, num_threads=1)
    prompts = batch_prompts(bench, load, 3, 0)
    assert prompts == batch_prompts(bench, load, 3, 0) != batch_prompts(bench, load, 3, 1)
    run = bench.decode(prompts, 10, 2)
    llm = LLM(deepseek, {"num_speculative_tokens": 2}, dtype="float32", max_model_len=32, num_threads=1)
    llm.generate(prompts, SamplingParams(max_tokens=10, ignore_eos=True))
    assert run.num_tokens / (3 * run.num_steps) == run.tokens_per_step
    assert run.drafted[0] == 3 * run.num_steps  # every step of every sequence had drafts
    assert run.accepted[0] <= llm.engine.totals.speculation.accepted[0]
    assert run.num_tokens == 3 * run.num_steps + sum(run.accepted)
    assert len(run.first_token_seconds) == 3 and min(run.first_token_seconds) > 0
    assert run.parts.total == pytest.approx(run.seconds, rel=0.5)
    for engine in bench.engines.values():
        assert not engine.has_work and engine.pool.num_free == engine.pool.num_blocks
    assert bench.decode(prompts, 10, 0).num_steps == 9


def test_every_prompt_is_computed(deepseek):
    """A time to the first token is none of a prompt that the cache holds, whatever ran before."""
    prompts = [[*range(40, 80)]] * 3
    bench = Bench(deepseek, 2, max_model_len=64, num_threads=1)
    for num_drafts in (1, 2, 0):
        bench.decode(prompts[:2], 2, num_drafts)
        bench.decode(prompts, 2, num_drafts)
    for engine, runs in zip((bench.engines[False], bench.engines[True]), (5, 10), strict=True):
        assert engine.totals.prefix.num_cached_tokens == 0
        assert engine.totals.num_step_tokens >= runs * 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "0"], "--concurrency: got 0; allowed: from 1"),
        (["--max-tokens", "1"], "--max-tokens: got 1; allowed: from 2"),
        (["--num-speculative-tokens", "16"], "num_speculative_tokens: got 16; allowed: "),
        (["--num-speculative-tokens", "-1"], "--num-speculative-tokens: got -1; allowed: "),
        (["--num-threads", "0"], "--num-threads: got 0; allowed: "),
        (["--num-threads", "100000"], "--num-threads: got 100000; allowed: "),
        (["--concurrency", "4097"], "max_num_seqs: got 4097; allowed: "),
        (["--prompt-tokens", "4096"], "--max-tokens: got 64; allowed: "),
        (["--output", __file__], f"--output: got '{__file__}'; allowed: a folder that can be made"),
    ],
)
def test_wrong_values(deepseek, capsys, options, message, monkeypatch):
    monkeypatch.setattr("mtp_backend.engine.loading.build_networks", None)  # refused before anything is loaded
    assert main(["bench", deepseek, *options]) == 2
    assert message in capsys.readouterr().err


def test_the_best_number_of_drafts():
    class Row:
        def __init__(self, concurrency, num_drafts, speedup):
            self.concurrency, self.num_drafts, self.speedup = concurrency, num_drafts, [0, speedup, 9]

    rows = [Row(1, 0, 1), Row(1, 1, 1.3), Row(1, 2, 1.2), Row(8, 0, 1), Row(8, 1, 0.9)]
    assert best_drafts(rows) == {1: 1, 8: 0}
