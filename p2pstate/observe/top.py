"""``p2pstate top``: the page of a run in the terminal. Needs rich: ``p2pstate[top]``.

In: the address of any node's page, again and again. Out: the terminal, until it is interrupted or the run has ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError

from p2pstate.observe.goodput import Goodput
from p2pstate.observe.whole import WINDOWS, headline
from p2pstate.sizes import size_text

__all__ = ["add_commands"]

ANSWER_S = 6.0


def add_commands(commands: Any) -> None:
    """Adds ``top`` to the subparsers of ``p2pstate``."""
    top = commands.add_parser("top", description="Watch a run in the terminal.")
    top.add_argument("url", metavar="URL", help="of any node's page (p2prun --http), such as http://127.0.0.1:8600/")
    top.add_argument("--token-file", metavar="FILE", help="what the page's --http-token-file holds")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="between two looks (default: 1)")
    top.add_argument("--once", action="store_true", help="print it once, and end")
    top.set_defaults(run=run_command)


def run_command(options: argparse.Namespace) -> int:
    """Exit code 0, or 1 with a sentence."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        print("p2pstate top needs rich: pip install 'p2pstate[top]'", file=sys.stderr)
        return 1
    try:
        token = Path(options.token_file).read_text(encoding="utf-8").strip() if options.token_file else ""
        run = _ask(options.url, token)
        if options.once:
            Console().print(_render(run))
            return 0
        with Live(_render(run), auto_refresh=False, screen=sys.stdout.isatty()) as live:
            while run["verdict"] is None:
                time.sleep(options.interval)
                run = _ask(options.url, token)
                live.update(_render(run), refresh=True)
        print(headline(run)[1])
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        print(f"p2pstate top: {options.url} tells nothing: {reason}; any other node's page will do", file=sys.stderr)
        return 1
    return 0


def _ask(url: str, token: str) -> dict[str, Any]:
    """Raises OSError when nobody answers, ValueError when the answer is none of a node's page."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("that is no http:// address")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url.rstrip("/") + "/status.json", headers=headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        run = json.loads(answer.read())
    if not isinstance(run, dict) or "nodes" not in run:
        raise ValueError("what it tells is not the state of a run")
    return run


def _render(run: Mapping[str, Any]) -> Any:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    well, state = headline(run)
    nodes = Table("node", "part", "state", "copies", "if it dies now", box=None, header_style="bold")
    for node in run["nodes"]:
        size = "" if node["vault_bytes"] is None else size_text(node["vault_bytes"])
        nodes.add_row(*map(escape, (node["name"], node["part"], node["state"], size, node["if_it_dies"])))
    ranks = Table("rank", "node", "process", "phase", "step", "protected", box=None, header_style="bold")
    for rank in run["ranks"]:
        values = (rank["rank"], rank["node"], rank["pid"], rank["phase"], rank["step"], rank["protected"])
        ranks.add_row(*("" if value is None else escape(str(value)) for value in values))
    failures = Table("when", "what", "why", "took", box=None, header_style="bold")
    for incident in run["incidents"][:5]:
        took = "not over" if incident["seconds"] is None else f"{incident['seconds']:.2f} s"
        failures.add_row(*map(escape, (f"{incident['s_ago']:.0f} s ago", incident["cause"], incident["reason"], took)))
    goodput = [f"{title}: {Goodput(run['goodput'][key]['seconds']).sentence()}" for key, title in WINDOWS.items()]
    colour = "green" if well else "red"
    first = f"[bold]run {escape(str(run['run_id']))}[/bold]  [{colour}]{escape(state)}[/{colour}]"
    notes = [escape(f"{kind}: {text}") for kind in ("waiting", "weaknesses") for text in run[kind]]
    notes += [escape(f"rank {rank} is {kind}: {reason}") for kind in ("slow", "starved") for rank, reason in run[kind]]
    return Group(first, *notes, "", nodes, "", ranks, "", failures, "", *goodput)
