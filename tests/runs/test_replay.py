"""`hrl replay` computes a mini-batch that was not applied again, bit for bit, and finds where it broke."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from hrl.cli import main
from hrl.trained.replay import ReplayError, replay
from hrl.workers.policy import Policy
from hrl.workers.value_model import ValueModel
from tests.runs.in_process import in_process, run_in_process
from tests.runs.runner import Runner
from tests.runs.test_nonfinite import overrides

pytestmark = [pytest.mark.engine]


def poison(owner: Any, column: str, step: int, patch: pytest.MonkeyPatch) -> None:
    """Put infinity into a column of the rows of a step's update, which the driver no longer looks at."""
    update = owner.update

    def poisoned(self: Any, batch: Any, request: Any) -> Any:
        if request.step == step:
            row = request.plan.mini_batches[0].micro_batches[-1][0]
            batch.batch[column] = batch.batch[column].clone()
            batch.batch[column][row, 0] = math.inf
        return update(self, batch, request)

    patch.setattr(owner, "update", poisoned)


@pytest.fixture(scope="module")
def broken(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of every step, whose policy's third step and whose critic's second were not applied."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    with pytest.MonkeyPatch.context() as patch, in_process():
        poison(Policy, "advantages", 3, patch)
        poison(ValueModel, "returns", 2, patch)
        run_in_process(
            *overrides(runner, folder, 3),
            "trainer.save_freq=1",
            "trainer.max_ckpt_to_keep=null",
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=true",
            f"critic.model.path={runner.model}",
            "actor_rollout_ref.actor.use_dynamic_bsz=false",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            "critic.use_dynamic_bsz=false",
            "critic.ppo_micro_batch_size_per_gpu=2",
        )
    return folder


@pytest.mark.parametrize("name", ["step_3_rank_0.actor-0", "step_2_rank_0.critic-0"])
def test_every_number_comes_out_as_the_run_had_it(name: str, broken: Path) -> None:
    found = replay([broken / "nonfinite" / f"{name}.json"])
    assert found.has_same_weights and found.is_reproduced
    losses = [each.loss for each in found.micro_batches]
    assert len(losses) == 2 and math.isfinite(losses[0]) and losses[0] != 0 and not math.isfinite(losses[1])
    assert losses[0] == found.dumps[0].losses[0], "to the last bit"
    assert found.columns == ["advantages" if "actor" in name else "returns"]
    assert found.gradients and all(each.layer is None for each in found.micro_batches), "the model itself is sound"
    record = json.loads((broken / "nonfinite" / f"{name}.json").read_text())
    assert set(found.gradients) == set(record["not_finite"]["gradients"])


def test_the_command_says_what_it_found(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with in_process():
        assert main(["replay", str(broken / "nonfinite" / "step_3_rank_0.actor-0.json")]) == 0
    said = capsys.readouterr().out
    assert "step 3, update actor, mini-batch 0: 1 of 1 rank(s), 4 rows" in said
    assert f"weights: {broken}/checkpoints/step_2 (the checksum is that of the step's)" in said
    assert "columns that are not finite: advantages" in said and "gradient norm nan (as recorded)" in said
    assert said.endswith("\nreproduced\n")


def test_other_weights_are_said_to_be_others(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = broken / "nonfinite" / "step_3_rank_0.actor-0.json"
    with in_process():
        assert main(["replay", str(file), "--checkpoint", str(broken / "checkpoints" / "step_1")]) == 1
    said = capsys.readouterr().out
    assert "by their checksum not those of the step" in said and said.endswith("\nnot reproduced\n")


def test_the_layer_whose_output_is_not_finite_is_named(broken: Path, runner: Runner, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(runner.model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    found = replay([broken / "nonfinite" / "step_3_rank_0.actor-0.json"], model=str(model))
    assert not found.has_same_weights and not found.is_reproduced
    assert {each.layer for each in found.micro_batches} == {"model.model.layers.1.mlp.down_proj"}


def test_what_cannot_be_replayed_is_refused(broken: Path, tmp_path: Path) -> None:
    file = broken / "nonfinite" / "step_3_rank_0.actor-0.json"
    with pytest.raises(ReplayError, match="name each rank's once"):
        replay([file, file])
    with pytest.raises(ReplayError, match="has step 2, and .* 3"):
        replay([file, broken / "nonfinite" / "step_2_rank_0.critic-0.json"])
    with pytest.raises(ReplayError, match="can't be read"):
        replay([tmp_path / "none.json"])
    copy = Path(shutil.copy(file, tmp_path / file.name))
    shutil.copy(file.with_suffix(".safetensors"), tmp_path)
    copy.write_text("[{}]")
    with pytest.raises(ReplayError, match="is no JSON object"):
        replay([copy])
    shutil.copy(file, copy)
    with pytest.raises(ReplayError, match="no folder of a run: name weights with --checkpoint"):
        replay([copy])
    record = json.loads(copy.read_text())
    record["request"]["loss"]["policy_loss"]["loss_mode"] = f"{tmp_path}/evil.py:loss"
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    copy.write_text(json.dumps(record))
    with pytest.raises(ReplayError, match="--trust-code"):
        replay([copy], model=record["model"]["path"])
    assert not (tmp_path / "ran").exists()
