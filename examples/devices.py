"""Where a rank of an example computes: on a card where there is one, else on the CPU.

In: what was asked for, this rank's place on its node. Out: a device. On cards everything is made to give the same bits
each time, for the examples compare runs bit for bit; that costs speed.
"""

import os

import torch

SHARED = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def device_for(wanted: str, local_rank: int, *, share: bool) -> torch.device:
    """`wanted`: auto, cpu or cuda. `share`: several ranks of one machine use the same card, as if each were a host of
    its own; NCCL refuses that otherwise. Call it before there is any process group."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no CUDA card here; leave it out, or use --device cpu")
    if share:
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
        for name, value in SHARED.items():
            os.environ.setdefault(name, value)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
