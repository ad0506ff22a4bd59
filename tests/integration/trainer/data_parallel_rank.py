"""One rank of test_trainer_data_parallel: trains on its half of a batch and writes norms and adapter."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tensordict import TensorDict
from trainer_support import make_batch, make_engine, nll, randomise, sequences


def main() -> None:
    rank, size, store, model, out = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        Path(sys.argv[4]),
        Path(sys.argv[5]),
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    engine = make_engine(model, optim={"clip_grad": 0.1})
    randomise(engine)
    norms = [step(engine, sequences(seed)[rank::size]) for seed in range(2)]
    engine.save_checkpoint(str(out / "checkpoint"))
    engine.load_checkpoint(str(out / "checkpoint"))
    save_file({"norms": torch.tensor(norms), **engine.export_adapter().tensors}, out / f"rank_{rank}.safetensors")
    dist.destroy_process_group()


def step(engine, tokens) -> float:
    batch: TensorDict = make_batch(tokens, micro_batch=1)
    with engine.train_mode():
        return engine.train_batch(batch, nll)["metrics"]["grad_norm"]


if __name__ == "__main__":
    main()
