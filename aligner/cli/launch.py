"""From a command line to running ranks: compose and check the configuration without torch, then start the ranks.

Under torchrun or srun this process already is a rank. Otherwise it decides ``run.dir`` and runs ``trainer.devices``
ranks: one in this process, several through ``launchers/local.py``.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aligner.cli.help import command_help
from aligner.config.checks import check
from aligner.config.compose import compose, compose_unresolved, quote_override
from aligner.config.schema import ProcessesConfig, TrainerConfig
from aligner.errors import AlignerError, ConfigError
from aligner.monitoring.lives import tell_cause

_HELD = (signal.SIGUSR1, signal.SIGTERM)


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Run ``aligner <command> <arguments>``; returns the exit code. Raises AlignerError before ranks start."""
    options = _parse(command, arguments)
    config_dirs = [Path(path) for path in options.config_dir]
    if options.help:
        print(command_help(command, config_dirs))
        return 0
    if options.cfg:
        config = compose_unresolved(command, options.overrides, config_dirs)
        print(_to_yaml(config, options.resolve), end="")
        return 0
    external = external_world_size(os.environ)
    if external:
        hold_stop_requests()
    try:
        root = compose(command, options.overrides, config_dirs)
        check(root, external or root.trainer.devices)
    except AlignerError as error:
        if external and os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
            return error.exit_code  # every rank finds the same error; one a node says so
        raise
    if external is None:
        run_dir = root.run.dir or default_run_dir(command)
        overrides = [*options.overrides, quote_override("run.dir", run_dir)]
        supervision = _supervision(root.trainer)
        if root.trainer.devices > 1 or supervision.get("max_restarts"):
            from launchers.local import launch

            words = [command, *overrides, *(f"--config-dir={path}" for path in config_dirs)]

            def record(reason: str, exit_code: int, since: float) -> None:
                with suppress(OSError):  # a full disk is no reason not to start the ranks again
                    tell_cause(Path(run_dir), reason=reason, exit_code=exit_code, since=since)

            devices, threads = root.trainer.devices, root.trainer.threads
            return launch("aligner", words, devices, threads, Path(run_dir), on_failure=record, **supervision)
        os.environ.setdefault("OMP_NUM_THREADS", str(root.trainer.threads or len(os.sched_getaffinity(0))))
        root = compose(command, overrides, config_dirs)
        hold_stop_requests()
    from aligner.cli.runtime import run_rank

    return run_rank(root, lambda root, context: import_module(f"aligner.cli.{command}").run(root, context))


def hold_stop_requests() -> None:
    """Keep SIGUSR1 and SIGTERM pending until :func:`release_stop_requests`, when this rank can take them.

    While torch is imported, for seconds, they would end it, or be lost where the parent ignores them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def release_stop_requests() -> None:
    """Let what came meanwhile reach the handlers. For the main thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def _supervision(trainer: ProcessesConfig) -> dict[str, Any]:
    """How the launcher treats ranks that crash or are asked to stop; its defaults for commands that do not train."""
    if not isinstance(trainer, TrainerConfig):
        return {}
    return {name: getattr(trainer, name) for name in ("max_restarts", "restart_window", "stop_grace")}


def external_world_size(environ: Mapping[str, str]) -> int | None:
    """The number of ranks that torchrun or srun started, or None when this process is not one of them.

    A shell in a Slurm allocation, a batch script and a step of one task are not ranks: they may start local ranks.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _world_size(environ, "WORLD_SIZE")
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        tasks = _world_size(environ, "SLURM_STEP_NUM_TASKS")
        return tasks if tasks > 1 else None
    return None


def default_run_dir(command: str) -> str:
    """``runs/<command>/<date>-<time>``, with a number when two runs start in the same second."""
    stem = Path("runs") / command / time.strftime("%Y%m%d-%H%M%S")
    candidate, number = stem, 1
    while candidate.exists():
        number += 1
        candidate = stem.with_name(f"{stem.name}-{number}")
    return str(candidate)


def _world_size(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"environment variable {name} is '{value}', but a number of ranks is needed")
    return int(value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists options and overrides")


def _parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog=f"aligner {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("-m", "--multirun", action="store_true")
    options = parser.parse_intermixed_args(list(arguments))
    if options.multirun:
        raise ConfigError(
            f"--multirun: aligner {command} is one run; start one for each combination, in a shell loop or a job array"
        )
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve has an effect with --cfg job only; add --cfg job or leave it out")
    return options


def _to_yaml(config: DictConfig, resolve: bool) -> str:
    try:
        return OmegaConf.to_yaml(config, resolve=resolve)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--resolve: {reason}; give the value or leave --resolve out") from None
