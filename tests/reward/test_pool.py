import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hrl.reward.function import RewardFunctionError, RewardSpec
from hrl.reward.pool import RewardPool, RewardSample

FUNCTION = """
import asyncio, os, sys, time

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
        sys.exit(0)
    if solution_str == "eat":
        bytearray(2 << 30)
    if solution_str == "nothing":
        return None
    if solution_str == "print":
        print("x" * 100_000)
    if solution_str == "fork":
        if os.fork() == 0:
            time.sleep(1000)
        return float(os.getpid())
    return {"score": len(solution_str) + bonus, "truth": repr(ground_truth)}

async def slowly(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    return 3.0
"""


@pytest.fixture(scope="module")
def function_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "mine.py"
    file.write_text(FUNCTION)
    return str(file)


@pytest.fixture(scope="module")
def pool(function_file):
    spec = RewardSpec(function_file, kwargs={"bonus": 0.5})
    with RewardPool(spec, num_workers=2, timeout_s=1.0, memory_limit_bytes=1 << 30) as started:
        yield started


def score(pool, text, ground_truth="1", **extra_info):
    return pool.submit(RewardSample("sample 0", "s", text, ground_truth, extra_info)).result(timeout=30)


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
    assert "pool_process" not in outcome.error


def test_memory_is_bounded_where_a_bound_is_given(pool, function_file):
    assert "MemoryError" in score(pool, "eat").error
    with RewardPool(RewardSpec(function_file), num_workers=1, timeout_s=5.0) as unbounded:
        assert score(unbounded, "eat").score == 3.0


def test_a_spin_in_c_is_killed_at_the_deadline_and_its_process_replaced(pool):
    before = pool.process_ids
    outcome = score(pool, "spin in C")
    assert outcome.status == "timeout"
    assert 1.0 <= outcome.duration_s < 3.0
    assert score(pool, "four").score == 4.5
    assert len(set(before) - set(pool.process_ids)) == 1


def test_many_that_never_return_starve_nobody(pool):
    started = time.monotonic()
    stuck = [pool.submit(RewardSample("s", "s", "sleep", "1")) for _ in range(8)]
    assert score(pool, "four").score == 4.5
    assert [future.result(timeout=30).status for future in stuck] == ["timeout"] * 8
    assert time.monotonic() - started < 3.5  # two processes alone would take 4 s
    assert score(pool, "four").score == 4.5


def test_a_process_that_dies_is_replaced_and_the_sample_tried_once_more(pool, tmp_path):
    outcome = score(pool, "die once", mark=str(tmp_path / "mark"))
    assert (outcome.status, outcome.score, outcome.attempts) == ("ok", 7.0, 2)


@pytest.mark.parametrize("how, message", [("die", "was killed by SIGKILL, twice"), ("exit", "exit code 0, twice")])
def test_a_sample_that_kills_its_process_twice_is_given_up(pool, how, message):
    outcome = score(pool, how)
    assert (outcome.status, outcome.attempts) == ("crash", 2)
    assert message in outcome.error


def test_what_a_function_prints_disturbs_nothing(pool):
    assert score(pool, "print").score == 5.5


def test_no_secret_and_no_heavy_import_reaches_a_reward_process(function_file, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-1")
    monkeypatch.setenv("MY_API_KEY", "canary-2")
    with RewardPool(RewardSpec(function_file), num_workers=1, timeout_s=5.0) as pool:
        parts = score(pool, "look around").parts
    assert parts["loaded"] == ""
    assert "canary" not in parts["environment"]


def test_async_functions_are_awaited(function_file):
    with RewardPool(RewardSpec(function_file, "slowly"), num_workers=1, timeout_s=5.0) as pool:
        assert [score(pool, "x").score for _ in range(2)] == [3.0, 3.0]


def test_a_ground_truth_that_is_no_plain_data_is_refused_by_name(pool):
    with pytest.raises(ValueError, match="ground truth of sample 0 is a set"):
        score(pool, "x", ground_truth={1})


def test_a_file_that_cannot_be_loaded_is_told_at_start(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    with pytest.raises(
        RewardFunctionError, match=r"broken\.py can't be loaded: (?s:.*)No module named 'nothing_like_this'"
    ):
        RewardPool(RewardSpec(str(tmp_path / "broken.py")), num_workers=2, timeout_s=1.0).start()


def test_a_file_that_never_finishes_loading_is_given_up(tmp_path):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(1000)\n")
    started = time.monotonic()
    pool = RewardPool(RewardSpec(str(tmp_path / "endless.py")), num_workers=1, timeout_s=1.0, start_timeout_s=0.3)
    with pytest.raises(RewardFunctionError, match="loading took longer"):
        pool.start()
    assert time.monotonic() - started < 10


def refuse_processes(monkeypatch, after):
    """From the process number `after` on the system has no room for another."""
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            if len(started) >= after:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            started.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", Popen)


def test_a_process_that_cannot_be_started_is_told_at_once(function_file, monkeypatch):
    refuse_processes(monkeypatch, after=0)
    started = time.monotonic()
    with pytest.raises(RewardFunctionError, match=r"Resource temporarily unavailable(?s:.*)reward\.num_workers"):
        RewardPool(RewardSpec(function_file), num_workers=2, timeout_s=1.0).start()
    assert time.monotonic() - started < 5


def test_samples_end_with_the_reason_why_a_killed_process_was_not_replaced(function_file, monkeypatch):
    refuse_processes(monkeypatch, after=1)
    with RewardPool(RewardSpec(function_file), num_workers=1, timeout_s=5.0) as pool:
        futures = [pool.submit(RewardSample("s", "s", text, "1")) for text in ("die", "four")]
        outcomes = [future.result(timeout=10) for future in futures]
        assert [outcome.status for outcome in outcomes] == ["crash", "crash"]
        assert all("Resource temporarily unavailable" in outcome.error for outcome in outcomes)
        with pytest.raises(RuntimeError, match="Resource temporarily unavailable"):
            pool.submit(RewardSample("s", "s", "four", "1"))


def test_shutdown_kills_all_and_ends_what_waits(function_file):
    pool = RewardPool(RewardSpec(function_file), num_workers=2, timeout_s=60.0)
    pool.start()
    grandparent = int(score(pool, "fork").score)
    futures = [pool.submit(RewardSample("s", "s", "spin in C", "1")) for _ in range(5)]
    time.sleep(0.2)
    pids = pool.process_ids
    assert grandparent in pids
    pool.shutdown()
    pool.shutdown()
    assert {future.result(timeout=1).status for future in futures} == {"crash"}
    assert wait_for_death(pids)
    with pytest.raises(RuntimeError, match="not running"):
        pool.submit(RewardSample("s", "s", "x", "1"))


def test_processes_die_with_a_parent_that_is_killed(function_file):
    script = (
        "import sys, time\n"
        "from hrl.reward.function import RewardSpec\n"
        "from hrl.reward.pool import RewardPool, RewardSample\n"
        "pool = RewardPool(RewardSpec(sys.argv[1]), num_workers=2, timeout_s=600.0)\n"
        "pool.start()\n"
        "pool.submit(RewardSample('s', 's', 'spin in C', '1'))\n"
        "time.sleep(0.5)\n"
        "sys.stdout.write(' '.join(map(str, pool.process_ids)) + '\\n'); sys.stdout.flush()\n"
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


def test_a_pool_without_workers_or_deadline_is_refused():
    with pytest.raises(ValueError, match="num_workers=0"):
        RewardPool(RewardSpec(), num_workers=0, timeout_s=1.0)
