"""Tables of everything that can be chosen by name, and registries of the functions.

The tables need no torch: a configuration is checked against them before torch is imported. The file with a family's
functions fills a `Registry` over its table. A member that a user registers is added to both and can be chosen like a
built-in one.
"""

from __future__ import annotations

from collections import ChainMap, UserDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

IN_FILE = ".py:"
"""Stands between file and name where a configuration names what a user's file registers: `my_loss.py:mine`."""


@dataclass(frozen=True)
class Traits:
    """Properties of a member that must be known before it is called; none in most families."""


@dataclass(frozen=True)
class EstimatorTraits(Traits):
    """The needs of an advantage estimator.

    Attributes:
        min_group_size: The smallest number of responses per prompt that makes sense. Above 1, it reads `group_ids`.
        needs_critic: Reads `values`.
        needs_baseline: Reads `reward_baselines`.
        needs_parts: Reads `reward_parts`.
        needs_old_log_probs: Reads `old_log_probs`.
        needs_sum_pi_squared: Reads `sum_pi_squared`.
    """

    min_group_size: int = 1
    needs_critic: bool = False
    needs_baseline: bool = False
    needs_parts: bool = False
    needs_old_log_probs: bool = False
    needs_sum_pi_squared: bool = False


@dataclass(frozen=True)
class PolicyLossTraits(Traits):
    """The properties of a policy loss.

    Attributes:
        zero_at_zero_advantage: Whether a row whose advantages are all 0 has no gradient, whatever its ratios are. Then
            the trainer skips the forward and backward pass of such rows; other losses see every row.
        has_row_ratio: Whether a token's loss has the ratio of its whole row in it.
    """

    zero_at_zero_advantage: bool = False
    has_row_ratio: bool = False


@dataclass(frozen=True)
class PairLossTraits(Traits):
    """The inputs of a pairwise loss besides the two answers and beta.

    Attributes:
        reference: Whether it reads the log-probs of a reference.
        mean_log_prob: Whether log-probs are means over a response's tokens instead of sums.
        label_smoothing: Whether it reads this field of `hrl.algos.preference.PairOptions`.
        target_margin: Whether it reads this field of `hrl.algos.preference.PairOptions`.
    """

    reference: bool = True
    mean_log_prob: bool = False
    label_smoothing: bool = True
    target_margin: bool = True


@dataclass(frozen=True)
class LabelledLossTraits(Traits):
    """What a loss of single answers, each labelled good or bad, reads besides its log-ratio and beta.

    Attributes:
        baseline: How far the policy has moved on mismatched prompts and answers.
    """

    baseline: bool = True


@dataclass(frozen=True)
class DistillationTraits(Traits):
    """What a distillation loss reads of the teacher, beside the log-prob of the sampled token.

    Attributes:
        reads_top: The log-probs of the teacher's most likely tokens.
        reads_all: Those of all tokens.
        has_gradient: Whether it can be a loss; the expected gradient of the others is zero.
    """

    reads_top: bool = False
    reads_all: bool = False
    has_gradient: bool = True

    @property
    def is_sampled(self) -> bool:
        """Whether it reads nothing else."""
        return not (self.reads_top or self.reads_all)


ESTIMATOR_TRAITS: dict[str, EstimatorTraits] = {
    "gae": EstimatorTraits(needs_critic=True),
    "grpo": EstimatorTraits(min_group_size=2),
    "rloo": EstimatorTraits(min_group_size=2),
    "reinforce_plus_plus": EstimatorTraits(),
    "reinforce_plus_plus_baseline": EstimatorTraits(min_group_size=2),
    "remax": EstimatorTraits(needs_baseline=True),
    "opo": EstimatorTraits(min_group_size=2),
    "grpo_passk": EstimatorTraits(min_group_size=2),
    "gpg": EstimatorTraits(min_group_size=2),
    "gdpo": EstimatorTraits(min_group_size=2, needs_parts=True),
    "optimal_token_baseline": EstimatorTraits(min_group_size=2, needs_old_log_probs=True, needs_sum_pi_squared=True),
    "grpo_turns": EstimatorTraits(min_group_size=2),
    "gae_turns": EstimatorTraits(needs_critic=True),
    "best_of_n": EstimatorTraits(min_group_size=2),
}
POLICY_LOSS_TRAITS: dict[str, PolicyLossTraits] = {
    "vanilla": PolicyLossTraits(zero_at_zero_advantage=True),
    "gspo": PolicyLossTraits(zero_at_zero_advantage=True, has_row_ratio=True),
    "cispo": PolicyLossTraits(zero_at_zero_advantage=True),
    "gpg": PolicyLossTraits(zero_at_zero_advantage=True),
    "sapo": PolicyLossTraits(zero_at_zero_advantage=True),
    "geo_mean": PolicyLossTraits(zero_at_zero_advantage=True, has_row_ratio=True),
    "dppo_tv": PolicyLossTraits(zero_at_zero_advantage=True),
    "dppo_kl": PolicyLossTraits(zero_at_zero_advantage=True),
    "dro": PolicyLossTraits(),
    "clip_cov": PolicyLossTraits(zero_at_zero_advantage=True),
    "kl_cov": PolicyLossTraits(),
}
PAIR_LOSS_TRAITS: dict[str, PairLossTraits] = {
    "sigmoid": PairLossTraits(target_margin=False),
    "ipo": PairLossTraits(mean_log_prob=True, label_smoothing=False, target_margin=False),
    "hinge": PairLossTraits(label_smoothing=False, target_margin=False),
    "simpo": PairLossTraits(reference=False, mean_log_prob=True),
    "orpo": PairLossTraits(reference=False, mean_log_prob=True, target_margin=False),
}
LABELLED_LOSS_TRAITS: dict[str, LabelledLossTraits] = {
    "kto": LabelledLossTraits(),
    "apo_zero_unpaired": LabelledLossTraits(baseline=False),
}
OFFLINE_LOSSES: Mapping[str, Traits] = ChainMap[str, Any](PAIR_LOSS_TRAITS, LABELLED_LOSS_TRAITS)
"""Losses of pairs and losses of single answers, which `main_dpo` chooses from."""
DISTILLATION_TRAITS: dict[str, DistillationTraits] = {
    "k1": DistillationTraits(has_gradient=False),
    "kl": DistillationTraits(has_gradient=False),
    "abs": DistillationTraits(),
    "k2": DistillationTraits(),
    "mse": DistillationTraits(),
    "k3": DistillationTraits(),
    "low_var_kl": DistillationTraits(),
    "reverse_kl_topk": DistillationTraits(reads_top=True),
    "forward_kl_topk": DistillationTraits(reads_top=True),
    "reverse_kl": DistillationTraits(reads_all=True),
    "forward_kl": DistillationTraits(reads_all=True),
}


def _names(*names: str) -> dict[str, Traits]:
    return dict.fromkeys(names, Traits())


AGGREGATION_NAMES = _names(
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
)
KL_NAMES = _names("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
IMPORTANCE_LEVEL_NAMES = _names("token", "sequence")
REWARD_SHAPER_NAMES = _names("clip", "scale", "standardise")
REWEIGHT_METHOD_NAMES = _names("pow", "max_min", "max_random")


def member_name(value: str) -> str:
    """Return the name that a configuration's value stands for: `mine` for `my_loss.py:mine`, else the value."""
    return value.rpartition(IN_FILE)[2]


def estimator_traits(name: str) -> EstimatorTraits:
    """Return the needs of an advantage estimator; none for an unknown name, which is refused elsewhere."""
    return ESTIMATOR_TRAITS.get(member_name(name), EstimatorTraits())


def policy_loss_traits(name: str) -> PolicyLossTraits:
    """Return the properties of a policy loss; the defaults for an unknown name, which is refused elsewhere."""
    return POLICY_LOSS_TRAITS.get(member_name(name), PolicyLossTraits())


def pair_loss_traits(name: str) -> PairLossTraits:
    """Return the inputs of a pairwise loss; all for an unknown name, which is refused elsewhere."""
    return PAIR_LOSS_TRAITS.get(name, PairLossTraits())


def learns_from_labels(name: str) -> bool:
    """Return whether a loss of `main_dpo` takes single answers with a label, instead of pairs."""
    return name in LABELLED_LOSS_TRAITS


Member = TypeVar("Member")
Known = TypeVar("Known", bound=Traits)


_REGISTRIES: list[Registry[Any, Any]] = []


def registered_here(table: Collection[str]) -> frozenset[str]:
    """Return the names in a table that were registered in this process, which a new one does not know."""
    return frozenset(name for registry in _REGISTRIES if registry.table is table for name in registry.added())


class Registry(UserDict[str, Member], Generic[Member, Known]):
    """The members of a family by name. `registry["mine"] = function` adds one with the default traits.

    `find` and `in` also take `my_loss.py:mine`, as a configuration names what that file registers.

    Args:
        family: What messages call a member.
        members: The built-in members, if they are not registered one by one.
        table: The family's table; None if no configuration chooses from it.
        traits: Class of a member's entry in the table.
    """

    def __init__(
        self,
        family: str,
        members: Mapping[str, Member] | None = None,
        *,
        table: dict[str, Known] | None = None,
        traits: type[Known] = Traits,  # type: ignore[assignment]
    ) -> None:
        self.family = family
        self.table: dict[str, Known] = {} if table is None else table
        self.traits = traits
        self._built_in = frozenset([*self.table, *(members or ())])
        _REGISTRIES.append(self)
        super().__init__(members or {})

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and member_name(name) in self.data

    def __setitem__(self, name: str, member: Member) -> None:
        self.table.setdefault(name, self.traits())
        super().__setitem__(name, member)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.table[name]

    def register(self, name: str, **traits: object) -> Callable[[Member], Member]:
        """Return a decorator that adds a member with these traits; without any, the table's stay.

        Raises:
            TypeError: There is no such trait.
            ValueError: The name is taken by another member.
        """
        entry = self.traits(**traits) if traits else self.table.get(name, self.traits())

        def decorator(member: Member) -> Member:
            if self.get(name, member) is not member:
                raise ValueError(f"{self.family} {name!r} is already registered as {self[name]}")
            self.table[name] = entry
            self[name] = member
            return member

        return decorator

    def added(self) -> dict[str, tuple[Member, Known]]:
        """Return what a user has registered: name → member and its traits."""
        return {name: (self.data[name], self.table[name]) for name in self.data if name not in self._built_in}

    def take(self, added: Mapping[str, tuple[Member, Known]]) -> None:
        """Register what another process has `added`; what is here already stays."""
        for name, (member, traits) in added.items():
            if name not in self.data:
                self.table[name] = traits
                self[name] = member

    def find(self, name: str) -> Member:
        """Return the member of that name.

        Raises:
            ValueError: Unknown name; lists the known ones.
        """
        if name not in self:
            raise ValueError(f"unknown {self.family} {name!r}; choose one of {sorted(self)}")
        return self.data[member_name(name)]
