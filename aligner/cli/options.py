"""Argument parsing of the commands that take ordinary options instead of Hydra overrides."""

from __future__ import annotations

import argparse
from typing import NoReturn

from aligner.errors import ConfigError


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose refusals are one-line :class:`ConfigError` messages."""

    def __init__(self, command: str, description: str, *, add_help: bool = True) -> None:
        super().__init__(prog=f"aligner {command}", description=description, allow_abbrev=False, add_help=add_help)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists what it takes")
