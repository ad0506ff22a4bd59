"""This module reads Kimi-K2.5 and K2.6, whose language model is a DeepSeek-V3.

transformers 5.9 does not know Kimi's configurations: they stand here, so that a checkpoint's own Python files need not be run.
"""

import dataclasses
from typing import Any

from transformers import AutoConfig, DeepseekV3Config, PretrainedConfig

from orbit_kernels.families import deepseek_v3

FAMILY = dataclasses.replace(
    deepseek_v3.FAMILY,
    architecture="KimiK25ForConditionalGeneration",
    model_types=("kimi_k25",),
    prefix="language_model.",
)


class KimiK2Config(DeepseekV3Config):
    """Kimi-K2 is DeepSeek-V3 by another name."""

    model_type = "kimi_k2"


class KimiK25Config(PretrainedConfig):
    """The language model of Kimi-K2.5 and K2.6 is Kimi-K2; what sees images is left as it is.

    Args:
        text_config: fields of the language model.
    """

    model_type = "kimi_k25"
    sub_configs = {"text_config": KimiK2Config}

    def __init__(self, text_config: dict[str, Any] | KimiK2Config | None = None, **fields: Any):
        self.text_config = text_config if isinstance(text_config, KimiK2Config) else KimiK2Config(**(text_config or {}))
        super().__init__(**fields)


def register() -> None:
    """Lets ``AutoConfig`` read both."""
    for config in (KimiK2Config, KimiK25Config):
        AutoConfig.register(config.model_type, config, exist_ok=True)
