import base64
import itertools
import os
import random
import subprocess
import sys
import time

import pytest

from hrl import masking
from hrl.config.run_kind import KINDS
from hrl.config.section import leaves
from hrl.masking import (
    MASK,
    is_masked,
    is_secret_variable,
    is_written_secret,
    masked,
    masked_text,
    remember,
    remember_arguments,
    remember_environment,
)
from hrl.secret_names import names_a_secret


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(masking, "_remembered", set())
    masking._pattern.cache_clear()
    yield
    masking._pattern.cache_clear()


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
def test_a_variable_is_a_secret_by_its_name_or_its_value(name, value):
    assert is_secret_variable(name, value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("KEYBOARD", "us"),
        ("COMPASS", "north"),
        ("PASSENGERS", "3"),
        ("HTTPS_PROXY", "http://proxy:3128"),
        ("JUDGE_URL", "http://judge:8000/v1"),
        ("LS_COLORS", "di=01;34:ln=01;36"),
        ("PWD", "/home/me"),
    ],
)
def test_another_variable_is_none(name, value):
    assert not is_secret_variable(name, value)


# ---------------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    "name", ["api_key", "apiKey", "X-Api-Key", "openai_api_key", "hf_token", "auth_token", "password"]
)
@pytest.mark.parametrize("prefix", ["", "db_", "_redis_"])
def test_a_value_is_masked_by_its_name(prefix, name):
    name = prefix + name
    assert masked({"a": {name: "hunter2"}}) == {"a": {name: MASK}}
    assert masked({name: ["x", {"b": 12345}]}) == {name: [MASK, {"b": MASK}]}
    assert masked({name: None}) == {name: None}
    assert masked({name: "env:NAME"}) == {name: "env:NAME"}


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_tokens", 128),
        ("pad_token", "<|pad|>"),
        ("stop_token", "</answer>"),
        ("prompt_key", "question"),
        ("reward_fn_key", "data_source"),
        ("key", "id"),
        ("token", "<think>"),
        ("monkey", "secretly"),
        ("keys", ["prompt", "answer"]),
        ("prompt_key", "prompt_with_context_version_2"),
        ("eos_token_id", 2),
        ("name", "password reset"),
        ("tokenizer_path", "org/model-4f9a8b7c6d5e4f3a2b1c0"),
        ("enable_token_level", True),
    ],
)
def test_a_value_that_is_no_secret_stays(name, value):
    assert masked({name: value}) == {name: value}


@pytest.mark.parametrize("name", ["secret", "client_secret", "aws_secret_access_key", "Authorization", "credentials"])
def test_other_names_of_secrets(name):
    assert masked({name: "x"}) == {name: MASK}


@pytest.mark.parametrize("value", ["hunter22-Hunter_22xyzQ7", "plain", "correct horse"])
@pytest.mark.parametrize("name", ["bot_token", "githubToken", "x_token_2", "db_pass", "secret_value", "token_secret"])
def test_an_argument_whose_name_tells_is_masked_and_refused_whatever_its_value(name, value):
    assert masked({"reward_kwargs": {name: value, "n": 1}}) == {"reward_kwargs": {name: MASK, "n": 1}}
    assert is_written_secret(name, value) and not is_written_secret(name, "env:ITS_NAME")
    assert masked_text(f"{name}='{value}'") == f"{name}='{MASK}'"


def test_a_key_of_something_is_a_secret_unless_it_names_a_column():
    assert masked({"openai_key": "Hunter22", "rsa_key": "x9"}) == {"openai_key": MASK, "rsa_key": MASK}
    columns = {"subject_key": "topic", "difficulty_key": "extra_info.level", "format_key": "Format-2"}
    assert masked(columns) == columns and not any(is_written_secret(*item) for item in columns.items())


def test_a_word_under_the_name_of_a_secret_is_not_taken_out_of_texts():
    assert masked({"speaker_token": "assistant", "bot_token": "hunter22x"}) == {
        "speaker_token": MASK,
        "bot_token": MASK,
    }
    assert masked_text("assistant hunter22x") == f"assistant {MASK}"


@pytest.mark.parametrize("name", ["key", "token", "keys", "token_of_mine", "prompt_key", "stop_tokens"])
def test_a_value_is_masked_under_such_a_name_if_it_looks_drawn_by_lot(name):
    assert masked({name: "4f9a8b7c6d5e4f3a2b1c0"}) == masked({name: "c2VjcmV0IHNlY3JldCBzZWNyZXQ5"}) == {name: MASK}
    draw = random.Random(0).randbytes
    for _ in range(100):  # as secrets.token_urlsafe does
        drawn = base64.urlsafe_b64encode(draw(32)).rstrip(b"=").decode()
        assert masked({name: drawn}) == {name: MASK} and is_written_secret(name, drawn), drawn


def test_no_key_of_the_schema_is_taken_for_a_secret():
    for kind in KINDS.values():
        for key in leaves(kind.schema):
            if key.endswith(".server.api_key"):  # which names a variable, and is hidden where somebody writes the key
                continue
            assert not names_a_secret(key, "Some-Text_7"), key
            assert masked({key: 128}) == {key: 128}, key
    assert masked({"trainer": {"secrets": ["Customer-7"]}}) == {"trainer": {"secrets": ["Customer-7"]}}
    remember_arguments(["trainer.secrets=[Customer-7]"])
    assert masked_text("trainer.secrets=[Customer-7]") == "trainer.secrets=[Customer-7]"


@pytest.mark.parametrize(
    "names",
    [
        "average_tokens_across_devices begin_suppress_tokens dbo_decode_token_threshold eos_token decoder_start_token "
        "end_token forced_eos_token_id hashing_key keys_to_ignore_at_inference long_prefill_token_threshold max_tokens "
        "max_num_batched_tokens min_tokens n_tokens new_key num_assistant_tokens pad_token skip_special_tokens "
        "sort_keys spec_tokens start_token stop_token_ids token_ids tokenizer tokenizer_mode tokens_only unk_token",
        "answer_key answer_tokens api_key_env bypass format_key first_pass image_key keyword label_key pass_rate "
        "per_token password_file monkey_business secretary surpass think_token passage_key reward_fn_key tests_key "
        "token_level token_penalty",
    ],
)
def test_what_engines_and_rewards_call_their_arguments_is_not_taken_for_a_secret(names):
    for name, value in itertools.product(names.split(), ("mean", "some_column", 4096, 0.5, True, None)):
        assert masked({name: value}) == {name: value} and not is_written_secret(name, value)


def test_of_an_address_only_the_login_is_masked_and_of_a_query_the_key():
    tree = {
        "files": ["https://me:pw@host/rows.jsonl", "s3://id:secret@bucket/x", "https://host/a?user=me&sig=abc%2F&x=1"],
        "store": "AccountName=me;AccountKey=abc==;Suffix=x",
    }
    assert masked(tree) == {
        "files": [f"https://{MASK}@host/rows.jsonl", f"s3://{MASK}@bucket/x", f"https://host/a?user=me&sig={MASK}&x=1"],
        "store": f"AccountName=me;AccountKey={MASK};Suffix=x",
    }


def test_a_variable_in_a_configuration_is_judged_as_variables_are():
    env = {"WANDB_API_KEY": "x", "MODE": "fast", "DB": "postgres://me:pw@db/x"}
    assert masked({"env_vars": env}) == {"env_vars": {"WANDB_API_KEY": MASK, "MODE": "fast", "DB": MASK}}
    small = {"db_pass": "x", "github_token": "y", "my_token_of_june": "z1", "mode": "fast"}
    assert masked({"env_vars": small}) == {"env_vars": dict.fromkeys(small, MASK) | {"mode": "fast"}}
    remember_arguments(["+trainer.ray_kwargs.runtime_env.env_vars.db_pass=canary-7"])
    assert masked_text("canary-7") == MASK


def test_what_the_user_names_is_masked_by_the_last_part_of_its_key_or_all_of_it():
    tree = {"a": {"customer": 4711, "b": {"x": "1", "y": [2, "3"]}}, "customers": 5, "c": {"x": "1"}}
    assert masked(tree, ["Customer", "a.b.*"]) == {
        "a": {"customer": MASK, "b": {"x": MASK, "y": [MASK, MASK]}},
        "customers": 5,
        "c": {"x": "1"},
    }


ORDINARY = [
    "/models/sk-ablation-run-number-7",
    "/data/pk-2024-experiments-set/train.parquet",
    "pk_long_context_ablation_7b",
    "rk-Qwen2-7B-Instruct-vs-SmolLM2-135M",
    "sk_learn_baseline_2024_01_31",
    "hf_checkpointsofthepolicy",
]
DRAWN = [
    "sk-proj-T3BlbkFJa1b2-c3_D4e5F6g7-H8i9J0kL_m1N2o3P4-q5R6s7",
    "sk-ant-api03-Zq8vXw2nB5mK9pL4rT7yU1oI3aS6dF0g",
    "sk-0123456789abcdef0123456789abcdef",
    "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
    "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",
]


@pytest.mark.parametrize("value", ORDINARY)
def test_a_name_that_begins_as_a_key_does_stays_wherever_it_stands(value):
    tree = {"model": {"path": value}, "note": value, "tags": [value]}
    assert masked(tree) == tree
    assert masked_text(f"{value} is not there") == f"{value} is not there"
    assert not is_secret_variable("RUN", value) and not is_written_secret("tag", value)


@pytest.mark.parametrize("value", ["pass\udcffword1234", "pass\ud800word1234"], ids=["a byte", "half a pair"])
def test_a_secret_that_is_no_utf_8_is_one_too(value):
    remember_environment({"DB_PASSWORD": value})
    remember_arguments([f"db_password={value}"])
    assert masked_text(f"{value} {value!r}") == f"{MASK} '{MASK}'"


def test_a_secret_that_is_no_utf_8_is_masked_in_an_address_as_its_bytes():
    remember("pass\udcff/word1234")
    assert masked_text("host/?x=pass%FF%2Fword1234") == f"host/?x={MASK}"


@pytest.mark.parametrize("value", DRAWN)
def test_a_key_that_was_drawn_by_lot_is_masked_wherever_it_stands(value):
    assert masked({"note": f"use {value}"}) == {"note": f"use {MASK}"}
    assert masked_text(f"{value} is refused") == f"{MASK} is refused"
    assert is_secret_variable("RUN", value) and is_written_secret("tag", value)


def test_paths_and_labels_keep_all_but_logins_and_what_the_user_names():
    remember("canary-of-mine")
    tree = {
        "trainer": {"default_local_dir": "/runs/canary-of-mine/a", "experiment_name": "sk-0123456789abcdef0123"},
        "data": {"train_files": ["/data/canary-of-mine.parquet", "s3://id:canary@bucket/x"]},
        "model": {"path": "/models/sk-0123456789abcdef0123", "tokenizer_path": "canary-of-mine"},
    }
    assert masked(tree)["data"]["train_files"] == ["/data/canary-of-mine.parquet", f"s3://{MASK}@bucket/x"]
    assert masked(tree) | {"data": 0} == tree | {"data": 0}
    assert masked({"trainer.experiment_name": "canary-of-mine"}) == {"trainer.experiment_name": "canary-of-mine"}
    named = masked(tree, ["experiment_name", "model.path"])
    assert (named["trainer"]["experiment_name"], named["model"]["path"]) == (MASK, MASK)


def test_a_word_in_a_variable_is_not_taken_out_of_paths():
    environ = {
        "CREDENTIAL_PROFILE": "production",
        "VAULT_AUTH_METHOD": "kubernetes",
        "VAULT_AUTH_HOST": "vault.internal:8200",
        "DB_PASSWORD": "production",
        "SESSION_NAME": "long-running-experiments",
    }
    remember_environment(environ)
    masked({"env_vars": {name: value for name, value in environ.items() if name != "DB_PASSWORD"}})
    text = "/runs/production/a on kubernetes, vault.internal:8200, long-running-experiments"
    assert masked_text(text) == text
    remember_environment({"DB_PASSWORD": "correct-horse-battery", "VAULT_AUTH": "4f9a8b7c6d5e4f3a2b1c0"})
    assert masked_text("correct-horse-battery 4f9a8b7c6d5e4f3a2b1c0") == f"{MASK} {MASK}"


def test_a_masked_value_is_known_as_one():
    assert is_masked(masked({"files": "https://me:pw@host/x"})["files"])
    assert not is_masked("masked")
    assert not is_masked(None)


# ---------------------------------------------------------------------- texts


def test_a_secret_of_a_configuration_is_masked_wherever_it_stands_afterwards():
    masked({"a": {"customer": 'can"ary\n-äü/1'}}, ["customer"])
    as_json, in_an_address = r'{"x": "can\"ary\n-\u00e4\u00fc/1"}', "/x?c=can%22ary%0A-%C3%A4%C3%BC%2F1"
    for written in ('can"ary\n-äü/1', as_json, in_an_address, repr('can"ary\n-äü/1')):
        assert "ary" not in masked_text(f"error: {written} was refused")
    assert masked_text("can and ary") == "can and ary"


def test_a_variable_that_an_argument_names_is_masked_in_texts_whatever_its_name(monkeypatch):
    monkeypatch.setenv("MINE", "canary-1")
    assert masked({"a": {"b": "env:MINE", "c": "env:NOT_SET"}}) == {"a": {"b": "env:MINE", "c": "env:NOT_SET"}}
    assert masked_text("the key canary-1 is refused") == f"the key {MASK} is refused"


def test_secrets_of_the_environment_and_of_a_command_line_are_masked():
    environ = {"MY_TOKEN": "canary-1", "AWS_SESSION_TOKEN": "canary-5", "DB": "postgres://me:canary-2@db/x"}
    places = {"SSH_AUTH_SOCK": "/tmp/agent/x", "SESSION": "gnome-classic"}
    remember_environment(environ | places)
    kwargs = "a.kwargs={hf_token: canary-4, key: prompt_or_so}"
    remember_arguments(["trainer.x=1", "+a.api_key=canary-3", kwargs, "data.prompt_key=question"])
    text = "canary-1 canary-5 me:canary-2 canary-3 canary-4 /tmp/agent/x gnome-classic question prompt_or_so"
    assert masked_text(text) == " ".join([*[MASK] * 5, "/tmp/agent/x gnome-classic question prompt_or_so"])


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a.api_key=abc is refused", f"a.api_key={MASK} is refused"),
        ("{'hf_token': 'abc', 'max_tokens': 5}", f"{{'hf_token': '{MASK}', 'max_tokens': 5}}"),
        ('{"password":"abc"}', f'{{"password":"{MASK}"}}'),
        ("Authorization: Bearer abc def", f"Authorization: {MASK} def"),
        ("-H 'authorization: Basic YTpi' x", f"-H 'authorization: {MASK}' x"),
        ("{'Authorization': 'Bearer abc', 'n': 5}", f"{{'Authorization': '{MASK}', 'n': 5}}"),
        ('passphrase="it\'s a, b" c', f'passphrase="{MASK}" c'),
        (r'"{\"password\": \"abc d\", \"n\": 5}"', rf'"{{\"password\": \"{MASK}\", \"n\": 5}}"'),
        ("password='' is empty", "password='' is empty"),
        (r"password='a\'b c' d", f"password='{MASK}' d"),
        ("hrl x --api-key abc --n 5", f"hrl x --api-key {MASK} --n 5"),
        ("--db-password=abc -- x", f"--db-password={MASK} -- x"),
        ("--api-key --n 5", "--api-key --n 5"),
        ("api_keys: ['a', 'b'], n: 5", f"api_keys: {MASK}], n: 5"),
        ("api_keys=[]", "api_keys=[]"),
        ("sent 'Bearer abc.def4.ghi'", f"sent 'Bearer {MASK}'"),
        ("https://h/x?X-Amz-Credential=AK%2Fa&n=1", f"https://h/x?X-Amz-Credential={MASK}&n=1"),
        ("cache_key=ab12 x_token: 12 run_key = run_key", "cache_key=ab12 x_token: 12 run_key = run_key"),
        ("env=API_KEY=abc", f"env=API_KEY={MASK}"),
        ("reason='refused: api_key=abc'", f"reason='refused: api_key={MASK}'"),
        ("write api_key: env:ITS_NAME", "write api_key: env:ITS_NAME"),
        ("pad_token=0 max_tokens=8 tokens: 3", "pad_token=0 max_tokens=8 tokens: 3"),
        ("Incorrect API key provided: sk-abcdefghijklmnop12", f"Incorrect API key provided: {MASK}"),
        ("push to https://me:pw@host/x.git failed", f"push to https://{MASK}@host/x.git failed"),
        ("redis://:p/w@host/0 and x://me:pa/s/s@host", f"redis://{MASK}@host/0 and x://{MASK}@host"),
        *[
            (address, address)
            for address in (
                "http://host:80/a@b",
                "x://h:9092,h:9093/a@b",
                "http://[::1]:80/a@b",
                "s3://b/a:c@d",
                "file:///a:b/c@d",
            )
        ],
        (f"npm_{'aB3' * 12} npm_config_cache", f"{MASK} npm_config_cache"),
        ("-----BEGIN OPENSSH KEY-----\nabc\n-----END OPENSSH KEY----- x", f"{MASK} x"),
        ("step 3: loss 0.5, 12 tokens/s", "step 3: loss 0.5, 12 tokens/s"),
    ],
)
def test_a_text_shows_no_secret_and_everything_else(text, shown):
    assert masked_text(text) == shown


TRACEBACKS = """
import sys, threading
from hrl.masking import begin_masking

def refused(key):
    raise RuntimeError(f"the judge refused {key!r} of https://me:canary-login@host")

begin_masking(["a.api_key=canary-key"])
thread = threading.Thread(target=refused, args=["canary-key"], name="asking")
thread.start()
thread.join()
refused("canary-2")
"""


def test_a_traceback_that_ends_a_process_or_a_thread_shows_no_secret():
    environment = {**os.environ, "MY_TOKEN": "canary-2"}
    done = subprocess.run(
        [sys.executable, "-c", TRACEBACKS], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1 and "canary" not in done.stderr
    refused = f"RuntimeError: the judge refused '{MASK}' of https://{MASK}@host"
    assert done.stderr.count(refused) == 2 and "Exception in thread asking:" in done.stderr
    assert 'File "<string>", line 6, in refused' in done.stderr


def test_a_short_text_is_not_replaced_in_others():
    remember("1", "fast", MASK)
    assert masked_text(f"as fast as 1 {MASK}") == f"as fast as 1 {MASK}"


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "a.",
        "a=",
        "-----BEGIN ",
        "://a",
        "://a:b",
        "eyJ",
        "sk-",
        "?key",
        ";",
        "api_key=",
        "key=",
        "x_token=",
        "--x_token ",
        "api_key='",
        "a='b",
        "'",
        "é",
        "\x00",
    ],
)
def test_a_long_text_takes_no_longer_than_its_length_asks(piece):
    begun = time.process_time()
    masked_text(piece * (200_000 // len(piece)))
    assert time.process_time() - begun < 5.0  # a tenth of a second; where something is quadratic, minutes
