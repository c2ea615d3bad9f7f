"""Settings for every test: the same examples each time, and no wall-clock deadline on a busy machine."""

from hypothesis import settings

settings.register_profile("alibi-attn", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("alibi-attn")
