"""All constants of the certificate, for all languages: the only place to change one. No framework is imported.

PyTorch, JAX and Triton import them. The C++ kernels are compiled with those in `FOR_CPP`, and loading checks that they were
compiled with the same values. docs/maths.md explains why each allowance is enough.
"""

TILE = 64  # queries whose reach is decided together, and keys whose norms are bounded together
NO_TILE = 2**28  # the first tile of a block that visits none; multiples of it fit int32
KEPT = 4  # the nearest keys, which no reach skips
VALUE_RATIO = (
    4.0  # a skipped value may be this many times longer than the longest kept one; a longer one widens the reach
)

# Tiles of keys with the largest norms may be left out of the bound; they are visited one by one if they matter.
OUTLIER_CHOICES = (0, 1, 2, 4)  # how many; each head gets the cheapest choice
OUTLIER_TILES = max(OUTLIER_CHOICES)
LOOP_OUTLIER_TILES = 2  # in JAX's loop, which checks every outlier tile in every iteration
LOOP_OUTLIER_SHARE = 1 / 16  # of the tolerance, for each of them: a far tile needs ln 16 nats more, the band ln 8/7

WORTH_LEAVING_OUT = 4  # a tile with a large bias is an outlier tile if it remains the largest for this many tiles

TAIL_GROUP = 16  # keys per group, if tails are summed key by key

MEASURED_SHARE = (
    1 / 8
)  # of the tolerance, for tiles whose weights are bounded by their computed scores; the rest is certified

# The key rule: a query leaves out a key, or a tile of keys, at distance d only if its share of the query's softmax is at most
# tolerance / (2·(d + KEY_RULE_TOKENS)). A limit per query alone lets one key lose that limit once per query.
KEY_RULE_TOKENS = 64

# Rounding errors. A sum of D products is off by less than (D + 2) units of Σ|terms|; its bounds allow for more.
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
NORM_UNITS = 4  # D + this many units for a norm in fp32 or better
SCORE_UNITS = 64  # D + this many units for a score and for |scale|·‖q‖
REDUCED_PRODUCTS = 1.01 * 2.0**-8  # relative to ‖q‖·‖k‖: torch can be configured to multiply fp32 in TF32 or bf16
LSE_NATS = {  # error of a log-sum-exp in each loop: exponentials, logarithm, sums
    "native": 2.0**-9,  # an approximate logarithm
    "fused": 2.0**-10,  # a device's approximate exp2 and log2, and 1 / (1 − e^(−m))
    "jax": 2.0**-6,  # XLA's exp and log, over up to 2²⁴ keys
}
DEVICE_ROUNDING = 1.0 + 2.0**-18  # factor for a number on a GPU: a few operations, each off by less than 2⁻²²
DEVICE_PRODUCTS = 2.0**-9  # relative to ‖q‖·‖k‖, for a product in TF32, which keeps eleven bits of each factor

# Without online softmax, sums of weights and of values stay below 2 to this power (a GPU divides by numbers up to 2¹²⁶), and
# weights in fp16 below 2 to the second.
FIXED_DIGITS = 120.0
FIXED_HALF_DIGITS = 15.0

# The square of a smaller number may be below the smallest normal number, and vanish.
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
    "MEASURED_SHARE": MEASURED_SHARE,
    "KEY_RULE_TOKENS": KEY_RULE_TOKENS,
    "UNIT_FLOAT32": UNIT["float32"],
    "UNIT_FLOAT64": UNIT["float64"],
    "VANISHING_FLOAT32": VANISHING["float32"],
    "VANISHING_FLOAT64": VANISHING["float64"],
}
