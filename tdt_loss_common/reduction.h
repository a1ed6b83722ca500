// How the losses of a batch become one number: loss = sum over b of weight_b * losses_b.
#pragma once

#include "problem.h"

namespace tdt {

// In the order of REDUCTIONS in torch-ext/tdt_loss/checks.py.
enum class Reduction { kNone, kSum, kMeanBatch, kMean, kMeanVolume };

// A silent utterance must not turn the batch into inf: target lengths count as at least 1 where they divide.
TDT_HD double at_least_one(int64_t n) { return n > 1 ? static_cast<double>(n) : 1.0; }

// d loss / d losses_b. `labels`: the sum of all target lengths.
TDT_HD double reduction_weight(Reduction reduction, const Batch& batch, int b, int64_t labels) {
  switch (reduction) {
    case Reduction::kMeanBatch:
      return 1.0 / batch.B;
    case Reduction::kMean:
      return 1.0 / batch.B / at_least_one(batch.target_lengths.at(b));
    case Reduction::kMeanVolume:
      return 1.0 / at_least_one(labels);
    default:
      return 1.0;
  }
}

}  // namespace tdt
