// The table of fused CPU kernels: plain functions over plain memory, one table an instruction set.
//
// best_isa() picks the widest set that this machine has, once. Every kernel works on a range, so
// that callers divide the rows over threads; sums over rows are computed in blocks whose borders
// depend only on the sizes, so results do not depend on the number of threads. All use fp32 inside
// and round once. T is the activation's type, W a norm weight's (T or float). Short symbols: K
// columns, D head_dim, H heads, R query heads of a key/value head, V vocabulary. Next: isa.cpp,
// which fills the tables.
#pragma once

namespace tessera::kernels::cpu {

/// bf16 as the kernels see it: two bytes and no operations.
struct BFloat16 {
  unsigned short bits;
};

/// Norms rows of x [rows, K]. Where `residual` is not null it norms x + residual, which it writes
/// to `sum`.
template <class T, class W>
struct NormForward {
  const T* x;
  const T* residual;
  const W* weight;  ///< [K]
  T* sum;           ///< [rows, K] or null
  T* y;             ///< [rows, K]
  float* scale;     ///< [rows]: 1 / sqrt(mean of squares + eps)
  long columns;
  float eps;
};

template <class T, class W>
struct NormBackward {
  const T* grad;      ///< of y
  const T* grad_sum;  ///< of sum, or null
  const T* x;         ///< the normed values
  const W* weight;
  const float* scale;
  T* grad_x;           ///< of x, and equally of residual
  float* grad_weight;  ///< [K], the range's sum is added; or null
  long columns;
};

/// Norms each head of q or k if `weight` is not null, then applies rope. x [B, T, H*D] -> y [B,
/// H/R, T, R, D].
template <class T, class W>
struct HeadsForward {
  const T* x;
  const W* weight;  ///< [D] or null
  const T* cos;     ///< [table, D/2]: T rows, or B*T
  const T* sin;
  T* y;
  float* scale;  ///< [B*T, H] or null
  long table, positions, heads, repeat, head_dim;
  float eps;
};

template <class T, class W>
struct HeadsBackward {
  const T* grad;  ///< of y
  const T* x;
  const W* weight;
  const T* cos;
  const T* sin;
  const float* scale;
  T* grad_x;
  float* grad_weight;  ///< [D] or null, the range's sum is added
  long table, positions, heads, repeat, head_dim;
};

/// The keys that a row of scores sees (kernels/seen_blocks.h): row r belongs to query (r % period)
/// / repeat, counted from position `first`, of row r / period / groups.
struct SeenByRows {
  const long* begins;  ///< [rows, period / repeat] or null, counted among all keys
  const long* ends;    ///< the same
  long from;           ///< the first key here, counted among all
  long keys, first, window, groups, repeat, period;
};

/// Works on rows of scores, in place; keys that a row does not see become 0.
template <class T>
struct CausalRows {
  T* scores;    ///< [rows, keys], or dP on the way back
  T* weights;   ///< [rows, keys]: scores on the way back, softmax's result comes out; forward: null
  float* sums;  ///< [rows, 2]: the highest score and 1 / sum of exponentials, by which backward has
                ///< forward's bits; forward: or null
  SeenByRows seen;
  float scale;
};

/// The same with sinks: row r belongs to head (r / period) % groups * repeat + r % repeat. Scores
/// are fp32 for every dtype of activations.
struct WindowRows {
  float* scores;         ///< [rows, keys], or dP on the way back
  const float* weights;  ///< [rows, keys], softmax's result; backward only
  const float* sinks;    ///< [groups * repeat] or null; forward only
  float* shares;         ///< [rows] or null: of sinks; on the way back their gradients come out
  SeenByRows seen;
  float scale;
};

template <class T>
struct Swiglu {
  const T* gate;
  const T* up;
  T* out;         ///< forward
  const T* grad;  ///< backward
  T* grad_gate;
  T* grad_up;
};

/// gpt-oss's gate (nn/gates.h); gate and up alternate in `both`.
template <class T>
struct ClampedSwigluJob {
  const T* both;  ///< [elements, 2]
  T* out;         ///< [elements]; forward
  const T* grad;  ///< [elements]; backward
  T* grad_both;   ///< [elements, 2]
  float alpha, limit;
};

template <class T>
struct CrossEntropy {
  const T* logits;      ///< [rows, V]
  const long* targets;  ///< [rows], negative = ignored
  float* log_sum;       ///< [rows]: log of the sum of exponentials
  double* loss;         ///< [rows]; forward
  T* grad_logits;       ///< [rows, V], may be `logits`; backward
  float grad;           ///< of the summed loss
  long vocabulary;
};

/// Sums rows of grad by token: `order` lists positions, equal tokens together.
template <class T>
struct EmbeddingBackward {
  const T* grad;       ///< [tokens, K]
  const long* tokens;  ///< by place in `order`, then one -1
  const long* order;   ///< positions in `grad`, ascending within a token
  T* grad_weight;      ///< [V, K], zeroed
  long columns;
};

/// All kernels of one pair of types. Ranges are of rows, tokens, elements or places in `order`.
template <class T, class W>
struct Kernels {
  void (*norm_forward)(const NormForward<T, W>&, long begin, long end);
  void (*norm_backward)(const NormBackward<T, W>&, long begin, long end);
  void (*heads_forward)(const HeadsForward<T, W>&, long begin, long end);
  void (*heads_backward)(const HeadsBackward<T, W>&, long begin, long end);
  void (*causal_softmax)(const CausalRows<T>&, long begin, long end);
  void (*causal_softmax_backward)(const CausalRows<T>&, long begin, long end);
  void (*swiglu_forward)(const Swiglu<T>&, long begin, long end);
  void (*swiglu_backward)(const Swiglu<T>&, long begin, long end);
  void (*clamped_swiglu_forward)(const ClampedSwigluJob<T>&, long begin, long end);
  void (*clamped_swiglu_backward)(const ClampedSwigluJob<T>&, long begin, long end);
  void (*cross_entropy_forward)(const CrossEntropy<T>&, long begin, long end);
  void (*cross_entropy_backward)(const CrossEntropy<T>&, long begin, long end);
  void (*embedding_backward)(const EmbeddingBackward<T>&, long begin, long end);
};

/// The tables of one instruction set.
struct Isa {
  const char* name;  ///< "avx512", "avx2", "baseline"
  Kernels<float, float> fp32;
  Kernels<BFloat16, BFloat16> bf16;
  Kernels<BFloat16, float> bf16_wide_weights;
  void (*window_softmax)(const WindowRows&, long begin, long end);
  void (*window_softmax_backward)(const WindowRows&, long begin, long end);
};

/// All that were compiled, the widest first, and whether this machine runs each: for tests.
struct IsaChoice {
  const Isa* isa;
  bool supported;
};
inline constexpr int kMostIsas = 3;
struct IsaList {
  IsaChoice choices[kMostIsas];
  int count;
};
const IsaList& isas();

/// Returns the widest one that this machine runs.
const Isa& best_isa();

/// Whether this machine multiplies bf16; where it does not, libtorch's products are several times
/// slower than those of fp32.
bool has_bf16_products();

}  // namespace tessera::kernels::cpu
