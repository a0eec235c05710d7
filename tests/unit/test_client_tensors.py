import dataclasses
import json

import numpy as np
import pytest
from mtp_backend import SamplingParams
from mtp_client import Client, InvalidArgument, ServerError, tensors, types
from mtp_client.sse import EventDecoder

GENERATION = {
    "text_output": np.array(["né".encode()], dtype=np.object_),
    "output_ids": np.array([5, 6], dtype=np.int64),
    "finish_reason": np.array([b"stop"], dtype=np.object_),
    "num_input_tokens": np.array([3], dtype=np.uint32),
    "num_output_tokens": np.array([2], dtype=np.uint32),
    "total_draft_tokens": np.array([4], dtype=np.int32),
    "total_accepted_draft_tokens": np.array([1], dtype=np.int32),
    "total_lossy_draft_tokens": np.array([0], dtype=np.int32),
    "num_spec_steps": np.array([2], dtype=np.int32),
    "text_offsets": np.array([0, 1], dtype=np.int32),
}


def test_unknown_parameter_is_named_before_anything_is_sent():
    with Client("127.0.0.1:1") as client:
        for call in (client.generate, client.stream, client.sequence):
            with pytest.raises(TypeError, match="'temprature'"):
                call("x", temprature=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "a\ud800"}, r"text_input: got 'a\\ud800'; allowed: a text of Unicode"),
        ({"prompt": 5}, "text_input: got 5; allowed: a text of Unicode"),
        ({"prompt": "a", "stop": "\udc00"}, "sampling_parameters: got '.*udc00.*'; allowed: a text of Unicode"),
    ],
)
def test_what_is_no_text(arguments, message):
    """It is refused as the server would, before anything is sent."""
    with Client("127.0.0.1:1") as client:
        for call in (client.generate, client.stream):
            with pytest.raises(InvalidArgument, match=message):
                call(**arguments)


@pytest.mark.parametrize("values", [[1.5], ["1"], [2**63], [-(2**63) - 1], "12", [None], 7, [[1]]])
def test_what_are_no_ids(values):
    for name in ("input_ids", "draft_ids", "generated_ids"):
        with pytest.raises(InvalidArgument, match=f"{name}: got .*; allowed: a list of integers of 64 bits"):
            tensors.sequence_inputs(0, **{name: values})
    assert tensors.ids("input_ids", np.array([5, 2**62])).tolist() == [[5, 2**62]]


def test_sampling_json():
    assert tensors.sampling_json({}) is None
    assert tensors.sampling_json({"top_k": None}) is None
    given = {"temperature": 0, "stop": ["。"], "stop_token_ids": [1], "ignore_eos": False, "seed": 2**63}
    assert json.loads(tensors.sampling_json(given)) == given
    assert json.loads(tensors.sampling_json({"logit_bias": {5: 1.5}})) == {"logit_bias": {"5": 1.5}}


def test_parameters_are_those_of_the_server():
    """All but n, of which a server makes 1."""
    server = {field.name for field in dataclasses.fields(SamplingParams) if field.init}
    assert set(types.SamplingParams.__annotations__) == server - {"n"}


def test_logprobs():
    item = {"logprob": -0.5, "rank": 1, "decoded_token": "é"}
    rows = json.dumps([None, {"7": item}])
    given = {
        "logprobs": np.array([rows.encode()], dtype=np.object_),
        "cumulative_logprob": np.array([-0.5], dtype=np.float32),
        "prompt_logprobs": rows,
    }
    generation = tensors.read_generation({**GENERATION, **given})
    assert generation.logprobs == generation.prompt_logprobs == [None, {7: item}]
    assert generation.cumulative_logprob == -0.5
    bare = tensors.read_chunk(GENERATION)
    assert bare.logprobs is bare.cumulative_logprob is bare.prompt_logprobs is None
    assert bare.num_cached_tokens == 0
    assert tensors.read_chunk(GENERATION | {"cached_tokens": np.array([16], dtype=np.uint32)}).num_cached_tokens == 16


def test_generate_inputs_have_no_batch_dimension():
    inputs = tensors.generate_inputs("日本", True, {"max_tokens": 3})
    assert {name: array.shape for name, array in inputs.items()} == dict.fromkeys(inputs, (1,))
    assert inputs["text_input"].item() == "日本"
    assert inputs["stream"].dtype == bool and inputs["stream"].item() is True
    assert json.loads(inputs["sampling_parameters"].item()) == {"max_tokens": 3}
    inputs = tensors.generate_inputs("a", False, {}, add_special_tokens=False)
    assert inputs["add_special_tokens"].dtype == bool and inputs["add_special_tokens"].item() is False


def test_priority_and_deadline_of_a_text():
    """Seconds become the server's microseconds; what is not asked for is not sent."""
    assert tensors.generate_options(0, None) == {}
    assert tensors.generate_options(-2, 1.5) == {"priority": -2, "timeout": 1_500_000}
    assert tensors.generate_options(0, 1e-9) == {"timeout": 1}
    inputs = tensors.generate_inputs("a", True, {"seed": 1}, tensors.generate_options(3, 2))
    assert json.loads(inputs["sampling_parameters"].item()) == {"seed": 1, "priority": 3, "timeout": 2_000_000}


@pytest.mark.parametrize("deadline", [0, -1.0, float("inf"), float("nan"), 1e30, 10**400, True, "1", [1]])
def test_wrong_deadline(deadline):
    with pytest.raises(InvalidArgument, match="deadline: value .*; allowed: more than 0 s"):
        tensors.microseconds(deadline)


def test_sequence_inputs_have_a_batch_dimension():
    inputs = tensors.sequence_inputs(2, input_ids=[1, 2, 3], text="a", draft_ids=[], sampling="{}")
    shapes = {name: array.shape for name, array in inputs.items()}
    assert shapes == {
        "step": (1, 1),
        "input_ids": (1, 3),
        "text_input": (1, 1),
        "draft_ids": (1, 0),
        "sampling_parameters": (1, 1),
    }
    assert inputs["input_ids"].dtype == inputs["draft_ids"].dtype == inputs["step"].dtype == np.int64
    assert list(tensors.sequence_inputs(-1)) == ["step"]


def test_read_arrays_and_json_alike():
    from_arrays = tensors.read_generation(GENERATION)
    from_json = tensors.read_generation(
        {
            name: [v.decode() if isinstance(v, bytes) else v for v in array.tolist()]
            for name, array in GENERATION.items()
        }
    )
    assert from_arrays == from_json
    assert (from_arrays.text, from_arrays.token_ids, from_arrays.finish_reason) == ("né", [5, 6], "stop")
    assert from_arrays.acceptance_rate == 0.25
    assert from_arrays.text_offsets == [0, 1]


def test_read_scalars_and_empty():
    chunk = tensors.read_chunk(GENERATION | {"text_output": "a\x00", "output_ids": 9, "total_draft_tokens": 0})
    assert (chunk.text, chunk.token_ids) == ("a\x00", [9])
    assert tensors.read_chunk(GENERATION | {"output_ids": []}).token_ids == []


def test_missing_or_malformed_output():
    with pytest.raises(ServerError, match="no output 'output_ids'"):
        tensors.read_generation({"text_output": "a"})
    with pytest.raises(ServerError, match="'text_output' has 2 elements"):
        tensors.read_generation({"text_output": ["a", "b"]})


def test_sse_split_anywhere():
    texts = ["a", "日本", "line\u2028sep\x85end", ""]
    payloads = [json.dumps({"t": text}, ensure_ascii=False).encode() for text in texts]
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    for size in (1, 2, 3, 7, len(stream)):
        decoder = EventDecoder()
        events = [e for i in range(0, len(stream), size) for e in decoder.feed(stream[i : i + size])]
        assert events == payloads


def test_sse_ignores_other_lines():
    assert EventDecoder().feed(b": comment\r\nevent: x\r\ndata:{}\r\n\r\n") == [b"{}"]
