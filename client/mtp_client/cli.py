"""The command `mtp-client`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtp_client import tls
from mtp_client.client import Client
from mtp_client.errors import InvalidArgument, MtpError
from mtp_client.types import Chunk, Generation, Step

_EXIT_CODES = "exit codes: 0 done; 1 the server failed, is not ready or cannot be reached; 2 wrong arguments"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except InvalidArgument as error:
        return _fail(error, 2)
    except MtpError as error:
        return _fail(error, 1)
    except BrokenPipeError:  # the reader has all that it wants; Python flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail("interrupted", 1)


def _parser() -> argparse.ArgumentParser:
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument("--url", help="host:port, or https://…; default 127.0.0.1:8001 (grpc), 127.0.0.1:8000 (http)")
    server.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    tls.add_options(server)
    server.add_argument("--model", help="model of the server; default: the command's own")
    server.add_argument("--json", action="store_true", help="print JSON, one object a line")

    sampling = argparse.ArgumentParser(add_help=False)
    sampling.add_argument("prompt")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--temperature", type=float, help="0 is greedy (default)")
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--min-p", type=float)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--stop", action="append", help="stop string; may be given several times")
    sampling.add_argument("--priority", type=int, default=0, help="lower goes first")
    sampling.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="for a text, or for each step of a sequence; then it fails"
    )
    sampling.add_argument("--ignore-eos", action="store_true", default=None)

    parser = argparse.ArgumentParser("mtp-client", description="Client of mtp_backend.", epilog=_EXIT_CODES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", parents=[server, sampling], help="generate text")
    generate.add_argument("--stream", action="store_true", help="print the text as it is made")
    generate.set_defaults(run=_connected(_generate))
    sequence = commands.add_parser("sequence", parents=[server, sampling], help="generate step by step")
    sequence.set_defaults(run=_connected(_sequence))
    health = commands.add_parser("health", parents=[server], help="is the server ready?")
    health.set_defaults(run=_connected(_health))
    load = commands.add_parser("load", parents=[server], help="put load on the server and tell what it took")
    load.add_argument("data", type=Path, help="requests or sequences, in the form of perf_analyzer's --input-data")
    load.add_argument("--requests", type=int, default=100, help="generations or sequences to send; default 100")
    loop = load.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, default=1, help="so many at a time (closed loop); default 1")
    loop.add_argument("--rate", type=float, help="so many a second, whatever the server does (open loop)")
    load.add_argument("--distribution", choices=("poisson", "constant"), default="poisson", help="of --rate's arrivals")
    load.add_argument("--seed", type=int, default=0, help="of --rate's arrivals")
    load.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for each part of an answer (600)")
    load.add_argument("--png", type=Path, metavar="FILE", help="draw the distributions")
    load.set_defaults(run=_load)
    gateway = commands.add_parser("gateway", help="serve OpenAI's HTTP interface and a page that shows speculation")
    gateway.add_argument("--url", help="gRPC host:port of the server; default 127.0.0.1:8001")
    tls.add_options(gateway)
    gateway.add_argument("--model", default="generate", help="model of the server; default generate")
    gateway.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a key")
    gateway.add_argument("--port", type=int, default=9000, help="default 9000")
    gateway.add_argument("--api-key", help="key that requests must bring; better in the variable MTP_GATEWAY_API_KEY")
    gateway.add_argument("--tokenizer", type=Path, metavar="DIR", help="checkpoint whose chat template is used")
    gateway.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="chat template in place of the checkpoint's"
    )
    gateway.add_argument("--served-model-name", metavar="NAME", help="default: the name of --tokenizer DIR, or mtp")
    gateway.add_argument(
        "--timeout", type=float, default=600.0, help="seconds to wait for each part of an answer (600)"
    )
    gateway.set_defaults(run=_gateway)
    return parser


def _connected(command: Callable[[Client, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The command with a client of its own."""

    def run(args: argparse.Namespace) -> int:
        with Client(args.url, args.protocol, tls=tls.from_options(args)) as client:
            return command(client, args)

    return run


def _request(args: argparse.Namespace) -> dict[str, Any]:
    names = (
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "ignore_eos",
        "priority",
        "deadline",
    )
    request = {name: getattr(args, name) for name in names}
    return request | ({"model": args.model} if args.model else {})


def _generate(client: Client, args: argparse.Namespace) -> int:
    if not args.stream:
        generation = client.generate(args.prompt, **_request(args))
        print(_to_json(generation) if args.json else generation.text)
        return 0
    for chunk in client.stream(args.prompt, **_request(args)):
        print(_to_json(chunk) if args.json else chunk.text, end="\n" if args.json else "", flush=True)
    if not args.json:
        print()
    return 0


def _sequence(client: Client, args: argparse.Namespace) -> int:
    with client.sequence(args.prompt, **_request(args)) as sequence:
        for step in sequence:
            line = f"{step.step:4d}  {step.num_accepted}/{step.num_drafted}  {step.text!r}"
            print(_to_json(step) if args.json else line, flush=True)
        rate = sequence.num_accepted / max(sequence.num_drafted, 1)
        if args.json:
            print(json.dumps({"text": sequence.text, "acceptance_rate": rate}, ensure_ascii=False))
        else:
            print(sequence.text)
            print(f"accepted {sequence.num_accepted} of {sequence.num_drafted} draft tokens ({rate:.1%})")
    return 0


def _health(client: Client, args: argparse.Namespace) -> int:
    ready = client.is_ready(args.model)
    print(json.dumps({"ready": ready}) if args.json else "ready" if ready else "not ready")
    return 0 if ready else 1


def _gateway(args: argparse.Namespace) -> int:
    try:
        from mtp_client.gateway import command
    except ModuleNotFoundError as error:
        return _fail(f"the gateway needs {error.name}: pip install 'mtp-client[gateway]'", 1)
    return command.run(args)


def _load(args: argparse.Namespace) -> int:
    from mtp_client.load import command

    try:
        return command.run(args)
    except ModuleNotFoundError as error:
        return _fail(f"--png needs {error.name}: pip install 'mtp-client[plot]'", 1)


def _to_json(answer: Generation | Chunk | Step) -> str:
    return json.dumps(asdict(answer), ensure_ascii=False)


def _fail(error: object, code: int) -> int:
    print(f"mtp-client: {' '.join(str(error).split())}", file=sys.stderr)
    return code
