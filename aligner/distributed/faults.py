"""Injected failures, for tests of recovery: ``ALIGNER_FAULT=phase:step:rank:kind[,...]``.

``phase`` is the name of a timer (``rollout``, ``train_policy``, ...) or ``startup``, ``save``, ``write``, ``publish``;
``step`` and ``rank`` are numbers or ``*``; ``kind`` is ``kill``, ``hang``, ``exception``, ``nan`` or ``disk_full``. A
fault fires once in a run directory (``RUN/faults`` remembers), or every time with ``:always`` behind it.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from aligner.config.keys import nearest
from aligner.config.phases import PHASES
from aligner.errors import ConfigError

VARIABLE = "ALIGNER_FAULT"
KINDS = ("kill", "hang", "exception", "nan", "disk_full")
SAVING = ("save", "write", "publish")
PLACES = (*dict.fromkeys(name for names in PHASES.values() for name in names), *SAVING)
FAULTS_DIRECTORY = "faults"


@dataclass(frozen=True)
class Fault:
    """One fault; ``step`` and ``rank`` None: any."""

    phase: str
    step: int | None
    rank: int | None
    kind: str
    always: bool
    spec: str


_faults: tuple[Fault, ...] = ()
_run_dir = Path()
_rank = 0
_step = 0
_phase = ""


def configure(run_dir: Path, rank: int) -> None:
    """Read the environment variable. Raises ConfigError when it is malformed."""
    global _faults, _run_dir, _rank, _step, _phase
    _faults = tuple(parse(spec) for spec in os.environ.get(VARIABLE, "").split(",") if spec.strip())
    _run_dir, _rank, _step, _phase = run_dir, rank, 0, ""


def parse(spec: str) -> Fault:
    """One fault from its text. Raises ConfigError."""
    parts = spec.strip().split(":")
    always = len(parts) == 5 and parts[4] == "always"
    numbers = parts[1:3]
    if (
        not (len(parts) == 4 or always)
        or not parts[0]
        or parts[3] not in KINDS
        or not all(number == "*" or number.isdigit() for number in numbers)
    ):
        raise ConfigError(
            f"{VARIABLE}={spec}: give phase:step:rank:kind, where phase is a timer or one "
            f"of {', '.join(SAVING)}, step and rank are numbers or *, and kind is one of {', '.join(KINDS)}"
        )
    if parts[0] not in PLACES:
        near = nearest(parts[0], PLACES)
        raise ConfigError(f"{VARIABLE}={spec}: no phase '{parts[0]}'; {near}there are {', '.join(PLACES)}")
    if parts[3] == "nan" and not parts[0].startswith("train"):
        raise ConfigError(f"{VARIABLE}={spec}: there is no loss in phase '{parts[0]}'; nan is for train phases")
    step, rank = (None if number == "*" else int(number) for number in numbers)
    return Fault(parts[0], step, rank, parts[3], always, spec.strip())


def set_step(step: int) -> None:
    """The step that is being done from now on."""
    global _step
    _step = step


def hit(phase: str) -> None:
    """A place where faults may fire: ``phase`` begins. Parts of a save run beside a phase, which goes on."""
    global _phase
    if phase not in SAVING:
        _phase = phase
    for fault in _faults:
        if fault.kind != "nan" and _applies(fault, phase) and _first_time(fault):
            _fire(fault)


def poisons_loss() -> bool:
    """Whether the next loss of this rank is to be not a number."""
    return any(fault.kind == "nan" and _applies(fault, _phase) and _first_time(fault) for fault in _faults)


def _applies(fault: Fault, phase: str) -> bool:
    return fault.phase == phase and fault.step in (None, _step) and fault.rank in (None, _rank)


def _first_time(fault: Fault) -> bool:
    """True once for each run directory, rank and fault, whatever processes there are."""
    if fault.always:
        return True
    marker = _run_dir / FAULTS_DIRECTORY / f"{fault.spec.replace(':', '_').replace('*', 'any')}.rank{_rank}"
    marker.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def _fire(fault: Fault) -> None:
    os.write(2, f"injected fault: {fault.spec} on rank {_rank}\n".encode())
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "hang":
        while True:
            time.sleep(3600)
    if fault.kind == "disk_full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise RuntimeError(f"injected fault {fault.spec}")
