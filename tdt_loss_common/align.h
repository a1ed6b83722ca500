// The best alignment of one sample (Viterbi): eq. 5 with max in place of logsumexp, then a walk along the maxima
// (equations.h).
//
//   best(t,u) = max over the arcs out of (t,u) of weight + best(target); best(exit) = 0
//
// Both backends run the functions below and nothing else on a node: same sums, same ties, same bits. Sums are float64,
// from the log-probabilities as they were stored. Where several arcs are equally good, a label comes before a blank,
// then the shorter duration, then the earlier column.
#pragma once

#include "problem.h"

namespace tdt {

template <typename Acc>
struct AlignTask {
  Batch batch;
  Arcs arcs;
  const Acc* node_lp;  // (B, T, U1, record_size(D))
  int64_t* frames;     // (B, U) the frame of each label, -1 beyond the labels of a sample
  int64_t* durations;  // (B, U) its duration in frames, likewise
  int64_t U;           // columns of the two, at least max_U1 - 1
  Acc* score;          // (B,)
};

// An arc as one byte: the index i of its duration, and whether it is a label.
constexpr uint8_t kLabelArc = 0x80, kDurationOfArc = 0x7f;
static_assert(kMaxDurations <= kDurationOfArc + 1, "a duration index fits beside kLabelArc");

// The best arc of one kind so far.
struct BestArc {
  double score = -INFINITY;
  int i = 0, d = 0;

  // Offered in the order of columns, so that the earlier one stays where score and duration are equal.
  TDT_HD void offer(double candidate, int candidate_i, int candidate_d) {
    if (candidate > score || (candidate == score && candidate_d < d)) {
      score = candidate;
      i = candidate_i;
      d = candidate_d;
    }
  }
};

struct BestStep {
  double best;  // -inf: the exit cannot be reached from here
  uint8_t arc;  // defined where best is finite
  bool nan;     // the node's record holds a NaN
};

// Where (t, u) lies in `best` and `arcs` of a sample, both (T, U + 1).
TDT_HD int64_t lattice_index(const Extent& extent, int t, int u) {
  return static_cast<int64_t>(t) * (extent.U + 1) + u;
}

// The best step out of (t, u), from the node's record and the `best` of all nodes with larger t + u.
template <typename Acc>
TDT_HD BestStep best_step(const Arcs& arcs, const Extent& extent, int t, int u, const Acc* record, const double* best) {
  const int frames_left = extent.T - t, labels_left = extent.U - u;
  const double blank_lp = record[kBlankLp],
               label_lp = labels_left > 0 ? static_cast<double>(record[kLabelLp]) : -INFINITY;
  bool nan = blank_lp != blank_lp || label_lp != label_lp;
  BestArc blank, label;
  for (int i = 0; i < arcs.n; ++i) {
    const int d = arcs.d[i];
    const double dur_lp = arcs.dur_lp(record, i);
    nan = nan || dur_lp != dur_lp;
    const Departures out = arcs.departures(i, frames_left, labels_left);
    if (out.lands) {
      const double* target = best + lattice_index(extent, t + d, u);
      if (out.blank) blank.offer(blank_lp + dur_lp + target[0], i, d);
      if (out.label) label.offer(label_lp + dur_lp + target[1], i, d);
    } else if (out.blank) {
      blank.offer(blank_lp + dur_lp, i, d);  // to the exit
    }
  }
  const bool is_label = label.score >= blank.score;
  return {is_label ? label.score : blank.score, static_cast<uint8_t>(is_label ? label.i | kLabelArc : blank.i), nan};
}

// Follows the best arcs of a sample that has an alignment from (0, 0) to the exit, and records every label on the way.
TDT_HD void trace(const Arcs& arcs, const Extent& extent, const uint8_t* best_arcs, int64_t* frames,
                  int64_t* durations) {
  int t = 0, u = 0;
  while (t < extent.T) {
    const uint8_t arc = best_arcs[lattice_index(extent, t, u)];
    const int d = arcs.d[arc & kDurationOfArc];
    if (arc & kLabelArc) {
      frames[u] = t;
      durations[u] = d;
      ++u;
    }
    t += d;
  }
}

}  // namespace tdt
