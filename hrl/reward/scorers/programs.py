"""Answers that are programs: each is run with the row's tests, in a sandbox.

What is right stays outside of the process that runs the program. What a program prints is compared here; what its
functions return is compared in a process of the tests' own (`hrl.reward.scorers.calls`).
"""

from __future__ import annotations

import functools
import json
import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from hrl.errors import RefusedError
from hrl.processes.sandbox import ProgramResult, Sandbox, SandboxBusyError, SandboxError, sandbox_limit
from hrl.reward.scorers import calls
from hrl.reward.scorers.base import RowError, Scorer, TruthError
from hrl.reward.scorers.final_answer import after_thinking

_PYTHON = ("python", "python3", "py")
_CLOCK = 3.0
"""Times its seconds of the processor that a program may take by the clock: others run beside it."""
_LEAST_S = 0.2
"""A program that has less time left is not begun."""
_CLOSE = 1e-6
"""How far a decimal number may be from the expected one, as a share of it or as such."""
_LONGEST_NUMBER = 40
_LONGEST_REASON = 300
_WAYS = (
    "as JSON or as such, one of: inputs and outputs, two lists as long as each other, with fn_name for calls of a "
    "function; a list of objects with input and output; assert_case, a list of asserts; test, code with entry_point; a "
    "list of asserts, or code with asserts"
)


class ProgramsRefusedError(RefusedError, ValueError):
    """Answers are programs, and they can't be run safely on this system."""


@dataclass(frozen=True)
class Tests:
    """The tests of a row; one of the three.

    Attributes:
        pairs: What the program reads, and what it has to print.
        calls: A function's name, its arguments, and what it has to return.
        code: Python with asserts.
    """

    pairs: Sequence[tuple[str, str]] = ()
    calls: Sequence[tuple[str, list[Any], Any]] = ()
    code: Sequence[str] = ()

    def first(self, most: int | None) -> Tests:
        """Return so many of them; of a single piece of code all."""
        return Tests(self.pairs[:most], self.calls[:most], self.code if len(self.code) == 1 else self.code[:most])


@dataclass(frozen=True)
class Trial:
    """How programs are tried.

    Attributes:
        sandbox: Where they run; its seconds are those of one run.
        partial: Whether the score is the share of tests that a program passes; else it has to pass all.
        most: Tests of a row that are run, the first ones; None for all.
        deadline_s: Seconds by the clock for all runs of a program.
    """

    sandbox: Sandbox = field(default_factory=lambda: Sandbox(memory_mib=1024))
    partial: bool = False
    most: int | None = None
    deadline_s: float = 27.0

    def score(self, response: str, tests: Tests) -> dict[str, Any]:
        """Run the program of a response with the tests of its row.

        Raises:
            RowError: The tests themselves fail, or no program can be run here.
        """
        program = program_of(response)
        if program is None:
            return dict(NO_PROGRAM)
        try:
            found = self._found(program, tests.first(self.most))
        except (SandboxError, SandboxBusyError, OSError) as error:  # nothing that the response has done
            raise RowError(f"the response's program can't be tried: {error}") from error
        passed = found.passed / found.tests
        has_passed = found.passed == found.tests
        return {
            "score": passed if self.partial else float(has_passed),
            "acc": has_passed,
            "passed": passed,
            "has_program": 1.0,
            "timeouts": float(found.timed_out),
            "errors": float(found.failed),
            "why": found.why[:_LONGEST_REASON] or "all tests passed",
        }

    def _found(self, program: str, tests: Tests) -> _Found:
        ends_s = time.monotonic() + self.deadline_s
        return self._printed(program, tests.pairs, ends_s) if tests.pairs else self._called(program, tests, ends_s)

    def _within(self, ends_s: float) -> Sandbox | None:
        """Return the sandbox with the time that is left; None if there is too little."""
        left_s = ends_s - time.monotonic()
        clock_s = min(left_s, _CLOCK * self.sandbox.time_s)
        return None if left_s < _LEAST_S else replace(self.sandbox, clock_s=clock_s, wait_s=left_s)

    def _printed(self, program: str, pairs: Sequence[tuple[str, str]], ends_s: float) -> _Found:
        """Run the program once for each pair; one that takes too long is not run again."""
        found = _Found(len(pairs))
        text = _in_sandbox("play", program)
        for number, (given, expected) in enumerate(pairs, 1):
            if (sandbox := self._within(ends_s)) is None:
                found.too_long(f"test {number} of {len(pairs)}: the time for all tests, {self.deadline_s:g} s, is over")
                return found
            result = sandbox.run_on(text, given)
            if result.end == "done" and same_output(result.output, expected):
                found.passed += 1
                continue
            why = f"test {number} of {len(pairs)}: {_why_not(result, expected)}"
            if result.end == "time":
                found.too_long(why)
                return found
            found.fails(why, is_error=result.end != "done")
            if not self.partial:
                return found
        return found

    def _called(self, program: str, tests: Tests, ends_s: float) -> _Found:
        """Run the program once, and the tests beside it."""
        given = {"calls": list(tests.calls)} if tests.calls else {"code": list(tests.code)}
        sandbox = self._within(ends_s)
        assert sandbox is not None  # nothing has been run before
        told, end = sandbox.run_together(_in_sandbox("ask", given), _in_sandbox("answer", program))
        lines = [json.loads(line) for line in told.output.splitlines(keepends=True) if line.endswith("\n")]
        for said in lines:
            if "row" in said:
                raise RowError(said["row"])
        if not lines or "tests" not in lines[0]:
            raise RowError(f"the tests did not begin: their process ended ({told.end})")
        found = _Found(lines[0]["tests"])
        for said in lines[1:]:
            if said.get("passed"):
                found.passed += 1
            elif "passed" in said:
                found.fails(said["why"], is_error=bool(said.get("error")))
        if told.end == "time" or end == "time":
            found.too_long(f"the program took longer than {self.sandbox.time_s:g} s")
        elif told.end != "done" or any("gone" in said for said in lines):
            found.fails(f"the program ended before its tests ({end or told.end})", is_error=True)
        return found


@dataclass
class _Found:
    """What came of a program's tests.

    Attributes:
        tests, passed: How many there are, and how many it passed.
        failed: Whether one ended with an exception, a status or at a limit other than of time.
        timed_out: Whether one took too long; those behind it were not run, and count as not passed.
        why: Why the first did not pass.
    """

    tests: int
    passed: int = 0
    failed: bool = False
    timed_out: bool = False
    why: str = ""

    def fails(self, why: str, *, is_error: bool) -> None:
        """Note a test that did not pass."""
        self.failed = self.failed or is_error
        self.why = self.why or why

    def too_long(self, why: str) -> None:
        """Note that no more tests are run."""
        self.timed_out = True
        self.why = self.why or why


NO_PROGRAM: Mapping[str, Any] = {
    "score": 0.0,
    "acc": False,
    "passed": 0.0,
    "has_program": 0.0,
    "timeouts": 0.0,
    "errors": 0.0,
    "why": "no program: the last fenced block of Python counts, and it has to be closed",
}
"""The reward of a response without a program."""


def program_of(response: str) -> str | None:
    """Return the last fenced block that says it is Python, else the last that says nothing; None without one.

    An empty block is no program, and neither is one that is not closed.
    """
    found: dict[bool, str] = {}
    language: str | None = None
    lines: list[str] = []
    for line in after_thinking(response).split("\n"):
        mark = line.strip()
        if not mark.startswith("```"):
            lines.append(line)
        elif mark == "```" and language is not None:
            program = textwrap.dedent("\n".join(lines))
            if language in ("", *_PYTHON) and program.strip():
                found[language in _PYTHON] = program
            language = None
        elif "`" not in (said := mark.removeprefix("```")):
            language, lines = said.strip().lower(), []
    return found.get(True, found.get(False))


@functools.cache
def _harness() -> str:
    return Path(calls.__file__).read_text(encoding="utf-8")


def _in_sandbox(do: str, given: object) -> str:
    """Return a program that does something of `hrl.reward.scorers.calls`; plain data is written as Python reads it."""
    return f"{_harness()}\n\n{do}({given!r})\n"


def same_output(printed: str, expected: str) -> bool:
    """Return whether a program printed what is expected.

    Space at the ends of lines and empty lines at the end don't count, nor how many spaces stand between two words. A
    number with a decimal point may be off by a millionth.
    """
    lines, others = (text.rstrip().split("\n") for text in (printed, expected))
    return len(lines) == len(others) and all(
        _same_words(line.split(), other.split()) for line, other in zip(lines, others, strict=True)
    )


def _same_words(words: Sequence[str], expected: Sequence[str]) -> bool:
    if len(words) != len(expected):
        return False
    return all(word == other or _close(word, other) for word, other in zip(words, expected, strict=True))


def _close(word: str, expected: str) -> bool:
    """Return whether two words are numbers that are about the same; the expected one has to be a decimal."""
    if "." not in expected or max(len(word), len(expected)) > _LONGEST_NUMBER or not word.isascii():
        return False
    try:
        number, other = float(word), float(expected)
    except ValueError:
        return False
    return math.isclose(number, other, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _why_not(result: ProgramResult, expected: str) -> str:
    """Return why a run did not pass."""
    last = (result.errors.rstrip().rpartition("\n")[2] or f"ended by {result.end}")[:_LONGEST_REASON]
    if result.end == "done":
        return f"printed {result.output[:80]!r}, and should have printed {expected[:80]!r}"
    return f"took longer than it may ({result.seconds:.1f} s)" if result.end == "time" else f"{result.end}: {last}"


# ---- the tests of a row ------------------------------------------------------------------------------------------


def read_tests(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> Tests:
    """Read the tests of a row, in the forms that data sets for verl have.

    Raises:
        TruthError: It is none of these.
    """

    def refuse(what: str) -> NoReturn:
        raise TruthError(ground_truth, data_source, what)

    given = ground_truth
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            if "assert" not in given and "def test" not in given:
                refuse(f"has no tests for programs: {_WAYS}")
            return Tests(code=[given])
    if isinstance(given, Mapping):
        tests = _of_mapping(given, refuse)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        tests = _of_list(list(given), extra_info, refuse)
    else:
        refuse(f"has no tests for programs: {_WAYS}")
    if not (tests.pairs or tests.calls or tests.code):
        refuse("has no test at all")
    return tests


def _of_mapping(given: Mapping[str, Any], refuse: Callable[[str], NoReturn]) -> Tests:
    name = given.get("fn_name") or given.get("entry_point")
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        refuse(f"names the function {str(name)[:40]!r}, which is no name of Python")
    for key in ("assert_case", "asserts", "test_list"):
        if given.get(key) is not None:
            return _of_list([*given[key]], {}, refuse)
    if isinstance(given.get("test"), str):
        check = f"\n\ncheck({name})\n" if name is not None and "def check(" in given["test"] else ""
        return Tests(code=[given["test"] + check])
    if given.get("inputs") is None or given.get("outputs") is None:
        refuse(f"has no tests for programs: {_WAYS}")
    inputs, outputs = list(given["inputs"]), list(given["outputs"])
    if len(inputs) != len(outputs):
        refuse(f"has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    return _pairs(pairs) if name is None else _calls(str(name), pairs, refuse)


def _of_list(given: list[Any], extra_info: Mapping[str, Any], refuse: Callable[[str], NoReturn]) -> Tests:
    if all(isinstance(one, str) for one in given):
        return Tests(code=given)
    if not all(isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in given):
        refuse(f"has no tests for programs: {_WAYS}")
    pairs = [(one["input"], one["output"]) for one in given]
    kinds = {str(one.get("testtype") or "stdin") for one in given}
    if kinds == {"stdin"}:
        return _pairs(pairs)
    told = [one.get("metadata") or {} for one in given]
    names = {one.get("func_name") for one in [*told, extra_info, extra_info.get("metadata") or {}]} - {None}
    if kinds != {"functional"} or len(names) != 1:
        refuse(f"has tests of the kinds {', '.join(sorted(kinds))} for the functions {', '.join(map(str, names))}")
    return _calls(str(*names), pairs, refuse)


def _pairs(pairs: Sequence[tuple[Any, Any]]) -> Tests:
    def text(value: Any) -> str:
        return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return Tests(pairs=[(text(given), text(expected)) for given, expected in pairs])


def _calls(name: str, pairs: Sequence[tuple[Any, Any]], refuse: Callable[[str], NoReturn]) -> Tests:
    """Return calls: arguments are a list, or a text with a line of JSON for each."""
    found = []
    for number, (given, expected) in enumerate(pairs):
        try:
            given = (
                [json.loads(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
            )
            expected = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError as error:
            refuse(f"has a test {number} of {name} that is no JSON: {error}")
        if not isinstance(given, list | tuple):
            refuse(f"has a test {number} of {name} whose arguments are no list")
        found.append((name, [_with_numbers(one) for one in given], expected))
    return Tests(calls=found)


def _with_numbers(value: Any) -> Any:
    """Return an argument; keys of JSON are texts, also where all were numbers."""
    if isinstance(value, dict) and value and all(key.lstrip("-").isdigit() for key in value if isinstance(key, str)):
        return {int(key): one for key, one in value.items()}
    return value


def check() -> None:
    """Refuse to score where programs can't be run safely.

    Raises:
        ProgramsRefusedError: They can't.
    """
    if (why := sandbox_limit()) is not None:
        raise ProgramsRefusedError(
            f"can't run programs of the policy safely here: {why}. Run on a system that can, or, if a program may do "
            "all that this user can, use reward.functions=[{name: code, trust: true}]"
        )


def scorer_of(trial: Trial) -> Scorer:
    """Return the scorer that tries programs in one way."""
    return Scorer(
        "programs that pass the row's tests in a sandbox", read_tests, trial.score, wrong=NO_PROGRAM, load=check
    )


PROGRAMS = scorer_of(Trial(partial=True))
"""As verl pays programs: the share of tests that they pass."""
