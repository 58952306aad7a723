"""Hostile checkpoints, as they may come from a stranger: their manifests, states and records."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from hrl.cluster.checkpoints import STATE_FILE, CheckpointStore, check_data, load_state
from hrl.cluster.manifest import MANIFEST, Manifest, _sealed
from hrl.cluster.precision import with_dtypes
from hrl.config import compose_cli
from hrl.config.outline import outline_of
from hrl.data.order import Position, differences
from hrl.preflight.findings import Findings
from hrl.preflight.folder_plan import FolderPlan
from hrl.preflight.resume_look import look_at_changes
from hrl.workers.engine.background import recorded
from hrl.workers.engine.checkpoint import FORMAT, _SavedState
from tests.fuzz.cases import NoCaseError, Target
from tests.fuzz.values import BAD_TEXT, changed, changes, json_values, names, plain, scalars

DATA = {"rows": 9, "shuffle": True, "seed": 1, "tokens": "d1", "answers": "a1", "columns": {"prompt": "p1"}}
INPUTS = {"kind": "ppo", "models": {"actor": "a1"}, "tokenizer": "t1", "code": {"f.py": "c"}, "versions": {"hrl": "1"}}
EMPTY = {"size": 0, "xxh3_128": xxh3_128_hexdigest(b"")}
RECORD = {"files": {"shard-1.safetensors": EMPTY}}
RECORD_OF_OLDER = {"files": {"shard-1.safetensors": 0}}
OF_A_RANK = {
    "format": FORMAT,
    "contents": ["model"],
    "world_size": 1,
    "schedule_steps": 1,
    "moment_steps": {"w": 1},
    "tensors": {"model.w": [2, 3]},
    "weights_checksum": 1,
    "weights_dtypes": ["torch.float32"],
}
MANIFESTED = {"format": 1, "step": 5, "score": None, "hrl": "1", "files": {STATE_FILE: EMPTY}}


@functools.cache
def config() -> Any:
    return with_dtypes(compose_cli(["trainer.device=cpu"]), "cpu")


def state() -> dict[str, Any]:
    return {
        "step": 5,
        "data_position": {"epoch": 0, "offset": 4},
        "data": DATA,
        "contents": ["model"],
        "config": config().model_dump(mode="json"),
        "inputs": INPUTS,
        "ranks": {"actor": 1},
        "kl_coef": 0.1,
        "reward_shaping": {},
    }


def altered(honest: dict[str, Any], depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """An honest object of which some fields, or fields of these, are something else; other fields may come with it."""
    fields = st.sampled_from(sorted(honest))
    values = st.one_of(json_values, st.just(None))
    if depth > 1:
        inner = [altered(value, depth - 1) for value in honest.values() if isinstance(value, dict) and value]
        values = st.one_of(values, *inner)
    wrong = st.dictionaries(st.one_of(fields, fields, names), values, min_size=1, max_size=2)
    left_out = st.sets(fields, max_size=1)
    return st.builds(
        lambda w, out: {**{name: honest[name] for name in honest if name not in out}, **w}, wrong, left_out
    )


def listing(honest: dict[str, Any], right: Any) -> st.SearchStrategy[dict[str, Any]]:
    """An honest object that lists files of any name, with a right entry as a rule; or one that is altered elsewhere."""
    entry = st.one_of(st.just(right), st.just(right), json_values)
    files = st.dictionaries(st.one_of(names, st.sampled_from(BAD_TEXT)), entry, max_size=2)
    listed = st.builds(lambda more: honest | {"files": honest["files"] | more}, files)
    return st.one_of(listed, altered(honest))


def text_of(case: Any) -> str:
    """The JSON of a case.

    Raises:
        NoCaseError: It is nested deeper than JSON is written.
    """
    try:
        return json.dumps(plain(case))
    except (RecursionError, ValueError) as error:
        raise NoCaseError(str(error)) from error


def parse_manifest(case: Any) -> None:
    """Its seal is right, so that nothing but its content is wrong."""
    try:
        text = _sealed(plain(case))
    except (RecursionError, ValueError) as error:
        raise NoCaseError(str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        store.path(5).mkdir()
        (store.path(5) / STATE_FILE).touch()
        (store.path(5) / MANIFEST).write_text(text)
        store.steps(), store.best()
        store.choose("auto", None)


def parse_bytes(case: list[Any]) -> None:
    text = changed(_sealed(MANIFESTED).encode(), case).decode(errors="surrogateescape")
    Manifest.parse(text, MANIFEST)


def resume(case: Any) -> None:
    """As a run does that begins with it, up to its first process."""
    text = text_of(case)
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        path = store.path(5)
        path.mkdir()
        (path / STATE_FILE).write_text(text)
        Manifest.of(path, 5).write(path)
        store.choose("auto", None)
        saved = load_state(path, ("data", "data_position"))
        plan = FolderPlan(path.parent, path, continues=True, state=saved)
        str(plan)
        differences(saved["data"], DATA)
        Position.from_dict(saved["data_position"])
        findings = Findings()
        look_at_changes(findings, config(), outline_of(config()), plan, INPUTS)
        list(map(str, (*findings.changes, *findings.problems, *findings.notes)))
        check_data(path, saved["data"], DATA)


def read_records(case: Any) -> None:
    """As a rank does."""
    text = text_of(case)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "written-rank-00000.json"
        record.write_text(text)
        recorded(record)


def read_state_of_rank(case: Any) -> None:
    text = text_of(case)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / STATE_FILE).write_text(text)
        _SavedState.read(Path(folder))


SCORES = st.builds(lambda score: MANIFESTED | {"score": score}, scalars)
MANIFESTS = st.one_of(listing(MANIFESTED, EMPTY), SCORES)
RECORDS = st.one_of(listing(RECORD, EMPTY), listing(RECORD_OF_OLDER, 0))
TARGETS = [
    Target("manifests with a right seal", MANIFESTS, parse_manifest, weight=0.5),
    Target("damaged manifests", changes, parse_bytes),
    Target("states of a driver", altered(state()), resume, weight=0.25),
    Target("records of written files", RECORDS, read_records, weight=0.5),
    Target("states of a rank", altered(OF_A_RANK), read_state_of_rank, weight=0.5),
]
