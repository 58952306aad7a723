"""The sizes and FLOPs of a run's models, from their `config.json` alone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

import torch

from hrl.config.outline import NamedModel, Outline
from hrl.errors import RefusedError, UnreachableError
from hrl.models import flops
from hrl.models import footprint as footprints
from hrl.models.adapter import AdapterSource, adapter_of
from hrl.models.flops import ModelFlops
from hrl.models.footprint import Footprint, footprint
from hrl.models.source import ModelSourceError, cache_root, find_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONFIG = "config.json"
_FETCH_S = 10.0


class ShapeError(RefusedError, ValueError):
    """The cost of a model can't be counted from its configuration."""


@dataclass(frozen=True)
class ModelShape:
    """What the model of cost knows of a transformer.

    Attributes:
        size: Parameters and bytes.
        flops: FLOPs of a token; those of visited experts only.
        heads: Attention heads, over which an engine can be spread; 0 without attention.
        tensors: Tensors of the checkpoint, which a weight sync sends.
        packs_rows: Whether it can run packed rows; else they are padded, see `hrl.models.probe`.
    """

    size: Footprint
    flops: ModelFlops
    heads: int
    tensors: int
    packs_rows: bool = True

    @property
    def active_share(self) -> float:
        """Share of the weights that a token is multiplied with: 1 but in a mixture of experts."""
        size = self.size
        return min(1.0, self.flops.per_token / 2 / (size.parameters - size.embedding - size.head))

    def weights_read(self, rows: float) -> float:
        """Return how many weights an iteration reads for the next tokens of several sequences.

        Each of n sequences visits a share s of the weights as if at random, so 1 - (1 - s)^n are read by some. The
        weights outside experts, which all read, are few and counted likewise.
        """
        size = self.size
        visited = 1.0 - (1.0 - self.active_share) ** max(rows, 1.0)
        return visited * (size.parameters - size.embedding) + (0 if size.head else size.embedding)


def shapes_of(outline: Outline) -> dict[str, ModelShape]:
    """Return role (`actor`, `critic`, `rm`) → shape; roles with the same model share it."""
    trust, probes = outline.model.trust_remote_code, outline.model.probe
    known: dict[str, ModelShape] = {}
    shapes = {}
    for role, model in outline.models.items():
        adapter = None if model.learner is None else adapter_of(model.learner, seed=0)
        name = f"{model.path} {model.override_config} {adapter}"
        if name not in known:
            look = _Look(trust_remote_code=trust, max_model_len=outline.lengths.model, probes=probes)
            known[name] = _shape_of(model, adapter, look)
        shapes[role] = known[name]
    return shapes


def sizes_of(shapes: Mapping[str, ModelShape]) -> dict[str, Footprint]:
    """Return role → sizes, as the ledger of memory takes them."""
    return {role: shape.size for role, shape in shapes.items()}


class _Look(NamedTuple):
    """How a model is looked at.

    Attributes:
        trust_remote_code: Its folder may run code.
        max_model_len: The longest sequence of the run in tokens.
        probes: Whether it is compared on packed rows, as before a run.
    """

    trust_remote_code: bool
    max_model_len: int
    probes: bool


def _shape_of(model: NamedModel, adapter: AdapterSource | None, look: _Look) -> ModelShape:
    """Return the shape of a model, counted once for each `config.json`: transformers takes seconds to import."""
    folder = _folder_of(model.path)
    kept = cache_root() / "shapes" / f"{_identity(folder, model.override_config, adapter, look)}.json"
    if kept.is_file():
        return _read(kept)
    shape = _counted(folder, model, adapter, look)
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(asdict(shape)), encoding="utf-8")
    unfinished.replace(kept)
    return shape


def _identity(folder: Path, override_config: Mapping[str, Any], adapter: AdapterSource | None, look: _Look) -> str:
    """Return a hash of everything that a shape follows from: the configuration, transformers, and what counts here."""
    parts = [
        (folder / _CONFIG).read_bytes(),
        repr(sorted(override_config.items())).encode(),
        repr(adapter).encode(),
        repr(look).encode(),
        version("transformers").encode(),
        *(Path(file).read_bytes() for file in (flops.__file__, footprints.__file__, __file__)),
        Path(flops.__file__).with_name("probe.py").read_bytes(),  # which imports transformers
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _read(kept: Path) -> ModelShape:
    values = json.loads(kept.read_text(encoding="utf-8"))
    size, per_token = Footprint(**values.pop("size")), ModelFlops(**values.pop("flops"))
    return ModelShape(size=size, flops=per_token, **values)


def _counted(folder: Path, model: NamedModel, adapter: AdapterSource | None, look: _Look) -> ModelShape:
    """Build the model without storage, and count.

    Raises:
        ShapeError: Its FLOPs can't be counted, or a run would compute it wrongly.
    """
    from hrl.models.adapter import add_adapter
    from hrl.models.loading import ModelSource, load_causal_lm  # imports transformers
    from hrl.models.probe import ProbeError, require_right

    source = ModelSource.to_look_at(
        folder,
        model.override_config,
        trust_remote_code=look.trust_remote_code,
        max_model_len=look.max_model_len,
        adapter=adapter,
    )
    size = footprint(source)
    built = load_causal_lm(source, torch.bfloat16, meta=True).model
    if adapter is not None:
        add_adapter(built, adapter, torch.float32)
    counted = ModelFlops.of(built)
    if counted is None:
        raise ShapeError(f"{model.key}: the FLOPs of {model.path} can't be counted from its {_CONFIG}")
    heads = getattr(built.config.get_text_config(), "num_attention_heads", None)
    try:
        packs_rows = not look.probes or require_right(source, scalar=False).packs_rows
    except ProbeError as error:
        raise ShapeError(f"{model.key}: {error}") from error
    return ModelShape(size, counted, int(heads or 0), _tensors(built), packs_rows)


def _tensors(model: PreTrainedModel) -> int:
    """Count the tensors of a checkpoint, where experts that lie in one tensor here are apart."""
    stacked = {name: parameter.shape[0] for name, parameter in model.named_parameters() if parameter.ndim == 3}
    whole = sum(1 for _ in model.named_parameters()) - len(stacked)
    return whole + sum(count * (2 if "gate_up" in name else 1) for name, count in stacked.items())


def _folder_of(path: str) -> Path:
    """Return a folder with the model's `config.json`; of a model on the hub, nothing else is fetched, and once.

    Raises:
        ModelSourceError: There is none.
        UnreachableError: The hub can't be asked.
    """
    folder = find_model(path)
    if folder is not None:
        return folder
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, _CONFIG)
    if isinstance(cached, str):
        return Path(cached).parent
    kept = cache_root() / "configs" / path.replace("/", "--") / _CONFIG
    if not kept.is_file():
        text = _fetched(path)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(text)
    return kept.parent


class _Redirects(HTTPRedirectHandler):
    """Redirects as the hub answers with them; the user's token does not go with one to another host."""

    def redirect_request(self, req: Request, *answer: Any) -> Request | None:
        onward = super().redirect_request(req, *answer)
        if onward is not None and (onward.type, onward.host) != (req.type, req.host):
            onward.remove_header("Authorization")
        return onward


_open = build_opener(_Redirects).open


def _fetched(path: str) -> bytes:
    """Return the `config.json` of a model on the hub; one request without retries, for somebody waits."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    hint = f"Name a folder with its {_CONFIG}, which is all that a plan reads."
    try:
        if constants.HF_HUB_OFFLINE:
            raise URLError("HF_HUB_OFFLINE is set")
        with _open(Request(hf_hub_url(path, _CONFIG), headers=build_hf_headers()), timeout=_FETCH_S) as answer:
            return bytes(answer.read())
    except HTTPError as error:
        raise ModelSourceError(f"the hub answers {error.code} when asked for {_CONFIG} of {path}. {hint}") from error
    except (URLError, TimeoutError) as error:
        raise UnreachableError(
            f"{path} is not on this machine, and the hub can't be asked ({error}). {hint}"
        ) from error
