// Runs that are drawn: families, layouts, dtypes, recomputation, pipelines, adapters, optimizers.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/test.h"
#include "train/config/config.h"
#include "train/dry/dry_step.h"
#include "train/hf/model_source.h"
#include "unit/train/parallel_degrees.h"
#include "unit/train/run_case.h"

namespace tessera::train {

/// One run.
struct Drawn {
  std::string family;
  bool routed = false;
  int replicate = 1, shard = 1, cp = 1, tp = 1, ep = 1, etp = 1, pp = 1;
  ContextForm context_form = ContextForm::kGather;
  bool sequence = true;
  RouterTokens router = RouterTokens::kShards;
  std::int64_t micro_batches = 1, rows = 1, positions = 16;
  std::string recompute = "none";
  std::string dtype = "float32";
  bool sums32 = false;     ///< activation_reduce_dtype
  bool bf16_wire = false;  ///< reduce_dtype
  bool every = false;      ///< sync_every_micro_batch
  bool reshard = true;
  bool frozen = false;  ///< the embedding and the first layer
  int form = 0;         ///< of [compile]; 0: off
  std::string schedule = "1F1B";
  PipelineReshard pipeline_reshard = PipelineReshard::kStep;
  double aux_loss_coef = 0.0;
  enum class Adapters { kNone, kOfAttention, kOfExperts } adapters = Adapters::kNone;
  bool muon = false;
  bool as_one = false;  ///< Muon steps fused weights as one matrix each

  int ranks() const { return replicate * shard * cp * tp * pp; }
};

inline std::ostream& operator<<(std::ostream& out, const Drawn& d) {
  return out << d.family << ", replicate " << d.replicate << ", shard " << d.shard << ", cp "
             << d.cp << (d.context_form == ContextForm::kHeads ? " heads" : "") << ", tp " << d.tp
             << (d.sequence ? "" : " whole") << ", ep " << d.ep << ", etp " << d.etp << ", pp "
             << d.pp << ' ' << d.schedule
             << (d.pipeline_reshard == PipelineReshard::kStep ? "" : " by micro-batch")
             << (d.router == RouterTokens::kAll ? ", router on all" : "") << ", " << d.micro_batches
             << " x " << d.rows << " x " << d.positions << ", " << d.recompute << ", " << d.dtype
             << (d.sums32 ? ", sums in 32" : "") << (d.bf16_wire ? ", wire in 16" : "")
             << (d.every ? ", reduced each time" : "") << (d.reshard ? "" : ", kept")
             << (d.frozen ? ", frozen" : "") << ", form " << d.form << ", aux " << d.aux_loss_coef
             << (d.adapters == Drawn::Adapters::kNone ? "" : ", adapters")
             << (d.adapters == Drawn::Adapters::kOfExperts ? " of experts" : "")
             << (d.muon ? ", Muon" : "") << (d.as_one ? ", fused as one" : "");
}

class Draws {
 public:
  explicit Draws(std::uint32_t seed) : random_(seed) {}
  template <class T>
  T one_of(std::initializer_list<T> of) {
    return of.begin()[std::uniform_int_distribution<std::size_t>(0, of.size() - 1)(random_)];
  }
  bool maybe() { return one_of({0, 1, 1}) == 0; }
  /// One of 0 to count - 1.
  std::size_t below(std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random_);
  }

 private:
  std::mt19937 random_;
};

/// Whether some layers have a state, which two key heads, or groups of heads, share out over tp.
inline bool has_states(const Drawn& d) {
  return d.family == "qwen3-next" || d.family == "nemotron-h";
}

/// A pipeline multiplies the ranks, so that no other axis is large then.
inline Drawn drawn(std::uint32_t seed) {
  Draws draw(seed);
  Drawn d;
  const std::pair<const char*, bool> family =
      draw.one_of<std::pair<const char*, bool>>({{"qwen3", false},
                                                 {"olmo2", false},
                                                 {"gpt2", false},
                                                 {"gemma3-text", false},
                                                 {"llama", false},
                                                 {"qwen3-moe", true},
                                                 {"deepseek-v2", true},
                                                 {"gpt-oss", true},
                                                 {"gemma4", true},
                                                 {"llama4-text", true},
                                                 {"glm4-moe", true},
                                                 {"mixtral", true},
                                                 {"qwen3-next", true},
                                                 {"nemotron-h", true}});
  d.family = family.first;
  d.routed = family.second;
  d.pp = draw.one_of({1, 1, 2});
  d.tp = draw.one_of({1, 2, 2, 4});
  if (d.pp > 1 || has_states(d)) d.tp = std::min(d.tp, 2);
  d.shard = d.tp == 4 ? 1 : draw.one_of({1, 2});
  d.replicate = d.shard * d.tp * d.pp > 4 ? 1 : draw.one_of({1, 2, 3});
  if (d.replicate * d.shard * d.tp * d.pp > 8) d.replicate = 1;
  if (d.replicate * d.shard * d.tp * d.pp == 1) d.shard = 2;
  d.sequence = !draw.maybe();
  if (d.routed) {
    d.etp = d.tp > 1 && draw.maybe() ? d.tp : 1;
    // Rows to one other rank: that is all rows that leave.
    if (d.shard * d.tp / d.etp % 2 == 0) d.ep = draw.one_of({1, 2, 2});
    if (draw.maybe()) d.router = RouterTokens::kAll;
    if (draw.maybe()) d.aux_loss_coef = 0.01;
  }
  d.rows = draw.one_of<std::int64_t>({1, 2});
  d.micro_batches = d.pp > 1 ? 2 * draw.one_of({1, 2}) : draw.one_of({1, 2, 3});
  d.positions = d.tp > 1 && !d.sequence ? draw.one_of<std::int64_t>({15, 16}) : 16;
  d.recompute = draw.one_of<const char*>({"none", "selective", "full"});
  d.dtype = draw.one_of<const char*>({"float32", "bfloat16"});
  d.sums32 = draw.maybe();
  d.bf16_wire = d.dtype == "bfloat16" && draw.maybe();
  d.every = draw.maybe();
  d.reshard = !draw.maybe();
  d.frozen = draw.maybe() && (d.pp == 1 || d.ep == 1);
  if (d.pp > 1) {
    d.schedule = draw.one_of<const char*>({"1F1B", "GPipe", "ZBV", "ZB1P", "Paired1F1B"});
    d.pipeline_reshard = draw.one_of({PipelineReshard::kStep, PipelineReshard::kMicroBatch});
  } else if (draw.maybe()) {
    d.form = draw.one_of({1, 2, 3});
  }
  d.muon = draw.one_of({0, 1}) == 1;
  // Only of a model with fused weights, which experts and gpt2 have.
  d.as_one = d.muon && draw.one_of({0, 1}) == 1 && (d.routed || d.family == "gpt2");
  // Adapters have no gpt2, and are in place of a frozen part and of a loss of frozen routers.
  if (d.muon && d.family != "gpt2" && !d.frozen && d.aux_loss_coef == 0.0 &&
      draw.one_of({0, 1}) == 1) {
    using enum Drawn::Adapters;
    d.adapters = d.routed ? draw.one_of({kOfAttention, kOfExperts}) : kOfAttention;
  }
  return d;
}

/// The same run; where it has room for more ranks, most share their rows over cp: two heads of keys
/// and values are not shared out over tp and cp, 15 positions have no four parts.
inline Drawn over_cp(Drawn d, std::uint32_t seed) {
  if (has_states(d) || d.ranks() > 4 || d.positions != 16 || seed % 5 == 0) return d;
  d.cp = 2;
  if (d.tp == 1 && seed % 2 == 1) d.context_form = ContextForm::kHeads;
  return d;
}

/// Adapters need weights, which the reference has, of a vocabulary without all bytes.
inline void set_adapters(Config& config, const TemporaryFolder& folder, const Drawn& d) {
  config.model.config.clear();
  config.model.path = std::string(TESSERA_TEST_DATA) + "/" + d.family + "-fp32";
  config.lora = {.rank = 2, .targets = {"o_proj"}};
  if (d.adapters == Drawn::Adapters::kOfExperts) config.lora.targets.emplace_back("experts.*");
  constexpr int kTokens = 6000;
  std::mt19937 random(7);
  std::string tokens;
  for (int i = 0; i < kTokens; ++i) {
    tokens += static_cast<char>(random() % 60);  // no image's place
    tokens += '\0';
  }
  folder.write("ids.bin", tokens);
  folder.write("ids.json",
               concat(R"({"dtype":"uint16","vocab_size":64,"num_tokens":)", kTokens, "}"));
  config.data.path = {folder / "ids.bin"};
}

inline Config config_of(const TemporaryFolder& folder, const Drawn& d) {
  Config config = run_case(folder, Head::kOwn);
  std::string text;
  for (int line = 0; line < 300; ++line) text += "line " + std::to_string(line) + " of a page.\n";
  folder.write("page.txt", text);
  set_parallelism(config, d);
  config.parallelism.pipeline_parallel_degree = d.pp;
  config.parallelism.reshard_after_forward = d.reshard;
  config.pipeline.schedule = d.schedule;
  config.pipeline.reshard = d.pipeline_reshard;
  config.activation_checkpoint.mode = d.recompute == "full"        ? RecomputeMode::kFull
                                      : d.recompute == "selective" ? RecomputeMode::kSelective
                                                                   : RecomputeMode::kNone;
  config.precision.param_dtype.dtype = d.dtype == "float32" ? DType::kFloat32 : DType::kBFloat16;
  if (d.sums32) config.precision.activation_reduce_dtype.dtype = DType::kFloat32;
  if (d.bf16_wire) config.precision.reduce_dtype.dtype = DType::kBFloat16;
  if (d.frozen) {
    config.model.freeze =
        d.family == "gpt2"
            ? std::vector<std::string>{"wte", "wpe", "h.0"}
            : std::vector<std::string>{d.family == "nemotron-h" ? "embeddings" : "embed_tokens",
                                       "layers.0"};
    // An explicit list is the whole one; without images the tower is no part of a step.
    if (d.family == "gemma4") config.model.freeze->emplace_back("model.vision_tower");
  }
  if (d.routed) config.model.aux_loss_coef = d.aux_loss_coef;
  if (d.form > 0) {
    config.compile.mode = CompileChoice::kPlan;
    config.compile.form = d.form;
  }
  if (d.adapters != Drawn::Adapters::kNone) set_adapters(config, folder, d);
  if (d.muon) config.optimizer.name = fsdp::OptimizerName::kMuon;
  if (d.as_one) config.optimizer.rule = {{.match = {"*"}, .split_fused = false}};
  config.training.seq_len = d.positions;
  config.training.local_batch_size = d.rows;
  config.training.global_batch_size = d.replicate * d.shard * d.rows * d.micro_batches;
  config.training.sync_every_micro_batch = d.every;
  config.training.steps = 2;
  config.metrics.trace_steps = {2};
  return config;
}

/// A drawn run in a folder of its own.
struct DrawnRun {
  const TemporaryFolder folder;
  Config config;
  ModelSource source;

  explicit DrawnRun(const Drawn& d) : config(config_of(folder, d)) {
    write_model(folder, d.family + "-fp32", make_room_for_bytes);
    source = open_model(config.model, config.lora);
  }
};

/// Uneven: some experts are left out, and some would be chosen more than once a token.
inline ExpertLoads drawn_loads(std::uint32_t seed, const models::RoutedExperts& of) {
  Draws draw(seed);
  const std::size_t lists = draw.maybe() ? of.layers.size() : 1;
  ExpertLoads loads;
  for (std::size_t list = 0; list < lists; ++list) {
    std::vector<double>& shares = loads.layers.emplace_back();
    for (std::int64_t e = 0; e < of.experts; ++e) {
      shares.push_back(draw.one_of({0.0, 0.5, 1.0, 1.0, 2.5, 30.0}));
    }
    shares[draw.below(shares.size())] += 0.25;  // not all are 0
  }
  return loads;
}

/// `body` on ranks whose routers choose by `loads`, where those are given.
inline void on_ranks(int count, const ExpertLoads& loads, const ModelSource& source,
                     const std::function<void(World&)>& body,
                     ThreadBackend backend = ThreadBackend::kInProcess) {
  on_ranks(
      count,
      [&](World& world) {
        std::optional<moe::ChoiceScope> choice;
        if (!loads.are_even()) {
          choice.emplace(choice_by(loads, models::routed_experts(source.spec)));
        }
        body(world);
      },
      backend);
}

/// Whether every rank of ep sends what each other sends: not where the ranks of tp route the same
/// tokens, or cut rows into parts of other lengths.
inline bool sends_alike(const Drawn& d) {
  const bool routes_all = d.tp > 1 && d.etp == 1 && d.router == RouterTokens::kAll;
  return !routes_all && d.positions % d.tp == 0;
}

enum class SharedRows : std::uint8_t { kNone, kSome };

/// Calls `test` with the drawn runs of seeds 1 to `draws`, until one fails.
template <class Test>
void for_drawn(std::uint32_t draws, const Test& test, SharedRows shared = SharedRows::kNone) {
  for (std::uint32_t seed = 1; seed <= draws; ++seed) {
    const Drawn d = shared == SharedRows::kNone ? drawn(seed) : over_cp(drawn(seed), seed);
    std::ostringstream words;
    words << "seed " << seed << ": " << d;
    SCOPED_TRACE(words.str());
    test(d);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace tessera::train
