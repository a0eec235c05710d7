"""gRPC: sequences over ModelInfer, generations over ModelStreamInfer, one stream per call.

The stub is used directly because tritonclient's client object allows one stream at a time,
and its cancelled stream leaves a thread behind.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Generator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from mtp_client.errors import DeadlineExceeded, ServerError, Unavailable, make_error, translated
from mtp_client.tensors import Outputs
from mtp_client.tls import Tls
from mtp_client.transports import server_timeout_us
from mtp_client.types import SequenceRequest

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC's default is 2 minutes, in which a server that is back is still called unavailable.
    ("grpc.max_reconnect_backoff_ms", 2000),
]
# Streams do not ask for gRPC codes by the header `triton_grpc_error`: it makes servers of release 24.10 crash after a
# few hundred failed requests. The message of an error names its code.


def _channel(api: Any, url: str, tls: Tls | None) -> Any:
    """A channel of `grpc` or of `grpc.aio`."""
    if tls is None:
        return api.insecure_channel(url, options=_CHANNEL_OPTIONS)
    return api.secure_channel(url, tls.channel_credentials(), options=_CHANNEL_OPTIONS)


def _message(model: str, inputs: dict[str, np.ndarray], parameters: dict[str, Any]) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        message.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        is_bytes = array.dtype == np.object_
        message.raw_input_contents.append(serialize_byte_tensor(array).item() if is_bytes else array.tobytes())
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    return message


def _sequence_message(request: SequenceRequest, timeout: float) -> service_pb2.ModelInferRequest:
    parameters = {
        "sequence_id": request.sequence_id,
        "sequence_start": request.start,
        "sequence_end": request.end,
        "timeout": server_timeout_us(request, timeout),
    }
    return _message(request.model, request.inputs, parameters)


def _outputs(response: service_pb2.ModelInferResponse) -> Outputs:
    """Flat arrays by name; for each streamed token. `InferResult.as_numpy` would look through all outputs for each of
    them."""
    arrays = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            arrays[output.name] = deserialize_bytes_tensor(content)
        else:
            arrays[output.name] = np.frombuffer(content, triton_to_np_dtype(output.datatype))
    return arrays


class _StreamReader:
    """Takes the responses of a stream.

    An error is raised at the end of the stream, which follows it: a stream that is cancelled between the two makes
    servers of release 24.10 wait 30 s when they stop.
    """

    def __init__(self) -> None:
        self._error = ""

    def take(self, response: service_pb2.ModelStreamInferResponse) -> Outputs:
        """Empty for an error, and for a response that only says that it is the final one."""
        self._error = self._error or response.error_message
        return {} if self._error else _outputs(response.infer_response)

    def finish(self) -> None:
        """Takes the end of the stream."""
        if self._error:
            raise make_error(self._error)


def _only(answers: list[Outputs]) -> Outputs:
    if len(answers) != 1:
        raise ServerError(f"expected one answer, got {len(answers)}")
    return answers[0]


def _no_answer(timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer within {timeout:g} s")


async def _next_response(call: Any, timeout: float) -> Any:
    """Reads from a stream. Unlike `asyncio.wait_for` before Python 3.12, it never loses a
    cancellation that comes together with the response."""
    read = asyncio.ensure_future(call.read())
    try:
        done, _ = await asyncio.wait([read], timeout=timeout)
    finally:
        read.cancel()
    if not done:
        raise _no_answer(timeout)
    return read.result()


class GrpcTransport:
    """Blocking transport over one gRPC channel."""

    def __init__(self, url: str, timeout: float, tls: Tls | None = None) -> None:
        self._timeout = timeout
        self._channel = _channel(grpc, url, tls)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def generate(self, model: str, inputs: dict[str, np.ndarray]) -> Outputs:
        return _only(list(self.stream(model, inputs)))

    def stream(self, model: str, inputs: dict[str, np.ndarray]) -> Generator[Outputs, None, None]:
        # The stream is closed for writing after its only request, so its end is the end of the
        # answers. A thread reads, because a blocking read of gRPC cannot be given a timeout.
        call = self._stub.ModelStreamInfer(iter([_message(model, inputs, {})]))
        reader = _StreamReader()
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def read() -> None:
            try:
                for response in call:
                    arrived.put(response)
                arrived.put(None)
            except grpc.RpcError as error:
                arrived.put(error)

        threading.Thread(target=read, name="mtp-client-stream", daemon=True).start()
        try:
            with translated():
                while (response := arrived.get(timeout=self._timeout)) is not None:
                    if isinstance(response, grpc.RpcError):
                        raise response
                    if outputs := reader.take(response):
                        yield outputs
                reader.finish()
        except queue.Empty:
            raise _no_answer(self._timeout) from None
        finally:
            call.cancel()

    def infer(self, request: SequenceRequest, timeout: float) -> Outputs:
        with translated():
            return _outputs(self._stub.ModelInfer(_sequence_message(request, timeout), timeout=timeout))

    def is_ready(self, model: str | None) -> bool:
        try:
            with translated():
                if model is None:
                    return self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=self._timeout).ready
                return self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=self._timeout).ready
        except (Unavailable, DeadlineExceeded):
            return False

    def close(self) -> None:
        self._channel.close()


class AsyncGrpcTransport:
    """`GrpcTransport` for asyncio."""

    def __init__(self, url: str, timeout: float, tls: Tls | None = None) -> None:
        self._timeout = timeout
        self._channel = _channel(grpc.aio, url, tls)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def generate(self, model: str, inputs: dict[str, np.ndarray]) -> Outputs:
        return _only([outputs async for outputs in self.stream(model, inputs)])

    async def stream(self, model: str, inputs: dict[str, np.ndarray]) -> AsyncGenerator[Outputs, None]:
        call = self._stub.ModelStreamInfer(iter([_message(model, inputs, {})]))
        reader = _StreamReader()
        try:
            with translated():
                while (response := await _next_response(call, self._timeout)) is not grpc.aio.EOF:
                    if outputs := reader.take(response):
                        yield outputs
                reader.finish()
        finally:
            call.cancel()

    async def infer(self, request: SequenceRequest, timeout: float) -> Outputs:
        with translated():
            return _outputs(await self._stub.ModelInfer(_sequence_message(request, timeout), timeout=timeout))

    async def is_ready(self, model: str | None) -> bool:
        try:
            with translated():
                if model is None:
                    answer = await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=self._timeout)
                else:
                    answer = await self._stub.ModelReady(
                        service_pb2.ModelReadyRequest(name=model), timeout=self._timeout
                    )
                return answer.ready
        except (Unavailable, DeadlineExceeded):
            return False

    async def close(self) -> None:
        await self._channel.close()
