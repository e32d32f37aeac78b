"""Pure: what to do about a Run, given what was decided before and what the cluster says.

In: Spec, Record, Observed. Out: Decision: the new record, and actions. The record is written before the actions are
taken; deciding again from any state in which a crash leaves the cluster comes to the same end.

Invariants:
    * An attempt has one run id. Its first pods are started together. Once it is founded (some pod was in a view), pods
      that have not joined it are always fewer than a first view needs, so they can join the run and not found a second
      one beside it, whatever the network does. A pod is not dead because its host is out of reach.
    * A new attempt begins only when no pod of the one before can be in its view any more.
    * Numbers of pods are never used twice in an attempt.
    * At most ``max_hosts`` hosts are in quarantine: a script that fails everywhere empties no cluster.
Limits: an operator that was away while the run was founded, and comes back to find every member out of reach, takes the
attempt for one that was never founded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from p2pstate.errors import EXIT_REPLACE, EXIT_STATE_LOST
from p2pstate.operator.types import (
    Action,
    Attempt,
    CreatePod,
    Decision,
    DeletePod,
    Failure,
    Observed,
    Phase,
    Pod,
    Quarantine,
    Quarantined,
    QuarantineWay,
    Record,
    Spec,
    WriteGone,
)
from rendezvous.types import EXIT_STOPPED

__all__ = ["backoff_s", "decide", "pod_name"]

JOIN_GRACE_S = 30.0  # a pod that has joined says so within a readiness probe; so long after the last member's end
END_GRACE_S = 30.0  # nodes of a run that has ended, end by themselves
QUICK_S = 120.0  # a pod that ends sooner makes its successor wait
RECENT_S = 600.0
MAX_BACKOFF_S = 300.0
NUM_ENDED_KEPT = 10  # for their logs
MAX_GONE = 1000
MAX_FAILURES = 100
SIGNALLED = 128  # exit codes above are signals


def pod_name(spec: Spec, attempt: int, number: int) -> str:
    """Also its node's name in the run."""
    return f"{spec.name}-{attempt}-{number}"


def decide(spec: Spec, record: Record, seen: Observed) -> Decision:
    """Total: any state gives a decision, and one that changes nothing when there is nothing to do."""
    if spec.quarantine.way is not QuarantineWay.NONE:  # else nobody has looked at hosts
        record = _confirm(record, seen)
    record = _accuse(spec, record, seen)
    record, quarantines = _quarantine(spec, record)
    if record.attempt is None:
        attempt = _first_attempt(spec, seen)
        if spec.suspended:
            return Decision(replace(record, phase=Phase.SUSPENDED, message="spec.suspend is set"), quarantines)
        return Decision(replace(record, attempt=attempt, message="its first pods are being started"), quarantines)
    attempt = record.attempt
    pods = [pod for pod in seen.pods if pod.attempt == attempt.number]
    older = [pod for pod in seen.pods if pod.attempt < attempt.number and not pod.ended]
    actions: list[Action] = [*quarantines, *_delete(older, "an earlier attempt"), *_forget(seen)]
    if not record.phase.final:
        record = _judge(spec, record, pods, seen)
        attempt = record.attempt or attempt
    if record.phase.final:
        last_s = max((pod.ended_s for pod in pods if pod.ended_s is not None), default=seen.now_s)
        if seen.now_s - last_s >= END_GRACE_S:
            actions += _delete([pod for pod in pods if not pod.ended], f"the run has ended: {record.phase}")
    elif spec.suspended:
        actions += _delete([pod for pod in pods if not pod.ended], "spec.suspend is set")
        record = replace(record, phase=Phase.SUSPENDED, message="spec.suspend is set")
    elif record.phase in (Phase.RESTARTING, Phase.SUSPENDED) or _too_few_to_found(spec, attempt):
        record = _restart(spec, record, pods, seen)
        if record.attempt == attempt:
            actions += _delete([pod for pod in pods if not pod.ended], "the attempt is over")
    else:
        record, further = _fill(spec, record, pods, seen)
        actions += further
    gone = _gone(spec, record, pods, seen)
    if gone != seen.gone:
        actions.append(WriteGone(gone))
    return Decision(record, tuple(actions))


def _first_attempt(spec: Spec, seen: Observed) -> Attempt:
    """The first one; or the one whose pods are there, of a Run that has lost its status."""
    number = max((pod.attempt for pod in seen.pods), default=1)
    next_pod = max((pod.number + 1 for pod in seen.pods if pod.attempt == number), default=0)
    return Attempt(number, spec.num_pods, next_pod)


def _too_few_to_found(spec: Spec, attempt: Attempt) -> bool:
    """Spares were taken back before the first view, which was to have more nodes than there are to be now."""
    return not attempt.founded and spec.num_pods < attempt.first_view_size


def _members(pods: Sequence[Pod], now_s: float) -> list[Pod]:
    """Pods that may be in the run's view, as far as anybody can tell; or that may still be writing it to disk."""
    return [pod for pod in pods if not pod.ended and (pod.joined or now_s < (pod.leave_by_s or 0.0) + JOIN_GRACE_S)]


def _outside(pods: Sequence[Pod]) -> list[Pod]:
    """Pods that may run, and have not been in the view."""
    return [pod for pod in pods if not pod.ended and not pod.joined]


def _lingering(pods: Sequence[Pod], now_s: float) -> str:
    """What a person has to know of pods that do not end although they were asked to."""
    late = [f"{pod.name} on {pod.host}" for pod in pods if not pod.ended and now_s >= (pod.leave_by_s or now_s + 1)]
    if not late:
        return ""
    return (
        f"not known to have ended, so maybe still running: pod {', '.join(late)}. Its host is out of reach: bring it "
        "back, or, when it is certainly off, delete the pod by force"
    )[:1000]


def _judge(spec: Spec, record: Record, pods: Sequence[Pod], seen: Observed) -> Record:
    """What the ends of pods mean for the run: the phase, and whether the attempt is over."""
    attempt = record.attempt
    assert attempt is not None
    ended = sorted((pod for pod in pods if pod.ended), key=lambda pod: pod.ended_s or 0.0)
    for pod in ended:
        if pod.exit_code == 0:
            return replace(record, phase=Phase.SUCCEEDED, message="the run has finished")
        if pod.exit_code in (1, EXIT_STATE_LOST):
            what = "the script failed" if pod.exit_code == 1 else "no copy of some part of the state is left"
            return replace(record, phase=Phase.FAILED, message=f"{what} (pod {pod.name}): {pod.message}"[:1000])
    if record.phase in (Phase.RESTARTING, Phase.SUSPENDED):
        return record
    attempt = replace(attempt, founded=attempt.founded or any(pod.joined for pod in pods))
    if _members(pods, seen.now_s) or (not attempt.founded and (_outside(pods) or not ended)):
        phase, message = _told(seen, pods, attempt.founded)
        return replace(record, attempt=replace(attempt, over_s=None), phase=phase, message=message)
    attempt = replace(attempt, over_s=seen.now_s if attempt.over_s is None else attempt.over_s)
    record = replace(record, attempt=attempt)
    if _outside(pods) and seen.now_s - (attempt.over_s or 0.0) < JOIN_GRACE_S:
        return record
    if any(pod.exit_code == EXIT_STOPPED and not (pod.disrupted or pod.leaving) for pod in ended):
        return replace(record, phase=Phase.STOPPED, message="the run was stopped")
    last = f"; the last with exit code {ended[-1].exit_code}: {ended[-1].message}"[:1000] if ended else ""
    if record.num_restarts >= spec.max_restarts:
        text = f"all nodes have ended, and maxRestarts ({spec.max_restarts}) is reached"
        return replace(record, phase=Phase.FAILED, message=text + last)
    return replace(record, phase=Phase.RESTARTING, message="all nodes have ended" + last)


def _told(seen: Observed, pods: Sequence[Pod], founded: bool) -> tuple[Phase, str]:
    """Phase and message of a run whose nodes are there."""
    waiting = "; ".join(seen.page["waiting"]) if seen.page is not None else ""
    if not founded:
        held_up = "; ".join(f"pod {pod.name}: {pod.held_up}" for pod in pods if pod.held_up)
        return Phase.PENDING, waiting or held_up[:1000] or "its first nodes are being started"
    if all(pod.leaving for pod in _members(pods, seen.now_s)) and (lingering := _lingering(pods, seen.now_s)):
        return Phase.WAITING, lingering
    return (Phase.WAITING, waiting) if waiting else (Phase.RUNNING, "")


def _restart(spec: Spec, record: Record, pods: Sequence[Pod], seen: Observed) -> Record:
    """The next attempt, once nothing of the one before can be in its view and its time has come."""
    attempt = record.attempt
    assert attempt is not None
    if _members(pods, seen.now_s) or (not attempt.founded and _outside(pods)):
        return replace(record, message=_lingering(pods, seen.now_s) or "its pods are asked to leave")
    counted = record.phase is Phase.RESTARTING
    num_restarts = record.num_restarts + 1 if counted else record.num_restarts
    since_s = max((pod.ended_s for pod in pods if pod.ended_s is not None), default=attempt.over_s or seen.now_s)
    if counted and seen.now_s - since_s < backoff_s(num_restarts):
        return record
    following = Attempt(attempt.number + 1, spec.num_pods)
    return replace(record, phase=Phase.PENDING, attempt=following, num_restarts=num_restarts, message="started again")


def _fill(spec: Spec, record: Record, pods: Sequence[Pod], seen: Observed) -> tuple[Record, list[Action]]:
    """Keep as many pods as the spec says; only spares are given up."""
    attempt = record.attempt
    assert attempt is not None
    there = [pod for pod in pods if not pod.ended and not pod.leaving]
    lacking = spec.num_pods - len(there)
    if lacking < 0:
        return record, list(_delete(_surplus(there, -lacking, seen), "there are more spares than spec.spares"))
    if attempt.founded:
        room = attempt.first_view_size - 1 - len(_outside(pods))
        lacking = min(lacking, room if _members(pods, seen.now_s) else 0)
    if lacking <= 0 or _too_soon(pods, seen.now_s):
        return record, []
    first = max([attempt.next_pod, *(pod.number + 1 for pod in pods)])
    created = [CreatePod(attempt.number, first + index) for index in range(lacking)]
    return replace(record, attempt=replace(attempt, next_pod=first + lacking)), list(created)


def _surplus(there: Sequence[Pod], count: int, seen: Observed) -> list[Pod]:
    """The newest of those that have not started, then of those that the run itself calls spares."""
    nodes = seen.page["nodes"] if seen.page is not None else []
    spares = {node["name"] for node in nodes if node["part"] == "spare"}
    unstarted = {pod.name for pod in there if not pod.joined and (pod.host is None or pod.held_up)}
    candidates = [pod for pod in there if pod.name in spares | unstarted]
    return sorted(candidates, key=lambda pod: (pod.name not in unstarted, -pod.number))[:count]


def _too_soon(pods: Sequence[Pod], now_s: float) -> bool:
    quick = [
        pod.ended_s
        for pod in pods
        if pod.ended_s is not None
        and not pod.disrupted
        and pod.ended_s - pod.created_s < QUICK_S
        and now_s - pod.ended_s < RECENT_S
    ]
    return bool(quick) and now_s - max(quick) < backoff_s(len(quick))


def backoff_s(count: int) -> float:
    """Before the next try, after ``count`` failures."""
    return float(min(MAX_BACKOFF_S, 5.0 * 2 ** min(count, 10)))


def _delete(pods: Sequence[Pod], why: str) -> list[DeletePod]:
    return [DeletePod(pod.name, pod.uid, why) for pod in pods if not pod.leaving]


def _forget(seen: Observed) -> list[DeletePod]:
    """Ended pods beyond those that are kept for their logs."""
    ended = sorted((pod for pod in seen.pods if pod.ended), key=lambda pod: pod.ended_s or 0.0)
    return _delete(ended[: max(0, len(ended) - NUM_ENDED_KEPT)], "an ended pod, and not one of the newest")


def _gone(spec: Spec, record: Record, pods: Sequence[Pod], seen: Observed) -> Mapping[str, int]:
    """Pods of the attempt that certainly run no more. One whose host is out of reach is not among them."""
    attempt = record.attempt
    assert attempt is not None
    prefix = pod_name(spec, attempt.number, 0)[:-1]
    found = {name: at_us for name, at_us in seen.gone.items() if name.startswith(prefix)}
    found |= {pod.name: round(pod.ended_s * 1e6) for pod in pods if pod.ended_s is not None and pod.name not in found}
    known = {pod.name for pod in pods}
    newest = max((pod.number for pod in pods), default=0)
    for number in range(newest):  # younger ones may just be in the making
        name = pod_name(spec, attempt.number, number)
        if name not in known and name not in found:
            found[name] = round(seen.now_s * 1e6)
    return dict(sorted(found.items(), key=lambda item: item[1])[-MAX_GONE:])


def _accuse(spec: Spec, record: Record, seen: Observed) -> Record:
    """Remember ends that speak against a host; each pod once."""
    known = {failure.pod for failure in record.failures}
    new = [
        Failure(pod.host, pod.name, why, pod.ended_s)
        for pod in seen.pods
        if pod.host and pod.ended_s is not None and pod.name not in known and (why := _speaks_against_host(pod))
    ]
    window_s = spec.quarantine.window_s
    kept = [failure for failure in (*record.failures, *new) if seen.now_s - failure.at_s < window_s]
    return replace(record, failures=tuple(sorted(kept, key=lambda failure: failure.at_s)[-MAX_FAILURES:]))


def _speaks_against_host(pod: Pod) -> str:
    if pod.disrupted or pod.leaving or pod.exit_code is None or pod.reason == "OOMKilled":
        return ""
    if pod.exit_code == EXIT_REPLACE:
        return f"exit code {EXIT_REPLACE}: replace this node"
    if pod.exit_code > SIGNALLED and pod.exit_code != EXIT_STOPPED:
        return f"ended by signal {pod.exit_code - SIGNALLED}"
    return ""


def _confirm(record: Record, seen: Observed) -> Record:
    """Quarantines that are seen are applied; those that somebody lifted are over, with what led to them."""
    marked = {host.name for host in seen.hosts if host.quarantined}
    lifted = {each.host for each in record.quarantined if each.applied and each.host not in marked}
    left = [replace(each, applied=each.host in marked) for each in record.quarantined if each.host not in lifted]
    failures = tuple(
        Failure("", failure.pod, failure.why, failure.at_s) if failure.host in lifted else failure
        for failure in record.failures
    )
    return replace(record, quarantined=tuple(left), failures=failures)


def _quarantine(spec: Spec, record: Record) -> tuple[Record, tuple[Action, ...]]:
    rule = spec.quarantine
    if rule.way is QuarantineWay.NONE:
        return record, ()
    counts = Counter(failure.host for failure in record.failures if failure.host)
    known = {each.host for each in record.quarantined}
    for host, count in counts.most_common():
        if count >= rule.after_failures and host not in known and len(known) < rule.max_hosts:
            known.add(host)
            record = replace(record, quarantined=(*record.quarantined, Quarantined(host)))
    pending = tuple(Quarantine(each.host, rule.way) for each in record.quarantined if not each.applied)
    return record, pending
