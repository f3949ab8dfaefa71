"""``aligner <command> ...``: finds the command's module and turns errors into one line and an exit code.

Commands that train or sample (``sft rm ppo generate evaluate``) take Hydra overrides and run on ranks, see
``launch.py``; the others take ordinary options. A command's module is imported only when it is called, so that
``--help`` and refused configurations answer without loading torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from aligner import __version__
from aligner.cli import exit_codes
from aligner.cli.commands import COMMANDS
from aligner.config.keys import nearest
from aligner.config.schema import ROOTS
from aligner.errors import AlignerError, ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process exit code (see ``exit_codes.py``)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        print(f"error: {error.filename}: {error.strerror}; choose another path", file=sys.stderr)
        return ConfigError.exit_code
    except BrokenPipeError:  # `aligner ppo --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] == "--version":
        print(f"aligner {__version__}")
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        raise ConfigError(f"{command}: no such command; {nearest(command, COMMANDS)}available: {', '.join(COMMANDS)}")
    if command in ROOTS:
        from aligner.cli.launch import run_command

        return run_command(command, rest)
    module = importlib.import_module(f"aligner.cli.{command}")
    return int(module.main(rest) or 0)


def help_text() -> str:
    """What ``aligner --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = ["usage: aligner COMMAND [options and overrides]", "", "commands:"]
    lines += [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    lines += [
        "",
        "`aligner COMMAND --help` lists what a command takes. Examples:",
        "  aligner sft model=smollm2_135m data.train=conversations.jsonl",
        "  aligner ppo model=smollm2_135m reward.init_from=runs/rm/20250101-120000 trainer.max_steps=20",
        "  torchrun --nproc-per-node 4 -m aligner ppo ...",
        "",
        "exit codes: 0 success",
        *(f"  {code:>3}  {meaning}" for code, meaning in exit_codes.MEANINGS.items()),
        "  128+N  a rank was ended by signal N (137: SIGKILL, as when memory runs out)",
    ]
    return "\n".join(lines)
