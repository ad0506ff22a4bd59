"""The HTTP process: routes of the slots, and the versions in every answer."""
