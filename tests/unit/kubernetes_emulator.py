"""An API server in memory, for the objects that p2pstate.operator touches, with a kubelet's hands.

In: requests as p2pstate.operator.cluster.Send makes them. Out: answers as Kubernetes gives them: uids, resource
versions and their conflicts, AlreadyExists, merge patches, the status subresource, the schema of a CRD with its
defaults, graceful deletion of pods, deletion of what belongs to a deleted owner. CEL rules are not evaluated.
"""

from __future__ import annotations

import copy
import itertools
import re
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

PATH = re.compile(
    r"/(?:api|apis)/(?:[\w.]+/)?v[\w]+(?:/namespaces/(?P<namespace>[\w-]+))?/(?P<kind>\w+)(?:/(?P<name>[\w.-]+))?"
    r"(?P<status>/status)?$"
)
KINDS = {"pods": "Pod", "services": "Service", "configmaps": "ConfigMap", "nodes": "Node", "runs": "Run"}
START_S = 1_800_000_000.0
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
}

Key = tuple[str, str, str]  # kind, namespace, name


class SchemaError(ValueError):
    """The API server refuses the object, or drops a part of it."""


def fill(schema: Mapping[str, Any], value: Any, where: str = "") -> Any:
    """The value with defaults filled in. Raises SchemaError for what a strict request is refused for."""
    expected = TYPES[schema["type"]]
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise SchemaError(f"{where}: {value!r} is no {schema['type']}")
    if "enum" in schema and value not in schema["enum"]:
        raise SchemaError(f"{where}: {value!r} is none of {schema['enum']}")
    if "minimum" in schema and value < schema["minimum"]:
        raise SchemaError(f"{where}: {value} is less than {schema['minimum']}")
    if len(value) < schema.get("minItems", schema.get("minLength", 0)) if isinstance(value, list | str) else False:
        raise SchemaError(f"{where} is empty")
    if isinstance(value, list):
        return [fill(schema["items"], each, f"{where}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    if missing := [key for key in schema.get("required", ()) if key not in value]:
        raise SchemaError(f"{where} lacks {missing}")
    if not schema.get("x-kubernetes-preserve-unknown-fields") and (unknown := value.keys() - properties.keys()):
        raise SchemaError(f"{where} has no {sorted(unknown)}")
    given = {key: copy.deepcopy(each["default"]) for key, each in properties.items() if "default" in each} | value
    return {
        key: fill(properties[key], each, f"{where}.{key}") if key in properties else each for key, each in given.items()
    }


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


class Emulator:
    """``crd``: of Run."""

    def __init__(self, crd: Mapping[str, Any]) -> None:
        (version,) = crd["spec"]["versions"]
        self._schema = version["schema"]["openAPIV3Schema"]["properties"]
        self.objects: dict[Key, dict[str, Any]] = {}
        self.now_s = START_S
        self.log: list[str] = []  # changes that were applied
        self._numbers = itertools.count(1)
        self.changed = threading.Condition(threading.RLock())
        self.events: list[tuple[int, str, dict[str, Any]]] = []  # for watches: version, kind of change, object

    # --- requests

    def request(
        self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None, content_type: str
    ) -> tuple[int, dict[str, Any]]:
        """As p2pstate.operator.cluster.Send."""
        found = PATH.match(path)
        if found is None:
            return 404, {"reason": "NotFound", "message": f"no such path: {path}"}
        with self.changed:
            if method == "GET":
                return self._get(found, query)
            answer = getattr(self, f"_{method.lower()}")(found, body)
            if answer[0] < 300:
                self.log.append(f"{method} {path}")
                self.changed.notify_all()
            return answer

    def _get(self, found: re.Match[str], query: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        kind, namespace, name = found["kind"], found["namespace"] or "", found["name"]
        if name is not None:
            each = self.objects.get((kind, namespace, name))
            return (200, each) if each is not None else (404, {"reason": "NotFound", "message": path_of(found)})
        wanted = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if "=" in part)
        items = [
            each
            for (of_kind, of_namespace, _), each in self.objects.items()
            if of_kind == kind
            and namespace in ("", of_namespace)
            and wanted.items() <= each["metadata"].get("labels", {}).items()
        ]
        return 200, {
            "items": items,
            "kind": f"{KINDS[kind]}List",
            "metadata": {"resourceVersion": str(self._version())},
        }

    def _post(self, found: re.Match[str], body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        kind, namespace, name = found["kind"], found["namespace"] or "", body["metadata"]["name"]
        if (kind, namespace, name) in self.objects:
            return 409, {"reason": "AlreadyExists", "message": f"{kind} {name} exists"}
        made = copy.deepcopy(dict(body))
        made["metadata"] |= {"namespace": namespace} if namespace else {}
        made["metadata"] |= {
            "uid": f"uid-{next(self._numbers)}",
            "creationTimestamp": self.timestamp(),
            "generation": 1,
        }
        if kind == "runs":
            made["spec"] = fill(self._schema["spec"], made["spec"], "spec")
        if kind == "pods":
            made["status"] = {"phase": "Pending"}
        self._store((kind, namespace, name), made, "ADDED")
        return 201, copy.deepcopy(made)

    def _patch(self, found: re.Match[str], body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        key = (found["kind"], found["namespace"] or "", found["name"])
        old = self.objects.get(key)
        if old is None:
            return 404, {"reason": "NotFound", "message": path_of(found)}
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, old["metadata"]["resourceVersion"]):
            return 409, {"reason": "Conflict", "message": f"{key} has changed"}
        new = merge(old, body)
        if key[0] in ("runs", "pods"):  # kinds with a status of their own
            part = "status" if found["status"] else "spec"
            new = {**old, part: new.get(part, {}), "metadata": old["metadata"] if part == "status" else new["metadata"]}
        if key[0] == "runs":
            new["spec"] = fill(self._schema["spec"], new["spec"], "spec")
            new["status"] = fill(self._schema["status"], new.get("status", {}), "status")
        if new != old:
            generation = old["metadata"]["generation"] + (new.get("spec") != old.get("spec"))
            new["metadata"] = {**new["metadata"], "generation": generation}
            self._store(key, new, "MODIFIED")
        return 200, copy.deepcopy(self.objects[key])

    def _delete(self, found: re.Match[str], body: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
        key = (found["kind"], found["namespace"] or "", found["name"])
        old = self.objects.get(key)
        if old is None:
            return 404, {"reason": "NotFound", "message": path_of(found)}
        wanted = (body or {}).get("preconditions", {}).get("uid")
        if wanted not in (None, old["metadata"]["uid"]):
            return 409, {"reason": "Conflict", "message": "another uid"}
        if key[0] == "pods" and old["status"]["phase"] in ("Pending", "Running") and old["spec"].get("nodeName"):
            grace_s = old["spec"].get("terminationGracePeriodSeconds", 30)
            deadline = {"deletionTimestamp": self.timestamp(self.now_s + grace_s)}
            self._store(key, {**old, "metadata": {**old["metadata"], **deadline}}, "MODIFIED")
        else:
            self.remove(key)
        return 200, {"kind": "Status", "status": "Success"}

    def _store(self, key: Key, value: dict[str, Any], change: str) -> None:
        value = {**value, "metadata": {**value["metadata"], "resourceVersion": str(next(self._numbers))}}
        self.objects[key] = value
        self.events.append((self._version(), change, value))

    def _version(self) -> int:
        return max((int(each["metadata"]["resourceVersion"]) for each in self.objects.values()), default=0)

    # --- the rest of the cluster

    def timestamp(self, time_s: float | None = None) -> str:
        return datetime.fromtimestamp(self.now_s if time_s is None else time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def remove(self, key: Key) -> None:
        """An object is gone, and what belonged to it alone."""
        with self.changed:
            removed = self.objects.pop(key)
            self.events.append((next(self._numbers), "DELETED", removed))
            for other, each in list(self.objects.items()):
                owners = each["metadata"].get("ownerReferences", ())
                if any(owner["uid"] == removed["metadata"]["uid"] for owner in owners) and other in self.objects:
                    self.remove(other)
            self.changed.notify_all()

    def pods(self) -> dict[str, dict[str, Any]]:
        return {name: each for (kind, _, name), each in self.objects.items() if kind == "pods"}

    def put(self, kind: str, namespace: str, value: Mapping[str, Any]) -> None:
        """Somebody else makes an object."""
        path = f"/api/v1/namespaces/{namespace}/{kind}" if namespace else f"/api/v1/{kind}"
        code, answer = self.request("POST", path, {}, value, "application/json")
        assert code == 201, answer

    def set_pod(self, name: str, **changes: Any) -> None:
        """What a kubelet tells of a pod; ``spec`` and ``metadata`` are merged, the rest goes into the status."""
        with self.changed:
            key = next(key for key in self.objects if key[0] == "pods" and key[2] == name)
            parts = {part: changes.pop(part, {}) for part in ("spec", "metadata")}
            self._store(key, merge(self.objects[key], {**parts, "status": changes}), "MODIFIED")
            self.changed.notify_all()

    def run_pod(self, name: str, host: str, *, joined: bool = True) -> None:
        """The pod runs on a host, and has been taken into the run."""
        started = {"startedAt": self.timestamp()}
        container = {"name": "node", "ready": joined, "state": {"running": started}}
        self.set_pod(name, spec={"nodeName": host}, phase="Running", podIP="127.0.0.1", containerStatuses=[container])

    def end_pod(self, name: str, code: int, *, reason: str = "", disrupted: bool = False, message: str = "") -> None:
        """Its container has ended. A pod that was being deleted is gone."""
        if self.pods()[name]["metadata"].get("deletionTimestamp"):
            self.remove(next(key for key in self.objects if key[0] == "pods" and key[2] == name))
            return
        ended = {"exitCode": code, "finishedAt": self.timestamp(), "reason": reason or "Error", "message": message}
        container = {"name": "node", "ready": False, "state": {"terminated": ended}}
        conditions = [{"type": "DisruptionTarget", "status": "True"}] if disrupted else []
        phase = "Succeeded" if code == 0 else "Failed"
        self.set_pod(name, phase=phase, containerStatuses=[container], conditions=conditions)


def path_of(found: re.Match[str]) -> str:
    return f"{found.string} not found"
