import time

import pytest

from hrl.episodes.wording import says_the_same

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "ü x"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("sampled", "rendered"),
    [
        ("", ""),
        ("Yes.", "Yes."),
        (" \n", ""),
        ("\n Yes,\tI am. ", "Yes, I am."),
        (CALL, '<tool_call>{"name":"f","arguments":{"a":1,"b":"ü x"}}</tool_call>'),
        (CALL, '<tool_call>\n{"arguments": {"b": "\\u00fc x", "a": 1}, "name": "f"}\n</tool_call>'),
        (f"{CALL}\n{CALL}", f"{CALL} {CALL}"),
        ("{ {} }", "{{}}"),
        ('f(x={"a": 1})', 'f(x={"a":1})'),
        ('[{"a": 1.50, "b": 1}]', '[{"b": 1, "a": 1.5}]'),
    ],
)
def test_white_space_and_the_layout_of_json_are_no_difference(sampled, rendered):
    assert says_the_same(sampled, rendered)
    assert says_the_same(rendered, sampled)


@pytest.mark.parametrize(
    ("sampled", "rendered"),
    [
        ("Yes.", "No."),
        ("<think>Hm.</think>Yes.", "Yes."),
        ("Yes.", ""),
        (CALL, ""),
        (CALL, CALL.replace("1", "2")),
        (CALL, CALL.replace('"a": 1', '"a": "1"')),
        (CALL, CALL.replace('"a": 1, ', "")),
        (CALL, CALL.replace("<tool_call>", "")),
        (f"{CALL}{CALL}", CALL),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": 1', '{"a": 1}'),
    ],
)
def test_anything_else_is(sampled, rendered):
    assert not says_the_same(sampled, rendered)
    assert not says_the_same(rendered, sampled)


@pytest.mark.parametrize("text", ["{" * 20_000, '{"a":' * 20_000, '{"a": ' + "1" * 20_000 + "}", '{"a": "' * 9_000])
def test_garbage_is_compared_without_an_error_and_without_a_wait(text):
    began = time.process_time()
    assert says_the_same(text, text + " ")
    assert not says_the_same(text, text + "x")
    assert time.process_time() - began < 5  # some hundredths; a pair of braces at a time it would be minutes
