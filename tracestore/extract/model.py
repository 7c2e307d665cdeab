"""Loading of a causal language model."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tracestore.errors import UsageError
from tracestore.extras import needs
from tracestore.ingest.sources import fingerprint


@dataclass
class LanguageModel:
    """A Hugging Face model in evaluation mode, its tokenizer, id and revision."""

    model: Any
    tokenizer: Any
    name: str
    revision: str | None


def _locate(model: str) -> tuple[str, str | None]:
    """Return the id or folder for from_pretrained, and the name of the GGUF file in it or None."""
    if model.startswith("package:"):
        package = model.removeprefix("package:")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(f"--model {model}: the package {package} is not installed")
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(folder.glob("*.gguf"))
        if not files:
            raise UsageError(f"--model {model}: the package holds no .gguf file")
        return str(folder), files[0].name
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"--model {model}: no such file")
        return str(path.parent), path.name
    return model, None


def load_model(model: str, *, device: str = "auto", dtype: str = "float32") -> LanguageModel:
    """Load a causal language model with its tokenizer.

    Parameters
    ----------
    model : str
        Hugging Face id, local folder, .gguf file, or package:NAME for the .gguf file of an installed
        Python package.
    device : str
        "auto", "cpu" or "cuda". Processes of torchrun take turns at the GPUs of their machine.
    dtype : str
        Name of a torch dtype.

    Raises
    ------
    UsageError
        The model cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    location, gguf = _locate(model)
    if gguf:
        with needs("extract"):
            import gguf as _  # noqa: F401 - the error of transformers has several lines
    extra = {"gguf_file": gguf} if gguf else {}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % max(1, torch.cuda.device_count())}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **extra)
        load = partial(AutoModelForCausalLM.from_pretrained, location, dtype=getattr(torch, dtype), **extra)
        network = load()
        with attention_weights(network):
            if network.config._attn_implementation != "eager":
                network = load(attn_implementation="eager")
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"--model {model}: cannot be loaded: {str(error).splitlines()[0]}") from None
    network.to(device)  # type: ignore[arg-type]
    # Stores hold no path of this machine: a model of a local folder or file has the name of that.
    name = gguf or (Path(location).resolve().name if Path(location).is_dir() else model)
    revision = getattr(network.config, "_commit_hash", None) or _hash_of_files(Path(location), gguf)
    return LanguageModel(network.eval(), tokenizer, name, revision)


def _hash_of_files(folder: Path, gguf: str | None) -> str | None:
    """Return a hash of names, sizes and samples of the files of a model in a local folder, or None without files."""
    files = [folder / gguf] if gguf else sorted(folder.iterdir()) if folder.is_dir() else []
    files = [path for path in files if path.suffix in (".safetensors", ".bin", ".gguf", ".json")]
    digest = hashlib.sha256(json.dumps([[path.name, *fingerprint(path)] for path in files]).encode())
    return f"files:{digest.hexdigest()}" if files else None


@contextmanager
def attention_weights(model: Any, is_wanted: bool = True) -> Iterator[None]:
    """Let a model return attention weights within a `with` block: use its eager attention."""
    usual = model.config._attn_implementation
    if not is_wanted or usual == "eager":
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(usual)
