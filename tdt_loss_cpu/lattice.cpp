// The lattice on the CPU: alpha, beta and the log-likelihood, eq. 4 and 5 (equations.h).
//
// The twin of tdt_loss_cuda/lattice.cu. A task is one direction of one sample; numbers are Scaled (scaled.h), so a path
// of any length is exact to double precision. alpha is pushed forward out of each node with the node's own weights,
// beta gathered backward with them, so that a node's record is read once per direction.
#include <cmath>
#include <vector>

#include "../tdt_loss_common/backend.h"

namespace tdt {
namespace {

// The weights of the arcs that leave one node.
struct Weights {
  Scaled blank, label, duration[kMaxDurations];
  bool nan;

  template <typename Acc>
  Weights(const Acc* record, const Arcs& arcs)
      : blank(scaled_exp(record[kBlankLp])), label(scaled_exp(record[kLabelLp])) {
    for (int i = 0; i < arcs.n; ++i) duration[i] = scaled_exp(arcs.dur_lp(record, i));
    nan = std::isnan(record[kBlankLp]) || std::isnan(arcs.dur_lp(record, 0));
  }
};

template <typename Acc>
class Sample {
 public:
  Sample(const Batch& batch, const Arcs& arcs, const Acc* node_lp, int b)
      : batch_(batch), arcs_(arcs), node_lp_(node_lp), b_(b), extent_(batch.extent(b)) {}

  // eq. 4, pushed: when (t, u) is visited all that enters it has been added, since every arc raises t + u and leads to
  // a later frame or, in the same frame, to the right.
  void alpha(double* out) {
    if (!batch_.well_formed(b_)) return;
    std::vector<Scaled> alpha(size(), scaled_zero());
    if (!alpha.empty()) alpha[0] = scaled_one();
    for (int t = 0; t < extent_.T; ++t) {
      for (int u = 0; u <= extent_.U; ++u) {
        const Scaled here = normalized(alpha[index(t, u)]);
        out[batch_.node(b_, t, u)] = log_of(here);
        if (here.m == 0.0) continue;
        const Weights w = weights(t, u);
        for (int i = 0; i < arcs_.n; ++i) {
          const Departures leaving = arcs_.departures(i, extent_.T - t, extent_.U - u);
          if (!leaving.lands) continue;
          const int d = arcs_.d[i];
          const Scaled pushed = here * w.duration[i];
          if (leaving.blank) add(alpha[index(t + d, u)], pushed * w.blank);
          if (leaving.label) add(alpha[index(t + d, u + 1)], pushed * w.label);
        }
      }
    }
  }

  // eq. 5. Returns LL; `out` may be null.
  double beta(double* out) {
    if (!batch_.well_formed(b_)) return kMalformed;
    if (extent_.T == 0) return -INFINITY;
    std::vector<Scaled> beta(size(), scaled_zero());
    bool nan = false;
    for (int t = extent_.T - 1; t >= 0; --t) {
      for (int u = extent_.U; u >= 0; --u) {
        const Weights w = weights(t, u);
        nan = nan || w.nan;
        Scaled sum = scaled_zero();
        for (int i = 0; i < arcs_.n; ++i) {
          const Departures leaving = arcs_.departures(i, extent_.T - t, extent_.U - u);
          const int d = arcs_.d[i];
          Scaled onward = scaled_zero();
          if (leaving.blank) onward = leaving.lands ? w.blank * beta[index(t + d, u)] : w.blank;  // beta(exit) = 1
          if (leaving.label) onward = onward + w.label * beta[index(t + d, u + 1)];
          sum = sum + w.duration[i] * onward;
        }
        const Scaled here = normalized(sum);
        beta[index(t, u)] = here;
        if (out) out[batch_.node(b_, t, u)] = log_of(here);
      }
    }
    return nan ? NAN : log_of(beta[0]);
  }

 private:
  size_t size() const { return static_cast<size_t>(extent_.T) * (extent_.U + 1); }
  size_t index(int t, int u) const { return static_cast<size_t>(t) * (extent_.U + 1) + u; }
  Weights weights(int t, int u) const { return {node_lp_ + batch_.node(b_, t, u) * record_size(batch_.D), arcs_}; }
  static void add(Scaled& to, Scaled x) { to = to + x; }

  const Batch& batch_;
  const Arcs& arcs_;
  const Acc* node_lp_;
  const int b_;
  const Extent extent_;
};

}  // namespace

template <>
template <typename Acc>
void Cpu::lattice(const Tensor&, const Batch& batch, const Arcs& arcs, int lattices, const Acc* node_lp,
                  const LatticeOutput& out) {
  const Arcs arcs_of_lattice[kMaxLattices] = {arcs, rnnt_arcs()};
  const int64_t directions = out.alpha_beta ? 2 : 1;
  torch::stable::parallel_for(0, batch.B * directions * lattices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t direction = task % directions, lattice = task / directions % lattices;
      const int b = static_cast<int>(task / directions / lattices);
      double* alpha = out.alpha_beta ? out.alpha_beta + 2 * lattice * batch.nodes() : nullptr;
      Sample<Acc> sample(batch, arcs_of_lattice[lattice], node_lp, b);
      if (direction == 1) {
        sample.alpha(alpha);
      } else {
        out.ll[lattice * batch.B + b] = sample.beta(alpha ? alpha + batch.nodes() : nullptr);
      }
    }
  });
}

template void Cpu::lattice<float>(const Tensor&, const Batch&, const Arcs&, int, const float*, const LatticeOutput&);
template void Cpu::lattice<double>(const Tensor&, const Batch&, const Arcs&, int, const double*, const LatticeOutput&);

}  // namespace tdt
