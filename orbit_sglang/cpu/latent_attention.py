"""This module computes the latent attention of DeepSeek-V3 and Kimi-K2 on any CPU.

It is SGLang's ``DeepseekV2AttentionMLA``, multi-head latent attention. A server caches the latent of keys and values
and multiplies the halves of ``kv_b_proj`` into queries and outputs ("absorbed", arXiv:2405.04434, section 2.1.2).
SGLang 0.5.12 does that on a CPU with its AMX kernels only; these hooks let it compute on any, in plain PyTorch, and let
it load every format there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

from orbit_kernels.formats.int4 import SHAPE_LEAF
from orbit_kernels.frozen.product import StoredWeight
from orbit_kernels.linears.fusing import LATENTS
from orbit_sglang.base import stored
from orbit_sglang.startup.enabled import slots_enabled


def after_init(result: None, attention: DeepseekV2AttentionMLA, *args: Any, **kwargs: Any) -> None:
    """Creates quantised weights again, with room for scales of each latent's projection; runs after ``__init__``."""
    if not (attention.has_fused_proj and slots_enabled()):
        return
    layer = attention.fused_qkv_a_proj_with_mqa
    if stored.is_quantized(layer):
        layer.quant_method.create_weights(
            layer,
            layer.input_size,
            layer.output_sizes,
            layer.input_size,
            layer.output_size,
            layer.params_dtype,
            weight_loader=layer.weight_loader,
        )


def around_handler(original: Callable, registry: type, backend_name: str) -> Callable:
    """Chooses absorbed attention for prompts too; runs around ``get_handler``.

    SGLang would choose another path of Triton's there. Prefill and decode then compute the same function, and cached
    latents are the only ones.
    """
    return _absorbed if backend_name == "torch_native" else original(registry, backend_name)


def _absorbed(attention: DeepseekV2AttentionMLA, forward_batch: Any) -> AttnForwardMethod:
    return AttnForwardMethod.MLA


def around_rope(original: Callable, *args: Any, device: str | None = None, **kwargs: Any) -> torch.nn.Module:
    """Leaves out the device of an unscaled rotary embedding; runs around ``get_rope_wrapper``.

    On a CPU that knows nothing but YaRN (``rotary_embedding/factory.py::get_rope_cpu``).
    """
    rope_scaling = kwargs.get("rope_scaling")
    return original(*args, device=device if rope_scaling else None, **kwargs)


def around_load(
    original: Callable, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any
) -> None:
    """Lets it concatenate tensors of any rank of both latents' projections; runs around ``do_load_weights``."""
    original(model, _concatenable(weights) if slots_enabled() else weights, *args, **kwargs)


def _concatenable(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the latents' scalars with one dimension, and leaves out their shapes.

    SGLang 0.5.12 takes the first of two scalars for both, and has room for one shape
    (``deepseek_weight_loader.py::DeepseekV2WeightLoaderMixin.do_load_weights``).
    """
    for name, tensor in weights:
        *_, leaf, kind = name.split(".")
        if leaf not in LATENTS:
            yield name, tensor
        elif kind != SHAPE_LEAF:
            yield name, tensor.reshape(1) if tensor.dim() == 0 else tensor


def around_absorb(original: Callable, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Leaves the work to ``absorb``, which follows; runs around ``post_load_weights``.

    SGLang would quantise the weight once more.
    """
    if not slots_enabled():
        original(model, *args, **kwargs)


def absorb(model: torch.nn.Module, linears: Mapping[str, Mapping[str, StoredWeight]]) -> None:
    """Gives every attention the halves of its ``kv_b_proj``, dequantised in the activations' dtype.

    They are laid out as ``deepseek_weight_loader.py::DeepseekV2WeightLoaderMixin.post_load_weights`` does it: ``w_kc``
    [heads, plain width, latent], the latent's stride larger than the width's, and ``w_vc`` [heads, latent, value
    width], likewise.

    Args:
        model: SGLang's, loaded.
        linears: the stored weights by SGLang's name of the linear, then by Hugging Face's.
    """
    for name, attention in model.named_modules():
        if not isinstance(attention, DeepseekV2AttentionMLA):
            continue
        (weight,) = linears[f"{name}.kv_b_proj"].values()
        widths = [attention.qk_nope_head_dim, attention.v_head_dim]
        heads = weight.dequantize(attention.kv_a_layernorm.weight.dtype).unflatten(0, (-1, sum(widths)))
        keys, values = heads.split(widths, dim=1)
        attention.w_kc = keys.transpose(1, 2).contiguous().transpose(1, 2)
        attention.w_vc = values.contiguous().transpose(1, 2)
