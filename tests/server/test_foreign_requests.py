"""Requests as users of vllm_backend, TensorRT-LLM and MindIE send them, unchanged but for names of models."""

import json
import queue

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from server.helpers import PROMPTS

PROMPT = PROMPTS[0]


def ask(server, model, arrays, outputs=(), parameters=None):
    """All responses to one request over a gRPC stream that is closed behind it; the tensors with their wire shapes."""
    answers = queue.SimpleQueue()
    tensors = []
    for name, array in arrays.items():
        tensors.append(grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
        client.async_stream_infer(model, tensors, outputs=wanted, request_id="1", parameters=parameters)
        client.stop_stream()
    results = [answers.get(block=False) for _ in range(answers.qsize())]
    for result in results:
        if isinstance(result, InferenceServerException):
            raise result
    return results


def texts(results):
    return [result.as_numpy("text_output")[0].decode() for result in results]


def post(server, model, verb, **body):
    """Answers of /generate or /generate_stream."""
    response = httpx.post(f"http://{server.http_url}/v2/models/{model}/{verb}", json=body, timeout=60, trust_env=False)
    if verb == "generate":
        return [response.json()]
    return [json.loads(line[5:]) for line in response.text.split("\n") if line.startswith("data:")]


# vllm_backend


def vllm(prompt, stream, **tensors):
    arrays = {"text_input": np.array([prompt.encode()], dtype=np.object_), "stream": np.array([stream], dtype=bool)}
    return arrays | {name: np.array([value]) for name, value in tensors.items()}


@pytest.mark.parametrize("stream", [False, True])
def test_vllm(triton_server, alone, stream):
    """Its sample client writes all numbers as texts, and sends them as a tensor and as request parameters."""
    wanted = alone(PROMPT, temperature=0.1, top_p=0.95, max_tokens=20, seed=5).text
    sampling = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "20", "seed": "5"}
    arrays = vllm(PROMPT, stream) | {"sampling_parameters": np.array([json.dumps(sampling).encode()], dtype=np.object_)}
    for given, parameters in ((arrays, sampling), (arrays, None), (vllm(PROMPT, stream), sampling)):
        results = ask(triton_server, "generate", given, ["text_output"], parameters)
        assert "".join(texts(results)) == wanted and (len(results) > 1) == stream
        assert all(result.as_numpy("text_output").shape == (1,) for result in results)
    verb = "generate_stream" if stream else "generate"
    body = {"text_input": PROMPT, "stream": stream}
    # Triton's own JSON reader wants a number for each declared input.
    numbers = {name: json.loads(value) for name, value in sampling.items()}
    for given in ({"parameters": numbers}, {"sampling_parameters": json.dumps(sampling)}):
        answers = post(triton_server, "generate", verb, **body, **given)
        assert "".join(answer["text_output"] for answer in answers) == wanted


def test_vllm_greedy_with_filters(triton_server, alone):
    wanted = alone(PROMPT, max_tokens=12).text
    for params in ({"temperature": 0, "top_p": 0.95, "top_k": 20}, {"temperature": 0, "top_k": -1}):
        [answer] = post(
            triton_server, "generate", "generate", text_input=PROMPT, parameters={**params, "max_tokens": 12}
        )
        assert answer["text_output"] == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_vllm_outputs(triton_server, alone, stream):
    wanted = alone(PROMPT, max_tokens=8, logprobs=0)
    asked = ["finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens"]
    flags = {f"return_{name}": True for name in asked}
    arrays = vllm(PROMPT, stream, exclude_input_in_output=True, max_tokens=np.int32(8), **flags)
    results = ask(triton_server, "generate", arrays)
    last = {name: result.item() for name in asked if (result := results[-1].as_numpy(name)) is not None}
    assert (last["finish_reason"], last["num_output_tokens"]) == (b"length", 8)
    assert last["num_input_tokens"] == len(wanted.prompt_token_ids)
    assert last["cumulative_logprob"] == pytest.approx(wanted.cumulative_logprob, abs=1e-3)
    rows = [row for result in results for row in json.loads(result.as_numpy("logprobs").item())]
    assert [[int(token) for token in row] for row in rows] == [[token] for token in wanted.token_ids]
    [answer] = post(triton_server, "generate", "generate", text_input=PROMPT, max_tokens=8, **flags)
    assert set(asked) <= answer.keys()


# TensorRT-LLM


def tensorrt_llm(prompt, stream, **tensors):
    """All that its end-to-end client sends by default."""
    types = {int: np.int32, float: np.float32, bool: bool}
    arrays = {
        "text_input": np.array([[prompt]]).astype(object),
        "max_tokens": np.array([[20]], dtype=np.int32),
        "stream": np.array([[stream]], dtype=bool),
        "beam_width": np.array([[1]], dtype=np.int32),
        "temperature": np.array([[1.0]], dtype=np.float32),
        "num_return_sequences": np.array([[1]], dtype=np.int32),
        "exclude_input_in_output": np.array([[False]], dtype=bool),
    }
    given = {
        name: np.array([[value]], dtype=types[type(value)])
        for name, value in tensors.items()
        if not isinstance(value, np.ndarray)
    }
    return arrays | given | {name: value for name, value in tensors.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["ensemble", "generate"])
def test_tensorrt_llm(triton_server, alone, model, stream):
    """[1, 1] for its model's name, [1] for a client without a batch dimension."""
    wanted = alone(
        PROMPT, temperature=1.0, top_k=3, seed=7, max_tokens=20, logprobs=0, bad_words=["the"], ignore_eos=True
    )
    arrays = tensorrt_llm(
        PROMPT, stream, top_k=3, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, end_id=-1,
        pad_id=2, random_seed=np.array([[7]], np.uint64), bad_words=np.array([["the", ""]], object),
        stop_words=np.array([["never said"]], object), return_log_probs=True, return_context_logits=False,
        return_generation_logits=False, length_penalty=1.0, min_length=1, use_draft_logits=False,
    )  # fmt: skip
    if model == "generate":
        arrays = {name: array[0] for name, array in arrays.items()}
    results = ask(triton_server, model, arrays, ["text_output", "cum_log_probs", "output_log_probs", "acceptance_rate"])
    assert "".join(texts(results)) == PROMPT + wanted.text and (len(results) > 1) == stream
    batch = (1,) if model == "ensemble" else ()
    shapes = {name: results[-1].as_numpy(name).shape for name in ("text_output", "cum_log_probs", "acceptance_rate")}
    assert shapes == {"text_output": (1,), "cum_log_probs": (*batch, 1), "acceptance_rate": (*batch, 1)}
    assert results[-1].as_numpy("cum_log_probs").item() == pytest.approx(wanted.cumulative_logprob, abs=1e-3)
    rows = [result.as_numpy("output_log_probs") for result in results]
    assert all(row.shape[:-1] == (*batch, 1) for row in rows)
    logprobs = [row[token].logprob for row, token in zip(wanted.logprobs, wanted.token_ids, strict=True)]
    assert np.concatenate([row.reshape(-1) for row in rows]).tolist() == pytest.approx(logprobs, abs=1e-3)


def test_tensorrt_llm_indices(triton_server):
    [result] = ask(triton_server, "ensemble", tensorrt_llm(PROMPT, False), ["batch_index", "sequence_index"])
    assert result.as_numpy("batch_index").tolist() == result.as_numpy("sequence_index").tolist() == [[0]]


@pytest.mark.parametrize("model", ["ensemble", "generate"])
def test_tensorrt_llm_over_http(triton_server, alone, model):
    """The request of its guide, with texts that are empty; its model's answer begins with the prompt."""
    wanted = alone(PROMPT, max_tokens=20).text
    body = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": ""}
    [answer] = post(triton_server, model, "generate", **body)
    assert answer["text_output"] == ((PROMPT if model == "ensemble" else "") + wanted)
    answers = post(triton_server, model, "generate_stream", **body, stream=True)
    assert len(answers) > 1 and "".join(answer["text_output"] for answer in answers) == wanted
    stopped = alone(PROMPT, max_tokens=20, stop=["unto", "zzz"]).text
    for words in ("unto", ["zzz", "unto"]):
        [answer] = post(triton_server, model, "generate", **body | {"stop_words": words}, exclude_input_in_output=True)
        assert answer["text_output"] == stopped


def test_tensorrt_llm_end_id(triton_server, alone):
    """It stands in place of the model's own end token."""
    tokens = alone(PROMPT, max_tokens=20, ignore_eos=True).token_ids
    [answer] = post(triton_server, "ensemble", "generate", text_input=PROMPT, max_tokens=20, end_id=tokens[3])
    assert answer["output_ids"] == tokens[:4] and answer["finish_reason"] == "stop"


def test_tensorrt_llm_guide(triton_server):
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{3}"}
    [answer] = post(triton_server, "generate", "generate", text_input=PROMPT, **guide)
    assert len(answer["text_output"]) == 3 and answer["text_output"].isdigit()


# MindIE


@pytest.mark.parametrize("stream", [False, True])
def test_mindie(triton_server, alone, stream):
    """Everything is in `parameters`; sampling is switched by `do_sample`."""
    parameters = {
        "details": True, "do_sample": True, "max_new_tokens": 20, "repetition_penalty": 1.1, "seed": 123,
        "temperature": 0.8, "top_k": 10, "top_p": 0.9, "typical_p": 1.0, "watermark": False,
    }  # fmt: skip
    wanted = alone(PROMPT, max_tokens=20, repetition_penalty=1.1, seed=123, temperature=0.8, top_k=10, top_p=0.9)
    verb = "generate_stream" if stream else "generate"
    body = {"id": "a123", "text_input": PROMPT, "stream": stream, "parameters": parameters}
    answers = post(triton_server, "generate", verb, **body)
    assert "".join(answer["text_output"] for answer in answers) == wanted.text
    assert answers[-1]["finish_reason"] == wanted.finish_reason
    greedy = post(triton_server, "generate", verb, **body | {"parameters": parameters | {"do_sample": False}})
    wanted = alone(PROMPT, max_tokens=20, repetition_penalty=1.1)
    assert "".join(answer["text_output"] for answer in greedy) == wanted.text


@pytest.mark.parametrize("stream", [False, True])
def test_mindie_over_a_grpc_stream(triton_server, alone, stream):
    """The same as request parameters, which have no type for fractions."""
    parameters = {"do_sample": True, "max_new_tokens": 7, "seed": 123, "temperature": "0.8", "top_k": 10}
    wanted = alone(PROMPT, max_tokens=7, seed=123, temperature=0.8, top_k=10)
    results = ask(triton_server, "generate", vllm(PROMPT, stream), ["text_output", "output_ids"], parameters)
    assert "".join(texts(results)) == wanted.text and (len(results) > 1) == stream
    assert [token for result in results for token in result.as_numpy("output_ids")] == wanted.token_ids
    with pytest.raises(InferenceServerException, match="max_tokens: got 0; allowed: "):
        ask(triton_server, "generate", vllm(PROMPT, stream), parameters={"max_new_tokens": 0})


# What cannot be honoured is refused by its name.


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        ("ensemble", "beam_width", 2),
        ("ensemble", "num_return_sequences", 2),
        ("ensemble", "return_context_logits", True),
        ("ensemble", "return_perf_metrics", True),
        ("generate", "best_of", 2),
        ("generate", "lora_name", "a"),
        ("generate", "watermark", True),
        ("generate", "batch_size", 5),
        ("generate", "include_stop_str_in_output", True),
    ],
)
def test_refused_by_name(triton_server, model, field, value):
    body = {"text_input": PROMPT, field: value}
    assert f"{field}: got {value!r}; allowed: " in post(triton_server, model, "generate", **body)[0]["error"]
    assert f"{field}: got {value!r}; allowed: " in post(triton_server, model, "generate_stream", **body)[0]["error"]


@pytest.mark.parametrize("name", ["lora_task_id", "prompt_vocab_size", "num_draft_tokens", "decoder_text_input"])
def test_undeclared_tensors(triton_server, name):
    """Triton itself refuses what the model does not declare."""
    with pytest.raises(InferenceServerException, match=f"unexpected inference input '{name}' for model 'ensemble'"):
        ask(triton_server, "ensemble", tensorrt_llm(PROMPT, False) | {name: np.array([[1]], np.int32)})


def test_batch(triton_server):
    arrays = {name: np.concatenate([array, array]) for name, array in tensorrt_llm(PROMPT, False).items()}
    with pytest.raises(InferenceServerException, match="batch-size must be <= 1 for 'ensemble'"):
        ask(triton_server, "ensemble", arrays)
