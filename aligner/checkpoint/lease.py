"""The lease of a run directory: one process trains in it at a time.

``RUN/lease.json`` names the holder; the holder counts ``beat`` up, in place. Invariants:

* the file appears whole (a link), and is replaced or removed only by the process that has claimed its token: a file
  ``RUN/.lease.<token>.claim`` that only one process can make. So of several that find a stale lease one gets it;
* a beat is written into the file that was opened and found to be one's own: a holder that was paused, and replaced
  meanwhile, writes into a file that has no name any more, and learns at its next beat that the lease is ``lost``;
* clocks of different machines are never compared: a lease is stale when its content does not change for
  ``stale_after_s`` while somebody watches. Only a holder whose process is known to have ended is replaced at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from aligner.errors import ConfigError, RunInUseError

LOST = "another process took over the run directory"  # the reason of a stop that must not save
LEASE_FILE = "lease.json"
BEAT_S = 5.0
STALE_AFTER_S = 60.0
_LOOK_S = 0.5
_BEAT_DIGITS = 12  # the file keeps its size, so that a beat overwrites every byte of the one before


@dataclass(frozen=True)
class Holder:
    """Who holds a lease. ``machine``: boot and process-id space, in which ``pid`` and ``started`` mean something.

    ``job``: Slurm's cluster and job id; ``job_restarts``: how often that job was requeued before.
    """

    token: str
    host: str
    pid: int
    started: str
    machine: str
    job: str | None
    job_restarts: int
    since: str

    @classmethod
    def this_process(cls) -> Holder:
        """A new holder: this process, from now on."""
        job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=_process_started(os.getpid()) or "",
            machine=_machine(),
            job=f"{os.environ.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else None,
            job_restarts=int(restarts) if restarts.isdigit() else 0,
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    def __str__(self) -> str:
        job = f", Slurm job {self.job.rpartition('/')[2]}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


class Lease:
    """Held from :meth:`acquire` to :meth:`release`. A daemon thread shows that the holder lives.

    ``lost``: another process holds it now; nothing may be written to the run directory any more.
    """

    def __init__(self, run_dir: Path, on_lost: Callable[[], None], beat_s: float, stale_after_s: float) -> None:
        self.lost = False
        self.holder = Holder.this_process()
        self._run_dir = run_dir
        self._path = run_dir / LEASE_FILE
        self._on_lost = on_lost
        self._beat_s, self._stale_after_s = beat_s, stale_after_s
        self._beats = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquire(
        cls,
        run_dir: Path,
        *,
        on_lost: Callable[[], None] = lambda: None,
        give_up: Callable[[], bool] = lambda: False,
        beat_s: float = BEAT_S,
        stale_after_s: float = STALE_AFTER_S,
    ) -> Lease:
        """Take the lease of ``run_dir``; waits as long as it is unclear whether its holder still lives.

        Args:
            on_lost: called once, from another thread, when another process has taken the lease over.
            give_up: looked at while waiting; True ends the wait as if the holder lived.

        Raises:
            RunInUseError: another process holds it and lives; names it.
            ConfigError: the directory cannot be written.
        """
        lease = cls(run_dir, on_lost, beat_s, stale_after_s)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            while not (lease._create() or lease._replace(give_up)):
                pass
        except OSError as error:
            raise ConfigError(
                f"run.dir={run_dir}: cannot be written ({error.strerror or error}); make room, get write "
                "permission or choose another directory"
            ) from None
        lease._thread = threading.Thread(target=lease._keep, daemon=True, name="lease")
        lease._thread.start()
        return lease

    def release(self) -> None:
        """Give the lease up; one that another process has taken over is left alone. A second call does nothing."""
        if self._thread is None:
            return
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=self._beat_s)
        self._thread = None
        with contextlib.suppress(OSError):  # an old lease of a process that is gone hinders nobody
            claim = self._claim(self.holder.token)
            if claim is not None:
                if _token_of(_read(self._path)) == self.holder.token:
                    self._path.unlink()
                claim.unlink()

    # ------------------------------------------------------------------ taking it

    def _create(self) -> bool:
        """Make the file unless there is one."""
        with self._written_beside() as own:
            return _link(own, self._path)

    def _replace(self, give_up: Callable[[], bool]) -> bool:
        """Take the place of a holder that does not live; False: try again from the start. Raises RunInUseError."""
        found = _read(self._path)
        if found is None or not self._is_stale(found, give_up):
            return False
        claim = self._claim(_token_of(found))
        if claim is None:
            self._wait_for_claim(_token_of(found), give_up)
            return False
        try:
            if _token_of(_read(self._path)) != _token_of(found):
                return False  # somebody was faster
            with self._written_beside() as own:
                os.rename(own, self._path)
            return True
        finally:
            claim.unlink(missing_ok=True)

    def _is_stale(self, found: bytes, give_up: Callable[[], bool]) -> bool:
        """Whether the holder is gone, or shows no sign of life; False: the lease is gone or another's now."""
        holder = _parse(found)
        if holder is not None and _ended(holder, self.holder):
            return True
        if holder is not None and _runs_here(holder, self.holder):
            raise self._in_use(holder)
        _say(f"{self._run_dir} is leased by {holder or 'an unknown process'}: looking for a sign of life of it")
        until = time.monotonic() + self._stale_after_s
        while time.monotonic() < until:
            time.sleep(min(_LOOK_S, self._beat_s / 2))
            now = _read(self._path)
            if now is None or _token_of(now) != _token_of(found):
                return False
            if now != found or give_up():
                raise self._in_use(holder)
        _say(f"no sign of life within {self._stale_after_s:.0f} s: the run directory is taken over")
        return True

    def _in_use(self, holder: Holder | None) -> RunInUseError:
        return RunInUseError(
            f"run.dir={self._run_dir} is in use by {holder or 'an unknown process'}; one process may train in it at a "
            "time: wait until that one has ended, stop it, or choose another run.dir"
        )

    def _claim(self, token: str) -> Path | None:
        """The right to replace or remove the lease ``token``; None: another process has it."""
        claim = self._path.with_name(f".lease.{token}.claim")
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return None
        return claim

    def _wait_for_claim(self, token: str, give_up: Callable[[], bool]) -> None:
        """Another process is about to replace or remove the lease. When it does not in time, its claim is removed."""
        claim = self._path.with_name(f".lease.{token}.claim")
        until = time.monotonic() + self._stale_after_s
        while claim.exists() and time.monotonic() < until:
            if give_up():
                raise self._in_use(None)
            time.sleep(0.02)
        if time.monotonic() >= until and _token_of(_read(self._path)) == token:
            claim.unlink(missing_ok=True)

    # ------------------------------------------------------------------ holding it

    def holds(self) -> bool:
        """Whether the lease is still this process's, by what the disk says; ask before publishing something."""
        try:
            return not self.lost and _token_of(_read(self._path)) == self.holder.token
        except OSError:
            return not self.lost  # the publishing will tell

    def _keep(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                held = self._beat()
            except OSError:
                continue  # the file system may come back; if not, somebody else may take over, which shows here
            if not held:
                self.lost = True
                self._on_lost()
                return

    def _beat(self) -> bool:
        """Show a sign of life; False: the lease is another's."""
        self._beats += 1
        try:
            file = os.open(self._path, os.O_RDWR)
        except FileNotFoundError:  # another process has held it since, and released it; or somebody has removed it
            return False
        try:
            if _token_of(os.read(file, 1 << 16)) != self.holder.token:
                return False
            os.pwrite(file, self._content(), 0)
            os.fsync(file)  # other clients of a network file system see it
        finally:
            os.close(file)
        return True

    def _content(self) -> bytes:
        fields = json.dumps(asdict(self.holder), ensure_ascii=False)
        return f'{fields[:-1]}, "beat": {self._beats:>{_BEAT_DIGITS}}}}\n'.encode()

    @contextlib.contextmanager
    def _written_beside(self) -> Iterator[Path]:
        own = self._path.with_name(f".lease.{self.holder.token}.new")
        try:
            with own.open("wb") as stream:
                stream.write(self._content())
                stream.flush()
                os.fsync(stream.fileno())
            yield own
        finally:
            own.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _parse(content: bytes) -> Holder | None:
    """The holder; None where the content is no lease."""
    try:
        fields = json.loads(content)
        del fields["beat"]
        return Holder(**fields)
    except (ValueError, TypeError, KeyError):
        return None


def _token_of(content: bytes | None) -> str:
    """What tells one lease from another; a file that is no lease has the sum of its content."""
    if content is None:
        return ""
    holder = _parse(content)
    if holder is not None and str(holder.token).isalnum():
        return holder.token
    return hashlib.sha256(content).hexdigest()[:32]


def _link(source: Path, target: Path) -> bool:
    """Give ``source`` a second name, atomically; False: there is such a file already."""
    try:
        os.link(source, target)
    except FileExistsError:
        return os.stat(source).st_nlink > 1  # NFS: the answer to the first try was lost, and this is the second
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        try:  # a file system without links: the name at least is exclusive
            file = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(file, source.read_bytes())
            os.fsync(file)
        finally:
            os.close(file)
    return True


def _ended(holder: Holder, own: Holder) -> bool:
    """Whether the holder's life is known to be over: its process is gone, or its job was requeued since."""
    if holder.machine == own.machine:
        return not _runs_here(holder, own)
    return own.job is not None and holder.job == own.job and holder.job_restarts < own.job_restarts


def _runs_here(holder: Holder, own: Holder) -> bool:
    if holder.machine != own.machine:
        return False
    started = _process_started(holder.pid)
    return started is not None and (started == holder.started or not (started and holder.started))


def _machine() -> str:
    """The boot of this machine and the process-id space: equal ones see the same processes. Host names do not tell:
    containers may share one, and one machine may have several."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _process_started(pid: int) -> str | None:
    """When the process started, in the kernel's clock ticks; "" where that is unknown; None: no such process lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # there is none, or it is another user's and hidden, or this system has no /proc
        return "" if _has_id(pid) else None
    return None if fields[0] in "ZX" else fields[19]


def process_exists(pid: int) -> bool:
    """Whether a process of this machine with the id lives, whoever owns it."""
    return _process_started(pid) is not None


def _has_id(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
