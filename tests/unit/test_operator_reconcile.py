"""The operator against an API server in memory: a run's life, and a crash at each change of it, before and after it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from kubernetes_emulator import Emulator, SchemaError

from p2pstate.operator import gone
from p2pstate.operator.cluster import ApiError, Cluster
from p2pstate.operator.reconcile import reconcile, runs_path

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes" / "operator"
RUN_PATH = runs_path("default", "train")


@functools.cache
def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return found


class Crash(Exception):
    """The operator's process ended here."""


class World:
    """A cluster with a Run, its kubelets and operators that come and go."""

    def __init__(self, **spec: Any) -> None:
        self.server = Emulator(read("crd.yaml"))
        self.cluster = Cluster(self.server.request)
        self.page: Mapping[str, Any] | None = None
        self.num_changes = 0  # by the operator
        self.crash_at = 0
        self.crash_applied = False
        self.refuse: Callable[[], int | None] = lambda: None  # the status of the next answer, if it is a refusal
        run = read("run.yaml")
        self.cluster.create(runs_path("default"), {**run, "spec": {**run["spec"], **spec}})
        for number in range(6):
            self.server.put("nodes", "", {"kind": "Node", "metadata": {"name": f"host{number}"}, "spec": {}})

    def _send(self, method: str, *rest: Any) -> tuple[int, dict[str, Any]]:
        """The operator's requests: the ``crash_at``-th change of all is its last, whether it is applied or not."""
        if (refused := self.refuse()) is not None:
            return refused, {"reason": "Tried", "message": "refused once"}
        self.num_changes += method != "GET"
        crashes = method != "GET" and self.num_changes == self.crash_at
        if crashes and not self.crash_applied:
            raise Crash
        answer = self.server.request(method, *rest)
        if crashes:
            raise Crash
        return answer

    def look(self) -> None:
        reconcile(
            Cluster(self._send),
            "default",
            "train",
            self.server.now_s,
            lambda addresses: self.page if addresses else None,
        )

    def settle(self, seconds: float = 0.0) -> None:
        """Time passes, the operator looks until nothing changes any more, and starts anew when it crashes."""
        until_s = self.server.now_s + seconds
        for _ in range(40):
            before = len(self.server.log)
            try:
                self.look()
            except (Crash, ApiError):
                continue
            if len(self.server.log) == before:
                if self.server.now_s >= until_s:
                    return
                self.server.now_s = min(until_s, self.server.now_s + 20)
        raise AssertionError(f"it does not come to rest: {self.server.log[-20:]}")

    @property
    def run(self) -> dict[str, Any]:
        found = self.cluster.get(RUN_PATH)
        assert found is not None
        return found

    @property
    def status(self) -> dict[str, Any]:
        return self.run["status"]

    def live(self) -> list[str]:
        return [
            name
            for name, pod in self.server.pods().items()
            if pod["status"]["phase"] in ("Pending", "Running") and not pod["metadata"].get("deletionTimestamp")
        ]

    def start_all(self) -> None:
        """The pods that wait for it run, and join."""
        for name in self.live():
            pods = self.server.pods()
            if pods[name]["status"]["phase"] == "Pending":
                used = {pods[other]["spec"].get("nodeName") for other in self.live()}
                self.server.run_pod(name, min({f"host{number}" for number in range(6)} - used))

    def create(self, what: str) -> list[str]:
        return [line for line in self.server.log if line.startswith("POST") and line.endswith(what)]


def story(world: World) -> list[str]:
    """A run's life: it starts, loses a pod, loses a host, ends and is started again, finishes. -> what was seen."""
    world.settle()
    world.start_all()
    world.settle()
    seen = [world.status["phase"], ",".join(sorted(world.live()))]
    world.server.now_s += 300
    world.server.end_pod(world.live()[0], 76)
    world.settle()
    world.start_all()
    world.settle()
    seen += [world.status["phase"], str(len(world.live()))]
    away = world.live()[0]
    world.cluster.delete(f"/api/v1/namespaces/default/pods/{away}", world.server.pods()[away]["metadata"]["uid"])
    world.settle()
    world.start_all()
    world.server.now_s += 300
    world.settle()
    seen += [world.status["phase"], str(len(world.live())), str(away in world.server.pods())]
    world.server.remove(("pods", "default", away))
    for name in world.live():
        world.server.end_pod(name, 75, message="the same step failed again and again")
    world.settle(60)
    world.start_all()
    world.settle()
    seen += [world.status["phase"], str(world.status["restarts"]), str(len(world.live()))]
    world.server.end_pod(world.live()[0], 0)
    world.settle(60)
    return [*seen, world.status["phase"], str(len(world.live()))]


EXPECTED = ["Running", "train-1-0,train-1-1,train-1-2", "Running", "3", "Running", "3", "True", "Running", "1", "3"]
EXPECTED += ["Succeeded", "0"]


def test_run_lives_through_losses_and_a_restart() -> None:
    world = World()
    assert story(world) == EXPECTED
    assert world.run["status"]["failures"][0]["why"] == "exit code 76: replace this node"


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
def test_crash_at_any_change_is_followed_by_the_same_life(applied: bool) -> None:
    undisturbed = World()
    story(undisturbed)
    assert undisturbed.num_changes > 20
    for number in range(1, undisturbed.num_changes + 1):
        world = World()
        world.crash_at, world.crash_applied = number, applied
        seen = story(world)
        # After a crash numbers of pods may be left out, but never more pods are made than are asked for.
        assert [each for each in seen if "," not in each] == [each for each in EXPECTED if "," not in each], number
        assert len(world.create("/pods")) == len(undisturbed.create("/pods")), (number, world.server.log)


@pytest.mark.parametrize("code", [409, 429, 500])
def test_request_that_is_refused_once_is_followed_by_the_same_life(code: int) -> None:
    """Requests all over its life, reading ones too."""
    counter = itertools.count(1)
    undisturbed = World()
    undisturbed.refuse = lambda: bool(next(counter)) and None
    assert story(undisturbed) == EXPECTED
    for number in range(1, next(counter), 7):
        world, requests = World(), itertools.count(1)
        world.refuse = lambda number=number, requests=requests: code if next(requests) == number else None
        assert [each for each in story(world) if "," not in each] == [each for each in EXPECTED if "," not in each]
        assert len(world.create("/pods")) == len(undisturbed.create("/pods")), (number, world.server.log)


def test_run_that_is_deleted_while_its_pods_are_made_leaves_none() -> None:
    world = World()

    def send(method: str, path: str, *rest: Any) -> tuple[int, dict[str, Any]]:
        if method == "PATCH" and path.endswith("/status"):
            world.server.remove(("runs", "default", "train"))
        return world.server.request(method, path, *rest)

    reconcile(Cluster(send), "default", "train", world.server.now_s, lambda addresses: None)
    assert {kind for kind, *_ in world.server.objects} == {"nodes"}


def test_runs_of_the_same_name_in_two_namespaces_are_two_runs() -> None:
    world = World()
    run = read("run.yaml")
    world.cluster.create(runs_path("other"), {**run, "spec": {**run["spec"], "nodes": 1, "spares": 0}})
    for _ in range(3):
        world.look()
        reconcile(world.cluster, "other", "train", world.server.now_s, lambda addresses: None)
    found = sorted((namespace, name) for kind, namespace, name in world.server.objects if kind == "pods")
    assert found == [("default", f"train-1-{number}") for number in range(3)] + [("other", "train-1-0")]
    ids = set()
    for (kind, *_), each in world.server.objects.items():
        if kind == "pods":
            words = each["spec"]["containers"][0]["args"][2].split()
            ids.add(words[words.index("--run-id") + 1])
    assert len(ids) == 2


def test_changed_container_is_that_of_the_pods_made_from_then_on() -> None:
    world = World()
    world.settle()
    world.start_all()
    world.settle()
    world.cluster.patch(RUN_PATH, {"spec": {"container": {"image": "newer"}}})
    world.server.now_s += 300
    world.server.end_pod("train-1-0", 76)
    world.settle()
    images = {name: world.server.pods()[name]["spec"]["containers"][0]["image"] for name in world.live()}
    assert images.pop("train-1-3") == "newer"
    assert set(images.values()) == {"registry.example.com/p2pstate:0.1.0"}


@pytest.mark.parametrize(("kind", "name"), [("services", "train"), ("configmaps", "train-gone")])
def test_object_of_somebody_else_is_left_alone_and_named(kind: str, name: str) -> None:
    world = World()
    theirs = {"metadata": {"name": name}, "data": {"theirs": "1"}}
    world.server.put(kind, "default", theirs)
    for _ in range(2):
        with contextlib.suppress(ApiError):
            world.look()
    for each in world.live():
        world.server.run_pod(each, "host0")
    world.server.now_s += 300
    world.server.end_pod(world.live()[0], 76)
    with pytest.raises(ApiError, match=f"{kind}/{name} does not belong to this Run.*another name"):
        world.look()
    assert world.server.objects[kind, "default", name]["data"] == {"theirs": "1"}
    assert len(world.live()) == 3


def test_nothing_is_written_while_nothing_changes() -> None:
    world = World()
    world.settle()
    world.start_all()
    world.settle()
    before = len(world.server.log)
    world.settle(100)
    assert len(world.server.log) == before


def test_two_operators_at_once_make_no_pod_twice() -> None:
    world = World()
    world.look()
    other = Cluster(world.server.request)
    reconcile(other, "default", "train", world.server.now_s, lambda addresses: None)
    world.settle()
    assert sorted(world.live()) == ["train-1-0", "train-1-1", "train-1-2"]


def test_change_by_somebody_else_is_looked_at_again() -> None:
    world = World()
    meddled = []

    def send(method: str, path: str, *rest: Any) -> tuple[int, dict[str, Any]]:
        if method == "PATCH" and path.endswith("/status") and not meddled:
            meddled.append(path)
            world.cluster.patch(RUN_PATH, {"spec": {"spares": 2}})
        return world.server.request(method, path, *rest)

    reconcile(Cluster(send), "default", "train", world.server.now_s, lambda addresses: None)
    assert meddled
    assert len(world.live()) == 4


def test_pods_of_an_earlier_run_of_the_same_name_are_left_alone() -> None:
    world = World()
    stale = {"metadata": {"name": "train-1-7", "labels": {"p2pstate.dev/run": "train"}}, "spec": {}}
    world.server.put("pods", "default", stale)
    world.settle()
    assert len(world.live()) == 4
    assert "DELETE /api/v1/namespaces/default/pods/train-1-7" not in world.server.log


def test_deleted_run_takes_everything_with_it() -> None:
    world = World()
    world.settle()
    world.start_all()
    world.settle()
    world.cluster.delete(RUN_PATH, world.run["metadata"]["uid"])
    assert {kind for kind, *_ in world.server.objects} == {"nodes"}
    world.look()
    assert {kind for kind, *_ in world.server.objects} == {"nodes"}


def page(**known: Any) -> dict[str, Any]:
    ranks = [{"rank": 0, "step": 41, "protected": 40}, {"rank": 1, "step": 40, "protected": 40}]
    incident = {"cause": "node", "replaced": [1], "source": "the memory of train-1-0", "seconds": 1.25}
    given = {"waiting": [], "weaknesses": [], "nodes": [], "ranks": ranks, "incidents": [incident]}
    return {**given, "goodput": {"run": {"ratio": 0.9731}}, **known}


def conditions(world: World) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in world.status["conditions"]}


def test_status_says_what_the_run_says_of_itself() -> None:
    world = World()
    world.settle()
    assert conditions(world)["Protected"] == ("Unknown", "NobodyAnswers")
    world.start_all()
    world.page = page()
    world.settle()
    status = world.status
    assert (status["step"], status["protectedStep"], status["goodput"]) == (40, 40, "0.973")
    assert status["lastIncident"] == {
        "cause": "node", "replaced": "1", "source": "the memory of train-1-0", "seconds": "1.2"
    }  # fmt: skip
    assert status["pods"] == {"wanted": 3, "live": 3, "joined": 3}
    assert conditions(world) == {
        "Running": ("True", "Running"),
        "Protected": ("True", "Protected"),
        "SparesReady": ("True", "AllThere"),
        "HostsHealthy": ("True", "NoneFailing"),
    }
    changed_s = {each["type"]: each["lastTransitionTime"] for each in status["conditions"]}
    world.server.now_s += 100
    world.page = page(waiting=["for a node"])
    world.settle()
    assert world.status["phase"] == "Waiting"
    times = {each["type"]: each["lastTransitionTime"] for each in world.status["conditions"]}
    assert times["Protected"] == changed_s["Protected"]
    assert times["Running"] != changed_s["Running"]


@pytest.mark.parametrize("nonsense", [{}, {"ranks": 3}, page(waiting=[1]), page(nodes=[{}]), page(goodput={"run": {}})])
def test_page_that_makes_no_sense_is_no_page(nonsense: Mapping[str, Any]) -> None:
    world = World()
    world.settle()
    world.start_all()
    world.page = nonsense
    world.settle()
    assert conditions(world)["Protected"] == ("Unknown", "NobodyAnswers")
    assert world.status["phase"] == "Running"


@pytest.mark.parametrize("way", ["Taint", "Cordon"])
def test_failing_host_is_marked_and_left_alone_once_somebody_lifts_it(way: str) -> None:
    world = World(quarantine={"action": way, "afterFailures": 2})
    other = {"key": "other", "effect": "NoSchedule"}
    world.cluster.patch("/api/v1/nodes/host0", {"spec": {"taints": [other]}})
    for _ in range(2):
        world.settle(400)
        world.start_all()
        world.settle()
        victim = next(name for name, pod in world.server.pods().items() if pod["spec"].get("nodeName") == "host0"
                      and name in world.live())  # fmt: skip
        world.server.now_s += 300
        world.server.end_pod(victim, 76)
        world.settle()
    marked = world.cluster.get("/api/v1/nodes/host0")
    assert marked is not None
    if way == "Taint":
        assert marked["spec"]["taints"] == [
            other,
            {"key": "p2pstate.dev/failing", "value": "train", "effect": "NoSchedule"},
        ]
    else:
        assert marked["spec"]["unschedulable"] is True
    assert world.status["quarantined"] == [{"host": "host0", "applied": True}]
    assert conditions(world)["HostsHealthy"] == ("False", "Quarantined")
    world.cluster.patch("/api/v1/nodes/host0", {"spec": {"taints": [other], "unschedulable": False}})
    world.settle(100)
    assert world.status["quarantined"] == []


def test_fencing_command_answers_from_what_the_operator_wrote(tmp_path: Path) -> None:
    world = World()
    world.settle()
    world.start_all()
    world.settle()
    started_us = str(int((world.server.now_s + 1) * 1e6))
    world.server.now_s += 300
    world.server.end_pod("train-1-0", 137)
    uid = world.server.pods()["train-1-1"]["metadata"]["uid"]
    world.cluster.delete("/api/v1/namespaces/default/pods/train-1-1", uid)  # its host is out of reach
    world.settle(200)
    told = world.cluster.get("/api/v1/namespaces/default/configmaps/train-gone")
    assert told is not None
    for name, text in told["data"].items():
        (tmp_path / name).write_text(text)
    environ = {"P2PSTATE_FENCE_STARTED_US": started_us}
    assert gone.answer(tmp_path, "train-1-0", environ)[0] == gone.GONE
    assert gone.answer(tmp_path, "train-1-1", environ)[0] == gone.NOT_GONE
    later = {"P2PSTATE_FENCE_STARTED_US": str(int((world.server.now_s + 1000) * 1e6))}
    assert gone.answer(tmp_path, "train-1-0", later)[0] == gone.NOT_GONE
    assert gone.answer(tmp_path / "none", "train-1-0", environ)[0] == gone.UNKNOWN
    assert gone.answer(tmp_path, "train-1-0", {})[0] == gone.UNKNOWN
    assert world.server.pods()["train-1-2"]["metadata"]["annotations"]  # has its host bring the files up to date


def test_change_that_is_refused_does_not_keep_others_back_and_is_told() -> None:
    world = World()

    def send(method: str, path: str, query: Any, body: Any, kind: str) -> tuple[int, dict[str, Any]]:
        if method == "POST" and body["metadata"]["name"] == "train-1-0":
            return 403, {"message": "exceeded quota"}
        return world.server.request(method, path, query, body, kind)

    with pytest.raises(ApiError, match=r"exceeded quota \(HTTP status 403\)"):
        reconcile(Cluster(send), "default", "train", world.server.now_s, lambda addresses: None)
    assert sorted(world.live()) == ["train-1-1", "train-1-2"]
    assert "exceeded quota" in world.status["message"]
    world.settle()
    assert "exceeded quota" not in world.status["message"]
    assert sorted(world.live()) == ["train-1-1", "train-1-2", "train-1-3"]


def test_reason_of_a_failed_run_stays_while_its_pods_cannot_be_deleted() -> None:
    world = World()
    world.settle()
    world.start_all()
    world.settle()
    world.server.end_pod("train-1-0", 1, message="KeyError: 'x'")

    def send(method: str, *rest: Any) -> tuple[int, dict[str, Any]]:
        return (403, {"message": "forbidden"}) if method == "DELETE" else world.server.request(method, *rest)

    for _ in range(2):
        world.server.now_s += 60
        with contextlib.suppress(ApiError):
            reconcile(Cluster(send), "default", "train", world.server.now_s, lambda addresses: None)
    assert world.status["phase"] == "Failed"
    assert "KeyError" in world.status["message"]


@pytest.mark.parametrize("action", ["None", "Taint"])
def test_operator_without_rights_on_hosts_replaces_pods_all_the_same(action: str) -> None:
    world = World(quarantine={"action": action, "afterFailures": 1})

    def send(method: str, path: str, *rest: Any) -> tuple[int, dict[str, Any]]:
        if path.startswith("/api/v1/nodes"):
            return 403, {"message": "forbidden"}
        return world.server.request(method, path, *rest)

    def look() -> None:
        reconcile(Cluster(send), "default", "train", world.server.now_s, lambda addresses: None)

    look()
    world.start_all()
    look()
    world.server.now_s += 300
    world.server.end_pod("train-1-0", 76)
    look()
    assert sorted(world.live()) == ["train-1-1", "train-1-2", "train-1-3"]
    look()  # the host's failure is on record


BAD: Sequence[dict[str, Any]] = [
    {"nodes": 0}, {"nodes": "2"}, {"spares": -1}, {"script": []}, {"container": {}}, {"node": 2},
    {"quarantine": {"action": "Drain"}},
]  # fmt: skip


@pytest.mark.parametrize("spec", BAD, ids=str)
def test_schema_refuses_what_makes_no_run(spec: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        World(**spec)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 14))])
def test_pool_comes_back_to_its_size_whatever_happens_to_pods_the_server_and_the_operator(seed: int) -> None:
    """Nothing is told to be gone that still runs, and no second attempt begins beside one that does."""
    dice = random.Random(seed)
    world = World(nodes=3, spares=2, quarantine={"action": "None"}, maxRestarts=1000)
    running: dict[str, float] = {}  # pod -> since when, out of reach or not
    away: set[str] = set()

    def kubelets() -> None:
        for name in world.live():
            if world.server.pods()[name]["status"]["phase"] == "Pending":
                world.server.run_pod(name, f"host{name}")
                running[name] = world.server.now_s
        for name, each in list(world.server.pods().items()):
            if each["metadata"].get("deletionTimestamp") and name not in away:
                end(name, 143)
        known = sorted(running.keys() - away, key=lambda name: running[name])
        parts = [{"name": name, "part": "training" if index < 3 else "spare"} for index, name in enumerate(known)]
        world.page = page(nodes=parts)

    def end(name: str, code: int, *, disrupted: bool = False) -> None:
        world.server.end_pod(name, code, disrupted=disrupted)
        running.pop(name, None)

    def delete(name: str) -> None:
        uid = world.server.pods()[name]["metadata"]["uid"]
        world.cluster.delete(f"/api/v1/namespaces/default/pods/{name}", uid)

    def look(times: int) -> None:
        for _ in range(times):
            with contextlib.suppress(Crash, ApiError):
                world.look()
            kubelets()
            told = (world.cluster.get("/api/v1/namespaces/default/configmaps/train-gone") or {}).get("data", {})
            assert not [name for name, at_us in told.items() if running.get(name, 1e99) * 1e6 < int(at_us)]
            assert len({name.rsplit("-", 1)[0] for name in running}) <= 1, running
            world.server.now_s += 20

    look(8)
    for _ in range(25):
        name = dice.choice(world.live())
        codes = iter([dice.choice([None, 409, 429, 500, 503]) for _ in range(20)])
        match dice.choice(["ends", "ends", "evicted", "deleted", "away", "back", "spares", "storm", "crash", "two"]):
            case "ends":
                end(name, dice.choice([75, 76, 78, 127, 137, 139]))
            case "evicted":
                end(name, 137, disrupted=True)
            case "deleted":
                delete(name)
            case "away" if not away:
                away.add(name)
                delete(name)
            case "back" if away:
                end(away.pop(), 143)
            case "spares":
                world.cluster.patch(RUN_PATH, {"spec": {"spares": dice.randrange(4)}})
            case "storm":
                world.refuse = lambda codes=codes: next(codes, None)  # type: ignore[misc]
            case "crash":
                world.crash_at, world.crash_applied = world.num_changes + dice.randrange(1, 4), dice.random() < 0.5
            case "two":
                reconcile(Cluster(world.server.request), "default", "train", world.server.now_s, lambda _: world.page)
        look(3)
        world.server.now_s += 700  # the pauses after failures are over
        look(9)
        assert len(world.live()) == world.run["spec"]["nodes"] + world.run["spec"]["spares"], world.server.log[-20:]
        assert world.status["phase"] == "Running", world.status
        assert conditions(world)["SparesReady"][0] == "True", world.status
