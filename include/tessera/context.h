// ContextParallel: rows whose positions the ranks of an axis share, for a custom attention.
//
//   const tessera::ContextParallel rows(mesh, ids.size(1));     // axis "cp"
//   const auto x = embed(rows.cut(ids, 1));                     // [B, n, hidden], n = T / ranks
//   const auto k = rows.gather(own_k, 2);                       // [B, heads, T, head_dim]
//   attention of own queries with rows.causal_mask(device)      // [n, T]
//
// Every rank is given the same whole rows and computes with its own positions; attention alone
// needs those of the others. fully_shard() sums gradients over an axis cp as over dp_shard, so that
// a loss is the sum of own losses over the number of all labels, with ShardOptions::divide_factor =
// 1. Labels are shifted before rows are cut. Example: examples/08_context.cpp. Source: Llama 3
// (arXiv 2407.21783, section 3.3.2), which gathers keys and values. Short symbols: B rows, T
// positions of a row, n own ones. Next: mesh.h, shard.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

class Mesh;

/// How ContextParallel cuts rows.
struct ContextOptions {
  std::string axis = "cp";  ///< of the mesh, in either reading
  /// Equal parts that a row is cut into, a multiple of twice the ranks; 0: twice the ranks. Each
  /// rank has one from the head and one from the tail of a row, or several: a causal mask of one
  /// document gives all the same work. With `work` a multiple of the ranks, or 0: as many as it
  /// has.
  int parts = 0;
  /// The work of each part in any unit, for rows of several documents: the part with the most work
  /// goes first, to the rank with the least. The same values on every rank; empty: head and tail.
  std::vector<double> work = {};
};

/// A value, cheap to copy. Threads: the rank's.
class ContextParallel {
 public:
  /// Rows of `positions`. Collective among the ranks of the axis. Errors: kConfig for positions
  /// that parts do not divide, with the nearest valid ones, for parts that the ranks cannot share,
  /// for work that is not that of each part, negative or not finite, and as Mesh::ranks_of();
  /// kUsage where ranks of the axis would cut in different ways.
  ContextParallel(const Mesh& mesh, std::int64_t positions, const ContextOptions& options = {});

  std::int64_t positions() const;      ///< T
  std::int64_t own_positions() const;  ///< n
  /// Returns the places of own positions in their rows, ascending: what position embeddings and
  /// dropout go by.
  const std::vector<std::int64_t>& places() const;

  /// whole [..., T, ...] in dim `dim` -> own positions [..., n, ...]. A gradient is that of own
  /// positions, zero elsewhere: an addend of the ranks. Errors: kUsage for another size.
  at::Tensor cut(const at::Tensor& whole, std::int64_t dim) const;
  /// own [..., n, ...] in dim `dim` -> the positions of all ranks, [..., T, ...], in the order of
  /// the row. Its backward takes this rank's addend to the gradient and returns the sum over ranks
  /// of own positions, formed in fp32 (fp64 for fp64) in the order of the ranks' first parts and
  /// rounded once. Collective in both directions: all ranks call it in the same order, and whether
  /// `own` requires a gradient is the same on all. A rank sends n x (ranks - 1) positions, and
  /// backward as many in fp32. Errors: kUsage for another size; kComm.
  at::Tensor gather(const at::Tensor& own, std::int64_t dim) const;
  /// [n, T] bool: whether a position of this rank sees a key, itself and those before it.
  at::Tensor causal_mask(at::Device device = at::kCPU) const;

 private:
  struct Rows;
  std::shared_ptr<const Rows> rows_;
};

}  // namespace tessera
