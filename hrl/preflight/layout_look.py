"""Preflight checks of layouts: whether models compute the same over several processes, and with an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hrl.config.outline import NamedModel, Outline
from hrl.preflight.findings import Findings

if TYPE_CHECKING:
    from hrl.workers.layout_probe import Layout, LayoutRequest, LayoutResult
    from hrl.workers.layout_ranks import LayoutRanks

#: By the ends of keys, which number of processes has which layout compared.
_LAYOUTS: Mapping[str, Layout] = {
    "ulysses_sequence_parallel_size": "sequence",
    "tensor_parallel_size": "tensor",
    "expert_parallel_size": "experts",
}
#: For one model. The largest cuts take a minute on a busy core.
_DEADLINE_S = 600.0


def has_layouts(outline: Outline, *, packs_rows: bool = True) -> bool:
    """Return whether any model lies on processes that work together, has an adapter, or is sharded and not packed."""
    models = outline.models.values()
    if not packs_rows and outline.num_processes > 1:
        return True
    return any(_keys(model) or (model.learner is not None and model.learner.trains_adapter) for model in models)


def look_at_layouts(
    findings: Findings, outline: Outline, folders: Mapping[str, Path], seed: int, *, packs_rows: bool = True
) -> None:
    """Compare a small cut of every model whose processes work together on two processes with itself on one.

    A model with an adapter is compared with the same model to whose weights the adapter was added. Both say of a family
    what `hrl.models.probe` says of packed rows.

    Args:
        findings: Collects problems.
        outline: Outline of the run.
        folders: Role → folder of its model.
        seed: Of the run.
        packs_rows: Models run packed rows; else padded ones.
    """
    from hrl.models.adapter import adapter_of
    from hrl.workers.layout_probe import LayoutRequest, compare_adapter
    from hrl.workers.layout_ranks import LayoutRanks

    with LayoutRanks() as ranks:
        for role, folder in folders.items():
            if role == "actor" and not {outline.placement.actor, "ref"} & outline.placement.roles.keys():
                continue  # only the engine runs it
            model = outline.models[role]
            keys = _keys(model)
            # Of packed models FSDP2's shards are known to be right; code that is new to padded rows may read weights
            # where they are not whole.
            shards: tuple[Layout, ...] = () if packs_rows or outline.num_processes == 1 else ("shards",)
            request = LayoutRequest(
                str(folder),
                model.override_config,
                outline.model.trust_remote_code,
                outline.lengths.model,
                model.is_scalar,
                (*shards, *keys),
                packs_rows,
            )
            if request.layouts:
                _look_at_groups(findings, model, keys, request, ranks, outline.section)
            adapter = None if model.learner is None else adapter_of(model.learner, seed)
            if adapter is not None:
                section = model.key.rpartition(".")[0]
                key = f"{section}.{'lora_rank' if adapter.path is None else 'lora_adapter_path'}"
                with findings.about(model.key):
                    result = compare_adapter(request, adapter)
                    if result.refused:  # such as one of layers that a small cut has not
                        findings.unchecked.append(f"{key}: not compared on a small cut of the model: {result.refused}")
                    if result.wrong:
                        what = f"asks for an adapter, and {_would_be_wrong(request, result)}."
                        leave_out = (
                            f"Set {section}.exclude_modules to what differs"
                            if adapter.path is None
                            else f"Begin with {section}.lora_rank, and {section}.exclude_modules set to what differs"
                        )
                        hint = f"{leave_out}, or {_way_out(outline.section)}"
                        findings.problem(key, what, hint)


def _keys(model: NamedModel) -> dict[Layout, str]:
    """Return the layouts of a model on several processes → the first key that asks for each."""
    keys: dict[Layout, str] = {}
    for key, degree in model.degrees.items():
        layout = _LAYOUTS.get(key.rpartition(".")[2])
        if layout is not None and degree > 1:
            keys.setdefault(layout, key)
    return keys


def _look_at_groups(
    findings: Findings,
    model: NamedModel,
    keys: Mapping[Layout, str],
    request: LayoutRequest,
    ranks: LayoutRanks,
    section: str,
) -> None:
    with findings.about(model.key):
        for layout, result in ranks.ask(request, _DEADLINE_S).items():
            if layout == "shards":
                if not result.is_right:
                    what = (
                        f"can't be trained by several processes: {result.refused or _would_be_wrong(request, result)}."
                    )
                    findings.problem(model.key, what, f"Take one process, or {_way_out(section)}")
                continue
            key = keys[layout]
            degree = model.degrees[key]
            if result.is_uneven:
                findings.unchecked.append(
                    f"{key}: {Path(request.path).name} can't lie on two processes, on which it would be compared: "
                    f"{result.refused}"
                )
            elif result.refused:
                what = f"is {degree}, and {Path(request.path).name} can't be laid out so: {result.refused}."
                findings.problem(key, what, "Set it to 1: FSDP2 shards every model.")
            elif result.wrong:
                what = f"is {degree}, and {_would_be_wrong(request, result)}."
                findings.problem(key, what, f"Set it to 1, or {_way_out(section)}")


def _would_be_wrong(request: LayoutRequest, result: LayoutResult) -> str:
    """Return what is wrong with a model, as a clause."""
    figures = f"largest difference {result.difference:.2g}, of gradients {result.gradient_difference:.2g}"
    seen = f" ({figures})" if result.difference != float("inf") else ""
    return f"{request.config().model_type} at {request.path} would be trained wrongly so: {result.wrong}{seen}"


def _way_out(section: str) -> str:
    return f"take another family, see docs/models.md; {section}.probe=false skips this comparison, at your own risk."
