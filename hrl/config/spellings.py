"""How keys outside the schema are read: verl's keys, and names from TRL and OpenRLHF.

The tables are beside this file, in `verl_keys.yaml` and `synonyms.yaml`; here stands what they mean.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hrl.config.alarms import ALARMS, SAMPLER_GAP
from hrl.config.section import ACTOR, REF, RM, ROLLOUT, Get
from hrl.errors import Reason


class Verdict(NamedTuple):
    """How a key that hrl does not have is treated.

    Attributes:
        says: What hrl does instead, as a clause for the note and for the hint of a refusal.
        instead: What to write instead, as a clause for the hint.
        same: Values that describe what hrl does anyway; accepted silently.
        taken: Values that are accepted with a note, because they affect how a run computes and not what it learns;
            `all` means any value.
        absent: Whether any other value is refused because hrl lacks the feature, not because it is written differently.
        beside: A key with which every value is refused, because the two together mean something else.
    """

    says: str
    instead: str = "remove the key"
    same: Sequence[Any] = (None,)
    taken: Sequence[Any] = ()
    absent: bool = False
    beside: str | None = None

    @property
    def hint(self) -> str:
        """What to write instead, as a sentence."""
        return f"{self.says}; {self.instead}."

    @property
    def reason(self) -> Reason:
        """Why a value is refused."""
        return Reason.ABSENT if self.absent else Reason.ALTERNATIVE

    def is_same(self, value: object) -> bool:
        """Return whether the value says what hrl does anyway."""
        return _holds(self.same, value)

    def is_taken(self, value: object) -> bool:
        """Return whether the value is accepted with a note."""
        return self.taken == "all" or _holds(self.taken, value)


def _holds(values: Sequence[Any], value: object) -> bool:
    """Return whether `value` is among the values; true and 1 are different values."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


class Conversion(NamedTuple):
    """How a value is converted to values of other keys.

    Attributes:
        convert: Takes the value and the other keys and returns key → value, or None if it can't be computed.
        says: Description for the documentation.
        instead: What to write if it can't be computed.
        idle: Why a value sets no key.
    """

    convert: Callable[[Any, Get], Mapping[str, Any] | None]
    says: str
    instead: str
    idle: str = "is off"


def _over_processes(target: str) -> Conversion:
    """Return the conversion of a micro-batch of all processes to that of one; as in verl, the remainder is dropped."""

    def convert(rows: Any, given: Get) -> Mapping[str, Any] | None:
        per_machine, machines = given("trainer.n_gpus_per_node"), given("trainer.nnodes")
        if not all(type(count) is int and count > 0 for count in (rows, per_machine, machines)):
            return None
        return {target: max(1, rows // (per_machine * machines))}

    return Conversion(convert, f"`{target}` × the number of processes", f"set {target}, of one process")


def _switch(values: Mapping[str, Any]) -> Conversion:
    """Return the conversion of a switch that sets other keys to these values; switched off it sets none of them."""

    def convert(value: Any, _: Get) -> Mapping[str, Any] | None:
        if not isinstance(value, bool):
            return None
        return values if value else {}

    written = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return Conversion(convert, " and ".join(f"`{one}`" for one in written), f"set {' and '.join(written)}")


def _offload(sharding: str, *names: str) -> Conversion:
    return _switch({f"{sharding}.{name}": True for name in names})


_OPTIMIZERS = {"AdamW": "adamw", "Adafactor": "adafactor", "Muon": "muon", "AdamW8bit": "adamw8bit"}
"""Classes of torch, torchao and bitsandbytes → `optim.name`."""


def _optimizer(section: str) -> Conversion:
    """Return the conversion of an optimizer's class, which verl imports by name, to `name` of a section."""
    key = f"{section}.name"

    def convert(value: Any, _: Get) -> Mapping[str, Any] | None:
        if value is None:
            return {}
        name = {spelt.lower(): name for spelt, name in _OPTIMIZERS.items()}.get(str(value).lower())
        return None if name is None else {key: name}

    return Conversion(convert, f"`{key}`", f"set {key}, to one of {', '.join(_OPTIMIZERS.values())}")


def _sampled_at_once() -> Conversion:
    """Return the conversion of `gen_batch_size` to the same number of prompts in batches of `train_batch_size`."""
    enable, train, bound = (
        "algorithm.filter_groups.enable",
        "data.train_batch_size",
        "algorithm.filter_groups.max_num_gen_batches",
    )

    def convert(prompts: Any, given: Get) -> Mapping[str, Any] | None:
        wanted, batches = given(train), given(bound)
        if prompts == wanted:
            return {}
        if given(enable) is not True or not all(type(n) is int and n > 0 for n in (prompts, wanted, batches)):
            return None
        return {bound: -(-batches * prompts // wanted)}

    return Conversion(
        convert,
        f"with `{enable}=true` the bound `{bound}`, × `data.gen_batch_size` ÷ `{train}`",
        f"set {train}: without {enable} a step samples what it trains on",
    )


def _one_weighted_function() -> Conversion:
    """Return the conversion of hrl's earlier `reward.function_weight` to a list of one function."""
    path, name, kwargs = (f"reward.custom_reward_function.{key}" for key in ("path", "name", "reward_kwargs"))

    def convert(weight: Any, given: Get) -> Mapping[str, Any] | None:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or given("reward.functions") is not None:
            return None
        if weight == 0:
            return {"reward.functions": []}
        if given(path) is None:
            return {"reward.functions": [{"name": "data_source", "weight": float(weight)}]}
        entry = {"path": f"{given(path)}:{given(name)}", "weight": float(weight), "kwargs": given(kwargs)}
        return {} if weight == 1 else {"reward.functions": [entry], path: None}

    return Conversion(convert, "the `weight` of an entry of `reward.functions`", "set the weight in reward.functions")


def _engine_argument(name: str, *values: Any) -> Conversion:
    """Return the conversion of a key of its own, with one of these values, to an argument of vLLM."""

    def convert(value: Any, given: Get) -> Mapping[str, Any] | None:
        if not _holds(values, value) or not isinstance(arguments := given(f"{ROLLOUT}.engine_kwargs"), Mapping):
            return None
        of_vllm = arguments.get("vllm") or {}
        if not isinstance(of_vllm, Mapping) or of_vllm.get(name, value) != value:
            return None
        return {f"{ROLLOUT}.engine_kwargs": {**arguments, "vllm": {**of_vllm, name: value}}}

    written = f"{ROLLOUT}.engine_kwargs.vllm.{name}"
    known = " or ".join(json.dumps(value).strip('"') for value in values)
    return Conversion(convert, f"`{written}`", f"set {written} alone, to {known}")


def _alarm(name: str) -> Conversion:
    """Return the conversion of a key of its own to a threshold of `trainer.alarms`."""

    def convert(value: Any, given: Get) -> Mapping[str, Any] | None:
        alarms = given("trainer.alarms")
        if not isinstance(alarms, Mapping):
            return None
        own = {
            other: limit for other, limit in alarms.items() if other not in ALARMS or limit != ALARMS[other].threshold
        }
        return {"trainer.alarms": {name: value} | own}

    return Conversion(convert, f"`trainer.alarms={{{name}: …}}`", f"set trainer.alarms={{{name}: …}}")


ENVIRONMENT = "environment.path"
_NAMES_ONE = (
    "set environment.path=tools and environment.tools=[my_tools.py:function], or environment.path=my_env.py:Class"
)
_NO_TURNS = f"is of turns, and without {ENVIRONMENT} every prompt has one answer"
_VERLS_PARSERS = {"gpt-oss": "openai", "glm": "glm45", "seed": "seed_oss", "minimax": "minimax_m2", "kimi": "kimi_k2"}
"""verl's names of tool parsers that vLLM has by another name."""


def _needs_environment(*without: Any) -> Conversion:
    """Return the conversion of a value that says that there are turns: an environment has to be named.

    Args:
        without: Values that do not say so.
    """

    def convert(value: Any, given: Get) -> Mapping[str, Any] | None:
        return {} if value in without or given(ENVIRONMENT) is not None else None

    idle = f"{ENVIRONMENT} says whether there are turns, and what plays them"
    return Conversion(convert, f"nothing, beside `{ENVIRONMENT}`", _NAMES_ONE, idle)


def _of_environment(key: str, *kinds: type, names: Mapping[Any, Any] | None = None) -> Conversion:
    """Return the conversion to a key of the environment; without one it has no effect, as in verl.

    Args:
        key: The key.
        kinds: Types of its values.
        names: verl's values that have another name here.
    """

    def convert(value: Any, given: Get) -> Mapping[str, Any] | None:
        if given(ENVIRONMENT) is None:
            return {}
        return {key: (names or {}).get(value, value)} if type(value) in kinds else None

    return Conversion(convert, f"with `{ENVIRONMENT}`, `{key}`", f"set {key}", _NO_TURNS)


def _limit_of_answers() -> Conversion:
    """Return the conversion of `max_user_turns`: after the last answer the policy has one more turn."""
    turns = "environment.max_turns"

    def convert(answers: Any, given: Get) -> Mapping[str, Any] | None:
        if given(ENVIRONMENT) is None or answers == 0:  # verl reads 0 as no limit
            return {}
        limit = given.given.get(turns, math.inf)
        if type(answers) is not int or not (type(limit) is int or limit == math.inf) or answers < 0:
            return None
        return {} if limit <= answers + 1 else {turns: answers + 1}

    return Conversion(
        convert,
        f"with `{ENVIRONMENT}`, `{turns}`, which is one more, where that is lower: each turn but the last is answered",
        f"set {turns}, the policy's turns: one more than are answered",
        f"limits nothing here: {turns} is no higher, or every prompt has one answer",
    )


def _pool_of_teacher() -> Conversion:
    """Return the conversion of the machines of verl's teachers to a pool of the teacher's own."""
    per_machine, pools, roles = "distillation.n_gpus_per_node", "trainer.resource_pools", "trainer.role_pools"

    def convert(machines: Any, given: Get) -> Mapping[str, Any] | None:
        processes = given.given.get(per_machine, 8)  # verl's default
        own, homes = given(pools), given(roles)
        if not all(type(count) is int for count in (machines, processes)) or machines < 0 or processes < 1:
            return None
        if machines == 0 or given("distillation.enabled") is not True:
            return {}
        if not (isinstance(own, Mapping) and own and isinstance(homes, Mapping)):
            return None
        policy = homes.get("actor_rollout") or homes.get("actor") or next(iter(own))
        if homes.get("ref", policy) != policy:  # the line has placed it
            return {}
        return {pools: {**own, "teacher": [processes] * machines}, roles: {**homes, "ref": "teacher"}}

    return Conversion(
        convert,
        f"a pool `teacher` in `{pools}`, of `{per_machine}` processes on each machine, and `{roles}.ref=teacher`",
        f"set {pools} and {roles}.ref, which say where the teacher runs",
        f"adds no pool: the teacher runs where {roles}.ref says, beside the policy by default",
    )


_PPO_CONVERTED: dict[str, Conversion] = {
    f"{ACTOR}.ppo_micro_batch_size": _over_processes(f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    "critic.ppo_micro_batch_size": _over_processes("critic.ppo_micro_batch_size_per_gpu"),
    f"{REF}.log_prob_micro_batch_size": _over_processes(f"{REF}.log_prob_micro_batch_size_per_gpu"),
    f"{ROLLOUT}.log_prob_micro_batch_size": _over_processes(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    f"{RM}.micro_batch_size": _over_processes(f"{RM}.micro_batch_size_per_gpu"),
    f"{REF}.fsdp_config.offload_policy": _offload(f"{REF}.fsdp_config", "param_offload"),
    f"{RM}.model.fsdp_config.offload_policy": _offload(f"{RM}.model.fsdp_config", "param_offload"),
    f"{ACTOR}.optim.optimizer": _optimizer(f"{ACTOR}.optim"),
    "critic.optim.optimizer": _optimizer("critic.optim"),
    f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload": _offload(
        f"{ACTOR}.fsdp_config", "optimizer_offload"
    ),
    "critic.optim.override_optimizer_config.optimizer_cpu_offload": _offload(
        "critic.model.fsdp_config", "optimizer_offload"
    ),
    "data.gen_batch_size": _sampled_at_once(),
    "reward.function_weight": _one_weighted_function(),
    f"{ROLLOUT}.logprob_diff_alarm": _alarm(SAMPLER_GAP),
    f"{ROLLOUT}.enable_chunked_prefill": _engine_argument("enable_chunked_prefill", True, False),
    f"{ROLLOUT}.quantization": _engine_argument("quantization", "fp8"),
    f"{ROLLOUT}.multi_turn.enable": _needs_environment(False),
    f"{ROLLOUT}.agent.default_agent_loop": _needs_environment("single_turn_agent"),
    f"{ROLLOUT}.multi_turn.max_user_turns": _limit_of_answers(),
    f"{ROLLOUT}.multi_turn.format": _of_environment("environment.tool_parser", str, names=_VERLS_PARSERS),
    f"{ROLLOUT}.agent.num_workers": _of_environment("environment.num_workers", int),
    "trainer.val_only": _switch({"trainer.total_training_steps": 0}),
    "distillation.nnodes": _pool_of_teacher(),
}


class Synonym(NamedTuple):
    """The counterpart in hrl of another library's name.

    Attributes:
        key: Key with the same meaning.
        but: How meaning or unit differ, as a clause.
    """

    key: str
    but: str = ""

    @property
    def hint(self) -> str:
        """A sentence that tells the user what to write instead."""
        return f"It is {self.key} here{f': {self.but}' if self.but else ''}."


@dataclass(frozen=True)
class Spellings:
    """How keys outside a schema are read.

    Attributes:
        renamed: Other spelling → key of hrl.
        must_equal: Second key of verl for a value that has one key in hrl → that key.
        outside: Key that hrl does not have → verdict on it.
        values: (key, value) that hrl does not have → verdict on it.
        null_is_unset: Keys whose null means their default.
        converted: Keys whose value is converted to values of other keys. A key that is set itself takes precedence.
        synonyms: Another library's name, or that of an argument in Python, without section → its counterpart in hrl.
        arguments: Those that are arguments in Python.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    must_equal: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, Verdict] = field(default_factory=dict)
    values: Mapping[tuple[str, Any], Verdict] = field(default_factory=dict)
    null_is_unset: frozenset[str] = frozenset()
    converted: Mapping[str, Conversion] = field(default_factory=dict)
    synonyms: Mapping[str, Synonym] = field(default_factory=dict)
    arguments: Mapping[str, Synonym] = field(default_factory=dict)

    def present_name(self, key: str) -> str:
        """Return the name of `key` in hrl; `key` itself if it was never renamed."""
        entry = lookup(self.renamed, key)
        if entry is None:
            return key
        pattern, target = entry
        return target.removesuffix("*") + key.removeprefix(pattern.removesuffix("*"))


def lookup(table: Mapping[str, Any], key: str) -> tuple[str, Any] | None:
    """Return the (pattern, value) for `key`, by the key itself or the longest pattern `a.b.*` above it, else None."""
    if key in table:
        return key, table[key]
    parts = key.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        pattern = ".".join(parts[:depth]) + ".*"
        if pattern in table:
            return pattern, table[pattern]
    return None


# ------------------------------------------------------------------------------------------------- reading the tables


def _read(name: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
    return yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), loader)


_VERL, _OTHERS = _read("verl_keys.yaml"), _read("synonyms.yaml")
OTHER_ENGINES: tuple[str, ...] = tuple(_VERL["words"]["other_engines"])
"""verl's engines beside FSDP; its YAML files are named after them."""
_ALTERNATIVES = re.compile("<([^>]*)>")


def _spread(key: str, target: str = "") -> Iterator[tuple[str, str]]:
    """Yield a key and its target once for each name that a `<a|b>` of the key stands for."""
    found = _ALTERNATIVES.search(key)
    if found is None:
        yield key, next(_spread(target))[0] if target else ""
        return
    for word in found[1].split("|"):
        for name in _VERL["words"].get(word, [word]):
            yield from _spread(key.replace(found[0], name), target.replace(found[0], name))


def _names(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table of keys and their targets, written out."""
    return dict(pair for key, target in table.items() for pair in _spread(key, target))


def _verdicts(rows: Iterable[Mapping[str, Any]]) -> dict[str, Verdict]:
    """Return key → verdict for the rows of a table `outside`."""
    return {key: _verdict(row) for row in rows for key in _keys_of(row)}


def _keys_of(row: Mapping[str, Any]) -> list[str]:
    written = row["keys"] if isinstance(row["keys"], list) else [row["keys"]]
    return [key for one in written for key, _ in _spread(one)]


def _verdict(row: Mapping[str, Any]) -> Verdict:
    fields = {name: value for name, value in row.items() if name not in ("keys", "value", "always")}
    if "always" in row:
        fields |= {"same": [row["always"], None], "taken": [not row["always"]]}
    return Verdict(**fields)


def _values(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, Any], Verdict]:
    return {(key, row["value"]): _verdict(row) for row in rows for key in _keys_of(row)}


def _synonyms(table: Mapping[str, str]) -> dict[str, Synonym]:
    """Return name → counterpart for rows such as `l2: optim.weight_decay (how it differs)`."""
    parts = {name: text.partition(" (") for name, text in table.items()}
    return {name: Synonym(key, but.removesuffix(")")) for name, (key, _, but) in parts.items()}


def _arguments(part: str) -> dict[str, Synonym]:
    return _synonyms(_OTHERS["python"]["both"] | _OTHERS["python"][part])


def _of_section(section: str, name: str, outside: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Return the verdicts on the keys of one section, for another kind of run that has the section as `name`."""
    return {
        f"{name}{key.removeprefix(section)}": verdict._replace(
            says=verdict.says.replace(section, name), instead=verdict.instead.replace(section, name)
        )
        for key, verdict in outside.items()
        if key.startswith(f"{section}.")
    }


def _of_ppo() -> Spellings:
    return Spellings(
        renamed=_names(_VERL["renamed"]),
        must_equal=_names(_VERL["must_equal"]),
        outside=_verdicts(_VERL["outside"]),
        values=_values(_VERL["values"]),
        null_is_unset=frozenset(key for one in _VERL["null_is_unset"] for key, _ in _spread(one)),
        converted=_PPO_CONVERTED,
        synonyms=_arguments("ppo") | _synonyms(_OTHERS["ppo"]),
        arguments=_arguments("ppo"),
    )


def _of_offline(ppo: Spellings) -> Spellings:
    table = _VERL["offline"]
    outside: dict[str, Verdict] = {}
    for section, name in _names(table["taken_over"]).items():
        outside |= _of_section(section, name, ppo.outside)
    return Spellings(
        renamed=_names(table["renamed"]),
        outside=outside | _verdicts(table["outside"]),
        values=_values(table["values"]),
        converted={"optim.optimizer": _optimizer("optim")},
        synonyms=_arguments("offline") | _synonyms(_OTHERS["offline"]),
        arguments=_arguments("offline"),
    )


PPO_SPELLINGS = _of_ppo()
OFFLINE_SPELLINGS = _of_offline(PPO_SPELLINGS)
ONLY_FSDP2 = PPO_SPELLINGS.outside[f"{ACTOR}.strategy"]
