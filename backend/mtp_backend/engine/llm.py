"""The offline API."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from mtp_backend.config import EngineConfig, SpeculativeConfig
from mtp_backend.engine.engine import Engine
from mtp_backend.engine.sequence import Sequence
from mtp_backend.engine.tokenizer import encode
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling import SamplingParams
from mtp_backend.sampling.logprobs import Logprob
from mtp_backend.sampling.noise import sample_seed

Prompt = str | list[int]


@dataclass(frozen=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        prompt_token_ids, token_ids: the prompt and what was generated, an end token included.
        text: the generated text, without end tokens, special tokens and stop strings.
        finish_reason: "stop" or "length".
        index: number of the sample among the n of its prompt.
        logprobs: for each generated token its own log-probability and those of the most likely ones, by token id;
            None unless asked for.
        cumulative_logprob: sum over the generated tokens; None unless `logprobs` is asked for.
        prompt_logprobs: the same for the prompt, whose first token has none; None unless asked for.
        num_cached_tokens: tokens of the prompt that had been computed for other texts.
        num_spec_steps: verify steps with at least one draft.
        num_draft_tokens, num_accepted_draft_tokens: drafts verified, and those that became part of the output.
        num_lossy_draft_tokens: those of them that the target would not have drawn; above 0 with lossy rules only.
        mean_acceptance_length: 1 + num_accepted_draft_tokens / num_spec_steps; 1 without such steps.
        draft_acceptance_rate: accepted drafts per draft; 0 without drafts.
        acceptance_rate_per_position: the same for the first draft of a step, the second, …
        acceptance_histogram: number of accepted drafts → steps that accepted exactly so many.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    index: int
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_lossy_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_rate_per_position: list[float]
    acceptance_histogram: dict[int, int]


class LLM:
    """Generates from a checkpoint in this process.

    Args:
        model: checkpoint directory.
        speculative: {"method": "mtp", "num_speculative_tokens": k}, or None to decode without speculation.
        dtype, device, **options: see `EngineConfig`.
    """

    def __init__(
        self,
        model: str,
        speculative: dict[str, Any] | SpeculativeConfig | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        **options: Any,
    ) -> None:
        values = {"model": str(model), "speculative": speculative, "dtype": dtype, "device": device, **options}
        config = EngineConfig.from_dict(values)
        if config.otlp_endpoint:
            raise InvalidArgument("otlp_endpoint", config.otlp_endpoint, "nothing: a server alone makes spans")
        self.engine = Engine(config)

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generates for all prompts in one continuous batch.

        Args:
            prompts: a text or a list of token ids, or several of them.
            params: one for all prompts or one for each; None takes the defaults.
            progress: show a bar of the finished texts where standard error is a terminal.

        Raises:
            InvalidArgument: a prompt or its parameters are wrong; nothing has been generated then.

        Returns:
            The results in the order of the prompts, n of them for a prompt whose parameters ask for n samples.
        """
        prompts = _several(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, SequenceOf) or not all(isinstance(own, SamplingParams) for own in params):
            raise InvalidArgument("params", params, "SamplingParams, or a list of them")
        if len(params) != len(prompts):
            raise InvalidArgument("params", f"{len(params)} of them", f"one, or one for each of {len(prompts)} prompts")
        with_text = self.engine.tokenizer is not None
        samples = [
            (self._token_ids(prompt), own, index)
            for prompt, sampling in zip(prompts, params, strict=True)
            for index, own in enumerate(_samples(sampling))
        ]
        sequences = [self.engine.new_sequence(ids, own, with_text=with_text) for ids, own, _ in samples]
        for sequence in sequences:
            self.engine.add(sequence)
        try:
            # None: only on a terminal.
            with tqdm(total=len(sequences), desc="generating", unit="text", disable=None if progress else True) as bar:
                while self.engine.has_work:
                    bar.update(sum(bool(output.sequence.finish_reason) for output in self.engine.step()))
        finally:
            for sequence in sequences:
                if not sequence.finish_reason:
                    self.engine.remove(sequence)
        return [_result(sequence, index) for sequence, (_, _, index) in zip(sequences, samples, strict=True)]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        return encode(self.engine.tokenizer, "prompts", prompt) if isinstance(prompt, str) else prompt


def _several(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list of checked prompts."""
    if not isinstance(prompts, SequenceOf):
        raise InvalidArgument("prompts", prompts, "a text, a list of token ids, or a list of these")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    for prompt in prompts:
        good = isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt))
        if not good:
            raise InvalidArgument("prompts", prompt, "a text or a list of token ids")
    return list(prompts)


def _samples(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of n samples."""
    if params.n == 1:
        return [params]
    return [replace(params, n=1, seed=sample_seed(params.noise_seed, index)) for index in range(params.n)]


def _result(sequence: Sequence, index: int) -> RequestOutput:
    params = sequence.params
    return RequestOutput(
        prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
        token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
        text=sequence.text.value if sequence.text is not None else "",
        finish_reason=sequence.finish_reason,
        index=index,
        logprobs=None if params.logprobs is None else sequence.logprobs,
        cumulative_logprob=None if params.logprobs is None else sequence.cumulative_logprob,
        prompt_logprobs=None if params.prompt_logprobs is None else [None, *sequence.prompt_logprobs],
        num_cached_tokens=sequence.num_cached_tokens,
        **sequence.counters.figures(),
    )
