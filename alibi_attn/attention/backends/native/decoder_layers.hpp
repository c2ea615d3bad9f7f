// The arguments of `decoder_layers.cpp`, as `decoder_layers.py` lays them out.

#pragma once

#include "few_rows.hpp"

// A linear map: weights [outputs, inputs] and bias, stored like the hidden states; or int8 codes in blocks as oneDNN packs them,
// [outputs / 64, inputs / 4, 64, 4], with a bias in fp32.
struct LayerLinear {
    const void *weight, *bias;  // bias may be null
    const float *scales;        // [outputs], of int8 codes; else null
    const int32_t *sums;        // [outputs], of int8 codes: 128 times the sum of an output's codes
    int64_t inputs, outputs;
};

// A layer norm, stored like the hidden states; without weight there is no norm, and bias may be null.
struct LayerNorm {
    const void *weight, *bias;
    double eps;
};

// A pre-norm layer: attention and a feed-forward part, each added to the residual.
template <typename Stored>
struct DecoderLayer {
    LayerNorm attention_norm, ffn_norm;
    LayerLinear qkv, out, up, down;
    Rows<Stored> key, value;  // [B, H, S, D] of the cache; the last T positions are written
    int64_t N, norms_of_head, norms_of_sequence;
    const double *key_norms, *value_norms;  // as in DecodingCall
};

// Shapes by the letters of `spec.py`; E is the width. One key head per query head.
template <typename Stored>
struct LayersCall {
    int64_t B, H, T, S, D, E, layers;
    const Stored *x;                 // [B, T, E]: embeddings
    Stored *y;                       // [B, T, E]: the last hidden states
    LayerNorm first_norm, last_norm;  // of the embeddings, and after the last layer
    const DecoderLayer<Stored> *layer;
    int64_t by_head;  // whether the outputs of qkv are [H, 3, D]; else [3, H, D]
    const float *slopes;           // [B, H]
    const int64_t *start, *stop;   // [B]: the visible keys
    double scale, tolerance;
    int64_t erf_gelu;             // whether GELU is computed with erf; else its tanh form
    int64_t residual_after_norm;  // whether the normalized states are the residual
    int64_t threads;
    int64_t *fine;  // whether attention's outputs are finite; if not, the caller computes these tokens another way
};
