"""The command `mtp`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mtp_backend.environment import start_again
from mtp_backend.errors import InvalidArgument, MtpError
from mtp_backend.serving import serve, tritonserver
from mtp_backend.serving.repository import create_repository

# The project's own templates, beside the package in a checkout.
TEMPLATES = Path(__file__).resolve().parents[3] / "model_repository" / "templates"
SHARED_TEXTS = {
    "equal": "equal to the target's, written",
    "different": "different from the target's, written",
    "absent": "not in the checkpoint; the target's serves",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 0, 1 for an error, 2 for wrong arguments; `serve` has more."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except InvalidArgument as error:
        print(f"mtp: {error}", file=sys.stderr)
        return 2
    except (MtpError, OSError) as error:  # a full disk, no right to write, …
        print(f"mtp: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mtp", description="DeepSeek and GLM with MTP behind the Triton server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    repository = commands.add_parser("repository", help="model repositories").add_subparsers(required=True)
    create = repository.add_parser("create", help="make a model repository from templates and values")
    create.add_argument("output", type=Path, help="folder to make")
    create.add_argument("--templates", type=Path, default=TEMPLATES, help="folder of the templates (the project's own)")
    create.add_argument("--values", type=Path, required=True, help="TOML file with a value for each name")
    create.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="replace one value")
    create.set_defaults(run=_create)

    serve.add_arguments(commands.add_parser("serve", help="run the Triton server on a model repository"))

    inspect = commands.add_parser("inspect", help="show what is in a checkpoint and what it takes to serve it")
    inspect.add_argument("checkpoint", type=Path)
    inspect.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="weights and cache in memory (bfloat16)"
    )
    inspect.add_argument("--int8-weights", action="store_true", help="with weights rounded to int8")
    inspect.add_argument("--memory", type=float, default=16, metavar="GIB", help="memory for weights and cache (16)")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    acceptance = commands.add_parser("acceptance", help="measure acceptance and cost of drafts on prompts of your own")
    acceptance.add_argument("checkpoint", type=Path)
    acceptance.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="text, one prompt a line")
    acceptance.add_argument(
        "--num-speculative-tokens",
        type=int,
        nargs="+",
        default=[1],
        metavar="K",
        help="drafts a step, one run for each (1)",
    )
    acceptance.add_argument("--max-tokens", type=int, default=64, help="most tokens generated for a prompt (64)")
    acceptance.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (0)")
    acceptance.add_argument("--num-threads", type=int, help="threads of the tensor library (torch's own choice)")
    acceptance.add_argument("--output", type=Path, metavar="DIR", help="folder for acceptance.json and acceptance.png")
    acceptance.set_defaults(run=_acceptance)

    bench = commands.add_parser("bench", help="measure speed here, its limit, and how many drafts pay")
    bench.add_argument("checkpoint", type=Path)
    bench.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 4, 16],
        metavar="N",
        help="sequences that decode together (1 4 16)",
    )
    bench.add_argument(
        "--num-speculative-tokens",
        type=int,
        nargs="+",
        default=[0, 1, 2, 3],
        metavar="K",
        help="drafts a step (0 1 2 3)",
    )
    bench.add_argument("--prompts", type=Path, metavar="FILE", help="text, one prompt a line (random tokens)")
    bench.add_argument("--prompt-tokens", type=int, default=128, help="length of a random prompt (128)")
    bench.add_argument("--max-tokens", type=int, default=64, help="tokens generated for a prompt (64)")
    bench.add_argument("--rounds", type=int, default=3, help="runs of each combination, all of them in each round (3)")
    bench.add_argument("--num-threads", type=int, help="threads of the tensor library (torch's own choice)")
    bench.add_argument("--int8-weights", action="store_true", help="with weights rounded to int8")
    bench.add_argument("--output", type=Path, metavar="DIR", help="folder for bench.json and bench.png")
    bench.set_defaults(run=_bench)

    export = commands.add_parser("export-mtp", help="write a checkpoint's MTP layers into a directory of their own")
    export.add_argument("--input-dir", type=Path, required=True, help="published checkpoint")
    export.add_argument("--output-dir", type=Path, required=True, help="folder to make")
    export.add_argument("--model-type", help="family of the checkpoint (found out from its config.json)")
    export.set_defaults(run=_export)

    npu = commands.add_parser("npu", help="Ascend NPUs").add_subparsers(required=True)
    doctor = npu.add_parser("doctor", help="show what this host has of what an NPU needs; exit code 1 if it lacks any")
    doctor.add_argument("--graphs", type=Path, metavar="DIR", help="folder of graph dumps whose open sizes to list")
    doctor.set_defaults(run=_doctor)

    install = commands.add_parser("install-server", help="lay out the backend directory and the server's launcher")
    install.add_argument("directory", type=Path, nargs="?", default=tritonserver.directory())
    install.set_defaults(run=_install)
    return parser


def _create(arguments: argparse.Namespace) -> int:
    overrides = {}
    for item in arguments.set:
        name, separator, value = item.partition("=")
        if not separator:
            raise InvalidArgument("--set", item, "NAME=VALUE")
        overrides[name] = value
    create_repository(arguments.templates, arguments.values, overrides, arguments.output)
    print(arguments.output)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    # Needs the tensor library, which the other commands do without.
    from mtp_backend.serving.inspect import show

    show(arguments.checkpoint, arguments.dtype, arguments.memory, arguments.int8_weights, arguments.json)
    return 0


def _acceptance(arguments: argparse.Namespace) -> int:
    from mtp_backend.serving.acceptance import show

    show(
        arguments.checkpoint,
        arguments.prompts,
        arguments.num_speculative_tokens,
        arguments.max_tokens,
        arguments.temperature,
        arguments.num_threads,
        arguments.output,
    )
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    start_again()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would tell when it starts and stops
    from mtp_backend.serving.bench import show

    show(
        arguments.checkpoint,
        arguments.concurrency,
        arguments.num_speculative_tokens,
        arguments.prompts,
        arguments.prompt_tokens,
        arguments.max_tokens,
        arguments.rounds,
        arguments.num_threads,
        arguments.int8_weights,
        arguments.output,
    )
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from mtp_backend.checkpoint.export import export_mtp

    try:
        export = export_mtp(arguments.input_dir, arguments.output_dir, arguments.model_type)
    except KeyboardInterrupt:
        print("mtp: interrupted; nothing was written", file=sys.stderr)
        return 130
    print(
        f"{export.directory}: {export.model_type}, {export.num_modules} MTP layer(s), {export.num_tensors} tensors",
        end="",
    )
    print(f", {export.num_dequantized} of them dequantised from FP8")
    for name, relation in export.shared.items():
        print(f"{name}: {SHARED_TEXTS[relation]}")
    for name, size in export.files.items():
        print(f"{size:>16,} bytes  {name}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from mtp_backend.serving.npu_doctor import show

    return show(arguments.graphs)


def _install(arguments: argparse.Namespace) -> int:
    print(tritonserver.install(arguments.directory))
    return 0
