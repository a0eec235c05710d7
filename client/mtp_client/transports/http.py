"""HTTP: generations over the generate extension, sequences over /infer with binary tensors.

tritonclient writes and reads the binary body, httpx carries it: one connection pool, usable
from any thread, for all three kinds of request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator
from typing import Any

import httpx
import numpy as np
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype

from mtp_client.errors import DeadlineExceeded, ServerError, Unavailable, make_error, translated
from mtp_client.sse import EventDecoder
from mtp_client.tensors import Outputs
from mtp_client.tls import Tls
from mtp_client.transports import server_timeout_us
from mtp_client.types import SequenceRequest

_HEADER_LENGTH = "Inference-Header-Content-Length"


def _client_options(url: str, timeout: float, tls: Tls | None) -> dict[str, Any]:
    base_url = url if "://" in url else f"{'http' if tls is None else 'https'}://{url}"
    return {
        "verify": True if tls is None else tls.context(),
        "base_url": base_url,
        "timeout": timeout,
        "limits": httpx.Limits(),  # none: the server decides how much runs at once
        "trust_env": False,  # straight to the server, also where a proxy is set for the internet
    }


def _generate_call(model: str, inputs: dict[str, np.ndarray], verb: str) -> dict[str, Any]:
    body = {name: array.item() for name, array in inputs.items()}
    return {"method": "POST", "url": f"/v2/models/{model}/{verb}", "json": body}


def _infer_call(request: SequenceRequest, timeout: float) -> dict[str, Any]:
    tensors = []
    for name, array in request.inputs.items():
        tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensors.append(tensor.set_data_from_numpy(array, binary_data=True))
    body, header_length = InferenceServerClient.generate_request_body(
        tensors,
        sequence_id=request.sequence_id,
        sequence_start=request.start,
        sequence_end=request.end,
        timeout=server_timeout_us(request, timeout),
    )
    return {
        "method": "POST",
        "url": f"/v2/models/{request.model}/infer",
        "content": body,
        "headers": {_HEADER_LENGTH: str(header_length), "Content-Type": "application/octet-stream"},
        "timeout": timeout,
    }


def _ready_url(model: str | None) -> str:
    return "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"


def _json_outputs(body: bytes) -> Outputs:
    """Outputs of the generate extension. An error may come with any status, 200 included."""
    try:
        # Triton does not check text: bytes that are no UTF-8 must not break the rest.
        answer = json.loads(body.decode("utf-8", "replace"))
    except ValueError:
        raise ServerError(f"the answer is not JSON: {body[:200]!r}") from None
    if "error" in answer:
        raise make_error(answer["error"])
    return answer


def _raise_for_status(response: httpx.Response) -> None:
    """Takes a response whose body has been read."""
    if response.is_success:
        return
    try:
        # /generate_stream sends also the error that sets its status as an event.
        message = json.loads(response.text.removeprefix("data:"))["error"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {response.status_code}: {response.text[:200]}"
    raise make_error(message, str(response.status_code))


def _generate_outputs(response: httpx.Response) -> Outputs:
    _raise_for_status(response)
    return _json_outputs(response.content)


def _infer_outputs(response: httpx.Response) -> Outputs:
    _raise_for_status(response)
    result = InferenceServerClient.parse_response_body(
        response.content, header_length=response.headers.get(_HEADER_LENGTH)
    )
    return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response().get("outputs", [])}


class HttpTransport:
    """Blocking transport over one HTTP connection pool."""

    def __init__(self, url: str, timeout: float, tls: Tls | None = None) -> None:
        self._http = httpx.Client(**_client_options(url, timeout, tls))

    def generate(self, model: str, inputs: dict[str, np.ndarray]) -> Outputs:
        with translated():
            return _generate_outputs(self._http.request(**_generate_call(model, inputs, "generate")))

    def stream(self, model: str, inputs: dict[str, np.ndarray]) -> Generator[Outputs, None, None]:
        events = EventDecoder()
        with translated(), self._http.stream(**_generate_call(model, inputs, "generate_stream")) as response:
            if not response.is_success:
                response.read()
                _raise_for_status(response)
            for data in response.iter_bytes():
                for event in events.feed(data):
                    yield _json_outputs(event)

    def infer(self, request: SequenceRequest, timeout: float) -> Outputs:
        with translated():
            return _infer_outputs(self._http.request(**_infer_call(request, timeout)))

    def is_ready(self, model: str | None) -> bool:
        try:
            with translated():
                return self._http.get(_ready_url(model)).is_success
        except (Unavailable, DeadlineExceeded):
            return False

    def close(self) -> None:
        self._http.close()


class AsyncHttpTransport:
    """`HttpTransport` for asyncio."""

    def __init__(self, url: str, timeout: float, tls: Tls | None = None) -> None:
        self._http = httpx.AsyncClient(**_client_options(url, timeout, tls))

    async def generate(self, model: str, inputs: dict[str, np.ndarray]) -> Outputs:
        with translated():
            return _generate_outputs(await self._http.request(**_generate_call(model, inputs, "generate")))

    async def stream(self, model: str, inputs: dict[str, np.ndarray]) -> AsyncGenerator[Outputs, None]:
        events = EventDecoder()
        with translated():
            async with self._http.stream(**_generate_call(model, inputs, "generate_stream")) as response:
                if not response.is_success:
                    await response.aread()
                    _raise_for_status(response)
                async for data in response.aiter_bytes():
                    for event in events.feed(data):
                        yield _json_outputs(event)

    async def infer(self, request: SequenceRequest, timeout: float) -> Outputs:
        with translated():
            return _infer_outputs(await self._http.request(**_infer_call(request, timeout)))

    async def is_ready(self, model: str | None) -> bool:
        try:
            with translated():
                return (await self._http.get(_ready_url(model))).is_success
        except (Unavailable, DeadlineExceeded):
            return False

    async def close(self) -> None:
        await self._http.aclose()
