import os
from pathlib import Path

import pytest

import hrl
from hrl.processes.child_environment import child_environment, withheld_names


def test_a_child_sees_no_secret():
    secret = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GITHUB_PAT", "OPENAI_APIKEY"]
    plain = {"PATH": "/bin", "HOME": "/h", "LANG": "C", "PWD": "/x", "TZ": "UTC", "no_proxy": "localhost"}
    given = dict.fromkeys(secret, "canary") | plain | {"HTTPS_PROXY": "http://me:canary@proxy:1"}
    child = child_environment(given)
    assert "canary" not in "".join(child.values())
    assert plain.items() <= child.items()


@pytest.mark.parametrize("name", ["JUDGE", "MONKEY", "CUSTOMER", "SSH_CONNECTION", "KUBERNETES_SERVICE_HOST", "PATHS"])
def test_what_no_library_needs_and_nobody_names_stays_with_the_parent(name):
    assert name not in child_environment({name: "x"})
    assert child_environment({name: "x"}, keep=[name])[name] == "x"


@pytest.mark.parametrize(
    "name, value",
    [
        ("HF_TOKEN", "x"),
        ("PYTHON_KEYRING_PASSWORD", "x"),
        ("CUDA_HUB", "hf_0123456789abcdefghij"),
        ("http_proxy", "http://me:pw@proxy:1"),
    ],
)
def test_a_secret_is_kept_back_even_under_a_name_that_libraries_need(name, value):
    assert withheld_names({name: value, "PATH": "/bin"}) == {name}


@pytest.mark.parametrize(
    "name, value",
    [
        ("PATH", "/usr/bin:/bin"),
        ("LC_ALL", "C.UTF-8"),
        ("TMPDIR", "/scratch"),
        ("PYTHONHASHSEED", "0"),
        ("HF_HOME", "/data/hf_cache"),
        ("HF_HUB_OFFLINE", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("https_proxy", "http://proxy:3128"),
        ("SSL_CERT_FILE", "/etc/ssl/own.pem"),
        ("LD_LIBRARY_PATH", "/opt/sk-learn/lib"),
        ("OMP_NUM_THREADS", "1"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
    ],
)
def test_what_libraries_need_is_handed_on(name, value):
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
