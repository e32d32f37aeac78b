"""What an exception in a step means: recognised when it comes again, told apart by where it left the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from p2pstate.groups.status import Status
from p2pstate.types import NOTHING_RAISED
from p2pstate.user_errors import UserErrors, clear_wrappers, describe, signature


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


def caught(function: object, *args: object) -> BaseException:
    try:
        function(*args)  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def divide(text: str) -> None:
    raise ZeroDivisionError(text)


def elsewhere() -> None:
    raise ZeroDivisionError("one")


def test_signature_is_the_kind_and_the_place_whatever_the_text() -> None:
    assert signature(caught(divide, "one")) == signature(caught(divide, "two"))
    assert signature(caught(divide, "one")) != signature(caught(elsewhere))
    assert "ZeroDivisionError at" in signature(caught(elsewhere))
    assert signature(ValueError("never raised")).endswith("nowhere")


def test_description_of_an_exception_that_cannot_be_shown_is_one_line() -> None:
    assert "Odd" in describe(Odd())
    assert "\n" not in describe(ValueError("two\nlines"))


@pytest.mark.parametrize("faulted", [False, True])
def test_exception_has_its_traceback_unless_its_step_was_discarded_anyway(
    faulted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, sent = Status(), []
    status.connect(1)
    if faulted:
        status.fail(RuntimeError("a peer was lost"))
    monkeypatch.setattr("p2pstate.user_errors.STATUS", status)
    link = SimpleNamespace(send=lambda kind, **fields: sent.append(kind))
    context: Any = SimpleNamespace(rank=3, must_join=False, raised=NOTHING_RAISED, failing=False, link=link)
    assert UserErrors(context, []).raised(7, caught(divide, "mine"), first=False)
    told = capsys.readouterr().err
    assert "ZeroDivisionError: mine" in told
    assert ("Traceback" in told, sent) == ((False, []) if faulted else (True, ["raised"]))
    assert (told.count("\n") == 1) == faulted


def fail_in_backward(wrap: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: divide("in a hook"))
    try:
        y.sum().backward()
    except ZeroDivisionError as error:
        if wrap:
            raise RuntimeError("a training framework says more") from error
        raise


@pytest.mark.parametrize("wrap", [False, True])
def test_plain_model_is_clear_after_forward_and_not_after_backward(wrap: bool) -> None:
    assert clear_wrappers([nn.Linear(2, 2)], caught(divide, "in forward"))
    assert not clear_wrappers([nn.Linear(2, 2)], caught(fail_in_backward, wrap))
