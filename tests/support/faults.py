"""A store whose calls fail, to be armed and healed while a writer is open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpistream.errors import StoreError
from mpistream.local_store import LocalStore

__all__ = ["FaultyStore"]

Meets = Callable[[str, bytes], bool]


class FaultyStore(LocalStore):
    """A folder like any other until `fail` is called. Its name is that of a `LocalStore`."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self._faults: dict[str, tuple[BaseException, Meets]] = {}

    def fail(
        self, call: str, number: int = errno.EIO, *, when: Meets | None = None, error: BaseException | None = None
    ) -> None:
        """Let ``call`` fail from now on.

        Parameters
        ----------
        call
            ``stage``, ``place``, ``sync_folders`` or ``read``.
        number
            The errno of the failure.
        when
            Only if this is true of the key and, when something is staged, of its bytes; always by default.
        error
            Raised in the place of a StoreError.
        """
        failure = error or StoreError(f"{call}: {os.strerror(number)}", kind="io", errno=number)
        self._faults[call] = (failure, when or (lambda key, data: True))

    def heal(self) -> None:
        """Let nothing fail any more."""
        self._faults.clear()

    def _check(self, call: str, key: str, data: bytes = b"") -> None:
        failure, meets = self._faults.get(call, (None, None))
        if failure is not None and meets is not None and meets(key, data):
            raise failure

    def open(self, key: str) -> Any:
        # What is read whole is opened as well.
        self._check("read", key)
        return super().open(key)

    def stage(self, key: str, pieces: Sequence[Any], *, sync: bool) -> int:
        # The lease is refreshed by its own clock; it is not what a test means.
        if "/lease-" not in key:
            self._check("stage", key, b"".join(bytes(p) for p in pieces))
        return super().stage(key, pieces, sync=sync)

    def place(self, staged: str, key: str) -> None:
        if key != ".mpistream/lease":
            self._check("place", key)
        super().place(staged, key)

    def sync_folders(self, keys: Iterable[str], known: dict[str, None] | None = None) -> None:
        found = list(keys)
        for key in found:
            self._check("sync_folders", key)
        super().sync_folders(found, known)
