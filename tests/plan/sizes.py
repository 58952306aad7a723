"""Writes docs/sizes.md: what each file of `configs/size` sets, and the memory that it takes in every phase.

    python -m tests.plan.sizes > docs/sizes.md

The models' configurations are those of `tests/plan/models.py`: nothing is fetched.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path

from omegaconf import OmegaConf

from hrl.cluster.precision import with_dtypes
from hrl.config.compose import compose_kind
from hrl.config.outline import outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import PPO, config_folder
from hrl.config.section import flatten
from hrl.models.adapter import adapter_of
from hrl.models.footprint import Footprint, footprint
from hrl.models.loading import ModelSource
from hrl.preflight.memory_ledger import GIB, Column, Ledger, gib, ledgers_of
from tests.plan.models import NAMED, folder_of

#: In the order of the page: from the least hardware to the most.
SIZES = ("7b_adapter_1x24gb", "7b_1x80gb", "7b_8x80gb", "32b_8x80gb", "30b_a3b_16x80gb", "70b_64x80gb")
ROWS = "data.train_files=rows.jsonl"
_MODELS = tempfile.TemporaryDirectory(prefix="sizes-")  # goes with the process
RECIPE = "recipe=grpo"
"""Has a reference, which most recipes have not: what fits with it fits without."""
_INTRODUCTION = """# Sizes

A size is a file of `configs/size`: a model, and the layout with which it fits certain cards. It goes with any recipe,
because no key stands in both: a recipe says what is learnt from, a size where.

```bash
hrl train grpo size=7b_8x80gb data.train_files=train.parquet 'reward.functions=[my_reward.py]'
```

Any key can be set beside it, `actor_rollout_ref.model.path` first: another model of about the same size has about the
same ledger, and `hrl check` on the machine, or `hrl plan --gpus N --gpu NAME` anywhere, adds it up. No GPU has run any
of these yet ([status](status.md)); [status](status.md) says which have been rehearsed.

| size | model | cards | lengths | GiB of a card | of a machine's own memory |
| --- | --- | --- | --- | --- | --- |
"""
_REHEARSING = """
## Rehearsing a size

A mistake in a line for 64 cards costs an hour of 64 cards. `hrl rehearse` tries the line on a laptop first:

```bash
hrl rehearse grpo size=32b_8x80gb data.train_files=train.parquet 'reward.functions=[my_reward.py]'
```

It makes a tiny model of the same family from config and tokenizer alone: a few layers of every kind, narrow, with the
same vocabulary and random weights. The line itself then runs with it, in a temporary folder: your rows, reward function
and environment, the real tokenizer, engine and Ray, FSDP2 over gloo. The layout keeps its shape: eight cards in groups
of four become four processes in groups of two. After two steps and their checkpoints the run is killed and started
again, and has to go on after the second step, make a third and end. A table says what was rehearsed, what was reduced
and what was not rehearsed; the exit status is 0 if everything passed. [The command](commands.md#rehearse) has its
options.

A rehearsal reads a model's config and tokenizer from its folder or from the hub's cache, fetches them if they are not
there, and never the weights. It says nothing about the memory of a GPU, which is what the tables below are for.

"""
_LEDGERS = """## Ledgers

What is on the fullest card at the worst moment of each phase, in GiB, with `recipe=grpo`: the sums of `hrl check`,
estimates ([what it counts](gpus-and-memory.md#see-what-a-run-would-take)) within a tenth of what was measured, either
way ([how right it is](gpus-and-memory.md#how-right-it-is)). A card of 24 GB is counted as 22.4 GiB and one of 80 GB as
74.5. Host memory is that of one machine, most of it while a checkpoint is written.
"""


def capacity_of(size: str) -> float:
    """Bytes of a card of a size, as its name says."""
    return float(re.search(r"x(\d+)gb$", size)[1]) * 1e9


def configuration(size: str, *more: str) -> PPOTrainerConfig:
    """A size as a line on GPUs has it."""
    return with_dtypes(compose_kind(PPO, [f"size={size}", ROWS, *more]), "cuda")


@cache
def folder_of_model(name: str) -> Path:
    """A folder with the config.json of a model on the hub."""
    return folder_of(NAMED[name], Path(_MODELS.name) / name.rpartition("/")[2])


@cache
def size_of(name: str, rank: int) -> Footprint:
    """The sizes of a model with an adapter of this rank; 0 is none."""
    config = compose_kind(PPO, [ROWS, f"actor_rollout_ref.model.lora_rank={rank}"])
    adapter = adapter_of(config.actor_rollout_ref.model, 1)
    options = {"trust_remote_code": False, "max_model_len": 4096}
    return footprint(ModelSource.to_look_at(folder_of_model(name), {}, adapter=adapter, **options))


def ledgers(size: str, *more: str) -> tuple[Ledger, Ledger]:
    """The ledgers of a card, and of the host memory of a machine."""
    config = configuration(size, *more)
    model = config.actor_rollout_ref.model
    sizes = {role: size_of(model.path, model.lora_rank) for role in outline_of(config).models}
    card, host = ledgers_of(config, sizes, "cuda", capacity_of(size))
    return card, host


def page() -> Iterator[str]:
    """Yield the page."""
    yield _INTRODUCTION
    for size in SIZES:
        config, (card, host) = configuration(size, RECIPE), ledgers(size, RECIPE)
        data, trainer = config.data, config.trainer
        cards = f"{trainer.nnodes * trainer.n_gpus_per_node} × {capacity_of(size) / 1e9:.0f} GB"
        lengths = f"{data.max_prompt_length:,} + {data.max_response_length:,}"
        most = f"{gib(card.peak.num_bytes)} of {capacity_of(size) / GIB:.1f}"
        cells = (f"[`{size}`](#{size})", config.actor_rollout_ref.model.path, cards, lengths)
        yield f"| {' | '.join((*cells, f'{most} ({card.peak.name})', gib(host.peak.num_bytes)))} |\n"
    yield _REHEARSING
    yield _LEDGERS
    for size in SIZES:
        yield from _section(size)


def _section(size: str) -> Iterator[str]:
    file = config_folder() / "size" / f"{size}.yaml"
    said = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("# ")]
    config = compose_kind(PPO, [f"size={size}", ROWS])
    keys = dict(flatten(OmegaConf.to_container(OmegaConf.load(file)), PPOTrainerConfig))
    yield f"\n### {size}\n\n{' '.join(said[1:])}\n\n| key | value |\n| --- | --- |\n"
    for key in keys:
        value = attrgetter(key)(config)
        yield f"| `{key}` | {str(value).lower() if isinstance(value, bool) else value} |\n"
    card, host = ledgers(size, RECIPE)
    yield f"\n| phase | {' | '.join(Column)} | together |\n| --- {'| --- ' * len(Column)}| --- |\n"
    for phase in card.phases:
        cells = [phase.in_column(column) for column in Column]
        shown = " | ".join(gib(number) if number else "" for number in (*cells, phase.num_bytes))
        yield f"| {phase.name} | {shown} |\n"
    peaks = "; ".join(f"{phase.name} {gib(phase.num_bytes)}" for phase in host.phases)
    yield f"\nMost of it in {card.peak.name}: {card.peak.largest.label}. Host memory of a machine: {peaks}.\n"


if __name__ == "__main__":
    sys.stdout.writelines(page())
