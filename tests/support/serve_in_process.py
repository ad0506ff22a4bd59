"""Serve checkpoints one after another in this process: greedy tokens and their log-probs, with and without an adapter.

    python -m tests.support.serve_in_process CASES.json

``CASES.json`` holds, for each case, the options of ``in_process.served``, the folder of the checkpoint, the file of the
adapter's payload, prompt, number of tokens, whether SGLang computes the experts with what it has of its own, and the file of the
result.
"""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import torch

from orbit_kernels.contract.payload import Adapter
from orbit_sglang.cpu import experts
from tests.support import in_process

# SGLang writes the record within the forward pass when no schedule overlaps it.
RECORDING = {"enable_return_routed_experts": True, "disable_overlap_schedule": True}


def serve(case: dict) -> dict:
    """Tokens, log-probs and recorded experts by slot, and the server's manifest."""
    own_kernels = mock.patch.object(experts, "_ReferenceConfig", lambda method: None)  # as on CUDA
    with (
        own_kernels if case["own_kernels"] else contextlib.nullcontext(),
        in_process.served(Path(case["folder"]), **RECORDING, **case["options"]) as server,
    ):
        server.stage(Adapter.decode(Path(case["adapter"]).read_bytes()))
        result = {"manifest": server.model.orbit_base}
        for slot in (in_process.BASE_SLOT, in_process.ADAPTED_SLOT):
            tokens, log_probs_TV = server.greedy(case["prompt"], case["num_tokens"], slot)
            log_probs_T = log_probs_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            name = "base" if slot == in_process.BASE_SLOT else "adapted"
            result[name] = [tokens, log_probs_T.tolist()]
            result[f"{name}_experts"] = server.experts[0].tolist()
        return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in json.loads(Path(sys.argv[1]).read_text()):
        Path(case["result"]).write_text(json.dumps(serve(case)))
