"""Sizes and FLOPs from a `config.json` alone."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from types import SimpleNamespace
from urllib.error import HTTPError, URLError
from urllib.request import Request

import pytest

from hrl.config.compose import compose_kind
from hrl.config.outline import outline_of
from hrl.config.run_kind import PPO
from hrl.errors import UnreachableError
from hrl.models.source import ModelSourceError
from hrl.plan.hardware import GPUS
from hrl.plan.launch_line import LaunchLine
from hrl.plan.lengths import Lengths
from hrl.plan.plan import plan
from hrl.plan.shapes import _open, shapes_of
from hrl.plan.show import lines
from tests.models.hybrids import HYBRIDS
from tests.plan.models import EXPERTS, SEVEN, folder_of


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HRL_CACHE", str(tmp_path_factory.mktemp("cache")))


def shape_of(config, place):
    line = [f"actor_rollout_ref.model.path={folder_of(config, place)}", "data.train_files=rows.jsonl"]
    return shapes_of(outline_of(compose_kind(PPO, line)))["actor"]


def test_a_dense_model_reads_all_weights_for_every_token(tmp_path):
    shape = shape_of(SEVEN, tmp_path)
    size = shape.size
    assert (size.parameters, shape.heads, size.kv_heads) == (7615616512, 28, 4)
    assert shape.active_share == pytest.approx(1.0, abs=1e-4)  # but for norms and biases
    assert shape.flops.per_head_token == 2 * 3584 * 152064
    assert shape.weights_read(1) == pytest.approx(size.parameters - size.embedding, rel=1e-4)  # of it, one row
    assert shape.tensors == 28 * 12 + 3


def test_a_mixture_visits_a_tenth_of_its_weights_and_many_tokens_visit_all(tmp_path):
    shape = shape_of(EXPERTS, tmp_path)
    assert shape.size.parameters == pytest.approx(30.5e9, rel=0.01)
    assert shape.flops.per_token / 2 == pytest.approx(2.7e9, rel=0.05)  # its 3.3e9 without embedding and head
    assert shape.weights_read(1) == pytest.approx(2.7e9, rel=0.05)
    assert shape.weights_read(512) == pytest.approx(shape.size.parameters - shape.size.embedding, rel=1e-6)
    assert shape.tensors > 48 * 128 * 3


def test_a_shape_is_counted_once_for_each_configuration(tmp_path, monkeypatch):
    first = shape_of(SEVEN, tmp_path / "a")
    monkeypatch.setattr("hrl.plan.shapes.footprint", lambda source: pytest.fail("it is known"))
    assert shape_of(SEVEN, tmp_path / "b") == first
    monkeypatch.undo()
    other = shape_of(SEVEN | {"num_hidden_layers": 2}, tmp_path / "b")
    assert other.size.num_layers == 2


def test_a_model_whose_layers_carry_a_state_gets_padded_rows_unless_nothing_is_compared(tmp_path):
    """Mamba has neither heads nor keys and values; without the comparison a run packs whatever it is given."""
    config = {"model_type": "mamba2", **HYBRIDS["mamba2"], "num_hidden_layers": 2}
    shape = shape_of(config, tmp_path)
    assert (shape.packs_rows, shape.heads, shape.size.kv_bytes_per_token) == (False, 0, 0)
    line = [f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=rows.jsonl"]
    unprobed = outline_of(compose_kind(PPO, [*line, "actor_rollout_ref.model.probe=false"]))
    assert shapes_of(unprobed)["actor"].packs_rows
    planned = plan(LaunchLine.of(["grpo", *line]), GPUS["h100"], 8, Lengths())
    assert not planned.model.packs_rows
    assert "rows are padded, not packed" in "\n".join(map(str, lines(planned)))


LINE = ["actor_rollout_ref.model.path=nobody/nothing", "data.train_files=rows.jsonl"]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Stand in for the hub: what it is asked for, and what it answers."""
    monkeypatch.setenv("HRL_CACHE", str(tmp_path))
    asked, answers, tokens = [], [], []

    def open_(request, timeout):
        asked.append(request.full_url)
        tokens.append(request.get_header("Authorization"))
        answer = answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("hrl.plan.shapes._open", open_)
    return SimpleNamespace(asked=asked, answers=answers, tokens=tokens)


def test_of_a_model_on_the_hub_only_the_config_is_fetched_and_once(hub):
    hub.answers.append(BytesIO(json.dumps(SEVEN).encode()))
    outline = outline_of(compose_kind(PPO, LINE))
    assert shapes_of(outline) == shapes_of(outline)
    assert [url.rpartition("/")[2] for url in hub.asked] == ["config.json"]


def test_the_hub_gets_the_users_token_and_nobody_is_asked_offline(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set"):
        shapes_of(outline_of(compose_kind(PPO, LINE)))
    assert hub.asked == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.answers.append(BytesIO(json.dumps(SEVEN).encode()))
    shapes_of(outline_of(compose_kind(PPO, LINE)))
    assert hub.tokens == ["Bearer hf_mine"]


@pytest.mark.parametrize(
    ("onward", "token"),
    [("/api/config.json", "Bearer hf_mine"), ("http://localhost:{port}/config.json", None)],
    ids=["same host", "another host"],
)
def test_a_redirect_to_another_host_leaves_the_token_behind(onward, token):
    seen = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers["Authorization"]))
            if len(seen) == 1:
                self.send_response(307)
                self.send_header("Location", onward.format(port=self.server.server_port))
            else:
                self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/m/resolve/main/config.json"
        _open(Request(url, headers={"authorization": "Bearer hf_mine"}), timeout=10).close()
        server.shutdown()
    assert [found for _, found in seen] == ["Bearer hf_mine", token]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (URLError("no route"), UnreachableError, "can't be asked"),
        (HTTPError("", 404, "", {}, None), ModelSourceError, "answers 404"),
    ],
)
def test_a_model_that_is_nowhere_is_told_with_the_way_out(hub, answer, kind, said):
    hub.answers.append(answer)
    with pytest.raises(kind, match=f"{said}.*Name a folder with its config.json"):
        shapes_of(outline_of(compose_kind(PPO, LINE)))
