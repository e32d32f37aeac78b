"""``p2pstate top``: the page of a run in the terminal. Needs rich: ``p2pstate[top]``.

In: the address of any node's page, again and again; when its node dies, those of the others, which it has named. Out:
the terminal, until it is interrupted or the run has ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.error import URLError

from p2pstate.arguments import path
from p2pstate.observe.goodput import Goodput
from p2pstate.observe.whole import WINDOWS, headline
from p2pstate.sizes import size_text

__all__ = ["add_commands"]

ANSWER_S = 6.0
WIDE = 72  # columns of a terminal


def add_commands(commands: Any) -> None:
    """Adds ``top`` to the subparsers of ``p2pstate``."""
    top = commands.add_parser("top", description="Watch a run in the terminal.")
    top.add_argument("url", metavar="URL", help="of any node's page (p2prun --http), such as http://127.0.0.1:8600/")
    top.add_argument("--token-file", type=path, metavar="FILE", help="what the page's --http-token-file holds")
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
    if not 0 < options.interval < float("inf"):
        print(f"p2pstate top: --interval {options.interval:g}: give seconds, more than 0", file=sys.stderr)
        return 1
    try:
        token = options.token_file.read_text(encoding="utf-8").strip() if options.token_file else ""
    except (OSError, ValueError) as error:
        print(f"p2pstate top: --token-file cannot be read: {error}", file=sys.stderr)
        return 1
    try:
        pages = _Pages(options.url, token)
        run = pages.ask()
        console = Console()
        if options.once or not console.is_terminal:
            console.print(_render(run, console.width))
            while run["verdict"] is None and not options.once:
                time.sleep(options.interval)
                run = pages.ask()
                console.print("", _render(run, console.width))
            return 0
        with Live(_render(run, console.width), console=console, auto_refresh=False, screen=True) as live:
            while run["verdict"] is None:
                time.sleep(options.interval)
                run = pages.ask()
                live.update(_render(run, console.width), refresh=True)
        print(headline(run)[1])
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        print(f"p2pstate top: {options.url} tells nothing: {reason}; any other node's page will do", file=sys.stderr)
        return 1
    return 0


class _Pages:
    """Of all nodes that serve one, as far as they are known: any one that answers is enough."""

    def __init__(self, url: str, token: str) -> None:
        self._urls = [url if "://" in url else f"http://{url}"]
        self._token = token

    def ask(self) -> dict[str, Any]:
        """Raises OSError when nobody answers, ValueError when no answer is one of a node's page."""
        failure: Exception | None = None
        for url in self._urls:
            try:
                run = _ask(url, self._token)
            except (OSError, ValueError) as error:
                failure = failure or error
            else:
                others = [node["page"] for node in run["nodes"] if node["page"] is not None]
                self._urls = list(dict.fromkeys([url, *others, *self._urls]))
                return run
        assert failure is not None
        raise failure


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


def _render(run: Mapping[str, Any], width: int) -> Any:
    """``width``: of the terminal; a narrow one leaves out what matters least."""
    from rich.console import Group
    from rich.markup import escape

    wide = width >= WIDE
    well, state = headline(run)
    nodes = _table("node", "part", "state", *(["copies"] if wide else []), "if it dies now")
    for node in run["nodes"]:
        size = "" if node["vault_bytes"] is None else size_text(node["vault_bytes"])
        copies = [size] if wide else []
        nodes.add_row(*map(escape, (node["name"], node["part"], node["state"], *copies, node["if_it_dies"])))
    keys = ["rank", "node", *(["pid", "phase"] if wide else []), "step", "protected"]
    ranks = _table(*("process" if key == "pid" else key for key in keys), "copy on")
    for rank in run["ranks"]:
        told = ("" if rank[key] is None else str(rank[key]) for key in keys)
        ranks.add_row(*map(escape, (*told, ", ".join(rank["keepers"]))))
    failures = _table("when", *(["what"] if wide else []), "why", "took", "steps lost", "protected again")
    for incident in run["incidents"][:5]:
        took = "not over" if incident["seconds"] is None else f"{incident['seconds']:.2f} s"
        again = "no" if incident["protected_s"] is None else f"after {incident['protected_s']:.2f} s"
        what = [incident["cause"]] if wide else []
        cells = (f"{incident['s_ago']:.0f} s ago", *what, incident["reason"], took, str(incident["steps_lost"]), again)
        failures.add_row(*map(escape, cells))
    goodput = [f"{title}: {Goodput(run['goodput'][key]['seconds']).sentence()}" for key, title in WINDOWS.items()]
    colour = "green" if well else "red"
    first = f"[bold]run {escape(str(run['run_id']))}[/bold]  [{colour}]{escape(state)}[/{colour}]"
    notes = [escape(f"{kind}: {text}") for kind in ("waiting", "weaknesses") for text in run[kind]]
    if run["fetch_p95_s"] is not None:
        notes.append(f"95 of 100 waits for a batch take less than {1000 * run['fetch_p95_s']:.0f} ms")
    if run["on_disk"] is not None:
        notes.append(f"step {run['on_disk']['step']} is on disk, for {run['on_disk']['s_ago']:.0f} s")
    notes += [escape(f"rank {rank} is {kind}: {reason}") for kind in ("slow", "starved") for rank, reason in run[kind]]
    return Group(first, *notes, "", nodes, "", ranks, "", failures, "", *goodput)


def _table(*head: str) -> Any:
    """Nothing in it is cut off."""
    from rich.table import Column, Table

    return Table(*(Column(name, overflow="fold") for name in head), box=None, header_style="bold")
