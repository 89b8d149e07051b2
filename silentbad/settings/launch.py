"""The settings of `accelerate launch`, read from its environment variables."""

import os

from silentbad.errors import UserError


def launched(name: str) -> bool:
    """Whether `accelerate launch` requests FSDP, DEEPSPEED or MEGATRON_LM."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true")


def check_launch() -> None:
    """Refuse DeepSpeed, Megatron-LM, and settings of FSDP that this loop does not support."""
    for name in ("DEEPSPEED", "MEGATRON_LM"):
        if launched(name):
            raise UserError(
                f"accelerate: {name} takes the optimizer's step away from the loop; use "
                "configs/accelerate/ddp.yaml, or fsdp.yaml for weights and states in shards"
            )
    if not launched("FSDP"):
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError(
            "fsdp_version: only FSDP 2 shards here; set 2, as configs/accelerate/fsdp.yaml does"
        )
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
        raise UserError("fsdp_offload_params: shards stay on their device; set false")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise UserError(
            "num_processes: FSDP has nothing to shard in one process; "
            "use configs/accelerate/gpu.yaml"
        )
