"""Every built-in function against every hostile text: bounded, inert, not paid, and only that sample's loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hrl.processes.child_environment import child_environment
from hrl.reward.library.catalogue import CATALOGUE
from hrl.reward.score import PROGRAMS, SCORERS
from hrl.reward.scorers.reasoning_gym import GRAMMARS, SAME_WORD
from tests.reward.hostile import CANARY, TEXTS

pytest.importorskip("reasoning_gym")

ROOT = Path(__file__).parents[2]
MOST_CPU_S = 6.0  # `limited_cpu` of one comparison, and a little
ALL_S = 200.0  # where the machine is busy; it takes seconds
#: Said again and again in the same words, the right answer is the right answer, and a sign that is none is overlooked.
ANSWERS = {
    "boxes in a row", "answers in a row", "the answer over and over", "a lone surrogate in the answer", "deep boxes",
    "deep braces", "letters of no width", "digits of other scripts", "a zero in the answer",
}  # fmt: skip
#: It takes the last number of a text, whatever it stands for.
TAKES_ANY_NUMBER = {"gsm8k_flexible"}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Function → its calls, each with what came of it; the last may lack that, if it never ended."""
    folder = tmp_path_factory.mktemp("hostile")
    with (folder.parent / "hostile.jsonl").open("w+") as file:
        command = [sys.executable, "-P", "-m", "tests.reward.hostile"]
        environment = child_environment({"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)})
        try:
            done = subprocess.run(command, cwd=folder, env=environment, stdout=file, timeout=ALL_S, check=False)
            assert done.returncode == 0
        except subprocess.TimeoutExpired:
            pass  # the function says so
        file.seek(0)
        lines = [json.loads(line) for line in file]
    if len(lines) % 2 == 0:
        lines.append({"seconds": float("inf")})
    else:
        assert lines.pop() == {"canary": []}, "nothing that a text asks for is done"
    calls: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for call, outcome in zip(lines[::2], lines[1::2], strict=False):
        calls.setdefault(call["function"], []).append((call, outcome))
    return calls


def names() -> list[str]:
    distinct = {id(scorer): source for source, scorer in reversed(SCORERS.items()) if source not in PROGRAMS}
    tasks = [f"reasoning_gym/{task}" for task in (*GRAMMARS, *SAME_WORD, "chain_sum")]
    library = [name for name, entry in CATALOGUE.items() if name not in ("judge", "remote") and not entry.needs_answer]
    return list(dict.fromkeys([*library, "regex that explodes", *distinct.values(), *tasks]))


@pytest.mark.parametrize("name", names())
def test_no_text_stops_breaks_or_pays_itself(tried: dict[str, Any], name: str) -> None:
    calls = tried[name]
    assert len(calls) % (2 * len(TEXTS)) == 0, f"it never came back from {calls[-1][0]}"
    for call, outcome in calls:
        assert outcome["seconds"] < MOST_CPU_S, call
        assert "error" not in outcome or outcome["blamed"], (call, outcome)
        compares = name in SCORERS or name.startswith("reasoning_gym/")
        paid = compares and name not in TAKES_ANY_NUMBER and call["text"] not in ANSWERS
        assert not paid or outcome.get("score", 0.0) < 0.1, (call, outcome)  # some tasks pay 0.01 for any answer


def test_no_program_among_the_texts_is_one_that_does_nothing(tmp_path: Path) -> None:
    """The canary works: as a program, the text leaves its file."""
    subprocess.run([sys.executable, "-c", TEXTS["a program"]], cwd=tmp_path, check=True)
    assert (tmp_path / CANARY).exists()
