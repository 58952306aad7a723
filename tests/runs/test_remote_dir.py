"""A run whose machine is gone goes on with the same command on another one, from what it had sent to its store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hrl.cluster.remote_store import RemoteStore, RemoteStoreError
from hrl.report.run_folder import read_jsonl
from tests.cluster.s3_server import STORES, s3_server
from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import TWO_ROWS, Runner

pytestmark = pytest.mark.cluster


@pytest.mark.skipif(not STORES.is_dir(), reason="make install-dev installs the server")
def test_a_run_goes_on_elsewhere_from_its_store(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: str, steps: int, *overrides: str) -> Path:
        run_in_process(
            f"trainer.default_local_dir={tmp_path / folder}",
            f"trainer.total_training_steps={steps}",
            "trainer.logger=console-json",
            f"actor_rollout_ref.model.path={runner.model}",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            f"reward.custom_reward_function.path={runner.reward}",
            *TWO_ROWS,
            *overrides,
        )
        return tmp_path / folder

    store = "trainer.default_remote_dir=s3://runs/one"
    with in_process(), s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RemoteStoreError, match="s3://runs/one"):  # before anything starts: there is no bucket
            run("lost", 2, store, "trainer.save_freq=1")
        server.make_bucket("runs")
        straight = run("straight", 3, "trainer.save_freq=3")
        lost = run("lost", 2, store, "trainer.save_freq=1")
        assert RemoteStore("s3://runs/one").steps() == [1, 2]
        shutil.rmtree(lost)
        capsys.readouterr()
        elsewhere = run("elsewhere", 3, store, "trainer.save_freq=1")
        said = capsys.readouterr().out
        fork = run(
            "fork",
            2,
            "trainer.save_freq=2",
            *(
                "trainer.resume_mode=resume_path",
                "trainer.resume_from_path=s3://runs/one/checkpoints/step_2",
            ),
        )
        assert RemoteStore("s3://runs/one").steps() == [2, 3]
    assert "fetched s3://runs/one/checkpoints/step_2" in said and "continuing after step 2" in said
    assert [record["step"] for record in read_jsonl(elsewhere / "metrics.jsonl")] == [1, 2, 3]
    weights = [
        load_file(each / "checkpoints" / "step_3" / "hf" / "model.safetensors") for each in (straight, elsewhere)
    ]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    assert json.loads((fork / "outcome.json").read_text())
    everything = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"a-canary-that-no-file-may-have" not in everything
