"""Every tracker against its real package, offline: curves and a table of samples arrive, nothing leaves the machine."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Where `make install-dev` puts the trackers: other packages import those that they find, and tests do without.
TRACKERS = Path(sys.prefix) / "trackers"

RUN = """
import json, pathlib, socket, sys

tried = []
connect, look_up = socket.socket.connect, socket.getaddrinfo
here = {None, "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()}

def connect_here(self, address):
    if self.family != socket.AF_UNIX and address[0] not in here:
        tried.append(str(address))
        raise OSError("no network")
    return connect(self, address)

def look_up_here(host, *more, **options):
    if host not in here:
        tried.append(str(host))
        raise socket.gaierror("no network")
    return look_up(host, *more, **options)

socket.socket.connect, socket.getaddrinfo = connect_here, look_up_here

import huggingface_hub.constants  # which a run imports before its trackers
from hrl.report.tracking import Tracking

name, folder, samples = sys.argv[1], pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
tracking = Tracking("project", "experiment", [name], {"trainer": {"seed": 1}}, run_dir=folder)
assert sys.argv[-1].endswith("canary-argument")
tracking.log({"val/a/mean@1": 0.25}, 0)
tracking.log_generations(samples, 0)
for step in (1, 2, 3):
    tracking.log({"reward/mean": step / 4, "reward/exact/mean": 0.5}, step)
tracking.log_generations(samples, 3)
tracking.finish(60)
if name == "mlflow":
    from mlflow.telemetry.client import get_telemetry_client
    reports = get_telemetry_client() is not None
elif name == "wandb":
    from wandb.env import error_reporting_enabled
    reports = error_reporting_enabled()
else:
    reports = name == "trackio" and not huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY
told = {"failures": tracking.failures, "tried": tried, "reports": reports}
(folder / "told.json").write_text(json.dumps(told))
"""
HOSTILE = "<script>alert(1)</script>"
SAMPLES = [
    {
        "prompt": "<|user|>1+1?",
        "question": "1+1?",
        "response": HOSTILE,
        "score": 1.0,
        "ground_truth": "two",
        "data_source": "sums",
        "reward_parts": {"exact": 1.0, "tags": 0.5},
    },
    {"prompt": "1+2?", "response": "3", "score": None, "ground_truth": "three", "reward_parts": {"exact": 0.0}},
]
COLUMNS = ["source", "prompt", "truth", "response", "score", "exact", "tags"]


@pytest.fixture
def tracked(tmp_path):
    """Runs a tracker in a process that reaches nothing but itself, and returns the run folder."""

    def run(name):
        if name != "tensorboard" and not (TRACKERS / name).is_dir():
            pytest.skip(f"{name} is not in {TRACKERS}; make install-dev puts it there")
        # Without the variables by which MLflow knows tests and CI, where it reports nothing anyway.
        plain = {key: os.environ[key] for key in os.environ if key in ("PATH", "LANG", "OMP_NUM_THREADS")}
        environment = {
            **plain,
            "PYTHONPATH": f"{TRACKERS}{os.pathsep}{ROOT}",
            "HOME": str(tmp_path / "home"),
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "WANDB_MODE": "offline",
            "SWANLAB_MODE": "offline",
            "MY_TOKEN": "canary-variable",
        }
        folder = tmp_path / "run"
        folder.mkdir()
        argument = "reward.custom_reward_function.reward_kwargs.api_key=canary-argument"
        command = [sys.executable, "-c", RUN, name, str(folder), json.dumps(SAMPLES), argument]
        done = subprocess.run(command, env=environment, cwd=tmp_path, timeout=600, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told = json.loads((folder / "told.json").read_text())
        assert told == {"failures": 0, "tried": [], "reports": False}, done.stderr
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert [str(file) for file in files if b"canary" in file.read_bytes()] == []  # no command line, no environment
        return folder

    return run


def one(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


def test_tensorboard(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked("tensorboard") / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [event.value for event in events.Scalars("val/a/mean@1")] == [0.25]
    (_, last) = events.Tensors("val/generation_0/text_summary")
    text = last.tensor_proto.string_val[0].decode()
    assert {"    truth: two", "    exact: 1.0", "    tags: 0.5", f"    response: {HOSTILE}"} <= set(text.split("\n"))


def test_wandb(tracked):
    run = one(tracked("wandb"), "wandb/offline-run-*")
    table = json.loads(one(run, "files/media/table/val/generations_3_*.json").read_text())
    assert table["columns"] == COLUMNS
    assert table["data"][0] == ["sums", "1+1?", "two", HOSTILE, 1.0, 1.0, 0.5]
    history = one(run, "*.wandb").read_bytes()
    assert history.count(b"reward/mean") >= 3 and b"val/a/mean@1" in history


def test_mlflow(tracked):
    metrics = one(tracked("mlflow") / "mlruns", "*/*/metrics")
    rows = [line.split() for line in (metrics / "reward" / "mean").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step, *_ in rows] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert (metrics / "val" / "a" / "mean_at_1").exists()
    table = json.loads((metrics.parent / "artifacts" / "generations" / "step_3.json").read_text())
    assert table["columns"] == COLUMNS
    assert table["data"][0] == ["sums", "1+1?", "two", HOSTILE, 1.0, 1.0, 0.5]


def test_swanlab(tracked):
    run = one(tracked("swanlab") / "swanlab", "run-*")
    table = one(run, "media/echarts/003-*.json").read_text()
    assert all(column in table for column in (*COLUMNS, "two")) and HOSTILE not in table and "&lt;script&gt;" in table
    history = one(run, "*.swanlab").read_bytes()
    assert history.count(b"reward/mean") >= 3 and b"val/a/mean@1" in history


def test_trackio(tracked):
    database = one(tracked("trackio").parent, "trackio/project.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [(step, row["reward/mean"]) for step, row in logged if "reward/mean" in row] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    assert "two" in json.dumps(logged) and "tags" in json.dumps(logged)
