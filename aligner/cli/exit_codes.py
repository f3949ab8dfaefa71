"""Process exit codes. Errors meant for users carry theirs (``aligner.errors``); these are the others."""

from __future__ import annotations

from aligner import errors

BUG = 70  # an unexpected exception
INTERRUPTED = 130

MEANINGS: dict[int, str] = {
    errors.ConfigError.exit_code: "configuration: unknown key, wrong value, values that contradict each other",
    errors.DataError.exit_code: "data: a file is missing, malformed or unusable",
    errors.ModelError.exit_code: "model: a directory, weight file or tokenizer is missing or unsupported",
    errors.CheckpointError.exit_code: "checkpoint: missing, damaged or of another run",
    errors.GenerationError.exit_code: "generation: a request cannot be served",
    errors.TrainingError.exit_code: "training must not go on: non-finite loss, failed self-check",
    errors.RankFailure.exit_code: "another rank failed",
    BUG: "a bug: the traceback is printed and kept in the run's errors/ folder",
    INTERRUPTED: "interrupted",
}
