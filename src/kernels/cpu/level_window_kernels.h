// The kernels of attention with windows and sinks. Included by level.cpp only, as level_kernels.h.
#pragma once

#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

namespace tessera::kernels::cpu::TESSERA_CPU_LEVEL {

/// Keys [begin, end).
struct SeenKeys {
  long begin, end;
};
TESSERA_LANES_INLINE SeenKeys seen_keys(const WindowRows& job, long row) {
  const long end = job.first + (row % job.period) / job.repeat + 1;
  return {end > job.window ? end - job.window : 0, end};
}

TESSERA_LANES_INLINE void clear_unseen(float* row, const SeenKeys& seen, long keys) {
  __builtin_memset(row, 0, static_cast<unsigned long>(seen.begin) * sizeof(float));
  __builtin_memset(row + seen.end, 0, static_cast<unsigned long>(keys - seen.end) * sizeof(float));
}

inline void window_softmax(const WindowRows& job, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    float* all_scores = job.scores + row * job.keys;
    const SeenKeys seen = seen_keys(job, row);
    float* scores = all_scores + seen.begin;
    const long visible = seen.end - seen.begin;
    Lanes top = all(-__builtin_inff());
    for_lanes(visible, [&](long i, long count) {
      top = max(top, load(scores + i, count, -__builtin_inff()) * job.scale);
    });
    float highest = greatest(top);
    float sink = 0.0F;
    if (job.sinks != nullptr) {
      sink = job.sinks[row / job.period % job.groups * job.repeat + row % job.repeat];
      highest = sink > highest ? sink : highest;
    }
    Lanes total = {};
    for_lanes(visible, [&](long i, long count) {
      const Lanes value = exp(load(scores + i, count, -__builtin_inff()) * job.scale - highest);
      store(scores + i, value, count);
      total += value;
    });
    const float of_sink = job.sinks == nullptr ? 0.0F : exp(all(sink - highest))[0];
    const float share = 1.0F / (sum(total) + of_sink);
    if (job.sinks != nullptr) job.shares[row] = of_sink * share;
    for_lanes(visible, [&](long i, long count) {
      store(scores + i, load(scores + i, count) * share, count);
    });
    clear_unseen(all_scores, seen, job.keys);
  }
}

inline void window_softmax_backward(const WindowRows& job, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const SeenKeys seen = seen_keys(job, row);
    float* grad = job.scores + row * job.keys + seen.begin;
    const float* weights = job.weights + row * job.keys + seen.begin;
    const long visible = seen.end - seen.begin;
    Lanes products = {};
    for_lanes(visible, [&](long i, long count) {
      products += load(grad + i, count) * load(weights + i, count);
    });
    const float mean = sum(products);
    for_lanes(visible, [&](long i, long count) {
      store(grad + i, load(weights + i, count) * (load(grad + i, count) - mean) * job.scale, count);
    });
    clear_unseen(job.scores + row * job.keys, seen, job.keys);
    if (job.shares != nullptr) job.shares[row] *= -mean;
  }
}

}  // namespace tessera::kernels::cpu::TESSERA_CPU_LEVEL
