"""Settings of torchair and its switches for finding faults, on the emulated NPU."""

import math
import re
import subprocess
import sys

import pytest
import torchair
from mtp_backend import SamplingParams
from mtp_backend.graphs.torchair_debug import set_debugging
from mtp_backend.serving.cli import main
from mtp_backend.torchair_config import TorchairGraphConfig
from npu_host import graph_engine

from npu.test_engine import requests

SHAPE = r"npu_fused_infer_attention_score_v2(_\d)?\.0 \(3, 8, 128\): "


@pytest.fixture
def generate(shallow, make_llm, tmp_path):
    """generate(settings): a text of GLM's layers in a bucket of one sequence, and what was compiled for it."""
    path = shallow("glm")

    def run(mode="torchair", **settings):
        before = len(graph_engine.compiled)
        graphs = {"torchair_graph_config": settings, "graph_capture_sizes": [3]} if mode == "torchair" else {}
        llm = make_llm("glm", "npu", 2, "bfloat16", path, graph_mode=mode, **graphs)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        [output] = llm.generate(requests(llm)[0][:1], params)
        return output.token_ids, graph_engine.compiled[before:]

    return run


def test_run_eagerly_prints_and_dumps(generate, tmp_path, capfd):
    """The graphs are converted, but their operations run one by one; no graph engine is there."""
    plain, _ = generate("eager")
    settings = {"print_tensors": r"npu_fused_infer_.*\.0", "graph_dump_path": str(tmp_path), "run_eagerly": True}
    text, compiled = generate(**settings)
    assert text == plain and not compiled
    printed = re.findall("^" + SHAPE + r"\[.*", capfd.readouterr().out, re.M)
    assert printed and not any(math.isnan(float(value)) for line in printed for value in re.findall(r"-?\d\.\d+", line))
    dumps = sorted(tmp_path.glob("dynamo_*.pbtxt"))
    assert len(dumps) >= 2  # the target's and the chain's
    assert main(["npu", "doctor", "--graphs", str(tmp_path)]) == 0
    assert capfd.readouterr().out.count(" 0 operations with open sizes") == len(dumps)


def test_tensors_are_printed_inside_a_graph(generate, capfd):
    plain, without = generate()
    capfd.readouterr()
    text, compiled = generate(print_tensors=r"npu_fused_infer_.*\.0")
    assert text == plain and len(compiled) == len(without) == 2
    assert re.search("^" + SHAPE, capfd.readouterr().out, re.M)
    for graph, before, attentions in zip(compiled, without, [1, 2], strict=True):
        kinds = [[own.type for own in made.graph.op] for made in (before, graph)]
        assert [own.count("PrintV2") for own in kinds] == [0, attentions]


def test_settings_reach_the_graph_engine(generate):
    plain, [target, _] = generate()
    text, [changed, _] = generate(enable_frozen_parameter=False, enable_view_optimize=False)
    assert text == plain
    frozen = [graph_engine.options(own).get("frozenInput", "") for own in (target, changed)]
    assert "1" in frozen[0] and "1" not in frozen[1]
    views = [own.config.experimental_config.enable_view_optimize.value for own in (target, changed)]
    assert views == ["1", "0"]


def test_dumps_of_the_graph_engine(tmp_path):
    """One set of such options is taken in a process, so no graph is made here."""
    compiler = torchair.CompilerConfig()
    set_debugging(compiler, TorchairGraphConfig(data_dump_path=str(tmp_path)))
    _, options = compiler.as_dict()
    assert options["ge.exec.enableDump"] == "1" and options["ge.exec.dumpPath"].startswith(str(tmp_path))


def test_operations_that_run_eagerly_are_dumped(generate, tmp_path):
    generate(run_eagerly=True, data_dump_path=str(tmp_path))
    assert len(list(tmp_path.rglob("*.npy"))) > 100


def test_signals_stay_the_engine_s():
    code = """
import signal, sys
from mtp_backend.config import EngineConfig
from mtp_backend.graphs import graph_mode_for
signal.signal(signal.SIGINT, signal.SIG_IGN)
before = signal.getsignal(signal.SIGTERM)
graph_mode_for(EngineConfig("a", device="npu", graph_mode="torchair"), None)
assert "torchair" in sys.modules
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == (signal.SIG_IGN, before)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
