import pytest

from hrl.data.chat_template import ChatTemplateError, check_chat_template

CHAT = [{"role": "user", "content": "hi"}]
HEAD = "{% for m in messages %}"
BODY = "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n"
TAIL = "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"


def test_a_good_template_reports_the_prompt_and_what_is_trained(tokenizer):
    report = check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])
    trained = [token for token, flag in zip(report.tokens, report.trained, strict=True) if flag]
    assert "".join(trained) == "Forty-two.<|end|>"
    assert "".join(report.tokens).startswith("<|start|>user\nhi<|end|>\n<|start|>assistant\n")


def test_a_template_that_rewrites_the_prompt_is_refused_with_the_difference(tokenizer_with):
    thinking = "{% if add_generation_prompt %}<|start|>assistant\n<think>\n{% endif %}"
    tokenizer = tokenizer_with(HEAD + BODY + TAIL + thinking)
    with pytest.raises(ChatTemplateError, match=r"not prefix-preserving.*'<'.*the answered chat"):
        check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])


def test_a_template_without_a_generation_prompt_is_refused(tokenizer_with):
    tokenizer = tokenizer_with(HEAD + BODY + TAIL)
    with pytest.raises(ChatTemplateError, match="generation prompt does not extend the chat"):
        check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])


def test_a_template_that_closes_with_another_token_than_generation_stops_at_is_refused(tokenizer_with):
    tokenizer = tokenizer_with(eos_token="<pad>")
    with pytest.raises(ChatTemplateError, match=r"closes an answer with '<\|end\|>'.*generation stops at '<pad>'"):
        check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])


def test_any_of_several_stop_ids_may_close_an_answer(tokenizer_with):
    tokenizer = tokenizer_with(eos_token="<pad>")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id, end]).trained[-1]


def test_a_template_that_changes_the_answer_is_refused(tokenizer_with):
    shouting = HEAD + "<|start|>{{ m['role'] }}\n{{ m['content'] | upper }}<|end|>\n" + TAIL + PROMPT
    tokenizer = tokenizer_with(shouting)
    with pytest.raises(ChatTemplateError, match="changes the assistant's answer"):
        check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id])


def test_a_tokenizer_without_a_template_has_nothing_to_check(tokenizer_with):
    tokenizer = tokenizer_with(None)
    assert check_chat_template(tokenizer, CHAT, [tokenizer.eos_token_id]).tokens == ("h", "i")
