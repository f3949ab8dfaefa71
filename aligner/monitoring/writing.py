"""Files that the first rank writes for all: a full disk or a missing permission is one error, and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aligner.distributed.collectives import on_all_ranks
from aligner.distributed.platform import rank
from aligner.errors import CheckpointError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a :class:`CheckpointError` that names ``path`` and says what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}); make room, give write permission or choose "
            "another place, then start the command again"
        ) from error


def write_on_first_rank(path: Path, action: Callable[[], None]) -> None:
    """``action()`` on rank 0, which writes ``path``. Raises what it raises there, OSError as of :func:`writing`, and
    RankFailure on the other ranks. Collective."""

    def write() -> None:
        if rank() == 0:
            with writing(path):
                action()

    on_all_ranks(write)
