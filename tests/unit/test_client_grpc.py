"""The gRPC transports against an in-process server of Triton's protocol."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import grpc
import numpy as np
import pytest
from mtp_client import AsyncClient, Client, DeadlineExceeded, InvalidArgument, SequenceLost, ServerError, Unavailable
from mtp_client.transports.grpc import _next_response, _outputs
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

DATATYPES = {"O": "BYTES", "int64": "INT64", "int32": "INT32", "uint32": "UINT32"}


def respond(outputs):
    response = service_pb2.ModelInferResponse()
    for name, (shape, values, dtype) in outputs.items():
        response.outputs.add(name=name, datatype=DATATYPES[dtype], shape=shape)
        if dtype == "O":
            raw = b"".join(len(v.encode()).to_bytes(4, "little") + v.encode() for v in values)
        else:
            raw = np.array(values, dtype).tobytes()
        response.raw_output_contents.append(raw)
    return response


def answer(text, finish_reason, output_ids):
    one = dict.fromkeys(["num_input_tokens", "num_output_tokens"], ([1], [2], "uint32"))
    counts = ["total_draft_tokens", "total_accepted_draft_tokens", "total_lossy_draft_tokens", "num_spec_steps"]
    one |= dict.fromkeys(counts, ([1], [1], "int32"))
    texts = {"text_output": ([1], [text], "O"), "finish_reason": ([1], [finish_reason], "O")}
    ids = {"output_ids": ([len(output_ids)], output_ids, "int64"), "text_offsets": ([1], [0], "int32")}
    return respond({**texts, **ids, **one})


def read(request):
    """Inputs of a request, by the library's own reading of tensors."""
    response = service_pb2.ModelInferResponse(raw_output_contents=request.raw_input_contents)
    for tensor in request.inputs:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return {tensor.name: InferResult(response).as_numpy(tensor.name) for tensor in request.inputs}


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self):
        self.requests = []
        self.metadata = {}
        self.cancelled = threading.Event()
        self.released = threading.Event()

    def ServerReady(self, request, context):
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=request.name != "missing")

    def ModelInfer(self, request, context):
        self.requests.append(request)
        inputs = read(request)
        if request.parameters["sequence_id"].string_param == "lost":
            message = "inference request must specify the START flag on the first request of the sequence"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        step = max(inputs["step"].item(), 0)
        return respond(
            {
                "current_step": ([1, 1], [step], "int64"),
                "output_ids": ([1, 2], [1, 2], "int64"),
                "text_output": ([1, 1], ["日"], "O"),
                "num_accepted": ([1, 1], [step], "int32"),
                "sequence_length": ([1, 1], [9], "int32"),
                "finish_reason": ([1, 1], ["stop" if step == 1 else ""], "O"),
                "next_draft_ids": ([1, 0], [], "int64"),
            }
        )

    def ModelStreamInfer(self, requests, context):
        self.metadata = dict(context.invocation_metadata())
        (request,) = list(requests)  # returns only when the client has closed its side
        self.requests.append(request)
        inputs = read(request)
        prompt = inputs["text_input"].item().decode()
        context.add_callback(self.cancelled.set)
        if prompt == "refused":
            yield service_pb2.ModelStreamInferResponse(error_message="top_k: value -5; allowed: >= 0")
        elif prompt == "unavailable":
            context.abort(grpc.StatusCode.UNAVAILABLE, "engine restarted")
        elif prompt == "silent":
            self.released.wait(5)
        elif prompt == "endless":
            while context.is_active():
                yield service_pb2.ModelStreamInferResponse(infer_response=answer("x", "", [1]))
                self.released.wait(0.01)
        elif inputs["stream"].item():
            yield service_pb2.ModelStreamInferResponse(infer_response=answer("日", "", [1]))
            if prompt != "cut":
                yield service_pb2.ModelStreamInferResponse(infer_response=answer("", "stop", []))
        else:
            yield service_pb2.ModelStreamInferResponse(infer_response=answer("日本", "stop", [1, 2]))
        final = service_pb2.ModelInferResponse()
        final.parameters["triton_final_response"].bool_param = True
        yield service_pb2.ModelStreamInferResponse(infer_response=final)


@pytest.fixture
def server():
    servicer = Servicer()
    grpc_server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, grpc_server)
    servicer.url = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    yield servicer
    servicer.released.set()
    grpc_server.stop(0).wait()


def call(server, kind, method, *args, timeout=5.0, **kwargs):
    """Result of a method of Client or AsyncClient; a stream or sequence becomes a list."""
    if kind is Client:
        with Client(server.url, timeout=timeout) as client:
            result = getattr(client, method)(*args, **kwargs)
            if method != "sequence":
                return list(result) if method == "stream" else result
            with result:
                return list(result)

    async def run():
        async with AsyncClient(server.url, timeout=timeout) as client:
            result = getattr(client, method)(*args, **kwargs)
            if method == "stream":
                return [chunk async for chunk in result]
            if method != "sequence":
                return await result
            async with result:
                return [step async for step in result]

    return asyncio.run(run())


both = pytest.mark.parametrize("kind", [Client, AsyncClient])


@both
def test_generate(server, kind):
    generation = call(server, kind, "generate", "hi", top_k=3)
    assert (generation.text, generation.token_ids, generation.finish_reason) == ("日本", [1, 2], "stop")
    (request,) = server.requests
    assert request.model_name == "generate"
    assert {t.name: (t.datatype, list(t.shape)) for t in request.inputs} == {
        "text_input": ("BYTES", [1]),
        "stream": ("BOOL", [1]),
        "sampling_parameters": ("BYTES", [1]),
    }
    assert "triton_grpc_error" not in server.metadata  # it makes Triton 24.10 crash


@both
def test_stream(server, kind):
    chunks = call(server, kind, "stream", "hi")
    assert [(c.text, c.token_ids, c.finish_reason) for c in chunks] == [("日", [1], ""), ("", [], "stop")]


@both
@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize(("prompt", "error"), [("refused", InvalidArgument), ("unavailable", Unavailable)])
def test_errors(server, kind, method, prompt, error):
    with pytest.raises(error):
        call(server, kind, method, prompt)


@both
def test_stream_without_an_end(server, kind):
    with pytest.raises(ServerError, match="finish_reason"):
        call(server, kind, "stream", "cut")


@both
def test_deadline_cancels(server, kind):
    with pytest.raises(DeadlineExceeded):
        call(server, kind, "generate", "silent", timeout=0.1)
    assert server.cancelled.wait(5)


def test_closing_the_stream_cancels(server):
    with Client(server.url) as client:
        threads = threading.active_count()
        chunks = client.stream("endless")
        assert next(chunks).text == "x"
        chunks.close()
        assert server.cancelled.wait(5)
        assert client.generate("hi").text == "日本"
    assert threading.active_count() <= threads + 4  # those of the server's pool


def test_closing_the_async_stream_or_cancelling_the_task_cancels(server):
    async def run():
        async with AsyncClient(server.url) as client:
            async with aclosing(client.stream("endless")) as chunks:
                async for _ in chunks:
                    break
            assert await asyncio.to_thread(server.cancelled.wait, 5)
            server.cancelled.clear()
            task = asyncio.create_task(client.generate("silent"))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.cancelled.wait, 5)

    asyncio.run(run())


def test_two_streams_at_once(server):
    with Client(server.url) as client:
        assert [len(pair) for pair in zip(client.stream("hi"), client.stream("hi"))] == [2, 2]


@both
@pytest.mark.parametrize(("sequence_id", "kind_of_id"), [(2**63 - 1, "int64_param"), ("a-b", "string_param")])
def test_sequence(server, kind, sequence_id, kind_of_id):
    steps = call(server, kind, "sequence", [5, 6], sequence_id=sequence_id, timeout=10)
    assert [(s.text, s.token_ids, s.num_accepted, s.draft_ids) for s in steps] == [
        ("日", [1, 2], 0, []),
        ("日", [1, 2], 1, []),
    ]
    parameters = [request.parameters for request in server.requests]
    assert {getattr(p["sequence_id"], kind_of_id) for p in parameters} == {sequence_id}
    flags = [(p["sequence_start"].bool_param, p["sequence_end"].bool_param) for p in parameters]
    assert flags == [(True, False), (False, False), (False, True)]
    assert [p["timeout"].int64_param for p in parameters] == [9_000_000, 9_000_000, 4_500_000]
    assert read(server.requests[0])["input_ids"].tolist() == [[5, 6]]
    assert read(server.requests[2])["step"].tolist() == [[-1]]


@both
def test_priority_and_deadline(server, kind):
    """A text has them in its parameters; a sequence has its priority there, and a step's time as Triton's timeout."""
    call(server, kind, "generate", "hi", priority=2, deadline=0.5)
    call(server, kind, "sequence", [5, 6], priority=2, deadline=0.5, timeout=10)
    call(server, kind, "sequence", [5, 6], deadline=500, timeout=10)
    text, *steps = server.requests
    assert json.loads(read(text)["sampling_parameters"].item()) == {"priority": 2, "timeout": 500_000}
    assert json.loads(read(steps[0])["sampling_parameters"].item()) == {"priority": 2}
    timeouts = [step.parameters["timeout"].int64_param for step in steps]
    assert timeouts == [500_000, 500_000, 4_500_000, 9_000_000, 9_000_000, 4_500_000]


@both
def test_lost_sequence(server, kind):
    with pytest.raises(SequenceLost):
        call(server, kind, "sequence", "hi", sequence_id="lost")
    assert len(server.requests) == 1


@both
def test_is_ready(server, kind):
    assert call(server, kind, "is_ready") is True
    assert call(server, kind, "is_ready", "missing") is False
    server.url = "127.0.0.1:1"
    assert call(server, kind, "is_ready") is False


def test_cancellation_that_comes_with_a_response():
    """The task is cancelled when the response has arrived but has not been taken yet."""

    async def run():
        arrival = asyncio.get_running_loop().create_future()

        class Call:
            async def read(self):
                return await arrival

        reading = asyncio.create_task(_next_response(Call(), 5))
        await asyncio.sleep(0.01)
        arrival.set_result("response")
        await asyncio.sleep(0)
        assert not reading.done()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(run())


def test_outputs():
    """What the library reads, flat, whatever there is."""
    kinds = [
        "bool",
        *(f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64)),
        "float16",
        "float32",
        "float64",
    ]
    response = service_pb2.ModelInferResponse()
    for kind in kinds:
        array = np.arange(6).astype(kind)
        response.outputs.add(name=kind, datatype=np_to_triton_dtype(array.dtype), shape=[2, 3])
        response.raw_output_contents.append(array.tobytes())
    texts = np.array(["", "größer", "a\0b"], np.object_)
    for name, values in (("texts", texts), ("none", texts[:0])):
        response.outputs.add(name=name, datatype="BYTES", shape=[len(values), 1])
        response.raw_output_contents.append(serialize_byte_tensor(values).item() if len(values) else b"")
    found, library = _outputs(response), InferResult(response)
    assert list(found) == [*kinds, "texts", "none"]
    for name, array in found.items():
        expected = library.as_numpy(name).ravel()
        assert (array.dtype, array.shape, array.tolist()) == (expected.dtype, expected.shape, expected.tolist())
