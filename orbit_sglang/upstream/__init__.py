"""Changes to SGLang: how one is made, and the proof that it is in place."""
