"""Steps that others have published, each with what is known of it, beside what the model of cost says of hrl there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hrl.cluster.precision import with_dtypes
from hrl.config.outline import outline_of
from hrl.plan.hardware import GPUS
from hrl.plan.launch_line import LaunchLine
from hrl.plan.lengths import Lengths
from hrl.plan.shapes import shapes_of
from hrl.plan.step import CostModel, StepCost
from hrl.plan.workload import Workload

MODELS = Path(__file__).with_name("models")


@dataclass(frozen=True)
class Published:
    """A published step.

    Attributes:
        who: System and version.
        what: Model, devices, samples, lengths, and what of these is not known.
        gpu: Kind of device.
        model: Folder of `models`.
        line: The launch line of hrl that comes nearest.
        prompt: Mean tokens of a prompt.
        response: Mean tokens of a response.
        seconds: Phase, several that run at once (`a | b`), or `step` → published seconds.
        knows_lengths: Whether the lengths are published too, so that nothing was chosen: the row is a prediction.
        fits: Phases by which something was chosen → what.
    """

    who: str
    what: str
    gpu: str
    model: str
    line: tuple[str, ...]
    prompt: float
    response: float
    seconds: dict[str, float]
    knows_lengths: bool = False
    fits: dict[str, str] = field(default_factory=dict)

    def cost(self) -> StepCost:
        """Return what the model says of this line."""
        named = f"actor_rollout_ref.model.path={MODELS / self.model}"
        config = LaunchLine.of(["grpo", "data.train_files=rows.jsonl", named, *self.line]).config()
        config = with_dtypes(config, "cuda")
        work = Workload.of(config, Lengths(self.prompt, self.response))
        return CostModel(config, shapes_of(outline_of(config)), GPUS[self.gpu], work).cost()


def _samples(
    prompts: int, samples: int, mini_batch: int, longest_prompt: int, longest_response: int
) -> tuple[str, ...]:
    return (
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.rollout.n={samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}",
        f"data.max_prompt_length={longest_prompt}",
        f"data.max_response_length={longest_response}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max(16384, longest_prompt + longest_response)}",
    )


def _machines(count: int, tensor_parallel: int, engine_share: float = 0.6) -> tuple[str, ...]:
    return (
        f"trainer.nnodes={count}",
        "trainer.n_gpus_per_node=8",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={engine_share}",
    )


_NO_KL = ("actor_rollout_ref.actor.use_kl_loss=false",)
_APART = (
    "recipe=ppo", "trainer.nnodes=2", "trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.max_num_seqs=256",
    "reward.reward_model.enable=true", f"reward.reward_model.model_path={MODELS / 'Llama-2-7b'}",
    f"critic.model.path={MODELS / 'Llama-2-7b'}",
    "trainer.resource_pools={actor: [2,2], critic: [2,2], ref: [1,1], rm: [1,1], rollout: [2,2]}",
    "trainer.role_pools={actor: actor, critic: critic, ref: ref, rm: rm, rollout: rollout}",
)  # fmt: skip

PUBLISHED = [
    Published(
        "NeMo RL 0.5", "Llama-3.1-8B, 16 H100; 64 × 32, mean 1,019 of 4,096 tokens, 4 optimizer steps", "h100",
        "Llama-3.1-8B", (*_samples(64, 32, 16, 128, 3968), *_machines(2, 1)), 100, 919, {"step": 92.8}, True,
    ),
    Published(
        "NeMo RL 0.7", "Qwen3-32B, 32 H100; 64 × 32, mean 3,256 of 4,096 tokens", "h100",
        "Qwen3-32B", (*_samples(64, 32, 64, 128, 3968), *_machines(4, 4)), 100, 3156, {"step": 323}, True,
    ),
    Published(
        "NeMo RL 0.7", "Qwen3-30B-A3B, 32 H100; 64 × 32, mean 3,198 of 4,096 tokens", "h100",
        "Qwen3-30B-A3B", (*_samples(64, 32, 64, 128, 3968), *_machines(4, 2)), 100, 3098, {"step": 171}, True,
    ),
    *(
        Published(
            "verl, December 2025", f"Qwen2.5-7B, {gpus} H20; 512 × 16 of at most 28,672 tokens, mean not known: 1,800 "
            "taken; 16 optimizer steps", "h20", "Qwen2.5-7B",
            (*_samples(512, 16, 32, 2048, 28672), *_machines(gpus // 8, 1, 0.8), *_NO_KL), 150, 1800, seconds,
            fits={"update_actor": fits},
        )
        for gpus, seconds, fits in (
            (32, {"gen": 357.41, "old_log_prob": 107.71, "update_actor": 269.80}, "the mean length"),
            (64, {"gen": 150.72, "old_log_prob": 70.26, "update_actor": 133.41}, "the longest over the mean"),
            (128, {"gen": 177.85, "old_log_prob": 53.92, "update_actor": 113.81}, "the longest over the mean"),
        )
    ),
    Published(
        "verl, December 2025", "Qwen3-30B-A3B, 128 H20; 512 × 16, of 8,192 tokens, mean not known: 2,500 taken; 4 "
        "optimizer steps", "h20", "Qwen3-30B-A3B",
        (*_samples(512, 16, 128, 2048, 8192), *_machines(16, 4)), 150, 2500,
        {"gen": 348.05, "old_log_prob": 28.73, "ref": 20.86, "update_actor": 86.27},
    ),
    *(
        Published(
            "AReaL 0.2", f"7B, {gpus} H800, engines apart; 512 × 16, lengths not known: mean 7,800 of 27,648 taken",
            "h800", "Qwen2.5-7B",
            (*_samples(512, 16, 512, 512, 27648), *_machines(gpus // 8, 1, 0.8), *_NO_KL), 106, 7800, {"step": seconds},
        )
        for gpus, seconds in ((32, 2275), (128, 815))
    ),
    Published(
        "OpenRLHF, May 2024", "PPO, Llama-2-7B, 16 A800 (actor 4, critic 4, reference 2, reward 2, engines 4); 1,024 × "
        "1, lengths not known: 512 + 512 of 1,024 + 1,024 taken; 8 optimizer steps", "a800", "Llama-2-7b",
        (*_APART, *_samples(1024, 1, 128, 1024, 1024)), 512, 512,
        {"gen": 262.96, "reward | old_log_prob | ref | values": 32.7, "update_critic | update_actor": 171.13,
         "weight_sync": 4.32},
    ),
]  # fmt: skip


def rows() -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| who | what | phase | published s | model s | model / published | what it shows |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in PUBLISHED:
        cost = each.cost()
        said = {phase.name: phase.seconds for phase in cost.phases} | {"step": cost.seconds}
        for number, (phases, seconds) in enumerate(each.seconds.items()):
            model = max(said[phase] for phase in phases.split(" | "))
            who, what = (each.who, each.what) if number == 0 else ("", "")
            name = phases if phases == "step" else ", ".join(f"`{phase}`" for phase in phases.split(" | "))
            shows = "a prediction" if each.knows_lengths else "lengths guessed"
            if phases in each.fits:
                shows = f"fixes {each.fits[phases]}"
            values = f"{seconds:,.0f} | {model:,.0f} | {model / seconds:.2f}"
            lines.append(f"| {who} | {what} | {name} | {values} | {shows} |")
    return lines


if __name__ == "__main__":
    import sys

    sys.stdout.write("\n".join(rows()) + "\n")
