"""What clients ask for: checks requests, makes sequences of them and changes these."""

from __future__ import annotations

from mtp_backend.engine.commit import commit, room_for_drafts
from mtp_backend.engine.loading import Loaded
from mtp_backend.engine.processing import Processing
from mtp_backend.engine.sequence import Sequence
from mtp_backend.engine.text import IncrementalText
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling import SamplingParams
from mtp_backend.sampling.structured import StructuredOutput


class Requests:
    """The requests to one model. Nothing is computed for them here."""

    def __init__(self, model: Loaded) -> None:
        self._rules = model.rules
        self._vocab_size = model.vocab_size
        self._tokenizer = model.tokenizer
        self._verifier = model.verifier
        self._num_drafts = model.config.num_drafts
        self._processing = Processing(
            model.tokenizer, model.vocab_size, model.rules.eos_token_ids, model.context.device
        )

    def new_sequence(
        self, prompt_ids: list[int], params: SamplingParams, *, paced: bool = False, with_text: bool = True
    ) -> Sequence:
        """Checks a request and makes its sequence, which still has to be added.

        Args:
            paced: a client asks for every step.
            with_text: decode the output to text; stop strings need it and turn it on.

        Raises:
            InvalidArgument: empty or too long prompt, a token id outside the vocabulary, parameters that this model
                or this kind of request cannot honour.
        """
        self._check_tokens("input_ids", prompt_ids)
        if not 1 <= len(prompt_ids) < self._rules.max_model_len:
            raise InvalidArgument(
                "input_ids",
                f"{len(prompt_ids)} tokens",
                f"1 … {self._rules.max_model_len - 1} tokens (max_model_len − 1)",
            )
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        self._check_tokens("allowed_token_ids", params.allowed_token_ids or ())
        self._check_tokens("logit_bias", tuple(params.logit_bias))
        if params.n > 1:
            raise InvalidArgument("n", params.n, "1 (the offline API alone makes several samples of a prompt)")
        for name in ("logprobs", "prompt_logprobs") if paced else ():
            if getattr(params, name) is not None:
                raise InvalidArgument(name, getattr(params, name), "nothing for a sequence that its client paces")
        text = None
        if with_text or params.stop:
            if self._tokenizer is None:
                raise InvalidArgument("stop", params.stop, "nothing: the checkpoint has no tokenizer.json")
            text = IncrementalText(self._tokenizer, prompt_ids, params.stop)
        if params.structured_output is not None and not self._verifier.looks_at_tokens:
            raise InvalidArgument("structured_output", "a grammar", "nothing with lossy_synthetic acceptance")
        processors = self._processing.processors(params, prompt_ids)
        thinking = self._verifier.thinks_after(prompt_ids)
        return Sequence(list(prompt_ids), len(prompt_ids), params, paced, text, processors, thinking=thinking)

    def compile_grammar(self, wanted: StructuredOutput) -> None:
        """Compiles a grammar, so that the next request with it need not wait; may be called from another thread.

        Raises:
            InvalidArgument: the grammar is wrong, or the checkpoint has no tokenizer for it.
        """
        self._processing.grammars.processor(wanted)

    def _check_tokens(self, field: str, token_ids: list[int] | tuple[int, ...]) -> None:
        """Refuses token ids outside the vocabulary."""
        for token in token_ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidArgument(field, token, f"token ids 0 … {self._vocab_size - 1}")

    def restore(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Gives a new sequence the output that an engine had made of the same request: it goes on as that one did.

        Raises:
            InvalidArgument: a token id outside the vocabulary, tokens that the request cannot have given, or no room
                for another one.
        """
        self._check_tokens("generated_ids", token_ids)
        try:
            taken = commit(sequence, token_ids, self._rules)
        except RuntimeError as error:
            raise InvalidArgument("generated_ids", token_ids, f"tokens that this request gives ({error})") from None
        if sequence.finish_reason:
            ended = f"tokens of a text that goes on; it ends with token {len(taken)}"
            raise InvalidArgument("generated_ids", f"{len(token_ids)} tokens", ended)
        sequence.thinking = self._verifier.thinks_after(taken, sequence.thinking)
        if sequence.text is not None:
            sequence.text.take(final=False)

    def append(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Appends a client's tokens to the text of a paced sequence, which goes on even if it had ended.

        All of the text so far is then prompt: lengths, penalties, stop strings and a grammar begin again.

        Raises:
            InvalidArgument: token id outside the vocabulary, or no room for another token.
        """
        self._check_tokens("input_ids", token_ids)
        room = self._rules.max_model_len - 1 - len(sequence.token_ids)
        if len(token_ids) > room:
            raise InvalidArgument(
                "input_ids", f"{len(token_ids)} tokens", f"at most {max(room, 0)} more (max_model_len)"
            )
        sequence.token_ids += token_ids
        self.begin_output(sequence)

    def begin_output(self, sequence: Sequence) -> None:
        """Makes all of the text so far the prompt."""
        if sequence.text is not None:
            sequence.text = IncrementalText(self._tokenizer, sequence.token_ids, sequence.params.stop)
        sequence.processors = self._processing.processors(sequence.params, sequence.token_ids)
        sequence.draft_ids, sequence.draft_probs = [], []
        sequence.thinking = self._verifier.thinks_after(sequence.token_ids)
        sequence.finish_reason = ""
        sequence.num_generated = 0

    def set_drafts(self, sequence: Sequence, draft_ids: list[int]) -> None:
        """Replaces the drafts that the next step of a sequence verifies; what cannot be committed is left out.

        Raises:
            InvalidArgument: more drafts than the engine verifies, or a token id outside the vocabulary.
        """
        self._check_tokens("draft_ids", draft_ids)
        if len(draft_ids) > self._num_drafts:
            raise InvalidArgument("draft_ids", f"{len(draft_ids)} tokens", f"0 … {self._num_drafts} tokens")
        sequence.draft_ids, sequence.draft_probs = draft_ids[: room_for_drafts(sequence, self._rules)], []
