// The band: the nodes of a lattice whose rows are computed in full, and the guarantee for all others.
//
// An upper bound of every arc costs a narrow row (docs/GUARANTEE.md). For any distribution q over a group of columns,
//
//   lse(x) >= sum_k q_k x_k + H(q)                                                                             (B1)
//
// so the log-sum-exp over some columns of a row and one such sum for each group of the others, a centroid, is at most
// lse(x). With it in place of lse(x), eq. 1 and 2 become upper bounds of the arcs' log-probabilities. Sums of products
// of non-negative weights grow with each weight: a lattice with upper bounds outside of a set A of nodes has
// LL_hi >= LL, one with nothing outside has LL_lo <= LL, and
//
//   LL - LL_lo <= log(1 + sum over nodes outside A of h),  h = exp(alpha_hi + beta_hi - LL_lo)                  (B2)
//
// where h is also an upper bound of the node's occupancy.
#pragma once

#include "backend.h"
#include "joint.h"

namespace tdt {

// The columns of a narrow row: the blank, a label for each position of the sample, frequent tokens, centroids of the
// groups, for 16-bit weights what rounding has left of each centroid, a bound of the row's rounding, the durations.
struct BoundLayout {
  int labels, frequent, groups;
  bool split;
  int D;

  TDT_HD int label(int u) const { return 1 + u; }
  TDT_HD int first_frequent() const { return 1 + labels; }
  TDT_HD int centroid(int m) const { return 1 + labels + frequent + m; }
  TDT_HD int summed() const { return centroid(groups); }  // the columns that enter the log-sum-exp
  TDT_HD int residual(int m) const { return summed() + m; }
  TDT_HD int rounding() const { return summed() + (split ? groups : 0); }
  TDT_HD int duration(int i) const { return rounding() + 1 + i; }
  TDT_HD int columns() const { return duration(D); }
};

// What rows of the batch, the pilots, say about its tokens: which are frequent, and for the others, token k in group
// k % groups, a distribution in each group. Any choice gives bounds; that of the groups hardly matters, that of the
// frequent tokens and the mean probabilities as distributions make the bounds tight.
template <typename S, typename Acc>
struct Pilots {
  int n, V, D, H, blank, frequent, groups;
  int64_t stride;
  const Acc* logits;  // (n, stride), without the bias
  const Acc* bias;    // (V + D,)
  const S* weight;    // (V + D, H)
  Activation activation;
  double dropout_scale;
  Acc* share;         // (V,): the mean probability of a token; 0 for the blank, the frequent and the unseen
  int32_t* chosen;    // (frequent,): the frequent tokens, ascending
  Acc* group_weight;  // (groups, H): sum of share * weight
  Acc* group_sums;    // (3, groups): sums of share, share * log(share), share * bias
  Acc* rounding;  // (H + 1,): weights and bias of a column that is at least the sum of the absolute terms of any other
};

// A probability below it counts as none: its logarithm times itself would be lost in the group's.
constexpr double kUnseen = 1.0e-30;

// The bound of |x| rounded to 16 bits must not become smaller.
constexpr double kRoundedUp = 1.0 + 1.0 / 128;

// The column `rounding` from the largest |weight| of a hidden unit: what is not negative multiplies a relu's unit as it
// is; of tanh a unit is at most 1, before dropout has scaled it, and the weight goes to the bias.
template <typename S, typename Acc>
TDT_HD Acc rounding_weight(const Pilots<S, Acc>& p, Acc largest) {
  return p.activation == Activation::kRelu ? largest * static_cast<Acc>(kRoundedUp) : Acc(0);
}
template <typename S, typename Acc>
TDT_HD Acc rounding_bias(const Pilots<S, Acc>& p, Acc largest) {
  return p.activation == Activation::kRelu ? Acc(0) : largest * static_cast<Acc>(kRoundedUp * p.dropout_scale);
}

// The head of the joint network narrowed for each sample: what its groups share, and where its own columns go. A token
// that is a label of the sample has a column of its own there and leaves its group and the frequent tokens.
template <typename S, typename Acc>
struct BoundColumns {
  Batch batch;  // targets and target_lengths
  BoundLayout layout;
  int blank, H;
  const S* weight;          // (V + D, H)
  const Acc* bias;          // (V + D,), or null
  const int32_t* frequent;  // (frequent,)
  const Acc* share;         // (V,): as of Pilots, and so on
  const Acc* group_weight;  // (groups, H)
  const Acc* group_sums;    // (3, groups)
  const Acc* rounding;      // (H + 1,)
  int out_columns;          // of the outputs: as many as in the layout, or more
  S* out_weight;            // (B, out_columns, H)
  Acc* out_bias;            // (B, out_columns): -inf for the centroid of a group that cannot be used
  Acc* out_counted;  // (B, out_columns): the same for blank, labels and frequent tokens that are not of before, else
                     // -inf

  TDT_HD bool in_group(int k, int m) const { return k % layout.groups == m && share[k] > 0; }
};

// What is left of a group without the sample's labels must keep this share of the whole, or rounding could spoil it.
constexpr double kLeastShare = 1.0 / 64;

// Whether position u has a label that the sample had not before, and that is not the blank.
TDT_HD bool is_new_label(const Batch& batch, int b, int u, int blank) {
  const int y = batch.label(b, u);
  bool fresh = y >= 0 && y != blank;
  for (int v = 0; fresh && v < u; ++v) fresh = batch.label(b, v) != y;
  return fresh;
}

// A group without some of its tokens.
template <typename Acc>
struct GroupSums {
  Acc share, share_log, share_bias;

  TDT_HD void remove(Acc q, Acc bias) {
    share -= q;
    share_log -= q * std::log(q);
    share_bias -= q * bias;
  }
  TDT_HD bool usable(Acc whole) const { return share > static_cast<Acc>(kLeastShare) * whole; }
  // The bias of the centroid: the mean bias plus H(q).
  TDT_HD Acc bias() const { return share_bias / share + std::log(share) - share_log / share; }
};

// Narrow rows to records: upper bounds of eq. 1 and 2, and eq. 3.
template <typename Acc>
struct BoundRows {
  Batch batch;
  BoundLayout layout;
  NodeList list;
  int stride;          // of the rows, of bias and of counted
  const Acc* rows;     // (list.n, stride)
  const Acc* bias;     // (B, stride)
  const Acc* counted;  // (B, stride): the bias of single tokens that enter the log-sum-exp, else -inf
  Emission emission;
  Acc rounding;  // relative error of a product, of the sum of absolute terms that the column `rounding` bounds
  Acc* node_lp;  // (B, T, U1, record_size(D))
};

// A narrow row's logits of blank and label, its log-sum-exp, and what rounding may have taken from either.
template <typename Acc>
struct BoundRow {
  Acc blank, label, lse, margin;
};

// The upper bounds of eq. 1 and 2.
template <typename Acc>
TDT_HD void write_bound(const BoundRows<Acc>& p, int64_t node, const Node& at, const Extent& extent,
                        const BoundRow<Acc>& row) {
  Acc* record = p.node_lp + node * record_size(p.batch.D);
  const Acc sigma = static_cast<Acc>(p.emission.sigma);
  const Acc delay = static_cast<Acc>(p.emission.delay_penalty * (0.5 * (extent.T - 1) - at.t));
  const bool emits = at.u < extent.U && p.batch.label(at.b, at.u) >= 0;
  record[kRowSum] = 1;
  record[kBlankLp] = row.blank - row.lse - sigma + row.margin;
  record[kLabelLp] = emits ? row.label - row.lse - sigma + delay + row.margin : -static_cast<Acc>(INFINITY);
}

// The posterior probability of every node under what a lattice says, of several lattices their mean by weight.
template <typename Acc>
struct Posterior {
  Batch batch;
  Mixture mixture;
  const double* alpha_beta;  // (lattices, 2, B, T, U1)
  const double* ll;          // (lattices, B): what the mass of a node is divided by
  double factor;
  Acc* out;  // (B, T, U1)
};

// NaN where the lattice is, which keeps the node. With LL = -inf a node that has paths counts as infinitely likely: the
// other lattice, which alpha and beta are of, knows some.
template <typename Acc>
TDT_HD Acc posterior_of(const Posterior<Acc>& p, int64_t node, const Node& at) {
  if (!p.batch.extent(at.b).has(at.t, at.u)) return 0;
  double sum = 0.0;
  for (int l = 0; l < p.mixture.n; ++l) {
    if (p.mixture.weight[l] == 0.0) continue;
    const double ll = p.ll[static_cast<int64_t>(l) * p.batch.B + at.b];
    if (ll == kMalformed) return 0;
    const double* alpha = p.alpha_beta + 2 * l * p.batch.nodes();
    const double both = alpha[node] + alpha[p.batch.nodes() + node];
    if (ll == -INFINITY) {
      sum += both == -INFINITY ? 0.0 : INFINITY;
    } else {
      sum += p.mixture.weight[l] * exp(both - ll);
    }
  }
  return static_cast<Acc>(sum * p.factor);
}

// Which nodes to leave out: of each sample those with the least mass, as long as it adds up to at most a budget, and
// all with none. Masses are added as whole multiples of 2^-32 of the budget, rounded up, so that the sum is exact and
// the same in any order; the order among them is that of kBins intervals.
struct Budget {
  static constexpr int kBins = 33 * 32;           // 32 to an octave, from 2^-32 of the budget to all of it
  static constexpr double kWhole = 4294967296.0;  // 2^32
  static constexpr double kLeastOfLoss = 1.0e-6;  // a loss below it counts as this

  double budget;

  // A share `tolerance` of the loss where that is below 1; ll: of upper bounds, so that the loss is at least -ll.
  TDT_HD static Budget of(const double* ll, int B, int b, const Mixture& mixture, double tolerance) {
    double loss = 0.0;
    for (int l = 0; l < mixture.n; ++l) {
      if (mixture.weight[l] != 0.0) loss -= mixture.weight[l] * ll[static_cast<int64_t>(l) * B + b];
    }
    const double relative = loss < 1.0 ? (loss > kLeastOfLoss ? loss : kLeastOfLoss) : 1.0;
    return {tolerance * relative};
  }

  // In multiples of 2^-32 of the budget; more than 2^32 for what cannot be left out.
  TDT_HD uint64_t units(double mass) const {
    if (mass <= 0.0) return 0;
    const double ratio = mass / budget;
    return ratio <= 1.0 ? static_cast<uint64_t>(ceil(ratio * kWhole)) : ~uint64_t{0};
  }
  TDT_HD static bool may_go(uint64_t units) { return units <= uint64_t{1} << 32; }
  TDT_HD double mass(uint64_t units) const { return static_cast<double>(units) / kWhole * budget; }
  // With everything in the first `cut` bins left out.
  TDT_HD static bool keeps(uint64_t units, int cut) { return units != 0 && (!may_go(units) || bin(units) >= cut); }
  // The exponent and the first five digits of a number of units.
  TDT_HD static int bin(uint64_t units) {
    return units == 0 ? 0 : (high_word(static_cast<double>(units)) >> 15) - (1023 << 5);
  }
};

template <typename Acc>
struct Selection {
  Batch batch;
  const Acc* mass;  // (B, T, U1)
  Mixture mixture;
  const double* ll;  // (lattices, B), of upper bounds
  double tolerance;
  uint8_t* known;        // (B, T, U1) or null: nodes that are no candidates; those that are kept join them
  int32_t* nodes;        // (B * T * U1,): the kept nodes in their order, then -1
  int32_t* row_of_node;  // (B, T, U1): their place in `nodes`, or -1
  int32_t* count;        // (1,)
  double* dropped;       // (B,): the mass of what is left out
};

// The node of row first + i * step of a batch, padding left out, from a table of the samples (4, B): where each
// sample's rows end, where they begin, how many there are, and of how many columns. Rows past the last one of a sample
// repeat it.
struct RowTable {
  int B, max_T, max_U1;
  int64_t first, step;
  const int64_t* table;

  TDT_HD int32_t node(int64_t i) const {
    const int64_t row = first + i * step;
    int low = 0, high = B - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      table[middle] > row ? high = middle : low = middle + 1;
    }
    const int64_t rows = table[2 * B + low], width = table[3 * B + low];
    int64_t own = row - table[B + low];
    own = own < rows ? own : rows - 1;
    const int64_t t = own / width;
    return static_cast<int32_t>((low * static_cast<int64_t>(max_T) + t) * max_U1 + (own - t * width));
  }
};

}  // namespace tdt
