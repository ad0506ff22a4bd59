"""This verl platform needs no accelerator: torch runs on the CPU, over gloo; Ray's logical GPUs are worker slots."""

import contextlib
import types

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "orbit_cpu"


def _device_module() -> types.ModuleType:
    """Returns what verl expects of ``torch.cuda``, on CPU; memory counters are 0 because torch keeps none there."""
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
    """verl's own detection chooses a `CpuPlatform` without an accelerator; ``VERL_PLATFORM=orbit_cpu`` forces it.

    Ray hands out its logical "GPU" resource, since verl counts no other
    (verl/single_controller/ray/base.py::ResourcePoolManager).
    """

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE_MODULE)

    def is_available(self):
        """Returns True, since a CPU is always there."""
        return True

    def is_platform_available(self, use_smi_check=False):
        """Says whether detection may choose it; it is asked last, after every accelerator."""
        return not torch.cuda.is_available()

    def current_device(self):
        """Returns what verl passes to ``Tensor.to``, where an integer would mean an accelerator."""
        return "cpu"

    def device_count(self):
        """Counts one device."""
        return 1

    def set_device(self, device_index):
        """Does nothing, since there is nothing to choose."""

    def synchronize(self, device_index=None):
        """Waits for nothing, since nothing runs asynchronously."""

    def manual_seed(self, seed):
        """Seeds torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        """Seeds torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        """Does nothing, since there is no caching allocator."""

    def empty_cache(self):
        """Does nothing, since there is no caching allocator."""

    def get_device_capability(self, device_index=0):
        """Returns no compute capability."""
        return (None, None)

    def communication_backend_name(self):
        """Names gloo."""
        return "gloo"

    def visible_devices_envvar(self):
        """Names the variable that Ray sets for its logical GPUs and verl's SGLang replica reads back."""
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        """Runs the body without a profiler range."""
        yield

    def profiler_start(self):
        """Does nothing, since there is no device profiler."""

    def profiler_stop(self):
        """Does nothing, since there is no device profiler."""

    def ray_resource_name(self):
        """Names Ray's logical resource."""
        return "GPU"

    def ray_noset_envvars(self):
        """Names no variables."""
        return []

    def is_ipc_supported(self):
        """Returns False, since there is no device memory to share."""
        return False

    def rollout_env_vars(self):
        """Returns the environment of the SGLang server actor."""
        return {"SGLANG_USE_CPU_ENGINE": "1"}

    def cudart(self):
        """Returns no CUDA runtime."""
        return None


_DEVICE_MODULE = _device_module()
