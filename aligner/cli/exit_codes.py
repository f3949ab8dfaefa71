"""Process exit codes. Errors meant for users carry theirs (``aligner.errors``); these are the others."""

from __future__ import annotations

from aligner import errors

BUG = 70  # an unexpected exception
HUNG = 72  # no sign of life of a rank: its stacks are in the run's errors/ folder
STOPPED_RESTART = 75  # stopped on request after saving; wants to be started again (SIGUSR1, deadline)
STOPPED = 76  # stopped on request after saving; not to be started again (SIGTERM, SIGINT, no progress)
INTERRUPTED = 130

MEANINGS: dict[int, str] = {
    errors.ConfigError.exit_code: "configuration: unknown key, wrong value, values that contradict each other",
    errors.DataError.exit_code: "data: a file is missing, malformed or unusable",
    errors.ModelError.exit_code: "model: a directory, weight file or tokenizer is missing or unsupported",
    errors.CheckpointError.exit_code: "checkpoint: missing, damaged or of another run",
    errors.GenerationError.exit_code: "generation: a request cannot be served",
    errors.TrainingError.exit_code: "training must not go on: non-finite loss, failed self-check",
    errors.RankFailure.exit_code: "another rank failed",
    errors.RunInUseError.exit_code: "another process uses the run directory",
    BUG: "a bug: the traceback is printed and kept in the run's errors/ folder",
    HUNG: "a rank hung: the Python stacks of all ranks are in the run's errors/ folder",
    STOPPED_RESTART: "stopped and saved by SIGUSR1 or the deadline; start the same command again to continue",
    STOPPED: "stopped and saved by SIGTERM or SIGINT, or restarts that make no progress",
    INTERRUPTED: "interrupted",
}
