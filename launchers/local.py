"""Ranks on this machine, under torch elastic's agent: its own store on loopback, a free port, one process a rank.

Each rank is ``python -m <module> <arguments>``, the same process that torchrun starts. When one rank ends with an error
the others end too: by themselves, or after ``END_OTHERS_S`` by SIGKILL. What died of something that may pass (a signal,
a bug, a hang) is started again from its last checkpoint as often as allowed; the agent's own restarts are not used,
because they do not look at exit codes. A rank has said why it ended on stderr, so only what is missing is added here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launchers.stop_forwarding import StopForwarding

END_OTHERS_S = 15  # for the other ranks to end by themselves when one has failed; their watchdogs need 11
RANK_FAILURE = 8  # exit code of a rank that stops because of another's error
BUG = 70  # exit code of a rank that has left its traceback in the run directory
HUNG = 72  # exit code of a rank that has left its stacks there
STOPPED = (75, 76)  # exit codes that all ranks agreed on
INTERRUPTED = 130
UNCAUGHT = 1  # of Python itself: peers got lost while this rank was ending
LAUNCHER_PID = "ALIGNER_LAUNCHER_PID"  # environment variable: ranks end when this process does
RESTART_COUNT = "ALIGNER_RESTART_COUNT"  # environment variable: how often this launcher has started the ranks again
_AGENT_SIGNALS = "SIGQUIT"  # what the agent itself turns into the end of the ranks


def launch(
    module: str,
    arguments: Sequence[str],
    ranks: int,
    threads: int | None,
    run_dir: Path,
    *,
    max_restarts: int = 0,
    restart_window: float = 3600.0,
    stop_grace: float = 600.0,
    on_failure: Callable[[str, int, float], None] | None = None,
) -> int:
    """Run ``python -m module *arguments`` as ``ranks`` ranks and wait; returns the exit code of the job.

    SIGTERM, SIGINT and SIGUSR1 to this process are forwarded to the ranks, which save and end.

    Args:
        threads: CPU threads a rank; None: cores // ranks, unless OMP_NUM_THREADS is set.
        run_dir: where ranks leave their tracebacks; messages name it.
        max_restarts: within ``restart_window`` seconds, after a death that may not happen again.
        on_failure: told what has happened, in words, its exit code, and when the ranks were started (seconds since the
            epoch), where rank 0 could not record that itself.
        stop_grace: seconds from a forwarded signal to SIGKILL. A second SIGINT kills at once.
    """
    command = ["-m", module, *arguments]
    restarts: list[float] = []
    count = 0
    with StopForwarding(stop_grace) as forwarding, _silent_logging():
        while True:
            began = time.time()
            with _environment(rank_threads(ranks, threads), count):
                codes = _one_life(command, ranks, forwarding)
            if forwarding.at_once:
                return INTERRUPTED
            if not codes:
                return 0
            codes = {rank: code for rank, code in codes.items() if rank not in forwarding.killed}
            if not codes:
                return 128 + signal.SIGKILL  # the stop took too long, which has been said
            codes = {rank: _known_hang(rank, code, run_dir) for rank, code in codes.items()}
            rank, code = _cause(codes)
            if on_failure is not None and _may_pass(code) and not (rank == 0 and code in (BUG, RANK_FAILURE)):
                on_failure(_what_happened(codes), _exit_code(code), began)
            now = time.monotonic()
            restarts = [then for then in restarts if now - then < restart_window]
            if forwarding.asked or not _may_pass(code) or len(restarts) >= max_restarts:
                if restarts and _may_pass(code) and not forwarding.asked:
                    print(f"error: {len(restarts)} restarts in {restart_window:.0f} s were not enough", file=sys.stderr)
                return _explain(codes, run_dir)
            restarts.append(now)
            count += 1
            _keep_errors(run_dir, count)
            print(
                f"{_what_happened(codes)}; restart {len(restarts)} of {max_restarts} from the last checkpoint",
                file=sys.stderr,
                flush=True,
            )


def _one_life(command: Sequence[str], ranks: int, forwarding: StopForwarding) -> dict[int, int]:
    """Start the ranks and wait; the exit codes of those that failed."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    place = {"backend": "c10d", "endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1", "timeout": 900}
    rendezvous = get_rendezvous_handler(
        RendezvousParameters(run_id=uuid.uuid4().hex, min_nodes=1, max_nodes=1, **place)  # type: ignore[arg-type]
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=tuple(command),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    with tempfile.TemporaryDirectory(prefix="aligner-launch-") as unused_logs:  # else the agent leaves one behind
        agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=unused_logs))
        _hand_over_processes(agent, forwarding)
        try:
            result = agent.run()
        except SignalException as error:
            print(f"error: stopped by {error.sigval.name}", file=sys.stderr)
            return dict.fromkeys(range(ranks), -int(error.sigval))
        finally:
            rendezvous.shutdown()
    return {rank: failure.exitcode for rank, failure in result.failures.items()}


def _hand_over_processes(agent: Any, forwarding: StopForwarding) -> None:
    """Give the agent's processes to ``forwarding`` when they have started, and let it end them.

    The agent would send SIGTERM, which a rank takes as a request to save, and wait for half a minute.
    """
    start_workers = agent._start_workers

    def start(group: Any) -> Any:
        pids = start_workers(group)
        context = agent._pcontext
        close = context.close

        def end(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            if death_sig in (None, signal.SIGTERM):
                forwarding.end(END_OTHERS_S)
            close(death_sig, timeout)

        context.close = end
        forwarding.watch({rank: handler.proc for rank, handler in context.subprocess_handlers.items()})
        return pids

    agent._start_workers = start


def rank_threads(ranks: int, threads: int | None) -> int:
    """CPU threads a rank: as asked, else OMP_NUM_THREADS, else this process's cores divided by ``ranks``."""
    if threads is not None:
        return threads
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _may_pass(code: int) -> bool:
    """Whether a rank that ended so may do better from the last checkpoint."""
    return code < 0 or code in (BUG, HUNG, RANK_FAILURE)


def _cause(exit_codes: Mapping[int, int]) -> tuple[int, int]:
    """The rank, with its exit code, that says best why the job ended; the lowest one among equals.

    First what all ranks agreed on (76 before 75: everything is saved, whatever happened after it); then errors that
    name their reason to the user, deaths by a signal, bugs, hangs; last what follows from another rank's end: a lost
    peer, an uncaught exception, the agent's SIGTERM to a rank that was only starting.
    """
    order = (*reversed(STOPPED), None, -1, BUG, HUNG, INTERRUPTED, RANK_FAILURE, UNCAUGHT, -signal.SIGTERM)

    def weight(item: tuple[int, int]) -> tuple[int, int]:
        rank, code = item
        kind = code if code in order else None if code > 0 else -1
        return order.index(kind), rank

    return min(exit_codes.items(), key=weight)


def _what_happened(exit_codes: Mapping[int, int]) -> str:
    rank, code = _cause(exit_codes)
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"
    if code == HUNG:  # who waits for a rank that hangs gives no sign of life either: their stacks tell them apart
        ranks = [str(rank) for rank, code in sorted(exit_codes.items()) if code == HUNG]
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} hung"
    return f"rank {rank} " + {BUG: "failed", RANK_FAILURE: "lost another rank"}[code]


def _explain(exit_codes: Mapping[int, int], run_dir: Path) -> int:
    """The job's exit code from those of the failed ranks; says what a rank could not say itself."""
    rank, code = _cause(exit_codes)
    if code >= 0:
        marker = run_dir / "errors" / f"rank_{rank}.txt"
        if code == BUG and marker.is_file():
            print(f"error: rank {rank} failed; its traceback is in {marker}", file=sys.stderr)
        return code
    hint = "; the machine may have run out of memory" if code == -signal.SIGKILL else ""
    print(f"error: {_what_happened(exit_codes)}{hint}", file=sys.stderr)
    return _exit_code(code)


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _known_hang(rank: int, code: int, run_dir: Path) -> int:
    """HUNG for a rank whose C code has kept the interpreter: then C code has written its stacks and ended it with 1."""
    hidden = run_dir / "errors" / f".stacks_rank_{rank}.txt"
    stacks = hidden.with_name(f"stacks_rank_{rank}.txt")
    if code == UNCAUGHT and hidden.is_file() and hidden.stat().st_size:
        hidden.rename(stacks)
    return HUNG if code == UNCAUGHT and stacks.is_file() else code


def _keep_errors(run_dir: Path, count: int) -> None:
    """Move tracebacks and stacks out of the way of the next life, which removes what it finds: ``errors/restart_1``."""
    errors = run_dir / "errors"
    found = [*errors.glob("rank_*.txt"), *errors.glob("stacks_rank_*.txt")]
    if not found:
        return
    try:
        while (errors / f"restart_{count}").exists():  # of an earlier launcher
            count += 1
        (errors / f"restart_{count}").mkdir()
        for path in found:
            path.rename(errors / f"restart_{count}" / path.name)
    except OSError as error:
        print(f"error: {errors}: {error.strerror or error}; tracebacks are lost", file=sys.stderr)


@contextmanager
def _environment(threads: int, restarts: int) -> Iterator[None]:
    values = {
        "OMP_NUM_THREADS": str(threads),
        LAUNCHER_PID: str(os.getpid()),
        RESTART_COUNT: str(restarts),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": _AGENT_SIGNALS,
    }
    before = {name: os.environ.get(name) for name in values}
    before_quit = signal.getsignal(signal.SIGQUIT)
    os.environ.update(values)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGQUIT) != before_quit:
            signal.signal(signal.SIGQUIT, before_quit)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _silent_logging() -> Iterator[None]:
    """Keep the agent's own report of a failed rank (logged with a traceback) off the terminal."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
