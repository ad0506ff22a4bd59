"""A verl platform for machines without an accelerator: torch on CPU, gloo, Ray's logical GPUs as worker slots."""

import contextlib
import types

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "orbit_cpu"


def _device_module() -> types.ModuleType:
    """What verl expects of ``torch.cuda``, on CPU; memory counters are 0 because torch keeps none there."""
    module = types.ModuleType("orbit_cpu_device")
    for name in ("current_stream", "stream", "Stream", "is_initialized"):
        setattr(module, name, getattr(torch.cpu, name))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(module, name, lambda *args, **kwargs: 0)
    for name in (
        "empty_cache",
        "synchronize",
        "set_device",
        "ipc_collect",
        "reset_peak_memory_stats",
        "set_per_process_memory_fraction",
    ):
        setattr(module, name, lambda *args, **kwargs: None)
    module.is_available = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: "cpu"
    module.get_device_name = lambda *args: "CPU"
    module.mem_get_info = lambda *args: (0, 0)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    return module


@PlatformRegistry.register(platform=NAME)
class CpuPlatform(PlatformBase):
    """Chosen by verl's own detection when no accelerator is found; ``VERL_PLATFORM=orbit_cpu`` forces it.

    Ray hands out its logical "GPU" resource, since verl counts no other (verl 0.9.1, single_controller/ray/base.py:226).
    """

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE_MODULE)

    def is_available(self):
        """Always: there is a CPU."""
        return True

    def is_platform_available(self, use_smi_check=False):
        """Whether detection may choose it; it is asked last, after every accelerator."""
        return not torch.cuda.is_available()

    def current_device(self):
        """Passed to ``Tensor.to`` by verl, where an integer would mean an accelerator."""
        return "cpu"

    def device_count(self):
        """One."""
        return 1

    def set_device(self, device_index):
        """Nothing to choose."""

    def synchronize(self, device_index=None):
        """Nothing runs asynchronously."""

    def manual_seed(self, seed):
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        """No caching allocator."""

    def empty_cache(self):
        """No caching allocator."""

    def get_device_capability(self, device_index=0):
        """No compute capability."""
        return (None, None)

    def communication_backend_name(self):
        """Gloo."""
        return "gloo"

    def visible_devices_envvar(self):
        """Set by Ray for its logical GPUs, read back by verl's SGLang replica."""
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        """No profiler ranges."""
        yield

    def profiler_start(self):
        """No device profiler."""

    def profiler_stop(self):
        """No device profiler."""

    def ray_resource_name(self):
        """Ray's logical resource."""
        return "GPU"

    def ray_noset_envvars(self):
        """None."""
        return []

    def is_ipc_supported(self):
        """No device memory to share."""
        return False

    def rollout_env_vars(self):
        """Environment of the SGLang server actor."""
        return {"SGLANG_USE_CPU_ENGINE": "1"}

    def cudart(self):
        """No CUDA runtime."""
        return None


_DEVICE_MODULE = _device_module()
