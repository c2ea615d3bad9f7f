"""Proves that far keys cannot matter: norms, a lower bound of the log-sum-exp, the reach, and the tiles within it."""
