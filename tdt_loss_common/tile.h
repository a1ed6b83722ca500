// Tiles of the loss without the logits: rows of joint logits in the accumulation dtype as a product leaves them, to
// which the bias is yet to be added. What a product of 16-bit operands sums in float32 is not rounded to 16 bits before
// it is used.
#pragma once

#include "occupancy.h"

namespace tdt {

template <typename Acc>
struct Tile {
  Batch batch;
  NodeList list;
  int64_t stride;   // a multiple of kTileColumns
  const Acc* rows;  // (list.n, stride): tokens, durations, columns that nobody reads
  const Acc* bias;  // (stride,)
};
constexpr int kTileColumns = 8;

// eq. 1-3 of a tile's nodes.
template <typename Acc>
struct TileLogProbs {
  Tile<Acc> tile;
  Emission emission;
  NodeRecords<Acc> out;
};

// eq. 7-9 of a tile's nodes, and the sums of each kRows rows, which are what the bias has for a gradient.
template <typename S, typename Acc>
struct TileGradient {
  static constexpr int kRows = 32;
  Tile<Acc> tile;
  Saved<Acc> saved;
  Upstream<Acc> upstream;
  Shaping<Acc> shaping;
  S* out;            // (list.n, stride): may be the tile, where the types agree
  Acc* column_sums;  // (ceil(list.n / kRows), stride), or null
};

// What a row needs of its node.
template <typename Acc>
struct RowGradient {
  Acc max, share;  // share: G times the upstream gradient over the row's sum of exp(x - max)
  Acc scaled_blank, scaled_label;
  Acc limit;   // of every entry
  Acc filled;  // 0 or NaN: where the logits are not read, what each entry is
  int label;   // -1: no such column
  bool reads;

  // eq. 8
  TDT_HD Acc at(Acc softmax_part, int v, int blank) const {
    return clamped(softmax_part - (v == blank ? scaled_blank : Acc(0)) - (v == label ? scaled_label : Acc(0)), limit);
  }
};

// The node of a row, and eq. 9 of its durations into `durations` (D,).
template <typename S, typename Acc>
TDT_HD RowGradient<Acc> row_gradient(const TileGradient<S, Acc>& p, const Node& at, Acc* durations) {
  const Batch& batch = p.tile.batch;
  const Extent extent = batch.extent(at.b);
  const Acc scale = p.upstream.at(at.b);
  Acc G_tdt;
  const NodeSums<Acc> G = node_sums(batch, extent, at, p.saved, p.shaping, &G_tdt);
  const OccupiedNode<Acc> occupied = occupied_node(batch, extent, at, p.shaping.arcs[0], p.saved, 0);
  for (int i = 0; i < batch.D; ++i) {
    const bool any = !(G_tdt == 0) && !(G_tdt != G_tdt);
    const ArcPair<Acc> occ = any ? occupied.arc(i) : ArcPair<Acc>{0, 0};
    const Acc dur_lp = any ? occupied.record[kDurLp + i] : Acc(0);
    durations[i] = duration_entry(p.shaping, dur_lp, occ, G_tdt, scale);
  }
  const Acc both = G.blank + G.label;
  const bool reads = both != 0 && !(both != both);
  RowGradient<Acc> row{0, 0, 0, 0, p.shaping.limit(scale), both, -1, reads};
  if (!reads) return row;
  row.max = p.saved.row_max[batch.node(at.b, at.t, at.u)];
  row.share = both * scale / occupied.record[kRowSum];
  row.scaled_blank = G.blank * scale;
  row.scaled_label = G.label * scale;
  row.label = at.u < extent.U ? batch.label(at.b, at.u) : -1;
  return row;
}

}  // namespace tdt
