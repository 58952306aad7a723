"""`distillation.*`: a teacher whose distribution the policy approaches on its own samples."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NegativeFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Tag,
)

from hrl.algos.registry import DISTILLATION_TRAITS, DistillationTraits
from hrl.config.section import NameOf, Section, StrList, section


def _as_name(value: object) -> object:
    """Return what a row has in a column as a mapping names it, where it is no text: `3`, `true`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(int(value) if value == value // 1 else value)
    return value


_Name = Annotated[str, BeforeValidator(_as_name)]


class TeacherServerConfig(Section):
    """`distillation.teacher_models.teacher_model.server`: a teacher that somebody else serves with vLLM's server."""

    urls: Annotated[
        Annotated[StrList, Tag("[list]")] | Annotated[dict[_Name, StrList], Tag("[mapping]")],
        Discriminator(lambda value: "[mapping]" if isinstance(value, Mapping) else "[list]"),
    ] = Field(default_factory=list)
    """Addresses of servers of one model, e.g. `[http://10.0.0.5:8000]`, which score samples by `prompt_logprobs`; none
    has the run hold the teacher itself. Several teachers are a mapping, e.g. `{openai/gsm8k: [http://10.0.0.5:8000],
    mbpp: [http://10.0.0.6:8000]}`, of what rows have in the column `distillation.teacher_key` to the servers that score
    them."""
    api_key: str | None = None
    """`env:NAME`, where the environment variable NAME has the key that all of them take; null sends none."""

    @property
    def of_each(self) -> tuple[tuple[str, ...], ...]:
        """Addresses of each teacher's servers; rows of several names may have one teacher."""
        return tuple(dict.fromkeys(map(tuple, self.urls.values() if isinstance(self.urls, dict) else [self.urls])))


class TeacherModelConfig(Section):
    """`distillation.teacher_models.teacher_model`: the teacher."""

    model_path: str | None = None
    """Folder or hub id of the teacher, of any architecture with the policy's vocabulary. It takes the place of the
    reference: `actor_rollout_ref.ref` says how it is sharded and run, `trainer.role_pools` where. With `server.urls`
    the name that it has there; null takes the first model there."""
    server: TeacherServerConfig = section(TeacherServerConfig)


class TeacherModelsConfig(Section):
    """`distillation.teacher_models`: there is one."""

    teacher_model: TeacherModelConfig = section(TeacherModelConfig)


class DistillationLossConfig(Section):
    """`distillation.distillation_loss`: the divergence from the teacher, and where it enters."""

    loss_mode: Annotated[str, NameOf(DISTILLATION_TRAITS)] = "k3"
    """Divergence of the policy from the teacher at each sampled token: an estimate from that token alone (the
    estimators of `algorithm.kl_penalty`), exact over the teacher's `topk` most likely tokens (`reverse_kl_topk`, and
    `forward_kl_topk` in the other direction), or over all of them (`reverse_kl`, `forward_kl`)."""
    topk: PositiveInt = 32
    """Number of the teacher's tokens that the `_topk` modes read."""
    use_task_rewards: bool = True
    """Learn from the rewards too; false learns from the teacher alone, and rewards are measured only."""
    distillation_loss_coef: NonNegativeFloat = 1.0
    """Weight of the divergence beside the rewards; without them it is 1."""
    loss_max_clamp: PositiveFloat | None = None
    """Largest divergence of a token, and with a minus sign the smallest; a token beyond has no gradient. Null clamps
    none."""
    log_prob_min_clamp: NegativeFloat | None = None
    """What log-probs of policy and teacher are raised to in the `_topk` modes, where they are lower; null raises
    none."""
    use_policy_gradient: bool = False
    """Subtract the divergence from every token's advantage instead of adding it to the loss."""

    @property
    def traits(self) -> DistillationTraits:
        """What `loss_mode` reads of the teacher."""
        return DISTILLATION_TRAITS[self.loss_mode]

    @property
    def weight(self) -> float:
        """Of the divergence."""
        return self.distillation_loss_coef if self.use_task_rewards else 1.0


class DistillationConfig(Section):
    """`distillation.*`: a teacher that scores the policy's own samples, token by token."""

    enabled: bool = False
    """Learn from a teacher."""
    teacher_models: TeacherModelsConfig = section(TeacherModelsConfig)
    teacher_key: str = "data_source"
    """Column by which several served teachers share the rows out, such as `data_source`, which is a file's name where
    rows have none."""
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)

    def named_in(self, data_source: str, columns: Mapping[str, Any]) -> str | None:
        """Return what a row has in the column `teacher_key`, as a mapping of teachers names it; None without one.

        Args:
            data_source: The row's.
            columns: Its other columns.
        """
        value = _as_name(data_source if self.teacher_key == "data_source" else columns.get(self.teacher_key))
        return None if value is None else str(value)
