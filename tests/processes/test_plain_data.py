import json

import pytest

from hrl.processes.plain_data import from_plain, to_plain


@pytest.mark.parametrize("value", [[10**5000], [-(7**9000)], [{"a": 10**4299}], [True, 3], ["\ud800\0"]], ids=len)
def test_integers_of_any_size_and_broken_text_survive_json(value):
    assert from_plain(json.loads(json.dumps(to_plain(value)))) == value


def test_deep_nesting_is_refused_with_its_place():
    value = "x"
    for _ in range(5000):
        value = [value]
    with pytest.raises(ValueError, match=r"extra_info of sample 3\[0\]\[0\].* is nested more than 100 levels deep"):
        to_plain(value, "extra_info of sample 3")
    deep = "x"
    for _ in range(100):
        deep = {"a": deep}
    assert from_plain(to_plain(deep)) == deep


def test_plain_data_survives_the_way_there_and_back():
    value = {"a": (1, [2.5, None, True]), "b": {"c": ("x", ())}}
    assert from_plain(to_plain(value)) == value


def test_what_is_no_plain_data_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"ground truth\.a\[1\] is a set"):
        to_plain({"a": [1, {2}]}, "ground truth")
    with pytest.raises(ValueError, match="has the key 3"):
        to_plain({3: 1})


@pytest.mark.parametrize("name", ["__tuple__", "__int__", "__dict__"])
@pytest.mark.parametrize("inner", [[1, 2], 3, {"__int__": "0x3"}, {"__dict__": {"__tuple__": 1}}, "0xff"], ids=repr)
def test_a_dict_that_looks_like_a_tag_stays_a_dict(name, inner):
    for value in ({name: inner}, [{name: (inner,)}], {"a": {name: inner}}):
        assert from_plain(json.loads(json.dumps(to_plain(value)))) == value
