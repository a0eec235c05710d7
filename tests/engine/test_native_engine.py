"""The engine in bfloat16 over the native operations: drafts, batches and chunks of prompts do not change a token."""

import pytest
from mtp_backend import SamplingParams

pytestmark = pytest.mark.slow
BFLOAT16 = {"dtype": "bfloat16"}


@pytest.mark.parametrize("k", range(5))
def test_greedy_text_is_the_same_with_any_drafts_and_in_any_batch(make_llm, prompt_of, model, k):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [prompt_of(length, start) for length, start in ((3, 0), (50, 7), (130, 2), (17, 30))]
    plain = make_llm(model, 0, **BFLOAT16)
    alone = [plain.generate(prompt, params)[0].token_ids for prompt in prompts]
    mixed = make_llm(model, k, max_num_batched_tokens=40, **BFLOAT16)
    assert [output.token_ids for output in mixed.generate(prompts, params)] == alone
    assert mixed.generate(prompts[1], params)[0].token_ids == alone[1]
