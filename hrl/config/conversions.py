"""verl's keys whose value becomes the value of other keys here."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

_ACTOR, _REF, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
_RM = "reward.reward_model"

Given = Callable[[str], Any]
"""The value of a key, as written or as the schema has it by default."""


class Conversion(NamedTuple):
    """How a value becomes that of other keys.

    Attributes:
        convert: From the value and the other keys to key → value; None where it can't be said.
        says: What is computed, for the documentation.
        instead: What to write where it can't be.
    """

    convert: Callable[[Any, Given], Mapping[str, Any] | None]
    says: str
    instead: str


def _over_processes(target: str) -> Conversion:
    """Return a micro-batch of all processes, cut into one for each; as in verl, a rest is dropped."""

    def convert(rows: Any, given: Given) -> Mapping[str, Any] | None:
        per_machine, machines = given("trainer.n_gpus_per_node"), given("trainer.nnodes")
        if not all(type(count) is int and count > 0 for count in (rows, per_machine, machines)):
            return None
        return {target: max(1, rows // (per_machine * machines))}

    return Conversion(convert, f"`{target}` × the number of processes", f"set {target}, of one process")


def switches(*targets: str) -> Conversion:
    """One switch for several; off says nothing about them."""

    def convert(value: Any, _: Given) -> Mapping[str, Any] | None:
        if not isinstance(value, bool):
            return None
        return dict.fromkeys(targets, True) if value else {}

    return Conversion(convert, " and ".join(f"`{target}=true`" for target in targets), f"set {' and '.join(targets)}")


def _validation_alone() -> Conversion:
    def convert(value: Any, _: Given) -> Mapping[str, Any] | None:
        if not isinstance(value, bool):
            return None
        return {"trainer.total_training_steps": 0} if value else {}

    return Conversion(convert, "`trainer.total_training_steps=0`", "set trainer.total_training_steps=0")


def _sampled_at_once() -> Conversion:
    """Batches of `train_batch_size` prompts are sampled until enough groups differ; as many prompts as were allowed."""
    enable, train, bound = (
        "algorithm.filter_groups.enable",
        "data.train_batch_size",
        "algorithm.filter_groups.max_num_gen_batches",
    )

    def convert(prompts: Any, given: Given) -> Mapping[str, Any] | None:
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


def _offload(owners: Iterable[str], *names: str) -> dict[str, Conversion]:
    return {f"{owner}.offload_policy": switches(*(f"{owner}.{name}" for name in names)) for owner in owners}


CONVERTED: dict[str, Conversion] = {
    f"{_ACTOR}.ppo_micro_batch_size": _over_processes(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    "critic.ppo_micro_batch_size": _over_processes("critic.ppo_micro_batch_size_per_gpu"),
    f"{_REF}.log_prob_micro_batch_size": _over_processes(f"{_REF}.log_prob_micro_batch_size_per_gpu"),
    f"{_ROLLOUT}.log_prob_micro_batch_size": _over_processes(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    f"{_RM}.micro_batch_size": _over_processes(f"{_RM}.micro_batch_size_per_gpu"),
    **_offload((f"{_ACTOR}.fsdp_config", "critic.model.fsdp_config"), "param_offload", "optimizer_offload"),
    **_offload((f"{_REF}.fsdp_config", f"{_RM}.model.fsdp_config"), "param_offload"),
    "data.gen_batch_size": _sampled_at_once(),
    "trainer.val_only": _validation_alone(),
}
"""Key → how its value becomes that of other keys. A key that is written itself wins."""
