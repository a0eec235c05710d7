#!/usr/bin/env python3
"""Train a demo checkpoint: DeepSeek-V3 or GLM-4-MoE at 4 to 6 million parameters, with MTP.

    python benchmarks/train_demo.py --arch deepseek_v3 --output DIR

The main model and the MTP layer learn together on one CPU core for a fixed time. The export is a
Hugging Face checkpoint in bfloat16; it is read back, evaluated on text held out from training, and
the results are written to train_log.jsonl beside it.
"""

import argparse
import json
import random
import sys
import time
from itertools import count
from pathlib import Path

import demo_setup
import torch
import torch.nn.functional as F
from demo_model import DemoModel, Router
from tokenizers import Tokenizer

BATCH_SIZE, SEQUENCE = 24, 128
MTP_WEIGHT = 0.3
MUON_RATE, ADAM_RATE, BIAS_RATE = 0.02, 3e-3, 1e-3
WARMUP_STEPS, DECAY_FROM, LOWEST_RATE = 30, 0.55, 0.02
SMOOTHING = 0.97
PROGRESS_SECONDS = 5.0
EVALUATED_WINDOWS = 96
PROMPTS, PROMPT_LENGTH, ANSWER_LENGTH, MAX_DRAFTS = 24, 48, 96, 3


def build_optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers; AdamW for embedding, head, routers and vectors."""
    inner, outer, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            outer.append(parameter)
        else:
            inner.append(parameter)
    groups = [{"params": outer, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizers = [
        torch.optim.Muon(inner, lr=MUON_RATE, momentum=0.95, weight_decay=0.02),
        torch.optim.AdamW(groups, lr=ADAM_RATE, betas=(0.9, 0.95)),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def rate_factor(step: int, progress: float) -> float:
    """Learning rate as a part of its peak: warm-up, flat, linear decay to the end of the time."""
    decay = max(LOWEST_RATE, min(1.0, (1 - progress) / (1 - DECAY_FROM)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * decay


def losses(model: DemoModel, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Main and MTP loss of [batch, n + 2] tokens, each over n predictions."""
    seen = window[:, :-1]
    hidden = model(seen)
    (draft,) = model.draft(seen, hidden)
    return tuple(
        F.cross_entropy(model.lm_head(states).float().flatten(0, 1), targets.flatten())
        for states, targets in ((hidden[:, :-1], window[:, 1:-1]), (draft, window[:, 2:]))
    )


@torch.no_grad()
def balance_experts(model: DemoModel, rate: float) -> None:
    """Make busy experts less likely and idle ones more so, then count their load afresh."""
    for router in model.modules():
        if isinstance(router, Router):
            router.e_score_correction_bias += rate * torch.sign(router.load.mean() - router.load)
            router.load.zero_()


def train(model: DemoModel, batches, minutes: float, record) -> None:
    """Train until the time is up, with a progress line every few seconds."""
    optimizers = build_optimizers(model)
    clipped = [parameter for group in optimizers[1].param_groups for parameter in group["params"]]
    smooth: list[float] = []
    begin = last_line = time.monotonic()
    for step in count():
        elapsed = time.monotonic() - begin
        if elapsed >= 60 * minutes:
            break
        factor = rate_factor(step, elapsed / (60 * minutes))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            main_loss, mtp_loss = losses(model, next(batches))
        model.zero_grad()
        (main_loss + MTP_WEIGHT * mtp_loss).backward()
        torch.nn.utils.clip_grad_norm_(clipped, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * group["peak"]
            optimizer.step()
        balance_experts(model, factor * BIAS_RATE)
        current = [main_loss.item(), mtp_loss.item()]
        smooth = smooth or current
        smooth = [SMOOTHING * old + (1 - SMOOTHING) * new for old, new in zip(smooth, current)]
        now = time.monotonic()
        if now - last_line >= PROGRESS_SECONDS or now - begin >= 60 * minutes:
            last_line, tokens = now, (step + 1) * BATCH_SIZE * SEQUENCE
            speed, left = tokens / (now - begin), max(0.0, 60 * minutes - (now - begin))
            print(
                f"step {step + 1}  loss {smooth[0]:.3f}  mtp loss {smooth[1]:.3f}  "
                f"{speed:.0f} tokens/s  {int(left) // 60}:{int(left) % 60:02d} left",
                flush=True,
            )
            record(
                step=step + 1,
                tokens=tokens,
                seconds=round(now - begin, 1),
                loss=round(smooth[0], 4),
                mtp_loss=round(smooth[1], 4),
            )


def acceptance(tokens: torch.Tensor, drafts: list[torch.Tensor], drafted: int) -> dict:
    """Walk the greedy answers as a server would that drafts this many tokens per step.

    drafts[s][row, i] is the guess of token i + s + 2 made when token i + 1 is the last known one.
    """
    tried, accepted, steps = [0] * drafted, [0] * drafted, 0
    for row, sequence in enumerate(tokens.tolist()):
        position = PROMPT_LENGTH - 1
        while position + drafted + 1 < len(sequence) and position < drafts[0].shape[1]:
            hits = 0
            for place in range(drafted):
                tried[place] += 1
                if drafts[place][row, position] != sequence[position + place + 2]:
                    break
                accepted[place] += 1
                hits += 1
            steps += 1
            position += hits + 1  # the target model adds a token of its own
    return {
        "per_position": [round(hits / max(1, tries), 3) for hits, tries in zip(accepted, tried)],
        "tokens_per_step": round(1 + sum(accepted) / max(1, steps), 3),
    }


def distinct_four(answers: list[list[int]]) -> float:
    """Distinct four-token sequences as a part of all: low when an answer runs in a loop."""
    parts = []
    for answer in answers:
        sequences = list(zip(*(answer[offset:] for offset in range(4))))
        parts.append(len(set(sequences)) / len(sequences))
    return sum(parts) / len(parts)


@torch.no_grad()
def evaluate(directory: Path, held_out: list[demo_setup.Chapter], seed: int) -> dict:
    """Losses, draft agreement and greedy acceptance of an exported checkpoint on held-out text."""
    model = demo_setup.load_checkpoint(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    arch = model.config["model_type"]
    documents = [demo_setup.document_tokens(tokenizer, arch, part.text) for part in held_out]
    stream = torch.tensor([token for document in documents for token in document])
    windows = stream.unfold(0, SEQUENCE + 2, max(SEQUENCE + 2, len(stream) // EVALUATED_WINDOWS))
    main_loss, mtp_loss = losses(model, windows)
    hidden = model(windows)
    choice = model.lm_head(hidden).argmax(-1)
    guess = model.lm_head(model.draft(windows, hidden)[0]).argmax(-1)

    chooser = random.Random(seed)
    prefix = tokenizer.encode("").ids
    long_enough = [document for document in documents if len(document) > 2 * PROMPT_LENGTH]
    if not long_enough:
        raise demo_setup.CorpusError("no chapter held out is long enough for a prompt")
    prompts = []
    for document in chooser.choices(long_enough, k=PROMPTS):
        start = chooser.randrange(len(prefix), len(document) - PROMPT_LENGTH)
        prompts.append(prefix + document[start : start + PROMPT_LENGTH - len(prefix)])
    tokens = torch.tensor(prompts)
    for _ in range(ANSWER_LENGTH):
        following = model.lm_head(model(tokens)[:, -1:]).argmax(-1)
        tokens = torch.cat([tokens, following], dim=1)
    states = model.draft(tokens, model(tokens), MAX_DRAFTS)
    drafts = [model.lm_head(state).argmax(-1) for state in states]
    return {
        "held_out_loss": round(main_loss.item(), 3),
        "held_out_mtp_loss": round(mtp_loss.item(), 3),
        "agreement": round((guess == choice[:, 1:]).float().mean().item(), 3),
        "distinct_4": round(distinct_four(tokens[:, PROMPT_LENGTH:].tolist()), 3),
        "greedy": {f"k={k}": acceptance(tokens, drafts, k) for k in range(1, MAX_DRAFTS + 1)},
        "sample": tokenizer.decode(tokens[0, PROMPT_LENGTH:].tolist()),
    }


def print_table(results: dict) -> None:
    """The results of an evaluation, one line each."""
    for name in ("held_out_loss", "held_out_mtp_loss", "agreement", "distinct_4"):
        print(f"{name.replace('_', ' '):20}{results[name]:.3f}")
    for name, greedy in results["greedy"].items():
        rates = "  ".join(f"{rate:.3f}" for rate in greedy["per_position"])
        print(f"greedy, {name:12}{greedy['tokens_per_step']:.3f} tokens/step, accepted {rates}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True, choices=sorted(demo_setup.CONFIGS))
    parser.add_argument("--output", required=True, type=Path, help="checkpoint directory")
    parser.add_argument("--minutes", type=float, default=16.0, help="time to train (default: 16)")
    parser.add_argument("--corpus", type=Path, help="saved output of the `bible` command")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evaluate-only", action="store_true", help="evaluate what --output holds")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Train, export, evaluate."""
    chapters, held_out = demo_setup.load_chapters(options.corpus)
    if options.evaluate_only:
        print_table(evaluate(options.output, held_out, options.seed))
        return
    tokenizer = demo_setup.train_tokenizer(options.arch, [chapter.text for chapter in chapters])
    documents = demo_setup.training_documents(tokenizer, options.arch, chapters)
    batches = demo_setup.endless_batches(documents, BATCH_SIZE, SEQUENCE + 2, options.seed)
    model = DemoModel(demo_setup.CONFIGS[options.arch])
    options.output.mkdir(parents=True, exist_ok=True)
    with open(options.output / "train_log.jsonl", "w", encoding="utf-8", buffering=1) as log:

        def record(**values):
            log.write(json.dumps(values, ensure_ascii=False) + "\n")

        train(model, batches, options.minutes, record)
        demo_setup.save_checkpoint(model, options.output)
        demo_setup.save_tokenizer(tokenizer, options.arch, options.output)
        results = evaluate(options.output, held_out, options.seed)
        record(**results)
    print_table(results)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: problems with the text or the files end with a message."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    try:
        run(options)
    except (demo_setup.CorpusError, OSError) as error:
        sys.exit(f"train_demo: {error}")


if __name__ == "__main__":
    main()
