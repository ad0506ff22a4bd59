"""This package is the HTTP process: it has the routes of the slots, and the versions in every answer."""
