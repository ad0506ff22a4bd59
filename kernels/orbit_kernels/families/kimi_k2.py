"""Kimi's configurations, which transformers 5.9 does not know: a checkpoint's own Python files need not be run."""

from typing import Any

from transformers import AutoConfig, DeepseekV3Config, PretrainedConfig


class KimiK2Config(DeepseekV3Config):
    """Kimi-K2: DeepSeek-V3 by another name."""

    model_type = "kimi_k2"


class KimiK25Config(PretrainedConfig):
    """Kimi-K2.5 and K2.6: the language model is Kimi-K2; what sees images is left as it is.

    Args:
        text_config: fields of the language model.
    """

    model_type = "kimi_k25"
    sub_configs = {"text_config": KimiK2Config}

    def __init__(self, text_config: dict[str, Any] | KimiK2Config | None = None, **fields: Any):
        self.text_config = text_config if isinstance(text_config, KimiK2Config) else KimiK2Config(**(text_config or {}))
        super().__init__(**fields)


def register() -> None:
    """Let ``AutoConfig`` read both."""
    for config in (KimiK2Config, KimiK25Config):
        AutoConfig.register(config.model_type, config, exist_ok=True)
