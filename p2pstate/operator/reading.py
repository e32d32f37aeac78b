"""Pure: what the API server says, as values; what was decided, as the status of a Run.

In: plain tables. Out: Spec, Record, Pod, Host; and back: the status with its conditions.

Invariants: a status that was written is read back as the same Record, for times in whole seconds. The schema of the
resource has validated what users write; what is missing in objects of the cluster is not known, and no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from p2pstate.operator.objects import ATTEMPT_LABEL, CONTAINER, GROUP, NUMBER_LABEL
from p2pstate.operator.types import (
    Attempt,
    Failure,
    Host,
    Observed,
    Phase,
    Pod,
    Quarantined,
    QuarantineRule,
    QuarantineWay,
    Record,
    Spec,
)

__all__ = [
    "CORDON_ANNOTATION",
    "TAINT_KEY",
    "merge_patch",
    "read_host",
    "read_page",
    "read_pod",
    "read_record",
    "read_spec",
    "status_of",
]

TAINT_KEY = f"{GROUP}/failing"
CORDON_ANNOTATION = f"{GROUP}/cordoned-for"


def read_spec(run: Mapping[str, Any]) -> Spec:
    """Of a Run as the API server has it, with the schema's defaults filled in."""
    metadata, spec = run["metadata"], run["spec"]
    rule = spec.get("quarantine", {})
    default = QuarantineRule()
    return Spec(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        num_nodes=spec["nodes"],
        min_nodes=spec.get("minNodes"),
        num_spares=spec.get("spares", 0),
        num_workers=spec.get("workersPerNode", 1),
        script=tuple(spec["script"]),
        options=tuple(spec.get("options", ())),
        key_secret=spec["keySecret"],
        pod=spec.get("pod", {}),
        container=spec["container"],
        max_restarts=spec.get("maxRestarts", 10),
        suspended=spec.get("suspend", False),
        quarantine=QuarantineRule(
            after_failures=rule.get("afterFailures", default.after_failures),
            window_s=rule.get("windowSeconds", default.window_s),
            max_hosts=rule.get("maxHosts", default.max_hosts),
            way=QuarantineWay(rule.get("action", default.way)),
        ),
    )


def read_record(run: Mapping[str, Any]) -> Record:
    """Of a Run's status; empty for one that has none yet."""
    status = run.get("status") or {}
    attempt = status.get("attempt")
    return Record(
        phase=Phase(status.get("phase", Phase.PENDING)),
        message=status.get("message", ""),
        attempt=None
        if attempt is None
        else Attempt(
            number=attempt["number"],
            num_pods=attempt["pods"],
            next_pod=attempt.get("nextPod", 0),
            founded=attempt.get("founded", False),
            over_s=_seconds(attempt.get("overSince")),
        ),
        num_restarts=status.get("restarts", 0),
        failures=tuple(
            Failure(each["host"], each["pod"], each["why"], _seconds(each["at"]) or 0.0)
            for each in status.get("failures", ())
        ),
        quarantined=tuple(Quarantined(each["host"], each["applied"]) for each in status.get("quarantined", ())),
    )


def read_pod(pod: Mapping[str, Any]) -> Pod:
    """The container's state counts, not the conditions: those change when only the host is out of reach."""
    metadata, status = pod["metadata"], pod.get("status", {})
    labels = metadata.get("labels", {})
    containers = {each["name"]: each for each in status.get("containerStatuses", ())}
    container = containers.get(CONTAINER, {})
    terminated = container.get("state", {}).get("terminated")
    ended_s = None
    if terminated is not None or status.get("phase") in ("Succeeded", "Failed"):
        ended_s = _seconds((terminated or {}).get("finishedAt")) or _newest_change(status)
        ended_s = _seconds(metadata["creationTimestamp"]) if ended_s is None else ended_s
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        attempt=int(labels.get(ATTEMPT_LABEL, 0)),
        number=int(labels.get(NUMBER_LABEL, 0)),
        created_s=_seconds(metadata["creationTimestamp"]) or 0.0,
        host=pod.get("spec", {}).get("nodeName"),
        address=status.get("podIP"),
        joined=bool(container.get("ready", False)),
        leave_by_s=_seconds(metadata.get("deletionTimestamp")),
        ended_s=ended_s,
        exit_code=(terminated or {}).get("exitCode"),
        reason=(terminated or {}).get("reason") or status.get("reason", ""),
        disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
        message=((terminated or {}).get("message") or status.get("message") or "").strip()[-500:],
        held_up="" if ended_s is not None else _held_up(container, conditions.get("PodScheduled", {})),
    )


def _held_up(container: Mapping[str, Any], scheduled: Mapping[str, Any]) -> str:
    if scheduled.get("status") == "False":
        return f"cannot be placed on a host: {scheduled.get('message', scheduled.get('reason', ''))}"[:500]
    waiting = container.get("state", {}).get("waiting", {})
    if waiting.get("reason", "ContainerCreating") == "ContainerCreating":
        return ""
    return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")[:500]


def read_host(node: Mapping[str, Any]) -> Host:
    """Only this operator's own marks count."""
    tainted = any(taint["key"] == TAINT_KEY for taint in node.get("spec", {}).get("taints", ()))
    cordoned = node.get("spec", {}).get("unschedulable", False)
    annotated = CORDON_ANNOTATION in node["metadata"].get("annotations", {})
    return Host(node["metadata"]["name"], tainted or (cordoned and annotated))


def read_page(page: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The page of a run (observe.whole.merge), which comes from a pod and is not to be trusted; None if it is none."""
    try:
        _from_page(page)
        told = [*page["waiting"], *page["weaknesses"], *(node["name"] + node["part"] for node in page["nodes"])]
        return page if all(isinstance(each, str) for each in told) else None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def status_of(spec: Spec, record: Record, seen: Observed, before: Mapping[str, Any]) -> dict[str, Any]:
    """The status to write; ``before``: the one that is there, whose conditions keep their times."""
    attempt = record.attempt
    live = [pod for pod in seen.pods if attempt is not None and pod.attempt == attempt.number and not pod.ended]
    status: dict[str, Any] = {
        "phase": str(record.phase),
        "message": record.message,
        "observedGeneration": spec.generation,
        "restarts": record.num_restarts,
        "pods": {"wanted": spec.num_pods, "live": len(live), "joined": sum(pod.joined for pod in live)},
        "failures": [
            {"host": each.host, "pod": each.pod, "why": each.why, "at": _timestamp(each.at_s)}
            for each in record.failures
        ],
        "quarantined": [{"host": each.host, "applied": each.applied} for each in record.quarantined],
        "attempt": None
        if attempt is None
        else {
            "number": attempt.number,
            "pods": attempt.num_pods,
            "nextPod": attempt.next_pod,
            "founded": attempt.founded,
            "overSince": None if attempt.over_s is None else _timestamp(attempt.over_s),
        },
    }
    page = seen.page
    for key in ("step", "protectedStep", "goodput", "lastIncident"):
        status[key] = before.get(key)
    if page is not None:
        status |= _from_page(page)
    status["conditions"] = _conditions(spec, record, seen, before.get("conditions", ()))
    return _without_none(status)


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that makes ``after``, which holds no None, of ``before``; empty if equal."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping):
            if inner := merge_patch(before[key], value):
                patch[key] = inner
        elif key not in before or value != before[key]:
            patch[key] = value
    return patch


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def _from_page(page: Mapping[str, Any]) -> dict[str, Any]:
    """What the run says of itself: ages become times only roughly, so they are left out."""
    steps = [rank["step"] for rank in page["ranks"] if rank["step"] is not None]
    incident = page["incidents"][0] if page["incidents"] else None
    return {
        "step": min(steps, default=None),
        "protectedStep": _protected(page),
        "goodput": f"{page['goodput']['run']['ratio']:.3f}",
        "lastIncident": None
        if incident is None
        else {
            "cause": str(incident["cause"]),
            "replaced": ", ".join(str(each) for each in incident["replaced"]),
            "source": str(incident["source"]),
            "seconds": "" if incident["seconds"] is None else f"{incident['seconds']:.1f}",
        },
    }


def _protected(page: Mapping[str, Any]) -> int | None:
    """The newest step that every rank's copies hold."""
    told = [rank["protected"] for rank in page["ranks"]]
    return None if not told or None in told else min(told)


def _conditions(
    spec: Spec, record: Record, seen: Observed, before: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    running = record.phase is Phase.RUNNING
    page = seen.page if not record.phase.final else None
    joined = [pod for pod in seen.pods if pod.joined and not pod.ended and not pod.leaving]
    found = {
        "Running": ("True" if running else "False", str(record.phase), record.message),
        "Protected": _protection(page),
        "SparesReady": ("True", "AllThere", "")
        if len(joined) >= spec.num_pods
        else ("False", "Missing", f"{len(joined)} of {spec.num_pods} nodes are in the run"),
        "HostsHealthy": ("False", "Quarantined", ", ".join(each.host for each in record.quarantined))
        if record.quarantined
        else ("True", "NoneFailing", ""),
    }
    earlier = {each["type"]: each for each in before}
    now = _timestamp(seen.now_s)
    return [
        {
            "type": kind,
            "status": state,
            "reason": reason,
            "message": message[:1000],
            "observedGeneration": spec.generation,
            "lastTransitionTime": earlier[kind]["lastTransitionTime"]
            if kind in earlier and earlier[kind]["status"] == state
            else now,
        }
        for kind, (state, reason, message) in found.items()
    ]


def _protection(page: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if page is None:
        return "Unknown", "NobodyAnswers", "no node answers at its page"
    step = _protected(page)
    if step is None:
        return "False", "NotYet", "nothing is protected yet"
    weak = "; ".join(page["weaknesses"])
    return "True", "Protected", f"step {step} is protected" + (f" ({weak})" if weak else "")


def _newest_change(status: Mapping[str, Any]) -> float | None:
    times = [_seconds(each.get("lastTransitionTime")) for each in status.get("conditions", ())]
    return max((time for time in times if time is not None), default=None)


def _seconds(timestamp: str | None) -> float | None:
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()


def _timestamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
