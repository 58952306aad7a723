"""Hostile input of commands: launch scripts to migrate, damaged run folders, files with responses.

A command runs as on a terminal, with a standard output that takes nothing but UTF-8.
"""

from __future__ import annotations

import functools
import io
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from hrl import cli
from hrl.commands import reward
from hrl.reward.trial import records_in, response_in, responses_for
from tests.fuzz.cases import NoCaseError, PoorMessageError, Target
from tests.fuzz.values import changed, changes, json_values, plain
from tests.report.runs import finished_run


def called(*words: str, given: str = "") -> int:
    """Run a command; what it says is checked for a reason where it fails.

    Returns:
        The exit status.
    """
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    was, sys.stdin = sys.stdin, io.StringIO(given)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = cli.main(words)
    finally:
        sys.stdin = was
    said = out.buffer.getvalue() + err.buffer.getvalue()  # type: ignore[attr-defined]
    if status not in (0, 1, 2) or (status and not said.strip()):
        raise PoorMessageError(f"exit status {status} and no word")
    return status


# ---- migrate ---------------------------------------------------------------------------------------------------

SCRIPTS = {
    "verl.sh": r"""
set -x
MODEL=${MODEL:-Qwen/Qwen2-7B-Instruct}
SIZES=(1 2 3)
if [ "$1" = "big" ]; then N=8; else N=4; fi
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.train_batch_size=$((512 * 2)) data.max_response_length=${SIZES[1]} \
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.n=$N \
    trainer.logger=['console','wandb'] +x.y=1 $@
""",
    "openrlhf.sh": r"""
read -r -d '' TASK <<EOF
openrlhf.cli.train_ppo_ray --pretrain a/b --prompt_data c/d --n_samples_per_prompt 8 --init_kl_coef 1e-3 --bf16
EOF
ray job submit -- python3 -m $TASK && deepspeed --module openrlhf.cli.train_sft --pretrain a/b --dataset x@1.0
""",
    "trl.py": """
from trl import GRPOConfig, GRPOTrainer
def reward(completions, **kwargs):
    return [len(c) for c in completions]
args = GRPOConfig(output_dir="x", num_generations=8, learning_rate=1e-6, beta=0.0)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B", reward_funcs=[reward], args=args, train_dataset=load_dataset("a/b", split="train")
)
trainer.train()
""",
    "trl.sh": "trl grpo --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/tldr --num_generations 8\n",
}
PIECES = (
    "$(", "$((", "))", "`", "'", '"', "\\", "\\\n", "${", "}", "${x:-", "${x[@]}", "${#x}", "${x/y/z}", "$((1/0))",
    "$((2**99999999))", "$((9**9**9))", "$((x", "((", "<<EOF\n", "<<<x", "&&", "||", "|", ";", ";;", "if ", "then ",
    "fi\n", "for x in 1; do ", "done\n", "case x in ", "esac\n", "x=(", ")", "x+=1 ", "export x=", "\x00", "\ud7ff",
    "ünï", "\r\n", "# ", "=", "==", "--", "-", "--x", "--n_samples_per_prompt", "9" * 5000, "1e999", "nan", "[", "]",
    "{", "(" * 300, "[" * 300, "lambda: 0", "*args", "**kw", "f'{x}'", "import x\n", "\t", " ", "$x", "$1", "$@", "!",
    "x=$x$x$x$x\n",
)  # fmt: skip
edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 30), st.one_of(st.sampled_from(PIECES), st.text(max_size=3))),
    min_size=1,
    max_size=4,
)


def _migrate(case: tuple[str, list[tuple[float, int, str]]]) -> None:
    name, wanted = case
    text = SCRIPTS[name]
    for at, length, piece in wanted:
        place = int(at * len(text))
        text = text[:place] + piece + text[place + length :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        called("migrate", str(path))
        called("migrate", str(path), "--json")


# ---- the folders of runs ---------------------------------------------------------------------------------------


@functools.cache
def run_files() -> dict[str, bytes]:
    """Name → content of the files of a run that ended."""
    alarm = {"step": 2, "alarm": "zero_reward", "raised": "x", "seen": "y"}
    with tempfile.TemporaryDirectory() as folder:
        run = finished_run(Path(folder) / "run")
        (run / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
        (run / "outcome.json").write_text(json.dumps({"status": "finished", "reason": "", "total_steps": 3}))
        return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


SHOWN = (
    ("rollouts",), ("rollouts", "--sort", "score"), ("rollouts", "--val"), ("report",),
    ("rollouts", "--sort", "length"),
)  # fmt: skip


def _show(files: dict[str, bytes], words: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        command, *options = words
        called(command, folder, *options)


def _damaged_run(case: tuple[str, Any, tuple[str, ...]]) -> None:
    name, wanted, words = case
    _show(run_files() | {name: changed(run_files()[name], wanted)}, words)


def _odd_run(case: tuple[str, list[Any], tuple[str, ...]]) -> None:
    """Put records that are well-formed and make no sense into a file of a run."""
    name, given, words = case
    try:
        if name.endswith(".jsonl"):
            base = [json.loads(line) for line in run_files()[name].splitlines()]
            records = [{**base[0], **plain(item)} if isinstance(item, dict) else plain(item) for item in given]
            text = "".join(json.dumps(record) + "\n" for record in records)
        else:
            text = json.dumps({**json.loads(run_files()[name]), **plain(given[0])})
    except (ValueError, TypeError, RecursionError) as error:
        raise NoCaseError from error
    _show(run_files() | {name: text.encode()}, words)


RECORD_KEYS = (
    "step", "prompt", "question", "response", "score", "reward_parts", "ground_truth", "advantage", "response_length",
    "finish_reason", "data_source", "uid", "reward/mean", "timing_s/step", "val/a/sums/n", "val/a/sums/mean@1",
    "alarm", "threshold", "raised", "seen", "meaning", "remedy", "status", "reason", "total_steps", "versions",
)  # fmt: skip
some_record = st.dictionaries(st.sampled_from(RECORD_KEYS), json_values, min_size=1, max_size=3)


# ---- responses -------------------------------------------------------------------------------------------------

RESPONSES = {
    "some.jsonl": b'{"response": "4", "row": 0}\n"5"\n{"completion": [{"role": "assistant", "content": "6"}]}\n',
    "some.json": b'["4", {"response": "5"}, {"text": "6", "row": 2}]',
}


def _try(path: Path) -> None:
    records = list(records_in(path))
    for place, record in records:
        response_in(place, record)
    responses_for(records, 3)


def _damaged_responses(case: tuple[str, Any]) -> None:
    name, wanted = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(changed(RESPONSES[name], wanted))
        _try(path)


def _odd_responses(case: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.jsonl"
        try:
            path.write_text("".join(json.dumps(plain(item)) + "\n" for item in case))
        except (ValueError, RecursionError) as error:
            raise NoCaseError from error
        _try(path)


ENTRIES = (
    "numeric", "{name: regex, pattern: '^yes'}", "{name: numeric, weight: 2.0}", "{name: length, limit: 10}", "my.py:f",
    "{path: my.py, name: f, kwargs: {a: 1}, label: x}", "{name: json_schema, schema: {type: object}}",
)  # fmt: skip


def _entry(case: tuple[str, Any]) -> None:
    word = changed(case[0].encode(), case[1]).decode("utf-8", "replace")
    reward._config(Namespace(functions=[word], overrides=[]))


def _run_file(suffix: str) -> st.SearchStrategy[str]:
    return st.deferred(lambda: st.sampled_from([name for name in run_files() if name.endswith(suffix)]))


TARGETS = [
    Target("entries of hrl reward", st.tuples(st.sampled_from(ENTRIES), changes), _entry, weight=0.2),
    Target("launch scripts to migrate", st.tuples(st.sampled_from(sorted(SCRIPTS)), edits), _migrate, weight=0.3),
    Target(
        "files of a run with damaged bytes",
        st.tuples(_run_file(""), changes, st.sampled_from(SHOWN)),
        _damaged_run,
        weight=0.5,
    ),
    Target(
        "files of a run with records that make no sense",
        st.tuples(
            st.one_of(_run_file(".jsonl"), _run_file(".jsonl"), st.just("outcome.json"), st.just("environment.json")),
            st.lists(st.one_of(some_record, some_record, json_values), min_size=1, max_size=2),
            st.sampled_from(SHOWN),
        ),
        _odd_run,
        weight=0.5,
    ),
    Target("responses with damaged bytes", st.tuples(st.sampled_from(sorted(RESPONSES)), changes), _damaged_responses),
    Target(
        "responses that make no sense",
        st.lists(
            st.one_of(
                json_values,
                st.dictionaries(st.sampled_from(("response", "row", "completion", "text")), json_values, max_size=3),
            ),
            max_size=3,
        ),
        _odd_responses,
        weight=0.5,
    ),
]
