"""Multi-head latent attention of DeepSeek-V3 and Kimi-K2 (SGLang's ``DeepseekV2AttentionMLA``) on any CPU.

A server caches the latent of keys and values and multiplies the halves of ``kv_b_proj`` into queries and outputs
("absorbed", arXiv:2405.04434, section 2.1.2). SGLang 0.5.12 does that on a CPU with its AMX kernels only; these hooks let
it compute on any, in plain PyTorch, and let it load every format there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
from sglang.srt.plugins.hook_registry import HookType

from orbit_kernels.formats.int4 import SHAPE_LEAF
from orbit_kernels.frozen.product import StoredWeight
from orbit_kernels.linears.fusing import LATENTS
from orbit_sglang.base import stored
from orbit_sglang.startup.enabled import slots_enabled
from orbit_sglang.upstream.hooks import Hook

_MODEL = "sglang.srt.models.deepseek_v2."
_COMMON = "sglang.srt.models.deepseek_common."
_LOADER = _COMMON + "deepseek_weight_loader.DeepseekV2WeightLoaderMixin."


def hook_table() -> list[Hook]:
    """The hooks on this attention; that of ``model.latent_attention`` comes first."""
    after, around = HookType.AFTER, HookType.AROUND
    return [
        Hook(
            _MODEL + "DeepseekV2AttentionMLA.__init__",
            after,
            after_init,
            ("self", "config", "hidden_size"),
            cpu_only=True,
        ),
        Hook(
            _COMMON + "attention_backend_handler.AttentionBackendRegistry.get_handler",
            around,
            around_handler,
            ("cls", "backend_name"),
            cpu_only=True,
        ),
        Hook(
            _MODEL + "get_rope_wrapper",
            around,
            around_rope,
            ("head_size", "rotary_dim", "max_position", "base", "is_neox_style", "rope_scaling"),
            cpu_only=True,
        ),
        Hook(_LOADER + "do_load_weights", around, around_load, ("self", "weights", "is_nextn"), cpu_only=True),
        Hook(_LOADER + "post_load_weights", around, around_absorb, ("self", "is_nextn"), cpu_only=True),
    ]


def after_init(result: None, attention: DeepseekV2AttentionMLA, *args: Any, **kwargs: Any) -> None:
    """After ``__init__``: quantised weights again, now with room for the scales of each latent's projection."""
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
    """Around ``get_handler``: absorbed attention for prompts too, where SGLang would choose another path of Triton's.

    Prefill and decode then compute the same function, and cached latents are the only ones.
    """
    return _absorbed if backend_name == "torch_native" else original(registry, backend_name)


def _absorbed(attention: DeepseekV2AttentionMLA, forward_batch: Any) -> AttnForwardMethod:
    return AttnForwardMethod.MLA


def around_rope(original: Callable, *args: Any, device: str | None = None, **kwargs: Any) -> torch.nn.Module:
    """Around ``get_rope_wrapper``, which knows nothing but YaRN on a CPU (``rotary_embedding/factory.py:379``)."""
    rope_scaling = kwargs.get("rope_scaling")
    return original(*args, device=device if rope_scaling else None, **kwargs)


def around_load(
    original: Callable, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any
) -> None:
    """Around ``do_load_weights``: let it concatenate the tensors of both latents' projections, whatever their rank."""
    original(model, _concatenable(weights) if slots_enabled() else weights, *args, **kwargs)


def _concatenable(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """SGLang 0.5.12 takes the first of two scalars for both (``deepseek_weight_loader.py:301``), and has room for one shape."""
    for name, tensor in weights:
        *_, leaf, kind = name.split(".")
        if leaf not in LATENTS:
            yield name, tensor
        elif kind != SHAPE_LEAF:
            yield name, tensor.reshape(1) if tensor.dim() == 0 else tensor


def around_absorb(original: Callable, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Around ``post_load_weights``: leave it to ``absorb``, which follows; SGLang would quantise the weight once more."""
    if not slots_enabled():
        original(model, *args, **kwargs)


def absorb(model: torch.nn.Module, linears: Mapping[str, Mapping[str, StoredWeight]]) -> None:
    """Give every attention the halves of its ``kv_b_proj``, dequantised in the activations' dtype.

    They are laid out as ``post_load_weights`` does it (``deepseek_weight_loader.py:585``): ``w_kc`` [heads, plain width,
    latent], the latent's stride larger than the width's, and ``w_vc`` [heads, latent, value width], likewise.

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
