// The hidden layer of the joint network on the CPU, the twin of tdt_loss_cuda/joint.cu (joint.h).
//
// Rows are shared out over torch's threads; in the gradient hidden units are, so that every sum is one thread's and
// runs over the rows in their order: the same bits for any number of threads, and no map from nodes to rows is needed.
#include "../tdt_loss_common/joint.h"

#include "../tdt_loss_common/backend.h"

namespace tdt {
namespace {

constexpr int64_t kGrain = 16;       // rows per task at least
constexpr int64_t kGroupGrain = 16;  // groups of four hidden units per task at least

// Calls f with each hidden unit of [begin, end) and its dropout factor at a node. begin is a multiple of four.
template <typename Acc, typename F>
void for_units(const Dropout& dropout, int64_t node, int begin, int end, F&& f) {
  for (int h = begin; h < end; h += 4) {
    const Random4 words = dropout.threshold ? dropout.words(node, h / 4) : Random4{};
    for (int k = h; k < std::min(h + 4, end); ++k)
      f(k, dropout.threshold ? dropout.factor<Acc>(words.x[k - h]) : Acc(1));
  }
}

}  // namespace

template <>
template <typename S>
void Cpu::joint_hidden(const Tensor&, const Joint<S>& joint, int64_t rows, const int32_t* nodes, S* hidden) {
  using Acc = accumulate_t<S>;
  torch::stable::parallel_for(0, rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Node at = joint.grid.node_at(nodes[row]);
      const S* f = joint.encoder + joint.encoder_row(at);
      const S* g = joint.decoder + joint.decoder_row(at);
      S* out = hidden + row * joint.H;
      for_units<Acc>(joint.dropout, nodes[row], 0, joint.H, [&](int h, Acc factor) {
        Acc x[] = {static_cast<Acc>(f[h]) + static_cast<Acc>(g[h])};
        joint.activate(x);
        out[h] = static_cast<S>(x[0] * factor);
      });
    }
  });
}

template <>
template <typename S>
void Cpu::joint_hidden_backward(const Tensor&, const Joint<S>& joint, const HiddenGradient<S, accumulate_t<S>>& p) {
  using Acc = accumulate_t<S>;
  torch::stable::parallel_for(0, (joint.H + 3) / 4, kGroupGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < p.rows; ++row) {
      const Node at = joint.grid.node_at(p.nodes[row]);
      const int64_t in_encoder = joint.encoder_row(at), in_decoder = joint.decoder_row(at);
      const S* d_hidden = p.d_hidden + row * joint.H;
      const int last = static_cast<int>(std::min<int64_t>(4 * end, joint.H));
      for_units<Acc>(joint.dropout, p.nodes[row], static_cast<int>(4 * begin), last, [&](int h, Acc factor) {
        const Acc x[] = {static_cast<Acc>(joint.encoder[in_encoder + h]) +
                         static_cast<Acc>(joint.decoder[in_decoder + h])};
        Acc d_x[] = {static_cast<Acc>(d_hidden[h])};
        joint.differentiate(x, d_x);
        if (p.d_encoder) p.d_encoder[in_encoder + h] += d_x[0] * factor;
        if (p.d_decoder) p.d_decoder[in_decoder + h] += d_x[0] * factor;
      });
    }
  });
}

#define TDT_INSTANTIATE(S, _)                                                                   \
  template void Cpu::joint_hidden(const Tensor&, const Joint<S>&, int64_t, const int32_t*, S*); \
  template void Cpu::joint_hidden_backward(const Tensor&, const Joint<S>&, const HiddenGradient<S, accumulate_t<S>>&);
TDT_FOR_EACH_LOGIT_TYPE(TDT_INSTANTIATE)

}  // namespace tdt
