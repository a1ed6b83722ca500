// The equations of the package. Every file cites them by number; there is no code here.
//
// clang-format off
//
// Node (t, u): t frames and u labels behind us. x and z are its token and duration logits, d_0 ... d_{D-1} the
// durations. T and U are the frames and labels of the sample, y its labels. lse is log-sum-exp over a row.
//
//   lp_blank(t,u) = x[blank]   - lse(x) - sigma                                                                 (1)
//   lp_label(t,u) = x[y_{u+1}] - lse(x) - sigma + delay(t)          (u < U)                                     (2)
//   lp_dur_i(t,u) = z_i - lse(z)                                                                                (3)
//
// Arcs out of (t,u), for each i: blank (d_i > 0) to (t + d_i, u); label (u < U) to (t + d_i, u + 1). Their weight is
// lp_blank or lp_label, plus lp_dur_i. An arc lands on a frame t < T, but for the final blank from (t, U) with
// t + d_i = T, which takes the exit.
//
//   alpha(0,0) = 0; alpha(t,u) = logsumexp over the arcs into (t,u) of alpha(source) + weight                   (4)
//   beta(exit) = 0; beta(t,u)  = logsumexp over the arcs out of (t,u) of weight + beta(target); LL = beta(0,0)  (5)
//   loss = -LL                                                                                                  (6)
//   occ(arc) = exp(alpha(source) + weight + beta(target) - LL)                                                  (7)
//
// RNN-T is the same lattice with two arcs, a blank of one frame and a label of none, and no lp_dur in their weights.
//
// G_blank and G_label are sums of occ over the blank and the label arcs of a node, G = G_blank + G_label; G_i is the
// sum over both arcs of duration i, and G_tdt the sum of all G_i.
//
//   d loss / d x_v = softmax(x)_v G - [v = blank] G_blank - [v = y_{u+1}] G_label                               (8)
//   d loss / d z_i = softmax(z)_i G_tdt - G_i                                                                   (9)
//
// Options:
//
//   delay(t) = delay_penalty ((T - 1) / 2 - t)                                                                 (10)
//   loss = w_TDT loss_TDT + w_RNNT loss_RNNT, with w_TDT = 1 - omega and w_RNNT = omega; the sums over arcs
//     then run over both lattices, each arc with the weight of its own, but for G_tdt and G_i                  (11)
//   in the sums, occ of a label arc counts 1 + fastemit_lambda times; the loss does not change                 (12)
//   each entry of d loss / d x and d loss / d z is held within [-clamp, clamp], before the upstream
//     gradient and the weight of the reduction multiply it; clamp <= 0: is not                                 (13)
//
// clang-format on
#pragma once
