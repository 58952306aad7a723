"""The order in which models are loaded, and who is blamed when a weight broadcast fails."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from transformers import LlamaConfig

from hrl.cluster.roles import Role
from hrl.cluster.worker_groups import WorkerGroups, worker_mapping
from hrl.config import compose_cli
from hrl.config.trainer import TimeoutsConfig
from hrl.single_controller.worker import create_colocated_worker_cls
from hrl.single_controller.worker_errors import WorkerDiedError, WorkerError, WorkerTimeoutError
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.workers.rollout import early_process

INIT_S = 100.0
PPO = RayPPOTrainer.learners


class Group:
    """The roles of a pool; notes what is asked of it, and answers when everybody was asked."""

    asked: list[tuple[str, str, float]] = []  # noqa: RUF012 (emptied by the fixture)
    node_ips = ("127.0.0.1",)
    world_size = 1

    def __init__(self, *, name_prefix: str, ray_cls_with_init: Any, **_: Any) -> None:
        self.pool, self.roles, self.timeout_s = name_prefix, tuple(ray_cls_with_init.roles()), 0.0

    @classmethod
    def start_together(cls, groups: Iterable[Group]) -> None:
        assert not cls.asked, "a group was called before all were up"

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Group]:
        groups = {}
        for role in prefix_set:
            groups[role] = object.__new__(Group)
            groups[role].__dict__ |= {"pool": self.pool, "roles": (role,), "timeout_s": 0.0}
        return groups

    def with_timeout(self, timeout_s: float) -> Self:
        self.timeout_s = timeout_s
        return self

    def execute_all_async(self, method: str) -> Any:
        assert method == "init_model"
        self.asked.append((self.pool, self.roles[0], self.timeout_s))
        return SimpleNamespace(done=lambda: True, get=lambda: None)

    def shutdown(self) -> None:
        pytest.fail(f"{self.pool} was ended")

    def open_weight_broadcast(self, num_receivers: int, address: str) -> tuple[int, str]:
        return num_receivers, address


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "asked", [])
    merged = "hrl.cluster.worker_groups.create_colocated_worker_cls"
    monkeypatch.setattr(merged, lambda class_dict: SimpleNamespace(roles=lambda: dict(class_dict)))


def build(
    mapping: dict[Role, str],
    learners: tuple[Role, ...] = (Role.ActorRollout, Role.Actor),
    group_cls: type[Group] = Group,
) -> WorkerGroups:
    pools = dict.fromkeys(mapping.values())
    manager = SimpleNamespace(
        mapping=mapping, create_resource_pool=lambda: None, resource_pool_dict=pools, release=lambda: None
    )
    timeouts = TimeoutsConfig(init_s=INIT_S, call_s=1.0)
    return WorkerGroups.start(dict.fromkeys(mapping), manager, timeouts, group_cls, learners)


def test_on_one_pool_the_engine_comes_last_and_deadlines_add_up() -> None:
    mapping = dict.fromkeys((Role.ActorRollout, Role.RefPolicy, Role.Critic, Role.RewardModel), "all")
    build(mapping).init_models()
    assert Group.asked == [
        ("all", "critic", INIT_S),
        ("all", "ref", 2 * INIT_S),
        ("all", "rm", 3 * INIT_S),
        ("all", "actor_rollout", 4 * INIT_S),
    ]


@pytest.mark.parametrize("failure", [WorkerError(0, "start", "b", "no room"), KeyboardInterrupt()])
def test_a_start_that_fails_leaves_no_process_of_any_pool(failure: BaseException) -> None:
    ended = []

    class Failing(Group):
        @classmethod
        def start_together(cls, groups: Iterable[Group]) -> None:
            raise failure

        def shutdown(self) -> None:
            ended.append(self.pool)

    with pytest.raises(type(failure)):
        build({Role.Actor: "a", Role.Rollout: "b"}, group_cls=Failing)
    assert sorted(ended) == ["a", "b"]


def test_pools_do_not_wait_for_each_other() -> None:
    mapping = {Role.Actor: "a", Role.Rollout: "b", Role.RefPolicy: "a", Role.Critic: "c"}
    build(mapping).init_models()
    assert sorted(Group.asked) == [
        ("a", "actor", 2 * INIT_S),
        ("a", "ref", INIT_S),
        ("b", "rollout", INIT_S),
        ("c", "critic", INIT_S),
    ]


class Call:
    """A call that has given this result, raises this error, or goes on (None)."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def done(self) -> bool:
        if isinstance(self.outcome, WorkerError):
            raise self.outcome
        return self.outcome is not None

    def get(self, timeout_s: float | None = None) -> Any:
        assert timeout_s is None or timeout_s > 0
        if not self.done():
            raise WorkerTimeoutError([0], "rollout.receive_weights", "weight_sync", timeout_s or 0.0)
        return self.outcome


def synchronise(received: Any, sent: Any) -> dict[str, float]:
    groups = build({Role.Actor: "train", Role.Rollout: "sample"})
    groups.actor.send_weights = lambda version: Call(sent)
    groups.rollout.receive_weights = lambda version, *handle: Call(received)
    return groups.sync_weights(3, 1.0)


REFUSED = WorkerError(1, "rollout.receive_weights", "weight_sync", "WeightSyncError: checksum of 'norm.weight'")
DIED = WorkerDiedError(1, "rollout.receive_weights", "weight_sync", 77, "out of memory")
BROKEN = WorkerError(0, "actor.send_weights", "weight_sync", "WeightSyncError: weight broadcast failed at the sender")


def test_the_figures_of_a_broadcast_are_the_senders_and_the_least_that_an_engine_read_back() -> None:
    engines = [{"weight_sync/read_back_tensors": 9.0}, {}, {"weight_sync/read_back_tensors": 7.0}]
    assert synchronise(engines, [{"weight_sync/seconds": 1.5}]) == {
        "weight_sync/seconds": 1.5,
        "weight_sync/read_back_tensors": 7.0,
    }


def test_of_several_engines_in_the_trainers_processes_the_slowest_and_the_least_read_back_count() -> None:
    groups = build({Role.ActorRollout: "all"})
    engines = [(1.0, 9.0), (3.0, 8.0), (2.0, 7.0)]
    reports = [{"weight_sync/seconds": s, "weight_sync/read_back_tensors": read} for s, read in engines]
    groups.actor.sync_weights = lambda version: [reports[0], {}, *reports[1:]]
    assert groups.sync_weights(3, 1.0) == {"weight_sync/seconds": 3.0, "weight_sync/read_back_tensors": 7.0}
    for report in reports[:2]:
        report["rollout/split_waves"] = 2.0
    assert groups.sync_weights(3, 1.0)["rollout/split_waves"] == 4.0


def test_the_share_of_accepted_drafts_is_that_of_all_engines_drafts_and_not_the_slowest_ones() -> None:
    counts = [(10.0, 40.0, 4.0), (30.0, 60.0, 36.0)]
    names = ("rollout/drafts", "rollout/draft_tokens", "rollout/accepted_tokens")
    engines = [
        {"weight_sync/seconds": at, "weight_sync/read_back_tensors": 7.0} | dict(zip(names, count, strict=True))
        for at, count in enumerate(counts)
    ]
    groups = build({Role.ActorRollout: "all"})
    groups.actor.sync_weights = lambda version: engines
    metrics = groups.sync_weights(3, 1.0)
    assert [metrics[name] for name in names] == [40.0, 100.0, 40.0]
    assert (metrics["rollout/acceptance_rate"], metrics["rollout/accepted_per_draft"]) == (0.4, 1.0)


@pytest.mark.parametrize("cause", [REFUSED, DIED])
@pytest.mark.parametrize("sent", [None, BROKEN], ids=["sender waits", "sender failed too"])
def test_a_receivers_failure_is_the_one_that_is_told(cause: WorkerError, sent: WorkerError | None) -> None:
    with pytest.raises(WorkerError) as raised:
        synchronise(cause, sent)
    assert raised.value is cause


def test_a_sender_that_failed_alone_is_told_of_itself() -> None:
    with pytest.raises(WorkerError) as raised:
        synchronise(None, BROKEN)
    assert raised.value is BROKEN


def test_processes_are_told_the_tokenizers_folder_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words").mkdir()
    monkeypatch.chdir(tmp_path)
    for named, told in (("words", str(tmp_path / "words")), ("org/words", "org/words"), ("null", None)):
        config = compose_cli(
            [
                "data.train_batch_size=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                f"actor_rollout_ref.model.tokenizer_path={named}",
            ]
        )
        runtime = SimpleNamespace(seed=1, run_folder="/run", device="cuda")
        worker = worker_mapping(config, [Role.ActorRollout], runtime, {"actor": "/model"}, 1)[Role.ActorRollout]
        assert worker.args[0].tokenizer_path == told


def test_a_teacher_comes_from_its_own_folder_as_it_is(tmp_path: Path) -> None:
    LlamaConfig(vocab_size=77).save_pretrained(tmp_path)
    adapter = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.override_config={num_labels: 3}"]
    runtime, folders = SimpleNamespace(seed=1, run_folder="/run", device="cuda"), {"actor": tmp_path, "ref": "/teacher"}
    config = compose_cli(["recipe=distillation", *adapter])
    teacher = worker_mapping(config, [Role.RefPolicy], runtime, folders, 1)[Role.RefPolicy]
    assert teacher.kwargs["model_path"] == "/teacher" and not config.reference_is_actor
    assert teacher.kwargs["pupil_vocabulary"] == 77
    assert not teacher.args[0].trains_adapter and teacher.args[0].override_config == {}
    plain = compose_cli(["actor_rollout_ref.actor.use_kl_loss=true"])
    reference = worker_mapping(plain, [Role.RefPolicy], runtime, {"actor": "/model"}, 1)[Role.RefPolicy]
    assert reference.kwargs["model_path"] == "/model" and "pupil_vocabulary" not in reference.kwargs


@pytest.mark.parametrize(
    ("device", "engine", "begins"), [("cpu", "vllm", True), ("cuda", "vllm", False), ("cpu", "hf", False)]
)
def test_on_a_cpu_a_rank_begins_with_the_process_of_its_engine(device: str, engine: str, begins: bool) -> None:
    config = compose_cli([f"actor_rollout_ref.rollout.name={engine}"])
    runtime = SimpleNamespace(seed=1, run_folder="/run", device=device, num_threads=3)
    workers = worker_mapping(config, [Role.ActorRollout], runtime, {"actor": "/model"}, 1)
    preludes = create_colocated_worker_cls({"policy": workers[Role.ActorRollout]}).preludes()
    assert [(each.func, each.args) for each in preludes] == ([(early_process.begin, (3,))] if begins else [])


class Answering:
    """Answers for its first role, rank by rank."""

    def __init__(self, roles: tuple[str, ...], *ranks: str) -> None:
        self.roles = roles
        setattr(self, f"{roles[0]}_peak_memory", lambda: SimpleNamespace(get=lambda: list(ranks)))


def test_every_process_of_every_pool_is_asked_for_its_peak_once() -> None:
    groups = [Answering(("actor", "ref"), "first", "second"), Answering(("critic",), "third")]
    assert WorkerGroups({}, [], groups, [], 1.0).peak_memory() == ["first", "second", "third"]


class Saving(Group):
    """Notes what is saved and loaded where."""

    def __getattr__(self, name: str) -> Any:
        return lambda folder, *more: self.asked.append((self.roles[0], name, folder, *more)) or [f"{folder}/written"]


@pytest.mark.parametrize(
    ("placed", "learners", "saved"),
    [
        ((Role.ActorRollout, Role.RefPolicy, Role.Critic, Role.RewardModel), PPO, ["actor", "critic"]),
        ((Role.Actor, Role.Rollout), PPO, ["actor"]),
        ((Role.RewardModel,), (Role.RewardModel,), ["rm"]),
    ],
)
def test_what_learns_is_saved_and_the_first_of_it_exported(placed: Any, learners: Any, saved: Any) -> None:
    groups = build(dict.fromkeys(placed, "all"), learners)
    groups.groups = {role: Saving.__new__(Saving) for role in groups.groups}
    for role, group in groups.groups.items():
        group.__dict__ |= {"roles": (role,)}
    Group.asked.clear()
    records = groups.save(Path("/run"), ["model", "hf_model"])
    assert records == [*(Path(f"/run/{role}/written") for role in saved), Path("/run/written-hf.json")]
    assert [asked[1:] for asked in Group.asked[:-1]] == [("save_checkpoint", f"/run/{role}") for role in saved]
    assert Group.asked[-1] == (groups.learners[0], "export_hf", "/run/hf", "/run/written-hf.json")
    Group.asked.clear()
    groups.load(Path("/run"))
    assert [folder for _, name, folder in Group.asked if name == "load_checkpoint"] == [
        f"/run/{role}" for role in saved
    ]
    Group.asked.clear()
    groups.save(Path("/run"), ["model"])
    assert all(name == "save_checkpoint" for _, name, _ in Group.asked)
