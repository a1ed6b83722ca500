// How the losses of a batch become one number: loss = sum over b of weight_b * losses_b.
#pragma once

#include "problem.h"

namespace tdt {

// In the order of REDUCTIONS in torch-ext/tdt_loss/checks.py.
enum class Reduction { kNone, kSum, kMeanBatch, kMean, kMeanVolume };

// A silent utterance must not turn the batch into inf: target lengths count as at least 1 where they divide.
TDT_HD double at_least_one(int64_t n) { return n > 1 ? static_cast<double>(n) : 1.0; }

// d loss / d losses_b in a batch of B. `labels`: the sum of the target lengths of all well-formed samples.
TDT_HD double reduction_weight(Reduction reduction, int B, const IndexView& target_lengths, int b, int64_t labels) {
  switch (reduction) {
    case Reduction::kMeanBatch:
      return 1.0 / B;
    case Reduction::kMean:
      return 1.0 / B / at_least_one(target_lengths.at(b));
    case Reduction::kMeanVolume:
      return 1.0 / at_least_one(labels);
    default:
      return 1.0;
  }
}

// The stage between lattice and gradient: eq. 6 and 11 for each sample, and the reduction.
struct Reducing {
  int B;
  IndexView target_lengths;  // (B,)
  const double* ll;          // (lattices, B)
  Mixture mixture;
  bool zero_infinity;
  Reduction reduction;

  // eq. 6 and 11 of sample b. The marks of ll become what the user sees.
  TDT_HD double loss_of(int b) const {
    double sum = 0.0;
    for (int l = 0; l < mixture.n; ++l) {
      const double here = ll[static_cast<int64_t>(l) * B + b];
      if (here == kMalformed) return NAN;
      if (mixture.weight[l] != 0.0) sum += mixture.weight[l] * -here;
    }
    return sum == INFINITY && zero_infinity ? 0.0 : sum;
  }
  // What sample b adds to the sum of target lengths: of a malformed one, whose length may be any number, nothing, so
  // that the gradients of the others stay what they are without it.
  TDT_HD int64_t labels(int b) const { return ll[b] == kMalformed ? 0 : target_lengths.at(b); }
};

// Either losses or the other two are wanted, and not null.
template <typename Acc>
struct Reduced {
  Acc* losses;   // (B,)
  Acc* loss;     // ()
  Acc* weights;  // (B,)
};

}  // namespace tdt
