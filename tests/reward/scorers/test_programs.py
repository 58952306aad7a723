"""Answers that are programs: right ones are paid, and no other, whatever they try."""

import base64
import json

import pytest

from hrl.processes import sandbox_child
from hrl.processes.sandbox import Sandbox, sandbox_limit
from hrl.reward.scorers.base import RowError, TruthError
from hrl.reward.scorers.programs import NO_PROGRAM, PROGRAMS, Trial, program_of, read_tests, same_output

needs_sandbox = pytest.mark.skipif(sandbox_limit() is not None, reason=f"no sandbox here: {sandbox_limit()}")

SUM = {"inputs": ["7 5\n", "1 2\n"], "outputs": ["12\n", "3\n"]}
DOUBLE = ["assert double(4) == 8", "assert double('a') == 'aa'"]
TWO_SUM = {"fn_name": "twoSum", "inputs": ["[2, 7, 11]\n9", "[3, 3]\n6"], "outputs": ["[0, 1]", "[0, 1]"]}


def tried(program, truth, partial=False, **sandbox):
    trial = Trial(Sandbox(**{"time_s": 20.0, **sandbox}), partial=partial)
    return trial.score(f"```python\n{program}\n```", read_tests("code", truth, {}))


# ---------------------------------------------------------------------------------------------------- right and wrong


@needs_sandbox
def test_a_program_is_paid_for_what_it_prints():
    assert tried("print(sum(map(int, input().split())))", SUM) == {
        "score": 1.0, "acc": True, "passed": 1.0, "has_program": 1.0, "timeouts": 0.0, "errors": 0.0,
        "why": "all tests passed",
    }  # fmt: skip
    half = tried("input(); print(12)", SUM, partial=True)
    assert (half["score"], half["acc"], half["errors"]) == (0.5, False, 0.0)
    assert half["why"] == "test 2 of 2: printed '12\\n', and should have printed '3\\n'"
    assert tried("input(); print(12)", SUM)["score"] == 0.0
    failed = tried("print(12); raise KeyError(3)", json.dumps(SUM))
    assert (failed["score"], failed["errors"]) == (0.0, 1.0) and failed["why"] == "test 1 of 2: error: KeyError: 3"


@needs_sandbox
def test_a_function_is_paid_for_what_it_returns_and_finds_what_such_answers_take_for_granted():
    solution = """
class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = defaultdict(list)
        for place, number in enumerate(nums):
            if seen[target - number]:
                return (seen[target - number][0], place)
            seen[number].append(place)
"""
    assert tried(solution, TWO_SUM)["score"] == 1.0
    assert tried("def twoSum(nums, target): return [0, 1]", TWO_SUM)["score"] == 1.0
    wrong = tried("def twoSum(nums, target): return [0, nums.index(7)]", TWO_SUM, partial=True)
    assert (wrong["score"], wrong["errors"]) == (0.5, 1.0) and "ValueError: 7 is not in list" in wrong["why"]


@needs_sandbox
def test_asserts_are_tests_whatever_form_they_have():
    double = "def double(x):\n    print(x, flush=True)\n    return x * 2"
    for truth in (DOUBLE, "\n".join(DOUBLE), {"assert_case": DOUBLE}):
        assert tried(double, truth)["score"] == 1.0
        assert tried("def double(x): return x + x if x == 4 else x", truth, partial=True)["score"] == 0.5
    check = {"test": "def check(candidate):\n    assert candidate(4) == 8\n", "entry_point": "double"}
    assert tried(double, check)["score"] == 1.0 and tried("def double(x): return 7", check)["score"] == 0.0
    module = "from solution import double\ndef test_a(): assert double(1) == 2\ndef test_b(): assert not double(1)"
    assert tried(double, module, partial=True)["score"] == 0.5


@needs_sandbox
def test_tests_may_use_objects_exceptions_and_arguments_that_are_changed():
    stack = """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
def flip(items): items.reverse()
def huge(): return 10 ** 5000, {1: {2.5, None}}, b"a", 1j
"""
    tests = """
s = Stack(1, 2)
assert s.pop() == 2 and len(s) == 1 and list(s) == [1]
s.items = [5]
assert s.pop() == 5
try:
    s.pop()
except IndexError:
    pass
else:
    raise AssertionError
items = [1, 2, 3]
flip(items)
assert items == [3, 2, 1]
assert huge() == (10 ** 5000, {1: {2.5, None}}, b"a", 1j)
assert math.isclose(huge()[3].imag, 1.0)
"""
    assert tried(stack, tests)["why"] == "all tests passed"


# ------------------------------------------------------------------------------------------------------------- cheats

WRITES = """
import os
for number in range(1, 20):
    try:
        os.write(number, b'{}')
    except OSError:
        pass
"""
CHEATS = {
    "another function": "def double(x): return x + 5",
    "ends early": "raise SystemExit",
    "ends early and well": "import sys\nsys.exit(0)",
    "ends at once": "import os\nos._exit(0)",
    "ends when it is called": "import os\ndef double(x): os._exit(0)",
    "equals everything": "class Equal:\n    __eq__ = lambda *_: True\n    __hash__ = None\ndouble = lambda x: Equal()",
    "a number that equals everything": "class Equal(int):\n    __eq__ = lambda *_: True\ndouble = lambda x: Equal()",
    "another AssertionError": "import builtins\nbuiltins.AssertionError = SystemExit\ndouble = str",
    "another comparison": "import builtins, operator\nbuiltins.all = builtins.any = lambda _: True\n"
    "operator.eq = lambda *_: True\ndouble = str",
    "at the end": "import atexit\natexit.register(print, 8)\nraise SystemExit",
    "says that all tests passed": WRITES.format('{"tests": 2}\\n{"passed": true}\\n{"passed": true}\\n'),
    "answers what was not asked": WRITES.format('{"value": true}\\n' * 3),
    "answers nonsense": WRITES.format('[1]\\n{"value": {"dict": [[{}, 1]]}}\\n'),
    "answers without end": WRITES.format("x") + "\ndef double(x): return 'x' * (17 << 20)",
    "replaces what packs": "import sys\nsys._getframe(3).f_globals['pack'] = lambda *_: {'object': 0}\ndouble = str",
    "looks for the tests": "import glob, os\nfound = [open(one).read() for one in glob.glob('/tmp/hrl-program-*/*')\n"
    "         + glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/fd/*')]\n"
    "def double(x): return [one.split('== ')[1] for one in found if str(x) in one][0]",
    "looks into its caller": """
import sys
def double(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if "=" * 2 + " 8" in str(value) or "=" * 2 + " 'aa'" in str(value):
                return 8 if x == 4 else "aa"
        frame = frame.f_back
""",
    "forks": "import os\nif os.fork() == 0:\n    os._exit(0)\ndef double(x): return x * 2",
    "signals": "import os\nos.kill(os.getppid(), 9)\ndef double(x): return x * 2",
    "has nothing": "pass",
    "is no Python": "double(x) = x * 2",
    "is odd": "\x00",
}


@needs_sandbox
@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_cheats_is_not_paid(name):
    found = tried(CHEATS[name], DOUBLE, partial=True)
    assert (found["score"], found["acc"]) == (0.0, False), found


@needs_sandbox
def test_what_is_expected_can_not_be_raised_away():
    """An exception that tests await is not that the program ended."""
    ends = "import os\ndef double(x): os._exit(0)"
    for caught in ("Exception", "BaseException"):
        truth = f"try:\n    double(None)\nexcept {caught}:\n    assert True\nelse:\n    assert False"
        assert tried(ends, truth)["score"] == 0.0


@needs_sandbox
def test_a_program_that_prints_can_not_say_that_it_was_right():
    cheats = [
        "print('all tests passed')",
        "import sys; sys.stderr.write('12'); sys.exit(0)",
        "import os; os.write(1, b'12'); os.kill(os.getpid(), 9)",
        "print(12); print(3)",
        "print(12); raise SystemExit(1)",
        "import glob; print(*(open(one).read() for one in glob.glob('/tmp/hrl-program-*/*')))",
        "print('12' + ' ' * (1 << 21))",
    ]
    assert [tried(cheat, SUM)["score"] for cheat in cheats] == [0.0] * len(cheats)


@needs_sandbox
def test_a_program_that_takes_too_long_or_too_much_is_ended_and_counted():
    spins = tried("while True: pass", DOUBLE, time_s=0.2, partial=True)
    assert (spins["score"], spins["timeouts"], spins["errors"]) == (0.0, 1.0, 0.0), spins
    late = "import time\ndef double(x): return time.sleep(60 * (x == 'a')) or x * 2"
    assert tried(late, [*DOUBLE, "assert double(1) == 2"], time_s=0.3, partial=True)["score"] == 1 / 3
    sleeps = Trial(Sandbox(time_s=20.0), deadline_s=0.5).score(
        "```\nimport time\ntime.sleep(60)\n```", read_tests("code", SUM, {})
    )
    assert (sleeps["score"], sleeps["timeouts"]) == (0.0, 1.0)
    for truth in (SUM, DOUBLE):
        large = tried("x = bytearray(1 << 40)", truth)
        assert (large["score"], large["errors"]) == (0.0, 1.0) and "MemoryError" in large["why"]


# -------------------------------------------------------------------------------------------------- responses and rows


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```\n```py\nb\n```\n```\nc\n```", "b"),
        ("```\na\n```\n```\nb\n```", "b"),
        ("<think>\n```python\na\n```\n</think>\n```python\nb\n```", "b"),
        ("  ```python\n  if x:\n    y\n  ```", "if x:\n  y"),
        ("```python\na\n```\nIt prints:\n```text\n12\n```", "a"),
        ("```python\na", None),
        ("<think>\n```python\na\n```", None),
        ("```bash\nls\n```", None),
        ("```python\n\n```", None),
        ("print(12)", None),
        ("```python print(12) ```", None),
        ("", None),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(response, program):
    assert program_of(response) == program


def test_a_response_without_a_program_is_worth_what_a_wrong_one_is():
    assert Trial().score("I don't know", read_tests("code", SUM, {})) == NO_PROGRAM == PROGRAMS.wrong


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1e400", "1.0", False),
        ("3.0000001", "3", False),
        ("nan", "0.5", False),
        ("YES", "Yes", False),
        ("", "0", False),
    ],
)
def test_output_is_compared_word_by_word(printed, expected, is_same):
    assert same_output(printed, expected) is is_same


def test_rows_of_livecodebench_are_read():
    functional = [{"input": "[1]\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}}]
    assert read_tests("livecodebench", json.dumps(functional), {}).calls == [("f", [[1], 2], 3)]
    stdin = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    assert read_tests("livecodebench", stdin, {}).pairs == [("1\n", "2\n")]
    assert read_tests("apps", {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [[5]]}, {}).calls == [
        ("f", [{1: 2}], [5])
    ]
    assert read_tests("apps", {"inputs": [["1", "2"]], "outputs": [["3"]]}, {}).pairs == [("1\n2", "3")]


@pytest.mark.parametrize(
    ("truth", "what"),
    [
        ("12", "has no tests for programs: as JSON or as such, one of"),
        (base64.b64encode(b"a pickle").decode(), "has no tests for programs"),
        ({"inputs": ["1"], "outputs": []}, "has 1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "has no test at all"),
        ({"fn_name": "f(", "inputs": [[1]], "outputs": [1]}, "no name of Python"),
        ({"fn_name": "f", "inputs": ["x"], "outputs": ["1"]}, "has a test 0 of f that is no JSON"),
        ({"fn_name": "f", "inputs": [3], "outputs": ["1"]}, "whose arguments are no list"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "has tests of the kinds functional"),
        ([1], "has no tests for programs"),
    ],
)
def test_rows_without_tests_are_told_as_what_they_are(truth, what):
    with pytest.raises(TruthError, match="of data source 'taco' .*") as raised:
        read_tests("taco", truth, {})
    assert what in str(raised.value)


@needs_sandbox
@pytest.mark.parametrize(
    ("truth", "why"),
    [
        ("assert f(1) = 2", "the tests can't be read: SyntaxError"),
        ("import numbpy\nassert f(1) == 2", "the tests can't be run: import numbpy: ModuleNotFoundError"),
    ],
)
def test_tests_that_fail_themselves_are_the_row_s_fault(truth, why):
    with pytest.raises(RowError, match=why):
        tried("def f(x): return 2", truth)


def test_without_the_kernel_s_help_programs_are_refused(monkeypatch):
    monkeypatch.setattr(sandbox_child, "landlock_version", lambda: 0)
    with pytest.raises(
        ValueError, match=r"can't run programs of the policy safely here: .*\{name: code, trust: true\}"
    ):
        PROGRAMS.load()
