"""This module notices that the frozen base in memory is no longer what was loaded.

The manifest of ``base.recording`` is a digest of the base as it is stored, from before SGLang repacks it, so it cannot be made a second
time. What is resident afterwards is summed up instead, when it has been loaded and whenever it is asked for: each tensor is a
vector of 64-bit words, and its sum is that of the words times odd random factors, which no other process knows, modulo 2^64. One
changed word always changes the sum, and other changes miss it with a probability of about 2^-32.
"""

import torch

# So short on a CPU that torch computes a chunk on the calling thread: threads of its own would hold up the forward pass.
CHUNK_WORDS = {"cpu": 1 << 14, "cuda": 1 << 24}
_WORD_BYTES = 8


class ResidentBase:
    """A ``ResidentBase`` holds the sum of every tensor of a model, as they are when it is made.

    It keeps no copy of the tensors. Summing reads each of them once, on the thread that asks.

    Args:
        model: SGLang's model, loaded, without slots.
    """

    def __init__(self, model: torch.nn.Module):
        self._holders = [
            (f"{name}.{leaf}", module, leaf)
            for name, module in model.named_modules()
            for leaf, value in {**module._parameters, **module._buffers, **vars(module)}.items()
            if isinstance(value, torch.Tensor) and value.numel()
        ]
        device = next(model.parameters()).device
        self._factors = torch.randint(-(2**63), 2**63 - 1, (CHUNK_WORDS[device.type],), device=device) | 1
        self._loaded = self._sums()

    def changed(self) -> list[str]:
        """Returns the names of the tensors that are not what was loaded, summing all of them now."""
        now = self._sums()
        return [
            name for (name, _, _), same in zip(self._holders, (now == self._loaded).tolist(), strict=True) if not same
        ]

    @torch.no_grad()
    def _sums(self) -> torch.Tensor:
        return torch.stack([self._sum(getattr(module, leaf)) for _, module, leaf in self._holders])

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum of one tensor, int64; the device is not waited for."""
        stored = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(self._factors.device)
        if padding := -stored.numel() % _WORD_BYTES:
            stored = torch.nn.functional.pad(stored, (0, padding))
        total = torch.zeros((), dtype=torch.int64, device=self._factors.device)
        for words in stored.view(torch.int64).split(len(self._factors)):
            total = total * self._factors[0] + (words * self._factors[: words.numel()]).sum()
        return total
