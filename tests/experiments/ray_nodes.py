"""A program: a sweep on a Ray cluster, one of whose nodes is removed in the middle.

It joins the cluster by its address, then another sweep from outside; both are compared with a sweep
of this machine alone. What the first says is printed.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from analysis.records.preset import Preset
from analysis.sweeps.pools import LocalPool
from analysis.sweeps.ray_pool import ray_pool
from analysis.sweeps.store import Store
from analysis.sweeps.sweep import run_sweep
from kl_term.errors import UserError
from tests.experiments.tiny import Heard, assert_same_metrics, make_tiny


def main(folder: Path) -> None:
    preset, heard, port = make_tiny(400), Heard(), free_port()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "ray_client_server_port": port,
        },
    )
    try:
        with ray_pool(cluster.address):
            pass
    except UserError as refusal:
        print(refusal)
    lost = cluster.add_node(num_cpus=1)
    sweep = threading.Thread(target=sweep_on, args=(cluster.address, folder / "ray", preset, heard))
    sweep.start()
    while not any(folder.glob("ray/checkpoints/*/*")):
        time.sleep(0.05)
    cluster.add_node(num_cpus=1)
    cluster.remove_node(lost, allow_graceful=False)
    sweep.join()
    print(heard.text, end="")
    sweep_on(f"ray://127.0.0.1:{port}", folder / "client", preset, Heard())
    cluster.shutdown()
    on_nodes, through_client, here = (
        run_sweep(preset, Store(folder / name), Heard(), LocalPool())
        for name in ("ray", "client", "here")
    )
    assert_same_metrics(on_nodes, here)
    assert_same_metrics(through_client, here)
    print("the same bits")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def sweep_on(address: str, folder: Path, preset: Preset, heard: Heard) -> None:
    with ray_pool(address) as cluster:
        run_sweep(preset, Store(folder), heard, cluster, checkpoint_every=50)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
