"""Bombs and canaries: files, folders and answers that would run something or tell a secret, if anything let them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from hrl.config import compose_cli
from hrl.data.files import check_data_file, rows_of_file
from hrl.errors import ConfigError, HrlError
from hrl.models.source import check_weights, resolve_model
from hrl.models.tokenizer import load_tokenizer
from hrl.processes.child_environment import child_environment
from hrl.processes.isolation import isolation_limit
from hrl.protocol import DataProto
from hrl.report.run_folder import read_config, read_jsonl, read_object
from hrl.reward.function import UserFile
from hrl.reward.pool import RewardPool, RewardRow
from hrl.reward.spec import RewardSpec
from tests.chaos import small
from tests.chaos.faults import Fault, Outcome
from tests.reward.hostile import TEXTS

CANARY = "canary-of-a-bomb"


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.canary), "w")


def bomb(folder: Path) -> bytes:
    """Return a pickle that leaves `CANARY` in a folder."""
    return pickle.dumps(Bomb(folder / CANARY))


def torch_bomb(folder: Path, file: Path) -> Path:
    """Write the same as `torch.save` does."""
    torch.save({"weight": Bomb(folder / CANARY)}, file)
    return file


def refused(folder: Path, read: Callable[[], object], *named: str) -> Outcome:
    """Read a bomb, and judge: nothing ran, and one error names the file."""
    began = time.monotonic()
    try:
        read()
        return Outcome(0, time.monotonic() - began, "it was read without a word")
    except (HrlError, ValueError) as error:
        said = str(error)
    seconds = time.monotonic() - began
    if (folder / CANARY).exists():
        return Outcome(0, seconds, f"the bomb went off; then: {said}")
    score = 2 if all(name in said for name in named) else 1
    return Outcome(score, seconds, " ".join(said.split())[:300])


def rows(name: str) -> Callable[[Path], Outcome]:
    """Return the fault of rows that are a pickle under some name."""

    def inject(folder: Path) -> Outcome:
        file = folder / name
        if name.endswith(".npy"):
            np.save(file, np.array([Bomb(folder / CANARY)], dtype=object), allow_pickle=True)
        elif name.endswith(".pt"):
            torch_bomb(folder, file)
        else:
            file.write_bytes(bomb(folder))

        def read() -> None:
            check_data_file(file)
            for _, row in rows_of_file(file):
                if not isinstance(row, dict):  # a row that can't be read says so where it is used
                    raise ValueError(f"{file}: {row}")

        return refused(folder, read, name)

    return inject


def weights(folder: Path) -> Outcome:
    """A model whose only weights are a pickle."""
    model = folder / "model"
    shutil.copytree(small.runner().model, model)
    for file in model.glob("*.safetensors"):
        file.unlink()
    torch_bomb(folder, model / "pytorch_model.bin")
    return refused(folder, lambda: check_weights(resolve_model(str(model))), "pytorch_model.bin", "Convert it")


def disguised_weights(folder: Path) -> Outcome:
    """A model whose safetensors are a pickle."""
    model = folder / "model"
    shutil.copytree(small.runner().model, model)
    torch_bomb(folder, model / "model.safetensors")
    return refused(folder, lambda: check_weights(resolve_model(str(model))), "model.safetensors")


def tokenizer_code(folder: Path) -> Outcome:
    """A model folder whose tokenizer is a Python file."""
    began = time.monotonic()
    model = folder / "model"
    shutil.copytree(small.runner().model, model)
    (model / "mine.py").write_text(f"open({str(folder / CANARY)!r}, 'w')\nclass Mine: pass\n")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        load_tokenizer(str(model))
        said = "loaded as what tokenizer.json says; the Python file was not opened"
    except (HrlError, ValueError, OSError) as error:
        said = " ".join(str(error).split())[:300]
    return Outcome(0 if (folder / CANARY).exists() else 2, time.monotonic() - began, said)


def template(folder: Path) -> Outcome:
    """A chat template that breaks out of its language."""
    from jinja2.exceptions import SecurityError, UndefinedError

    began = time.monotonic()
    tokenizer = load_tokenizer(str(small.runner().model))
    said = ""
    for text in (
        f"{{{{ cycler.__init__.__globals__.os.system('touch {folder / CANARY}') }}}}",
        f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{{{ open('{folder / CANARY}', 'w') }}}}",
    ):
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=text, tokenize=False)
            return Outcome(0, time.monotonic() - began, "it was rendered without a word")
        except (SecurityError, UndefinedError) as error:
            said = str(error)
    return Outcome(0 if (folder / CANARY).exists() else 2, time.monotonic() - began, said)


def configuration(folder: Path) -> Outcome:
    """A configuration with tags of Python."""
    (folder / "evil.yaml").write_text(f"data: !!python/object/apply:os.system ['touch {folder / CANARY}']\n")

    def read() -> None:
        compose_cli(["--config-path", str(folder), "--config-name", "evil"])

    return refused(folder, read, "evil")


def run_files(folder: Path) -> Outcome:
    """The files of a run's folder, each a bomb, read as `hrl report` and its like do."""
    began, said = time.monotonic(), ""
    (folder / "config.yaml").write_text(f"data: !!python/object/apply:os.system ['touch {folder / CANARY}']\n")
    for name in ("metrics.jsonl", "outcome.json", "rollouts.jsonl"):
        (folder / name).write_bytes(bomb(folder) + b"\n")
    for name, read in (
        ("config.yaml", lambda: read_config(folder)),
        ("metrics.jsonl", lambda: read_jsonl(folder / "metrics.jsonl")),
        ("rollouts.jsonl", lambda: read_jsonl(folder / "rollouts.jsonl")),
        ("outcome.json", lambda: read_object(folder / "outcome.json")),
    ):
        outcome = refused(folder, read, name)
        if outcome.score < 2:
            return outcome
        said = outcome.message
    return Outcome(2, time.monotonic() - began, said)


def batch_file(folder: Path) -> Outcome:
    """A saved batch that is a pickle, as verl writes them."""
    (folder / "batch.pt").write_bytes(bomb(folder))
    return refused(folder, lambda: DataProto.load_from_disk(folder / "batch.pt"), "batch.pt")


def programs(folder: Path) -> Outcome:
    """Completions that are programs, under every built-in function: `tests.reward.hostile` with all its texts."""
    began = time.monotonic()
    command = [sys.executable, "-P", "-m", "tests.reward.hostile"]
    root = str(Path(__file__).parents[2])
    environment = child_environment({"PATH": os.environ["PATH"], "PYTHONPATH": root})
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    calls = (len(done.stdout.splitlines()) - 1) // 2
    message = f"{calls} calls with {len(TEXTS)} texts: each came back, none left a file"
    return Outcome(2 if last == {"canary": []} else 0, time.monotonic() - began, message)


LOOKING = """
import os
def compute_score(solution_str):
    found = " ".join(f"{name}={value}" for name, value in os.environ.items())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += open(f"/proc/{pid}/environ").read() if int(pid) != os.getpid() else ""
        except OSError:
            pass
    return {"score": 1.0, "found": found[:10] if "canary-of-the-environment" in found else ""}
"""


def environment(folder: Path) -> Outcome:
    """A canary in the environment of a run, and a reward function that looks for it everywhere."""
    began = time.monotonic()
    (folder / "looking.py").write_text(LOOKING)
    told = {**os.environ, "PLAIN": "canary-of-the-environment", "HF_TOKEN": "canary-of-the-environment"}
    with subprocess.Popen(["sleep", "60"], env=told) as beside:
        os.environ |= {"PLAIN": told["PLAIN"]}
        try:
            with RewardPool(RewardSpec(UserFile(str(folder / "looking.py"))), compose_cli([]).reward) as pool:
                outcome = pool.submit(RewardRow(0, "s", "1", {}), "x", "sample 0").result(timeout=600)
        finally:
            del os.environ["PLAIN"]
            beside.kill()
    if (limit := isolation_limit()) is not None:
        return Outcome(1, time.monotonic() - began, f"processes can't be isolated here: {limit}")
    seen = outcome.parts["found"]
    message = "it is in no variable, and no other process can be read" if not seen else f"found: {seen}"
    return Outcome(0 if seen else 2, time.monotonic() - began, message)


def masked_configuration(folder: Path) -> Outcome:
    """A configuration that a run saved without its secrets, used as if it were whole."""
    config = {"reward": {"custom_reward_function": {"reward_kwargs": {"customer": "<masked>"}}}}
    (folder / "saved.yaml").write_text("defaults: [ppo_trainer, _self_]\n" + yaml.safe_dump(config))
    began = time.monotonic()
    try:
        compose_cli(["--config-path", str(folder), "--config-name", "saved", "data.train_files=x.jsonl"])
        return Outcome(0, time.monotonic() - began, "it was taken for a whole one")
    except ConfigError as error:
        said = " ".join(str(error).split())
    good = "reward_kwargs was masked when its run was saved" in said and "Give it again" in said
    return Outcome(2 if good else 1, time.monotonic() - began, said[:300])


_BOMB = "a pickle bomb in a file"
FAULTS: list[Fault] = [
    *(
        Fault(_BOMB, f"rows in {name}", rows(name), is_quick=True)
        for name in (
            "rows.pkl",
            "rows.pickle",
            "rows.pt",
            "rows.npy",
            "rows.parquet",
            "rows.jsonl",
            "rows.json",
            "rows.csv",
        )
    ),
    Fault(_BOMB, "pickled weights of a model", weights, is_quick=True),
    Fault(_BOMB, "safetensors that are a pickle", disguised_weights, is_quick=True),
    Fault(_BOMB, "a saved batch", batch_file, is_quick=True),
    Fault(_BOMB, "the files of a run", run_files, is_quick=True),
    Fault("code in a configuration", "tags of Python in YAML", configuration, is_quick=True),
    Fault("code in a model folder", "a tokenizer of its own", tokenizer_code, is_quick=True),
    Fault("code in a model folder", "a chat template that breaks out", template, is_quick=True),
    Fault("a hostile completion", "every built-in function", programs),
    Fault("a secret in the environment", "a reward function looks for it", environment, is_quick=True),
    Fault("a secret in the configuration", "a masked one is used again", masked_configuration, is_quick=True),
]
