"""What a DistributedDataParallel remembers from a forward to the next backward, and shows nobody.

In: forwards and backwards of such a module. Out: whether a forward of it that is to be reduced has had no backward yet.
DDP keeps that in its reducer and reduces in the next backward through the module, even one under ``no_sync``: a critic
that is frozen for the generator's loss leaves it so for the next step. Ranks of which only some do wait for ever.

Known limit: it can be set in a live module, not unset. A discarded step that leaves it where the version it goes back
to has it not, and that begins with a backward under ``no_sync``, reduces there.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from p2pstate.groups.uncompiled import uncompiled

__all__ = ["AwaitedBackward", "awaited_backward"]


class AwaitedBackward:
    """Of one module. ``awaited``: see above."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.awaited = False
        self._was_reduced = False
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not (module.find_unused_parameters or module.static_graph):
            trained = trained[:1]  # a backward goes through all of them, or DDP raises in the next forward
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._after_gradient)
        if trained:
            module.register_forward_hook(self._after_forward)

    def restore(self, module: DistributedDataParallel, awaited: bool) -> None:
        stays = module.find_unused_parameters and not module.static_graph
        # a module about to lay its buckets out anew, in its next forward, raises there if a backward is awaited
        if awaited and not self.awaited and (stays or module._has_rebuilt_buckets or not self._was_reduced):
            module.reducer.prepare_for_backward([])
            self.awaited = True

    @uncompiled
    def _after_forward(self, module: DistributedDataParallel, _inputs: Any, _outputs: Any) -> None:
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            self.awaited = True

    @uncompiled
    def _after_gradient(self, _parameter: torch.Tensor) -> None:
        self._was_reduced = self._was_reduced or self.awaited
        self.awaited = False


_KNOWN: WeakKeyDictionary[DistributedDataParallel, AwaitedBackward] = WeakKeyDictionary()


def awaited_backward(module: DistributedDataParallel) -> AwaitedBackward:
    """The one of this module, which counts from the first call on."""
    found = _KNOWN.get(module)
    if found is None:
        found = _KNOWN[module] = AwaitedBackward(module)
    return found
