"""The variables that tell torch what to do about NCCL errors: all of it is left to us.

In: an environment. Out: the same with every variable of ``NEEDED`` set, or what in it contradicts them. torch reads
them whenever it makes an NCCL group, so they are set before the first one is made.

Invariant: a value that somebody chose is never replaced without a word; the one exception is what torchrun puts into
every worker's environment by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from p2pstate.errors import ConfigError

__all__ = ["NEEDED", "Conflict", "apply", "conflicts"]

_TRUE = frozenset({"1", "y", "yes", "t", "true"})
_FALSE = frozenset({"0", "n", "no", "f", "false"})
_TORCHRUN_SETS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")


@dataclass(frozen=True, slots=True)
class _Needed:
    """``value`` is what the variable must be, ``otherwise`` what goes wrong with another one."""

    value: str
    otherwise: str
    former_name: str = ""


NEEDED: Mapping[str, _Needed] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _Needed(
        "0",
        "torch's watchdog ends the process at the first NCCL error, and a survivor could not stay",
        "NCCL_ASYNC_ERROR_HANDLING",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": _Needed(
        "0",
        "a wait stops the host at every collective, and aborts NCCL before the step is known to be bad",
        "NCCL_BLOCKING_WAIT",
    ),
    "TORCH_NCCL_DESYNC_DEBUG": _Needed(
        "0", "it turns torch's error handling on again, which ends the process", "NCCL_DESYNC_DEBUG"
    ),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": _Needed("0", "a CUDA error on torch's watchdog thread ends the process"),
    "TORCH_NCCL_ENABLE_MONITORING": _Needed(
        "0", "torch's heartbeat monitor ends a process whose watchdog waits for a cut"
    ),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": _Needed("0", "every rank writes its trace while the others wait for it to recover"),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": _Needed(
        "0", "after an error torch's watchdog sleeps for four times that long, and collectives called meanwhile wait"
    ),
    "TORCH_NCCL_PROPAGATE_ERROR": _Needed("0", "an error of one round would be told to the next one"),
    "TORCH_NCCL_NAN_CHECK": _Needed(
        "0", "what a collective that was cut leaves behind may be NaN, and the check ends the CUDA context"
    ),
}


@dataclass(frozen=True, slots=True)
class Conflict:
    name: str
    value: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.what}; {self.fix}"


def conflicts(environ: Mapping[str, str], *, under_torchrun: bool = False) -> Iterator[Conflict]:
    """What in ``environ`` keeps a run on cards from being repaired in place."""
    for name, needed in NEEDED.items():
        for given in filter(None, (name, needed.former_name)):
            value = environ.get(given)
            if value is None or (under_torchrun and (given, value) == _TORCHRUN_SETS):
                continue
            if not _is(value, needed.value):
                yield Conflict(given, value, needed.otherwise, f"unset it, or set it to {needed.value}")
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = "on cards it means TORCH_NCCL_DESYNC_DEBUG=1, which turns on torch's error handling and ends the process"
        yield Conflict("TORCH_DISTRIBUTED_DEBUG", environ["TORCH_DISTRIBUTED_DEBUG"], what, "use INFO, or unset it")


def apply(environ: MutableMapping[str, str], *, under_torchrun: bool = False) -> None:
    """Set what is not set. Raises ConfigError, before anything is set, that names every contradiction."""
    found = list(conflicts(environ, under_torchrun=under_torchrun))
    if found:
        raise ConfigError("NCCL groups cannot be repaired in place with " + " and with ".join(map(str, found)))
    for name, needed in NEEDED.items():
        environ[name] = needed.value


def _is(value: str, needed: str) -> bool:
    text = value.strip().lower()
    return text in (_TRUE if needed in _TRUE else _FALSE)
