// The ops of the loss without the logits (torch-ext/tdt_loss/fused.py) as functions, once for both backends. Schemas:
// torch_binding.cpp.
#pragma once

#include "../tdt_loss_common/backend.h"
#include "../tdt_loss_common/checks.h"

namespace tdt {

// What every op on the hidden layer is given, checked. `nodes`: the dense node index (b * T + t) * U1 + u of each row.
template <typename S>
Joint<S> joint_of(const Tensor& encoder, const Tensor& decoder, int64_t activation, double dropout, int64_t seed,
                  int64_t first_node) {
  return {const_data<S>(encoder),
          const_data<S>(decoder),
          static_cast<int>(encoder.size(2)),
          Grid(encoder.size(0), encoder.size(1), decoder.size(1)),
          static_cast<Activation>(activation),
          Dropout::of(dropout, seed, first_node)};
}

inline void check_joint(const Tensor& encoder, const Tensor& decoder, const Tensor& nodes, const Tensor& rows,
                        const char* rows_name, int64_t activation, double dropout) {
  STD_TORCH_CHECK(encoder.dim() == 3 && encoder.is_contiguous(), "encoder must be contiguous and of shape (B, T, H)");
  STD_TORCH_CHECK(decoder.dim() == 3 && decoder.is_contiguous() && decoder.size(0) == encoder.size(0) &&
                      decoder.size(2) == encoder.size(2),
                  "decoder must be contiguous and of shape (B, U+1, H), with B and H of the encoder");
  STD_TORCH_CHECK(encoder.size(0) * encoder.size(1) * decoder.size(1) <= std::numeric_limits<int>::max() &&
                      encoder.size(2) <= std::numeric_limits<int>::max(),
                  "more than 2^31 - 1 nodes or hidden units");
  STD_TORCH_CHECK(nodes.dim() == 1 && nodes.scalar_type() == ScalarType::Int && nodes.is_contiguous(),
                  "nodes must be a contiguous int32 vector");
  STD_TORCH_CHECK(
      rows.dim() == 2 && rows.is_contiguous() && rows.size(0) == nodes.size(0) && rows.size(1) == encoder.size(2),
      rows_name, " must be contiguous, with a row of ", encoder.size(2), " units for each node");
  STD_TORCH_CHECK(decoder.scalar_type() == encoder.scalar_type() && rows.scalar_type() == encoder.scalar_type(),
                  "decoder and ", rows_name, " must have the dtype of the encoder");
  STD_TORCH_CHECK(
      activation == static_cast<int64_t>(Activation::kRelu) || activation == static_cast<int64_t>(Activation::kTanh),
      "unknown activation ", activation);
  STD_TORCH_CHECK(dropout >= 0 && dropout < 1, "dropout must be in [0, 1), got ", dropout);
  for (const Tensor* t : {&decoder, &nodes, &rows}) {
    STD_TORCH_CHECK(t->device() == encoder.device(), "all tensors must be on the device of the encoder");
  }
  check_nodes(nodes, encoder.size(0) * encoder.size(1) * decoder.size(1));
}

// hidden (rows, H): the hidden layer of the nodes.
template <class Backend>
void joint_hidden_(const Tensor& hidden, const Tensor& encoder, const Tensor& decoder, const Tensor& nodes,
                   int64_t activation, double dropout, int64_t seed, int64_t first_node) {
  check_joint(encoder, decoder, nodes, hidden, "hidden", activation, dropout);
  if (hidden.numel() == 0) return;
  dispatch_logits(encoder.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    Backend::joint_hidden(encoder, joint_of<S>(encoder, decoder, activation, dropout, seed, first_node), nodes.size(0),
                          const_data<int32_t>(nodes), mutable_data<S>(hidden));
  });
}

// Adds the gradient of a tile of hidden rows, sorted by node, to d_encoder (B, T, H) and d_decoder (B, U1, H), each
// where it is given. row_of_node (B * T * U1): the row of each live node, counted over all tiles, or -1; `first`: the
// tile's first row in that count.
template <class Backend>
void joint_hidden_backward_(const OptionalTensor& d_encoder, const OptionalTensor& d_decoder, const Tensor& d_hidden,
                            const Tensor& encoder, const Tensor& decoder, const Tensor& nodes, int64_t activation,
                            double dropout, int64_t seed, int64_t first_node, const Tensor& row_of_node,
                            int64_t first) {
  check_joint(encoder, decoder, nodes, d_hidden, "d_hidden", activation, dropout);
  STD_TORCH_CHECK(row_of_node.scalar_type() == ScalarType::Int && row_of_node.is_contiguous() &&
                      row_of_node.numel() == encoder.size(0) * encoder.size(1) * decoder.size(1) &&
                      row_of_node.device() == encoder.device(),
                  "row_of_node must hold a contiguous int32 for each node");
  const auto check_sum = [&](const OptionalTensor& sum, const Tensor& of, const char* name) {
    STD_TORCH_CHECK(!sum || (sum->scalar_type() == accumulate_type(of.scalar_type()) && sum->is_contiguous() &&
                             sum->numel() == of.numel() && sum->device() == of.device()),
                    name, " must be contiguous, of the shape of what it is the gradient of, in the accumulation dtype");
  };
  check_sum(d_encoder, encoder, "d_encoder");
  check_sum(d_decoder, decoder, "d_decoder");
  if (d_hidden.numel() == 0) return;
  dispatch_logits(encoder.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    using Acc = accumulate_t<S>;
    const HiddenGradient<S, Acc> gradient{nodes.size(0),
                                          const_data<S>(d_hidden),
                                          const_data<int32_t>(nodes),
                                          const_data<int32_t>(row_of_node),
                                          first,
                                          d_encoder ? mutable_data<Acc>(*d_encoder) : nullptr,
                                          d_decoder ? mutable_data<Acc>(*d_decoder) : nullptr};
    Backend::joint_hidden_backward(encoder, joint_of<S>(encoder, decoder, activation, dropout, seed, first_node),
                                   gradient);
  });
}

}  // namespace tdt
