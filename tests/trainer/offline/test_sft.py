from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from hrl.metrics import StepMetrics
from hrl.trainer.offline.sft import SFTTrainer, perplexity
from hrl.trainer.offline.trainer import OfflineTrainer


@pytest.mark.parametrize(
    ("nll", "expected"),
    [(0.0, 1.0), (math.log(3.0), 3.0), (709.78, math.exp(709.78)), (709.79, math.inf), (4000.0, math.inf)],
)
def test_a_perplexity_that_no_float_holds_is_infinite(nll: float, expected: float) -> None:
    assert perplexity(nll) == pytest.approx(expected)


def test_a_loss_that_is_not_finite_stays_visible() -> None:
    assert perplexity(math.inf) == math.inf and math.isnan(perplexity(math.nan))


def test_a_model_that_has_diverged_is_trained_and_validated_on(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = StepMetrics()
    metrics["train/nll"] = 4000.0
    monkeypatch.setattr(OfflineTrainer, "train_step", lambda *_: "batch")
    monkeypatch.setattr(OfflineTrainer, "validate", lambda _: {"val/a/loss": 4000.0, "val/a/n": 2.0})
    trainer = object.__new__(SFTTrainer)
    assert trainer.train_step(SimpleNamespace(), metrics) == "batch"  # type: ignore[arg-type]
    assert metrics["train/perplexity"] == math.inf
    assert trainer.validate() == {"val/a/loss": 4000.0, "val/a/n": 2.0, "val/a/perplexity": math.inf}
