"""Memory for the blocks of a record that are encoded in the background."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mpistream.errors import ProtocolError
from mpistream.pipeline import Loan
from mpistream.staging import Stager

__all__ = ["Lent"]


class Lent:
    """Memory for the blocks of one record that are encoded in the background; lent when it is first asked for.

    A context manager: at its end whoever asked must be done with it.
    """

    def __init__(
        self, stager: Stager, wanted: Mapping[str, Mapping[int, tuple[int, ...]]], dtypes: Mapping[str, np.dtype[Any]]
    ) -> None:
        self._stager = stager
        self._wanted = wanted
        self._dtypes = dtypes
        self._loans: dict[str, dict[int, Loan]] | None = None
        self._views: dict[str, dict[int, NDArray[Any]]] = {}
        self._is_over = False

    @property
    def loans(self) -> Mapping[str, Mapping[int, Loan]]:
        """Variable -> number of a block -> what is lent for it."""
        if self._loans is None:
            names = [(name, k) for name, blocks in self._wanted.items() for k in blocks]
            found = self._stager.lend([(self._wanted[n][k], self._dtypes[n]) for n, k in names]) if names else []
            self._loans = {name: {} for name in self._wanted}
            for (name, k), loan in zip(names, found, strict=True):
                self._loans[name][k] = loan
        return self._loans

    def arrays(self, name: str) -> Mapping[int, NDArray[Any]]:
        """Return the memory for the blocks of a variable, to be filled; they are read-only once it is given back."""
        if name not in self._wanted:
            return {}
        if self._is_over:
            raise ProtocolError("a record is used after its end; open another one with record(t)", kind="ended")
        if name not in self._views:
            self._views[name] = {k: loan.array[...] for k, loan in self.loans[name].items()}
        return self._views[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over = True
        # From now on it is read by threads, or lent for another record: nobody may write to it by a name of today.
        for views in self._views.values():
            for view in views.values():
                view.flags.writeable = False
        self._stager.give_back([loan for loans in (self._loans or {}).values() for loan in loans.values()])
