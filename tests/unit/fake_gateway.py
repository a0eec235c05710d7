"""A gateway in this process, in front of an in-process server of Triton's protocol."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import httpx
import uvicorn
from mtp_client.chat import ChatTemplate
from mtp_client.gateway.app import Gateway, Settings
from test_client_grpc import answer, read
from tritonclient.grpc import service_pb2, service_pb2_grpc

# What the templates of GLM and DeepSeek teach a model to write when it calls a tool.
CALLS = {
    "glm": [
        "<think>hm</think>So:\n<tool_", "call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool", "_call>",
    ],
    "deepseek": [
        "</think>So:\n<｜tool▁calls▁be",
        "gin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\"", ": 1}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ],
}  # fmt: skip
THINKING = ["<th", "ink>wh", "y</th", "ink>", "so", "\u2028 it is"]


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Does what the prompt says."""

    def __init__(self):
        self.requests = []
        self._open = set()
        self.hangs = False
        self.released = threading.Event()

    def ModelReady(self, request, context):
        if self.hangs:
            self.released.wait(2)
        return service_pb2.ModelReadyResponse(ready=True)

    def ModelStreamInfer(self, requests, context):
        (request,) = list(requests)
        self.requests.append(read(request))
        prompt = self.requests[-1]["text_input"].item().decode()
        self._open.add(context)
        context.add_callback(lambda: self._open.discard(context))
        errors = {
            "refused": "top_k: got -5; allowed: >= 0",
            "schema": "structured_output.tool_calls.functions[0].parameters.not: got {}; allowed: not supported",
            "unavailable": "UNAVAILABLE: the engine has ended",
            "breaks": "UNAVAILABLE: the engine has ended",
        }
        if prompt == "silent":
            self.released.wait(10)
        while prompt == "endless" and context.is_active():
            yield self.chunk("x")
            self.released.wait(0.01)
        if prompt == "breaks":
            yield self.chunk("a")
        if (error := errors.get(prompt.removesuffix("<think>"))) is not None:
            yield service_pb2.ModelStreamInferResponse(error_message=error)
        else:
            for text in CALLS.get(prompt.split("|")[0], THINKING):
                yield self.chunk(text)
            yield self.chunk("", "stop")

    def chunk(self, text, finish_reason=""):
        return service_pb2.ModelStreamInferResponse(infer_response=answer(text, finish_reason, [1]))

    @property
    def open(self):
        """Generations that have begun and not ended."""
        return len(self._open)

    def becomes(self, number, seconds=5):
        """Whether that many generations are open, now or soon."""
        end = time.monotonic() + seconds
        while self.open != number and time.monotonic() < end:
            time.sleep(0.01)
        return self.open == number

    def all_closed(self):
        return self.becomes(0)


@contextmanager
def running_server():
    """The servicer; `url` is its address."""
    servicer = Servicer()
    grpc_server = grpc.server(ThreadPoolExecutor(16))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, grpc_server)
    servicer.url = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    try:
        yield servicer
    finally:
        servicer.released.set()
        grpc_server.stop(0).wait()


@contextmanager
def running(url, template="{{ messages[0].content }}", api_key="", timeout=20.0):
    """The address of a gateway."""
    chat_template = ChatTemplate(template, {}) if template else None
    settings = Settings(url, "generate", "tiny", chat_template, api_key, timeout)
    config = uvicorn.Config(Gateway(settings).app(), port=0, log_level="warning", timeout_graceful_shutdown=2)
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}"
    finally:
        web.should_exit = True
        thread.join(10)


def post(gateway, path="completions", content=None, headers=None, **body):
    body = {"model": "tiny", **({"prompt": "a"} if path == "completions" else {}), **body}
    headers = {"Content-Type": "application/json"} if headers is None else headers
    content = json.dumps(body) if content is None else content
    return httpx.post(f"{gateway}/v1/{path}", content=content, headers=headers, timeout=10, trust_env=False)


def chat(prompt, **fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **fields}
