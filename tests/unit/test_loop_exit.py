"""How a loop ends: every way out of a ``for``, asked by the generator that it ran on while it is being closed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress

import pytest

from p2pstate.loop_exit import LoopIterator, leaves_by_exception, looping_code


def divide(text: str) -> None:
    raise ZeroDivisionError(text)


HOW: list[bool] = []  # what each loop that was left has answered


CLOSED: list[bool] = []


def steps() -> Iterator[int]:
    return LoopIterator(turns(), lambda: CLOSED.append(True))


def turns() -> Generator[int, None, None]:
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


def by_close() -> None:
    loop = steps()
    for _ in loop:
        loop.close()  # type: ignore[attr-defined]
        break


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
    CLOSED.clear()
    with suppress(ZeroDivisionError):
        leave()
    assert [by_exception] == HOW
    assert CLOSED == []


def test_loop_whose_iterator_is_closed_says_so_before() -> None:
    CLOSED.clear()
    by_close()
    assert CLOSED == [True]
