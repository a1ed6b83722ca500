// The gradient of one row, eq. 8 and 13, and of its first durations, eq. 9 (equations.h): what gradient.cu knows of the
// node, written by the threads of the row.
//
// A row is read in 16-byte vectors where it has occupancy and written in vectors in any case; what lies outside them,
// its ends, and the columns of blank and label take one thread each.
#pragma once

#include "rows.cuh"

namespace tdt::cuda {

constexpr int kNodeLanes = 8;  // threads that compute what a row needs of its node, and durations that it takes along

// How rows are shared out: kThreads write a row, and a block has up to kRows rows. More would spread what the GPU
// reads and writes at a time over more memory, which costs bandwidth; fewer would leave it waiting for nodes.
template <int kThreadsOfRow, int kRowsOfBlock>
struct Shape {
  static constexpr int kThreads = kThreadsOfRow, kRows = kRowsOfBlock;
  // Warps of a long row write whole cache lines. A short row would need another round for that.
  static constexpr int kBoundary = kThreads > kWarp ? kCacheLine : 16;
};
using LongRows = Shape<2 * kWarp, 2>;
using ShortRows = Shape<kWarp, 16>;

// eq. 8: softmax(x)_v * G, less G_blank and G_label at their columns, times the upstream gradient.
template <typename Acc>
struct TokenGradient {
  // share: G times the upstream gradient over the row's sum of exp(x - max)
  Acc max, share, scaled_blank, scaled_label;
  int blank, label;  // label -1: no such column
  Acc limit;         // of every entry: clamp times the upstream gradient, or +inf

  __device__ __forceinline__ Acc operator()(Acc x, int v) const {
    const Acc softmax_part = exp_of(x - max) * share;
    return clamped(softmax_part - (v == blank ? scaled_blank : Acc(0)) - (v == label ? scaled_label : Acc(0)), limit);
  }
};

// What a row needs of its node, and the gradients of its first duration logits.
template <typename S>
struct RowTask {
  using Acc = accumulate_t<S>;
  TokenGradient<Acc> gradient;
  Acc G;  // G_blank + G_label
  const S* x;
  S *grad_x, *grad_z;
  Acc durations[kNodeLanes];
};

// The elements of a row outside its vectors, one a thread: the head, and from thread kTailThread on the tail with as
// many gradients of durations as lie behind it.
template <typename S>
struct RowEnds {
  static constexpr int kTailThread = kWarp / 2;
  static_assert(Vector<S>::kSize - 1 + kNodeLanes <= kWarp - kTailThread);
  int element;  // of this thread, or -1

  template <class Split>
  __device__ RowEnds(const Split& split, int n, int thread) {
    const int in_tail = thread - kTailThread;
    element = thread < split.head ? thread : in_tail >= 0 && in_tail < n - split.tail ? split.tail + in_tail : -1;
  }
};

// The vectors of a row, all alike, by kThreads threads.
template <int kThreads, Caching caching, typename S, class Split>
__device__ void fill_vectors(S* out, const Split& split, accumulate_t<S> value, int thread) {
  const Vector<S> filled = Vector<S>::of(value);
#pragma unroll 1
  for (int i = thread - split.skipped; i < split.vectors; i += kThreads) {
    if (split.has(i)) filled.template store<caching>(out + split.head + i * Vector<S>::kSize);
  }
}

// eq. 8 of the vectors of a row, but for the columns of blank and label. `alignment`: of the logits.
template <Alignment alignment, int kThreads, typename S, class Split>
__device__ __forceinline__ void transform_vectors(const TokenGradient<accumulate_t<S>>& gradient, const S* x, S* out,
                                                  const Split& split, int thread) {
  using Acc = accumulate_t<S>;
  constexpr int kSize = Vector<S>::kSize, kStride = kThreads * kUnroll;
  const Acc max = gradient.max, share = gradient.share, limit = gradient.limit;
  const bool clamps = limit < static_cast<Acc>(INFINITY);
  int i = thread - split.skipped;
  const S* from = x + split.head + i * kSize;
  S* to = out + split.head + i * kSize;
  for (; i < split.vectors; i += kStride, from += kStride * kSize, to += kStride * kSize) {
    Vector<S> loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (split.has(i + k * kThreads)) loaded[k] = load_vector<alignment>(from + k * kThreads * kSize);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      if (split.has(i + k * kThreads)) {
        Acc values[kSize];
#pragma unroll
        for (int j = 0; j < kSize; ++j) values[j] = exp_of(loaded[k].at(j) - max) * share;
        if (clamps) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) values[j] = clamped(values[j], limit);
        }
        Vector<S>::pack(values).store(to + k * kThreads * kSize);
      }
    }
  }
}

// The gradients of a row's V tokens and of its first durations.
template <typename S, class Shape>
__device__ void write_row(const RowTask<S>& task, int V, int D, Layout layout, int thread) {
  using Acc = accumulate_t<S>;
  constexpr int kThreads = Shape::kThreads;
  const S* const x = task.x;
  S* const out = task.grad_x;
  const bool reads = task.G != 0 && !isnan(task.G);  // otherwise the row is 0 or NaN whatever its logits
  const RowSplit<S, Shape::kBoundary> split(out, V);
  const bool joint = layout == Layout::kJoint;
  const RowEnds<S> ends(split, joint ? V + min(D, kNodeLanes) : V, thread);
  if (!joint && thread < min(D, kNodeLanes)) task.grad_z[thread] = narrow<S>(task.durations[thread]);

  if (!reads) {
    fill_vectors<kThreads, Caching::kKept>(out, split, task.G, thread);
    if (ends.element >= 0) out[ends.element] = narrow<S>(ends.element < V ? task.G : task.durations[ends.element - V]);
    return;
  }
  // The columns of blank and label are written again by the thread that wrote them before, which keeps every test for
  // them out of the loop. All single elements are loaded before anything is stored: the compiler must keep a load that
  // follows a store behind it, since both might have the same address.
  const int blank = task.gradient.blank, label = task.gradient.label;
  const bool owns_blank = split.in_body(blank) && split.owner(blank, kThreads) == thread;
  const bool owns_label = split.in_body(label) && split.owner(label, kThreads) == thread;
  S at_blank{}, at_label{}, at_end{};
  if (owns_blank) at_blank = x[blank];
  if (owns_label) at_label = x[label];
  if (ends.element >= 0 && ends.element < V) at_end = x[ends.element];
  // Gradients are stored in whole vectors; the logits may have another alignment.
  const unsigned shift = static_cast<unsigned>(reinterpret_cast<uintptr_t>(x) - reinterpret_cast<uintptr_t>(out)) % 16;
  if (shift == 0) {
    transform_vectors<Alignment::kWhole, kThreads>(task.gradient, x, out, split, thread);
  } else if (sizeof(S) > 2 || shift % 4 == 0) {
    transform_vectors<Alignment::kWords, kThreads>(task.gradient, x, out, split, thread);
  } else if constexpr (sizeof(S) == 2) {
    transform_vectors<Alignment::kOdd, kThreads>(task.gradient, x, out, split, thread);
  }
  if (ends.element >= 0) {
    out[ends.element] =
        narrow<S>(ends.element < V ? task.gradient(widen(at_end), ends.element) : task.durations[ends.element - V]);
  }
  if (owns_blank) out[blank] = narrow<S>(task.gradient(widen(at_blank), blank));
  if (owns_label) out[label] = narrow<S>(task.gradient(widen(at_label), label));
}

}  // namespace tdt::cuda
