"""`mtp npu doctor` where there is no NPU, and open sizes in graph dumps."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from mtp_backend.errors import InvalidArgument
from mtp_backend.ops import npu_operations
from mtp_backend.serving.cli import main
from mtp_backend.serving.graph_dumps import OpenNode, open_nodes

# A graph as torchair dumps it: sizes of inputs, symbols elsewhere.
DUMP = """\
name: "graph_1"
op {
  name: "tokens"
  type: "Data"
  input_desc {
    name: "x"
    shape {
      dim: -1
    }
  }
  output_desc {
    name: "y"
    shape {
      dim: -1
    }
  }
}
op {
  name: "weight"
  type: "Data"
  output_desc {
    shape {
      dim: 96
      dim: 64
    }
    attr {
      key: "_meta"
      value {
        s: "Tensor(dtype=torch.float32, shape=torch.Size([96, 64])"
      }
    }
  }
}
op {
  name: "Gather"
  type: "GatherV2"
  input: "weight:0"
  input: "tokens:0"
  output_desc {
    layout: "ND"
    attr {
      key: "_meta"
      value {
        s: "Tensor(dtype=torch.float32, shape=torch.Size([s77, 64])"
      }
    }
  }
}
op {
  name: "Where"
  type: "NonZero"
  input: "weight:0"
  output_desc {
    shape {
      dim: -1
      dim: 2
    }
  }
}
op {
  name: "scalar"
  type: "Const"
  output_desc {
    shape {
    }
    attr {
      key: "_meta"
      value {
        s: "Tensor(dtype=torch.int64, shape=torch.Size([])"
      }
    }
  }
}
"""
OPEN = [
    OpenNode("tokens", "Data", ["[-1]"], made_here=True),
    OpenNode("Gather", "GatherV2", ["[s77, 64]"], made_here=False),
    OpenNode("Where", "NonZero", ["[-1, 2]"], made_here=True),
]


@pytest.mark.parametrize("nested", [False, True])
def test_open_nodes(tmp_path, nested):
    """The graph engine's own dumps have the operations inside a block of the graph."""
    path = tmp_path / "graph.txt"
    path.write_text(f"graph {{\n{DUMP}}}\n" if nested else DUMP)
    assert open_nodes(path) == OPEN


def test_nodes_with_their_outputs_as_texts(tmp_path):
    """torchair's other format."""
    nodes = ""
    for name, kind, inputs, shape in [
        ("tokens", "Data", [], "shape {\n  dim: -1\n}\n"),
        ("weight", "Data", [], "shape {\n  dim: 96\n}\n"),
        (
            "Gather",
            "GatherV2",
            ["weight:0", "tokens:0"],
            'attr {\n  key: "_meta"\n  value {\n    s: "torch.Size([s77])"\n  }\n}',
        ),
    ]:
        nodes += f'node {{\n    name: "{name}"\n    op: "{kind}"\n'
        nodes += "".join(f'    input: "{own}"\n' for own in inputs)
        nodes += (
            f'    attr {{\n        key: "[o]y"\n        value {{\n            s: {shape!r}\n        }}\n    }}\n}}\n'
        )
    path = tmp_path / "graph.pbtxt"
    path.write_text(nodes)
    assert open_nodes(path) == [
        OpenNode("tokens", "Data", ["[-1]"], made_here=True),
        OpenNode("Gather", "GatherV2", ["[s77]"], made_here=False),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "graph.txt'; allowed: the dump of a graph with operations"),
        ('name: "empty"', "the dump of a graph with operations"),
        (DUMP[:-2], "a dump whose blocks are closed"),
        ("op {\n  name\n}", "got 'line 2 of .*; allowed: the text format"),
        ("}", "got 'line 1 of .*; allowed: the text format"),
    ],
)
def test_other_files_are_refused(tmp_path, monkeypatch, text, named):
    monkeypatch.chdir(tmp_path)  # an error shows the beginning of a long path only
    path = Path("graph.txt")
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=named):
        open_nodes(path)


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/ascend")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")  # which the command would set
    (tmp_path / "dynamo_original_graph.pbtxt").write_text(DUMP)
    assert main(["npu", "doctor", "--graphs", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert re.search(r"torch_npu +not installed", output) and re.search("ASCEND_HOME_PATH +/opt/ascend", output)
    assert "missing: torch_npu: pip install torch_npu==2.13.0" in output
    assert "dynamo_original_graph.pbtxt: 3 operations with open sizes" in output
    assert "  Gather (GatherV2) [s77, 64]: from its inputs" in output


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_a_folder_without_dumps_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    assert main(["npu", "doctor", "--graphs", str(tmp_path)]) == 2
    assert "allowed: a folder with graph dumps" in capsys.readouterr().err


def test_the_list_of_operations_is_the_code_s():
    sources = Path(npu_operations.__file__).parent.glob("npu*.py")
    called = {name for path in sources for name in re.findall(r"torch_npu\.(npu_\w+)", path.read_text())}
    assert tuple(sorted(called)) == npu_operations.OPERATIONS
