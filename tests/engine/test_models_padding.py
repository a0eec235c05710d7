"""Nothing that is not a sequence's own and already written is ever read: all of it is NaN here."""

import math
import random

import pytest
import torch
from mtp_backend.graphs import Rows
from mtp_backend.speculation import DraftWork
from reference.checkpoints import DEMO, FEATURES, save_random
from reference.paged import Paged, propose

pytestmark = pytest.mark.slow

LENGTHS = [1, 6, 13, 37]


def poison(paged, spans):
    """NaN in every cache slot but those before each span; block 0, which pads the block tables, is in no sequence."""
    written = torch.zeros(paged.cache.layers[0][0].shape[:2], dtype=torch.bool)
    for span in spans:
        for position in range(span.start):
            written[span.block_table[position // paged.block_size], position % paged.block_size] = True
    assert not written[0].any()
    for layer in paged.cache.layers:
        for tensor in layer:
            tensor[~written] = math.nan


def outputs(directory, dtype, chunk, before_pass):
    """Logits of all rows of both networks, and of a ragged batch of draft chains."""
    paged = Paged(directory, dtype, before_pass=before_pass)
    sequences = [random.Random(length).choices(range(1024), k=length + 1) for length in LENGTHS]
    tables = [paged.new_table(length + 4) for length in LENGTHS]
    hidden = paged.hidden([tokens[:-1] for tokens in sequences], tables, chunk)
    rows = paged.draft_rows([tokens[1:] for tokens in sequences], hidden, tables, chunk)
    work = [
        DraftWork(tokens[1:], Rows(rows).all, 0, table, num_drafts=number + 1)
        for number, (tokens, rows, table) in enumerate(zip(sequences, hidden, tables, strict=True))
    ]
    chains = [logits for _, logits in propose(paged, work)]
    with torch.inference_mode():
        return [
            *map(paged.networks.target.logits, hidden),
            *map(paged.networks.mtp[0].logits, rows),
            *chains,
        ]


@pytest.fixture(scope="module", params=[*DEMO, "deepseek-sparse", "glm-sparse-freq"])
def directory(request, tmp_path_factory):
    if request.param in DEMO:
        return DEMO[request.param]
    model_type, changes = FEATURES[request.param]
    return save_random(tmp_path_factory.mktemp(request.param), model_type, vocab_size=1024, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [64, 1, 5])
def test_poison_changes_no_bit(directory, chunk, dtype):
    clean = outputs(directory, dtype, chunk, lambda paged, spans: None)
    poisoned = outputs(directory, dtype, chunk, poison)
    assert all(map(torch.equal, clean, poisoned))
    assert all(logits.isfinite().all() for logits in clean)
