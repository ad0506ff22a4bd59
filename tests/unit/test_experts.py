"""Frozen experts: mathematics, chunks, names, refusals. Dimension suffixes as in orbit_kernels.experts.mlp."""

import dataclasses
import json

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from orbit_kernels.adapters import AdapterMethod, LoRAMethod, OFTMethod
from orbit_kernels.adapters.config import AdapterConfig, tensor_name
from orbit_kernels.adapters.lora import reference as lora
from orbit_kernels.adapters.oft import reference as oft
from orbit_kernels.contract.payload import Adapter
from orbit_kernels.experts import (
    DOWN,
    GATE,
    GATE_UP,
    UP,
    ChunkBuffer,
    ExpertAdapter,
    FrozenExperts,
    PerExpert,
    StackedWeights,
    expert_mlp,
    expert_module,
)
from orbit_kernels.formats import Bf16Format, Fp8Format, Int4Format, Mxfp4Format, WeightFormat
from orbit_kernels.frozen.product import StoredWeight, frozen_matmul

HIDDEN, FFN = 64, 96
SHAPES = {GATE: (FFN, HIDDEN), UP: (FFN, HIDDEN), DOWN: (HIDDEN, FFN)}
OFT, LORA = OFTMethod(block_size=16), LoRAMethod(rank=4, alpha=8.0)
METHODS = pytest.mark.parametrize("method", [OFT, LORA], ids=["oft", "lora"])
FORMATS = {
    "bf16": Bf16Format(),
    "fp32": Bf16Format(dtype=torch.float32),
    "fp8": Fp8Format(),
    "int4": Int4Format(),
    "mxfp4": Mxfp4Format(),
}


def _stack(weight_format: WeightFormat, experts: int, rows: int, columns: int, seed: int) -> StackedWeights:
    generator = torch.Generator().manual_seed(seed)
    stored = [
        weight_format.quantize(torch.randn(rows, columns, generator=generator) * columns**-0.5) for _ in range(experts)
    ]
    tensors = {leaf: torch.stack([tensors[leaf] for tensors in stored]) for leaf in stored[0]}
    return StackedWeights(format=weight_format, rows=rows, columns=columns, tensors=tensors)


def _experts(weight_format: WeightFormat, experts: int, hidden: int = HIDDEN, ffn: int = FFN) -> FrozenExperts:
    return FrozenExperts(
        gate_proj=_stack(weight_format, experts, ffn, hidden, 1),
        up_proj=_stack(weight_format, experts, ffn, hidden, 2),
        down_proj=_stack(weight_format, experts, hidden, ffn, 3),
    )


@dataclasses.dataclass
class Case:
    """Inputs of a layer, with gradients, and a trained adapter's tensors by projection and leaf, stacked by expert."""

    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    method: AdapterMethod
    tensors: dict[str, dict[str, torch.Tensor]]
    grad_TD: torch.Tensor

    @classmethod
    def random(
        cls,
        experts: int,
        *,
        tokens: int = 40,
        top_k: int = 3,
        dtype: torch.dtype = torch.float32,
        method: AdapterMethod = OFT,
        tied: bool = False,
    ) -> "Case":
        generator = torch.Generator().manual_seed(0)
        tensors = {
            projection: {
                leaf: (torch.randn(experts, *shape, generator=generator) * 0.05).requires_grad_()
                for leaf, shape in method.shapes(*SHAPES[projection]).items()
            }
            for projection in SHAPES
        }
        if tied:
            tensors[UP][method.input_leaf] = tensors[GATE][method.input_leaf]
        return cls(
            x_TD=torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_(),
            ids_TK=torch.rand(tokens, experts, generator=generator).topk(top_k, dim=1).indices,
            weights_TK=torch.rand(tokens, top_k, generator=generator).requires_grad_(),
            method=method,
            tensors=tensors,
            grad_TD=torch.randn(tokens, HIDDEN, generator=generator).to(dtype),
        )

    def run(self, experts: FrozenExperts, *, chunk: int = 3, **options) -> torch.Tensor:
        return expert_mlp(self.x_TD, self.ids_TK, self.weights_TK, experts, buffer=ChunkBuffer(chunk), **options)

    def gradients(self, y_TD: torch.Tensor) -> list[torch.Tensor]:
        trained = {id(tensor): tensor for leaves in self.tensors.values() for tensor in leaves.values()}
        leaves = [self.x_TD, self.weights_TK, *trained.values()]
        return list(torch.autograd.grad(y_TD, leaves, self.grad_TD.to(y_TD.dtype), allow_unused=True))

    def of_expert(self, projection: str, expert: int) -> dict[str, torch.Tensor]:
        return {leaf: tensor[expert] for leaf, tensor in self.tensors[projection].items()}

    def merged(self, experts: FrozenExperts, projection: str, expert: int) -> torch.Tensor:
        """An expert's adapted weight, fp64."""
        (stored,) = experts.stored(expert, [projection])
        tensors = {leaf: tensor.double() for leaf, tensor in self.of_expert(projection, expert).items()}
        return self.method.merge(stored.dequantize(torch.float32).double(), tensors)


@dataclasses.dataclass
class _Oft:
    """A rotation for all parts of a linear, or for each."""

    parts: list[torch.Tensor | None]

    def inputs(self, x_RI):
        return [
            x_RI if entries is None else oft.rotate(x_RI, OFT.rotation({"oft_R": entries})) for entries in self.parts
        ]

    def output(self, x_RI, y_RO):
        return y_RO


@dataclasses.dataclass
class _Lora:
    """A and B of each part."""

    parts: list[dict[str, torch.Tensor]]

    def inputs(self, x_RI):
        return [x_RI]

    def output(self, x_RI, y_RO):
        scaled = [lora.scaled(part["lora_B"], LORA.scaling) for part in self.parts]
        return y_RO + lora.fused_update(x_RI, [part["lora_A"] for part in self.parts], scaled)


def _linear_adapter(case: Case, projections: tuple[str, ...], expert: int, *, tied: bool) -> _Oft | _Lora:
    parts = [case.of_expert(projection, expert) for projection in projections]
    if case.method == LORA:
        return _Lora(parts)
    entries = [part["oft_R"] for part in parts]
    return _Oft(entries[:1] if tied else entries)


def _adapter(case: Case, *, tied: bool = False) -> ExpertAdapter:
    num_experts = case.tensors[DOWN][case.method.input_leaf].shape[0]
    return PerExpert(
        {
            projections: [_linear_adapter(case, projections, expert, tied=tied) for expert in range(num_experts)]
            for projections in (GATE_UP, (DOWN,))
        }
    )


def _reference(case: Case, experts: FrozenExperts) -> torch.Tensor:
    """Every expert on every token through merged weights, in fp64; unchosen experts have weight 0."""
    x_TD = case.x_TD.double()
    weight_TE = torch.zeros(len(x_TD), len(experts), dtype=torch.float64)
    weight_TE = weight_TE.scatter_add(1, case.ids_TK, case.weights_TK.double())
    y_TD = torch.zeros_like(x_TD)
    for expert in range(len(experts)):
        gate, up, down = (case.merged(experts, projection, expert) for projection in (GATE, UP, DOWN))
        hidden = functional.silu(x_TD @ gate.T) * (x_TD @ up.T)
        y_TD = y_TD + weight_TE[:, expert, None] * (hidden @ down.T)
    return y_TD


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.abs().max() > 0
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@METHODS
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "split"])
@pytest.mark.parametrize("name", FORMATS)
def test_outputs_and_gradients_are_those_of_merged_weights(name, tied, method):
    experts, case = _experts(FORMATS[name], 8), Case.random(8, method=method, tied=tied)
    y_TD = case.run(experts, activations="none", adapter=_adapter(case, tied=tied))
    expected_TD = _reference(case, experts)
    assert _relative(y_TD, expected_TD) < 1e-5  # measured 7e-7
    for actual, expected in zip(case.gradients(y_TD), case.gradients(expected_TD), strict=True):
        assert _relative(actual, expected) < 1e-5  # measured at most 2e-6


@METHODS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_results_are_the_same_bits_for_any_chunk_size(name, dtype, method):
    experts, case = _experts(FORMATS[name], 8), Case.random(8, dtype=dtype, method=method)
    results = []
    for chunk in (1, 3, 8, 100):
        y_TD = case.run(experts, chunk=chunk, adapter=_adapter(case))
        results.append([y_TD, *case.gradients(y_TD)])
    assert all(result.abs().max() > 0 for result in results[0])
    for other in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], other, strict=True))


def test_the_order_in_which_the_router_lists_experts_is_irrelevant():
    experts, case = _experts(Int4Format(), 8), Case.random(8, dtype=torch.bfloat16)
    flipped = dataclasses.replace(case, ids_TK=case.ids_TK.flip(1), weights_TK=case.weights_TK.flip(1))
    y_TD = case.run(experts)
    assert y_TD.abs().max() > 0
    assert torch.equal(y_TD, flipped.run(experts))


def test_a_rotation_that_experts_share_stands_before_dispatch():
    experts, case = _experts(Int4Format(), 8), Case.random(8, tied=True)
    gate_up, down = (_Oft([case.tensors[projection]["oft_R"][0]]) for projection in (GATE, DOWN))
    adapter = PerExpert({(DOWN,): [down] * 8}, common_input=lambda x_TD: gate_up.inputs(x_TD)[0])
    same = {name: {"oft_R": leaves["oft_R"][:1].expand_as(leaves["oft_R"])} for name, leaves in case.tensors.items()}
    y_TD = case.run(experts, activations="none", adapter=adapter)
    expected_TD = _reference(dataclasses.replace(case, tensors=same), experts)
    assert _relative(y_TD, expected_TD) < 1e-5
    for actual, expected in zip(case.gradients(y_TD), case.gradients(expected_TD), strict=True):
        assert _relative(actual, expected) < 1e-5


class _Unfused(torch.nn.Module):
    """A layer that holds its experts as separate linears, under the names of a checkpoint."""

    def __init__(self, experts: FrozenExperts):
        super().__init__()
        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: self._linear(getattr(experts, name)[expert]) for name in SHAPES})
            for expert in range(len(experts))
        )

    @staticmethod
    def _linear(stored: StoredWeight) -> torch.nn.Linear:
        linear = torch.nn.Linear(stored.columns, stored.rows, bias=False)
        linear.weight.data.copy_(stored.dequantize(torch.float32))
        return linear

    def forward(self, x_TD, ids_TK, weights_TK):
        y_TD = torch.zeros_like(x_TD)
        for expert, own in enumerate(self.experts):
            weight_T = (weights_TK * (ids_TK == expert)).sum(1, keepdim=True)
            hidden = functional.silu(own[GATE](x_TD)) * own[UP](x_TD)
            y_TD = y_TD + weight_T * own[DOWN](hidden)
        return y_TD


@METHODS
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "split"])
def test_names_round_trip_through_safetensors_and_load_in_peft(method, tied, tmp_path):
    from peft import PeftModel

    experts, case = _experts(Int4Format(), 4), Case.random(4, method=method, tied=tied)
    tensors = {
        tensor_name(expert_module("experts", projection, expert), leaf): tensor[expert].detach().contiguous()
        for projection, leaves in case.tensors.items()
        for leaf, tensor in leaves.items()
        for expert in range(4)
    }
    sent = Adapter(tensors, AdapterConfig(method=method, target_modules=tuple(SHAPES)))
    received = Adapter.decode(sent.encode())
    received.check({expert_module("experts", name, e): shape for name, shape in SHAPES.items() for e in range(4)})
    assert received.digest() == sent.digest()
    # Not a language model: peft would ask for its generate().
    (tmp_path / "adapter_config.json").write_text(json.dumps(received.config.to_peft() | {"task_type": None}))
    (tmp_path / "adapter_model.safetensors").write_bytes(received.to_peft_file())
    peft_model = PeftModel.from_pretrained(_Unfused(experts), tmp_path)
    expected_TD = peft_model(case.x_TD, case.ids_TK, case.weights_TK)
    base_TD = case.run(experts, activations="none")
    y_TD = case.run(experts, activations="none", adapter=_adapter(case, tied=tied))
    assert _relative(y_TD, base_TD) > 1e-2
    assert _relative(y_TD, expected_TD) < 1e-5


def test_fp8_inputs_are_rounded_as_deployed_and_pass_the_gradient_through():
    experts, case = _experts(Fp8Format(), 4), Case.random(4)
    deployed, plain = (case.run(experts, activations=mode) for mode in ("deployed", "none"))
    error = _relative(deployed, plain)
    assert 1e-4 < error < 0.1  # E4M3 keeps three bits: measured 0.03
    assert _relative(case.gradients(deployed)[0], case.gradients(plain)[0]) < 0.2


def test_one_expert_equals_the_frozen_linears():
    experts, case = _experts(Int4Format(), 1), Case.random(1, top_k=1, dtype=torch.bfloat16)
    ones = torch.ones_like(case.weights_TK)
    y_TD = expert_mlp(case.x_TD, case.ids_TK, ones, experts, buffer=ChunkBuffer(1))
    gate, up = frozen_matmul(case.x_TD, experts.stored(0, (GATE, UP)), chunk_bytes=2**26).chunk(2, -1)
    expected = frozen_matmul(functional.silu(gate) * up, experts.stored(0, (DOWN,)), chunk_bytes=2**26)
    assert torch.equal(y_TD, expected)


def test_backward_multiplies_once_with_each_weight_and_forms_no_weight_gradient():
    experts, case = _experts(Int4Format(), 8), Case.random(8)
    with FlopCounterMode(display=False) as forward:
        y_TD = case.run(experts)
    with FlopCounterMode(display=False) as backward:
        case.gradients(y_TD)
    rows = case.ids_TK.numel()
    assert forward.get_total_flops() == rows * 2 * 3 * HIDDEN * FFN
    assert backward.get_total_flops() == forward.get_total_flops()


def test_no_tokens():
    experts, case = _experts(Int4Format(), 4), Case.random(4, tokens=0)
    assert case.run(experts).shape == (0, HIDDEN)


def test_refusals():
    experts, case = _experts(Int4Format(), 4), Case.random(4)
    with pytest.raises(ValueError, match="expert ids from 1 to 4: must be 0 to 3"):
        dataclasses.replace(case, ids_TK=case.ids_TK % 4 + 1).run(experts)
    with pytest.raises(ValueError, match="expert ids"):
        dataclasses.replace(case, ids_TK=case.ids_TK[1:]).run(experts)
    with pytest.raises(ValueError, match="same experts"):
        dataclasses.replace(experts, down_proj=[experts.down_proj[0]])
    with pytest.raises(ValueError, match="0 experts in a chunk"):
        case.run(experts, chunk=0)
