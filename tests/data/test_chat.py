import pytest

from hrl.data.chat import (
    ChatTemplateError,
    TemplateReport,
    as_tools,
    chat_of_text,
    check_chat_template,
    inspect_chat_template,
    with_tools,
)

CHAT = [{"role": "user", "content": "hi"}]
HEAD = "{% for m in messages %}"
BODY = "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n"
TAIL = "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"


def test_a_good_template_has_no_fault_and_the_prompt_is_reported(tokenizer):
    report = check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])
    assert report == TemplateReport("<|start|>user\nhi<|end|>\n<|start|>assistant\n", has_template=True)


def test_a_template_that_rewrites_the_prompt_is_refused_with_the_difference(tokenizer_with):
    thinking = "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
    tokenizer = tokenizer_with(HEAD + BODY + TAIL + thinking)
    with pytest.raises(ChatTemplateError, match=r"not prefix-preserving.*'<'.*the answered chat"):
        check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])


def test_a_template_without_a_generation_prompt_is_refused(tokenizer_with):
    tokenizer = tokenizer_with(HEAD + BODY + TAIL)
    with pytest.raises(ChatTemplateError, match=r"generation prompt does not open the answer.*<\|start\|>assistant"):
        check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])


def test_a_template_that_closes_with_another_token_than_generation_stops_at_is_refused(tokenizer_with):
    tokenizer = tokenizer_with(eos_token="<pad>")
    with pytest.raises(ChatTemplateError, match=r"closes an answer with '<\|end\|>'.*generation stops at '<pad>'"):
        check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])


def test_any_of_several_stop_ids_may_close_an_answer(tokenizer_with):
    tokenizer = tokenizer_with(eos_token="<pad>")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert not check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id, end]).faults


def test_a_template_that_changes_the_answer_is_refused(tokenizer_with):
    shouting = HEAD + "<|start|>{{ m['role'] }}\n{{ m['content'] | upper }}<|end|>\n" + TAIL + PROMPT
    tokenizer = tokenizer_with(shouting)
    with pytest.raises(ChatTemplateError, match="changes the assistant's answer"):
        check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])


def test_a_tokenizer_without_a_template_has_nothing_to_check(tokenizer_with):
    tokenizer = tokenizer_with(None)
    assert check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id]) == TemplateReport("hi", has_template=False)


# What the templates of models do that most papers start from, in small.
REASONING = (  # R1-Distill, QwQ, Qwen3-Thinking: the prompt opens a thought, which is cut from the history
    HEAD
    + "<|start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|end|>\n"
    + TAIL
    + "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
)
INSTRUCTION = (  # Llama-2-chat, Mistral-7B-Instruct: no generation prompt at all
    HEAD
    + "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }}<|end|>{% endif %}"
    + TAIL
)
WITH_TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t['function']['name'] }} {% endfor %}{% endif %}"
    + HEAD
    + BODY
    + TAIL
    + PROMPT
)


@pytest.mark.parametrize(
    ("template", "special", "fault"),
    [
        (REASONING, {}, "not prefix-preserving"),
        (HEAD + BODY + TAIL + PROMPT, {"eos_token": "<pad>"}, "generation stops at"),  # Qwen2.5 base: <|endoftext|>
        (HEAD + "{{ raise_exception('no') if m['role'] == 'assistant' }}" + BODY + TAIL + PROMPT, {}, "no"),
    ],
)
def test_what_only_answers_that_were_not_sampled_need_is_a_warning_for_sampling(
    tokenizer_with, template, special, fault
):
    tokenizer = tokenizer_with(template, **special)
    report = inspect_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])
    (warning,) = report.warnings_for_sampling()
    assert fault in warning
    assert report.prompt == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    with pytest.raises(ChatTemplateError, match=fault):
        check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])


def test_a_template_whose_prompt_ends_without_a_header_is_right_for_both(tokenizer_with):
    tokenizer = tokenizer_with(INSTRUCTION)
    report = check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])
    assert report.prompt == "[INST] hi [/INST]"
    assert report.warnings_for_sampling() == []


def test_a_model_without_a_template_is_said_to_read_raw_text(tokenizer_with):
    report = inspect_chat_template(tokenizer_with(None), CHAT, [])
    (warning,) = report.warnings_for_sampling()
    assert "no chat template" in warning
    assert "raw text" in warning
    assert report.shown_prompt == "'hi'"


def test_a_long_prompt_is_shown_by_its_ends(tokenizer_with):
    report = inspect_chat_template(tokenizer_with(None), [{"role": "user", "content": "a" * 300 + "b" * 300}], [])
    assert report.shown_prompt == f"'{'a' * 200} … {'b' * 200}'"


def test_tools_reach_the_prompt_or_are_missed(tokenizer, tokenizer_with):
    kwargs = with_tools({}, [{"type": "function", "function": {"name": "look_up"}}])
    report = inspect_chat_template(tokenizer_with(WITH_TOOLS), CHAT, [], kwargs)
    assert report.prompt.startswith("look_up <|start|>user")
    assert report.faults == ()
    blind = inspect_chat_template(tokenizer, CHAT, [], kwargs)
    assert any("does not show them" in warning for warning in blind.warnings_for_sampling())


@pytest.mark.parametrize("inside", ["[" * 100_000, "1" * 5_000], ids=["deep", "long number"])
def test_json_text_that_python_refuses_is_text_and_no_traceback(inside):
    text = f'[{{"role": "user", "content": {inside}}}]'
    assert chat_of_text(text) == text
    assert "a string of JSON that can't be read" in as_tools(text)
