import contextlib
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import harness  # noqa: E402
import quantized_models  # noqa: E402
import tiny_models  # noqa: E402


class Servers:
    """One running server at a time; the test modules are ordered so that each is started once."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._running: tuple | None = None
        self._server: harness.Server | None = None

    def checkpoint(self, family: str, dtype: torch.dtype = torch.float32) -> pathlib.Path:
        folder = self._folder / f"{family}-{dtype}"
        save = getattr(tiny_models, f"save_{family}")
        return folder if folder.exists() else save(folder, dtype)

    def ragged(self, family: str) -> pathlib.Path:
        """A BF16 checkpoint of sizes that no block divides."""
        folder = self._folder / f"{family}-ragged"
        save = {"qwen3": tiny_models.save_qwen3, "llama": tiny_models.save_llama}[family]
        return folder if folder.exists() else save(folder, torch.bfloat16, tiny_models.RAGGED_SIZES)

    def quantized(self, family: str, style: str, plain: str = "lm_head") -> pathlib.Path:
        """It in a low-precision format, but for the linears with ``plain`` in their name."""
        folder = self._folder / f"{family}-{style}-{plain}"
        return folder if folder.exists() else quantized_models.save(self.ragged(family), folder, style, plain)

    def get(self, family: str, *flags: str, key: str | None = None, style: str | None = None) -> harness.Server:
        wanted = (family, style, *flags)
        if self._running != wanted:
            self.stop()
            self._running = wanted
            log = self._folder / f"{family}-{len(list(self._folder.glob('*.log')))}.log"
            folder = self.checkpoint(family) if style is None else self.quantized(family, style)
            self._server = self._stack.enter_context(harness.serve(folder, log, *flags, key=key))
        if self._server is None:
            pytest.fail(f"the server {wanted} did not start; see the first test that needs it")
        return self._server

    def stop(self) -> None:
        self._running = self._server = None
        self._stack.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    servers = Servers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture
def qwen3(servers):
    """Qwen3, tied rotations, overlap schedule; idle, and on the base model."""
    return servers.get("qwen3", *harness.QWEN3_FLAGS).idle_on_base()


@pytest.fixture
def llama(servers):
    """Llama with tied embeddings, split rotations, no overlap, small prefill chunks, an admin key."""
    return servers.get("llama", *harness.LLAMA_FLAGS, key=harness.KEY).idle_on_base()


@pytest.fixture
def recording(servers):
    """Qwen3-MoE that records routed experts; prompts in chunks, a KV cache that two long requests overfill."""
    return servers.get("qwen3_moe", *harness.RECORDING_FLAGS).idle_on_base()


@pytest.fixture
def lora(servers):
    """Llama with tied embeddings, LoRA with an A for each part."""
    return servers.get("llama", *harness.LORA_FLAGS).idle_on_base()
