"""The gateway's routes."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from mtp_client.aio import AsyncClient
from mtp_client.chat import ChatTemplate
from mtp_client.errors import InvalidArgument, MtpError
from mtp_client.gateway import checks, fields
from mtp_client.gateway.answers import Answer, ChatChoice, Choice, CompletionChoice
from mtp_client.gateway.connection import EventStream, is_loopback, read_json, while_connected
from mtp_client.gateway.errors import ApiError, from_server, invalid
from mtp_client.gateway.generation import runs
from mtp_client.gateway.reasoning import CLOSE, OPEN
from mtp_client.gateway.tools import form_of
from mtp_client.tls import Tls

_HEALTH_S = 5.0  # for the server to say that it is ready
_PAGE = Path(__file__).parent / "page"
# The page needs nothing but its own files and this gateway.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Settings:
    """How the gateway runs.

    `url`: gRPC address of the server. `model`: its model that generates. `served_model_name`:
    what requests call it. `template`: None where the checkpoint has no chat template.
    `api_key`: "" lets everyone in. `timeout`: seconds to wait for each part of an answer.
    `tls`: None speaks plain text with the server.
    """

    url: str
    model: str
    served_model_name: str
    template: ChatTemplate | None
    api_key: str
    timeout: float
    tls: Tls | None = None


class Gateway:
    """Answers requests with the generations of one server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._created = int(time.time())
        self._client: AsyncClient

    def app(self) -> Starlette:
        """The ASGI application."""
        page = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
        return Starlette(
            routes=[
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
                *(Route(path, _file(name), methods=["GET"]) for path, name in page.items()),
            ],
            exception_handlers={
                ApiError: lambda _, error: _error_response(error),
                HTTPException: lambda _, error: _error_response(ApiError(error.status_code, error.detail)),
                ClientDisconnect: lambda *_: Response(status_code=499),  # nobody reads it
                Exception: lambda *_: _error_response(ApiError(500, "the gateway failed; see its log")),
            },
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        url = self._settings.url
        async with AsyncClient(url, timeout=self._settings.timeout, tls=self._settings.tls) as self._client:
            yield

    async def health(self, _: Request) -> Response:
        """200 while the server answers requests, else 503."""
        try:
            ready = await asyncio.wait_for(self._client.is_ready(self._settings.model), _HEALTH_S)
        except asyncio.TimeoutError:
            ready = False
        return JSONResponse({"status": "ready" if ready else "unavailable"}, 200 if ready else 503)

    async def models(self, request: Request) -> Response:
        """The one model."""
        self._authorise(request)
        model = {"id": self._settings.served_model_name, "object": "model", "created": self._created}
        return JSONResponse({"object": "list", "data": [{**model, "owned_by": "mtp_backend"}]})

    async def completions(self, request: Request) -> Response:
        """Continues texts."""
        asked = await self._read(request, fields.COMPLETION, "prompt")
        prompts = asked.own["prompt"]
        prompts = [prompts] if isinstance(prompts, str) else prompts
        return await self._answer(request, asked, prompts, CompletionChoice, add_special_tokens=True)

    async def chat_completions(self, request: Request) -> Response:
        """Gives the next message of a chat."""
        asked = await self._read(request, fields.CHAT, "messages")
        if self._settings.template is None:
            message = "the checkpoint has no chat template: start the gateway with --tokenizer DIR or "
            raise ApiError(400, message + "--chat-template FILE, or use /v1/completions", code="no_chat_template")
        try:
            variables = asked.own.get("chat_template_kwargs", {})
            prompt = self._settings.template.render(asked.own["messages"], variables, asked.tools)
        except InvalidArgument as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from error
        if asked.required_tools:
            self._require_calls(asked, self._settings.template)
        thinking = prompt.rstrip().endswith(OPEN)
        if thinking and "structured_output" in asked.sampling:
            asked.sampling["structured_output"]["reasoning_end"] = CLOSE

        def make_choice() -> ChatChoice:
            return ChatChoice(thinking, asked.tools, asked.own.get("top_logprobs", 0))

        return await self._answer(request, asked, [prompt], make_choice, add_special_tokens=False)

    def _require_calls(self, asked: fields.Request, template: ChatTemplate) -> None:
        """Holds the output to calls, in place of what `response_format` wants of a text."""
        form = form_of(template.source)
        if form is None:
            allowed = "none, auto: the chat template writes calls in no form that is known"
            raise invalid("tool_choice", asked.own["tool_choice"], allowed)
        functions = []
        for index in asked.required_tools:
            function = asked.tools[index]["function"]
            asked.names[f"structured_output.tool_calls.functions[{len(functions)}]"] = f"tools[{index}].function"
            functions.append({key: function[key] for key in ("name", "parameters") if function.get(key) is not None})
        calls = {"template": form, "functions": functions, "parallel": asked.several_calls}
        asked.sampling["structured_output"], asked.names["structured_output"] = {"tool_calls": calls}, "tools"

    def _authorise(self, request: Request) -> None:
        if not self._settings.api_key:
            # Only this host can connect then; another name is that of a site which made its name point here.
            if not is_loopback(request.url.hostname or ""):
                raise ApiError(403, "without an API key the gateway answers to loopback addresses only")
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), self._settings.api_key.encode()):
            raise ApiError(
                401, "wrong or missing API key; send it as Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _read(self, request: Request, table: Mapping[str, fields.Field], required: str) -> fields.Request:
        self._authorise(request)
        asked = fields.read(await read_json(request), table, required)
        served = self._settings.served_model_name
        if asked.own["model"] != served:
            message = str(invalid("model", asked.own["model"], served))
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked

    async def _answer(
        self,
        request: Request,
        asked: fields.Request,
        prompts: list[str],
        make_choice: Callable[[], Choice],
        *,
        add_special_tokens: bool,
    ) -> Response:
        if len(prompts) * asked.n > checks.MAX_CHOICES:
            raise invalid("n", asked.n, f"at most {checks.MAX_CHOICES} generations, prompts times n")
        streams = [
            self._client.stream(
                prompt,
                model=self._settings.model,
                add_special_tokens=add_special_tokens,
                **asked.seeded(choice),
            )
            for prompt in prompts
            for choice in range(asked.n)
        ]
        answer = Answer(
            self._settings.served_model_name,
            [make_choice() for _ in streams],
            asked.n,
            asked.own.get("return_speculation", False),
        )

        def to_api_error(error: MtpError) -> ApiError:
            return from_server(error, asked.names)

        emitted = runs(streams)
        try:
            if not asked.stream:
                return JSONResponse(await while_connected(request, answer.whole(emitted)))
            # The status is sent with the first run, so that a refused request has an error's.
            first = await while_connected(request, anext(emitted))
        except MtpError as error:
            raise to_api_error(error) from error
        events = answer.events(first, emitted, asked.include_usage, to_api_error)
        return EventStream(events, emitted)


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def respond(_: Request) -> Response:
        return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)

    return respond
