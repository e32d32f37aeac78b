"""What an operator is told about a node and its run: a plain table, and the same for a person.

In: a node's workers and vault. Out: :func:`ranks_status`, part of what is answered to ``p2prun status``;
:func:`describe` puts the answers of all nodes together. Seconds are ages, so that no two clocks are compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from p2pstate.agent.held import RankProcess
from p2pstate.agent.weaknesses import Weaknesses
from p2pstate.sizes import size_text
from p2pstate.vault import Vault
from rendezvous.standing import newest_view, part_of

__all__ = ["describe", "ranks_status"]

Answers = Mapping[str, Mapping[str, Any]]  # by the name of the node


def ranks_status(workers: Iterable[RankProcess], num_warm: int, vault: Vault, weaknesses: Weaknesses) -> dict[str, Any]:
    """Of this node, beside rendezvous.standing.standing_of: its ranks, warm processes, vault."""
    now = time.monotonic()
    ranks: list[dict[str, Any]] = [
        {
            "rank": worker.rank,
            "keepers": weaknesses.keepers_of(worker.rank),
            "pid": worker.pid,
            "phase": worker.phase.value,
            "step": worker.step,
            "protected": worker.protected,
            "told_s_ago": None if worker.told_at is None else now - worker.told_at,
        }
        for worker in workers
    ]
    return {
        "ranks": sorted(ranks, key=lambda each: int(each["rank"] or 0)),
        "num_warm": num_warm,
        "vault_bytes": vault.num_bytes,
        "weaknesses": list(weaknesses.told),
    }


def describe(answers: Answers) -> list[str]:
    """The newest view, a line per member and per rank, and what is wrong."""
    newest = newest_view(answers.values())
    run_id = next(iter(answers.values()))["run_id"]
    lines = [f"run {run_id}: " + (f"view {newest['epoch']} ({newest['reason']})" if newest else "no view yet")]
    for name in sorted({name for answer in answers.values() for name in answer["members"]} | set(answers)):
        lines += _member(name, answers, newest)
    lines += sorted({f"waiting: {answer['waiting']}" for answer in answers.values() if answer.get("waiting")})
    lines += sorted({f"weak: {text}" for answer in answers.values() for text in answer.get("weaknesses", ())})
    verdicts = [answer["verdict"] for answer in answers.values() if answer["verdict"] is not None]
    return lines + [f"ended: {verdict['text']} (exit code {verdict['code']})" for verdict in verdicts[:1]]


def _member(name: str, answers: Answers, view: Mapping[str, Any] | None) -> list[str]:
    told = [answer["members"][name] for answer in answers.values() if name in answer["members"]]
    known = min(told, key=lambda each: float(each["silent_s"]))
    line = f"  {name}  {known['address']}  {part_of(name, view)}, {known['state']}"
    if known["reason"]:
        line += f" ({known['reason']})"
    answer = answers.get(name)
    if answer is None:
        return [f"{line}, did not answer, heard {known['silent_s']:.1f} s ago"]
    if "vault_bytes" in answer:
        line += f", {answer['num_warm']} warm processes, {size_text(answer['vault_bytes'])} of copies"
    return [line, *(_rank(each) for each in answer.get("ranks", ()))]


def _rank(rank: Mapping[str, Any]) -> str:
    line = f"    rank {rank['rank']}  pid {rank['pid']}  {rank['phase']}"
    if rank["told_s_ago"] is None:
        return line
    protected = "nothing protected yet" if rank["protected"] is None else f"step {rank['protected']} protected"
    return f"{line}, step {rank['step']} committed {rank['told_s_ago']:.1f} s ago, {protected}"
