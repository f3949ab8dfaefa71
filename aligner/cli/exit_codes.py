"""Process exit codes. Errors meant for users carry theirs (``aligner.errors``); these are the others."""

from __future__ import annotations

from aligner import errors

BUG = 70  # an unexpected exception; its traceback is printed and kept in run_dir/errors/
INTERRUPTED = 130  # Ctrl-C

_CLASSES = (
    errors.ConfigError,
    errors.DataError,
    errors.ModelError,
    errors.CheckpointError,
    errors.GenerationError,
    errors.TrainingError,
    errors.RankFailure,
)
HELP = ", ".join(
    ["0 success", *(f"{cls.exit_code} {cls.__name__}" for cls in _CLASSES), f"{BUG} a bug", f"{INTERRUPTED} interrupted"]
)
