// The hidden layer of a joint network, for the loss without the logits: hidden(t, u) = dropout(act(f_t + g_u)) with f
// the encoder's and g the prediction network's output, logits(t, u) = W hidden(t, u) + b.
//
// Dropout draws from a counter-based generator, a function of seed, node and hidden unit alone: backward draws the mask
// again instead of keeping it, and CPU and CUDA draw the same one.
#pragma once

#include "problem.h"

namespace tdt {

enum class Activation { kRelu, kTanh };  // in the order of ACTIVATIONS in torch-ext/tdt_loss/tiles.py

// Four random words.
struct Random4 {
  uint32_t x[4];

  // By a choice instead of an address, which keeps the words in registers.
  TDT_HD uint32_t at(int i) const { return i < 2 ? (i == 0 ? x[0] : x[1]) : (i == 2 ? x[2] : x[3]); }
};

// Philox 4x32 with 10 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011).
TDT_HD Random4 philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2 = 0, uint32_t c3 = 0) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// A unit is dropped where its word is below the threshold, else scaled by 1 / (1 - p).
struct Dropout {
  uint32_t threshold;  // p * 2^32; 0: no dropout
  double scale;
  uint64_t seed;
  int64_t first_node;  // of these samples in the batch that is drawn for

  static Dropout of(double p, int64_t seed, int64_t first_node) {
    const auto threshold = static_cast<uint32_t>(p * 4294967296.0);
    return {threshold, 1.0 / (1.0 - threshold / 4294967296.0), static_cast<uint64_t>(seed), first_node};
  }
  // One call serves the four units 4 * group to 4 * group + 3 of a node.
  TDT_HD Random4 words(int64_t node, int group) const {
    return philox(seed, static_cast<uint32_t>(first_node + node), static_cast<uint32_t>(group));
  }
  template <typename Acc>
  TDT_HD Acc factor(uint32_t word) const {
    return word < threshold ? Acc(0) : static_cast<Acc>(scale);
  }
};

template <typename S>
struct Joint {
  const S* encoder;  // (B, T, H)
  const S* decoder;  // (B, U1, H)
  int H;
  Grid grid;
  Activation activation;
  Dropout dropout;

  TDT_HD int64_t encoder_row(const Node& at) const { return (static_cast<int64_t>(at.b) * grid.max_T + at.t) * H; }
  TDT_HD int64_t decoder_row(const Node& at) const { return (static_cast<int64_t>(at.b) * grid.max_U1 + at.u) * H; }

  // x = act(x); NaN stays NaN.
  template <typename Acc, int n>
  TDT_HD void activate(Acc (&x)[n]) const {
    if (activation == Activation::kRelu) {
      for (int j = 0; j < n; ++j) x[j] = x[j] < Acc(0) ? Acc(0) : x[j];
    } else {
      for (int j = 0; j < n; ++j) x[j] = tanh_of(x[j]);
    }
  }
  // d_x = d_x * act'(x)
  template <typename Acc, int n>
  TDT_HD void differentiate(const Acc (&x)[n], Acc (&d_x)[n]) const {
    if (activation == Activation::kRelu) {
      for (int j = 0; j < n; ++j) d_x[j] = x[j] <= Acc(0) ? Acc(0) : d_x[j];
    } else {
      for (int j = 0; j < n; ++j) d_x[j] *= Acc(1) - tanh_of(x[j]) * tanh_of(x[j]);
    }
  }

 private:
  TDT_HD static float tanh_of(float x) { return tanhf(x); }
  TDT_HD static double tanh_of(double x) { return tanh(x); }
};

// Rows of the tile that backward is at, sorted by node, and where their gradients are summed.
template <typename S, typename Acc>
struct HiddenGradient {
  int64_t rows;
  const S* d_hidden;           // (rows, H)
  const int32_t* nodes;        // (rows,)
  const int32_t* row_of_node;  // (B, T, U1): the row of each live node, counted over all tiles, or -1
  int64_t first;               // the tile's first row in that count
  Acc* d_encoder;              // (B, T, H), or null where it is not wanted
  Acc* d_decoder;              // (B, U1, H), likewise
};

}  // namespace tdt
