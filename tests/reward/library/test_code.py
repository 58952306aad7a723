"""Programs as answers, where a run scores them: beside each other, within the deadline, by name and by data source."""

import pytest

from hrl.processes.sandbox import sandbox_limit
from hrl.reward.library.base import ArgumentError
from hrl.reward.library.catalogue import make
from hrl.reward.pool import RewardPool, RewardRow
from hrl.reward.spec import RewardSpec
from tests.reward.settings import reward

pytestmark = pytest.mark.skipif(sandbox_limit() is not None, reason=f"no sandbox here: {sandbox_limit()}")

DOUBLE = {"fn_name": "double", "inputs": ["4", "5"], "outputs": ["8", "10"]}


def test_programs_are_scored_in_the_pool_and_none_takes_the_process_along():
    spec = RewardSpec.of_config(reward(timeout_s=6.0), ("apps", "numeric"))
    assert RewardSpec.from_plain(spec.to_plain()) == spec and spec.source.deadline_s == pytest.approx(5.4)
    samples = {
        "slow": ("apps", "import time\ndef double(x): time.sleep(60)", DOUBLE),
        "quick": ("apps", "def double(x): return x * 2", DOUBLE),
        "half": ("apps", "def double(x): return 8", DOUBLE),
        "kills": ("apps", "import os\nos.kill(os.getppid(), 9)\nos.killpg(0, 9)", DOUBLE),
        "sum": ("numeric", "12", "12"),
        "bad row": ("apps", "pass", "12"),
    }
    with RewardPool(spec, reward(timeout_s=6.0)) as pool:
        (process,) = pool._processes
        futures = {
            name: pool.submit(
                RewardRow(name, source, truth), said if truth == "12" else f"```python\n{said}\n```", name
            )
            for name, (source, said, truth) in samples.items()
        }
        done = {name: future.result(60) for name, future in futures.items()}
        assert pool._processes == {process}
    scores = {name: outcome.score for name, outcome in done.items() if outcome.status == "ok"}
    assert scores == {"slow": 0.0, "quick": 1.0, "half": 0.5, "kills": 0.0, "sum": 1.0}
    assert done["slow"].parts["timeouts"] == 1.0 and done["quick"].duration_s < done["slow"].duration_s
    assert done["bad row"].status == "error" and "has no tests for programs" in str(done["bad row"].error)


def test_the_arguments_are_checked_and_the_deadline_follows_from_the_run():
    section = reward(timeout_s=10.0, functions=None)
    entry = type(section).model_validate({"functions": [{"name": "code", "partial": True}]}).functions
    spec = RewardSpec.of_config(section.model_copy(update={"functions": entry}), ())
    assert spec.source.arguments == {"partial": True, "deadline_s": 9.0}
    for wrong in ({"most": 0}, {"deadline_s": 0}, {"time_s": 0}):
        with pytest.raises(ArgumentError, match="must be"):
            make("code", wrong)
