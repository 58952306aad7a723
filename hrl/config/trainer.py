"""`trainer.*`: the run itself."""

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from hrl.config.alarms import Thresholds, default_thresholds
from hrl.config.section import ONE_OR_MANY, Get, Label, MinusOneOrMore, NameOf, Section, Unit, follows, section

JSON_CONSOLE = "console-json"
WITHOUT_TRACKER = ("console", JSON_CONSOLE, "file")
"""Entries of `trainer.logger` that are not trackers; a run is shown and logged in any case."""
LOGGERS = (*WITHOUT_TRACKER, "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
"""Entries of `trainer.logger`."""

Frequency = Annotated[MinusOneOrMore, BeforeValidator(lambda value: -1 if value is False else value)]
"""A number of steps between two events; false, -1 and 0 mean never."""
Steps = Annotated[
    list[PositiveInt],
    BeforeValidator(
        lambda value: value if isinstance(value, list) else [] if value is None or value is False else [value]
    ),
]
"""Numbers of steps, counted from 1; a single number is accepted too, and false for none."""
Pools = dict[str, Annotated[list[PositiveInt], Field(min_length=1)]]


#: The share of the driver's deadline that the episodes of a batch have; what is left is for ranks to end their call.
BATCH_SHARE = 0.8
#: A rank's share of the driver's deadline, whose clock starts earlier. The rank's error should come first, because the
#: rank can say what it was waiting for.
RANK_SHARE = 0.9


class TimeoutsConfig(Section):
    """`trainer.timeouts`: how long the driver waits, in seconds."""

    init_s: PositiveFloat = 600.0
    """Start of the workers, including models and engines."""
    call_s: PositiveFloat = 1800.0
    """One phase of a training step on the workers; syncing and reading back a checkpoint that is waited for."""

    @property
    def rank_init_s(self) -> float:
        """Seconds that a rank waits during the start; see `RANK_SHARE`."""
        return RANK_SHARE * self.init_s

    @property
    def rank_call_s(self) -> float:
        """Seconds that a rank waits within a phase; see `RANK_SHARE`."""
        return RANK_SHARE * self.call_s


def _validates(get: Get) -> bool:
    # A run that names only training rows does not validate; an explicitly empty `data.val_files` is an error.
    return "data.val_files" in get.given or bool(get("data.val_files"))


class RunConfig(Section):
    """`trainer.*`: settings common to all kinds of run."""

    total_epochs: Annotated[PositiveInt, Unit("passes over the training rows")] = 30
    """Passes over the training rows."""
    total_training_steps: Annotated[NonNegativeInt | None, Unit("steps")] = None
    """Stop after this many steps, whatever the epochs; 0 only validates."""
    nnodes: Annotated[PositiveInt, Unit("machines")] = 1
    """Number of machines."""
    n_gpus_per_node: Annotated[PositiveInt, Unit("processes per machine")] = 1
    """Processes per machine: one per GPU, or CPU processes where there is none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Devices that models run on; auto uses GPUs if there are any."""
    cpu_threads_per_worker: PositiveInt | None = None
    """Threads of torch in each CPU process; null divides the available cores. With GPUs, threads of the engine's
    processes; null leaves the number to the engine."""
    seed: NonNegativeInt = 1
    """Seed of the run: new heads, the order of the rows and the samples follow from it."""
    project_name: Label = "hrl"
    """Project in the trackers, and the first part of the run folder."""
    experiment_name: Label = "ppo"
    """Name of this run in the trackers, and the second part of the run folder."""
    logger: Annotated[list[Annotated[str, NameOf(LOGGERS)]], ONE_OR_MANY] = Field(default_factory=lambda: ["console"])
    """console, or console-json for one JSON object a line on standard output; and trackers: tensorboard, wandb, mlflow,
    swanlab, trackio. metrics.jsonl is always written."""
    dashboard: bool | Annotated[int, Field(ge=1, le=65535)] = False
    """Serve the page of the run live, to this machine alone: true chooses a free port, a number is the port. The
    address is in the run's first lines."""
    default_local_dir: str = follows(lambda get: f"outputs/{get('.project_name')}/{get('.experiment_name')}")
    """Run folder. Default: outputs/<project_name>/<experiment_name>."""
    default_remote_dir: str | None = None
    """Address of a store that also gets every checkpoint, in the background, and from which another machine goes on
    with the run: `s3://bucket/folder`, `gs://…`, `abfs://…`, `hdfs://host/…`, or another protocol of fsspec.
    Credentials come from the environment. docs/checkpoints.md says more."""
    val_before_train: bool = follows(_validates)
    """Validate before the first step. Default: whether there are validation rows. A run that validates before its first
    step, or every `test_freq` steps, also does after its last."""
    test_freq: Annotated[Frequency, Unit("steps between validations")] = -1
    """Validate every this many steps; -1 or 0 is never."""
    save_freq: Annotated[Frequency, Unit("steps between checkpoints")] = -1
    """Write a checkpoint every this many steps; -1 or 0 is never."""
    max_ckpt_to_keep: Annotated[PositiveInt | None, Unit("checkpoints")] = 2
    """Number of checkpoints to keep: the newest ones, and beside them the one with the best validation (highest mean
    score, or lowest loss); null keeps all."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What a checkpoint that the disk refuses does to the run: end it (stop), or be counted while the run goes on with
    the older ones (continue). Log and samples that it refuses end the run too (stop), or are kept in memory until it
    takes them (continue)."""
    alarms: Thresholds = Field(default_factory=default_thresholds)
    """Name of an alarm → its threshold, where it is not to have its default: `{entropy_low: 0.05}`; false turns one off
    (`{kl: false}`), or all (`trainer.alarms=false`). docs/reading-a-run.md has the table."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Continue from the newest valid checkpoint of the run folder (auto), start from the beginning (disable), or
    continue from `resume_from_path` (resume_path)."""
    resume_from_path: str | None = None
    """Checkpoint folder, with `resume_mode=resume_path`."""
    grace_s: PositiveFloat | None = None
    """Seconds between the signal that asks the run to end (SIGTERM, Ctrl-C, …) and the one that kills it, such as
    Kubernetes' `terminationGracePeriodSeconds`. The step gets three quarters of it; one that would take longer is given
    up, and the last whole one saved. null lets the step take as long as it takes."""
    max_restarts: Annotated[NonNegativeInt, Unit("times")] = 0
    """How often a command starts its run again from the newest checkpoint after a fault of a machine (a process or node
    died, or did not answer in time), 5 s later and each time twice as long. A run that fails twice without a new step
    stays ended."""
    profile: Steps = Field(default_factory=list)
    """Steps to profile, one number or a list: where their time goes, in the report and on the console, and a trace of
    every process, in the folder profile/ of the run folder."""
    timeouts: TimeoutsConfig = section(TimeoutsConfig)
    secrets: list[str] = Field(default_factory=list)
    """Patterns of keys whose values are secrets, e.g. `[customer, "*.headers.*"]`, for a key's last part or all of it.
    Where a run writes its configuration, they are masked, as are keys called api_key, password or the like, logins in
    addresses and well-known forms of keys anyway."""
    private: bool = False
    """Let nobody but you read what the run writes: its folder and all files, of every process of it."""
    ray_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `ray.init`. `{address: auto}`, or the environment variable RAY_ADDRESS, joins a running
    cluster; otherwise the run starts its own."""

    @property
    def validates_last(self) -> bool:
        """Whether a validation follows the last step: it does in a run that validates at all."""
        return self.val_before_train or self.test_freq > 0


class PoolOptions(Section):
    """An entry of `trainer.pool_options`: where the processes of a pool are, if not each on a device of its own."""

    max_colocate_count: PositiveInt = 1
    """How many processes share each device of the pool: that of the pool itself, and those of pools that are split off
    it or merged of it. Each reserves a CPU and this part of a GPU."""
    use_gpu: bool = True
    """Whether its processes have GPUs, in a run that has any; false puts its roles on CPUs."""
    accelerator_type: Annotated[str, Field(min_length=1)] | None = None
    """Ray's name of the accelerator that its nodes must have, such as H100."""
    nodes: Annotated[list[Annotated[str, Field(min_length=1)]], ONE_OR_MANY] = Field(default_factory=list)
    """Ray resources (`big`) or labels of nodes (`rack=a`) that its machines must have: one for all, or one for each."""
    split_of: str | None = None
    """The pool whose devices it takes, as many as trainer.resource_pools says, or all. Pools that are split off one
    take its ranks in their order, from the first again when all are taken."""
    merge_of: list[str] = Field(default_factory=list)
    """The pools whose devices it takes, all of each."""

    @property
    def is_derived(self) -> bool:
        """Whether its devices are those of other pools."""
        return self.split_of is not None or bool(self.merge_of)


class TrainerConfig(RunConfig):
    """`trainer.*`: the run itself."""

    critic_warmup: Annotated[NonNegativeInt, Unit("steps")] = 0
    """Number of steps at the beginning in which only the critic is trained."""
    log_rollouts_freq: Annotated[MinusOneOrMore, Unit("steps between tables of samples")] = 10
    """Show the best, the median and the worst sample every this many steps; -1 or 0 is never. All samples are in
    rollouts/."""
    log_val_generations: Annotated[NonNegativeInt, Unit("samples")] = 0
    """Samples of each validation that are sent to the trackers."""
    resource_pools: Pools = follows(lambda get: {"global": get(".n_gpus_per_node")})
    """Name of a pool → its processes, one number per machine or one for all. Default: one pool `global` with
    `n_gpus_per_node` on each machine."""
    pool_options: dict[str, PoolOptions] = Field(default_factory=dict)
    """Name of a pool → where its processes are, e.g. `{cards: {max_colocate_count: 2}, ref: {split_of: cards}}`: a part
    of another pool's devices (split_of) or all of several (merge_of); with several processes on each device
    (max_colocate_count), on CPUs (use_gpu), or on certain nodes (nodes, accelerator_type). docs/gpus-and-memory.md has
    them."""
    role_pools: dict[str, str | None] = Field(default_factory=dict)
    """Role → name of its pool, for actor_rollout (or actor and rollout separately), ref, critic and rm. A role without
    an entry joins the actor's pool. `{actor: null, rollout: global}` has engines alone, in a run that only
    validates."""

    @model_validator(mode="before")
    @classmethod
    def _spread_pools(cls, tree: Any) -> Any:
        """Expand a pool written as one number to that many processes on each machine."""
        pools = tree.get("resource_pools") if isinstance(tree, Mapping) else None
        if not isinstance(pools, dict):
            return tree
        nodes = tree.get("nnodes")
        machines = max(nodes, 1) if isinstance(nodes, int) else 1  # validation reports anything but a number
        options = tree.get("pool_options")
        options = options if isinstance(options, Mapping) else {}
        whole_of = {pool: _option(options, pool, "split_of") for pool in {*pools, *options}}
        parts = {pool for pool in pools if whole_of[pool] is not None}  # of which a number is all
        spread = {
            pool: [size] * (1 if pool in parts else machines) if isinstance(size, int) else size
            for pool, size in pools.items()
        }
        for pool in options:
            whole = spread.get(whole_of[pool]) if isinstance(whole_of[pool], str) else None
            if pool not in spread and isinstance(whole, list):
                spread[pool] = whole
            joined = _option(options, pool, "merge_of")
            merged = [spread.get(part) for part in joined if isinstance(part, str)] if isinstance(joined, list) else []
            if pool not in spread and merged and all(isinstance(sizes, list) for sizes in merged):
                spread[pool] = [*chain.from_iterable(merged)]  # type: ignore[arg-type]
        return {**tree, "resource_pools": spread}


def _option(options: Mapping[str, Any], pool: str, name: str) -> Any:
    """Return an option of a pool that may not be valid yet."""
    given = options.get(pool)
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)
