"""Building requests with plain tritonclient, and reading their answers."""

from __future__ import annotations

import json
import queue
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

NUM_DRAFTS = 2  # of the repositories' values
MAX_MODEL_LEN = 4096
VOCABULARY = 1024
PROMPTS = [
    "And the LORD spake unto Moses,",
    "In the beginning",
    "And it came to pass, when the king heard these words,",
    "The king",
]
INTEGERS = {"input_ids", "draft_ids", "step", "epoch"}
GENERATE_TYPES = {
    "stream": bool, "exclude_input_in_output": bool, "add_special_tokens": bool, "ignore_eos": bool,
    "max_tokens": np.int32, "temperature": np.float32,
    "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint64, "min_tokens": np.int32,
    "repetition_penalty": np.float32, "presence_penalty": np.float32, "frequency_penalty": np.float32,
}  # fmt: skip


def sequence_tensors(**values):
    """Tensors of `speculative`, `main` and `draft`: shape [1, n]. Arrays are taken as they are, a dict is JSON."""
    tensors = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = json.dumps(value)
        if not isinstance(value, np.ndarray):
            value = np.array(value, dtype=np.int64 if name in INTEGERS else object).reshape(1, -1)
        tensors[name] = value
    return tensors


def generate_tensors(**values):
    """Tensors of `generate`: shape [1]. Arrays are taken as they are, a dict is JSON."""
    tensors = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = json.dumps(value)
        if not isinstance(value, np.ndarray):
            value = np.array(value, dtype=GENERATE_TYPES.get(name, object)).reshape(-1)
        tensors[name] = value
    return tensors


def inputs(kind, tensors):
    made = []
    for name, array in tensors.items():
        made.append(kind.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made


def values(tensors):
    """Answer tensors as Python values: ids as lists, text as str, numbers as numbers."""
    read = {}
    for name, array in tensors.items():
        flat = np.asarray(array).reshape(-1).tolist()
        if not name.endswith(("_ids", "_offsets")):
            [flat] = flat
        read[name] = flat.decode() if isinstance(flat, bytes) else flat
    return read


class Connection:
    """A tritonclient to one server; for one thread."""

    def __init__(self, server, protocol="grpc", timeout=60.0):
        self._kind = grpc_client if protocol == "grpc" else http_client
        options = {} if protocol == "grpc" else {"network_timeout": timeout}
        self.client = self._kind.InferenceServerClient(
            server.grpc_url if protocol == "grpc" else server.http_url, **options
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def infer(self, model, tensors, **options):
        result = self.client.infer(model, inputs(self._kind, tensors), **options)
        response = result.get_response()
        names = (
            [o["name"] for o in response["outputs"]]
            if isinstance(response, dict)
            else [o.name for o in response.outputs]
        )
        return values({name: result.as_numpy(name) for name in names})

    def step(self, sequence, *, model="speculative", start=False, end=False, client_timeout=None, **tensors):
        """One request of a sequence."""
        options = {} if client_timeout is None else {"client_timeout": client_timeout}
        flags = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        return self.infer(model, sequence_tensors(**tensors), **flags, **options)

    def end(self, sequence, model="speculative"):
        return self.step(sequence, model=model, end=True, step=-1)

    def run(self, sequence, prompt, params, *, model="speculative"):
        """A whole sequence, step by step to its end."""
        start = {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        steps = [self.step(sequence, model=model, start=True, sampling_parameters=params, **start)]
        while not steps[-1]["finish_reason"]:
            steps.append(self.step(sequence, model=model, step=len(steps)))
        self.end(sequence, model)
        return steps

    @contextmanager
    def started(self, sequence, prompt=PROMPTS[0], **params):
        """A live sequence that ends with the block; gives the answer of its START."""
        yield self.step(sequence, start=True, text_input=prompt, sampling_parameters=params)
        self.end(sequence)

    def stream(self, **tensors):
        """All responses of one `generate` request over a gRPC stream; `parameters` are request parameters."""
        return list(self.open_stream(**tensors))

    def open_stream(self, parameters=None, **tensors):
        answers = queue.SimpleQueue()
        final = False
        self.client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            self.client.async_stream_infer(
                "generate",
                inputs(self._kind, generate_tensors(**tensors)),
                enable_empty_final_response=True,
                parameters=parameters,
            )
            while not final:
                result, error = answers.get(timeout=60)
                if error:
                    final = True
                    raise error
                response = result.get_response()
                final = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield values({output.name: result.as_numpy(output.name) for output in response.outputs})
        finally:
            # Cancelling a stream that has just had its last response makes Triton hold the model when it stops.
            self.client.stop_stream(cancel_requests=not final)


def tokens(steps):
    return [token for step in steps for token in step["output_ids"]]


def text(steps):
    return "".join(step["text_output"] for step in steps)


def generate(server, verb="generate", **body):
    """A POST to the generate extension; `Response.json()` or the SSE events of a stream."""
    return httpx.post(f"http://{server.http_url}/v2/models/generate/{verb}", json=body, timeout=60, trust_env=False)


def events(response):
    return [json.loads(line[5:]) for line in response.text.split("\n") if line.startswith("data:")]


@dataclass
class Refusal:
    """What an error says, over either protocol."""

    code: str
    message: str

    @classmethod
    def of(cls, error: InferenceServerException):
        return cls((error.status() or "").removeprefix("StatusCode."), error.message())

    @property
    def invalid(self):
        """Errors of a stream have no code: there the message names each code but this one."""
        return self.code in ("INVALID_ARGUMENT", "400") or (not self.code and "; allowed: " in self.message)
