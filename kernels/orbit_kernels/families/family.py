"""This module defines what a module of this folder says about its family, and how an architecture is read with it."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from orbit_kernels.families.architecture import DecoderArchitecture, LatentAttention, MixtureOfExperts
from orbit_kernels.formats import read_base_scheme

# Fields that change the mathematics in a way that no family implements, with the values that leave it alone.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "sliding_window": (None,),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A ``Family`` is the decoders that one configuration describes.

    Args:
        architecture: the entry of ``architectures`` in ``config.json``.
        model_types: values of ``model_type`` there.
        prefix: of every tensor's name in the checkpoint, empty or ending in a dot.
        rotary: makes transformers' module of the rotary frequencies from the text model's configuration.
        rope_types: values of ``rope_parameters.rope_type`` that are implemented.
        qk_norm: whether queries and keys are normalised per head.
        latent: reads the attention over latents from the text model's configuration, None for grouped-query attention.
        moe: reads the experts from it, None for a dense model.
        published: fields of ``config.json`` that SGLang 0.5.12 reads without a default, with the values for which its model
            of the family is made.
    """

    architecture: str
    model_types: tuple[str, ...]
    prefix: str = ""
    rotary: Callable[[Any], Any]
    rope_types: tuple[str, ...] = ("default", "llama3")
    qk_norm: bool = False
    latent: Callable[[Any], LatentAttention] | None = None
    moe: Callable[[Any], MixtureOfExperts] | None = None
    published: Mapping[str, Any] = MappingProxyType({})

    def read(self, hf_config: Any) -> DecoderArchitecture:
        """Returns the decoder that a transformers configuration of this family describes.

        Raises:
            ValueError: a quantisation, or a field that changes the mathematics, is not supported.
        """
        base = read_base_scheme(hf_config.to_dict())
        text = hf_config.get_text_config()
        self._check_fields(text)
        rotary = self.rotary(text)
        return DecoderArchitecture(
            prefix=self.prefix,
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            ffn_size=text.intermediate_size,
            vocab_size=text.vocab_size,
            max_positions=text.max_position_embeddings,
            num_heads=text.num_attention_heads,
            num_kv_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            norm_eps=text.rms_norm_eps,
            qk_norm=self.qk_norm,
            tied_embeddings=bool(text.tie_word_embeddings),
            dtype=base.dense.dtype,
            base=base,
            latent=None if self.latent is None else self.latent(text),
            moe=None if self.moe is None else self.moe(text),
            inv_freq=rotary.inv_freq.float(),
            rotary_scale=rotary.attention_scaling,
        )

    def _check_fields(self, text: Any) -> None:
        for field, neutral in _NEUTRAL_VALUES.items():
            value = getattr(text, field, None)
            if value not in neutral:
                raise ValueError(f"{field}={value!r}: only {neutral[0]!r} is implemented; use another checkpoint")
        layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
        if layer_types != {"full_attention"}:
            raise ValueError(f"layer_types={sorted(layer_types)}: only full_attention is implemented")
        rope = text.rope_parameters
        if rope["rope_type"] not in self.rope_types:
            raise ValueError(
                f"rope_parameters.rope_type={rope['rope_type']!r}: must be one of {', '.join(self.rope_types)}"
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"rope_parameters.partial_rotary_factor={rope['partial_rotary_factor']}: only 1.0 is implemented"
            )
