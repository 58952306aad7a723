"""What every model with an engine can do: save, load, export, hand out its weights, move between memories."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hrl.workers.engine.checkpoint import CONTENTS
from hrl.workers.engine.engine import Engine
from hrl.workers.engine.weights import ParamSpec


class EngineModel:
    """The state of a model lives in its engine.

    Attributes:
        engine: Set by the subclass.
    """

    engine: Engine

    def save(self, folder: Path, contents: Collection[str] = CONTENTS) -> None:
        """Write the sharded state (parameters, moments, schedule, RNG); every rank calls it."""
        self.engine.save(folder, contents)

    def load(self, folder: Path, contents: Collection[str] = CONTENTS) -> None:
        """Load what `save` wrote, on any number of ranks; every rank calls it."""
        self.engine.load(folder, contents)

    def export_hf(self, folder: Path) -> None:
        """Write `config.json` and safetensors for transformers and vLLM; every rank calls it."""
        self.engine.export_hf(folder)

    def param_specs(self, dtype: torch.dtype) -> list[ParamSpec]:
        """Name, dtype and shape of everything that `iter_full_params` yields, in its order."""
        return self.engine.param_specs(dtype)

    def iter_full_params(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """`(name, full tensor)` as the checkpoint has them, cast to `dtype`; every rank runs it to its end."""
        return self.engine.iter_full_params(dtype)

    def frozen_names(self) -> list[str]:
        """Names in the checkpoint of what no update moves, which `iter_full_params` therefore leaves out."""
        return self.engine.frozen_names()

    def onload(self) -> None:
        """Bring offloaded parameters to the device."""
        self.engine.onload()

    def offload(self) -> None:
        """Take them to host memory, where the configuration says so."""
        self.engine.offload()
