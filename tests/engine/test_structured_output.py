"""Output that follows a grammar: always valid, the same with any number of drafts, from the reasoning's end on."""

import json
import re
from pathlib import Path

import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.grammar import GrammarCompiler
from mtp_backend.sampling.structured import StructuredOutput

pytestmark = pytest.mark.slow

RUNS = 100  # for each number of drafts
SCHEMAS = {
    "object": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 3, None]}},
               "required": ["a"]},
    "array": {"type": "array", "items": {"anyOf": [{"const": "yy"}, {"type": "null"}]}, "minItems": 1, "maxItems": 3},
    "string": {"type": "string", "maxLength": 4},
    "number": {"type": "integer", "minimum": -20, "maximum": 300},
}  # fmt: skip


def valid(name, text):
    """Whether a text is JSON, as strict as it can be read, and what the schema says."""
    value = json.loads(text)
    match name:
        case "object":
            good = isinstance(value.pop("a"), bool) and value in ({}, {"b": "x"}, {"b": 3}, {"b": None})
        case "array":
            good = 1 <= len(value) <= 3 and all(item in ("yy", None) for item in value)
        case "string":
            good = isinstance(value, str) and len(value) <= 4
        case "number":
            good = isinstance(value, int) and -20 <= value <= 300
    return good


@pytest.fixture(scope="session")
def reasoning_end():
    """A frequent token of the demo model, as the tokenizer writes it."""
    return "Ġthe"


@pytest.fixture
def runs(prompt_of, reasoning_end, deepseek, make_llm):
    """(schema, prompt, parameters): every second one thinks first."""
    token = make_llm(deepseek).engine.tokenizer.token_to_id(reasoning_end)
    made = []
    for index in range(RUNS):
        name = list(SCHEMAS)[index % 4]
        thinking = index // 4 % 2 == 1
        structured = {"json_schema": SCHEMAS[name]} | ({"reasoning_end": reasoning_end} if thinking else {})
        bias = {token: 6.0} if thinking else {}  # an end after some tokens
        params = SamplingParams(
            temperature=(0.5, 1.0, 2.5)[index % 3], seed=index, logit_bias=bias, structured_output=structured
        )
        made.append((name, prompt_of(2 + index % 7, start=index), params))
    return made


_plain_outputs = {}


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_every_run_is_valid(deepseek, k, make_llm, runs, reasoning_end):
    """500 seeded runs; those with drafts have the tokens of those without."""
    llm = make_llm(deepseek, k, max_num_seqs=RUNS)
    outputs = llm.generate([prompt for _, prompt, _ in runs], [params for _, _, params in runs])
    token, lengths = llm.engine.tokenizer.token_to_id(reasoning_end), set()
    for (name, _, params), output in zip(runs, outputs, strict=True):
        assert output.finish_reason == "stop"
        tokens = output.token_ids
        if params.structured_output.reasoning_end:
            begin = tokens.index(token) + 1
            lengths.add(begin)
            assert not llm.engine.rules.eos_token_ids & set(tokens[:begin])
            tokens = tokens[begin:]
            assert valid(name, llm.engine.tokenizer.decode(tokens))
        else:
            assert valid(name, output.text)
    assert len(lengths) > 5
    wanted = _plain_outputs.setdefault("tokens", [output.token_ids for output in outputs])
    assert [output.token_ids for output in outputs] == wanted


def paced(llm, prompt, params, drafts_of):
    """Tokens of a sequence whose client gives the drafts: `drafts_of(tokens so far)`; and what each step accepted."""
    engine, steps = llm.engine, []
    sequence = engine.new_sequence(prompt, params, paced=True)
    while not sequence.finish_reason:
        given = drafts_of(sequence.token_ids[len(prompt) :]) if sequence.num_generated else []
        engine.set_drafts(sequence, given)
        given = len(sequence.draft_ids)
        engine.add(sequence)
        [output] = engine.step()
        steps.append((given, output.num_accepted))
    engine.remove(sequence)
    return sequence.token_ids[len(prompt) :], steps


@pytest.fixture
def thinking(deepseek, prompt_of, plain, reasoning_end, make_llm):
    """Prompt, parameters and tokens of a request that thinks for some tokens, with more than two runs behind."""
    token = make_llm(deepseek).engine.tokenizer.token_to_id(reasoning_end)
    structured = {"json_schema": SCHEMAS["object"], "reasoning_end": reasoning_end}
    for seed in range(50):
        params = SamplingParams(temperature=1.0, seed=seed, structured_output=structured)
        tokens = plain(deepseek, prompt_of(5), params) if seed else []
        if token in tokens and 5 <= tokens.index(token) <= 12 and len(tokens) - tokens.index(token) > 8:
            return prompt_of(5), params, tokens
    raise AssertionError("no such request")


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
def test_reasoning_ends_at_every_offset_of_an_accepted_run(deepseek, make_llm, thinking, first):
    """With the right drafts all are accepted, wherever in the run the grammar begins; `first` moves the runs."""
    prompt, params, tokens = thinking

    def drafts_of(done):
        assert done == tokens[: len(done)]
        return tokens[len(done) :][: first if len(done) == 1 else 4]

    got, steps = paced(make_llm(deepseek, 4), prompt, params, drafts_of)
    assert got == tokens
    # The end token may be a draft too: what a step draws behind it is dropped.
    assert all(given == accepted for given, accepted in steps) and (4, 4) in steps


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["against the grammar", "end token", "reasoning end"])
def test_wrong_drafts_at_every_offset(deepseek, make_llm, thinking, reasoning_end, offset, kind):
    """A draft that is not drawn ends the run and leaves nothing behind in the grammar."""
    prompt, params, tokens = thinking
    llm = make_llm(deepseek, 4)
    wrong = {
        "against the grammar": llm.engine.tokenizer.token_to_id("z"),
        "end token": min(llm.engine.rules.eos_token_ids),
        "reasoning end": llm.engine.tokenizer.token_to_id(reasoning_end),
    }[kind]

    def drafts_of(done):
        right = tokens[len(done) :]
        return [*right[:offset], wrong, *right[offset + 1 :]][:4]

    assert paced(llm, prompt, params, drafts_of)[0] == tokens


@pytest.mark.parametrize("k", [0, 3])
def test_regex_and_ebnf(deepseek, k, make_llm, prompt_of):
    forms = {
        "regex": ("[A-Z]{2}-[0-9]{1,3}", "[A-Z]{2}-[0-9]{1,3}"),
        "ebnf": ('root ::= "no" | "yes" root', "(yes)*no"),
    }
    wanted = [SamplingParams(temperature=1.0, seed=seed, structured_output={form: text}, max_tokens=60)
              for form, (text, _) in forms.items() for seed in range(8)]  # fmt: skip
    outputs = make_llm(deepseek, k).generate([prompt_of(4)] * len(wanted), wanted)
    for params, output in zip(wanted, outputs, strict=True):
        assert output.finish_reason == "stop"
        assert re.fullmatch(forms[params.structured_output.form][1], output.text)
    assert len({output.text for output in outputs}) > 8


CALLED = {
    "deepseek_v3": r"<｜tool▁calls▁begin｜>(\n?<｜tool▁call▁begin｜>function<｜tool▁sep｜>(f\n```json\n"
    r'\{"a": (true|false)(, "b": "(x|yy)")?\}|g\n```json\n\{\})\n```<｜tool▁call▁end｜>)+<｜tool▁calls▁end｜>',
    "deepseek_v3_1": r"<｜tool▁calls▁begin｜>(<｜tool▁call▁begin｜>(f<｜tool▁sep｜>"
    r'\{"a": (true|false)(, "b": "(x|yy)")?\}|g<｜tool▁sep｜>\{\})<｜tool▁call▁end｜>)+<｜tool▁calls▁end｜>',
    "glm_4_5": r"(\n?<tool_call>(f\n?<arg_key>a</arg_key>\n?<arg_value>(true|false)</arg_value>\n?"
    r"(<arg_key>b</arg_key>\n?<arg_value>(x|yy)</arg_value>\n?)?|g\n?)</tool_call>)+",
}


@pytest.mark.parametrize("template", CALLED)
def test_tool_calls(deepseek, make_llm, prompt_of, template):
    """Sampled calls are whole ones; right drafts are all accepted, and wrong ones change nothing."""
    properties = {"a": {"type": "boolean"}, "b": {"type": "string", "enum": ["x", "yy"]}}
    functions = [
        {"name": "f", "parameters": {"type": "object", "properties": properties, "required": ["a"]}},
        {"name": "g"},
    ]
    wanted = {"tool_calls": {"template": template, "functions": functions, "parallel": False}}
    params = [SamplingParams(temperature=1.5, seed=seed, structured_output=wanted) for seed in range(4)]
    prompt, llm = prompt_of(4), make_llm(deepseek, 4)
    outputs = make_llm(deepseek, 0).generate([prompt] * len(params), params)
    for output, given in zip(outputs, params, strict=True):
        assert output.finish_reason == "stop" and re.fullmatch(CALLED[template], output.text)
        right = output.token_ids
        got, steps = paced(llm, prompt, given, lambda done, right=right: right[len(done) :][:4])
        assert got == right and all(given == accepted for given, accepted in steps) and (4, 4) in steps
    wrong = llm.engine.tokenizer.token_to_id("z")
    got, _ = paced(llm, prompt, params[0], lambda done: [*outputs[0].token_ids[len(done) :][:2], wrong])
    assert got == outputs[0].token_ids
    assert len({output.text for output in outputs}) > 1


def test_characters_of_several_tokens(deepseek, make_llm, prompt_of):
    """A character of three byte tokens, no token of which is a text of its own."""
    params = SamplingParams(structured_output={"regex": "漢{2}"})
    assert make_llm(deepseek, 2).generate(prompt_of(4), params)[0].text == "漢漢"


def test_no_control_characters_in_json(deepseek, make_llm):
    """A JSON string escapes them; the library's own grammar lets them through."""
    llm = make_llm(deepseek)
    tokenizer = llm.engine.tokenizer
    params = SamplingParams(structured_output={"json_schema": {"type": "string"}})
    [grammar] = llm.engine.new_sequence([5], params).processors
    grammar.commit([tokenizer.token_to_id('"')])
    logits = torch.zeros(1, llm.engine.vocab_size)
    grammar.apply(logits, [])
    allowed = logits[0].isfinite().nonzero().flatten().tolist()
    assert len(allowed) > 500
    assert not any(character < " " for token in allowed for character in tokenizer.decode([token]))


def test_where_nothing_is_allowed_the_output_ends(deepseek, make_llm, prompt_of):
    params = SamplingParams(structured_output={"ebnf": "root ::= root"})
    output = make_llm(deepseek, 2).generate(prompt_of(4), params)[0]
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("", "stop", 1)


def test_a_draft_without_text(deepseek, make_llm, capfd):
    """A control token is no part of any output; the library, which would write a line about each, is not asked."""
    tokenizer = make_llm(deepseek).engine.tokenizer
    control, *_, end = sorted(tokenizer.get_added_tokens_decoder())
    grammar = GrammarCompiler(tokenizer, 1024, [end]).processor(StructuredOutput.from_dict({"regex": "[a-z]+"}))
    capfd.readouterr()
    logits = torch.zeros(2, 1024)
    grammar.apply(logits, [control])
    assert capfd.readouterr() == ("", "")
    assert logits[0, control] == -torch.inf and logits[0].max() == 0 and not logits[1].any()


def test_lengths_and_stops_cut(deepseek, make_llm, prompt_of):
    structured = {"regex": "[a-f]{30}"}
    llm = make_llm(deepseek, 3)
    outputs = llm.generate(
        [prompt_of(4)] * 2,
        [
            SamplingParams(structured_output=structured, max_tokens=4),
            SamplingParams(structured_output={"regex": "[a-f]{3}x[a-f]{30}"}, stop="x"),
        ],
    )
    assert outputs[0].finish_reason == "length" and re.fullmatch("[a-f]+", outputs[0].text)
    assert outputs[1].finish_reason == "stop" and re.fullmatch("[a-f]{3}", outputs[1].text)


def test_appended_tokens_begin_the_grammar_again(deepseek, make_llm, prompt_of):
    engine = make_llm(deepseek, 2).engine
    params = SamplingParams(structured_output={"regex": "[a-c]{4}"}, temperature=1.0, seed=1)
    sequence = engine.new_sequence(prompt_of(4), params, paced=True)
    for _ in range(3):
        while not sequence.finish_reason:
            engine.add(sequence)
            engine.step()
        assert re.fullmatch("[a-c]{4}", sequence.text.value)
        engine.append(sequence, prompt_of(2))
    engine.remove(sequence)


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"regex": "("}, r"structured_output.regex: got '\('; allowed: a valid one \(Regex parsing error"),
        ({"ebnf": 'start ::= "a"'}, r"structured_output.ebnf: got .*The root rule with name"),
        ({"json_schema": {"enum": []}}, r"structured_output.json_schema: got .*must not be empty"),
        ({"json_schema": {"$ref": "#/$defs/x"}}, r"structured_output.json_schema: got .*Cannot find"),
        ({"regex": "a", "reasoning_end": "the end"}, "structured_output.reasoning_end: got 'the end'; .*one token"),
    ],
)
def test_wrong_grammars(deepseek, make_llm, structured, message):
    llm = make_llm(deepseek, 2)
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        llm.generate("a", SamplingParams(structured_output=structured))
    assert llm.generate("a", SamplingParams(structured_output={"regex": "b"}))[0].text == "b"


def test_checkpoint_without_tokenizer(deepseek, make_llm, tmp_path, prompt_of):
    for path in Path(deepseek).iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(InvalidArgument, match="^structured_output: got .*no tokenizer.json"):
        make_llm(str(tmp_path)).generate(prompt_of(3), SamplingParams(structured_output={"regex": "a"}))
