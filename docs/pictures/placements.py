"""Draw what runs at once in each placement: `python docs/pictures/placements.py` writes the SVG beside this file.

It is drawn from the folder `placements`, which has the timeline of a profiled step of a run of each placement.
`python docs/pictures/placements.py FOLDER [NAME ...]` first makes these runs, or some, in FOLDER, and keeps their
timelines: PPO with reference, critic and reward model on a small random model, on the CPUs of this machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import vl_convert

from hrl.config import compose_cli
from hrl.metrics import StepMetrics
from hrl.protocol import DataProto
from hrl.report.phases import PHASES
from hrl.trainer.phases import StepPhase
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.trainer.run import run

PICTURE = Path(__file__).with_suffix(".svg")
KEPT = Path(__file__).with_name("placements")
CONFIGS = Path(__file__).parents[2] / "configs" / "placement"
BEFORE = "separate, one phase after another"
STEP = 3
"""The step that is profiled: the first ones still allocate."""
WIDTH = 330
GROUPS = {
    "generation": "#2f6db5",
    "reward": "#a8650a",
    "log-probs and values": "#2f7d4f",
    "update": "#6d4c91",
    "weight sync": "#b3424a",
    "other": "#8a96a1",
}
"""Group of phases → its colour."""


class OneByOne(RayPPOTrainer):
    """Waits for each phase before the next one begins."""

    def run_phases(
        self, phases: Iterable[StepPhase], batch: DataProto, metrics: StepMetrics, *given: Any, **named: Any
    ) -> DataProto:
        """Run the phases of a list one after another."""
        for phase in phases:
            batch = super().run_phases([phase], batch, metrics, *given, **named)
        return batch


def names() -> list[str]:
    """Return what is drawn, in the order of the picture: `separate` first, as it was and as it is."""
    others = sorted(file.stem for file in CONFIGS.glob("*.yaml") if file.stem != "separate")
    return [BEFORE, "separate", *others]


def make_models(folder: Path) -> dict[str, Path]:
    """Write a policy and a classifier of 4 small layers with random weights, and the tokenizer of the bundled model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from hrl.models.source import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("bundled:smollm2-135m-instruct"))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, num_labels=1,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    models = {"policy": LlamaForCausalLM, "scorer": LlamaForSequenceClassification}
    for name, architecture in models.items():
        architecture(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in models}


def arguments(name: str, folder: Path, models: dict[str, Path]) -> list[str]:
    """Return the command line of a run."""
    return [
        "quickstart=ppo",
        f"placement={name.partition(',')[0]}",
        # Pinned pools find their nodes on one machine.
        "trainer.ray_kwargs={resources: {train: 1, sample: 1, large: 1, small: 1}}",
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={STEP}",
        f"trainer.profile={STEP}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.cpu_threads_per_worker=1",
        f"actor_rollout_ref.model.path={models['policy']}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        f"critic.model.path={models['policy']}",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={models['scorer']}",
        "algorithm.use_kl_in_reward=true",
        "data.train_batch_size=8",
        "data.max_response_length=32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "critic.ppo_mini_batch_size=4",
    ]


def keep(name: str, folder: Path, models: dict[str, Path]) -> None:
    """Make a run, and keep the timeline of its profiled step."""
    folder = folder / name.replace(", ", "_").replace(" ", "_")
    run("ppo", compose_cli(arguments(name, folder, models)), trainer_cls=OneByOne if name == BEFORE else None)
    KEPT.mkdir(exist_ok=True)
    timeline = json.loads((folder / "profile" / f"step_{STEP}_timeline.json").read_text())
    file_of(name).write_text(json.dumps(timeline, indent=1) + "\n")


def file_of(name: str) -> Path:
    """Return where the timeline of a placement is kept."""
    return KEPT / f"{name.replace(', ', '_').replace(' ', '_')}.json"


def bars(name: str) -> list[dict[str, Any]]:
    """Return the phases of a timeline, each with its row, group, beginning and end in seconds of the step."""
    events = json.loads(file_of(name).read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    group_of = {phase.title: phase.group or "other" for phase in PHASES}
    around = ("step", "profile")
    spans = [event for event in events if event["ph"] == "X" and event["name"] not in around]
    began = min(event["ts"] for event in spans)
    return [
        {
            "row": rows[event["tid"]],
            "phase": event["name"],
            "group": group_of.get(event["name"], "other"),
            "start": (event["ts"] - began) / 1e6,
            "end": (event["ts"] + event["dur"] - began) / 1e6,
        }
        for event in spans
    ]


def panel(name: str, longest: float) -> dict[str, Any]:
    """Return the chart of a placement, whose axis is as long as that of all."""
    values = bars(name)
    pools = dict.fromkeys(bar["row"] for bar in values if bar["row"] != "driver")
    seconds = max(bar["end"] for bar in values)
    axis = {"title": None, "grid": True, "tickCount": 5, "labelExpr": "datum.label + ' s'"}
    colours = {"domain": list(GROUPS), "range": list(GROUPS.values())}
    return {
        "title": {"text": name, "subtitle": f"{seconds:.2f} s", "anchor": "start", "offset": 4},
        "data": {"values": values},
        "width": WIDTH,
        "height": {"step": 17},
        "mark": {"type": "bar", "stroke": "#ffffff", "strokeWidth": 0.8, "height": {"band": 0.8}},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "title": None, "sort": ["driver", *pools]},
            "x": {
                "field": "start",
                "type": "quantitative",
                "scale": {"domain": [0, longest], "nice": False},
                "axis": axis,
            },
            "x2": {"field": "end"},
            "color": {
                "field": "group",
                "type": "nominal",
                "scale": colours,
                "legend": {"title": None, "orient": "top", "columns": len(GROUPS)},
            },
        },
    }


def draw(file: Path) -> None:
    """Draw a panel for each placement, two beside each other."""
    longest = max(bar["end"] for name in names() for bar in bars(name))
    chart = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "concat": [panel(name, longest) for name in names()],
        "columns": 2,
        "spacing": {"row": 18, "column": 24},
        "config": {"background": "#ffffff", "axis": {"labelFontSize": 10}, "title": {"fontSize": 12}},
    }
    file.write_text(vl_convert.vegalite_to_svg(json.dumps(chart)), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        place = Path(sys.argv[1]).resolve()
        made = make_models(place / "models")
        for each in sys.argv[2:] or names():
            keep(each, place, made)
    draw(PICTURE)
