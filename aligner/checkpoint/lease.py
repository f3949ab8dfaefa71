"""The lease of a run directory: one process trains in it at a time.

``RUN/lease.json``: ``{"token", "host", "pid", "job", "job_restarts", "since", "beat"}``; the holder counts ``beat``
up. Clocks of different machines are never compared: a lease is stale when its content does not change for
``stale_after_s`` while somebody watches.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aligner.errors import RunInUseError

LEASE_FILE = "lease.json"
BEAT_S = 5.0
STALE_AFTER_S = 60.0
_LOOK_S = 0.5


class Lease:
    """Held from :meth:`acquire` to :meth:`release`. A daemon thread shows that the holder lives."""

    def __init__(self, path: Path, on_lost: Callable[[], None], beat_s: float) -> None:
        self._path = path
        self._on_lost = on_lost
        self._beat_s = beat_s
        self._ended = threading.Event()
        self.lost = False
        self._content: dict[str, Any] = {
            "token": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "job_restarts": os.environ.get("SLURM_RESTART_COUNT", "0"),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "beat": 0,
        }

    @classmethod
    def acquire(
        cls,
        run_dir: Path,
        *,
        on_lost: Callable[[], None] = lambda: None,
        beat_s: float = BEAT_S,
        stale_after_s: float = STALE_AFTER_S,
    ) -> Lease:
        """Take the lease of ``run_dir``, which exists; waits as long as it is unclear whether its holder still lives.

        A holder whose process is gone from this machine, or that is an earlier life of the same Slurm job, is replaced
        at once; any other after ``stale_after_s`` without a sign of life.

        Raises:
            RunInUseError: another process holds it and lives.
            OSError: the directory cannot be written.
        """
        lease = cls(run_dir / LEASE_FILE, on_lost, beat_s)
        while not lease._create():
            holder = lease._read()
            if holder is None:
                continue  # it has just been released
            if not _is_gone(holder):
                lease._watch(holder, run_dir, stale_after_s)
            lease._remove(holder)
        threading.Thread(target=lease._beat, daemon=True, name="lease").start()
        return lease

    def release(self) -> None:
        """Give the lease up. Another's lease is left alone."""
        self._ended.set()
        holder = self._read()
        if holder is not None and holder.get("token") == self._content["token"]:
            self._path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ files

    def _create(self) -> bool:
        """Make the file, whole from the first moment, unless there is one."""
        own = self._write_beside()
        try:
            os.link(own, self._path)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True

    def _write_beside(self) -> Path:
        own = self._path.with_name(f".{LEASE_FILE}.{self._content['token']}")
        own.write_text(json.dumps(self._content), encoding="utf-8")
        return own

    def _read(self) -> dict[str, Any] | None:
        """The holder; None: there is none. A file that is no lease is a holder of which nothing is known."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _remove(self, holder: dict[str, Any]) -> None:
        """Remove the lease of ``holder``: of several that try, one gets the file, and it looks at what it got."""
        taken = self._path.with_name(f".{LEASE_FILE}.{self._content['token']}.old")
        try:
            os.rename(self._path, taken)
        except FileNotFoundError:
            return
        got = taken.read_text(encoding="utf-8")
        if holder and json.loads(got).get("token") != holder.get("token"):
            with suppress(FileExistsError):  # somebody else's new lease: put it back
                os.link(taken, self._path)
        taken.unlink()

    def _watch(self, holder: dict[str, Any], run_dir: Path, stale_after_s: float) -> None:
        """Return when ``holder`` has shown no sign of life for ``stale_after_s``. Raises RunInUseError when it does."""
        deadline = time.monotonic() + stale_after_s
        said = False
        while time.monotonic() < deadline:
            time.sleep(min(_LOOK_S, self._beat_s / 2))
            now = self._read()
            if now is None or (now and _is_gone(now)):
                return
            if now != holder:
                raise RunInUseError(
                    f"{run_dir} is in use by process {now.get('pid')} on {now.get('host')}"
                    + (f", Slurm job {now['job']}" if now.get("job") else "")
                    + f", since {now.get('since')}; wait for it or stop it, or choose another run.dir"
                )
            if not said and time.monotonic() > deadline - stale_after_s + 2 * self._beat_s:
                said = True
                print(
                    f"{run_dir} was in use by process {holder.get('pid')} on {holder.get('host')}: waiting up to "
                    f"{stale_after_s:.0f} s for a sign of life",
                    flush=True,
                )

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            holder = self._read()
            if holder is None or holder.get("token") != self._content["token"]:
                self.lost = True
                self._on_lost()
                return
            self._content["beat"] += 1
            try:
                os.replace(self._write_beside(), self._path)
            except OSError:
                continue  # a full disk: the beat is late, and somebody who watches may take over


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the holder certainly no longer lives."""
    if holder.get("host") == socket.gethostname() and isinstance(holder.get("pid"), int):
        return not _process_exists(holder["pid"])
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    return job is not None and holder.get("job") == job and holder.get("job_restarts") != restarts


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
