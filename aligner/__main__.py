"""``python -m aligner`` (and ``torchrun -m aligner``): the same as the ``aligner`` command."""

from __future__ import annotations

import sys

from aligner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
