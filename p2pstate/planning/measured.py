"""What a run that was measured says about the next one. Pure.

In: a `History`. Out: fields of `Inputs`. One rank counts as one GPU.
Of a script with the meter alone, what a restart takes is known, and nothing of copies.
Known limit: a run with few failures says little about their rate; the number of failures is part of the answer.
"""

from __future__ import annotations

import statistics

from p2pstate.observe.history import History

__all__ = ["measured_fields"]


def measured_fields(history: History) -> dict[str, float]:
    """Raises ValueError when the run had no failure, for it tells no rate then."""
    mtbf_s = history.rank_mtbf_s
    if mtbf_s is None:
        raise ValueError("no failure happened in that run, so it tells no rate: give --mtbf or another rate")
    fields = {"gpu_mtbf_s": mtbf_s}
    if history.step_samples_s:
        fields["step_s"] = statistics.median(history.step_samples_s)
    causes = [each.cause for each in history.incidents]
    if "restart" in causes:
        lost_s = history.total.by_category().get("recovery", 0.0)
        return fields | {"restart_s": lost_s / len(history.ranks) / len(causes), "measured_load_s": 0.0}  # which it has
    if history.step_samples_s:
        fields["overhead"] = history.total.seconds.get("protection", 0.0) / history.useful_s
    for cause, field in (("process", "vault_recovery_s"), ("node", "buddy_recovery_s")):
        took_s = [each.seconds for each in history.incidents if each.cause == cause and each.seconds is not None]
        if took_s:
            fields[field] = statistics.median(took_s)
    fields["node_share"] = causes.count("node") / len(causes)
    return fields
