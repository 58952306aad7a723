"""Whether two run folders hold the same run, at zero tolerance: one that went straight on, and one that was killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hrl.cluster.checkpoints import CheckpointStore
from hrl.cluster.manifest import MANIFEST, damages
from hrl.report.run_folder import RunFolder, read_config, read_jsonl, read_metrics

#: Metrics of time and memory, and seconds of episodes, which no two runs share, and what each process of a run has sent
#: or could not write.
NOISE = (
    "checkpoint/upload",
    "log/",
    "timing",
    "perf/",
    "weight_sync/",
    "tracking/",
    "time",
    "reward/call_s_",
    "episode/engine_s/",
    "episode/environment_s/",
    "engine_s",
    "environment_s",
)
#: The keys that say where a run lies.
PLACES = ("default_local_dir", "default_remote_dir")


def differences(straight: Path, other: Path) -> list[str]:
    """What the run in `other` has otherwise than the one in `straight`, a phrase each; empty for the same run."""
    return [
        *_of_metrics(straight, other),
        *_of_samples(straight, other),
        *_of_alarms(straight, other),
        *of_checkpoints(straight, other),
        *([] if _config(read_config(straight)) == _config(read_config(other)) else ["config.yaml differs"]),
    ]


def _of_metrics(straight: Path, other: Path) -> list[str]:
    one, two = ([_quiet(record) for record in read_metrics(folder)] for folder in (straight, other))
    steps = [[record["step"] for record in records] for records in (one, two)]
    if steps[0] != steps[1]:
        return [f"metrics.jsonl has the steps {steps[1]}, not {steps[0]}"]
    found = []
    for a, b in zip(one, two, strict=True):
        keys = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
        if keys:
            found.append(f"step {a['step']}: {keys[0]} is {b.get(keys[0])}, not {a.get(keys[0])} ({len(keys)} differ)")
    return found


def _quiet(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.startswith(NOISE)}


def _of_samples(straight: Path, other: Path) -> list[str]:
    """Of training and of validation; a uid comes as often as it does in the straight run, in each step."""
    names = [sorted(file.name for file in (folder / "rollouts").glob("*.jsonl")) for folder in (straight, other)]
    if names[0] != names[1]:
        return [f"rollouts are {names[1]}, not {names[0]}"]
    found, seen = [], Counter[str]()
    for name in names[0]:
        one, two = ([*map(_quiet, read_jsonl(folder / "rollouts" / name))] for folder in (straight, other))
        if one != two:
            found.append(f"the samples in {name} differ")
        if name.startswith("step_"):
            seen.update({record["uid"] for record in two})
    again = [uid for uid, count in seen.items() if count > 1]
    return [*found, *([f"{len(again)} uids come in several steps, such as {again[0]}"] if again else [])]


def _of_alarms(straight: Path, other: Path) -> list[str]:
    files = [folder / "alarms.jsonl" for folder in (straight, other)]
    one, two = (read_jsonl(file) if file.exists() else [] for file in files)
    return [] if one == two else [f"{len(two)} alarms, not the same {len(one)}"]


def of_checkpoints(straight: Path, other: Path) -> list[str]:
    """Weights, moments, generators, the driver's state: every byte but the name of the run folder and its store."""
    stores = [CheckpointStore(RunFolder.checkpoints_in(folder)) for folder in (straight, other)]
    if stores[0].steps() != stores[1].steps():
        return [f"checkpoints of the steps {stores[1].steps()}, not {stores[0].steps()}"]
    found = []
    for step in stores[0].steps():
        one, two = (store.path(step) for store in stores)
        files = [sorted(file.relative_to(at) for file in at.rglob("*") if file.is_file()) for at in (one, two)]
        if files[0] != files[1]:
            found.append(f"checkpoint {step} has other files")
            continue
        found += [f"checkpoint {step}: {damage}" for damage in damages(two)]
        for file in files[0]:
            if file.name == MANIFEST or _content(one / file) == _content(two / file):
                continue
            found.append(f"checkpoint {step}: {file} differs")
    return found


def _content(file: Path) -> Any:
    """The bytes of a file; of a record or the driver's state, without what names the folder or hashes such a file."""
    if file.name == "state.json" and "config" in (state := json.loads(file.read_text())):
        return state | {"config": _config(state["config"])}
    return file.read_bytes()


def _config(config: dict[str, Any]) -> dict[str, Any]:
    trainer = {key: value for key, value in config["trainer"].items() if key not in PLACES}
    return config | {"trainer": trainer}
