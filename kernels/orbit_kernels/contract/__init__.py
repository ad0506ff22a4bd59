"""This package says what trainer and server tell each other: versions, payload, routes, answers, errors, options."""
