"""Names on the Hugging Face Hub, where a configuration wants files of this machine.

A name becomes the path of its files in the Hub's cache, once, before anything starts: a run records
the path and needs no network again. What the cache has is taken as it is, without asking. `_place`
knows the layouts of data sets that the `datasets` library knows by their files' names.
"""

import errno
import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from configs.load import ConfigError, marked
from configs.runtime.files import is_full
from configs.schema import Config
from configs.section import HUB_DATA, HUB_MODEL
from scripts.command.terminal import status
from scripts.setup import adapter
from scripts.setup.overrides import get_field, with_field

TRAIN, EVAL = ("train",), ("validation", "test")  # the first of these splits that is there
TO_TRAIN = ("questions.train", "--train")
# The user's own word, read before a command has set it for the libraries that it loads.
_OFFLINE = any(
    os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
)
_NAME = r"(?!.*(?:--|\.\.))\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?"
_DATA = re.compile(rf"({_NAME})(?::([\w./-]+))?(?:@([\w.-]+))?")
_FILES = {".jsonl", ".json", ".parquet", ".gz", ".csv", ".txt", ".yaml", ".git", ".safetensors"}
_OF_A_MODEL = {".safetensors", ".json", ".model", ".txt", ".jinja", ".py"}  # and no pickles
_SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
_MAKE_ROOM = "make room there, or set HF_HUB_CACHE"
# What is said where a file has not come: by hf_xet, of its store, then twice by huggingface_hub.
_CUT_OFF = ("CAS Client Error", "Xet headers", "Consistency check failed")
_Choose = Callable[[Iterable[str]], list[str]]


def with_hub_paths(config: Config, fields: Sequence[str] = ()) -> Config:
    """The configuration with local paths where these fields (all, where none is given) name what is
    on the Hub. Raises ConfigError.
    """
    for mark, local in ((HUB_MODEL, model), (HUB_DATA, questions)):
        for field in marked(mark):
            value = get_field(config, field)
            if (not fields or field in fields) and (path := local(field, value)) != value:
                config = with_field(config, field, path)
    return config


def model(field: str, value: str) -> str:
    """The folder of the model `value`, which `field` names, of an adapter that of the model with
    it; other values as they are.
    """
    return adapter.whole(field, _folder(field, value))


def _folder(field: str, value: str) -> str:
    if not re.fullmatch(_NAME, value) or _is_path(value):
        return value
    where = _where(field, value)

    def choose(files: Iterable[str]) -> list[str]:
        wanted = [
            file
            for file in files
            if PurePosixPath(file).suffix in _OF_A_MODEL
            and ("/" not in file or file.endswith("/config.json"))
            and not file.startswith("consolidated")  # the same weights, in Mistral's own form
        ]
        if not any(file.endswith(".safetensors") for file in wanted):
            raise ConfigError(f"{where}: no *.safetensors in it on the Hub: name a model with them")
        return wanted

    return str(_fetched("model", value, field, where, choose)[0])


def questions(field: str, value: str) -> str:
    """The file, or `*` pattern of files, of the data set `value`, NAME[:CONFIG][@SPLIT]; other
    values as they are. Without a split it is the training's for the fields TO_TRAIN, else another.
    """
    return questions_and_split(field, value)[0]


def questions_and_split(field: str, value: str) -> tuple[str, str]:
    """`questions`, and the split that they are; '' for other values."""
    named = _DATA.fullmatch(value)
    if not named or _is_path(value):
        return value, ""
    name, where = named[1], _where(field, value)
    splits = TRAIN if field in TO_TRAIN else EVAL
    if named[3]:
        splits = (_SPLITS.get(named[3], named[3]),)

    def choose(files: Iterable[str]) -> list[str]:
        return _files_of(list(files), name, named[2] or "", splits, where)

    folder, files = _fetched("dataset", name, field, where, choose)
    place = _place(files[0])
    return str(folder / _as_one(files)), place[1] if place else ""


def data_file(field: str, name: str, wanted: Sequence[str]) -> Path:
    """The first of the `wanted` files that the data set `name` has. Raises ConfigError."""
    where = _where(field, name)

    def choose(files: Iterable[str]) -> list[str]:
        there = {*files}
        if found := next((file for file in wanted if file in there), None):
            return [found]
        raise ConfigError(f"{where}: no {' or '.join(wanted)} in it on the Hub: {_by_hand(name)}")

    folder, files = _fetched("dataset", name, field, where, choose)
    return folder / files[0]


def _is_path(value: str) -> bool:
    """True for what is here, or is meant to be: a file's name, something in a folder of ours."""
    path = Path(value)
    try:
        return path.exists() or path.suffix in _FILES or Path(path.parts[0]).is_dir()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def _where(field: str, value: str) -> str:
    return f"{field} {value!r}" if field.startswith("--") else f"{field} = {value!r}"


def _place(file: str) -> tuple[str, str] | None:
    """Configuration ('' for none) and split of a data file, by its name; None for other files."""
    path = PurePosixPath(file)
    folders = [part for part in path.parts[:-1] if part != "data"]
    if path.suffix not in (".parquet", ".jsonl"):
        return None
    if shard := re.fullmatch(r"(.+?)-\d{5}-of-\d{5}.*", path.stem):
        return "/".join(folders), _SPLITS.get(shard[1], shard[1])
    for part in (path.stem, *reversed(folders)):
        for word in re.split(r"[-._ \d]+", part.lower()):
            if word in _SPLITS:
                return "/".join(each for each in folders if each != part), _SPLITS[word]
    return None


def _files_of(
    files: Sequence[str], name: str, config: str, splits: Sequence[str], where: str
) -> list[str]:
    """The files of the first split that is there. Raises ConfigError, naming those that are."""
    places: dict[tuple[str, str], list[str]] = {}
    for file in sorted(files):
        if place := _place(file):
            places.setdefault(place, []).append(file)
    if not places:
        raise ConfigError(
            f"{where}: no JSONL or parquet file in it is named after a split: {_by_hand(name)}"
        )
    configs = sorted({of for of, _ in places})
    config = config or next((of for of in configs if of == "default" or not configs[1:]), "")
    if config not in configs:
        raise ConfigError(
            f"{where}: name a configuration that it has, {name}:CONFIG, of {_listed(configs)}"
        )
    there = sorted(split for of, split in places if of == config)
    split = next((each for each in splits if each in there), None)
    if split is None:
        raise ConfigError(
            f"{where}: no split {' or '.join(splits)} in it: name one that it has, "
            f"{name}{f':{config}' if config else ''}@SPLIT, of {_listed(there)}"
        )
    found = places[config, split]
    found = [file for file in found if file.endswith(".parquet")] or found
    if [file for file in files if fnmatchcase(file, _as_one(found))] != found:
        raise ConfigError(f"{where}: {_listed(found)} cannot be read as one: {_by_hand(name)}")
    return found


def _as_one(files: Sequence[str]) -> str:
    """One path for all files: itself, or a `*` from its number on."""
    first = PurePosixPath(files[0])
    return str(first.with_stem(re.sub(r"\d.*", "*", first.stem)) if files[1:] else first)


def _by_hand(name: str) -> str:
    return f"`{_command('dataset', name)}`, and name a file in the folder that it prints"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f", … ({len(names)} in all)" if names[20:] else "")


def _command(kind: str, name: str) -> str:
    return f"hf download {'--repo-type dataset ' if kind == 'dataset' else ''}{name}"


def _fetched(
    kind: str, name: str, field: str, where: str, choose: _Choose
) -> tuple[Path, list[str]]:
    """The snapshot in the cache that holds the chosen files, and these. Raises ConfigError."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import (
        CachedRepoTreeNotFoundError,
        DryRunError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    _require_name(name, where)
    with suppress(CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        tree = get_cached_repo_tree(name, repo_type=kind)
        return _snapshot(kind, name, choose([file.path for file in tree]), local=True)
    failed = (
        *(httpx.HTTPError, OfflineModeIsEnabled, LocalEntryNotFoundError, DryRunError),
        *(json.JSONDecodeError, UnicodeDecodeError),  # of a page that stands before the network
    )
    try:
        with _network():
            return _download(kind, name, field, where, choose)
    except failed as error:
        with suppress(LocalEntryNotFoundError, ConfigError):  # an older library lists no files
            folder = Path(snapshot_download(name, repo_type=kind, local_files_only=True))
            here = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
            return folder, choose(here)
        raise ConfigError(f"{where}: {_why(error, kind, name, field)}") from error


def _require_name(name: str, where: str) -> None:
    """Raise ConfigError where nothing on the Hub can be called so."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"{where}: there is no {Path(name).resolve()}, and no name on the Hub is like that "
            "(ASCII letters, digits, '-', '_' and '.', at most 96 on each side of the '/', "
            "no .git at the end): name a path as seen from here"
        ) from error


def _download(
    kind: str, name: str, field: str, where: str, choose: _Choose
) -> tuple[Path, list[str]]:
    """The snapshot that the chosen files were just fetched into, and these; with progress."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    hub = HfApi()
    look = hub.model_info if kind == "model" else hub.dataset_info
    info = look(name, files_metadata=True)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    files = choose(sizes)
    size = sum(sizes[file] for file in files)
    with disable_progress_bars():
        _require_room(kind, name, info.sha, files, size, where)
    told = f"{len(files)} {'files' if files[1:] else 'file'}, {size / 1e6:,.1f} MB"
    print(f"forage: {field}: fetching {name} from the Hub ({told})", file=sys.stderr)
    try:
        if sys.stderr.isatty():
            return _snapshot(kind, name, files, local=False)
        with disable_progress_bars(), status(f"fetching {name}"):
            return _snapshot(kind, name, files, local=False)
    except (OSError, RuntimeError, ValueError) as error:
        if is_full(error):
            raise ConfigError(f"{where}: {_needs(size)} in all: {_MAKE_ROOM}") from error
        if _is_cut_off(error):
            raise ConfigError(
                f"{where}: a file of it has not come from the Hub ({_first_line(error)}): try "
                "again; where large files do not come, HF_HUB_DISABLE_XET=1 may go around their "
                "store"
            ) from error
        raise


def _require_room(
    kind: str, name: str, commit: str | None, files: list[str], size: int, where: str
) -> None:
    """Raise ConfigError where the disk of the cache has no room for those files, of `size` bytes in
    all, that are not in it yet.
    """
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    home = next(each for each in (cache, *cache.parents) if each.exists())
    free = shutil.disk_usage(home).free
    if free >= size:
        return
    found = snapshot_download(
        name, repo_type=kind, revision=commit, allow_patterns=_exactly(files), dry_run=True
    )
    needed = sum(each.file_size or 0 for each in found if each.will_download)
    if free < needed:
        raise ConfigError(f"{where}: {_needs(needed)}, {free / 1e6:,.1f} MB are free: {_MAKE_ROOM}")


def _needs(size: int) -> str:
    from huggingface_hub import constants

    return f"{size / 1e6:,.1f} MB are needed in {constants.HF_HUB_CACHE}"


def _snapshot(kind: str, name: str, files: list[str], local: bool) -> tuple[Path, list[str]]:
    from huggingface_hub import snapshot_download

    only = _exactly(files)
    path = snapshot_download(name, repo_type=kind, allow_patterns=only, local_files_only=local)
    return Path(path), files


def _exactly(files: Iterable[str]) -> list[str]:
    return [glob.escape(file) for file in files]


def _why(error: Exception, kind: str, name: str, field: str) -> str:
    """The objection of the Hub, or of the way there, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if isinstance(error, GatedRepoError) or status == 403:
        page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
        return f"not everybody may read it: ask for access at {page}, then `hf auth login`"
    if status in (401, 404):
        return (
            "nothing of that name is here, and the Hub has none, or a private one: check its "
            "spelling, or `hf auth login`"
        )
    cause = error.__cause__ or error
    why = _first_line(cause)
    why = "HF_HUB_OFFLINE is set" if isinstance(cause, OfflineModeIsEnabled) else why
    if isinstance(cause, (json.JSONDecodeError, UnicodeDecodeError)):
        why = "what answers is a page, not the Hub: log in to the network first"
    return (
        f"there is no {Path(name).resolve()}, and nothing of that name in the Hub's cache; "
        f"{constants.ENDPOINT} cannot be read ({why}): name a path as seen from here; or run "
        f"`{_command(kind, name)}` where there is a network and this cache; or add `--local-dir "
        f"FOLDER`, copy that here, and set {field} to {'a file in ' * (kind == 'dataset')}it"
    )


def _is_cut_off(error: Exception) -> bool:
    of_the_network = isinstance(error, (ConnectionError, TimeoutError))
    known = type(error).__module__ == "hf_xet" or any(words in str(error) for words in _CUT_OFF)
    return of_the_network or known


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


@contextmanager
def _network() -> Iterator[None]:
    """Let huggingface_hub reach the Hub, unless the user's environment forbids it."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, _OFFLINE
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
