"""``python -m p2pstate``: the same as ``p2pstate``, where a script directory is not on PATH."""

import sys

from p2pstate.tools import run_tool

sys.exit(run_tool(None))
