"""Output text, token by token: characters split over tokens, stop strings, and what may be shown when."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_backend.engine.text import MOST_WAITING, IncrementalText
from tokenizers import Tokenizer, decoders, models

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
TOKENIZERS = {
    name: Tokenizer.from_file(str(CHECKPOINTS / name / "tokenizer.json")) for name in ("deepseek-demo", "glm-demo")
}
TOKENIZER = TOKENIZERS["deepseek-demo"]
END = TOKENIZER.token_to_id("<｜end▁of▁sentence｜>")
SPOKEN = st.text(st.sampled_from("abc  the and LORD\n,é漢字語🙂👩‍👧🏽\u0301ߘ𐍈"), max_size=30)


PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
ALPHABET = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + index) for index, byte in enumerate(OTHERS)}


def byte_token(byte):
    """Token of one byte, in the byte alphabet of byte-level BPE."""
    return TOKENIZER.token_to_id(ALPHABET[byte])


def byte_tokens(text):
    return [byte_token(byte) for byte in text.encode()]


def merged(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def stream(tokens, stop=(), prompt=(), tokenizer=TOKENIZER):
    """Feeds tokens until a stop string is complete: the text, what each take gave, and the number of tokens fed."""
    text, takes = IncrementalText(tokenizer, list(prompt), tuple(stop)), []
    for count, token in enumerate(tokens, 1):
        if text.append(token):
            takes.append(text.take(final=True))
            return text.value, takes, count
        takes.append(text.take(final=False))
    takes.append(text.take(final=True))
    return text.value, takes, len(tokens)


def reference(tokens, stop):
    """The text up to the earliest stop string, and the number of tokens until it is complete: decodes everything."""
    for count in range(1, len(tokens) + 1):
        whole = TOKENIZER.decode(tokens[:count])
        starts = [whole.find(string) for string in stop if string in whole]
        if starts:
            return whole[: min(starts)], count
    return TOKENIZER.decode(tokens), len(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "text", ["漢字", "🙂", "a🙂b", "👩‍👧🏽", "naïve — ☃", "", " ", "\n\n", "e\u0301", "the LORD 語 said 🙂"]
)
def test_split_characters(name, text):
    for tokens in (merged(text), byte_tokens(text)):
        value, takes, _ = stream(tokens, tokenizer=TOKENIZERS[name])
        assert value == "".join(takes) == text
        assert not any("\ufffd" in take for take in takes)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.tuples(SPOKEN, st.booleans()), max_size=6), prompt=SPOKEN)
def test_whole_text(pieces, prompt):
    tokens = [token for text, whole in pieces for token in (merged(text) if whole else byte_tokens(text))]
    value, takes, _ = stream(tokens, prompt=merged(prompt))
    assert value == "".join(takes) == "".join(text for text, _ in pieces)
    assert not any("\ufffd" in take for take in takes)


def test_a_character_is_shown_with_its_last_byte():
    assert stream(byte_tokens("a🙂b"))[1] == ["a", "", "", "", "🙂", "b", ""]


def test_an_incomplete_character_at_the_end_is_left_out():
    assert stream(byte_tokens("a🙂")[:-1])[0] == "a"


def test_wrong_bytes_have_no_text():
    tokens = [*byte_tokens("a"), byte_tokens("漢")[1], *byte_tokens("bc")]
    assert stream(tokens)[0] == "abc"


# A tokenizer with a token for each byte, as sentencepiece makes them: its decoder gives up on a whole run of such
# tokens when one of them is wrong or missing.
WORDS = ["▁the", "▁", "a", "b", "▁LORD", "s", ","]


def fallback_tokenizer():
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {word: len(vocabulary) + index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(pieces)
    return tokenizer


FALLBACK = fallback_tokenizer()
WORD = st.sampled_from(WORDS).map(lambda word: ([FALLBACK.token_to_id(word)], word.replace("▁", " ")))


def fallback_bytes(text):
    return [byte + 1 for byte in text.encode()]


RUN = SPOKEN.map(lambda text: (fallback_bytes(text), text))


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(WORD | RUN, max_size=8), prompt=st.lists(WORD | RUN, min_size=1, max_size=4))
def test_byte_fallback(pieces, prompt):
    """The text is whole, whatever the length of its runs of byte tokens and of those before it."""
    prompt_ids = [token for ids, _ in prompt for token in ids]
    tokens = [token for ids, _ in pieces for token in ids]
    value, takes, _ = stream(tokens, prompt=[FALLBACK.token_to_id("a"), *prompt_ids], tokenizer=FALLBACK)
    assert value == "".join(takes) == "".join(text for _, text in pieces)
    assert not any("\ufffd" in take for take in takes)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(RUN | WORD | st.integers(0x80, 0xFF).map(lambda byte: ([byte + 1], "")), max_size=8))
def test_wrong_bytes_hide_no_word(pieces):
    """Whatever bytes come, no take holds U+FFFD, the takes are the text, and words of other tokens are all there."""
    tokens = [token for ids, _ in pieces for token in ids]
    for made, tokenizer in (
        (tokens, FALLBACK),
        ([byte_token(token - 1) for token in tokens if token <= 256], TOKENIZER),
    ):
        value, takes, _ = stream(made, tokenizer=tokenizer)
        assert value == "".join(takes) and "\ufffd" not in value
        if tokenizer is FALLBACK and tokens:
            words = [token for token in tokens if token > 256]
            assert sum(value.count(letter) for letter in "LORD") >= 4 * words.count(FALLBACK.token_to_id("▁LORD"))


@pytest.mark.parametrize("make", [fallback_bytes, lambda text: byte_tokens(text)], ids=["fallback", "byte-level"])
@pytest.mark.parametrize("cut", range(1, 4))
def test_a_character_that_the_prompt_begins(make, cut):
    """It belongs to the output, where it becomes whole."""
    tokenizer = FALLBACK if make is fallback_bytes else TOKENIZER
    whole = make("漢字漢字漢🙂字b")
    at = len(make("漢字漢字漢")) + cut
    value, takes, _ = stream(whole[at:], prompt=whole[:at], tokenizer=tokenizer)
    assert value == "".join(takes) == "🙂字b"


def test_special_tokens_are_skipped():
    tokens = [*merged("the LORD"), END, *merged(" said"), END]
    assert stream(tokens)[0] == "the LORD said"
    assert stream([END, *byte_tokens("🙂")[:2], END, *byte_tokens("🙂")[2:]])[0] == "🙂"
    assert stream(merged("said"), prompt=[END])[0] == "said"


@pytest.mark.parametrize(
    ("text", "stop", "value", "count"),
    [
        ("abcd", ["c"], "ab", 3),
        ("abcd", ["bc"], "a", 3),
        ("abcd", ["abcd"], "", 4),
        ("abcd", ["a"], "", 1),
        ("abcd", ["x"], "abcd", 4),
        ("abcd", ["bcd", "c"], "ab", 3),  # the first that is complete
        ("abcd", ["cd", "bcd"], "a", 4),  # complete with the same token: the one that begins first
        ("aab", ["ab"], "a", 3),
        ("ababac", ["abac"], "ab", 6),
        ("a🙂b", ["🙂"], "a", 5),
        ("a🙂b", ["🙂b"], "a", 6),
        ("漢字", ["字"], "漢", 6),
        ("ab", ["b", "b"], "a", 2),
    ],
)
def test_stop_strings(text, stop, value, count):
    found, takes, fed = stream(byte_tokens(text), stop)
    assert (found, fed) == (value, count)
    assert "".join(takes) == value


def test_a_stop_string_inside_one_token():
    tokens = merged(" the")
    assert len(tokens) == 1
    assert stream(tokens, ["h"])[:2] == (" t", [" t"])
    assert stream(tokens, ["he", "h", "t"])[0] == " "
    assert stream(tokens, [" the"])[0] == ""


def test_the_prompt_holds_no_stop_string():
    assert stream(byte_tokens("bc"), ["ab"], prompt=byte_tokens("a"))[0] == "bc"


@settings(max_examples=300, deadline=None)
@given(data=st.data(), stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_stop_strings_at_random(data, stop):
    """Value and end as decoding everything after each token says; takes never show what may become a stop string."""
    pieces = data.draw(
        st.lists(st.sampled_from(["a", "b", "c", "ab", "ca", "ac", "ba", "bac", "漢", " the", "and"]), max_size=20)
    )
    tokens = [token for piece in pieces for token in data.draw(st.sampled_from([merged, byte_tokens]))(piece)]
    value, takes, count = stream(tokens, stop)
    assert (value, count) == reference(tokens, stop)
    assert "".join(takes) == value
    for fed in range(1, count):
        complete = TOKENIZER.decode(tokens[:fed]).rstrip("\ufffd")
        shown = "".join(takes[:fed])
        held = max((n for s in stop for n in range(len(s)) if complete.endswith(s[:n])), default=0)
        assert shown == complete[: len(complete) - held]


def test_held_back_text_is_shown_when_it_is_no_stop_string():
    assert stream(byte_tokens("abx"), ["abc"])[1] == ["", "", "abx", ""]
    assert stream(byte_tokens("ab"), ["abc"])[1] == ["", "", "ab"]
    assert stream(byte_tokens("aab"), ["abc"])[1] == ["", "a", "", "ab"]


def test_takes_at_any_moment():
    text, shown = IncrementalText(TOKENIZER, [], ("stop",)), ""
    for index, token in enumerate(byte_tokens("no st stopped")):
        if text.append(token):
            break
        if index % 3 == 2:
            shown += text.take(final=False)
            shown += text.take(final=False)
    assert shown + text.take(final=True) == "no st "
    assert text.take(final=True) == ""


class Counting:
    """A tokenizer that keeps how many tokens it has decoded each time."""

    def __init__(self):
        self.decoded = []

    def decode(self, ids, skip_special_tokens):
        self.decoded.append(len(ids))
        return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)


def test_long_text_is_decoded_in_a_window():
    tokens, counting = merged("And the LORD said unto Moses 漢字, " * 50), Counting()
    assert stream(tokens, tokenizer=counting)[0] == "And the LORD said unto Moses 漢字, " * 50
    assert max(counting.decoded) < 30


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.tuples(SPOKEN, st.booleans()), max_size=20), data=st.data())
def test_a_text_is_the_same_whenever_it_is_read(pieces, data):
    tokens = [token for text, whole in pieces for token in (merged(text) if whole else byte_tokens(text))]
    often, seldom, shown = IncrementalText(TOKENIZER, [], ()), IncrementalText(TOKENIZER, [], ()), ""
    for token in tokens:
        for text in (often, seldom):
            assert not text.append(token)
        shown += often.take(final=False)
        if data.draw(st.integers(0, 9)) == 0:
            assert seldom.value == shown
    assert seldom.take(final=True) == often.value
    assert seldom.offsets == often.offsets


def test_tokens_wait_until_the_text_is_read():
    """Not for ever: others wait while they are decoded."""
    counting = Counting()
    text = IncrementalText(counting, [], ())
    before = len(counting.decoded)
    for token in byte_tokens("a" * (MOST_WAITING - 1)):
        text.append(token)
    assert len(counting.decoded) == before
    text.append(byte_token(ord("a")))
    assert len(counting.decoded) >= before + MOST_WAITING
    stopping = IncrementalText(TOKENIZER, [], ("ab",))
    assert [stopping.append(token) for token in byte_tokens("aab")] == [False, False, True]


def test_offsets():
    """Each token's text starts where the text before it ends; the bytes of one character start together."""
    text = IncrementalText(TOKENIZER, [], ())
    pieces = ["a", " the", "🙂", "b"]
    for piece in pieces:
        for token in merged(piece):
            text.append(token)
    counts = [len(merged(piece)) for piece in pieces]
    assert counts[2] > 1
    assert text.offsets == [0] * counts[0] + [1] * counts[1] + [5] * counts[2] + [6] * counts[3]
    assert text.value == "a the🙂b"
