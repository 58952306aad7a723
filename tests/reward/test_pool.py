import errno
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import pytest

from hrl.data.dataset import PromptRow, check_prompt
from hrl.data.sources import read_rows
from hrl.processes.isolation import isolation_limit
from hrl.reward.function import BuiltIn, PickledFunction, RewardFunctionError, UserFile
from hrl.reward.pool import RewardPool, RewardRow, _Task
from hrl.reward.spec import RewardSpec
from tests.reward.given import Judge, named
from tests.reward.settings import reward

FUNCTION = """
import asyncio, os, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "spin in C":
        sum(range(10**13))
    if solution_str == "sleep":
        time.sleep(1000)
    if solution_str == "raise":
        raise ZeroDivisionError("by the user")
    if solution_str == "die":
        os.kill(os.getpid(), 9)
    if solution_str == "die once":
        try:
            os.close(os.open(extra_info["mark"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return 7.0
        os.kill(os.getpid(), 9)
    if solution_str == "look around":
        loaded = [name for name in ("torch", "ray", "transformers", "vllm") if name in sys.modules]
        return {"score": 1.0, "loaded": " ".join(loaded), "environment": " ".join(os.environ.values())}
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "end":
        os._exit(3)
    if solution_str == "eat":
        bytes(2 << 30)
    if solution_str == "nothing":
        return None
    if solution_str == "print":
        print("x" * 100_000)
    if solution_str == "fork":
        if os.fork() == 0:
            time.sleep(1000)
        return float(os.getpid())
    if solution_str.startswith("stray"):
        if os.fork() == 0:  # a daemon, with nothing that tells whose it was
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sleep", ["sleep", "1000"], {})
            os._exit(0)
        os.wait()
        session = subprocess.Popen(["setsid", "sleep", "1000"])
        time.sleep(1000 if solution_str == "stray for long" else 0)
        return {"score": 1.0, "session": float(session.pid)}
    return {"score": len(solution_str) + bonus, "truth": repr(ground_truth)}

async def slowly(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    return 3.0

inside = most = 0
met = asyncio.Event()

async def meet(data_source, solution_str, ground_truth, extra_info=None):
    global inside, most
    inside += 1
    most = max(most, inside)
    if inside == extra_info["together"]:
        met.set()
    await met.wait()
    await asyncio.sleep(0.2)  # one call too many, were there any, would come in now
    inside -= 1
    return {"score": 1.0, "most": most}

async def judge(data_source, solution_str, ground_truth, extra_info=None):
    global inside, most
    inside += 1
    most = max(most, inside)
    try:
        if solution_str == "hang":
            await asyncio.sleep(1000)
        if solution_str == "hang and ignore":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass
        if solution_str == "sleep":
            await asyncio.sleep(0.05)
            time.sleep(1000)
        if solution_str == "spin in a task":
            async def spin():
                await asyncio.sleep(0.05)
                sum(range(10**13))
            await asyncio.gather(asyncio.sleep(1000), spin())
        if solution_str == "die":
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), 9)
        if solution_str == "exit":
            await asyncio.sleep(0.05)
            sys.exit(3)
        if solution_str == "exit in a task":
            async def leave():
                await asyncio.sleep(0.05)
                sys.exit(3)
            await asyncio.gather(asyncio.sleep(1000), leave())
        if solution_str == "raise":
            raise ZeroDivisionError("by the user")
        if solution_str == "compute":
            await asyncio.sleep(0)
            time.sleep(0.15)
        await asyncio.sleep(0.2)
        return {"score": 1.0, "most": most, "process": os.getpid()}
    finally:
        inside -= 1
"""


@pytest.fixture(scope="module")
def function_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "mine.py"
    file.write_text(FUNCTION)
    return str(file)


@pytest.fixture(scope="module")
def pool(function_file):
    spec = RewardSpec(UserFile(function_file), {"bonus": 0.5})
    with RewardPool(spec, reward(num_workers=2, timeout_s=1.0, memory_limit_gib=1)) as started:
        yield started


def submit(pool, text, ground_truth="1", data_source="s", **extra_info):
    return pool.submit(RewardRow(0, data_source, ground_truth, extra_info), text, "sample 0")


def score(pool, text, ground_truth="1", **extra_info):
    return submit(pool, text, ground_truth, **extra_info).result(timeout=30)


def process_ids(pool):
    return {process.popen.pid for process in set(pool._processes)}  # of their guards, known from the start


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_death(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def test_a_score_with_its_parts_comes_back(pool):
    outcome = score(pool, "four", ground_truth=("t", 1))
    assert (outcome.status, outcome.score, outcome.parts) == ("ok", 4.5, {"truth": "('t', 1)"})


def test_text_that_is_no_proper_unicode_arrives(pool):
    assert score(pool, "\ud800é\0").score == 3.5


def test_none_is_a_skip(pool):
    assert score(pool, "nothing").status == "skip"


def test_an_exception_comes_back_with_the_users_traceback(pool):
    outcome = score(pool, "raise")
    assert outcome.status == "error"
    assert "mine.py" in outcome.error
    assert outcome.error.endswith("ZeroDivisionError: by the user")
    assert "hrl/reward" not in outcome.error


def test_memory_is_bounded_where_a_bound_is_given(pool, function_file):
    assert "MemoryError" in score(pool, "eat").error
    with RewardPool(RewardSpec(UserFile(function_file)), reward(timeout_s=25.0, memory_limit_gib=None)) as unbounded:
        assert score(unbounded, "eat").score == 3.0


def test_a_spin_in_c_is_killed_at_the_deadline_and_its_process_replaced(pool):
    before = process_ids(pool)
    outcome = score(pool, "spin in C")
    assert outcome.status == "timeout"
    assert 1.0 <= outcome.duration_s < 30.0
    assert score(pool, "four").score == 4.5
    assert len(before - process_ids(pool)) == 1


def test_a_process_that_somebody_stopped_is_replaced_and_its_sample_scored_anew(function_file):
    with RewardPool(RewardSpec(UserFile(function_file)), reward(timeout_s=1.0, num_workers=1)) as pool:
        (process,) = pool._processes
        os.kill(process.pid, signal.SIGSTOP)
        outcome = score(pool, "nothing")
    assert (outcome.status, outcome.attempts) == ("skip", 2), "the sample is not to blame for the deadline"


def test_a_guard_that_somebody_stopped_ends_with_its_process(function_file):
    with RewardPool(RewardSpec(UserFile(function_file)), reward(timeout_s=5.0, num_workers=1)) as pool:
        assert score(pool, "nothing").status == "skip"
        (process,) = pool._processes
        os.kill(process.popen.pid, signal.SIGSTOP)
        began = time.monotonic()
    assert process.popen.returncode is not None and time.monotonic() - began < 10


def test_many_that_never_return_starve_nobody(function_file, monkeypatch):
    """Seven stay in seven processes, up to four times the two; the eighth process takes what is quick."""
    monkeypatch.setattr("hrl.reward.pool._SLOW_AFTER_S", 0.1)
    with RewardPool(RewardSpec(UserFile(function_file)), reward(num_workers=2, timeout_s=600.0)) as pool:
        stuck = [submit(pool, "sleep") for _ in range(7)]
        assert score(pool, "four").score == 4.0
        assert not any(future.done() for future in stuck)
        stuck += [submit(pool, "sleep") for _ in range(3)]
        time.sleep(0.5)
        assert len(process_ids(pool)) == 8, "and no further ones"
    assert {future.result(timeout=30).status for future in stuck} == {"crash"}


def test_those_that_never_return_time_out_one_and_all_and_leave_the_pool_usable(pool):
    stuck = [submit(pool, "sleep") for _ in range(4)]
    assert [future.result(timeout=600).status for future in stuck] == ["timeout"] * 4
    assert score(pool, "four").score == 4.5


def test_a_process_that_dies_is_replaced_and_the_sample_tried_once_more(pool, tmp_path):
    outcome = score(pool, "die once", mark=str(tmp_path / "mark"))
    assert (outcome.status, outcome.score, outcome.attempts) == ("ok", 7.0, 2)


@pytest.mark.parametrize("how, message", [("die", "was killed by SIGKILL, twice"), ("end", "exit code 3, twice")])
def test_a_sample_that_kills_its_process_twice_is_given_up(pool, how, message):
    outcome = score(pool, how)
    assert (outcome.status, outcome.attempts) == ("crash", 2)
    assert message in outcome.error


@pytest.mark.parametrize("name", ["compute_score", "judge"])
def test_a_function_that_exits_is_told_where_and_keeps_its_process(function_file, name):
    with RewardPool(RewardSpec(UserFile(function_file, name)), reward(timeout_s=60.0)) as pool:
        before = process_ids(pool)
        outcome = score(pool, "exit")
        assert (outcome.status, outcome.attempts, process_ids(pool)) == ("error", 1, before)
    assert outcome.error.startswith("Traceback") and outcome.error.endswith("SystemExit: 3")
    assert "mine.py" in outcome.error and "sys.exit(3)" in outcome.error


def test_what_a_function_prints_disturbs_nothing(pool):
    assert score(pool, "print").score == 5.5


def test_no_secret_and_no_heavy_import_reaches_a_reward_process(function_file, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-1")
    monkeypatch.setenv("MY_API_KEY", "canary-2")
    with RewardPool(RewardSpec(UserFile(function_file)), reward(timeout_s=5.0)) as pool:
        parts = score(pool, "look around").parts
    assert parts["loaded"] == ""
    assert "canary" not in parts["environment"]


def test_async_functions_are_awaited(function_file):
    with RewardPool(RewardSpec(UserFile(function_file, "slowly")), reward(timeout_s=5.0)) as pool:
        assert [score(pool, "x").score for _ in range(2)] == [3.0, 3.0]


def test_a_ground_truth_that_is_no_plain_data_is_refused_by_name(pool):
    with pytest.raises(ValueError, match="ground truth of sample 0 is a set"):
        score(pool, "x", ground_truth={1})


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import nothing_like_this", "No module named 'nothing_like_this'"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("import os; os._exit(7)", "its process [0-9]+ ended with exit code 7 while loading"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_at_start(tmp_path, source, told):
    (tmp_path / "broken.py").write_text(f"{source}\n")
    with pytest.raises(RewardFunctionError, match=rf"broken\.py can't be loaded: (?s:.*){told}"):
        RewardPool(RewardSpec(UserFile(str(tmp_path / "broken.py"))), reward(num_workers=2)).start()


def test_a_file_that_never_finishes_loading_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(1000)\n")
    started = refuse_processes(monkeypatch, after=2)  # a second attempt would be another error
    monkeypatch.setattr("hrl.reward.pool._START_TIMEOUT_S", 0.3)
    pool = RewardPool(RewardSpec(UserFile(str(tmp_path / "endless.py"))), reward(timeout_s=1.0))
    with pytest.raises(RewardFunctionError, match="loading took longer than 0.3 s"):
        pool.start()
    assert len(started) == 1


def refuse_processes(monkeypatch, after):
    """From the process number `after` on the system has no room for another; returns those that start."""
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            if len(started) >= after:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            started.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return started


def test_a_process_that_cannot_be_started_is_told_at_once(function_file, monkeypatch):
    refuse_processes(monkeypatch, after=0)
    started = time.monotonic()
    with pytest.raises(RewardFunctionError, match=r"Resource temporarily unavailable(?s:.*)reward\.num_workers"):
        RewardPool(RewardSpec(UserFile(function_file)), reward(num_workers=2, timeout_s=1.0)).start()
    assert time.monotonic() - started < 30


def test_samples_end_with_the_reason_why_a_killed_process_was_not_replaced(function_file, monkeypatch):
    refuse_processes(monkeypatch, after=1)
    with RewardPool(RewardSpec(UserFile(function_file)), reward(timeout_s=5.0)) as pool:
        futures = [submit(pool, text) for text in ("die", "four")]
        outcomes = [future.result(timeout=10) for future in futures]
        assert [outcome.status for outcome in outcomes] == ["crash", "crash"]
        assert all("Resource temporarily unavailable" in outcome.error for outcome in outcomes)
        with pytest.raises(RuntimeError, match="Resource temporarily unavailable"):
            submit(pool, "four")


def test_shutdown_kills_all_and_ends_what_waits(function_file):
    pool = RewardPool(RewardSpec(UserFile(function_file)), reward(num_workers=2, timeout_s=60.0))
    pool.start()
    grandparent = int(score(pool, "fork").score)
    futures = [submit(pool, "spin in C") for _ in range(5)]
    time.sleep(0.2)
    pids = process_ids(pool) | {process.pid for process in set(pool._processes)}
    assert grandparent in pids
    pool.shutdown()
    pool.shutdown()
    assert {future.result(timeout=1).status for future in futures} == {"crash"}
    assert wait_for_death(pids)
    with pytest.raises(RuntimeError, match="not running"):
        submit(pool, "x")


def sleepers():
    """The processes on this machine that only sleep 1000 s, which nothing but the function above starts."""
    lines = {int(path.parent.name): path for path in Path("/proc").glob("[0-9]*/cmdline")}
    return {pid for pid, path in lines.items() if is_alive(pid) and path.read_bytes() == b"sleep\x001000\x00"}


def new_sleepers(before, count):
    """Those that came since, once they are as many as they become."""
    end = time.monotonic() + 10
    while len(found := sleepers() - before) < count and time.monotonic() < end:
        time.sleep(0.02)
    assert len(found) == count
    return found


def test_what_a_function_starts_in_sessions_of_their_own_ends_with_its_process(function_file):
    before = sleepers()
    with RewardPool(RewardSpec(UserFile(function_file)), reward(num_workers=1, timeout_s=2.0)) as pool:
        outcome = submit(pool, "stray").result(timeout=30)
        assert outcome.parts["session"] in new_sleepers(before, 2)
        killed = submit(pool, "stray for long").result(timeout=30)
        assert killed.status == "timeout"
        assert score(pool, "four").score is not None, "another process has taken its place"
        assert wait_for_death(sleepers() - before), "with the process that was killed"
        assert submit(pool, "stray").result(timeout=30).status == "ok"
        last = new_sleepers(before, 2)
    assert not any(map(is_alive, last)), "the end waits for them"


def test_processes_die_with_a_parent_that_is_killed(function_file):
    script = (
        "import sys, time\n"
        "from hrl.reward.function import UserFile\n"
        "from hrl.reward.spec import RewardSpec\n"
        "from tests.reward.settings import reward\n"
        "from hrl.reward.pool import RewardPool, RewardRow\n"
        "pool = RewardPool(RewardSpec(UserFile(sys.argv[1])), reward(num_workers=2, timeout_s=600.0))\n"
        "pool.start()\n"
        "pool.submit(RewardRow(0, 's', '1'), 'spin in C', 's')\n"
        "time.sleep(0.5)\n"
        "pids = [str(pid) for process in pool._processes for pid in (process.pid, process.popen.pid)]\n"
        "sys.stdout.write(' '.join(pids) + '\\n'); sys.stdout.flush()\n"
        "time.sleep(1000)\n"
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", script, function_file],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) >= 2
        assert all(map(is_alive, pids))
        parent.send_signal(signal.SIGKILL)
    assert wait_for_death(pids)


@pytest.fixture
def judges(function_file):
    with RewardPool(
        RewardSpec(UserFile(function_file, "judge")), reward(num_workers=2, timeout_s=1.5, max_concurrency=32)
    ) as started:
        yield started


def score_all(pool, texts):
    futures = [submit(pool, text) for text in texts]
    return [future.result(timeout=600) for future in futures]


def test_one_process_awaits_as_many_calls_at_once_as_it_may_and_no_more(function_file):
    """None returns before 32 are inside, and never are there 33."""
    with RewardPool(RewardSpec(UserFile(function_file, "meet")), reward(timeout_s=60.0, max_concurrency=32)) as pool:
        futures = [submit(pool, "x", together=32) for _ in range(64)]
        outcomes = [future.result(timeout=600) for future in futures]
    assert {outcome.status for outcome in outcomes} == {"ok"}
    assert max(outcome.parts["most"] for outcome in outcomes) == 32


def test_samples_are_spread_over_the_processes(judges):
    end = time.monotonic() + 60
    processes = set()
    while len(processes) < 2 and time.monotonic() < end:  # until both have loaded the function
        processes = {outcome.parts["process"] for outcome in score_all(judges, ["ok"] * 2)}
    assert processes == {process.pid for process in set(judges._processes)}


def test_an_await_that_hangs_is_cancelled_and_harms_no_neighbour(judges):
    before = process_ids(judges)
    outcomes = score_all(judges, ["hang", *["ok"] * 20, "raise"])
    assert outcomes[0].status == "timeout"
    assert "and was cancelled" in outcomes[0].error
    assert outcomes[-1].error.endswith("ZeroDivisionError: by the user")
    assert all((outcome.status, outcome.attempts) == ("ok", 1) for outcome in outcomes[1:-1])
    assert process_ids(judges) == before


@pytest.mark.parametrize(
    "culprit, status",
    [
        ("sleep", "timeout"),
        ("spin in a task", "timeout"),
        ("hang and ignore", "timeout"),
        ("die", "crash"),
        ("exit in a task", "crash"),
    ],
)
def test_a_call_that_stops_or_ends_its_process_is_charged_alone(judges, culprit, status):
    outcomes = score_all(judges, [*["ok"] * 4, culprit, *["ok"] * 4])
    assert outcomes[4].status == status
    assert [outcome.status for outcome in outcomes if outcome is not outcomes[4]] == ["ok"] * 8
    assert {outcome.attempts for outcome in outcomes if outcome is not outcomes[4]} == {1}
    assert score(judges, "ok").score == 1.0


def test_calls_that_compute_are_not_charged_for_each_other(judges):
    """Twelve or more in a process, 0.15 s of computing each: together longer than the deadline of 1.5 s."""
    assert {outcome.status for outcome in score_all(judges, ["compute"] * 24)} == {"ok"}


def test_the_samples_of_a_process_that_does_not_read_wait_without_holding_up_others(function_file):
    with RewardPool(RewardSpec(UserFile(function_file, "judge")), reward(num_workers=2, timeout_s=5.0)) as pool:
        submit(pool, "sleep")
        time.sleep(0.3)
        large = [submit(pool, "x" * 500_000) for _ in range(8)]
        assert score(pool, "ok").duration_s < 4.0
        assert {future.result(timeout=30).status for future in large} == {"ok"}


ENDLESS = r"\boxed{10^{10^{10}}}"
SLOW = r"\boxed{(\sin(x)+\cos(y)+\tan(z)+e^w)^{10}-(x+y)^{10}}"  # more than five seconds, which is all that it may take


def test_a_hundred_responses_that_no_computer_could_compute_cost_their_own_score_and_no_process():
    with RewardPool(RewardSpec(BuiltIn(("math_verify",))), reward(timeout_s=20.0)) as pool:
        before = process_ids(pool)
        futures = [submit(pool, ENDLESS, "3", "math_verify") for _ in range(100)]
        good = submit(pool, r"\boxed{3}", "3", "math_verify")
        outcomes = [future.result(timeout=600) for future in futures]
        assert {(outcome.status, outcome.score) for outcome in outcomes} == {("unscorable", 0.0)}
        assert all("too complex" in outcome.parts["unscorable"] for outcome in outcomes)
        assert (good.result(timeout=600).score, good.result().status) == (1.0, "ok")
        assert process_ids(pool) == before


def test_below_that_the_deadline_ends_what_a_response_does_to_a_built_in_function():
    with RewardPool(RewardSpec(BuiltIn(("math_verify",))), reward(timeout_s=1.5)) as pool:
        future = submit(pool, SLOW, "x^2+z", "math_verify")
        outcome = future.result(timeout=600)
        assert (outcome.status, outcome.score) == ("unscorable", 0.0)
        assert "took longer than 1.5 s and was killed" in outcome.parts["unscorable"]


@pytest.mark.parametrize("status", ["error", "timeout", "crash"])
@pytest.mark.parametrize("truth_read", [True, False])
def test_what_goes_wrong_is_the_responses_fault_once_a_built_in_function_has_read_the_truth(status, truth_read):
    pool = RewardPool(RewardSpec(BuiltIn()), reward())
    task = _Task(1, "s", "math_dapo", b"", Future())
    pool._finish(task, status, truth_read, error="Traceback\nMemoryError: no more")
    outcome = task.future.result()
    if truth_read:
        assert (outcome.status, outcome.score, outcome.error) == ("unscorable", -1.0, None)
        assert outcome.parts == {"acc": 0.0, "pred": "[INVALID]", "unscorable": "MemoryError: no more"}
    else:
        assert (outcome.status, outcome.score, outcome.parts) == (status, None, {})


def test_a_ground_truth_that_cannot_be_read_stays_an_error():
    with RewardPool(RewardSpec(BuiltIn(("math",))), reward(timeout_s=20.0)) as pool:
        outcome = submit(pool, "Answer: 3", [3], "math").result(timeout=600)
    assert (outcome.status, outcome.score) == ("error", None)
    assert "is not the text of an answer" in outcome.error


def test_a_variable_that_is_named_reaches_the_function_and_one_that_is_kept_from_it_is_told(tmp_path, monkeypatch):
    (tmp_path / "keyed.py").write_text(
        "import os\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, key=None):\n"
        "    return {'score': 1.0, 'key': key, 'same': key == os.environ[solution_str]}\n"
    )
    monkeypatch.setenv("JUDGE_API_KEY", "canary-1")
    monkeypatch.setenv("OTHER_API_KEY", "canary-2")
    spec = RewardSpec(UserFile(str(tmp_path / "keyed.py")), {"key": "env:JUDGE_API_KEY"})
    with RewardPool(spec, reward(timeout_s=5.0)) as pool:
        assert score(pool, "JUDGE_API_KEY").parts == {"key": "canary-1", "same": 1.0}
        error = score(pool, "OTHER_API_KEY").error
    assert "KeyError: 'OTHER_API_KEY'" in error
    assert "reward.env=[OTHER_API_KEY], or <argument>: env:OTHER_API_KEY in reward_kwargs" in error
    assert "canary-2" not in error


def test_a_variable_that_is_named_and_not_set_is_told_at_start(function_file, monkeypatch):
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with pytest.raises(
        RewardFunctionError, match=r"argument key of .* is the environment variable JUDGE_API_KEY, which"
    ):
        spec = RewardSpec(UserFile(function_file), {"key": "env:JUDGE_API_KEY"})
        RewardPool(spec, reward(timeout_s=1.0)).start()


def test_a_function_gets_the_variables_that_reward_env_names_and_no_others(tmp_path, monkeypatch):
    (tmp_path / "looks.py").write_text(
        "import os\n"
        "def compute_score(solution_str):\n"
        "    return {'score': 1.0, **{name: os.environ.get(name) for name in solution_str.split()}}\n"
    )
    for name, value in {"CUSTOMER": "c", "MODE": "slow", "ANOTHER": "a", "MY_TOKEN": "t"}.items():
        monkeypatch.setenv(name, value)
    chosen = reward(timeout_s=5.0, env=["CUSTOMER", "MY_TOKEN", "MODE=fast", "OMP_NUM_THREADS=3", "EMPTY="])
    with RewardPool(RewardSpec(UserFile(str(tmp_path / "looks.py"))), chosen) as pool:
        parts = score(pool, "CUSTOMER MY_TOKEN MODE OMP_NUM_THREADS EMPTY PYTHONHASHSEED ANOTHER").parts
    assert parts == {
        "CUSTOMER": "c",
        "MY_TOKEN": "t",
        "MODE": "fast",
        "OMP_NUM_THREADS": "3",
        "EMPTY": "",
        "PYTHONHASHSEED": "0",
        "ANOTHER": None,
    }


def test_a_variable_of_reward_env_that_is_not_set_is_told_at_start(function_file, monkeypatch):
    monkeypatch.delenv("CUSTOMER", raising=False)
    with pytest.raises(RewardFunctionError, match=r"reward.env names CUSTOMER, .* or write CUSTOMER=value"):
        RewardPool(RewardSpec(UserFile(function_file)), reward(env=["CUSTOMER"])).start()


LOOKING = """
import ctypes
import os
import subprocess

def attempt(call):
    try:
        return call()
    except OSError as error:
        return type(error).__name__

def read(path):
    return open(path, "rb").read().decode("latin-1")

def look():
    libc = ctypes.CDLL(None, use_errno=True)
    found = ""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) not in (os.getpid(), os.getppid()):
            found += attempt(lambda: read(f"/proc/{pid}/environ"))
    parent = os.getppid()
    files = f"/proc/{parent}/fd"
    return {
        "others": float("canary-of-the-parent" in found),
        "parent": attempt(lambda: read(f"/proc/{parent}/environ")),
        "memory": attempt(lambda: read(f"/proc/{parent}/mem")),
        "traced": float(libc.ptrace(16, parent, 0, 0) == 0),
        "signal": attempt(lambda: os.kill(parent, 0)),
        "open files": attempt(lambda: str([os.readlink(f"{files}/{number}") for number in os.listdir(files)])),
    }

def compute_score(solution_str):
    if solution_str == "own":
        child = subprocess.Popen(["sleep", "60"])
        while not (environ := read(f"/proc/{child.pid}/environ")):
            pass  # it is being started
        child.kill()
        return {"score": child.wait(), "own": float("PATH=" in environ)}
    if solution_str == "child":
        seen = subprocess.run(["cat", f"/proc/{os.getppid()}/environ"], capture_output=True, text=True)
        return {"score": 1.0, "seen": seen.stdout, "status": seen.returncode}
    return {"score": 1.0, **look()}
"""


@pytest.mark.skipif(isolation_limit() is not None, reason=f"this system can't: {isolation_limit()}")
def test_a_function_can_neither_look_into_its_parent_or_any_other_process_nor_end_them(tmp_path, monkeypatch):
    (tmp_path / "looking.py").write_text(LOOKING)
    monkeypatch.setenv("PARENTS_TOKEN", "canary-of-the-parent")  # for the sleeper, whose first environment it is
    with (
        subprocess.Popen(["sleep", "60"]) as beside,
        RewardPool(RewardSpec(UserFile(str(tmp_path / "looking.py"))), reward(timeout_s=20.0)) as pool,
    ):
        assert "canary-of-the-parent" in Path(f"/proc/{beside.pid}/environ").read_text()
        parts = score(pool, "look").parts
        own, child = score(pool, "own"), score(pool, "child")
        beside.kill()
    assert parts == {
        "others": 0.0,
        "parent": "PermissionError",
        "memory": "PermissionError",
        "traced": 0.0,
        "signal": "PermissionError",
        "open files": "PermissionError",
    }
    assert (own.score, own.parts) == (-9.0, {"own": 1.0})  # it may look into, and end, what it started itself
    assert (child.parts["seen"], child.parts["status"]) != ("", 0)


# ---------------------------------------------------------------------- functions given as objects


def test_a_function_of_a_module_travels_by_the_names_of_both():
    sent = PickledFunction.of(named)
    assert len(sent.pickled) < 200
    with RewardPool(RewardSpec(sent), reward(timeout_s=5.0)) as pool:
        outcome = score(pool, "four")
    assert (outcome.score, outcome.parts) == (4.0, {"module": "tests.reward.given"})


def test_a_closure_and_an_object_travel_with_what_they_hold():
    weight = 2.0

    def weighted(solution_str, factor, **_):
        return weight * factor * len(solution_str)

    weighted.__module__ = "__main__"  # as in a script or a notebook
    factor = {"factor": 3.0}
    with RewardPool(RewardSpec(PickledFunction.of(weighted, factor), factor), reward(timeout_s=5.0)) as pool:
        assert score(pool, "four").score == 24.0
    with RewardPool(RewardSpec(PickledFunction.of(Judge(0.5))), reward(timeout_s=5.0)) as pool:
        assert score(pool, "four").score == 4.5


def test_a_function_given_as_an_object_is_under_the_same_limits_and_errors():
    with RewardPool(RewardSpec(PickledFunction.of(Judge(0.5))), reward(timeout_s=1.5)) as pool:
        assert score(pool, "sleep").status == "timeout"
        error = score(pool, "raise").error
    assert error.endswith("ZeroDivisionError: by the user")
    assert "given.py" in error and "hrl/reward" not in error


def test_a_function_of_a_module_that_its_processes_do_not_find_is_told_at_start(monkeypatch):
    def judge(**sample):
        return 1.0

    module = ModuleType("made_up_in_memory")
    module.judge, judge.__module__, judge.__qualname__ = judge, module.__name__, "judge"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pool = RewardPool(RewardSpec(PickledFunction.of(judge)), reward())
    with pytest.raises(RewardFunctionError, match="No module named 'made_up_in_memory'.*PYTHONPATH"):
        pool.start()


def test_a_function_takes_what_it_names_of_a_row():
    row = RewardRow(0, "s", "4", {"unit": "m"}, {"prompt": "2 + 2", "answer": "four", "level": (1, 2)})
    bare = RewardRow(1, "s", "4")
    functions = {
        "by name": lambda response, answer, level: {"score": 1.0, "took": repr((response, answer, level))},
        "all": lambda **sample: {"score": 1.0, "took": " ".join(sorted(sample))},
    }
    columns, took = ("answer", "level", "prompt"), {}
    for name, function in functions.items():
        spec = RewardSpec(PickledFunction.of(function, None, columns), {}, columns)
        with RewardPool(spec, reward(timeout_s=5.0)) as pool:
            took[name] = [pool.submit(one, "4!", "s").result(20).parts["took"] for one in (row, bare)]
    assert took["by name"] == ["('4!', 'four', (1, 2))", "('4!', '4', None)"]
    everything = "answer conversation data_source extra_info ground_truth level prompt response solution_str turns"
    assert took["all"] == [everything, everything]


HOSTILE = """
import os, sys
from collections.abc import Mapping

class Stop(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

class Weightless(float):
    def __float__(self):
        raise ArithmeticError("by the number")

class Hollow(Mapping):
    def __getitem__(self, key): raise LookupError("by the dict")
    def __iter__(self): return iter(["score"])
    def __len__(self): return 1

class Shy:
    def __repr__(self): raise RuntimeError("no picture")

def write(text):
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2):
        try:
            os.write(number, text)
        except OSError:
            pass

def compute_score(response):
    itself = []
    itself.append(itself)
    def down(): return down()
    def raising(error): raise error
    return {
        "interrupt": lambda: raising(KeyboardInterrupt("by the user")),
        "leave": lambda: raising(GeneratorExit("by the user")),
        "stop": lambda: raising(Stop("by the user")),
        "mute": lambda: raising(Mute()),
        "shout": lambda: raising(ValueError("x" * 50_000_000)),
        "deep": down,
        "weightless": lambda: Weightless(1),
        "hollow": Hollow,
        "shy": Shy,
        "shy part": lambda: {"score": 1, "part": Shy()},
        "itself": lambda: itself,
        "many parts": lambda: {"score": 1, **dict.fromkeys(map(str, range(1_000_000)), 1.0)},
        "long name": lambda: {"score": 1, "x" * 1000: 1.0},
        "half a name": lambda: {"score": 1, "\\ud800": 1.0},
        "long part": lambda: {"score": 1, "note": "x" * 50_000_000},
        "junk": lambda: write(b"junk\\n"),
        "other answer": lambda: write(b'{"id": 99999, "score": 1}\\n'),
        "no object": lambda: write(b"[]\\n"),
        "close": lambda: os.closerange(3, 65536),
        "good": lambda: 1,
    }[response]()
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    file = tmp_path_factory.mktemp("hostile") / "hostile.py"
    file.write_text(HOSTILE.replace("\\\\", "\\"))
    with RewardPool(RewardSpec(UserFile(str(file))), reward(num_workers=2, timeout_s=20.0)) as started:
        yield started


HOSTILE_JUDGE = """
import asyncio, sys

class Stop(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

async def compute_score(response):
    await asyncio.sleep(0.05)
    def raising(error): raise error
    return {
        "interrupt": lambda: raising(KeyboardInterrupt("by the user")),
        "leave": lambda: sys.exit(3),
        "stop": lambda: raising(Stop("by the user")),
        "cancel": lambda: raising(asyncio.CancelledError()),
        "mute": lambda: raising(Mute()),
        "many parts": lambda: {"score": 1, **dict.fromkeys(map(str, range(1_000_000)), 1.0)},
        "generator": lambda: (one for one in [1]),
        "nan": lambda: {"score": float("nan")},
        "good": lambda: 1,
    }[response]()
"""


@pytest.fixture(scope="module")
def hostile_judges(tmp_path_factory):
    file = tmp_path_factory.mktemp("hostile") / "judge.py"
    file.write_text(HOSTILE_JUDGE)
    with RewardPool(RewardSpec(UserFile(str(file))), reward(num_workers=1, timeout_s=20.0)) as started:
        yield started


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("interrupt", "KeyboardInterrupt: by the user"),
        ("leave", "GeneratorExit: by the user"),
        ("stop", "Stop: by the user"),
        ("mute", "Mute: <exception str() failed>"),
        ("shout", "ValueError: xxx"),
        ("deep", "RecursionError: maximum recursion depth exceeded"),
        ("weightless", "ArithmeticError: by the number"),
        ("hollow", "LookupError: by the dict"),
        ("shy", "RuntimeError: no picture"),
        ("shy part", "RuntimeError: no picture"),
        ("itself", "returned [[...]], a list, where a number is expected"),
        ("many parts", "returned a dict of 1,000,001 entries, and each would be a metric: return at most 1000"),
        ("long name", "can't name a metric"),
        ("half a name", r"returned a dict with the key '\ud800', which can't name a metric"),
    ],
)
def test_whatever_a_function_raises_or_returns_is_an_error_of_its_sample(hostile, what, told):
    before = process_ids(hostile)
    outcome = score(hostile, what)
    assert (outcome.status, outcome.score, outcome.attempts) == ("error", None, 1)
    assert told in outcome.error and len(outcome.error) < 5000
    assert process_ids(hostile) == before and score(hostile, "good").score == 1.0


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("interrupt", "KeyboardInterrupt: by the user"),
        ("leave", "SystemExit: 3"),
        ("stop", "Stop: by the user"),
        ("cancel", "the function cancelled itself (asyncio.CancelledError)"),
        ("mute", "Mute: <exception str() failed>"),
        ("many parts", "returned a dict of 1,000,001 entries"),
        ("generator", "returned <generator object"),
        ("nan", "returned as 'score' nan, which is not finite"),
    ],
)
def test_whatever_an_async_function_raises_or_returns_harms_no_call_beside_it(hostile_judges, what, told):
    before = process_ids(hostile_judges)
    beside = [submit(hostile_judges, "good") for _ in range(4)]
    outcome = score(hostile_judges, what)
    assert (outcome.status, outcome.attempts) == ("error", 1) and told in outcome.error
    assert [one.result(30).score for one in beside] == [1.0] * 4
    assert process_ids(hostile_judges) == before


def test_a_long_text_beside_a_score_is_cut(hostile):
    assert len(score(hostile, "long part").parts["note"]) == 4000


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("junk", "something in its process wrote b'junk\\n' to the connection that answers samples, twice"),
        ("other answer", "something in its process wrote {'id': 99999, 'score': 1} to the connection"),
        ("no object", "something in its process wrote b'[]\\n' to the connection"),
        ("close", "its process"),
    ],
)
def test_a_function_that_disturbs_its_connection_costs_its_own_sample(hostile, what, told):
    outcome = score(hostile, what)
    assert (outcome.status, outcome.attempts) == ("crash", 2)
    assert told in outcome.error
    assert score(hostile, "good").score == 1.0


def test_a_function_that_cannot_be_sent_is_refused_with_the_way_out():
    with socket.socket() as client:

        def judge(**sample):
            return client.fileno()

        with pytest.raises(RewardFunctionError, match=r"judge of .*can't be sent.*socket.*Open clients(?s:.*)\.path"):
            PickledFunction.of(judge)
    with pytest.raises(RewardFunctionError, match="<lambda> of .* needs completions, which nothing gives"):
        PickledFunction.of(lambda completions: 1.0)
    with pytest.raises(RewardFunctionError, match="Judge of .* is a class"):
        PickledFunction.of(Judge)
    with pytest.raises(RewardFunctionError, match=r"is 'score\.py', which can't be called: .*custom_reward_function"):
        PickledFunction.of("score.py")


def test_a_column_nested_as_deep_as_it_may_be_reaches_the_function_unchanged():
    deep = "x"
    for _ in range(100):
        deep = [deep]
    raw = {"prompt": "hi", "answer": "1", "deep": deep, "tagged": {"__tuple__": 3}}
    (row,) = read_rows([[raw]], lambda raw: check_prompt(raw, "prompt"))
    assert isinstance(row, PromptRow)

    def judge(response, deep, tagged):
        levels = 0
        while isinstance(deep, list):
            deep, levels = deep[0], levels + 1
        return {"score": levels, "tagged": repr(tagged)}

    columns = tuple(row.columns)
    with RewardPool(RewardSpec(PickledFunction.of(judge, None, columns), {}, columns), reward(timeout_s=5.0)) as pool:
        outcome = pool.submit(RewardRow(0, "s", "1", row.extra_info, row.columns), "x", "sample 0").result(30)
    assert (outcome.score, outcome.parts) == (100.0, {"tagged": "{'__tuple__': 3}"}), outcome.error
