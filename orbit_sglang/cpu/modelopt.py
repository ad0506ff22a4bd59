"""ModelOpt's NVFP4 behind SGLang's ``ModelOptFp4LinearMethod``."""

from sglang.srt.plugins.hook_registry import HookType

from orbit_sglang.cpu import linear
from orbit_sglang.upstream.hooks import Hook

_MODELOPT = "sglang.srt.layers.quantization.modelopt_quant."


def hook_table() -> list[Hook]:
    """The hooks of this family."""
    return [
        Hook(
            _MODELOPT + "ModelOptFp4Config.get_supported_act_dtypes",
            HookType.AFTER,
            linear.after_supported_act_dtypes,
            ("cls",),
            cpu_only=True,
        ),
        *linear.method_hooks(_MODELOPT + "ModelOptFp4LinearMethod."),
    ]
