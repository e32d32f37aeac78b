"""Incidents as OpenTelemetry traces: a trace per incident, in it a span of each node whose ranks recovered, and in that
one a child per phase. Needs ``p2pstate[otel]``.

In: what a running node knows of its incidents. Out: spans, sent by OTLP to where the ``OTEL_*`` variables say (by
default http://localhost:4318). All nodes give an incident the same trace, without asking each other.

Invariants: sending is another thread's business; a collector that is slow or not there costs spans, never the run.
What the library and its exporter complain of is said once, in a line.
Known limit: phases are drawn one after the other; they are the longest that any rank of the node was in each of them.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

from p2pstate.observe.incidents import Incident

__all__ = ["IncidentSpans"]

CLOSE_S = 3.0  # for spans that are not sent yet


class IncidentSpans:
    """Raises ValueError, with what to install, when the library is missing. ``processor``: where spans go; None: OTLP
    in batches."""

    def __init__(self, run_id: str, node: str, processor: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if processor is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                processor = BatchSpanProcessor(OTLPSpanExporter())
        except ImportError as error:
            raise ValueError("--otel needs OpenTelemetry: pip install 'p2pstate[otel]'") from error

        self._run_id, self._node = run_id, node
        self._trouble = _Trouble()
        library = logging.getLogger("opentelemetry")
        library.handlers[:], library.propagate = [self._trouble], False
        self._ids = _make_ids()
        resource = Resource.create({"service.name": "p2pstate", "p2pstate.run_id": run_id, "p2pstate.node": node})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("p2pstate")
        self._num_told = 0

    def look(self, incidents: Sequence[Incident], *, ended: bool = False) -> None:
        """Tell of those that are over since the last time; of the last one also if the run has ``ended``."""
        while self._num_told < len(incidents):
            incident = incidents[self._num_told]
            last = self._num_told == len(incidents) - 1
            if incident.over_at is None and last and not ended:
                return
            self._num_told += 1
            if not incident.looked_on:
                self._tell(incident)

    def close(self) -> None:
        """Send what has not been sent, as far as that takes no longer than ``CLOSE_S``."""
        closing = threading.Thread(target=self._shut_down, name="p2pstate-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _shut_down(self) -> None:
        try:
            self._provider.shutdown()
        except Exception as error:  # of an exporter that anybody may have written
            self._trouble.say(f"{type(error).__name__}: {error}")

    def _tell(self, incident: Incident) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        text = f"{self._run_id}/{incident.nonce}/{incident.round}"
        self._ids.trace_id = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest())
        attributes = {
            "p2pstate.cause": incident.cause,
            "p2pstate.reason": incident.reason,
            "p2pstate.source": incident.source,
            "p2pstate.steps_lost": incident.steps_lost,
            "p2pstate.transfer_bytes": incident.num_bytes,
            "p2pstate.ranks_replaced": sorted(incident.replaced),
        }
        span = self._tracer.start_span("incident", Context(), attributes=attributes, start_time=_ns(incident.t))
        inside, t = set_span_in_context(span), incident.t
        for name, seconds in incident.phases().items():
            child = self._tracer.start_span(name, inside, start_time=_ns(t))
            t += seconds
            child.end(_ns(t))
        if incident.over_at is None:
            span.set_status(Status(StatusCode.ERROR, "the run did not go on"))
        span.end(_ns(t if incident.over_at is None else incident.over_at))


class _Trouble(logging.Handler):
    """Of all that goes wrong with spans, the first is said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.say(record.getMessage() + (f" {type(error).__name__}: {error}" if error is not None else ""))

    def say(self, text: str) -> None:
        if not self._said:
            self._said = True
            print(f"p2pstate: spans of failures may be missing (said once; the run goes on): {text}", file=sys.stderr)


def _make_ids() -> Any:
    from opentelemetry.sdk.trace import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """All spans that begin a trace are of the trace that was set last."""

        trace_id = 0

        def generate_trace_id(self) -> int:
            return self.trace_id

        def is_trace_id_random(self) -> bool:
            return False

    return Ids()


def _ns(t: float) -> int:
    return int(t * 1e9)
