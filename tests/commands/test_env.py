"""What `hrl env` says."""

import json

from hrl import cli


def test_env_names_versions_and_no_folder(capsys, monkeypatch):
    assert cli.main(["env", "--json"]) == 0
    text = capsys.readouterr().out
    facts = json.loads(text)
    assert {"python", "torch", "ray", "cores", "memory", "gpus"} <= set(facts)
    assert "/" not in text
