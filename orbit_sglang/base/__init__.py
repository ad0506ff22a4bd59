"""The frozen base as the server loaded it: found again in SGLang's parameters, checked, digested."""
