"""An engine in Python with two versions of an adapter; prints what it was asked and answered, as JSON."""

import json
import sys
from collections.abc import Callable

import sglang
import torch

from orbit_kernels.contract.client import CallError
from orbit_kernels.contract.errors import Refusal
from orbit_kernels.contract.peft_folder import read_peft_folder
from orbit_sglang.client import EngineSlots

OPTIONS = {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": 2000, "mem_fraction_static": 0.05}
PROMPT = [5, 6, 7, 8, 9, 10]


def main() -> None:
    model, folder = sys.argv[1:]
    engine = sglang.Engine(model_path=model, enable_orbit_slots=True, dtype="float32", **OPTIONS)
    try:
        slots = EngineSlots(engine)

        def answer(**sampling_params) -> dict:
            greedy = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            answer = engine.generate(input_ids=PROMPT, sampling_params=greedy | sampling_params)
            return {"ids": answer["output_ids"], "spans": answer["meta_info"]["orbit_versions"]}

        found = {"base": answer()}
        payload = read_peft_folder(folder).encode()
        found["staged"] = slots.stage(3, payload).model_dump()
        found["kept"] = slots.adapter(3) == payload
        found["tensors"] = sorted(slots.base().tensors)
        found["before"] = answer()
        slots.activate(3)
        found["adapted"], found["chosen"] = answer(), answer(custom_params={"orbit_version": 0})
        try:
            slots.activate(9)
        except CallError as error:
            found["refused"] = str(error)
        found["rolled_back"] = slots.rollback().active_version
        found["discarded"] = slots.discard().discarded
        found["attacks"] = [_refused(call) for call in _attacks(engine, model)]
        found["after"] = answer()
        print("FOUND", json.dumps(found))
    finally:
        engine.shutdown()


def _attacks(engine: sglang.Engine, model: str) -> list[Callable]:
    """Calls that would change the base or write it out, or load an adapter of SGLang's own."""
    return [
        lambda: engine.update_weights_from_tensor([("model.norm.weight", torch.zeros(64))]),
        lambda: engine.update_weights_from_disk(model),
        lambda: engine.release_memory_occupation(),
        lambda: engine.collective_rpc("save_sharded_model", path="unused", pattern=None, max_size=None),
    ]


def _refused(call: Callable) -> str:
    try:
        return f"returned {call()}"
    except (Refusal, AssertionError) as error:
        return str(error)


if __name__ == "__main__":
    main()
