"""bfloat16 follows float32: the weights are the same, only rounding differs."""

import pytest
import torch
from reference.checkpoints import DEMO
from reference.paged import Paged
from tokenizers import Tokenizer

TEXTS = [
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And the Spirit of God moved upon the face of the waters.",
    "The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures: he leadeth me beside the "
    "still waters. He restoreth my soul: he leadeth me in the paths of righteousness for his name's sake.",
    "For God so loved the world, that he gave his only begotten Son, that whosoever believeth in him should not "
    "perish, but have everlasting life.",
]


@torch.inference_mode()
def all_logits(directory, sequences, dtype):
    """Logits of the target and of the MTP layer over all sequences."""
    paged = Paged(directory, dtype)
    tables = [paged.new_table(len(tokens)) for tokens in sequences]
    hidden = paged.hidden(sequences, tables, chunk=16)
    rows = paged.draft_rows([tokens[1:] for tokens in sequences], [part[:-1] for part in hidden], tables, chunk=16)
    return paged.networks.target.logits(torch.cat(hidden)), paged.networks.mtp[0].logits(torch.cat(rows))


@pytest.mark.parametrize("name", DEMO)
def test_most_likely_tokens_agree_with_float32(name):
    tokenizer = Tokenizer.from_file(str(DEMO[name] / "tokenizer.json"))
    sequences = [tokenizer.encode(text).ids for text in TEXTS]
    exact, rounded = (all_logits(DEMO[name], sequences, dtype) for dtype in (torch.float32, torch.bfloat16))
    for wide, narrow in zip(exact, rounded, strict=True):
        assert narrow.dtype == torch.bfloat16
        assert narrow.isfinite().all()
        # A token near the border of two experts may go to the other one, so single rows may differ more.
        assert (wide.argmax(-1) == narrow.argmax(-1)).float().mean() > 0.95
        assert (wide - narrow).abs().mean() < 0.05
