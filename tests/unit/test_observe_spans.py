"""Incidents as OpenTelemetry spans: what is sent, when, and in which traces."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from test_observe_report import event, find_incidents, run_events

from p2pstate.observe.spans import IncidentSpans

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed (p2pstate[otel])")


@pytest.fixture
def exporter() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


def make_spans(exporter: Any, node: str = "n0") -> IncidentSpans:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    return IncidentSpans("job", node, SimpleSpanProcessor(exporter))


def test_each_incident_is_a_span_with_a_child_per_phase(exporter: Any) -> None:
    incidents = find_incidents(run_events())
    spans = make_spans(exporter)
    spans.look(incidents)
    spans.close()
    found = exporter.get_finished_spans()
    roots = [span for span in found if span.parent is None]
    assert [(span.name, span.attributes["p2pstate.cause"]) for span in roots] == [
        ("incident", "process"),
        ("incident", "node"),
    ]
    for root, incident in zip(roots, incidents, strict=True):
        children = [span for span in found if span.parent is not None and span.parent.span_id == root.context.span_id]
        lengths = {span.name: pytest.approx((span.end_time - span.start_time) / 1e9) for span in children}
        assert incident.phases() == lengths
        assert root.start_time == pytest.approx(1e9 * incident.t)
        assert (root.end_time - root.start_time) / 1e9 == pytest.approx(incident.seconds)
        assert {span.context.trace_id for span in children} == {root.context.trace_id}
    assert roots[0].resource.attributes["p2pstate.node"] == "n0"
    assert roots[0].attributes["p2pstate.ranks_replaced"] == (1,)


def test_incident_is_told_once_and_when_it_is_over(exporter: Any) -> None:
    spans, told = make_spans(exporter), []
    events = run_events()
    for number in range(len(events)):
        spans.look(find_incidents(events[:number]))
        told.append(sum(span.parent is None for span in exporter.get_finished_spans()))
    first_over = next(number for number, each in enumerate(events) if each["t"] == 108)
    assert told[first_over] == 0
    assert told[first_over + 1] == 1
    assert told[-1] == 2


def test_incident_that_ended_the_run_is_an_error(exporter: Any) -> None:
    events = [each for each in run_events() if each["t"] < 109]
    died = [event(109, "worker_exited", rank=0, pid=0, cause="x"), event(109.5, "abort", round=2, reason="x")]
    incidents = find_incidents([*events, *died, event(120, "verdict", code=75, text="given up")])
    spans = make_spans(exporter)
    spans.look(incidents, ended=True)
    first, second = (span for span in exporter.get_finished_spans() if span.parent is None)
    assert (first.status.status_code.name, second.status.status_code.name) == ("UNSET", "ERROR")


def test_nodes_put_their_spans_of_an_incident_into_one_trace(exporter: Any) -> None:
    incidents = find_incidents(run_events())
    for node in ("n0", "n1"):
        make_spans(exporter, node).look(incidents)
    roots = [span for span in exporter.get_finished_spans() if span.parent is None]
    assert len({span.context.trace_id for span in roots}) == 2
    assert len({span.context.span_id for span in roots}) == 4


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"pip install 'p2pstate\[otel\]'"):
        IncidentSpans("job", "n0")


class Broken:
    """An exporter whose collector is not there: it ``raises``, or never comes to an end."""

    def __init__(self, raises: bool) -> None:
        self.raises, self.given_up = raises, threading.Event()

    def export(self, spans: Any) -> None:
        if self.raises:
            raise OSError("connection refused")
        self.given_up.wait()

    def shutdown(self) -> None:
        self.export(())


@pytest.mark.parametrize("raises", [True, False])
def test_exporter_that_raises_or_hangs_holds_nobody_up_and_is_told_of_once(
    raises: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    monkeypatch.setattr("p2pstate.observe.spans.CLOSE_S", 0.1)
    broken = Broken(raises)
    spans = IncidentSpans("job", "n0", BatchSpanProcessor(broken, schedule_delay_millis=10))
    spans.look(find_incidents(run_events()))
    spans.close()
    broken.given_up.set()
    said = capsys.readouterr().err.splitlines()
    assert [line.endswith("OSError: connection refused") for line in said] == [True] * raises
