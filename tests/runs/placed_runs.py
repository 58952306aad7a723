"""Runs of one process after another on a Ray of two nodes, for `test_placements`.

Started with the run folder, the arguments of every run, and a list of arguments for each of them, as JSON. Writes for
each which role's ranks were on which node, in which process, and marks those that have ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from hrl.config import compose_cli
from hrl.single_controller.ray_cluster import ray_cluster
from hrl.trainer.ppo.ray_trainer import RayPPOTrainer
from hrl.trainer.run import run

#: Files in the folder of a run.
WHERE, ENDED = "where.json", "ended"


class Placed(RayPPOTrainer):
    def init_workers(self) -> None:
        super().init_workers()
        names = {node["NodeID"]: "train" if "train" in node["Resources"] else "sample" for node in ray.nodes()}
        where = {
            role.value: [[names[info.node_id], info.pid] for info in group._processes.infos]
            for role, group in self.workers.groups.items()
        }
        (self.reporter.folder.path / WHERE).write_text(json.dumps(where))


def main() -> None:
    folder, every, runs = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    head = {"num_cpus": 4, "include_dashboard": False, "resources": {"train": 1, "large": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=4, resources={"sample": 1, "small": 1})
        with ray_cluster(cluster.address):
            for name, arguments in runs.items():
                own = [f"trainer.default_local_dir={folder / name}", *arguments]
                run("ppo", compose_cli([*every, *own]), trainer_cls=Placed)
                (folder / name / ENDED).touch()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
