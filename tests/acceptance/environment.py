"""Numbers of the acceptance tests in environment variables."""

import os


def number_of(name, default):
    """Returns the number in an environment variable, which may be missing or empty."""
    return int(os.environ.get(name) or default)
