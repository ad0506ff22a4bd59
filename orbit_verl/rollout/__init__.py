"""This package holds verl's rollout actors: agent loops, and the SGLang server with slots."""
