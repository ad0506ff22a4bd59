import os

import torch

# SGLang decides about its device when it is imported, whichever test does that first.
if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
