"""Defaults that follow from another key: filled in before validation, so that readers find a plain value."""

from collections.abc import Callable, Mapping
from typing import Any

from hrl.algos.registry import estimator_traits
from hrl.config.keys import leaves
from hrl.config.ppo import PPOTrainerConfig
from hrl.config.section import Section

_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
DEFAULT_GROUP_SIZE = 8
OWN_GPU_SHARE = 0.9
"""vLLM's own default, a little lower: the buffer of a weight sync comes on top."""
SHARED_GPU_SHARE = 0.5


class Values:
    """What is set so far, with the schema's plain defaults underneath."""

    def __init__(self, given: Mapping[str, Any], root: type[Section]) -> None:
        self.given = given
        self.values = dict(given)
        self.root = root

    def __call__(self, key: str) -> Any:
        return self.values.get(key, leaves(self.root)[key].default)


Derive = Callable[[Values], Any]


def _actor_dynamic(get: Values) -> bool:
    return get(f"{_ACTOR}.ppo_micro_batch_size_per_gpu") is None


def _dynamic_unless(rows_key: str) -> Derive:
    """Follow the actor where its flag was written; else pack dynamically unless a number of rows was given."""
    flag = f"{_ACTOR}.use_dynamic_bsz"

    def derive(get: Values) -> Any:
        if flag in get.given or rows_key not in get.given:
            return get(flag)
        return get.given[rows_key] is None

    return derive


def _estimator(get: Values) -> str:
    """PPO's launch scripts set the critic and leave the estimator at verl's default, gae."""
    mentions_critic = any(key.startswith("critic.") and value not in (None, False) for key, value in get.given.items())
    return "gae" if mentions_critic else "grpo"


def _group_size(get: Values) -> int:
    estimator = get("algorithm.adv_estimator")
    grouped = isinstance(estimator, str) and estimator_traits(estimator).min_group_size > 1
    return DEFAULT_GROUP_SIZE if grouped else 1


def _actor_rows(get: Values) -> Any:
    return None if get(f"{_ACTOR}.use_dynamic_bsz") else get(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")


def _mini_batch(get: Values) -> Any:
    """The whole batch where that is smaller than the plain default: one optimizer step."""
    plain, batch = leaves(get.root)[f"{_ACTOR}.ppo_mini_batch_size"].default, get("data.train_batch_size")
    return batch if isinstance(batch, int) and 0 < batch < plain else plain


def _overlong_zone(get: Values) -> Any:
    """A fifth of the longest response, as in DAPO's paper (arXiv:2503.14476, section 4.1: 4,096 of 20,480 tokens)."""
    longest = get("data.max_response_length")
    wanted = get("reward.overlong_buffer.enable") is True and isinstance(longest, int)
    return max(longest // 5, 1) if wanted else 0


def _function_weight(get: Values) -> float:
    """A reward model decides alone, as in verl, unless the user brings a function as well."""
    alone = get("reward.reward_model.enable") is True and get("reward.custom_reward_function.path") is None
    return 0.0 if alone else 1.0


def _val_samples(get: Values) -> bool:
    """Whoever gives validation a temperature wants samples."""
    temperature = get(f"{_ROLLOUT}.val_kwargs.temperature")
    return isinstance(temperature, int | float) and temperature > 0


def _default_pools(get: Values) -> dict[str, Any]:
    return {"global": get("trainer.n_gpus_per_node")}


def _engine_share(get: Values) -> float:
    """An engine whose pool holds no other role has its GPUs to itself, whether or not the other roles are built."""
    placed = get("trainer.role_pools")
    pool = placed.get("rollout") if isinstance(placed, dict) else None
    pools = get("trainer.resource_pools")
    home = placed.get("actor", next(iter(pools))) if pool is not None and isinstance(pools, dict) and pools else pool
    alone = pool is not None and pool not in (home, *(other for role, other in placed.items() if role != "rollout"))
    return OWN_GPU_SHARE if alone else SHARED_GPU_SHARE


def run_folder(get: Values) -> str:
    """The folder of the project and the experiment."""
    return f"outputs/{get('trainer.project_name')}/{get('trainer.experiment_name')}"


def _val_files(get: Values) -> Any:
    """The bundled validation rows belong to the bundled training rows; other training rows bring their own or none."""
    known = leaves(get.root)
    train = get("data.train_files")
    own = ([train] if isinstance(train, str) else train) != known["data.train_files"].default
    return [] if own else known["data.val_files"].default


def _validates(get: Values) -> bool:
    """Whoever names training rows alone asks for no validation; an empty `data.val_files` is said aloud."""
    return "data.val_files" in get.given or bool(get("data.val_files"))


#: Validation follows from the rows, for every kind of run.
DERIVED_VALIDATION: dict[str, Derive] = {
    "data.val_files": _val_files,
    "trainer.val_before_train": _validates,
    "trainer.val_after_train": _validates,
}


def load_contents(checkpoint: str) -> Derive:
    """The saved parts that a run continues from; `checkpoint` is the section's key."""

    def derive(get: Values) -> Any:
        saved = get(f"{checkpoint}.save_contents")
        return [part for part in saved if part != "hf_model"] or ["model"] if isinstance(saved, list) else saved

    return derive


def same_as(source: str) -> Derive:
    """The value of another key."""
    return lambda get: get(source)


_ACTOR_BUDGET = f"{_ACTOR}.ppo_max_token_len_per_gpu"
_ACTOR_ROWS = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"

DERIVED: dict[str, Derive] = {
    f"{_ACTOR}.use_dynamic_bsz": _actor_dynamic,
    f"{_ACTOR}.ppo_mini_batch_size": _mini_batch,
    f"{_ACTOR}.checkpoint.load_contents": load_contents(f"{_ACTOR}.checkpoint"),
    "algorithm.adv_estimator": _estimator,
    f"{_ROLLOUT}.n": _group_size,
    f"{_ROLLOUT}.seed": same_as("trainer.seed"),
    "data.seed": same_as("trainer.seed"),
    **DERIVED_VALIDATION,
    **{
        f"{owner}.{name}": rule
        for owner in (_REF, _ROLLOUT)
        for name, rule in {
            "log_prob_use_dynamic_bsz": _dynamic_unless(f"{owner}.log_prob_micro_batch_size_per_gpu"),
            "log_prob_max_token_len_per_gpu": same_as(_ACTOR_BUDGET),
            "log_prob_micro_batch_size_per_gpu": same_as(_ACTOR_ROWS),
        }.items()
    },
    "critic.use_dynamic_bsz": _dynamic_unless("critic.ppo_micro_batch_size_per_gpu"),
    "critic.ppo_max_token_len_per_gpu": same_as(_ACTOR_BUDGET),
    "critic.forward_max_token_len_per_gpu": same_as("critic.ppo_max_token_len_per_gpu"),
    "critic.ppo_micro_batch_size_per_gpu": same_as(_ACTOR_ROWS),
    "critic.ppo_mini_batch_size": same_as(f"{_ACTOR}.ppo_mini_batch_size"),
    "critic.ppo_epochs": same_as(f"{_ACTOR}.ppo_epochs"),
    "critic.loss_agg_mode": same_as(f"{_ACTOR}.loss_agg_mode"),
    "critic.model.path": same_as(f"{_MODEL}.path"),
    "reward.overlong_buffer.len": _overlong_zone,
    "reward.function_weight": _function_weight,
    f"{_ROLLOUT}.val_kwargs.do_sample": _val_samples,
    "reward.reward_model.max_token_len_per_gpu": same_as(_ACTOR_BUDGET),
    "reward.reward_model.micro_batch_size_per_gpu": _actor_rows,
    "trainer.default_local_dir": run_folder,
    "trainer.resource_pools": _default_pools,
    f"{_ROLLOUT}.gpu_memory_utilization": _engine_share,
}
"""Key → its default as a function of other keys, in an order in which sources come first."""


def with_derived_defaults(
    given: Mapping[str, Any],
    derived: Mapping[str, Derive] = DERIVED,
    root: type[Section] = PPOTrainerConfig,
) -> dict[str, Any]:
    """Fill in every derived default that was not given.

    Args:
        given: Dotted key → value, as the user wrote it; may hold wrong types, which validation reports later.
        derived: Key → its default, sources first.
        root: The schema.

    Returns:
        `given` with the derived keys added, and pools written as one number spread over `trainer.nnodes` machines.
    """
    values = Values(given, root)
    for key, derive in derived.items():
        if key not in given:
            values.values[key] = derive(values)
    pools, nodes = values.values.get("trainer.resource_pools"), values("trainer.nnodes")
    if isinstance(pools, dict):
        machines = max(nodes, 1) if isinstance(nodes, int) else 1  # validation says so where it is no number
        values.values["trainer.resource_pools"] = {
            pool: [size] * machines if isinstance(size, int) else size for pool, size in pools.items()
        }
    return values.values
