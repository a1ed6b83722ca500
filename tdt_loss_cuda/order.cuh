// How blocks share out the nodes of a batch: a block has nodes of one sample, all valid or all padding, and the blocks
// of padding come last. Memory takes the writes of padding alone faster than in between reads (benchmarks/NOTES.md).
#pragma once

#include <algorithm>

#include "launch.cuh"

namespace tdt::cuda {

// Of one sample, valid or not.
TDT_HD uint32_t nodes_of_sample(const Batch& batch) { return static_cast<uint32_t>(batch.max_T) * batch.max_U1; }

// The nodes of a block: n of a sample's valid nodes, or of its padding, from the first-th on.
struct BlockNodes {
  int b;
  Extent extent;
  bool padding;
  uint32_t first;
  int n;

  // Whether the sample's part, all of it, has an r-th node as counted from the block's first.
  __device__ bool has(const Batch& batch, int r) const {
    const uint32_t i = first + r, valid = extent.nodes();
    return i < (padding ? nodes_of_sample(batch) - valid : valid);
  }
  // The r-th of them. Padding consists of the nodes beside the valid ones of each frame, and then of whole frames.
  __device__ Node at(const Batch& batch, int r) const {
    const uint32_t i = first + r, U1 = extent.ok ? extent.U + 1 : 0;
    const uint32_t width = padding ? batch.max_U1 - U1 : U1, beside = padding ? extent.T * width : ~0u;
    if (i < beside) {
      const uint32_t t = i / width;
      return {b, static_cast<int>(t), static_cast<int>((padding ? U1 : 0) + i - t * width)};
    }
    const uint32_t t = batch.by_max_U1.quotient(i - beside);
    return {b, static_cast<int>(extent.T + t), static_cast<int>(i - beside - t * batch.max_U1)};
  }
};

// Blocks of up to kRows nodes each. The order holds within each 32 samples, one for each lane of a warp.
template <int kRows>
struct BlockOrder {
  Divider by_group;  // the blocks that 32 samples have
  unsigned blocks;   // some may have no nodes

  static BlockOrder of(const Batch& batch) {
    const int64_t nodes = nodes_of_sample(batch);
    // Two parts, each rounded up; no block without a node.
    const int64_t of_sample = std::max<int64_t>(1, std::min(nodes, (nodes + kRows - 1) / kRows + 1));
    return {Divider::of(static_cast<int>(std::min(batch.B, kWarp) * of_sample)),
            static_cast<unsigned>(batch.B * of_sample)};
  }

  // Called by all threads of a block; one warp searches.
  __device__ void find(const Batch& batch, BlockNodes* shared) const {
    if (threadIdx.x < kWarp) {
      const BlockNodes nodes = search(batch, threadIdx.x);
      if (threadIdx.x == 0) *shared = nodes;
    }
    __syncthreads();
  }

 private:
  __device__ BlockNodes search(const Batch& batch, int lane) const {
    const uint32_t group = by_group.quotient(blockIdx.x);
    const int b = group * kWarp + lane;
    const Extent extent = b < batch.B ? batch.extent(b) : Extent{0, 0, false};
    const uint32_t valid = extent.nodes(), all = b < batch.B ? nodes_of_sample(batch) : 0;

    uint32_t block = blockIdx.x - group * by_group.divisor;
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const bool padding = part == 1;
      const uint32_t n = padding ? all - valid : valid, blocks_here = (n + kRows - 1) / kRows;
      uint32_t end = blocks_here;  // of the samples up to this lane's
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint32_t before = shuffle_up(kFullMask, end, offset);
        if (lane >= offset) end += before;
      }
      const int owner = count_of(ballot(kFullMask, end <= block));
      if (owner < kWarp) {
        const uint32_t first = (block - shuffle(kFullMask, end - blocks_here, owner)) * kRows;
        const int left = shuffle(kFullMask, n, owner) - first;
        const Extent its{shuffle(kFullMask, extent.T, owner), shuffle(kFullMask, extent.U, owner),
                         shuffle(kFullMask, static_cast<int>(extent.ok), owner) != 0};
        return {static_cast<int>(group) * kWarp + owner, its, padding, first, min(kRows, left)};
      }
      block -= shuffle(kFullMask, end, kWarp - 1);
    }
    return {0, {0, 0, false}, true, 0, 0};
  }
};

}  // namespace tdt::cuda
