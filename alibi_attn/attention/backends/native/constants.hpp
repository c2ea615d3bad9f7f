// The constants of `certificate/constants.py`, which the build passes as macros, and the text that tells which were compiled in.

#pragma once

#ifndef ALIBI_TILE
#error "the constants come from build.py: -DALIBI_TILE=64 and so on"
#endif

enum {
    BLOCK = ALIBI_TILE,  // queries of a block, and keys of a tile
    HALF = BLOCK / 2,
    KEPT = ALIBI_KEPT,
    OUTLIER_TILES = ALIBI_OUTLIER_TILES,
    WORTH_LEAVING_OUT = ALIBI_WORTH_LEAVING_OUT,
    TAIL_GROUP = ALIBI_TAIL_GROUP,
    NORM_UNITS = ALIBI_NORM_UNITS,
    SCORE_UNITS = ALIBI_SCORE_UNITS,
    KEY_RULE_TOKENS = ALIBI_KEY_RULE_TOKENS,
};

constexpr double VALUE_RATIO = ALIBI_VALUE_RATIO;
constexpr double LSE_NATS = ALIBI_LSE_NATS;
constexpr double MEASURED_SHARE = ALIBI_MEASURED_SHARE;

template <typename Real>
constexpr Real UNIT = sizeof(Real) == 4 ? ALIBI_UNIT_FLOAT32 : ALIBI_UNIT_FLOAT64;
template <typename Real>
constexpr Real VANISHING = sizeof(Real) == 4 ? ALIBI_VANISHING_FLOAT32 : ALIBI_VANISHING_FLOAT64;
template <typename Real>
constexpr Real CAP = sizeof(Real) == 4 ? 80 : 600;  // of exponents far beyond the tolerance

// The key rule: a share of a query's softmax, times this, is at most the tolerance if a key or tile `distance` tokens away has it
// and is left out.
constexpr double key_rule(double distance) { return 2 * (distance + KEY_RULE_TOKENS); }

#define ALIBI_TEXT_OF(x) #x
#define ALIBI_TEXT(name) #name "=" ALIBI_TEXT_OF(name) " "
#define ALIBI_BUILT_WITH                                                                                                  \
    ALIBI_TEXT(ALIBI_TILE) ALIBI_TEXT(ALIBI_KEPT) ALIBI_TEXT(ALIBI_VALUE_RATIO) ALIBI_TEXT(ALIBI_OUTLIER_TILES)            \
    ALIBI_TEXT(ALIBI_WORTH_LEAVING_OUT) ALIBI_TEXT(ALIBI_TAIL_GROUP) ALIBI_TEXT(ALIBI_NORM_UNITS)                          \
    ALIBI_TEXT(ALIBI_SCORE_UNITS) ALIBI_TEXT(ALIBI_LSE_NATS) ALIBI_TEXT(ALIBI_MEASURED_SHARE)                              \
    ALIBI_TEXT(ALIBI_KEY_RULE_TOKENS) ALIBI_TEXT(ALIBI_UNIT_FLOAT32) ALIBI_TEXT(ALIBI_UNIT_FLOAT64)                        \
    ALIBI_TEXT(ALIBI_VANISHING_FLOAT32) ALIBI_TEXT(ALIBI_VANISHING_FLOAT64)
