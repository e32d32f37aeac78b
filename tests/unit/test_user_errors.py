"""What an exception in a step means: recognised when it comes again, told apart by where it left the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from torch import nn

from p2pstate.user_errors import clear_wrappers, describe, leaves_by_exception, looping_code, signature


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


HOW: list[bool] = []  # what each loop that was left has answered


def steps() -> Iterator[int]:
    code = looping_code()
    try:
        while True:
            yield 1
    except GeneratorExit:
        HOW.append(leaves_by_exception(code))
        raise


def progress_bar(loop: Iterator[int]) -> Iterator[int]:
    for number in loop:
        yield number + 1


def by_break() -> None:
    for _ in steps():
        break
    sum(range(3))


def by_break_behind_a_progress_bar() -> None:
    for _ in progress_bar(steps()):
        break


def by_break_behind_enumerate() -> None:
    for _, _ in enumerate(steps()):
        break


def by_return() -> int:
    for number in steps():
        for _ in range(3):
            with suppress(KeyError):
                return number
    return 0


def by_break_in_a_handler() -> None:
    for _ in steps():
        try:
            divide("caught")
        except ZeroDivisionError:
            break


def by_break_and_return() -> None:
    loop = steps()
    for _ in loop:
        break
    sum(range(3))


def by_break_and_del() -> None:
    loop = steps()
    for _ in loop:
        break
    del loop


def by_raise() -> None:
    for _ in steps():
        raise ZeroDivisionError


def by_raise_behind_a_progress_bar() -> None:
    for _ in progress_bar(steps()):
        divide("from below")


def by_raise_inside_with() -> None:
    for _ in steps():
        with suppress(KeyError):
            divide("from below")


@pytest.mark.parametrize(
    ("leave", "by_exception"),
    [
        (by_break, False),
        (by_break_behind_a_progress_bar, False),
        (by_break_behind_enumerate, False),
        (by_return, False),
        (by_break_in_a_handler, False),
        (by_break_and_return, False),
        (by_break_and_del, False),
        (by_raise, True),
        (by_raise_behind_a_progress_bar, True),
        (by_raise_inside_with, True),
    ],
)
def test_loop_that_is_left_knows_how(leave: Callable[[], object], by_exception: bool) -> None:
    HOW.clear()
    with suppress(ZeroDivisionError):
        leave()
    assert [by_exception] == HOW
