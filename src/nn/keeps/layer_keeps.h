// LayerKeeps: the bytes that autograd holds of the layers of this floor until their backward, and
// the bytes that the layers send to other ranks, without a tensor. Each function repeats a forward,
// operation by operation with what it saves, and transition by transition with what it sends.
//
// Memory counts once however many operations save it; parameters, tables and the batch itself do
// not count. A layer that computes in another way is changed here, too: of real runs
// tests/unit/train/memory_table_test.cpp counts the kept bytes, step_traffic_test.cpp in the same
// folder the sent ones. It follows the kernels of CPUs. Short symbols: B rows, T positions. Pure.
// Next: moe/expert_keeps.h, models/keeps/kept_activations.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/contract.h"
#include "tessera/recompute_mode.h"

namespace tessera::nn {

/// A tensor as autograd sees it: several may show one memory.
struct KeptValue {
  std::size_t memory = 0;
  std::int64_t numel = 0;
  DType dtype = DType::kFloat32;
  bool wants = false;  ///< a gradient
};

/// Bytes of a forward.
struct KeptBytes {
  std::int64_t kept = 0;  ///< when it has ended
  /// The most until backward has ended, with what one layer keeps that is run again. Gradients of
  /// activations come on top.
  std::int64_t peak = 0;
};

/// Bytes that a rank sends in one forward and its backward.
struct SentBytes {
  std::int64_t forward = 0;
  std::int64_t backward = 0;
};

/// Tokens that a rank sends to experts of other ranks and receives back, a row for each choice.
struct SentTokens {
  std::int64_t tokens = 0;
  std::int64_t row_bytes = 0;
  std::int64_t count_bytes = 0;  ///< counts that a forward sends first
  bool outputs_want = false;     ///< outputs have gradients, which go to the experts
  bool inputs_want = false;      ///< inputs have gradients, which come back
};

/// The bytes that one layer sends over the model axes.
struct LayerSends {
  SentBytes tensor;        ///< over tp
  SentTokens experts;      ///< over ep
  bool has_graph = false;  ///< recomputation runs it again only then
};

/// What one layer leaves behind, by memory.
struct KeptLayer {
  std::vector<std::size_t> inputs;    ///< what a checkpoint around it saves
  std::vector<std::size_t> saved;     ///< by its operations
  std::vector<std::size_t> products;  ///< the results of its weights' products
  bool has_graph = false;
  LayerSends sends;
};

/// The memories of one model's forward, and who saves them.
class KeepsLedger {
 public:
  KeptValue make(std::int64_t numel, DType dtype, bool wants = false);
  /// As tensor.to(dtype): itself where nothing changes.
  KeptValue cast(const KeptValue& x, DType dtype);
  void save(const KeptValue& x);
  /// The result of a product with a weight, which selective recomputation keeps.
  void product(const KeptValue& y);
  /// A weight's product that backward may put off (grad/sink.h): from then on its input and the
  /// gradient of its result are waited for.
  void put_off(const KeptValue& input, const KeptValue& product);
  /// Bytes of all of these.
  std::int64_t deferred() const;
  /// Around what a checkpoint holds together; `inputs` are what it saves.
  void begin_layer(const std::vector<KeptValue>& inputs);
  void end_layer(const KeptValue& result);
  KeptBytes in(RecomputeMode mode) const;
  /// One mode a layer.
  KeptBytes in(std::span<const RecomputeMode> modes) const;
  /// The same as a sum of layers, whose units are not named: what several of them keep counts beside
  /// all, whatever their modes are.
  ForwardActivations by_layer() const;

  /// Adds the bytes of a transition over tp.
  void send(const SentBytes& bytes);
  /// Sets the tokens of a layer's experts, once a layer.
  void send(const SentTokens& tokens);
  std::vector<LayerSends> sends_of_layers() const;
  /// The bytes that are sent before the first layer and after the last one.
  const SentBytes& sent_beside() const { return sent_beside_; }

 private:
  std::int64_t sum(const std::set<std::size_t>& memories) const;
  std::vector<std::size_t>& before_or_after() { return layers_.empty() ? before_ : after_; }

  std::vector<std::int64_t> bytes_;  // by memory
  std::vector<std::size_t> before_, after_;
  std::set<std::size_t> deferred_;
  std::int64_t deferred_gradients_ = 0;
  std::vector<KeptLayer> layers_;
  std::optional<KeptLayer> layer_;
  SentBytes sent_beside_;
};

/// One forward of one rank, as its layers see it.
struct KeepsCase {
  const std::vector<GradContract>& parameters;  ///< of the whole model, adapters included
  std::int64_t rows = 1;                        ///< B of a micro-batch
  std::int64_t positions = 0;                   ///< T of a row, whatever tp cuts
  std::int64_t hidden = 0;
  int tp = 1;
  int tp_rank = 0;
  bool cut = false;                 ///< between layers a rank has a part of the positions
  std::optional<DType> sums = {};   ///< dtype of addends over tp; none: their own
  bool norms_add_one = false;       ///< NormFactor::kOnePlusWeight
  bool qk_norm_over_heads = false;  ///< AttentionOptions::QkNorm::kAllHeads
};

class LayerKeeps {
 public:
  explicit LayerKeeps(const KeepsCase& of);

  const KeepsCase& of() const { return of_; }
  std::int64_t tokens() const { return of_.rows * of_.positions; }
  KeepsLedger& ledger() { return ledger_; }
  /// nullptr where the model has none of this name.
  const GradContract* find(std::string_view name) const;
  const GradContract& parameter(const std::string& name) const;
  bool trains(const std::string& name) const;
  KeptValue made_like(const KeptValue& x) { return ledger_.make(x.numel, x.dtype, x.wants); }
  void save_if(bool condition, const KeptValue& x);
  KeptValue sum(const KeptValue& x, const KeptValue& y);

  /// Whether the gradient of a weight's product may be put off.
  enum class Deferral : std::uint8_t { kMayBe, kNever };
  /// linear.cpp. `compute`: another dtype than the weight's.
  KeptValue linear(const KeptValue& x, const std::string& name, std::optional<DType> compute = {},
                   Deferral deferral = Deferral::kMayBe);
  /// rms_norm.cpp. Rows are as long as the weight; without one a row of ones is kept instead.
  KeptValue norm(const KeptValue& x, std::int64_t columns, const std::string& name);
  KeptValue norm(const KeptValue& x, const std::string& name) { return norm(x, of_.hidden, name); }
  /// rope.cpp: without a norm the gradient needs the tables only.
  KeptValue rope_heads(const KeptValue& x, std::int64_t head_dim, const std::string& norm_name);

  /// attention.cpp: `heads` of queries, `groups` of keys and values.
  KeptValue causal_attention(const KeptValue& q, const KeptValue& k, const KeptValue& v,
                             std::int64_t heads, std::int64_t groups);
  /// masked_attention.cpp, its own function: nothing but inputs.
  KeptValue windowed_attention(const KeptValue& q, const KeptValue& k, const KeptValue& v,
                               bool sinks_train);
  enum class Windowed : std::uint8_t { kNo, kYes };
  /// attention.cpp.
  KeptValue self_attention(const KeptValue& stream, std::int64_t head_dim, Windowed windowed,
                           const std::string& name);
  struct Latent {
    std::optional<std::int64_t> q_lora_rank;
    std::int64_t kv_lora_rank = 0;
    std::int64_t v_head_dim = 0;
    std::int64_t heads = 0;  ///< of the model
  };
  /// mla.cpp. What is turned is written beside what is not: queries and keys are new memory.
  KeptValue latent_attention(const KeptValue& stream, const Latent& latent,
                             const std::string& name);

  enum class Gate : std::uint8_t { kSilu, kGelu };  // as nn::Gate, which has torch beside it
  /// mlp.cpp, between enter() and leave().
  KeptValue inner_mlp(const KeptValue& x, const std::string& name, Gate gate);
  KeptValue mlp(const KeptValue& x, const std::string& name, Gate gate);

  /// Bytes that a rank sends in a sum over tp of a tensor in `dtype`. `sums`: the dtype that
  /// travels.
  std::int64_t sum_bytes(std::int64_t numel, DType dtype, std::optional<DType> sums) const;
  /// tensor_region.h: transitions of tensor parallelism, which save nothing.
  KeptValue enter(const KeptValue& x);
  KeptValue leave(const KeptValue& addend);

  enum class Ids : std::uint8_t { kOfBatch, kCopied };
  /// embedding.cpp. Ids belong to the batch, but where the model looks up a copy. Of a vocabulary
  /// over several ranks each looks up its own tokens, an equal part of them as far as anybody
  /// knows.
  KeptValue embedding(const std::string& name, Ids ids);
  enum class Softcap : std::uint8_t { kNo, kYes };
  /// loss.cpp, behind the head's norm: `name` is the projection to the vocabulary.
  void loss(const KeptValue& normed, const std::string& name, Softcap softcap);

 private:
  KeptValue normed_heads(const KeptValue& x, std::int64_t head_dim, const std::string& norm_name);
  /// The factor that a norm of so many columns keeps, where it is not its weight.
  void save_factor(const std::string& norm_name, std::int64_t columns);
  KeptValue swiglu(const KeptValue& gate, const KeptValue& up);
  KeptValue geglu(const KeptValue& gate, const KeptValue& up);

  const KeepsCase of_;
  std::map<std::string, const GradContract*, std::less<>> by_name_;
  KeepsLedger ledger_;
};

}  // namespace tessera::nn
