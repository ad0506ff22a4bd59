"""What trainer and server say to each other: versions, payload, routes, answers, errors, options."""
