"""torch's own process groups over an epoch's store, with several processes and without any TCPStore."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ports import free_ports

ROOT = Path(__file__).resolve().parents[2]

MEMBER = r"""
import os, sys, threading
from datetime import timedelta
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

class NoTCPStore:
    def __init__(self, *args, **kwargs):
        print("somebody made a TCPStore", flush=True)
        os._exit(3)

dist.TCPStore = c10d.TCPStore = NoTCPStore
from rendezvous.config import Config
from rendezvous.node import Node
from rendezvous.node_store import NodeChannel
from rendezvous.store import EpochStore, StoreEnded, StoreTimeout

rank, contacts = int(sys.argv[1]), tuple(sys.argv[2].split(","))
entered, ended = threading.Event(), threading.Event()

class Application:
    def ballot(self): return {}
    def decide(self, previous, places, ballots): return previous is not None, {}
    def on_view(self, view): (ended if entered.is_set() else entered).set()
    def on_waiting(self, reason): pass
    def on_member(self, change): pass
    def on_message(self, sender, kind, body): pass
    def on_verdict(self, verdict): pass
    def on_evicted(self, reason): pass

node = Node(Config.from_env({}, preset="local", run_id="store", name=f"n{rank}", bind=contacts[rank],
            contacts=contacts, num_nodes_min=3, num_nodes_max=3), Application())
thread = threading.Thread(target=node.run, name="node")
thread.start()
assert entered.wait(20)
store = EpochStore(NodeChannel(node), node.view.epoch, timedelta(seconds=20))
rank = node.view.place_of(node.key)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
total = torch.tensor([float(rank)])
dist.all_reduce(total)
assert total.item() == 3.0
dist.monitored_barrier()
pair = dist.new_group([0, 2])
if rank != 1:
    dist.broadcast(total.fill_(rank), src=2, group=pair)
    assert total.item() == 2.0
everyone = dist.new_group()
dist.all_reduce(total.fill_(1), group=everyone)
assert total.item() == 3.0
gathered = [None] * 3
dist.all_gather_object(gathered, rank)
assert gathered == [0, 1, 2]

assert store.add("counter", 2) >= 2
assert store.compare_set(f"own{rank}", "", "first") == b"first"
assert store.compare_set(f"own{rank}", "other", "second") == b"first"
store.append(f"own{rank}", "+")
assert store.get(f"own{rank}") == b"first+"
assert store.check([f"own{rank}"]) and not store.check(["absent"])
assert store.delete_key(f"own{rank}") and not store.delete_key(f"own{rank}")
assert store.num_keys() > 0
prefixed = dist.PrefixStore("p", store)
prefixed.set_timeout(timedelta(seconds=0.2))
try:
    prefixed.get("absent")
except StoreTimeout:
    pass
else:
    raise AssertionError("the prefix store's timeout did not reach the store")
prefixed.set_timeout(timedelta(seconds=20))
prefixed.set(f"x{rank}", "y")
prefixed.wait([f"x{other}" for other in range(3)])
assert prefixed.multi_get([f"x{other}" for other in range(3)]) == [b"y"] * 3

dist.barrier()
waiter_error = []
def wait_for_the_end():
    try:
        store.wait(["never"])
    except StoreEnded as error:
        waiter_error.append(error)
waiter = threading.Thread(target=wait_for_the_end)
waiter.start()
if rank == 0:
    node.call_soon_threadsafe(lambda: node.propose("the test wants a new round"))
assert ended.wait(20)
waiter.join(10)
assert waiter_error, "the end of the round freed nobody"
dist.destroy_process_group()
node.call_later  # the node serves until every process is done
dist_done = EpochStore(NodeChannel(node), node.view.epoch, timedelta(seconds=20))
dist_done.set(f"done{rank}", "1")
dist_done.wait([f"done{other}" for other in range(3)])
dist_done.add("left", 1)
node.call_soon_threadsafe(lambda: node.call_later(0.5, node.stop))
thread.join(10)
node.close()
print("good", flush=True)
os._exit(0)
"""


def test_epoch_store_carries_gloo_groups_of_three_processes_without_tcp_store() -> None:
    contacts = ",".join(f"127.0.0.1:{port}" for port in free_ports(3))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(index), contacts],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.strip().endswith("good"), output
