"""Heads of reward models, as folders have them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hrl.models.scalar_head import check_scores, find_head
from hrl.models.source import ModelSourceError

BACKBONE = {"model.embed_tokens.weight": (9, 4), "lm_head.weight": (9, 4)}


def folder_of(folder: Path, *, architecture: str = "X", **shapes: tuple[int, ...]) -> Path:
    """Headers of weights beside a configuration."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": [architecture]}))
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in {**BACKBONE, **shapes}.items()}, folder / "a.safetensors"
    )
    return folder


@pytest.mark.parametrize("name", ["score", "v_head", "v_head.summary", "value_head", "regression_head", "rm_head"])
def test_a_head_has_the_names_that_published_models_give_it(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, **{f"{name}.weight": (1, 4)})
    check_scores(folder)
    head = find_head(folder)
    assert head is not None and (head.name, head.num_labels, head.is_plain) == (name, 1, name == "score")


def test_a_head_may_lie_in_a_file_of_its_own_and_have_a_bias(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    tensors = {"v_head.summary.weight": np.ones((1, 4), np.float32), "v_head.summary.bias": np.ones(1, np.float32)}
    save_file(tensors, folder / "value_head.safetensors")
    check_scores(folder)
    head = find_head(folder)
    assert head is not None and (head.layers[0].bias, head.is_plain) == ("v_head.summary.bias", False)


def test_layers_have_a_relu_between_them_only_where_that_is_known(tmp_path: Path) -> None:
    shapes = {"score.0.weight": (4, 4), "score.0.bias": (4,), "score.2.weight": (1, 4), "score.2.bias": (1,)}
    head = find_head(folder_of(tmp_path, architecture="Qwen2ForRewardModel", **shapes))
    assert head is not None and [layer.shape for layer in head.layers] == [(4, 4), (1, 4)]
    with pytest.raises(ModelSourceError, match="2 layers, and what is between them is in the code of its architecture"):
        find_head(folder_of(tmp_path, **shapes))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, r"has no scalar head \(score.weight, v_head"),
        ({"score.weight": (2, 4)}, r"has 2 labels \(score.weight\); a value or reward model has exactly one"),
        (  # ArmoRM's
            {"regression_layer.weight": (19, 4), "gating.layers.0.weight": (4, 4)},
            "Beside its backbone it has gating, regression_layer, a score that is more than one linear head",
        ),
        ({"score.weight": (1, 4), "gating.weight": (3, 4)}, "beside its backbone and the head score, gating: a score"),
        ({"score.dense.weight": (1, 4)}, "the head score of .* is no linear layer: score.dense.weight"),
        ({"score.weight": (4,)}, "the head score of .* is no linear layer: score.weight"),
    ],
)
def test_what_is_no_single_linear_head_is_refused_by_the_names_of_its_tensors(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ModelSourceError, match=message) as caught:
        check_scores(folder_of(tmp_path, **shapes))
    assert "hrl does not compute" not in str(caught.value) or re.search("reward.functions", str(caught.value))
