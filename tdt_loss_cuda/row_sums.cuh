// A row of logits to the record of its node, by the threads that share it: its log-sum-exp from what each thread has of
// it, eq. 1-3. Of dense logits (logprobs.cu) and of tiles (tile.cu).
#pragma once

#include "rows.cuh"

namespace tdt::cuda {

constexpr int kSumBlock = 128;  // threads of a block
// Threads that fill the largest GPUs: 132 multiprocessors of 2048 threads are a little more than 2^18.
constexpr int kFillsGpu = 1 << 18;

// Where one entry leaves less than this to all others, log(sum) is so small that the piece with that entry, rounded to
// the last digit of 1, would spoil it: it is summed again.
template <typename Acc>
constexpr Acc kSharp = Acc(1) / 64;

// The sum of exp(x - max) over what it has seen. Of a row that one entry dominates, the others matter only in their own
// precision: `peak` is the sum of the piece that raised the maximum last, a little more than 1, and `rest` that of all
// others. NaN and +inf make the sum NaN.
template <typename Acc>
struct SumExp {
  Acc max = negative_infinity<Acc>(), peak = 0, rest = 0;

  // A piece is summed pair by pair before it is added, so that small entries are not lost one by one. Returns whether
  // it holds a new maximum.
  template <int kSize>
  __device__ __forceinline__ bool add(const Acc (&x)[kSize]) {
    Acc own_max = x[0];
#pragma unroll
    for (int j = 1; j < kSize; ++j) own_max = fmax(own_max, x[j]);
    return add(x, own_max);
  }
  template <int kSize>
  __device__ __forceinline__ bool add(const Acc (&x)[kSize], Acc own_max) {
    const Acc new_max = fmax(max, own_max);
    const Acc own = sum_of<0, kSize>(x, reference(new_max));
    const bool rises = new_max > max;
    rest = (rest + (rises ? peak : own)) * exp_of(max - reference(new_max));
    peak = rises ? own : peak;
    max = new_max;
    return rises;
  }

  // What one number leaves: 1, or 0 where it is masked. +inf gives NaN.
  __device__ __forceinline__ static SumExp of(Acc x) {
    return {x, x == negative_infinity<Acc>() ? Acc(0) : x - x + Acc(1), Acc(0)};
  }

  // Several over the lanes of a group, side by side, since each step of one waits for a shuffle. Afterwards they are
  // those of all lanes. The 1 of each lane's maximum is counted apart, so that what is added up is as small as the
  // other entries are.
  template <int kThreads, int kCount>
  __device__ __forceinline__ static void merge(const RowGroup<kThreads>& group, SumExp (&rows)[kCount]) {
    Acc max[kCount], rest[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) max[k] = rows[k].max;
    group.max(max);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const SumExp& row = rows[k];
      const bool has_max = row.max == max[k] && row.peak != 0;
      rest[k] = has_max ? row.peak - Acc(1) + row.rest : (row.peak + row.rest) * exp_of(row.max - reference(max[k]));
      rows[k].peak = static_cast<Acc>(group.count(has_max));
    }
    group.sum(rest);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      rows[k].max = max[k];
      rows[k].rest = rest[k];
    }
  }

  __device__ __forceinline__ Acc sum() const { return peak + rest; }
  __device__ __forceinline__ Acc log_sum() const { return log1p((peak - Acc(1)) + rest); }

 private:
  // 0 for nothing seen or all of it masked, so that exp(-inf - reference) is 0 and not NaN
  __device__ __forceinline__ static Acc reference(Acc max) { return max == negative_infinity<Acc>() ? Acc(0) : max; }

  template <int kFirst, int kCount, int kSize>
  __device__ __forceinline__ static Acc sum_of(const Acc (&x)[kSize], Acc ref) {
    if constexpr (kCount == 1) {
      return exp_of(x[kFirst] - ref);
    } else {
      return sum_of<kFirst, kCount / 2>(x, ref) + sum_of<kFirst + kCount / 2, kCount - kCount / 2>(x, ref);
    }
  }
};

__device__ __forceinline__ __half2 max_of(__half2 a, __half2 b) { return __hmax2(a, b); }
__device__ __forceinline__ __nv_bfloat162 max_of(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2(a, b); }

// The largest element of some vectors; NaN does not count. 16-bit elements are compared two at a time.
template <typename S, int kCount>
__device__ __forceinline__ accumulate_t<S> max_of(const Vector<S> (&x)[kCount]) {
  if constexpr (sizeof(S) == 2) {
    using Pair = std::conditional_t<std::is_same_v<S, Half>, __half2, __nv_bfloat162>;
    Pair max = reinterpret_cast<const Pair*>(&x[0].bits)[0];
#pragma unroll
    for (int j = 1; j < 4 * kCount; ++j) max = max_of(max, reinterpret_cast<const Pair*>(&x[j / 4].bits)[j % 4]);
    return fmax(widen(reinterpret_cast<const S*>(&max)[0]), widen(reinterpret_cast<const S*>(&max)[1]));
  } else {
    accumulate_t<S> max = x[0].at(0);
#pragma unroll
    for (int j = 1; j < Vector<S>::kSize * kCount; ++j)
      max = fmax(max, x[j / Vector<S>::kSize].at(j % Vector<S>::kSize));
    return max;
  }
}

// A thread's elements of a row, in pieces of kUnroll vectors, and those beside the vectors as one more.
// With kBias a number of `bias` is added to each entry; row and bias then start at 16-byte boundaries.
template <typename S, int kThreads, bool kBias = false>
struct PartOfRow {
  using Acc = accumulate_t<S>;
  static constexpr int kEnds = -1;
  SumExp<Acc> sums;
  int peak_piece;  // the first vector of the piece that has the thread's maximum, or kEnds

  __device__ PartOfRow(const S* x, const Acc* bias, int n, int thread);

  // The sums of a part that has the row's maximum, without the rounding of the piece that it is in: the entries equal
  // to it are counted, and the others of the piece added up by themselves.
  __device__ __forceinline__ void separate_peak(const S* x, const Acc* bias, int n, int thread) {
    const RowSplit<S> split(x, n);
    Acc equal = 0;
    const auto add = [&](Acc value) {
      const bool is_max = value == sums.max;
      equal += is_max ? Acc(1) : Acc(0);
      sums.rest += is_max ? Acc(0) : exp_of(value - sums.max);
    };
    if (peak_piece == kEnds) {
      if (thread < split.head) add(entry(x, bias, thread));
      if (thread < n - split.tail) add(entry(x, bias, split.tail + thread));
    } else {
#pragma unroll 1
      for (int k = 0; k < kUnroll && peak_piece + k * kThreads < split.vectors; ++k) {
        const int first = split.head + (peak_piece + k * kThreads) * Vector<S>::kSize;
        const auto vector = Vector<S>::load(x + first);
#pragma unroll
        for (int j = 0; j < Vector<S>::kSize; ++j) add(kBias ? vector.at(j) + bias[first + j] : vector.at(j));
      }
    }
    sums.peak = equal;
  }

  __device__ __forceinline__ static Acc entry(const S* x, const Acc* bias, int v) {
    return kBias ? widen(x[v]) + bias[v] : widen(x[v]);
  }
};

template <typename S, int kThreads, bool kBias>
__device__ PartOfRow<S, kThreads, kBias>::PartOfRow(const S* x, const Acc* bias, int n, int thread)
    : peak_piece(kEnds) {
  constexpr int kSize = Vector<S>::kSize;
  const RowSplit<S> split(x, n);
  const Acc ends[2] = {thread < split.head ? entry(x, bias, thread) : negative_infinity<Acc>(),
                       thread < n - split.tail ? entry(x, bias, split.tail + thread) : negative_infinity<Acc>()};
  constexpr int kStride = kThreads * kUnroll;
  const S* from = x + split.head + thread * kSize;
  for (int i = thread; i < split.vectors; i += kStride, from += kStride * kSize) {
    Vector<S> loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      loaded[k] = Vector<S>::of(negative_infinity<Acc>());
      if (i + k * kThreads < split.vectors) loaded[k] = Vector<S>::load(from + k * kThreads * kSize);
    }
    Acc values[kUnroll * kSize];
#pragma unroll
    for (int j = 0; j < kUnroll * kSize; ++j) values[j] = loaded[j / kSize].at(j % kSize);
    if constexpr (kBias) {
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (i + k * kThreads >= split.vectors) continue;
        const Vector<Acc> own{__ldg(reinterpret_cast<const uint4*>(bias + (i + k * kThreads) * kSize))};
#pragma unroll
        for (int j = 0; j < kSize; ++j) values[k * kSize + j] += own.at(j);
      }
      if (sums.add(values)) peak_piece = i;
    } else if (sums.add(values, max_of(loaded))) {
      peak_piece = i;
    }
  }
  if (sums.add(ends)) peak_piece = kEnds;
}

// What the warps of a block have of one row, together.
template <typename Acc>
__device__ SumExp<Acc> merge_warps(const SumExp<Acc>& own, const RowGroup<kSumBlock>& group) {
  constexpr int kWarps = kSumBlock / kWarp;
  __shared__ SumExp<Acc> of_warp[kWarps];
  __syncthreads();
  if (group.lane == 0) of_warp[group.thread / kWarp] = own;
  __syncthreads();
  SumExp<Acc> row[1];
  if (group.lane < kWarps) row[0] = of_warp[group.lane];
  SumExp<Acc>::merge(group, row);
  return row[0];
}

// The row of this thread.
template <int kThreads>
__device__ int64_t group_row() {
  return static_cast<int64_t>(blockIdx.x) * (kSumBlock / kThreads) + threadIdx.x / kThreads;
}

// eq. 1-3 of a node, by the threads that share its row: x and z its token and duration logits, to which with kBias the
// numbers of `bias` (V + D,) are yet to be added.
template <int kThreads, bool kBias, typename S>
__device__ __forceinline__ void write_record(const Batch& batch, int64_t node, const Node& at, const S* x, const S* z,
                                             const accumulate_t<S>* bias, const NodeRecords<accumulate_t<S>>& out,
                                             const Emission& emission) {
  using Acc = accumulate_t<S>;
  using Part = PartOfRow<S, kThreads, kBias>;
  const Acc* const bias_of_durations = kBias ? bias + batch.V : nullptr;
  const RowGroup<kThreads> group;
  const auto [b, t, u] = at;
  const Extent extent = batch.extent(b);
  const int R = record_size(batch.D);
  Acc* record = out.node_lp + node * R;
  if (!extent.has(t, u)) {
#pragma unroll 1
    for (int field = group.thread; field < R; field += kThreads) record[field] = Acc(0);
    return;
  }

  // Everything but the row itself is loaded first, to arrive while the row does. Lane l has field l of the record,
  // and l + kLanes and so on where there are many durations.
  const auto duration_logit = [&](int field) {
    const int i = field - kDurLp;
    return i >= 0 && i < batch.D ? Part::entry(z, bias_of_durations, i) : negative_infinity<Acc>();
  };
  const int y = u < extent.U ? batch.label(b, u) : -1;
  const Acc x_blank = Part::entry(x, bias, emission.blank);
  const Acc x_label = y < 0 ? negative_infinity<Acc>() : Part::entry(x, bias, y);
  const Acc first = duration_logit(group.lane);

  Part part(x, bias, batch.V, group.thread);
  SumExp<Acc> rows[2] = {part.sums, SumExp<Acc>::of(first)};
  auto& [tokens, durations] = rows;
#pragma unroll 1
  for (int field = group.lane + group.kLanes; field < R; field += group.kLanes) durations.add({duration_logit(field)});
  SumExp<Acc>::merge(group, rows);
  if constexpr (kThreads > kWarp) tokens = merge_warps(tokens, group);
  if (tokens.peak == Acc(1) && tokens.rest < kSharp<Acc>) {  // for all threads of the row or for none
    if (part.sums.max == tokens.max) part.separate_peak(x, bias, batch.V, group.thread);
    SumExp<Acc> again[1] = {part.sums};
    SumExp<Acc>::merge(group, again);
    tokens = again[0];
    if constexpr (kThreads > kWarp) tokens = merge_warps(tokens, group);
  }
  if (group.thread >= kWarp) return;  // the record is one warp's
  if (group.lane == 0) out.row_max[node] = tokens.max;

  const Acc sigma = static_cast<Acc>(emission.sigma);
  const Acc delay = static_cast<Acc>(emission.delay_penalty * (0.5 * (extent.T - 1) - t));  // eq. 10
#pragma unroll 1
  for (int field = group.lane; field < R; field += group.kLanes) {
    const bool of_token = field < kDurLp;
    Acc logit = field == group.lane ? first : duration_logit(field);
    if (of_token) logit = field == kBlankLp ? x_blank : x_label;
    SumExp<Acc> row_of_field = durations;
    if (of_token) row_of_field = tokens;
    Acc value = logit - row_of_field.max - row_of_field.log_sum();                    // eq. 3
    if (of_token) value -= sigma;                                                     // eq. 1
    if (field == kLabelLp) value = y < 0 ? negative_infinity<Acc>() : value + delay;  // eq. 2
    if (field == kRowSum) value = tokens.sum();
    record[field] = field < kDurLp + batch.D ? value : Acc(0);
  }
}

}  // namespace tdt::cuda
