"""Committing the tokens of a verify step, one by one, and finding where the text ends."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_backend.engine.sequence import Sequence


@dataclass(frozen=True)
class EndRules:
    """When any request of a model ends.

    Attributes:
        eos_token_ids: the model's end-of-sequence tokens.
        max_model_len: longest text in tokens, prompt and output together.
    """

    eos_token_ids: frozenset[int]
    max_model_len: int


def commit(sequence: Sequence, token_ids: list[int], rules: EndRules) -> list[int]:
    """Appends tokens until one of them ends the text.

    The order of the checks is end token, stop string, length, so that a stop that falls on the last allowed token
    is reported as a stop. Tokens behind the end are not committed.

    Returns:
        The committed tokens, at least one; an end token is one of them.
    """
    committed = []
    for token in token_ids:
        sequence.token_ids.append(token)
        sequence.num_generated += 1
        committed.append(token)
        sequence.finish_reason = _finish_reason(sequence, token, rules)
        if sequence.finish_reason:
            break
    for processor in sequence.processors:
        processor.commit(committed)
    return committed


def room_for_drafts(sequence: Sequence, rules: EndRules) -> int:
    """Drafts that can still be committed: a verify step also draws one token of its own."""
    room = rules.max_model_len - len(sequence.token_ids)
    if sequence.params.max_tokens is not None:
        room = min(room, sequence.params.max_tokens - sequence.num_generated)
    return max(0, room - 1)


def _finish_reason(sequence: Sequence, token: int, rules: EndRules) -> str:
    params = sequence.params
    if token in params.stop_token_ids or (token in rules.eos_token_ids and not params.ignore_eos):
        return "stop"
    may_stop = sequence.num_generated > params.min_tokens
    if sequence.text is not None and sequence.text.append(token, may_stop=may_stop):
        return "stop"
    if params.max_tokens is not None and sequence.num_generated >= params.max_tokens:
        return "length"
    if len(sequence.token_ids) >= rules.max_model_len:
        return "length"
    return ""
