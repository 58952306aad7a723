"""Hostile configurations: overrides in hydra's grammar, YAML files, and trees given from Python."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from hrl.config import load_config
from hrl.config.compose import compose_kind
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import KINDS
from hrl.config.section import leaves, sections
from hrl.errors import ConfigError
from tests.fuzz.cases import PoorMessageError, Target
from tests.fuzz.values import changed, changes, json_values, plain

LEAVES = sorted(leaves(PPOTrainerConfig))
SECTIONS = sorted(sections(PPOTrainerConfig))
GOOD = "data.train_files=rows.jsonl"
VALUES = (
    "", "null", "true", "1", "-1", "0", "1.5", "1e400", "9" * 400, "9" * 5000, "nan", "inf", "-inf", "0x10", "1_000",
    "abc", "a b", "'a'", '"a"', "'", '"', "[", "]", "[1,2]", "[[1]]", "[a,", "{a:1}", "{a:{b:1}}", "{", "{1:2}",
    "{null:1}", "{a:1,a:2}", "${x}", "${trainer.seed}", "${data.train_files}", "${", "${}", "${oc.env:HOME}",
    "${oc.env:NOT_SET_AT_ALL}", "${oc.decode:'[1'}", "${oc.create:{a:1}}", "${oc.select:trainer.seed}",
    "${hydra:runtime.cwd}", "${now:%Y}", "${..x}", "${.x}", "${a.b[0]}", "${${x}}", "\\${x}", "???", "choice(1,2)",
    "range(1,3)", "interval(0,1)", "glob(*)", "shuffle(1,2)", "sort(3,1)", "tag(a,1)", "cast(1)", "int(a)",
    "float(9)", "str(1)", "bool(x)", "json_str(1)", "extend_list(1)", "extend_list([1])", "a,b", "=", "==", "a=b",
    "\\", "\\n", "\n", "\t", "\x00", "\ud800", "ünï", "²", "١", "%", "@", "~", "*",
    "!!python/object/apply:os.system ['true']", "[" * 200, "{a:" * 100, "(" * 50, "my.py:f", "/", "..", "-", "--x",
    "#", "# x",
)  # fmt: skip
KEYS = (
    "", ".", "a", "a.b", "data", "trainer", "trainer.", ".trainer", "trainer..seed", "trainer.seed.x", "recipe",
    "placement", "quickstart", "hydra", "hydra.run.dir", "hydra/launcher", "recipe@x", "defaults", "_target_",
    "data._target_", "x" * 300, "trainer.alarms", "reward.functions", "data.map", "reward_model.enable",
    "algorithm.use_kl", "ünï", "a-b", "a b", "1", "trainer.seed@x", "a/b", "$x", "trainer[0]", "data.train_files[0]",
    "data.train_files.0",
)  # fmt: skip

OPTIONS = (
    "--config-path", "--config-name", "--config-dir", "--config-dir=/", "--config-name=../x", "-cp", "--cfg=x",
    "--multirun", "-m", "--", "-", "recipe=grpo", "recipe=null", "~recipe", "recipe=[a,b]", "placement=x",
    "quickstart=x", "~quickstart", "--config-name=ppo_trainer", "-h=1", "--info", "--config-path=/proc",
)  # fmt: skip

keys = st.one_of(
    st.sampled_from(LEAVES),
    st.sampled_from(LEAVES),
    st.sampled_from(SECTIONS),
    st.sampled_from(KEYS),
    st.text(max_size=5),
)
texts = st.one_of(st.sampled_from(VALUES), st.sampled_from(VALUES), st.text(max_size=6))
overrides = st.one_of(
    st.builds(
        lambda mark, key, sign, value: f"{mark}{key}{sign}{value}",
        st.sampled_from(("", "", "", "+", "++", "~")),
        keys,
        st.sampled_from(("=", "=", "=", "", " = ", ":=")),
        texts,
    ),
    st.sampled_from(OPTIONS),
)
kinds = st.sampled_from(("ppo", "ppo", "ppo", "sft", "dpo", "rm"))

YAML = """\
defaults:
  - ppo_trainer
  - _self_
data:
  seed: ${trainer.seed}
  train_files: [rows.jsonl]
  map: {a: b, c: d}
trainer: &t
  seed: 1
  total_epochs: 2
  experiment_name: a text
algorithm:
  adv_estimator: grpo
reward:
  functions: [{name: numeric, weight: 1.0}]
"""
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
TOKENS = (
    "!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!binary |\n  xx", "!!set {a, b}",
    "!!timestamp 2020-01-01", "!x y", "&a [*a]", "*a", "*t", "<<: *t", "<<: {a: 1}", "? [a]\n: b", "- x", ": ", "\t",
    "---\n", "...\n", "%YAML 1.1\n", "%TAG ! x\n", "|", ">-", "{", "[", "'", '"', "${x}", "${trainer}",
    "${..trainer}", "${oc.env:HOME}", "${x", "???", "\x00", "\ufeff", "\ud7ff", "\x85", "9" * 5000, "1e400", ".nan",
    ".inf", "0o17", "1:30", "2020-01-01", "null: 1", "1: 2", "true: x", "[a]: b", "~", "!!int x", "!!float x",
    "data:\n", "defaults: x\n", "defaults: []\n", "defaults:\n - x\n", "defaults:\n - recipe: [a]\n", "hydra: 1\n",
    "hydra:\n  run: {dir: x}\n", "# @package x\n", "# @package _global_\n", BOMB, "[" * 2000, "a: " * 500,
    "{a: " * 500, "override /recipe: grpo", "- optional x: y", "- /recipe@a.b: grpo",
)  # fmt: skip
yaml_files = st.lists(
    st.tuples(
        st.sampled_from(("insert", "line", "value", "key")),
        st.floats(0, 1),
        st.one_of(st.sampled_from(TOKENS), st.text(max_size=4)),
    ),
    min_size=1,
    max_size=3,
)


def compose(kind: str, arguments: list[str]) -> None:
    """Compose a command line; what is refused is refused with a key, a file or an option, and what to do.

    Raises:
        ConfigError: It can't be run.
    """
    try:
        compose_kind(KINDS[kind], arguments)
    except ConfigError as error:
        if not all(problem.what.strip() for problem in error.problems):
            raise PoorMessageError(str(error)) from error
        str(error).encode("utf-8", "backslashreplace")
        raise
    except SystemExit as error:
        if error.code != 0:
            raise


def _command_line(case: tuple[str, list[str]]) -> None:
    compose(case[0], [GOOD, *case[1]])


def edited(edits: list[tuple[str, float, str]]) -> str:
    """Return the YAML file with hostile texts in places of keys, values, lines, or anywhere."""
    text = YAML
    for how, at, token in edits:
        lines = text.split("\n")
        number = min(int(at * len(lines)), len(lines) - 1)
        key, colon, _ = lines[number].partition(": ")
        if how == "line":
            lines.insert(number, token)
        elif how == "value" and colon:
            lines[number] = f"{key}: {token}"
        elif how == "key" and colon:
            indent = len(key) - len(key.lstrip())
            lines[number] = f"{' ' * indent}{token}: 1"
        else:
            place = int(at * len(text))
            text = f"{text[:place]}{token}{text[place:]}"
            continue
        text = "\n".join(lines)
    return text


def _composed_file(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.yaml").write_bytes(content)
        compose("ppo", ["--config-path", folder, "--config-name", "mine"])


def _own_file(case: list[tuple[str, float, str]]) -> None:
    _composed_file(edited(case).encode("utf-8", "surrogatepass"))


def _damaged_file(case: Any) -> None:
    _composed_file(changed(YAML.encode(), case))


def _tree(case: dict[str, Any]) -> None:
    load_config({"data": {"train_files": ["rows.jsonl"]}, **{key: plain(value) for key, value in case.items()}})


TARGETS = [
    Target(
        "command lines of a run",
        st.tuples(kinds, st.lists(overrides, min_size=1, max_size=3)),
        _command_line,
        weight=0.5,
    ),
    Target("YAML files that were edited", yaml_files, _own_file, weight=0.5),
    Target("YAML files with damaged bytes", changes, _damaged_file, weight=0.3),
    Target(
        "configurations given from Python",
        st.dictionaries(
            keys, st.one_of(json_values, st.dictionaries(keys, json_values, max_size=2)), min_size=1, max_size=3
        ),
        _tree,
        weight=0.5,
    ),
]
