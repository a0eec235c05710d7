"""One engine in one process: loads a checkpoint, then generates greedily for batches of token ids from standard input.

    python benchmarks/peer_worker.py ENGINE MODEL NUM_DRAFTS MAX_MODEL_LEN MOST_SEQUENCES THREADS INT8

peers.py starts it, for each engine with the interpreter that has it, so nothing of the project is imported but by
"ours". A line of input is {"prompts": [[id, …], …], "num_tokens": n}; the answer is {"seconds": wall time,
"token_ids": [[id, …], …]} on standard output, behind a first line {"ready": true}.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]


@dataclass(frozen=True)
class Job:
    """What the command line says; `model` is a checkpoint, for llama.cpp the server, a colon and a GGUF file.

    `int8`, 0 or 1: whether ours makes its weights so; a GGUF file has them already.
    """

    model: str
    num_drafts: int
    max_model_len: int
    most_sequences: int
    threads: int
    int8: int


def ours(job: Job) -> Generate:
    from mtp_backend import LLM, SamplingParams

    llm = LLM(
        job.model,
        {"num_speculative_tokens": job.num_drafts} if job.num_drafts else None,
        max_model_len=job.max_model_len,
        max_num_seqs=job.most_sequences,
        num_threads=job.threads,
        int8_weights=bool(job.int8),
    )

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        return [output.token_ids for output in outputs]

    return generate


def transformers(job: Job) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16).eval()
    # It finds the MTP layer's tensors by what the network itself leaves out, and knows the published depths only.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}.*"]

    @torch.inference_mode()
    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        options = {"use_mtp": True} if job.num_drafts else {}
        tokens = torch.tensor(prompts)
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            **options,
        )
        return output[:, tokens.shape[1] :].tolist()

    return generate


def vllm(job: Job) -> Generate:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    drafts = {"method": "mtp", "num_speculative_tokens": job.num_drafts} if job.num_drafts else None
    llm = LLM(
        job.model,
        dtype="bfloat16",
        speculative_config=drafts,
        max_model_len=job.max_model_len,
        max_num_seqs=job.most_sequences,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def llama(job: Job) -> Generate:
    program, _, model = job.model.partition(":")
    port = 20000 + os.getpid() % 20000
    drafts = ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(job.num_drafts)] if job.num_drafts else []
    command = [program, "-m", model, "--host", "127.0.0.1", "--port", str(port), "-t", str(job.threads), "--no-webui"]
    command += ["-np", str(job.most_sequences), "-c", str(job.most_sequences * job.max_model_len), *drafts]
    server = subprocess.Popen(command)
    atexit.register(server.terminate)
    address = f"http://127.0.0.1:{port}"
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                break
        except OSError:
            if server.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {server.returncode}") from None
            time.sleep(0.2)

    def one(prompt: list[int], num_tokens: int) -> list[int]:
        fields = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True}
        fields |= {"cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(
            f"{address}/completion", json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as response:
            return json.load(response)["tokens"]

    pool = ThreadPoolExecutor(job.most_sequences)
    return lambda prompts, num_tokens: list(pool.map(one, prompts, [num_tokens] * len(prompts)))


ENGINES = {"ours": ours, "transformers": transformers, "vllm": vllm, "llama.cpp": llama}


def main() -> None:
    """Serves until standard input ends. Whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine, model, *numbers = sys.argv[1:]
    generate = ENGINES[engine](Job(model, *map(int, numbers)))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        token_ids = generate(asked["prompts"], asked["num_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - started, "token_ids": token_ids}), file=answers)


if __name__ == "__main__":
    main()
