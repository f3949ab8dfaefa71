"""Model directories by local path or hub id."""

from __future__ import annotations

from pathlib import Path

from aligner.errors import ModelError


def resolve_model_directory(path: str | Path) -> Path:
    """``path`` itself when it is a directory, else the local snapshot of the Hugging Face Hub model ``path``.

    Downloads what is not cached yet (safetensors weights, configuration, tokenizer). Raises :class:`ModelError`.
    """
    path = str(path)
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelError(f"{path}: no such directory; give a Hugging Face model directory or a hub id 'owner/name'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{path}: neither a local directory nor a hub model that can be fetched ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); check the name, the network, or download it and give its path"
        ) from None
