"""What a writer has done, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["WriterStats"]


@dataclass(slots=True, kw_only=True)
class WriterStats:
    """Counts of one writer since it was opened; those of its threads may still grow until the next commit."""

    threads: int = 0
    """Threads that work behind the caller's back."""
    background: tuple[str, ...] = ()
    """Variables that these threads encode; the caller encodes the others."""
    n_cores: int = 0
    """Cores that this rank was found to have."""
    n_records: int = 0
    nbytes_in: int = 0
    """Bytes of blocks in the dtype on disk."""
    nbytes_copied: int = 0
    """Bytes of them that were copied, for those threads to read."""
    nbytes_encoded: int = 0
    """Bytes of objects that were given to the store."""
    n_objects: int = 0
    n_commits: int = 0
    n_buffers: int = 0
    """Blocks of memory that were allocated for such copies; they are used again."""
    seconds: dict[str, float] = field(
        default_factory=lambda: {"write": 0.0, "commit": 0.0, "wait": 0.0, "encode": 0.0, "store": 0.0}
    )
    """Time that the caller was inside our calls: ``write``, ``commit``, and ``wait``, the part of it that it was held
    up because ``max_pending_nbytes`` were on their way. And, whoever did it, ``encode`` and ``store``: encoding
    variables, and writing and syncing objects."""

    @property
    def mode(self) -> str:
        """What was chosen: ``"background"``, threads encode and write; ``"write-behind"``, the caller encodes and a
        thread writes; or ``"synchronous"``."""
        if not self.threads:
            return "synchronous"
        return "background" if self.background else "write-behind"
