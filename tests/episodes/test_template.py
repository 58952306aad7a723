"""What only a chat template may write, and texts that are tokenised from their middle on."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from hrl.data.chat import ChatTemplateError
from hrl.episodes.template import EpisodeTemplate, Form
from tests.data.conftest import make_tokenizer
from tests.episodes.families import FAMILIES, TOOL, phi_3

CASES = ["qwen3", "llama3_1", "mistral", "llama2", "phi3", "gemma2", "deepseek_r1", "gpt_oss", "smollm2"]
few = settings(max_examples=20)


def template_of(name: str) -> EpisodeTemplate:
    family = FAMILIES[name]
    return EpisodeTemplate(family.tokenizer, family.stop_ids, {}, [TOOL] if family.calls else None)


def read(template: EpisodeTemplate, message: dict[str, object]) -> list[str]:
    """The tokens of a message's content, by their names."""
    return template.tokenizer.convert_ids_to_tokens(template.encode(message["content"]).ids)


def test_an_environment_writes_no_control_token_and_a_policy_spells_out_no_special_one():
    template = template_of("qwen3")
    text = "<|im_end|></think></tool_response>"
    plain = {"role": "user", "content": text}
    named = {"<|im_end|>", "</think>", "</tool_response>"}
    assert named <= {*read(template, plain)}
    assert not named & {*read(template, template.guarded(plain))}
    assert named & {*read(template, template.guarded(plain, by_policy=True))} == named - {"<|im_end|>"}


def test_all_texts_of_a_message_are_guarded_at_any_depth_and_others_stay():
    template = template_of("qwen3")
    end = "<|im_end|>"
    message = {
        "role": "tool",
        "content": [{"type": "text", "text": end}],
        "name": end,
        "n": 3,
        "calls": {end: [end, None]},
    }
    guarded = template.guarded(message)
    assert end not in repr(guarded)
    assert template.without_marks(repr(guarded["calls"]).replace("\\ufdd0", "\ufdd0")) == repr(message["calls"])
    assert guarded["n"] == 3 and guarded["role"] == "tool"
    assert template.guarded({"role": "user", "content": "plain"}) == {"role": "user", "content": "plain"}


def test_names_that_only_appear_when_another_is_broken_are_broken_too():
    tokenizer = make_tokenizer()
    names = ["<a>", "a><b>"]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    template = EpisodeTemplate(tokenizer, [tokenizer.eos_token_id], {})
    tokens = read(template, template.guarded({"role": "user", "content": "<a><b>"}))
    assert not {*names} & {*tokens}
    assert "".join(tokens) == "<a><b>"


def test_a_special_token_of_one_letter_can_only_be_replaced():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("§", special=True, normalized=False)], special_tokens=True)
    template = EpisodeTemplate(tokenizer, [tokenizer.eos_token_id], {})
    assert template.guarded({"role": "user", "content": "a§b"})["content"] == "a\ufffdb"


@pytest.mark.parametrize("word", ["think", "\n", "m", "{{"])
def test_words_and_white_space_that_are_added_tokens_are_no_control_tokens(word):
    tokenizer = make_tokenizer("{# think #}" + make_tokenizer().chat_template)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False)])
    template = EpisodeTemplate(tokenizer, [tokenizer.eos_token_id], {})
    message = {"role": "user", "content": f"a {word} b"}
    assert template.guarded(message) == message


@pytest.mark.parametrize("name", CASES)
def test_the_rest_of_a_text_behind_a_control_token_has_the_tokens_that_it_has_in_the_whole(name):
    template = template_of(name)
    end = template.tokenizer.convert_tokens_to_ids(FAMILIES[name].stop[0])
    pieces = st.sampled_from([" ", "\n", "a", "word ", "ü", "🦊", *FAMILIES[name].special])
    texts = st.lists(pieces, max_size=8).map("".join)

    @few
    @given(before=texts, rest=texts)
    def check(before: str, rest: str) -> None:
        first = before + FAMILIES[name].stop[0]
        whole = FAMILIES[name].ids(first + rest)
        found = template.encode_behind(end, rest)
        assert found is not None
        assert FAMILIES[name].ids(first) + found.ids == whole or FAMILIES[name].ids(first)[-1] != end
        for anchor in found.anchors:
            shown = template.tokenizer.convert_ids_to_tokens(anchor.token)
            assert rest[: anchor.text_end].endswith(shown)
            assert found.ids[anchor.ids_end - 1] == anchor.token

    check()


@pytest.mark.parametrize("name", CASES)
def test_marks_leave_no_trace_in_what_is_read(name):
    template = template_of(name)
    texts = st.lists(st.sampled_from([" ", "a", "ü", *FAMILIES[name].special]), min_size=1, max_size=6)

    @few
    @given(text=texts.map("".join).map(str.strip))
    def check(text: str) -> None:
        content = template.guarded({"role": "user", "content": text})["content"]
        end = template.tokenizer.convert_tokens_to_ids(FAMILIES[name].stop[0])
        special = {*template.tokenizer.all_special_ids, *FAMILIES[name].stop_ids}
        ids, _ = template.encode_behind(end, "x" + content)
        assert not {*ids} & special
        assert template.decode(ids).strip() == "x" + text
        stop = FAMILIES[name].stop[0]
        ids, anchors = template.encode_behind(end, whole := f"x{content}{stop}y")
        for anchor in anchors:
            assert whole[: anchor.text_end].endswith(stop) and ids[anchor.ids_end - 1] == end
        assert anchors or FAMILIES[name].tokenizer_of is phi_3  # whose tokens take the white space behind them

    check()


def test_a_refusal_names_roles_and_reason_whatever_a_template_raises():
    for source in (
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.here }}",
        "{{ 1 + '' }}",
    ):
        template = EpisodeTemplate(make_tokenizer(source), [0], {})
        with pytest.raises(ChatTemplateError, match=r"refuses an episode's messages \('user, tool'\): \w+: "):
            template.render([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}])


def test_arguments_reach_a_template_in_the_form_that_is_asked_for():
    tokenizer = make_tokenizer("{{ messages[0].tool_calls[0].function.arguments is string }}")
    template = EpisodeTemplate(tokenizer, [0], {})
    for arguments in ({"a": 1}, '{"a": 1}'):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        assert template.render(messages) == "False"
        assert template.render(messages, Form(arguments_as_text=True)) == "True"


def test_the_first_prompts_messages_are_rendered_as_they_are():
    source = (
        "{% for m in messages %}{{ m.content is none }} {{ m.tool_calls[0].function.arguments is string }} {% endfor %}"
    )
    template = EpisodeTemplate(make_tokenizer(source), [0], {})
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}] * 2
    assert template.render(messages, num_given=1) == "False True True False "
    assert template.render(messages, Form(arguments_as_text=True, empty=""), num_given=1) == "False True False True "


def test_a_template_is_shared_by_copies():
    template = template_of("qwen3")
    assert copy.deepcopy({"a": template})["a"] is template
