"""What every test of crashes ends with: the checker finds nothing wrong."""

from __future__ import annotations

from typing import Any

import mpistream as ms

__all__ = ["assert_no_damage", "assert_sound"]


def assert_no_damage(store: Any) -> None:
    """Assert that all that is committed can be read; what a crash has left over is no damage."""
    report = ms.verify(store)
    assert report.damage == ()
    assert report.is_complete


def assert_sound(store: Any) -> None:
    """Assert that nothing is damaged, left over or in flight, and that a second look says the same."""
    report = ms.verify(store)
    assert (report.damage, report.leftovers, report.in_flight) == ((), (), ())
    assert report.is_complete
    assert report.exit_code == 0
    assert ms.verify(store) == report
