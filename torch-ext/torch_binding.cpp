// The schemas of the ops, and their registration with the stable ABI. The namespace is the extension's own name, so two
// builds never collide.
#include "align_ops.h"
#include "band_ops.h"
#include "joint_ops.h"
#include "loss_ops.h"
#include "occupancy_ops.h"
#include "registration.h"

// One more level of macro expansion: TORCH_EXTENSION_NAME must become its value before it is pasted into names.
#define TDT_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define TDT_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

// Arguments that several schemas share.
#define LABELS "Tensor targets, Tensor logit_lengths, Tensor target_lengths"
#define SAVED "Tensor node_lp, Tensor ll, Tensor alpha_beta"
#define SAVED_ROWS "Tensor node_lp, Tensor row_max, Tensor ll, Tensor alpha_beta"
#define SHAPING "float omega, float fastemit_lambda, float clamp"
#define JOINT "Tensor encoder, Tensor decoder, Tensor nodes, int activation, float dropout, int seed, int first_node"

TDT_LIBRARY(TORCH_EXTENSION_NAME, m) {
  // clang-format off
  m.def("loss(Tensor logits, Tensor? duration_logits, " LABELS ", int blank, int[] durations, float sigma, "
        "float delay_penalty, " SHAPING ", bool zero_infinity, bool need_grad, bool inplace_grad, int reduction) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("log_probs(Tensor logits, Tensor? duration_logits, " LABELS ", int blank, int num_durations, float sigma, "
        "float delay_penalty) -> (Tensor, Tensor)");
  m.def("lattice(Tensor node_lp, " LABELS ", int[] durations, int vocab, float omega, bool need_grad) "
        "-> (Tensor, Tensor)");
  m.def("reduce(Tensor ll, Tensor target_lengths, Tensor like, float omega, bool zero_infinity, int reduction) "
        "-> (Tensor, Tensor)");
  m.def("gradient(Tensor grad_loss, Tensor weights, Tensor logits, Tensor? duration_logits, " LABELS ", " SAVED_ROWS ", "
        "int blank, int[] durations, " SHAPING ") -> (Tensor, Tensor)");
  m.def("gradient_(Tensor grad_loss, Tensor weights, Tensor(a!) logits, " LABELS ", " SAVED_ROWS ", "
        "int blank, int[] durations, " SHAPING ") -> ()");
  m.def("occupancy(" SAVED ", " LABELS ", int[] durations, int vocab) -> (Tensor, Tensor)");
  m.def("align(Tensor node_lp, " LABELS ", int[] durations, int vocab) "
        "-> (Tensor frames, Tensor durations, Tensor score)");
  m.def("joint_hidden_(Tensor(a!) hidden, " JOINT ") -> ()");
  m.def("joint_hidden_backward_(Tensor(a!)? d_encoder, Tensor(b!)? d_decoder, Tensor d_hidden, " JOINT ", "
        "Tensor row_of_node, int first) -> ()");
  m.def("node_occupancy(" SAVED ", " LABELS ", int[] durations, int vocab, float omega, float fastemit_lambda) "
        "-> Tensor");
  m.def("log_probs_tile_(Tensor tile, Tensor bias, Tensor nodes, Tensor(a!) node_lp, Tensor(b!) row_max, " LABELS ", "
        "int blank, int vocab, int num_durations, float sigma, float delay_penalty) -> ()");
  m.def("gradient_tile_(Tensor(a!) out, Tensor(b!)? column_sums, Tensor grad_loss, Tensor weights, Tensor tile, "
        "Tensor bias, Tensor nodes, " LABELS ", " SAVED_ROWS ", int blank, int vocab, int[] durations, " SHAPING ") "
        "-> ()");
  m.def("list_rows_(Tensor(a!) nodes, Tensor table, int first, int step, int max_T, int max_U1) -> ()");
  m.def("pilots(Tensor logits, Tensor bias, Tensor weight, int blank, int num_durations, int frequent, int groups, "
        "int activation, float dropout) -> (Tensor chosen, Tensor share, Tensor group_weight, Tensor group_sums, "
        "Tensor rounding)");
  m.def("bound_columns(Tensor weight, Tensor? bias, Tensor targets, Tensor target_lengths, Tensor frequent, "
        "Tensor share, Tensor group_weight, Tensor group_sums, Tensor rounding, int blank, "
        "int max_U1, int num_durations, int columns) -> (Tensor, Tensor, Tensor)");
  m.def("bound_rows_(Tensor rows, Tensor bias, Tensor counted, Tensor nodes, Tensor(a!) node_lp, " LABELS ", int vocab, "
        "int num_durations, int frequent, int groups, bool split, float sigma, float delay_penalty, float rounding) "
        "-> ()");
  m.def("posterior(Tensor like, Tensor alpha_beta, Tensor ll, " LABELS ", float omega, float factor) -> Tensor");
  m.def("select_nodes_(Tensor(a!)? known, Tensor mass, Tensor ll, " LABELS ", float omega, float tolerance) "
        "-> (Tensor, Tensor, Tensor, Tensor)");
  // clang-format on
}

template <class Backend>
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("loss", TORCH_BOX(&tdt::loss<Backend>));
  m.impl("log_probs", TORCH_BOX(&tdt::log_probs<Backend>));
  m.impl("log_probs_tile_", TORCH_BOX(&tdt::log_probs_tile_<Backend>));
  m.impl("lattice", TORCH_BOX(&tdt::lattice<Backend>));
  m.impl("reduce", TORCH_BOX(&tdt::reduce<Backend>));
  m.impl("gradient", TORCH_BOX(&tdt::gradient<Backend>));
  m.impl("gradient_", TORCH_BOX(&tdt::gradient_<Backend>));
  m.impl("gradient_tile_", TORCH_BOX(&tdt::gradient_tile_<Backend>));
  m.impl("occupancy", TORCH_BOX(&tdt::occupancy<Backend>));
  m.impl("align", TORCH_BOX(&tdt::align<Backend>));
  m.impl("joint_hidden_", TORCH_BOX(&tdt::joint_hidden_<Backend>));
  m.impl("joint_hidden_backward_", TORCH_BOX(&tdt::joint_hidden_backward_<Backend>));
  m.impl("node_occupancy", TORCH_BOX(&tdt::node_occupancy<Backend>));
  m.impl("list_rows_", TORCH_BOX(&tdt::list_rows_<Backend>));
  m.impl("pilots", TORCH_BOX(&tdt::pilots<Backend>));
  m.impl("bound_columns", TORCH_BOX(&tdt::bound_columns<Backend>));
  m.impl("bound_rows_", TORCH_BOX(&tdt::bound_rows_<Backend>));
  m.impl("posterior", TORCH_BOX(&tdt::posterior<Backend>));
  m.impl("select_nodes_", TORCH_BOX(&tdt::select_nodes_<Backend>));
}

TDT_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) { implement<tdt::Cpu>(m); }

#ifdef CUDA_KERNEL
TDT_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) { implement<tdt::Cuda>(m); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
