"""Pins: who needs a checkpoint, so that retention does not delete it. Imports without torch.

``RUN/checkpoints/pins/<step>.<token>.json`` says by whom. A pin of a run (``by`` its directory) holds while that
directory exists; one with a heartbeat (an evaluation) holds while its process lives, as far as that can be seen from
here, and for two minutes after its last beat. Checkpoints that this user may not write near are not pinned.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType

from aligner.checkpoint import manifest
from aligner.checkpoint.lease import process_exists
from aligner.errors import CheckpointError

DIRECTORY = "pins"
BEAT_S = 30.0
STALE_S = 120.0


class Pin:
    """A checkpoint that stays until :meth:`release`, or the end of the ``with`` block."""

    def __init__(self, file: Path | None, heartbeat: bool) -> None:
        self._file = file
        self._released = threading.Event()
        if file is not None and heartbeat:
            threading.Thread(target=self._beat, name="checkpoint-pin", daemon=True).start()

    def release(self) -> None:
        """The checkpoint may go; a second call does nothing."""
        self._released.set()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            try:
                os.utime(self._file or "")
            except OSError:
                return

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.release()


def pin(checkpoint: Path, by: str, heartbeat: bool = False) -> Pin:
    """Keep ``checkpoint`` (``RUN/checkpoints/step_…``) from retention. Local: one rank pins for all.

    Args:
        by: a run directory, or with ``heartbeat`` a name for people. A run pins a checkpoint once.

    Raises:
        CheckpointError: it was deleted meanwhile.
    """
    step = manifest.step_of(checkpoint)
    if step is None:
        return Pin(None, heartbeat)
    by = by if heartbeat else str(Path(by).resolve())
    content = {"by": by, "host": socket.gethostname(), "pid": os.getpid(), "heartbeat": heartbeat, "time": time.time()}
    token = uuid.uuid4().hex if heartbeat else uuid.uuid5(uuid.NAMESPACE_URL, by).hex
    file: Path | None = checkpoint.parent / DIRECTORY / f"{step}.{token[:12]}.json"
    try:
        assert file is not None
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(f".tmp-{os.getpid()}")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError:
        file = None
    if not (checkpoint / manifest.FILE).is_file():
        if file is not None:
            file.unlink(missing_ok=True)
        raise CheckpointError(f"{checkpoint} was deleted meanwhile; choose another checkpoint")
    return Pin(file, heartbeat)


def pinned_steps(checkpoints: Path) -> dict[int, list[str]]:
    """Step -> who needs it. Pins that no longer hold are left out; nothing is deleted."""
    found: dict[int, list[str]] = {}
    directory = checkpoints / DIRECTORY
    for file in sorted(directory.glob("*.json")) if directory.is_dir() else ():
        step = file.name.partition(".")[0]
        if step.isdecimal() and (by := _holder(file)):
            found.setdefault(int(step), []).append(by)
    return found


def _holder(file: Path) -> str:
    """Who holds a pin; "" when it holds no longer. One that cannot be read holds: nothing is lost by that."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        by, beat = str(content["by"]), file.stat().st_mtime
        if content["heartbeat"]:
            gone = content["host"] == socket.gethostname() and not process_exists(int(content["pid"]))
            return "" if gone or time.time() - beat > STALE_S else by
        return by if Path(by).exists() else ""
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError):
        return f"unreadable pin {file.name}"
