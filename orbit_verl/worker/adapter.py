"""The trained part of the policy is one adapter over all frozen linears of a model.

A rank holds the tensors that belong to its layers and experts and to its share of each linear. What leaves or enters a
process is the whole adapter: ``whole``, ``export`` and ``load``; snapshots are of what the rank holds.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from orbit_kernels.adapters.config import tensor_name
from orbit_kernels.adapters.oft import reference as oft
from orbit_kernels.contract.payload import Adapter
from orbit_verl.config.keys import AdapterSettings
from orbit_verl.model.adapters import ADAPTERS, OFTAdapter
from orbit_verl.model.layout import ParallelLayout
from orbit_verl.model.linear import FrozenLinear
from orbit_verl.worker.gathering import gather_scalars, whole_tensors

logger = logging.getLogger(__name__)

ORTHOGONALITY_LIMIT = 0.05
"""Past this orthogonality error a warning is logged; the five-term series reaches it at a block norm of about 0.37."""

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class TrainerAdapter:
    """A `TrainerAdapter` is the adapter over the frozen linears of a model.

    ``OrbitEngineConfig.check`` has been passed.

    Args:
        linears: those of this rank, each with the Hugging Face name of the module that holds its parts
            (``model.naming.adapted_linears``).
        shapes: rows and columns of the linears of all ranks, by name (``model.targets.adapted_shapes``).
        settings: kind, sizes, targets and precision.
        layout: what this rank holds.
    """

    def __init__(
        self,
        linears: Sequence[tuple[str, FrozenLinear]],
        shapes: Mapping[str, tuple[int, int]],
        settings: AdapterSettings,
        layout: ParallelLayout,
    ):
        self.config = settings.to_adapter_config()
        self.tied, self._layout, self._shapes = settings.fused == "tied", layout, dict(shapes)
        self.dtype = _DTYPES[settings.dtype]
        self._linears = [linear for _, linear in linears]
        self._tensors: dict[str, nn.Parameter] = {}
        self._whole_shapes = {
            self._owner(tensor_name(module, leaf)): shape
            for module in filter(self.config.targets, shapes)
            for leaf, shape in self.config.method.shapes(*shapes[module], module).items()
        }
        for prefix, linear in linears:
            self._attach(prefix, linear, settings)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Returns this rank's trained tensors by peft's name; one that parts share goes by its first part's name."""
        return dict(self._tensors)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the whole tensors of all ranks.

        Their names are those of ``named_parameters`` on a rank that held everything.
        """
        return dict(self._whole_shapes)

    @property
    def num_bytes(self) -> int:
        """Returns the size of this rank's trained tensors; a file of peft's is larger when parts share one."""
        return sum(parameter.nbytes for parameter in self.named_parameters().values())

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields copies of all ranks' tensors by ``named_parameters``' names; all ranks iterate, before the next step."""
        return whole_tensors(self._tensors, lambda name: {name: self._tensors[name]}, self._whole_shapes, self._layout)

    def whole_of_parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns the same under all of peft's names: a copy that parts share goes by each part's."""
        whole = self.whole()  # now, and not when the first is taken
        return (
            (part, tensor)
            for name, tensor in whole
            for part in (self.config.tied_names(name) if self.tied else (name,))
        )

    def export(self) -> Adapter:
        """Returns a copy of the whole adapter, on every rank; later training does not change it."""
        return Adapter(dict(self.whole()), self.config, self.tied)

    @torch.no_grad()
    def load(self, adapter: Adapter) -> None:
        """Replaces the trained tensors by those of a whole adapter, of which each rank takes its own.

        Raises:
            ValueError: ``check`` refuses; nothing is changed then.
        """
        self.check(adapter)
        whole = adapter.untied().tensors
        for name, tensor in self._tensors.items():
            tensor.copy_(self._layout.tensor.own(whole[name], tensor.shape))

    def check(self, adapter: Adapter) -> None:
        """Holds a whole adapter against the model and the run's settings.

        Raises:
            ValueError: another configuration or dtype, parts that share a tensor differ, or ``Adapter.check`` refuses.
        """
        if adapter.config != self.config:
            theirs, ours = _what_differs(adapter.config.to_peft(), self.config.to_peft())
            raise ValueError(
                f"adapter configuration {theirs} differs from the run's {ours}; set orbit.adapter.* to the adapter's values"
            )
        adapter.check(self._shapes)
        self._check_values(adapter)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Runs the body on the frozen base, bit for bit; the adapter is back afterwards even when the body raises."""
        before = [linear.adapter_enabled for linear in self._linears]
        for linear in self._linears:
            linear.adapter_enabled = False
        try:
            yield
        finally:
            for linear, enabled in zip(self._linears, before, strict=True):
                linear.adapter_enabled = enabled

    @contextlib.contextmanager
    def replaced_by(self, snapshot: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Runs the body with a snapshot's tensors; the own ones are back afterwards even when the body raises."""
        own = self.snapshot()
        self.restore(snapshot)
        try:
            yield
        finally:
            self.restore(own)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Clones this rank's tensors by ``named_parameters``' names, on a CPU too, where ``.cpu()`` would alias."""
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters().items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Puts the tensors of ``snapshot`` back.

        Raises:
            ValueError: the snapshot is of another adapter.
        """
        parameters = self.named_parameters()
        if snapshot.keys() != parameters.keys():
            raise ValueError(
                f"snapshot of {len(snapshot)} tensors: must be one that snapshot() of this adapter returned"
            )
        for name, parameter in parameters.items():
            parameter.copy_(snapshot[name])

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Returns metrics of the method over all ranks' tensors; all ranks call it.

        OFT's is the largest orthogonality error, about which a warning is logged past the limit.
        """
        if self.config.type != "oft":
            return {}
        adapters = [linear.adapter for linear in self._linears if isinstance(linear.adapter, OFTAdapter)]
        errors = [oft.orthogonality_error(r).max().item() for adapter in adapters for r in adapter.rotations()]
        # torch's maximum of NaN and a number is NaN, Python's the first of them.
        error = torch.tensor(errors, dtype=torch.float64).max().item()
        error = torch.tensor(gather_scalars(error, dist.group.WORLD), dtype=torch.float64).max().item()
        if not error <= ORTHOGONALITY_LIMIT:
            logger.warning(
                "orthogonality error %.3g is not below %.3g: the Cayley-Neumann series no longer rotates; lower the learning "
                "rate or set orbit.adapter.cayley_neumann_terms=null",
                error,
                ORTHOGONALITY_LIMIT,
            )
        return {"orbit/oft/orthogonality_error_max": error}

    def _attach(self, prefix: str, linear: FrozenLinear, settings: AdapterSettings) -> None:
        targets = [part for part in linear.parts if self.config.targets(f"{prefix}.{part}")]
        if not targets:
            return
        method = self.config.method

        def initial(part: str) -> Mapping[str, torch.Tensor]:
            share, generator = linear.shares[part], _generator(settings.init_seed, f"{prefix}.{part}")
            own = share.of(method, method.initial(*share.shape, generator))
            return {leaf: tensor.clone(memory_format=torch.contiguous_format) for leaf, tensor in own.items()}

        linear.adapter = ADAPTERS[self.config.type](
            method,
            linear.parts,
            targets,
            tied=self.tied,
            initial=initial,
            dtype=self.dtype,
            device=linear.device,
        )
        for (part, leaf), tensor in linear.adapter.tensors().items():
            self._tensors[self._owner(tensor_name(f"{prefix}.{part}", leaf))] = tensor

    def _owner(self, name: str) -> str:
        """Returns the name under which a tensor is trained, which is that of the first part with which it is shared."""
        return self.config.tied_names(name)[0] if self.tied else name

    def _check_values(self, adapter: Adapter) -> None:
        # Those of other ranks too, so that all ranks refuse alike.
        tensors = adapter.untied().tensors
        for name, tensor in tensors.items():
            shared = self._owner(name)
            if tensor is not tensors[shared] and not torch.equal(tensor, tensors[shared]):
                raise ValueError(f"{name} differs from {shared}: fused='tied' shares one tensor; set fused='split'")
            if torch.promote_types(tensor.dtype, self.dtype) != self.dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype}: a {self.dtype} adapter would round it; set orbit.adapter.dtype=fp32"
                )


def _generator(seed: int, module: str) -> torch.Generator:
    """Returns a generator that is the same for a linear whatever other linears, ranks or layers there are."""
    digest = hashlib.sha256(f"{seed}/{module}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _what_differs(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the entries of each that the other has not, as JSON.

    Of two methods it returns their names, as the rest follows from these.
    """
    if left["peft_type"] != right["peft_type"]:
        left, right = ({"peft_type": one["peft_type"]} for one in (left, right))
    return tuple(
        json.dumps({key: value for key, value in one.items() if key not in other or other[key] != value})
        for one, other in ((left, right), (right, left))
    )
