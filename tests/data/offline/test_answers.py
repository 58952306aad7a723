"""Which tokens are trained on is known from positions: contexts are what a sampler sees, answers end where it stops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrl.data.chat import ChatTemplateError
from hrl.data.offline.answers import Answer, Passage, encode_passages, pad_answers, passages_of_chat, passages_of_text
from tests.data.conftest import CHATML, make_tokenizer

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "thanks"},
]


def encoded(tokenizer, passages, stop=None) -> Answer:
    stop = [tokenizer.eos_token_id] if stop is None else stop
    (answer,) = encode_passages(tokenizer, [passages], stop)
    assert answer is not None
    return answer


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode(ids)


def trained_text(tokenizer, answer) -> str:
    return text_of(tokenizer, answer.answer[answer.trained])


def test_every_message_of_the_assistant_is_trained_up_to_its_end_token(tokenizer):
    answer = encoded(tokenizer, passages_of_chat(tokenizer, CHAT, 0, {}))
    assert text_of(tokenizer, answer.prompt) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert text_of(tokenizer, answer.answer) == (
        "yo<|end|>\n<|start|>user\n1+1<|end|>\n<|start|>assistant\n2<|end|>"  # nothing after the last trained token
    )
    assert trained_text(tokenizer, answer) == "yo<|end|>2<|end|>"
    assert answer.trained[0] and answer.trained[-1]


def test_messages_before_the_first_trained_one_are_context(tokenizer):
    answer = encoded(tokenizer, passages_of_chat(tokenizer, CHAT, 3, {}))
    assert trained_text(tokenizer, answer) == "2<|end|>" == text_of(tokenizer, answer.answer)


def test_an_end_token_in_the_text_of_an_answer_does_not_end_its_training(tokenizer):
    chat = [CHAT[0], {"role": "assistant", "content": "a<|end|>b"}]
    answer = encoded(tokenizer, passages_of_chat(tokenizer, chat, 1, {}))
    assert trained_text(tokenizer, answer) == "a<|end|>b<|end|>"


TEXT = st.lists(st.sampled_from(["a", " ", "\n", "é", "12", "<|end|>", "<|im_end|>", "<|start|>", "</s>"])).map("".join)


@pytest.mark.parametrize("end", ["<|end|>", "<|im_end|>"])
@settings(max_examples=30, deadline=None)
@given(answers=st.lists(TEXT, min_size=1, max_size=3))
def test_all_of_an_answer_and_its_end_token_are_trained_whatever_it_holds(tokenizer, bundled, end, answers):
    chosen = tokenizer if end == "<|end|>" else bundled
    assert chosen.eos_token == end
    chat = [message for text in answers for message in (CHAT[0], {"role": "assistant", "content": text})]
    answer = encoded(chosen, passages_of_chat(chosen, chat, 0, {}))
    assert trained_text(chosen, answer) == "".join(text + end for text in answers)


def test_a_template_without_an_end_token_trains_the_whole_answer():
    endless = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = make_tokenizer(endless)
    chat = [*CHAT[:3], {"role": "assistant", "content": " a<|end|>b "}]
    answer = encoded(tokenizer, passages_of_chat(tokenizer, chat, 0, {}))
    assert text_of(tokenizer, answer.prompt) == "user: hi\nassistant: "
    assert trained_text(tokenizer, answer) == "yo\na<|end|>b\n"


def test_of_what_closes_an_answer_the_first_end_token_is_the_last_that_is_trained():
    twice = make_tokenizer(CHATML.replace("<|end|>", "<|end|>.<pad>"))
    stop = [twice.eos_token_id, twice.pad_token_id]
    passages = passages_of_chat(twice, CHAT[:2], 1, {})
    assert trained_text(twice, encoded(twice, passages, stop)) == "yo<|end|>"
    assert trained_text(twice, encoded(twice, passages, stop[1:])) == "yo<|end|>.<pad>"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{{ m['content'] | upper }}<|end|>", "changes the text of message 1"),
        ("{{ m['content'] }}{% if m['content'] != 'yo' %}<|end|>{% endif %}", "closes message 1 with 'yo', but other"),
    ],
)
def test_a_template_that_hides_where_an_answer_ends_is_refused(written, message):
    tokenizer = make_tokenizer(CHATML.replace("{{ m['content'] }}<|end|>", written))
    with pytest.raises(ChatTemplateError, match=message):
        passages_of_chat(tokenizer, CHAT[:2], 1, {})


def test_without_stop_tokens_the_whole_passage_is_trained(tokenizer):
    answer = encoded(tokenizer, passages_of_chat(tokenizer, CHAT[:2], 1, {}), stop=[])
    assert trained_text(tokenizer, answer) == "yo<|end|>\n"


def test_the_prompt_is_what_a_sampler_would_be_given_even_where_tokens_would_merge():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([":("])
    assert len(tokenizer("say:(no)")["input_ids"]) == len("say:(no)") - 1
    answer = encoded(tokenizer, [Passage("say:", False), Passage("(no)", True)])
    assert text_of(tokenizer, answer.prompt) == "say:"
    assert trained_text(tokenizer, answer) == "(no)"
    assert answer.prompt.tolist() == tokenizer("say:", add_special_tokens=False)["input_ids"]


def test_plain_text_ends_with_the_end_token():
    tokenizer = make_tokenizer(None)
    answer = encoded(tokenizer, passages_of_text(tokenizer, "The sky is", " blue"))
    assert text_of(tokenizer, answer.prompt) == "The sky is"
    assert trained_text(tokenizer, answer) == " blue<|end|>"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert passages_of_chat(tokenizer, chat, 1, {}) == passages_of_text(tokenizer, "a", "b")


@pytest.mark.parametrize(
    ("chat", "first", "message"),
    [
        (CHAT[:1], 0, "no message of the assistant"),
        (CHAT[:3], 2, "no message of the assistant"),
        (CHAT[1:2], 0, "answers nothing"),
    ],
)
def test_a_chat_without_anything_to_learn_is_refused(tokenizer, chat, first, message):
    with pytest.raises(ChatTemplateError, match=message):
        passages_of_chat(tokenizer, chat, first, {})


def test_a_template_that_rewrites_earlier_messages_is_refused():
    forgets = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}<|start|>{{ m['role'] }}\n{{ m['content'] }}"
        "<|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    with pytest.raises(ChatTemplateError, match="rewrites the text before message 3"):
        passages_of_chat(make_tokenizer(forgets), CHAT, 0, {})


def test_a_row_without_a_prompt_or_an_answer_is_none(tokenizer):
    assert encode_passages(tokenizer, [[Passage("", False), Passage("a", True)]], []) == [None]
    assert encode_passages(tokenizer, [[Passage("a", False), Passage("", True)]], []) == [None]


ANSWER = Answer(np.arange(4, dtype=np.int32), np.arange(10, 15, dtype=np.int32), np.array([1, 0, 0, 1, 1], dtype=bool))


def test_cutting_leaves_a_prompt_and_something_trained():
    assert len(ANSWER) == 9
    assert ANSWER.without_beginning(3).prompt.tolist() == [3]
    assert ANSWER.without_beginning(4) is None
    assert ANSWER.cut_to(8).answer.tolist() == [10, 11, 12, 13]
    assert ANSWER.cut_to(7).answer.tolist() == [10]  # what followed was context of a token that is gone
    assert ANSWER.cut_to(4) is None and ANSWER.cut_to(2) is None


def test_columns_are_as_wide_as_their_longest_row():
    short = Answer(np.array([7], np.int32), np.array([8, 9], np.int32), np.array([True, True]))
    columns = {name: column.tolist() for name, column in pad_answers([ANSWER, short], pad_id=0).items()}
    assert columns == {
        "prompts": [[0, 1, 2, 3], [0, 0, 0, 7]],
        "responses": [[10, 11, 12, 13, 14], [8, 9, 0, 0, 0]],
        "attention_mask": [[1] * 9, [0, 0, 0, 1, 1, 1, 0, 0, 0]],
        "response_mask": [[1, 0, 0, 1, 1], [1, 1, 0, 0, 0]],
    }


CALLING = (  # the answer's own text is set off from a call that follows it, as in Qwen's template
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] if m['content'] is not none }}"
    "{% if m['tool_calls'] is defined %}{{ '\n' if m['content'] }}"
    "<call>{{ m['tool_calls'][0]['name'] }}</call>{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("content", "trained"), [(None, "<call>f</call><|end|>"), ("So:", "So:\n<call>f</call><|end|>")]
)
def test_a_call_of_a_tool_is_trained_on_with_the_token_that_ends_it(content, trained):
    tokenizer = make_tokenizer(CALLING)
    call = {"role": "assistant", "content": content, "tool_calls": [{"name": "f"}]}
    chat = [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "1"}]
    answer = encoded(tokenizer, passages_of_chat(tokenizer, chat, 1, {}))
    assert text_of(tokenizer, answer.prompt) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert trained_text(tokenizer, answer) == trained
