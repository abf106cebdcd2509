// LanguageModel: what training needs to know of a model of any family.
//
// A batch is one value, images and routing included; modules that may be sharded separately are
// listed as units, in the order in which forward enters them. Short symbols: B rows, T positions, N
// images, P patches of an image (padded), K experts a token. Next: decoder.h, families.def,
// ../grad/slot.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "grad/slot.h"
#include "models/expert_tokens.h"
#include "models/model_axes.h"
#include "models/model_spec.h"
#include "nn/attention/attention.h"
#include "nn/context_region.h"
#include "nn/documents.h"
#include "tessera/recompute_mode.h"
#include "tessera/shard.h"

namespace tessera::models {

/// Images in the order of their runs of image tokens, row-major over the batch. N may be 0.
struct Images {
  at::Tensor pixel_values;  ///< [N, P, 3*patch^2] in [0, 1]
  at::Tensor position_ids;  ///< [N, P, 2] i64: (x, y) of a patch, (-1, -1) for padding
};

struct ModelInputs {
  at::Tensor input_ids;                   ///< [B, T] i64
  std::optional<at::Tensor> targets;      ///< [B, T] i64, shifted; none = logits are wanted
  std::optional<Images> images;           ///< none = the vision tower does not run
  std::optional<at::Tensor> token_types;  ///< [B, T] i64: 1 at image tokens
  /// Experts instead of the model's own choice, [B*T, K] i64 one a layer with experts; empty = its
  /// own.
  std::vector<at::Tensor> imposed_routing;
  RouterStatistics router_statistics = RouterStatistics::kNone;
  nn::Documents documents = {};  ///< that rows are packed of; a loss is of targets as ever
  /// [B, T] bool: places that packing leaves empty, whose tokens no router's load counts.
  std::optional<at::Tensor> fillers = {};
  /// How ranks of a context region share the rows (context_inputs.h); none = head and tail.
  std::optional<layout::ContextCut> cut = {};

  template <class F>
  void visit_tensors(F&& f) {
    f(input_ids);
    documents.visit_tensors(f);
    if (fillers) f(*fillers);
    if (targets) f(*targets);
    if (images) {
      f(images->pixel_values);
      f(images->position_ids);
    }
    if (token_types) f(*token_types);
    for (at::Tensor& indices : imposed_routing) f(indices);
  }
};

/// The fillers in the shape that routers take: [B*T, 1].
inline std::optional<at::Tensor> fillers_by_token(const ModelInputs& inputs) {
  if (!inputs.fillers) return std::nullopt;
  return inputs.fillers->reshape({-1, 1});
}

/// The inputs of one stage of a rank.
struct StageInputs {
  ModelInputs batch;      ///< the whole batch: each stage takes what it needs of it
  std::size_t stage = 0;  ///< among those of this rank (ModelAxes::stages)
  at::Tensor x = {};      ///< the result of the stage before; undefined for the first

  template <class F>
  void visit_tensors(F&& f) {
    batch.visit_tensors(f);
    if (x.defined()) f(x);
  }
};

struct ModelOutput {
  at::Tensor result;              ///< as LanguageModel::forward
  std::vector<RouterLoad> loads;  ///< one a layer with experts, if they were asked for

  template <class F>
  void visit_tensors(F&& f) {
    f(result);
    for (RouterLoad& load : loads) load.visit_tensors(f);
  }
};

/// One block that may become a unit.
struct ModelUnit {
  std::string name;
  std::shared_ptr<const torch::nn::Module> module;
  /// Makes it a unit: its handle, which a parent's fully_shard has to find.
  std::function<std::shared_ptr<ShardedBase>(const Mesh&, const PrecisionPolicy&,
                                             const ShardOptions&)>
      shard;
};

/// From a slot of a model to what its user sees of it. The slot must outlive the unit.
template <class M>
ModelUnit unit_of(grad::Slot<M>& slot, std::string name) {
  return {.name = std::move(name),
          .module = slot.module(),
          .shard = [&slot](const Mesh& mesh, const PrecisionPolicy& policy,
                           const ShardOptions& options) -> std::shared_ptr<ShardedBase> {
            auto handle = std::make_shared<Sharded<M>>(slot.module(), mesh, policy, options);
            slot.call_through(handle);
            return handle;
          }};
}

/// The state of one text that is being written: one cache a layer.
struct DecoderCache {
  std::vector<nn::KvCache> layers;
  std::int64_t length() const { return layers.front().length(); }  ///< positions so far
};

/// Whether a text of `positions` that has come to `length` needs a cache that is filled again: keys
/// of a text that outgrows longest_short_row() turn by other frequencies.
inline bool outgrows(const ModelSpec& spec, std::int64_t length, std::int64_t positions) {
  const auto longest_short = nn::longest_short_row(spec.rope);
  return longest_short && length > 0 && length <= *longest_short && positions > *longest_short;
}

/// Writes text, token by token.
class WritesText {
 public:
  virtual ~WritesText() = default;
  virtual const ModelSpec& spec() const = 0;
  /// Room for `capacity` positions; memory is taken when the first ones come.
  virtual DecoderCache make_cache(std::int64_t capacity) const = 0;
  /// input_ids [B, T] that follow the positions in the cache, which they join -> logits [B, V] of
  /// the last one. No gradient, nothing gathered: the modules are called past any handle. The first
  /// call of a cache gives the bits of forward's hidden states; later ones differ from it by the
  /// order of additions. Errors: kUsage for more positions than the cache has room for, for those
  /// with which the text outgrows() its cache, or, in the first call, for a parameter that is
  /// neither plain nor frozen and whole on every rank.
  virtual at::Tensor decode(const at::Tensor& input_ids, DecoderCache& cache) = 0;
  /// input_ids [B, T] -> logits [B, V] after the last one, by a whole forward. As decode otherwise.
  virtual at::Tensor next_logits(const at::Tensor& input_ids) = 0;
};

class LanguageModel : public torch::nn::Module {
 public:
  /// Logits [B, T, V], or with targets the sum of the token losses (nn/loss.h), [] fp32. For a
  /// model that is whole on this rank.
  at::Tensor forward(const ModelInputs& inputs) { return forward_routed(inputs).result; }
  /// The same with what the routers did. A model without such routers has no loads.
  ModelOutput forward_routed(const ModelInputs& inputs) { return forward_stage({inputs}); }
  /// One stage: from the batch, or the result of the stage before, to the stream [B, t, H] after
  /// its last layer, or as forward where it has the head. Loads are those of its own layers.
  virtual ModelOutput forward_stage(const StageInputs& inputs) = 0;
  /// Returns which positions of the rows this rank computes with; null where rows are not cut.
  /// Errors: as context_rows() of context_inputs.h.
  std::shared_ptr<const nn::ContextRows> context_rows(const ModelInputs& inputs) const;
  /// Checks inputs on the CPU before they are moved to a device, where forward cannot read values
  /// without a wait: ids, targets, imposed experts, and what a family requires in addition. Errors:
  /// kFormat, as forward has them on the CPU.
  void check_values(const ModelInputs& inputs) const;
  /// Returns the units of this rank, without the root's parts: a tied embedding and head, small
  /// parts.
  virtual std::vector<ModelUnit> units() = 0;
  /// The Hugging Face name of a unit's parameter; `path` inside the unit's module.
  virtual std::string canonical_name(const std::string& unit, const std::string& path) const = 0;
  virtual const ModelSpec& spec() const = 0;
  /// Returns the stages of this rank; one where the whole model is here.
  virtual const StagesOfRank& stages() const = 0;
  /// Returns the ranks that share the positions of rows.
  virtual const nn::ContextRegion& context() const = 0;
  bool is_whole() const;
  /// Sets what every layer of text and tower frees after forward and computes again for backward;
  /// embeddings, projector, pooling and head never do. Holds from the next forward on. It binds
  /// plans, which choose only for layers of text whose mode is not set.
  virtual void set_recompute(RecomputeMode mode) = 0;
  /// Null where text of this family cannot be generated.
  virtual WritesText* writer() { return nullptr; }

 protected:
  /// Checks what check_values requires of this family alone.
  virtual void check_own_values(const ModelInputs& /*inputs*/) const {}
};

/// The module of the spec's family (the factory of its row in families.def), or the part of it that
/// one rank holds, its parameters without data. The degrees divide the spec (check_degrees).
std::shared_ptr<LanguageModel> make_language_model(const ModelSpec& spec,
                                                   const ModelAxes& axes = {});

// The factories that the rows name; each is defined next to the module that it makes.
#define TESSERA_FAMILY(enumerator, folder, build) \
  std::shared_ptr<LanguageModel> build_##build(const ModelSpec& spec, const ModelAxes& axes);
#include "models/families.def"

/// Checks that a model which writes text is whole here. Errors: kUsage, as WritesText::decode has
/// them.
void require_whole(const torch::nn::Module& model);

/// A module that only gives its children a prefix ("model.").
class Prefix : public torch::nn::Module {};

}  // namespace tessera::models
