"""What the launcher asked for: one process, DDP, FSDP2 or DeepSpeed; what cannot work is refused before any weights.

``torchrun`` gives DDP. ``accelerate launch --config_file`` says the rest through its environment, which accelerate
reads by itself; klamp adds no settings of its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from klamp.errors import ConfigError, unknown
from klamp.models import known_device
from klamp.models.lora import add_lora, left_out_by_lora
from klamp.models.policy import Policy, recompute
from klamp.sampling.families import check_sampled
from klamp.sampling.rollout import Rollout
from klamp.sampling.sampler import Sampler as BuiltinSampler
from klamp.sampling.sampler import end_ids
from klamp.sampling.server_sampler import ServerSampler
from klamp.sampling.vllm_server import Server
from klamp.train.algorithms import algorithm_of
from klamp.train.config import ResolvedConfig

if TYPE_CHECKING:
    from klamp.train.learner import Learner


def make_accelerator(config: ResolvedConfig) -> Any:
    """The accelerator for this process."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    cpu = _on_cpu(config.device)
    check_launch(os.environ, config, cpu=cpu)
    accelerator = Accelerator(
        cpu=cpu,
        log_with=config.track,
        project_dir=config.run,
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False),
            InitProcessGroupKwargs(
                init_method=_rendezvous(os.environ), timeout=timedelta(seconds=config.process_timeout)
            ),
        ],
        mixed_precision="no",
    )
    if cpu and _asked(os.environ, "ACCELERATE_USE_FSDP"):
        _shard_on_cpu(accelerator)
    if accelerator.distributed_type == "DEEPSPEED":
        _settle_deepspeed(accelerator.deepspeed_plugin.deepspeed_config, config, accelerator.num_processes)
    return accelerator


def check_tracker(name: str | None) -> None:
    """Refuse a tracker that accelerate does not know or cannot import; it would go on without."""
    if name is None:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = [str(tracker) for tracker in LOGGER_TYPE_TO_CLASS]
    if name not in known:
        raise unknown("track", name, known)
    if name not in [str(tracker) for tracker in get_available_trackers()]:
        package = {"comet_ml": "comet-ml"}.get(name, name)
        raise ConfigError(f"track {name!r} needs the package {package}, which is not installed. pip install {package}.")


def _on_cpu(device: str) -> bool:
    """Whether the run stays on the CPU; a device that is not there is refused, not replaced."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device {device!r} is none of auto, cpu and cuda. Which GPU it is, CUDA_VISIBLE_DEVICES says."
        )
    if device == "auto":
        return not torch.cuda.is_available()
    return known_device(device).type == "cpu"


def _rendezvous(asked: Mapping[str, str]) -> str | None:
    """Where the processes meet: as torch would have it, but after a restart by torchrun on keys of their own.

    torchrun keeps one store through its restarts, and torch would read the addresses of dead processes from it
    (pytorch/pytorch#135712). Machines count their restarts apart, so it can be mended here for one machine alone.
    """
    attempt = asked.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or asked.get("LOCAL_WORLD_SIZE") != asked.get("WORLD_SIZE"):
        return None

    from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

    store_kinds: Any = torch.distributed

    def meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world in rendezvous("env://", **options):
            yield store_kinds.PrefixStore(f"attempt-{attempt}", store), rank, world

    with contextlib.suppress(RuntimeError):  # it is registered already
        register_rendezvous_handler("klamp", meet)  # type: ignore[no-untyped-call]
    return "klamp://"


def check_launch(asked: Mapping[str, str], config: ResolvedConfig, *, cpu: bool) -> None:
    """Refuse what the environment of ``accelerate launch`` asks for and klamp cannot do."""
    if _asked(asked, "ACCELERATE_USE_MEGATRON_LM") or _asked(asked, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise ConfigError(
            "the accelerate configuration asks for Megatron-LM or a parallelism_config. klamp trains with DDP, FSDP2 "
            "or DeepSpeed: remove it, or set distributed_type to FSDP with fsdp_version: 2."
        )
    if _asked(asked, "ACCELERATE_USE_FSDP"):
        _check_fsdp(asked, cpu=cpu)
    if _asked(asked, "ACCELERATE_USE_DEEPSPEED"):
        _check_deepspeed(asked, config, cpu=cpu)


def _check_fsdp(asked: Mapping[str, str], *, cpu: bool) -> None:
    """FSDP2 with whole weights at hand when the model is made; the sampler's copy needs them."""
    if asked.get("FSDP_VERSION", "1") != "2":
        raise ConfigError(
            f"fsdp_version {asked.get('FSDP_VERSION', '1')} is not supported: its flat parameters have no names to "
            "save or scale by. Set fsdp_version: 2 in the accelerate configuration."
        )
    if "LOCAL_RANK" not in asked:
        raise ConfigError("FSDP2 needs a launcher, with one process too: accelerate launch, or torchrun.")
    if cpu and torch.cuda.is_available():
        raise ConfigError("FSDP2 shards over the GPUs it sees, and device is cpu. Set CUDA_VISIBLE_DEVICES= as well.")
    for name, why in (
        ("FSDP_OFFLOAD_PARAMS", "klamp scales, samples from and saves weights where they are"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "every process samples, and so loads the whole model"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "it renames the layers; lower ‹optim.micro_batch› to save memory"),
    ):
        if _asked(asked, name):
            raise ConfigError(f"{name.lower()} is on in the accelerate configuration: {why}. Set it to false.")


def _check_deepspeed(asked: Mapping[str, str], config: ResolvedConfig, *, cpu: bool) -> None:
    """ZeRO 0 passes through: from stage 1 on DeepSpeed keeps the weights that count where nobody else reaches them."""
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.imports import is_deepspeed_available

    if not is_deepspeed_available():
        raise ConfigError("the accelerate configuration asks for DeepSpeed, which is not installed: pip install it.")
    if cpu:
        raise ConfigError("accelerate runs DeepSpeed on GPUs alone, and device is cpu. Use torchrun (DDP) or FSDP2.")
    stage = int(DeepSpeedPlugin().zero_stage)
    if stage > 0:
        raise ConfigError(
            f"DeepSpeed ZeRO stage {stage} is refused: "
            + ("its parameters are empty between passes, so nothing can be sampled from them. " if stage == 3 else "")
            + "Its optimiser trains a copy of the weights of its own, which the clamp cannot scale, and saves it by "
            "pickle. Set zero_stage: 0, or use FSDP2, which shards the same state."
        )
    if config.optim.micro_batch:
        raise ConfigError(
            f"‹optim.micro_batch› {config.optim.micro_batch} and DeepSpeed: its engine steps at every backward pass. "
            "Set ‹optim.micro_batch› to 0, or use DDP or FSDP2."
        )


def _settle_deepspeed(settings: dict[str, Any], config: ResolvedConfig, processes: int) -> None:
    """What DeepSpeed's configuration left open, from klamp's; one backward pass is one step."""
    share = config.rollout.prompts * config.rollout.group_size // processes // config.algorithm.minibatches
    settings["train_micro_batch_size_per_gpu"] = max(1, share)
    settings["gradient_accumulation_steps"] = 1
    settings["gradient_clipping"] = config.optim.max_grad_norm or 0.0


def _shard_on_cpu(accelerator: Any) -> None:
    """accelerate shards on GPUs alone; torch does it with gloo as well, which is how the tests of it run anywhere."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _asked(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1", "yes")


def build_policy(model: nn.Module, config: ResolvedConfig) -> Policy:
    """The policy for ``config`` around a loaded model: LoRA unless ``full``."""
    check_sampled(model)
    if config.optim.checkpointing:
        recompute(model)
    if not config.full:
        model = add_lora(model, rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets)
    else:
        for p in model.parameters():
            p.requires_grad_(True)
    policy = Policy(
        model,
        value_head=algorithm_of(config).values,
        temperature=config.rollout.temperature,
        lora=not config.full,
    )
    if not config.full and config.lora.targets == "all-linear":
        policy.note = left_out_by_lora(model)
    return policy


def shard_like_policy(accelerator: Any, module: nn.Module) -> None:
    """Spread ``module`` over the processes by FSDP2, as the policy is."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    fsdp2_prepare_model(accelerator, module)


class Sampler(Protocol):
    """Draws completions from the policy as it was at the last ``refresh``."""

    def refresh(self, step: int = 0) -> None:
        """Sample from the policy's weights as they are now, after ``step`` updates; every process calls."""
        ...

    def sample(self, prompts: Any, texts: Any, generator: torch.Generator) -> Rollout:
        """``group_size`` completions of every prompt, in order, with their log-probs."""
        ...

    def close(self) -> None:
        """Give back what the sampler holds outside this process."""
        ...


def make_sampler(
    config: ResolvedConfig, learner: Learner, tokenizer: Any, context: int | None, prompts: Sequence[Sequence[int]]
) -> Sampler:
    """The sampler that ``config`` describes, for a learner that is ready and the run's encoded prompts."""
    if config.rollout.engine == "builtin":
        own = BuiltinSampler(learner.policy, tokenizer, config.rollout, context, learner.merged)
        own.check(prompts)
        return own
    return _server(config, learner, tokenizer, context)


def _server(config: ResolvedConfig, learner: Learner, tokenizer: Any, context: int | None) -> Sampler:
    from accelerate.utils import broadcast_object_list

    rollout, accelerator = config.rollout, learner.accelerator
    assert rollout.url is not None, "the configuration asks for it"
    model: Any = learner.policy.model
    key = os.environ.get("VLLM_API_KEY")
    try:
        server = Server(rollout.url, key=key, timeout=rollout.timeout, retries=rollout.retries)
    except ModuleNotFoundError as error:
        raise ConfigError(f"‹rollout.engine=vllm› needs {error.name}. pip install 'klamp[server]'.") from None
    return ServerSampler(
        learner.policy,
        tokenizer,
        rollout,
        context,
        server,
        base=rollout.served or config.model,
        adapters=Path(rollout.adapters or Path(config.run) / "adapters"),
        nonce=broadcast_object_list([secrets.token_hex(4)])[0],
        end=end_ids(tokenizer, model.get_base_model()),
        main=accelerator.is_main_process,
        wait=accelerator.wait_for_everyone,
    )
