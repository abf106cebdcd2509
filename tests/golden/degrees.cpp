#include "golden/degrees.h"

#include <iterator>
#include <map>
#include <numeric>

#include "golden/model_folder.h"
#include "models/family.h"
#include "support/place.h"
#include "tessera/error.h"
#include "train/hf/model_source.h"
#include "unit/train/parallel_degrees.h"

namespace tessera::golden {
namespace {

/// A shape in all its forms.
void add_forms(std::vector<Degrees>& all, Degrees shape, Experts experts) {
  for (const bool sequence : {true, false}) {
    for (const auto router : {RouterTokens::kShards, RouterTokens::kAll}) {
      const bool routes_alike = shape.etp > 1 || experts == Experts::kNone || shape.tp == 1;
      if (routes_alike && router == RouterTokens::kAll) continue;
      if (shape.tp == 1 && !sequence) continue;
      shape.sequence = sequence;
      shape.router = router;
      all.push_back(shape);
    }
  }
}

void add_of_ranks(std::vector<Degrees>& all, int ranks, Experts experts) {
  for (int tp = 1; tp <= ranks; tp *= 2) {
    for (int replicate = 1; replicate * tp <= ranks; replicate *= 2) {
      const int shard = ranks / tp / replicate;
      const int most = experts == Experts::kSome ? shard * tp : 1;
      for (int ep = 1; ep <= most; ep *= 2) {
        add_forms(all, {replicate, shard, tp, ep, 1}, experts);
        if (experts == Experts::kSome && tp > 1 && ep <= shard) {
          add_forms(all, {replicate, shard, tp, ep, tp}, experts);
        }
      }
    }
  }
}

}  // namespace

std::string to_string(const Degrees& d) {
  return concat("dp_replicate ", d.replicate, ", dp_shard ", d.shard, ", tp ", d.tp, ", ep ", d.ep,
                ", etp ", d.etp, d.sequence ? ", sequence shards" : ", whole sequence",
                d.router == RouterTokens::kAll ? ", router on all tokens" : "",
                d.cp == 1                        ? ""
                : d.form == ContextForm::kGather ? concat(", cp ", d.cp, " gather")
                                                 : concat(", cp ", d.cp, " heads"));
}

std::vector<Degrees> all_degrees(Experts experts) {
  std::vector<Degrees> all;
  for (const int ranks : {1, 2, 4}) add_of_ranks(all, ranks, experts);
  return all;
}

std::vector<Degrees> one_of_each_form(Experts experts) {
  constexpr auto kAll = RouterTokens::kAll;
  std::vector<Degrees> some{{},
                            {.shard = 2},
                            {.replicate = 2, .shard = 2},
                            {.tp = 2},
                            {.tp = 2, .sequence = false},
                            {.tp = 4},
                            {.shard = 2, .tp = 2},
                            {.replicate = 2, .tp = 2},
                            {.replicate = 2, .tp = 2, .sequence = false}};
  if (experts == Experts::kNone) return some;
  const Degrees with_experts[] = {{.tp = 2, .router = kAll},
                                  {.tp = 2, .sequence = false, .router = kAll},
                                  {.shard = 2, .ep = 2},
                                  {.tp = 2, .ep = 2},
                                  {.tp = 2, .ep = 2, .sequence = false},
                                  {.tp = 2, .ep = 2, .router = kAll},
                                  {.shard = 2, .tp = 2, .ep = 2},
                                  {.shard = 2, .tp = 2, .ep = 4},
                                  {.replicate = 2, .tp = 2, .ep = 2},
                                  {.tp = 2, .etp = 2},
                                  {.tp = 2, .etp = 2, .sequence = false},
                                  {.shard = 2, .tp = 2, .ep = 2, .etp = 2},
                                  {.replicate = 2, .tp = 2, .etp = 2}};
  some.insert(some.end(), std::begin(with_experts), std::end(with_experts));
  return some;
}

models::ModelSpec spec_of(const std::string& folder) {
  static std::map<std::string, models::ModelSpec> opened;
  const auto found = opened.find(folder);
  if (found != opened.end()) return found->second;
  train::ModelConfig config;
  config.path = data_folder(folder);
  return opened.emplace(folder, train::open_model(config).spec).first->second;
}

Experts experts_of(const std::string& folder) {
  return spec_of(folder).moe ? Experts::kSome : Experts::kNone;
}

std::string undivided_heads(const std::string& folder, int tp) {
  const models::ModelSpec spec = spec_of(folder);
  if (spec.num_attention_heads % tp != 0) {
    return concat("num_attention_heads = ", spec.num_attention_heads);
  }
  if (spec.delta_net) {
    return concat("linear_num_key_heads = ", spec.delta_net->linear_num_key_heads);
  }
  if (spec.mamba) return concat("n_groups = ", spec.mamba->n_groups);
  return concat("num_key_value_heads = ", spec.num_key_value_heads);
}

std::int64_t heads_of(const std::string& folder) {
  const models::ModelSpec spec = spec_of(folder);
  if (spec.delta_net) {
    return std::gcd(spec.num_attention_heads, spec.delta_net->linear_num_key_heads);
  }
  if (spec.mamba) return std::gcd(spec.num_attention_heads, spec.mamba->n_groups);
  return models::traits(spec.family).fused_projections ? spec.num_key_value_heads
                                                       : spec.num_attention_heads;
}

std::vector<std::int64_t> kv_heads_of(const std::string& folder) {
  const models::ModelSpec spec = spec_of(folder);
  std::vector<std::int64_t> heads{spec.mla ? spec.num_attention_heads : spec.num_key_value_heads};
  if (spec.gemma4) {
    for (const auto& layer : spec.gemma4->layers) heads.push_back(layer.num_key_value_heads);
  }
  return heads;
}

bool has_state(const models::ModelSpec& spec) { return spec.delta_net || spec.mamba; }

train::Config config_for(const std::string& folder, const Degrees& d) {
  auto config = config_for(layout_of(d));
  train::set_parallelism(config, d);
  config.model.path = data_folder(folder);
  return config;
}

Layout layout_of(const Degrees& d) { return {.ranks = d.ranks(), .replicas = d.replicate}; }

bool is_one_draw(const std::string& folder, const std::string& name, const Degrees& degrees) {
  // A device rounds at other places, as ranks of tp do.
  const bool draws_again = degrees.tp > 1 || test::place().device != "cpu";
  return folder == kSinksFolder && draws_again && name.ends_with(".sinks");
}

}  // namespace tessera::golden
