"""A script written for verl finds its names with `hrl` in place of `verl`; docs/coming-from-verl.md has the modules."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hrl"
DOORS = ("hrl.single_controller.base.", "hrl.single_controller.ray.")

NAMES = {
    "hrl": "DataProto",
    "hrl.protocol": """DataProto DataProtoItem DataProtoFuture DataProtoConfig pad_dataproto_to_divisor
        unpad_dataproto union_tensor_dict union_numpy_dict list_of_dict_to_dict_of_list fold_batch_dim
        unfold_batch_dim collate_fn serialize_single_tensor serialize_tensordict deserialize_single_tensor
        deserialize_tensordict""",
    "hrl.single_controller.base": "Worker WorkerGroup ClassWithInitArgs ResourcePool",
    "hrl.single_controller.base.worker": "Worker",
    "hrl.single_controller.base.worker_group": "WorkerGroup ClassWithInitArgs ResourcePool",
    "hrl.single_controller.base.decorator": "Dispatch Execute register make_nd_compute_dataproto_dispatch_fn",
    "hrl.single_controller.ray": """RayResourcePool SubRayResourcePool RayClassWithInitArgs RayWorkerGroup
        create_colocated_worker_cls""",
    "hrl.single_controller.ray.base": """RayResourcePool SubRayResourcePool RayClassWithInitArgs RayWorkerGroup
        create_colocated_worker_cls create_colocated_worker_cls_fused create_colocated_worker_raw_cls
        split_resource_pool merge_resource_pool""",
    "hrl.data.dataset": "RLHFDataset",
    "hrl.report.tracking": "Tracking",
    "hrl.workers.actor_rollout_ref": "ActorRolloutRefWorker",
    "hrl.workers.critic": "CriticWorker",
    "hrl.workers.reward_model": "RewardModelWorker",
    "hrl.trainer.ppo.ray_trainer": "RayPPOTrainer ResourcePoolManager Role apply_kl_penalty compute_advantage",
    "hrl.trainer.ppo.core_algos": """get_adv_estimator_fn register_adv_est get_policy_loss_fn register_policy_loss
        compute_policy_loss compute_value_loss kl_penalty agg_loss AdaptiveKLController FixedKLController""",
}


@pytest.mark.parametrize(("module", "names"), NAMES.items(), ids=NAMES.keys())
def test_verls_names_can_be_imported(module: str, names: str) -> None:
    door = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(door, name)] == []


def test_dataproto_has_verls_members() -> None:
    members = """save_to_disk load_from_disk print_size check_consistency from_single_dict from_dict from_tensordict to
        select select_idxs slice pop rename union make_iterator is_padding_enabled padding chunk split concat reorder
        repeat unfold_column_chunks sample_level_repeat to_tensordict get_data_info"""
    batch = importlib.import_module("hrl").DataProto
    assert [name for name in members.split() if not callable(getattr(batch, name, None))] == []


def imported_through_a_door(path: Path) -> list[str]:
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    return [node.module for node in nodes if node.module and f"{node.module}.".startswith(DOORS)]


def test_hrl_itself_does_not_import_through_the_doors() -> None:
    inside = PACKAGE / "single_controller"
    doors = {*(inside / "base").glob("*.py"), *(inside / "ray").glob("*.py")}
    found = {str(path): imported_through_a_door(path) for path in PACKAGE.rglob("*.py") if path not in doors}
    assert {path: modules for path, modules in found.items() if modules} == {}
