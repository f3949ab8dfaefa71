"""What a resumable run consists of: saved whole, or not at all; restored bit for bit."""

import aligner.distributed  # noqa: F401  (before megatron)
