"""Sizes and FLOPs from a `config.json` alone."""

import json
from io import BytesIO
from types import SimpleNamespace
from urllib.error import HTTPError, URLError

import pytest

from hrl.config.compose import compose_kind
from hrl.config.outline import outline_of
from hrl.config.run_kind import PPO
from hrl.errors import UnreachableError
from hrl.models.source import ModelSourceError
from hrl.plan.shapes import shapes_of
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
    assert (size.parameters, shape.heads, shape.kv_heads) == (7615616512, 28, 4)
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


LINE = ["actor_rollout_ref.model.path=nobody/nothing", "data.train_files=rows.jsonl"]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Stand in for the hub: what it is asked for, and what it answers."""
    monkeypatch.setenv("HRL_CACHE", str(tmp_path))
    asked, answers = [], []

    def urlopen(request, timeout):
        asked.append(request.full_url)
        answer = answers.pop()
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("hrl.plan.shapes.urlopen", urlopen)
    return SimpleNamespace(asked=asked, answers=answers)


def test_of_a_model_on_the_hub_only_the_config_is_fetched_and_once(hub):
    hub.answers.append(BytesIO(json.dumps(SEVEN).encode()))
    outline = outline_of(compose_kind(PPO, LINE))
    assert shapes_of(outline) == shapes_of(outline)
    assert [url.rpartition("/")[2] for url in hub.asked] == ["config.json"]


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
