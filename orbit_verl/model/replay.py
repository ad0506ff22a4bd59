"""In router replay, routers take the experts that a record names for each token, in place of their own choice.

A record is verl's ``routed_experts``: ids of experts for every token of a sequence and every layer of the model, dense
ones too. That of mode R3 is the server's, as SGLang reports it; R2's is made here while the old log-probs are computed.
Weights are always those that the trainer's own scores give these experts.

A record has gaps: the server never ran the last token that it generated, verl fills what is missing with zeros (that
token, tokens of tools after the last generation, whole padding sequences), and dense layers have none. Experts of a
token are distinct, so a row that names one twice is a gap, and the router chooses by itself there. That needs two
experts a token.

Dimension suffixes: N tokens of a micro-batch, sequence after sequence; T tokens that this rank's routers see, in their
order; L layers of the model, K experts of a token.
"""

import collections
import contextlib
import functools
from collections.abc import Iterable, Iterator

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine

from orbit_kernels.families import DecoderArchitecture
from orbit_verl.model.router import FrozenRouter, Override

MODE_KEY = "actor_rollout_ref.actor.megatron.router_replay.mode"


def check_replay(mode: str, architecture: DecoderArchitecture) -> None:
    """Holds a mode of router replay against a model.

    Raises:
        ValueError: the model has no routers, or its gaps cannot be told from ids.
    """
    if mode == "disabled":
        return
    if architecture.moe is None:
        raise ValueError(f"{MODE_KEY}={mode}: the model is dense, it has no routers; set it to disabled")
    if architecture.moe.top_k < 2:
        raise ValueError(
            f"{MODE_KEY}={mode}: a token of this model takes one expert, so a record of expert 0 looks like none; set it to "
            "disabled"
        )


def token_places(input_ids: torch.Tensor, *, packed: bool, padded_length: int | None = None) -> torch.Tensor:
    """Returns where the rows that this rank's routers see stand in the micro-batch, as [T] int64, -1 for padding.

    This is the one place that knows how tokens are laid out: verl packs or pads these numbers as it does the tokens,
    and tensor-parallel ranks divide the sequence.

    Args:
        input_ids: nested, the sequences of the micro-batch.
        packed: whether verl packs sequences, or pads them.
        padded_length: to which verl pads, None for the longest sequence.
    """
    offsets = input_ids.offsets()
    numbers = torch.arange(1, int(offsets[-1]) + 1, device=offsets.device)
    nested = torch.nested.nested_tensor_from_jagged(numbers, offsets)
    if packed:
        places_BS = preprocess_thd_engine(nested)[0]
    else:
        places_BS = preprocess_bshd_engine(nested, forced_max_seqlen=padded_length)[0]
    # Megatron-Core's layers see [S, B, D].
    places_SB = places_BS.T.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
    return places_SB.flatten() - 1


class RouterReplay:
    """A `RouterReplay` holds what the routers of one model are told, and what they say back.

    Args:
        layers: Megatron-Core's, those that this rank holds.
        architecture: of the whole model.
        recomputes: whether layers may be computed again in backward.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], architecture: DecoderArchitecture, *, recomputes: bool):
        held = {layer.layer_number - 1: getattr(layer.mlp, "router", None) for layer in layers}
        self._routers: dict[int, FrozenRouter] = {layer: router for layer, router in held.items() if router is not None}
        self._held, self._num_layers, self._moe = list(held), architecture.num_layers, architecture.moe
        self._recomputes = recomputes
        self._replayed: dict[int, collections.deque[Override]] = {layer: collections.deque() for layer in self._routers}
        self._counts: collections.Counter[str] = collections.Counter()  # tensors, so that a GPU is not waited for

    @contextlib.contextmanager
    def through_backward(self) -> Iterator[None]:
        """Makes layers that are computed again in backward take the same experts again; it goes around a whole batch.

        Their micro-batches come in the order of the forward passes, whatever the schedule.
        """
        with contextlib.ExitStack() as stack:
            for layer, router in self._routers.items():
                stack.callback(self._replayed[layer].clear)
                stack.enter_context(router.overridden_by(functools.partial(self._take_again, layer)))
            yield

    @contextlib.contextmanager
    def replaying(self, record: torch.Tensor, input_ids: torch.Tensor, places_T: torch.Tensor) -> Iterator[None]:
        """Makes routers take the recorded experts in the body, which is a forward pass.

        Args:
            record: nested [sequence, token, L, K], an integer type.
            input_ids: nested, the sequences that it is of.
            places_T: see ``token_places``.

        Raises:
            ValueError: the record is of another model or of other sequences.
        """
        record_NLK = self._by_token(record, input_ids)
        record_TLK, is_token_T = record_NLK[places_T.clamp_min(0)], places_T >= 0
        with contextlib.ExitStack() as stack:
            for layer, router in self._routers.items():
                ids_TK = record_TLK[:, layer].to(router.weight.device, torch.int64)
                has_record_T = _are_distinct(ids_TK) & is_token_T.to(ids_TK.device)
                self._counts["tokens"] += is_token_T.sum()
                stack.enter_context(router.overridden_by(functools.partial(self._take, ids_TK, has_record_T)))
                if self._recomputes and torch.is_grad_enabled():
                    self._replayed[layer].append(functools.partial(_take, ids_TK, has_record_T))
            yield

    @contextlib.contextmanager
    def recording(self, input_ids: torch.Tensor, places_T: torch.Tensor, records: list[torch.Tensor]) -> Iterator[None]:
        """Lets routers choose by themselves in the body; their choice is appended to ``records`` when it ends.

        Args:
            input_ids, places_T: as for ``replaying``.
            records: gets one nested int16 tensor on the CPU, as ``replaying`` takes it, of the layers that this rank
                holds; verl joins those of the ranks.
        """
        chosen: dict[int, torch.Tensor] = {}

        def note(layer: int, own_TK: torch.Tensor) -> torch.Tensor:
            chosen[layer] = own_TK
            return own_TK

        with contextlib.ExitStack() as stack:
            for layer, router in self._routers.items():
                stack.enter_context(router.overridden_by(functools.partial(note, layer)))
            yield
        offsets, is_token_T = input_ids.offsets(), places_T >= 0
        record_NLK = offsets.new_zeros(int(offsets[-1]), len(self._held), self._moe.top_k, dtype=torch.int32)
        for layer, ids_TK in chosen.items():
            record_NLK[places_T[is_token_T], self._held.index(layer)] = ids_TK[is_token_T].int()
        # Each rank has the rows of its own tokens, and zeros elsewhere.
        record_NLK = reduce_from_tensor_model_parallel_region(record_NLK)
        records.append(torch.nested.nested_tensor_from_jagged(record_NLK.to("cpu", torch.int16), offsets.cpu()))

    def metrics(self) -> dict[str, float]:
        """Returns what this rank's routers replayed since the last call, over tokens and layers.

        It is empty when nothing was replayed. ``replayed`` is the share that had a record, ``other_choice`` the share
        of these for which the router itself would have chosen another set of experts.
        """
        counts = {name: int(count) for name, count in self._counts.items()}
        self._counts.clear()
        if not counts.get("tokens"):
            return {}
        return {
            "orbit/router_replay/replayed": counts["replayed"] / counts["tokens"],
            "orbit/router_replay/other_choice": counts["other_choice"] / max(counts["replayed"], 1),
        }

    def _take(self, ids_TK: torch.Tensor, has_record_T: torch.Tensor, own_TK: torch.Tensor) -> torch.Tensor:
        is_other_T = (ids_TK.sort(dim=-1).values != own_TK.sort(dim=-1).values).any(dim=-1)
        self._counts["replayed"] += has_record_T.sum()
        self._counts["other_choice"] += (is_other_T & has_record_T).sum()
        return _take(ids_TK, has_record_T, own_TK)

    def _take_again(self, layer: int, own_TK: torch.Tensor) -> torch.Tensor:
        replayed = self._replayed[layer]
        return replayed.popleft()(own_TK) if replayed else own_TK

    def _by_token(self, record: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns the record as [N, L, K]."""
        sequences, lengths = record.unbind(), input_ids.offsets().diff().tolist()
        expected = [(length, self._num_layers, self._moe.top_k) for length in lengths]
        found = [tuple(sequence.shape) for sequence in sequences]
        if found != expected:
            raise ValueError(
                f"routed_experts of shapes {found}: must be {expected}, one row for every token, layer and expert of a token; "
                "is the record of another model?"
            )
        record_NLK = torch.cat(sequences)
        lowest, highest = (int(bound) for bound in record_NLK.aminmax())
        if lowest < 0 or highest >= self._moe.num_experts:
            raise ValueError(
                f"routed_experts holds ids from {lowest} to {highest}: the model's experts are 0 to "
                f"{self._moe.num_experts - 1}; is the record of another model?"
            )
        return record_NLK


def _take(ids_TK: torch.Tensor, has_record_T: torch.Tensor, own_TK: torch.Tensor) -> torch.Tensor:
    """Returns the recorded ids of tokens that have a record, and the router's own of others."""
    return torch.where(has_record_T.unsqueeze(-1), ids_TK, own_TK)


def _are_distinct(ids_TK: torch.Tensor) -> torch.Tensor:
    """Says whether the ids of a row are all different, [T]."""
    return (ids_TK.sort(dim=-1).values.diff(dim=-1) != 0).all(dim=-1)
