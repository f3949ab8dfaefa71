"""Errors that users see, without a traceback.

Every message says three things: what was found, which rule it breaks, what to change.
The command line prints ``error: <message>`` and exits with ``exit_code``; anything that is not an
:class:`AlignerError` is a bug and is shown with its traceback.
"""

from __future__ import annotations


class AlignerError(Exception):
    """Base of all errors meant for users. ``exit_code`` is the process exit code."""

    exit_code = 1


class ConfigError(AlignerError):
    """A configuration value is unknown, has a wrong type or contradicts another value."""

    exit_code = 2


class TopologyError(ConfigError):
    """Parallel degrees do not fit the world size or the model."""


class DataError(AlignerError):
    """A data file is missing, malformed or unusable. Messages name file, line and field."""

    exit_code = 3


class ModelError(AlignerError):
    """A model directory, weight file or tokenizer is missing, malformed or unsupported."""

    exit_code = 4


class CheckpointError(AlignerError):
    """A run directory or checkpoint is missing, damaged or belongs to another run."""

    exit_code = 5


class GenerationError(AlignerError):
    """The generation engine cannot serve a request."""

    exit_code = 6


class TrainingError(AlignerError):
    """Training must not go on: non-finite loss, a failed self-check."""

    exit_code = 7


class RankFailure(AlignerError):
    """Another rank failed; this rank stops with it. The other rank's marker holds the reason."""

    exit_code = 8


class RunInUseError(AlignerError):
    """Another process trains in this run directory. The message names it."""

    exit_code = 9
