"""Which pairs the reference of DPO is asked for, and that a resumed run gets the same answers."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hrl.config.load import validate_kind
from hrl.config.run_kind import DPO
from hrl.data.offline.pairs import PairDataset
from hrl.data.order import EpochOrder, MixedOrder
from hrl.protocol import DataProto
from hrl.report.live import in_silence
from hrl.trainer.offline.dpo import DPOTrainer, each_once
from tests.data.conftest import make_tokenizer

PAIRS, BATCH = 11, 3


class Asked(DPOTrainer):
    """Its log-probs depend on the whole forward pass, as those of a real model do in their last bits.

    Attributes:
        passes: the pairs of each forward pass.
        loaded: a checkpoint's weights have replaced the first model.
    """

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)
        self.passes: list[list[int]] = []
        self.loaded = False

    def init_workers(self) -> None:
        self._workers = SimpleNamespace(
            load=self.take,
            save=lambda *_: [],
            bytes_to_save=lambda _: {"model": 1},
            finish_save=list,
            peak_memory=list,
            trained=[],
            ranks=dict,
        )

    def take(self, folder: Path) -> None:
        self.loaded = True

    def log_probs(self, batch: DataProto) -> Tensor:
        assert not self.loaded
        rows = batch.non_tensor_batch["index"].tolist()
        self.passes.append(rows[::2])
        return -torch.tensor([[row + slot * 0.5 + hash(tuple(rows)) % 999 * 1e-6] for slot, row in enumerate(rows)])

    def make_steps(self, count: int) -> list[list[float]]:
        """The reference's log-probs of each step's batch."""
        found = []
        for _ in range(count):
            found.append(self.next_batch().batch["ref_sequence_log_prob"].tolist())
            self.global_steps += 1
        return found


def trainer(folder: Path, total: int, validate: bool = False) -> Asked:
    """Ready for its first step, or for the one after ``folder``'s newest checkpoint."""
    config = validate_kind(DPO, {"data.train_batch_size": BATCH, "checkpoint.save_contents": ["model"]})
    folder.mkdir(exist_ok=True)
    tokenizer = make_tokenizer()
    rows = [{"prompt": str(n), "chosen": "y", "rejected": "n"} for n in range(PAIRS)]
    train, val = (PairDataset(rows, tokenizer, config.data, stop_ids=[tokenizer.eos_token_id]) for _ in range(2))
    reporter = SimpleNamespace(
        folder=SimpleNamespace(path=folder, checkpoints=folder / "checkpoints", make_log_durable=lambda: None),
        phase=lambda name: nullcontext(),
        stage=in_silence,
        console=SimpleNamespace(note=lambda line: None),
        stood_still=lambda name, seconds: None,
    )
    made = Asked(
        config,
        tokenizer,
        {},
        SimpleNamespace(),
        train_dataset=train,
        val_dataset=val if validate else None,
        reporter=reporter,
        total_training_steps=total,
    )
    made.init_workers()
    made.restore()
    return made


def test_a_short_run_asks_for_its_own_pairs_only(tmp_path: Path) -> None:
    short = trainer(tmp_path, total=2)
    epoch = short.train_dataset.order.epoch(0).tolist()
    assert short.passes == [epoch[:3], epoch[3:6]]
    assert len(short.make_steps(2)) == 2
    with pytest.raises(ValueError, match="were not computed"):
        short.next_batch()


def test_a_long_run_asks_for_every_pair_once_and_for_the_validation_set(tmp_path: Path) -> None:
    long = trainer(tmp_path, total=50, validate=True)
    *blocks, validation = long.passes
    assert sorted(chain.from_iterable(blocks)) == validation == list(range(PAIRS))
    assert len(long.val_dataset.batch([4]).batch["ref_sequence_log_prob"]) == 2


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_resumed_run_has_the_reference_of_one_that_was_never_interrupted(tmp_path: Path, stop: int) -> None:
    total = 8  # more than two epochs of three batches, with two pairs left over in each
    straight = trainer(tmp_path / "straight", total).make_steps(total)
    first = trainer(tmp_path / "run", stop)  # not even the number of steps changes what was asked
    assert first.make_steps(stop) == straight[:stop]
    first.save()
    first.finish_save()
    resumed = trainer(tmp_path / "run", total)
    assert (resumed.global_steps, resumed.loaded) == (stop, True)
    assert resumed.make_steps(total - stop) == straight[stop:]


def test_a_resumed_run_asks_only_for_what_is_left(tmp_path: Path) -> None:
    first = trainer(tmp_path, total=3)
    first.make_steps(2)
    first.save()
    first.finish_save()
    epoch = first.train_dataset.order.epoch(0).tolist()
    assert trainer(tmp_path, total=3).passes == [epoch[6:9]]
    assert trainer(tmp_path, total=2).passes == []


@pytest.mark.parametrize("weights", [(), (5.0, 1.0), (1.0, 9.0)])
def test_every_row_is_asked_for_once_whatever_the_first_epoch_draws(weights):
    order = MixedOrder(11, 3, True, (4, 7), weights) if weights else EpochOrder(11, 3, True)
    rows, first = each_once(order), order.epoch(0).tolist()
    assert sorted(rows) == list(range(11))
    assert rows[: len({*first})] == list(dict.fromkeys(first))
    if weights:
        assert len({*first}) < 11, "a small source is seen several times"
        assert {*chain.from_iterable(order.epoch(n).tolist() for n in range(9))} > {*first}
