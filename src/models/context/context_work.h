// Work of attention by parts of a row, and the cut of a micro-batch that shares it equally among
// ranks of context parallelism.
//
// All layers count, each with its own window or chunks: a cut made for one kind of mask would be
// wrong for the others. Layers with a recurrent state and those that see nothing count nothing.
// Images that are read both ways count as text. The host computes it once a micro-batch, from what
// all ranks of cp have. Next: ../layout/context_cut.h, ../kernels/seen_blocks.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "layout/context_cut.h"
#include "models/model_spec.h"

namespace tessera::models {

/// Returns for each of `parts` equal parts of the rows the multiplications of one head of every
/// layer: pairs of query and key that blocks of the CPU's kernels compute, times the dims of a pair
/// (LayerAttention). `starts` [rows, positions] i64 as of Documents, on the host; undefined: every
/// row is one document. Errors: kInternal for parts that do not divide the positions.
std::vector<double> context_work(const ModelSpec& spec, std::int64_t positions, std::int64_t rows,
                                 int parts, const at::Tensor& starts);

/// Returns head_tail where rows are not packed, where the host cannot read `starts`, or where ranks
/// have at most two parts each; else by_work. Errors: kConfig as these.
layout::ContextCut context_cut(const ModelSpec& spec, int ranks, int parts, std::int64_t positions,
                               const at::Tensor& starts);

}  // namespace tessera::models
