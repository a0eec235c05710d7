"""Requests in the words of other servers, without a server."""

import pytest
from mtp_backend.errors import InvalidArgument
from mtp_backend.serving import request_fields as fields


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ([{"temperature": 0.5}], {"temperature": 0.5}),
        ([{"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 3}], {"max_tokens": 3}),
        ([{"max_new_tokens": 1, "random_seed": 5, "min_length": 1}], {"max_tokens": 1, "seed": 5, "min_tokens": 1}),
        ([{"max_new_tokens": 1}, {"max_tokens": 2}], {"max_tokens": 2}),
        ([{"max_tokens": 1}, {"max_new_tokens": 2}], {"max_tokens": 2}),
        ([{"stop": "a"}, {"stop_words": ["b"]}], {"stop": ["b"]}),
        ([{"streaming": True}], {"stream": True}),
        # Texts stand for numbers and truth values where a field is one.
        (
            [{"temperature": "0.5", "max_tokens": "7", "ignore_eos": "True", "stream": "false"}],
            {"temperature": 0.5, "max_tokens": 7, "ignore_eos": True, "stream": False},
        ),
        ([{"stop": "5", "bad_words": "1"}], {"stop": "5", "bad_words": "1"}),
        ([{"max_tokens": "many", "ignore_eos": "yes"}], {"max_tokens": "many", "ignore_eos": "yes"}),
        ([{"seed": str(2**64 - 1)}], {"seed": 2**64 - 1}),
        ([{"seed": str(2**64)}], {"seed": str(2**64)}),
        # Filters and sampling without a temperature, and at 0.
        ([{"top_p": 0.9}], {"top_p": 0.9, "temperature": 1.0}),
        ([{"top_k": 1}], {"top_k": 1}),
        ([{"top_k": -1}], {"top_k": 0}),
        ([{"top_p": 1.0, "min_p": 0}], {"top_p": 1.0, "min_p": 0}),
        ([{"temperature": 0, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "typical_p": 0.5}], {"temperature": 0}),
        ([{"temperature": "0.0", "top_p": "0.9"}], {"temperature": 0.0}),
        ([{"do_sample": True}], {"temperature": 1.0}),
        ([{"do_sample": True, "temperature": 0.5}], {"temperature": 0.5}),
        ([{"do_sample": False, "temperature": 0.5, "top_p": 0.9}], {"temperature": 0.0}),
        # TensorRT-LLM's end token and guides.
        ([{"end_id": 2}], {"ignore_eos": True, "stop_token_ids": [2]}),
        ([{"end_id": -1}], {"ignore_eos": True}),
        ([{"stop_token_ids": [4], "end_id": 2, "pad_id": 2}], {"ignore_eos": True, "stop_token_ids": [4, 2]}),
        (
            [{"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "root ::= [a]"}],
            {"structured_output": {"ebnf": "root ::= [a]"}},
        ),
        # Log-probabilities.
        ([{"return_logprobs": True}], {"logprobs": 0}),
        ([{"return_cumulative_logprob": "true", "logprobs": 2}], {"logprobs": 2}),
        ([{"return_log_probs": True}], {"logprobs": 0, "return_log_probs": True}),
        ([{"return_log_probs": False}], {"return_log_probs": False}),
        ([{"priority": "-2", "timeout": "500000"}], {"priority": -2, "timeout": 500000}),
        # What asks for nothing.
        ([dict.fromkeys(("beam_width", "num_return_sequences", "best_of"), 1) | {"length_penalty": 1.0}], {}),
        ([dict.fromkeys(fields.ALWAYS, True) | {"return_context_logits": False, "skip_special_tokens": True}], {}),
    ],
    ids=str,
)
def test_read(layers, wanted):
    values = fields.read(layers)
    assert values == wanted
    assert all(type(values[name]) is type(value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": 1, "random_seed": 1}, "random_seed: got 1; allowed: only one of seed and random_seed"),
        ({"beam_width": 2}, "beam_width: got 2; allowed: 1"),
        ({"beam_width": True}, "beam_width: got True; allowed: 1"),
        ({"num_return_sequences": "2"}, "num_return_sequences: got 2; allowed: 1"),
        ({"return_context_logits": True}, "return_context_logits: got True; allowed: False"),
        ({"return_perf_metrics": True}, "return_perf_metrics: got True; allowed: False"),
        ({"skip_special_tokens": 0}, "skip_special_tokens: got 0; allowed: True"),
        ({"return_finish_reason": 1}, "return_finish_reason: got 1; allowed: true or false"),
        ({"return_log_probs": 1}, "return_log_probs: got 1; allowed: true or false"),
        ({"pad_id": "x"}, "pad_id: got 'x'; allowed: an integer"),
        ({"end_id": -2}, "end_id: got -2; allowed: an integer"),
        ({"end_id": 2, "stop_token_ids": 4}, "stop_token_ids: got 4; allowed: a list of token ids"),
        ({"do_sample": 1}, "do_sample: got 1; allowed: true or false"),
        ({"do_sample": True, "temperature": 0}, "do_sample: got True; allowed: false together with temperature=0"),
        ({"temperature": 0, "top_p": 5}, "top_p: got 5; allowed: a number in (0, 1]"),
        ({"guided_decoding_guide_type": "xml", "guided_decoding_guide": "a"}, "guided_decoding_guide_type: got 'xml'"),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type: got None"),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a", "structured_output": {"regex": "b"}},
            "guided_decoding_guide: got 'a'; allowed: nothing beside structured_output",
        ),
    ],
    ids=str,
)
def test_refused(given, message):
    with pytest.raises(InvalidArgument) as caught:
        fields.read([given])
    assert message in str(caught.value)
