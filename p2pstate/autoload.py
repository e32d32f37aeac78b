"""What runs at the end of every `import torch` (entry point `torch.backends`): hands over to rendezvous/autoload.py.

It stands in this package because `rendezvous` is a name that a file beside a user's script may have, too.
Invariants: `import torch` never fails because of this file; outside of workers of `torchrun --rdzv-backend=p2p` nothing
is imported.
"""

from __future__ import annotations

import os
import sys

ENV_AGENT = "P2PSTATE_AGENT_SOCKET"  # rendezvous.autoload's, which is not imported in vain


def autoload() -> None:
    """Called by torch."""
    if ENV_AGENT not in os.environ:
        return
    try:
        from rendezvous.autoload import autoload as autoload_in_worker
    except ImportError as error:
        hidden_by = getattr(sys.modules.get("rendezvous"), "__file__", None)
        print(
            f"p2pstate: this process makes a TCPStore, because the package rendezvous cannot be imported: {error}. "
            f"Is {hidden_by or 'a file of that name'} yours? Then rename it: it hides the package",
            file=sys.stderr,
        )
    else:
        autoload_in_worker()
