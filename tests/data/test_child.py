import pytest

from hrl.data.child import child_environment, from_plain, to_plain


def test_a_child_sees_no_secret():
    secret = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_PAT", "OPENAI_APIKEY"]
    plain = {"PATH": "/bin", "HOME": "/h", "LANG": "C", "PWD": "/x", "MONKEY": "yes"}
    given = dict.fromkeys(secret, "canary") | plain | {"HTTPS_PROXY": "http://me:canary@proxy:1"}
    child = child_environment(given)
    assert "canary" not in "".join(child.values())
    assert plain.items() <= child.items()


def test_plain_data_survives_the_way_there_and_back():
    value = {"a": (1, [2.5, None, True]), "b": {"c": ("x", ())}}
    assert from_plain(to_plain(value)) == value


def test_what_is_no_plain_data_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"ground truth\.a\[1\] is a set"):
        to_plain({"a": [1, {2}]}, "ground truth")
    with pytest.raises(ValueError, match="has the key 3"):
        to_plain({3: 1})
