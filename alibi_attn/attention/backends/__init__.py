"""One module a way to compute the same attention; they never import one another.

Each has
    why_not(spec, query, key, value) -> str | None     what it cannot do about this call; never what would be slow
    visits(spec, query, key, value | None)             (reach, scores) [B, H] of what `run` would read; None = everything
    run(spec, query, key, value) -> (output, lse)      lse is None where `spec.return_lse` is False
"""
