import os
from pathlib import Path

import pytest

import hrl
from hrl.processes.child_environment import child_environment, withheld_names


def test_a_child_sees_no_secret():
    secret = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_PAT", "OPENAI_APIKEY"]
    plain = {"PATH": "/bin", "HOME": "/h", "LANG": "C", "PWD": "/x", "MONKEY": "yes"}
    given = dict.fromkeys(secret, "canary") | plain | {"HTTPS_PROXY": "http://me:canary@proxy:1"}
    child = child_environment(given)
    assert "canary" not in "".join(child.values())
    assert plain.items() <= child.items()


@pytest.mark.parametrize(
    "name, value",
    [
        ("GPG_PASSPHRASE", "x"),
        ("DB_PASS", "x"),
        ("SIGNING_KEYS", "x"),
        ("SLACK_WEBHOOK_URL", "https://hooks.example/T0/B0/x"),
        ("AZURE_STORAGE_CONNECTION_STRING", "x"),
        ("JUDGE", "sk-proj-0123456789abcdef"),
        ("HUB", "hf_0123456789abcdefghij"),
        ("GIT", "ghp_0123456789abcdefghij"),
        ("CLOUD", "AKIA0123456789ABCDEF"),
        ("LOGIN", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.x"),
        ("STORE", "AccountName=me;AccountKey=abc"),
        ("FEED", "https://feed.example/x?token=abc"),
        ("PEM", "-----BEGIN OPENSSH KEY-----"),
        ("DATABASE", "postgres://me:pw@db/x"),
    ],
)
def test_a_secret_is_known_by_its_name_or_its_value(name, value):
    assert withheld_names({name: value, "PATH": "/bin"}) == {name}


@pytest.mark.parametrize(
    "name, value",
    [
        ("PATH", "/usr/bin:/bin"),
        ("KEYBOARD", "us"),
        ("COMPASS", "north"),
        ("PASSENGERS", "3"),
        ("HF_HOME", "/data/hf_cache"),
        ("HTTPS_PROXY", "http://proxy:3128"),
        ("LD_LIBRARY_PATH", "/opt/sk-learn/lib"),
        ("JUDGE_URL", "http://judge:8000/v1"),
        ("LS_COLORS", "di=01;34:ln=01;36"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
    ],
)
def test_what_is_no_secret_is_handed_on(name, value):
    assert child_environment({name: value})[name] == value


def test_a_variable_that_is_named_is_handed_on():
    given = {"JUDGE_API_KEY": "k", "OTHER_API_KEY": "k"}
    assert child_environment(given, keep=["JUDGE_API_KEY"])["JUDGE_API_KEY"] == "k"
    assert withheld_names(given, keep=["JUDGE_API_KEY"]) == {"OTHER_API_KEY"}


def test_a_child_imports_the_parents_hrl_whatever_else_is_on_its_path(tmp_path):
    (tmp_path / "hrl").mkdir()
    own = str(Path(hrl.__file__).parent.parent)
    for given, path in (
        ("", [own]),
        ("/mine", ["/mine", own]),
        (f"/mine:{tmp_path}:{own}", ["/mine", own, str(tmp_path)]),
    ):
        assert child_environment({"PYTHONPATH": given})["PYTHONPATH"].split(os.pathsep) == path
