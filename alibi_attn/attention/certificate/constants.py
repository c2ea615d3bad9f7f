"""Every number on which the certificate rests, for all languages: the only place to change one. No framework is imported.

PyTorch, JAX and Triton import them. The C++ kernels are compiled with those in `FOR_CPP` and say what they were compiled with,
which is compared when they are loaded. docs/maths.md says why each allowance is enough.
"""

TILE = 64  # queries whose reach is decided together, and keys whose norms are
KEPT = 4  # the nearest keys, which no reach ever leaves out
VALUE_RATIO = 4.0  # a skipped value may be this many times longer than the longest kept one; more widens the reach

# Tiles of keys with the largest norms may be left out of the bound, and are visited one by one where they matter.
OUTLIER_CHOICES = (0, 1, 2, 4)  # how many; the cheapest choice is taken, for each head
OUTLIER_TILES = max(OUTLIER_CHOICES)
LOOP_OUTLIER_TILES = 2  # in the loop of JAX, which judges each of them every time around
LOOP_OUTLIER_SHARE = 1 / 16  # of the tolerance, for each of those; a far tile needs ln 16 nats more, the band ln 8/7

WORTH_LEAVING_OUT = 4  # tiles for which one with a large bias must stay the largest to be an outlier tile

TAIL_GROUP = 16  # keys whose weights are summed together, where tails are summed key by key

# What rounding may do. A sum of D products is off by less than (D + 2) units of Σ|terms|; bounds on them get more.
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
NORM_UNITS = 4  # and D of them, for a norm in fp32 or better
SCORE_UNITS = 64  # and D of them, for a score and for |scale|·‖q‖
REDUCED_PRODUCTS = 1.01 * 2.0**-8  # of ‖q‖·‖k‖: torch may be told to multiply fp32 in TF32 or bf16
LSE_NATS = {  # of a log-sum-exp as each loop finds it: its exponentials, its logarithm, its sums
    "native": 2.0**-9,  # a logarithm without its curve's last bits
    "fused": 2.0**-10,  # a device's approximate exp2 and log2, and 1 / (1 − e^(−m))
    "jax": 2.0**-6,  # whatever XLA makes of exp and log, over up to 2²⁴ keys
}
DEVICE_ROUNDING = 1.0 + 2.0**-18  # of a number on a GPU: a few operations, each off by less than 2⁻²²
DEVICE_PRODUCTS = 2.0**-9  # of ‖q‖·‖k‖ in a product that only bounds: TF32 keeps eleven bits of each

# The square of a number below these may be less than the smallest normal number, and vanish.
VANISHING = {"float32": 2.0**-63, "float64": 2.0**-511}

FOR_CPP: dict[str, float] = {
    "TILE": TILE,
    "KEPT": KEPT,
    "VALUE_RATIO": VALUE_RATIO,
    "OUTLIER_TILES": OUTLIER_TILES,
    "WORTH_LEAVING_OUT": WORTH_LEAVING_OUT,
    "TAIL_GROUP": TAIL_GROUP,
    "NORM_UNITS": NORM_UNITS,
    "SCORE_UNITS": SCORE_UNITS,
    "LSE_NATS": LSE_NATS["native"],
    "UNIT_FLOAT32": UNIT["float32"],
    "UNIT_FLOAT64": UNIT["float64"],
    "VANISHING_FLOAT32": VANISHING["float32"],
    "VANISHING_FLOAT64": VANISHING["float64"],
}
