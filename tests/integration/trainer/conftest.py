import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from tests.support.quantized import quantize, weight_format
from tests.support.tiny_models import save_trained


@pytest.fixture(scope="module", autouse=True)
def single_process(tmp_path_factory):
    """A process group of one over the loopback interface; a model served in this process needs its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folder of a tiny checkpoint by (kind, dtype)."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        (kind, dtype): save_trained(kind, root / f"{kind}_{str(dtype).removeprefix('torch.')}", dtype)
        for kind in ("qwen3", "llama")
        for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.fixture(scope="session")
def quantized(checkpoints, tmp_path_factory):
    """Folder of a quantised tiny checkpoint by kind, format and dtype; each is made once and must not be changed."""
    made = {}

    def get(kind: str, name: str, dtype: torch.dtype) -> Path:
        if (kind, name, dtype) not in made:
            folder = tmp_path_factory.mktemp("quantized") / "model"
            made[kind, name, dtype] = quantize(checkpoints[kind, dtype], folder, weight_format(name, dtype))
        return made[kind, name, dtype]

    return get
