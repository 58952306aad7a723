"""verl's launch lines. verl's keys are hrl's, so that a line needs little: `hrl.config.spellings` knows the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from hydra.core.override_parser.types import Override

from hrl.config.arithmetic import step_sizes
from hrl.config.compose import compose_kind, config_problems, read_override
from hrl.config.override import as_override
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.run_kind import KINDS, RunKind
from hrl.config.section import ACTOR, ROLLOUT, Get, WholeConfig, leaves, sections
from hrl.config.spellings import lookup
from hrl.errors import ConfigError, Problem
from hrl.migrate.line import Migrated, MigrationError, Remark, key_of
from hrl.migrate.verl_turns import take_turns

PROGRAMS = {
    "verl.trainer.main_ppo": "ppo",
    "recipe.dapo.main_dapo": "ppo",
    "recipe.dapo.src.main_dapo": "ppo",
    "verl.trainer.sft_trainer": "sft",
    "verl.trainer.sft_trainer_ray": "sft",
    "verl.trainer.fsdp_sft_trainer": "sft",
}
"""verl's programs that hrl has → the kind of run."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm.adv_estimator": "gae", f"{ROLLOUT}.n": 1},
    "sft": {"data.train_batch_size": 256, "trainer.total_epochs": 4},
}
"""Kind of run → verl's defaults that say what is learnt, where hrl has others."""
_DEVICES = "trainer.n_gpus_per_node=8"
"""verl's default of PPO: what divides the work among devices means nothing without their number."""
_UNSAID = "was not in the line and is verl's default"


def migrate_verl(program: str, arguments: Sequence[str]) -> Migrated:
    """Return hrl's line for a line of verl.

    Args:
        program: The module that was run.
        arguments: What followed it.

    Raises:
        MigrationError: hrl has no such program.
    """
    if program not in PROGRAMS:
        raise MigrationError(f"hrl has no counterpart of {program}; there are those of {', '.join(PROGRAMS)}")
    into = Migrated(program, PROGRAMS[program])
    kind = KINDS[into.kind]
    options = [word for word in arguments if "=" not in word or word.startswith("-")]
    into.arguments = [_with_outputs_quoted(word) for word in arguments if word not in options]
    _options(options, kind, into)
    if into.kind == "ppo":
        take_turns(into, kind.spellings)
        if key_of(_DEVICES) not in (kind.spellings.present_name(key_of(word)) for word in into.arguments):
            into.arguments.append(_DEVICES)
            into.differs.append(Remark(_DEVICES, _UNSAID))
    into.drop_what_does_not_compose()
    converted: dict[str, str] = {}
    present = [text for word in into.arguments for text in _present(word, into, kind, converted)]
    into.arguments = [*(text for text in present if key_of(text) not in converted), *converted.values()]
    try:
        config = compose_kind(kind, into.arguments)
    except ConfigError:
        return into  # what is missing is said; the rest depends on it
    if isinstance(config, PPOTrainerConfig):
        _count_optimizer_steps(into, config)
    _say_what_verl_has_unsaid(into, config)
    return into


def _with_outputs_quoted(word: str) -> str:
    """Return an argument whose value holds the output of a command, `$(date)`, as the text that hydra will see."""
    key, _, value = word.partition("=")
    is_text = "$(" in value and value[:1] not in "'\"[{"
    return f"{key}={as_override(value)}" if is_text else word


def _count_optimizer_steps(into: Migrated, config: PPOTrainerConfig) -> None:
    """Make warm-ups as long as in verl, whose schedules advance once a trainer step."""
    for section, learner in ((ACTOR, config.actor_rollout_ref.actor), ("critic", config.critic)):
        key, warmup = f"{section}.optim.lr_warmup_steps", learner.optim.lr_warmup_steps
        steps = step_sizes(config, learner).optimizer_steps
        for place, word in enumerate(into.arguments):
            if key_of(word) == key and warmup > 0 and steps > 1:
                into.arguments[place] = f"{key}={warmup * steps}"
                into.differs.append(Remark(word, f"is {warmup * steps} optimizer steps, {steps} for each trainer step"))


def _say_what_verl_has_unsaid(into: Migrated, config: WholeConfig) -> None:
    """Write verl's defaults where the line leaves them out and hrl has others."""
    given = {key_of(word) for word in into.arguments}
    for key, value in _DEFAULTS[into.kind].items():
        own, word = attrgetter(key)(config), f"{key}={as_override(value)}"
        if key in given or own == value:
            continue
        if config_problems(KINDS[into.kind], [*into.arguments, word]):
            into.differs.append(Remark(key, f"was not in the line and is {own} here; verl has {value}"))
        else:
            into.arguments.append(word)
            into.differs.append(Remark(word, _UNSAID))


def _options(words: Sequence[str], kind: RunKind[WholeConfig], into: Migrated) -> None:
    """Take verl's own configuration files for hrl's; say of others that they are not read."""
    named: dict[str, str] = {}
    stray: list[str] = []
    left = list(words)
    while left:
        option, equals, value = left.pop(0).partition("=")
        if not option.startswith("-"):
            stray.append(option)
        elif equals or not left or left[0].startswith("-"):
            named[option] = value
        else:
            named[option] = left.pop(0)
    for option, value in named.items():
        if not (option in ("--config-name", "-cn") and value.removesuffix(".yaml") == kind.config_name):
            why = "a YAML file of verl's is not read; hrl takes one of your own with the same options"
            into.lost.append(Remark(f"{option} {value}".rstrip(), why))
    if stray:
        into.lost.append(Remark(" ".join(stray), "is not key=value"))


def _present(word: str, into: Migrated, kind: RunKind[WholeConfig], converted: dict[str, str]) -> list[str]:
    """Return the arguments with present names that mean the same as one that hrl takes.

    Args:
        word: The argument.
        into: Gets remarks.
        kind: The kind of run.
        converted: Gets the arguments that a value is converted to, which hold before others of the same keys.
    """
    override, spellings = read_override(word), kind.spellings
    if isinstance(override, Problem):
        raise RuntimeError(f"{word} composes and can't be read")
    written, value = override.key_or_group, override.value()
    key = written if written in spellings.outside else spellings.present_name(written)
    if value is None and (key != written or key in spellings.null_is_unset):
        return []
    if key not in spellings.outside and _has(key, kind):
        return [f"{key}={_value_of(word)}"]
    if key in spellings.must_equal:
        return []
    conversion = spellings.converted.get(key)
    if conversion is not None:
        given = _values(into, kind)
        result = {} if value is None else conversion.convert(value, Get(given, kind.schema)) or {}
        new = {name: each for name, each in _parts(result) if name not in given or given[name] != each}
        converted |= {name: f"{name}={as_override(each)}" for name, each in new.items()}
        if new:
            read = ", ".join(f"{name}={as_override(each)}" for name, each in new.items())
            into.differs.append(Remark(word, f"is {read}"))
        elif result:
            into.needless.append(Remark(word, "is said by another key of the line"))
        else:
            into.needless.append(Remark(word, "is off" if value in (None, False) else conversion.idle))
        return []
    entry = lookup(spellings.outside, key)
    if entry is not None:
        into.needless.append(Remark(word, entry[1].says))
        return []
    return [word.lstrip("+")]


def _parts(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values, for an argument of an engine its own key: the line may set others beside it."""
    for key, value in values.items():
        if isinstance(value, Mapping) and key.startswith(f"{ROLLOUT}.engine_kwargs"):
            yield from _parts({f"{key}.{name}": each for name, each in value.items()})
        else:
            yield key, value


def _has(key: str, kind: RunKind[WholeConfig]) -> bool:
    known = leaves(kind.schema)
    above = (key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1))
    return key in known or key in sections(kind.schema) or any(name in known for name in above)


def _values(into: Migrated, kind: RunKind[WholeConfig]) -> Mapping[str, Any]:
    """Return the values that the line gives, by present name."""
    found = [read_override(word) for word in into.arguments]
    taken = [override for override in found if isinstance(override, Override)]
    return {kind.spellings.present_name(each.key_or_group): each.value() for each in taken}


def _value_of(word: str) -> str:
    return word.partition("=")[2] if "=" in word else key_of(word)
