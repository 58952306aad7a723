import pytest

from hrl.masking import is_secret_variable


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
