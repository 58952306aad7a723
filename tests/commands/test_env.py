"""What `hrl env` says."""

import json

from hrl import cli


def test_env_names_versions_and_no_folder(capsys):
    assert cli.main(["env", "--json", "--no-test"]) == 0
    text = capsys.readouterr().out
    facts = json.loads(text)
    assert {"python", "torch", "ray", "cores", "memory", "gpus"} <= set(facts)
    assert "/" not in text


def test_the_versions_here_are_compared_with_those_that_hrl_takes(capsys):
    assert cli.main(["env", "--no-test"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (torch,) = [line for line in lines if line[:1] == ["torch"] and line[-1:] in (["yes"], ["no"])]
    assert "<2.14" in torch[2] and torch[-1] == "yes"
