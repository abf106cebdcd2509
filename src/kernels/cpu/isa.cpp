// The kernels, and one instruction set's table of them: compiled once for each set, with
// TESSERA_CPU_ISA and its flags.
#include "kernels/cpu/simd.h"
#include "kernels/cpu/tables.h"

namespace tessera::kernels::cpu::TESSERA_CPU_ISA {

template <class T, class W>
void norm_forward(const NormForward<T, W>& job, long begin, long end) {
  const long columns = job.columns;
  for (long row = begin; row < end; ++row) {
    const T* x = job.x + row * columns;
    const T* residual = job.residual == nullptr ? nullptr : job.residual + row * columns;
    T* total = job.sum == nullptr ? nullptr : job.sum + row * columns;
    Lanes squares = {};
    for_lanes(columns, [&](long i, long count) {
      Lanes value = load(x + i, count);
      if (residual != nullptr) {
        // The norm reads the rounded sum, as the layers after it do.
        store(total + i, value + load(residual + i, count), count);
        value = load(total + i, count);
      }
      squares += value * value;
    });
    const float mean = sum(squares) / static_cast<float>(columns);
    const float scale = 1.0F / __builtin_sqrtf(mean + job.eps);
    job.scale[row] = scale;
    const T* normed = total == nullptr ? x : total;
    T* y = job.y + row * columns;
    for_lanes(columns, [&](long i, long count) {
      store(y + i, load(normed + i, count) * scale * load(job.weight + i, count), count);
    });
  }
}

template <class T, class W>
void norm_backward(const NormBackward<T, W>& job, long begin, long end) {
  const long columns = job.columns;
  for (long row = begin; row < end; ++row) {
    const T* grad = job.grad + row * columns;
    const T* grad_sum = job.grad_sum == nullptr ? nullptr : job.grad_sum + row * columns;
    const T* x = job.x + row * columns;
    T* grad_x = job.grad_x + row * columns;
    const float scale = job.scale[row];
    Lanes products = {};
    for_lanes(columns, [&](long i, long count) {
      const Lanes weighted_x = load(grad + i, count) * load(x + i, count);
      products += weighted_x * load(job.weight + i, count);
      if (job.grad_weight == nullptr) return;  // not requested
      store(job.grad_weight + i, load(job.grad_weight + i, count) + weighted_x * scale, count);
    });
    const float along = sum(products) * scale * scale * scale / static_cast<float>(columns);
    for_lanes(columns, [&](long i, long count) {
      Lanes value =
          load(grad + i, count) * load(job.weight + i, count) * scale - load(x + i, count) * along;
      if (grad_sum != nullptr) value += load(grad_sum + i, count);
      store(grad_x + i, value, count);
    });
  }
}

/// The offset of head `head` of token `token` in [B, H/R, T, R, D].
template <class Job>
TESSERA_LANES_INLINE long rotated_place(const Job& job, long token, long head) {
  const long row = token / job.positions;
  const long position = token % job.positions;
  const long groups = job.heads / job.repeat;
  const long group = head / job.repeat;
  return (((row * groups + group) * job.positions + position) * job.repeat + head % job.repeat) *
         job.head_dim;
}

template <class T, class W>
TESSERA_LANES_INLINE void rotate_half(const HeadsForward<T, W>& job, long token, long head) {
  const long half = job.head_dim / 2;
  const T* x = job.x + (token * job.heads + head) * job.head_dim;
  T* y = job.y + rotated_place(job, token, head);
  const T* cos = job.cos + (token % job.table) * half;
  const T* sin = job.sin + (token % job.table) * half;
  float scale = 1.0F;
  if (job.weight != nullptr) {
    Lanes squares = {};
    for_lanes(job.head_dim, [&](long i, long count) {
      const Lanes value = load(x + i, count);
      squares += value * value;
    });
    scale = 1.0F / __builtin_sqrtf(sum(squares) / static_cast<float>(job.head_dim) + job.eps);
    job.scale[token * job.heads + head] = scale;
  }
  for_lanes(half, [&](long i, long count) {
    Lanes first = load(x + i, count);
    Lanes second = load(x + half + i, count);
    if (job.weight != nullptr) {
      first *= scale * load(job.weight + i, count);
      second *= scale * load(job.weight + half + i, count);
    }
    const Lanes c = load(cos + i, count);
    const Lanes s = load(sin + i, count);
    store(y + i, first * c - second * s, count);
    store(y + half + i, second * c + first * s, count);
  });
}

template <class T, class W>
void heads_forward(const HeadsForward<T, W>& job, long begin, long end) {
  for (long token = begin; token < end; ++token) {
    for (long head = 0; head < job.heads; ++head) rotate_half(job, token, head);
  }
}

template <class T, class W>
TESSERA_LANES_INLINE void rotate_half_back(const HeadsBackward<T, W>& job, long token, long head) {
  const long half = job.head_dim / 2;
  const long place = (token * job.heads + head) * job.head_dim;
  const T* x = job.x + place;
  T* grad_x = job.grad_x + place;
  const T* grad = job.grad + rotated_place(job, token, head);
  const T* cos = job.cos + (token % job.table) * half;
  const T* sin = job.sin + (token % job.table) * half;
  const auto unturned = [&](long i, long count, Lanes& first, Lanes& second)
                            __attribute__((always_inline)) {
                              const Lanes c = load(cos + i, count);
                              const Lanes s = load(sin + i, count);
                              const Lanes a = load(grad + i, count);
                              const Lanes b = load(grad + half + i, count);
                              first = a * c + b * s;
                              second = b * c - a * s;
                            };
  if (job.weight == nullptr) {
    for_lanes(half, [&](long i, long count) {
      Lanes first, second;
      unturned(i, count, first, second);
      store(grad_x + i, first, count);
      store(grad_x + half + i, second, count);
    });
    return;
  }
  const float scale = job.scale[token * job.heads + head];
  Lanes products = {};
  for_lanes(half, [&](long i, long count) {
    Lanes first, second;
    unturned(i, count, first, second);
    first *= load(x + i, count);
    second *= load(x + half + i, count);
    products += first * load(job.weight + i, count) + second * load(job.weight + half + i, count);
    if (job.grad_weight == nullptr) return;
    float* sums = job.grad_weight + i;
    store(sums, load(sums, count) + first * scale, count);
    store(sums + half, load(sums + half, count) + second * scale, count);
  });
  const float along = sum(products) * scale * scale * scale / static_cast<float>(job.head_dim);
  for_lanes(half, [&](long i, long count) {
    Lanes first, second;
    unturned(i, count, first, second);
    first = first * load(job.weight + i, count) * scale - load(x + i, count) * along;
    second =
        second * load(job.weight + half + i, count) * scale - load(x + half + i, count) * along;
    store(grad_x + i, first, count);
    store(grad_x + half + i, second, count);
  });
}

template <class T, class W>
void heads_backward(const HeadsBackward<T, W>& job, long begin, long end) {
  for (long token = begin; token < end; ++token) {
    for (long head = 0; head < job.heads; ++head) rotate_half_back(job, token, head);
  }
}

/// The keys [begin, end).
struct SeenRange {
  long begin, end;
  TESSERA_LANES_INLINE long size() const { return end - begin; }
};
TESSERA_LANES_INLINE SeenRange seen_keys(const SeenByRows& seen, long row) {
  const long query = row % seen.period / seen.repeat;
  const long place = row / seen.period / seen.groups * (seen.period / seen.repeat) + query;
  const long behind = seen.first + query + 1;
  const long end = seen.ends == nullptr ? behind : seen.ends[place] - seen.from;
  const long of_window = behind > seen.window ? behind - seen.window : 0;
  const long first = seen.begins == nullptr ? 0 : seen.begins[place] - seen.from;
  SeenRange range{first > of_window ? first : of_window, end < seen.keys ? end : seen.keys};
  if (range.begin > range.end) range.begin = range.end;
  return range;
}

template <class T>
TESSERA_LANES_INLINE void clear_hidden(T* row, const SeenRange& seen, long keys) {
  __builtin_memset(row, 0, static_cast<unsigned long>(seen.begin) * sizeof(T));
  __builtin_memset(row + seen.end, 0, static_cast<unsigned long>(keys - seen.end) * sizeof(T));
}

template <class T>
void causal_softmax(const CausalRows<T>& job, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    T* all_scores = job.scores + row * job.seen.keys;
    const SeenRange seen = seen_keys(job.seen, row);
    T* scores = all_scores + seen.begin;
    Lanes top = all(-__builtin_inff());
    for_lanes(seen.size(), [&](long i, long count) {
      top = max(top, load(scores + i, count, -__builtin_inff()));
    });
    // exp(scale * (s - top)): scale is positive.
    const float highest = greatest(top);
    float exponentials[kLanes * 64];
    constexpr long kKept = kLanes * 64;
    Lanes total = {};
    for_lanes(seen.size(), [&](long i, long count) {
      const Lanes value = exp((load(scores + i, count, -__builtin_inff()) - highest) * job.scale);
      if (i < kKept) store(exponentials + i, value);
      total += value;
    });
    const float share = 1.0F / sum(total);
    if (job.sums != nullptr) {
      job.sums[2 * row] = highest;
      job.sums[2 * row + 1] = share;
    }
    for_lanes(seen.size(), [&](long i, long count) {
      const Lanes value =
          i < kKept ? load(exponentials + i)
                    : exp((load(scores + i, count, -__builtin_inff()) - highest) * job.scale);
      store(scores + i, value * share, count);
    });
    clear_hidden(all_scores, seen, job.seen.keys);
  }
}

template <class T>
void causal_softmax_backward(const CausalRows<T>& job, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const SeenRange seen = seen_keys(job.seen, row);
    T* grad = job.scores + row * job.seen.keys + seen.begin;
    T* weights = job.weights + row * job.seen.keys + seen.begin;
    const float highest = job.sums[2 * row];
    const float share = job.sums[2 * row + 1];
    Lanes products = {};
    for_lanes(seen.size(), [&](long i, long count) {
      store(weights + i, exp((load(weights + i, count) - highest) * job.scale) * share, count);
      products += load(grad + i, count) * load(weights + i, count);
    });
    const float mean = sum(products);
    for_lanes(seen.size(), [&](long i, long count) {
      const Lanes value = load(weights + i, count) * (load(grad + i, count) - mean) * job.scale;
      store(grad + i, value, count);
    });
    clear_hidden(job.scores + row * job.seen.keys, seen, job.seen.keys);
    clear_hidden(job.weights + row * job.seen.keys, seen, job.seen.keys);
  }
}

template <class T>
void swiglu_forward(const Swiglu<T>& job, long begin, long end) {
  for_lanes(end - begin, [&](long i, long count) {
    const Lanes gate = load(job.gate + begin + i, count);
    store(job.out + begin + i, gate * sigmoid(gate) * load(job.up + begin + i, count), count);
  });
}

template <class T>
void swiglu_backward(const Swiglu<T>& job, long begin, long end) {
  for_lanes(end - begin, [&](long i, long count) {
    const Lanes gate = load(job.gate + begin + i, count);
    const Lanes grad = load(job.grad + begin + i, count);
    const Lanes up = load(job.up + begin + i, count);
    const Lanes open = sigmoid(gate);
    store(job.grad_up + begin + i, grad * gate * open, count);
    store(job.grad_gate + begin + i, grad * up * open * (1.0F + gate * (1.0F - open)), count);
  });
}

/// The values that forward and backward both begin with, in fp32.
struct ClampedLanes {
  Lanes gate, up;                     ///< clamped; NaN stays NaN
  Lanes open;                         ///< sigmoid(alpha * gate)
  IntLanes gate_is_free, up_is_free;  ///< not clamped: those have a gradient
};

template <class T>
TESSERA_LANES_INLINE ClampedLanes clamped(const ClampedSwigluJob<T>& job, long begin, long count) {
  const LanePairs in = load_pairs(job.both + 2 * begin, count);
  const Lanes limit = all(job.limit);
  ClampedLanes found;
  found.gate_is_free = in.even <= limit;
  found.up_is_free = (in.odd <= limit) & (in.odd >= -limit);
  found.gate = in.even > limit ? limit : in.even;
  const Lanes below = in.odd > limit ? limit : in.odd;
  found.up = below < -limit ? -limit : below;
  // A gate of -inf times an open that is not quite 0 would be -inf, not the formula's NaN.
  const Lanes turned = found.gate * job.alpha;
  found.open = turned < -87.0F ? Lanes{} : sigmoid(turned);
  return found;
}

template <class T>
void clamped_swiglu_forward(const ClampedSwigluJob<T>& job, long begin, long end) {
  for_lanes(end - begin, [&](long i, long count) {
    const ClampedLanes in = clamped(job, begin + i, count);
    store(job.out + begin + i, (in.up + 1.0F) * (in.gate * in.open), count);
  });
}

template <class T>
void clamped_swiglu_backward(const ClampedSwigluJob<T>& job, long begin, long end) {
  for_lanes(end - begin, [&](long i, long count) {
    const ClampedLanes in = clamped(job, begin + i, count);
    const Lanes grad = load(job.grad + begin + i, count);
    const Lanes grad_gated = grad * (in.up + 1.0F);
    const Lanes grad_gate =
        grad_gated * in.open + grad_gated * in.gate * (1.0F - in.open) * in.open * job.alpha;
    const Lanes grad_up = grad * (in.gate * in.open);
    store_pairs(job.grad_both + 2 * (begin + i),
                {in.gate_is_free ? grad_gate : Lanes{}, in.up_is_free ? grad_up : Lanes{}}, count);
  });
}

template <class T>
void cross_entropy_forward(const CrossEntropy<T>& job, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const long target = job.targets[row];
    if (target < 0) {
      job.loss[row] = 0.0;
      job.log_sum[row] = 0.0F;  // read only by comparisons of results
      continue;
    }
    const T* logits = job.logits + row * job.vocabulary;
    Lanes top = all(-__builtin_inff());
    for_lanes(job.vocabulary, [&](long i, long count) {
      top = max(top, load(logits + i, count, -__builtin_inff()));
    });
    const float highest = greatest(top);
    Lanes total = {};
    for_lanes(job.vocabulary, [&](long i, long count) {
      total += exp(load(logits + i, count, -__builtin_inff()) - highest);
    });
    const float log_sum = highest + __builtin_logf(sum(total));
    job.log_sum[row] = log_sum;
    job.loss[row] = static_cast<double>(log_sum) - static_cast<double>(load(logits + target, 1)[0]);
  }
}

template <class T>
void cross_entropy_backward(const CrossEntropy<T>& job, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const long target = job.targets[row];
    T* grad = job.grad_logits + row * job.vocabulary;
    if (target < 0) {
      __builtin_memset(grad, 0, static_cast<unsigned long>(job.vocabulary) * sizeof(T));
      continue;
    }
    const T* logits = job.logits + row * job.vocabulary;
    const float log_sum = job.log_sum[row];
    const float at_target = load(logits + target, 1)[0];
    for_lanes(job.vocabulary, [&](long i, long count) {
      store(grad + i, exp(load(logits + i, count) - log_sum) * job.grad, count);
    });
    const Lanes target_grad = (exp(all(at_target - log_sum)) - 1.0F) * job.grad;
    store(grad + target, target_grad, 1);
  }
}

template <class T>
void embedding_backward(const EmbeddingBackward<T>& job, long begin, long end) {
  // A range may begin inside a token's run: the range that holds the run's beginning adds all of
  // it.
  long place = begin;
  while (place < end && place > 0 && job.tokens[place] == job.tokens[place - 1]) ++place;
  while (place < end) {
    const long token = job.tokens[place];
    long after = place + 1;
    while (job.tokens[after] == token) ++after;
    for_lanes(job.columns, [&](long i, long count) {
      Lanes total = {};
      for (long k = place; k < after; ++k) {
        total += load(job.grad + job.order[k] * job.columns + i, count);
      }
      store(job.grad_weight + token * job.columns + i, total, count);
    });
    place = after;
  }
}

inline void window_softmax(const WindowRows& job, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    float* all_scores = job.scores + row * job.seen.keys;
    const SeenRange seen = seen_keys(job.seen, row);
    float* scores = all_scores + seen.begin;
    Lanes top = all(-__builtin_inff());
    for_lanes(seen.size(), [&](long i, long count) {
      top = max(top, load(scores + i, count, -__builtin_inff()) * job.scale);
    });
    float highest = greatest(top);
    float sink = 0.0F;
    if (job.sinks != nullptr) {
      sink = job.sinks[row / job.seen.period % job.seen.groups * job.seen.repeat +
                       row % job.seen.repeat];
      highest = sink > highest ? sink : highest;
    }
    Lanes total = {};
    for_lanes(seen.size(), [&](long i, long count) {
      const Lanes value = exp(load(scores + i, count, -__builtin_inff()) * job.scale - highest);
      store(scores + i, value, count);
      total += value;
    });
    const float of_sink = job.sinks == nullptr ? 0.0F : exp(all(sink - highest))[0];
    const float share = 1.0F / (sum(total) + of_sink);
    if (job.shares != nullptr) job.shares[row] = of_sink * share;
    for_lanes(seen.size(), [&](long i, long count) {
      store(scores + i, load(scores + i, count) * share, count);
    });
    clear_hidden(all_scores, seen, job.seen.keys);
  }
}

inline void window_softmax_backward(const WindowRows& job, long begin, long end) {
  for (long row = begin; row < end; ++row) {
    const SeenRange seen = seen_keys(job.seen, row);
    float* grad = job.scores + row * job.seen.keys + seen.begin;
    const float* weights = job.weights + row * job.seen.keys + seen.begin;
    Lanes products = {};
    for_lanes(seen.size(), [&](long i, long count) {
      products += load(grad + i, count) * load(weights + i, count);
    });
    const float mean = sum(products);
    for_lanes(seen.size(), [&](long i, long count) {
      store(grad + i, load(weights + i, count) * (load(grad + i, count) - mean) * job.scale, count);
    });
    clear_hidden(job.scores + row * job.seen.keys, seen, job.seen.keys);
    if (job.shares != nullptr) job.shares[row] *= -mean;
  }
}

namespace {

#define TESSERA_TEXT_OF(word) #word
#define TESSERA_TEXT(word) TESSERA_TEXT_OF(word)

template <class T, class W>
constexpr Kernels<T, W> kernels_of() {
  return {.norm_forward = norm_forward<T, W>,
          .norm_backward = norm_backward<T, W>,
          .heads_forward = heads_forward<T, W>,
          .heads_backward = heads_backward<T, W>,
          .causal_softmax = causal_softmax<T>,
          .causal_softmax_backward = causal_softmax_backward<T>,
          .swiglu_forward = swiglu_forward<T>,
          .swiglu_backward = swiglu_backward<T>,
          .clamped_swiglu_forward = clamped_swiglu_forward<T>,
          .clamped_swiglu_backward = clamped_swiglu_backward<T>,
          .cross_entropy_forward = cross_entropy_forward<T>,
          .cross_entropy_backward = cross_entropy_backward<T>,
          .embedding_backward = embedding_backward<T>};
}

constexpr Isa kIsa{.name = TESSERA_TEXT(TESSERA_CPU_ISA),
                   .fp32 = kernels_of<float, float>(),
                   .bf16 = kernels_of<BFloat16, BFloat16>(),
                   .bf16_wide_weights = kernels_of<BFloat16, float>(),
                   .window_softmax = window_softmax,
                   .window_softmax_backward = window_softmax_backward};

}  // namespace

const Isa& isa() { return kIsa; }

}  // namespace tessera::kernels::cpu::TESSERA_CPU_ISA
