#include "sim/training_places.h"

#include <ATen/Parallel.h>

#include <exception>
#include <thread>

#include "sim/in_place.h"
#include "support/test.h"
#include "train/config/config_resolve.h"

namespace tessera::sim {
namespace {

namespace fs = std::filesystem;

void pack_documents(train::Config& config, const TemporaryFolder& folder) {
  config.data.path.clear();
  for (int document = 0; document < 40; ++document) {
    std::string text;
    for (int word = 0; word <= document % 7; ++word) text += concat("word ", document * word, " ");
    config.data.path.push_back(folder.write(concat("text-", document, ".txt"), text));
  }
  config.data.packing = train::Packing::kDocuments;
}

void take_gpt2(train::Config& config, const TemporaryFolder& folder) {
  config.model.config = folder.write("gpt2.json", R"({"architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 16, "n_head": 2,
    "n_layer": 2, "n_positions": 32, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "vocab_size": 259})");
  config.optimizer.no_decay.clear();
}

}  // namespace

std::string shown(const test::Place& where, const test::RanksOfRun& layout) {
  return concat(layout.ranks, " rank(s), ", layout.replicas, " replica(s) on ", where.device,
                where.side ? ", side streams" : "");
}

test::RunLosses train_in(const test::Place& where, const test::RanksOfRun& layout,
                         const train::Config& config, const TemporaryFolder& folder,
                         const test::HooksOf& hooks) {
  static int runs = 0;
  const In here(where);
  return test::train_on(layout, config, folder / concat("run-", ++runs), hooks);
}

void alone(const std::string& device, const std::function<void(World&)>& body) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      at::set_num_threads(1);
      WorldOptions options;
      options.device = device;
      body(*World::of_one(options));
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

void train_alone(const std::string& device, const train::Config& config, const fs::path& run) {
  fs::create_directories(run);
  ::testing::internal::CaptureStdout();
  const auto print = [] { ::testing::internal::GetCapturedStdout(); };
  try {
    alone(device, [&](World& world) {
      train::run_training(train::resolved_for_run(config, run.string()), world);
    });
  } catch (...) {
    print();
    throw;
  }
  print();
}

const std::vector<RunKind>& run_kinds() {
  // Muon's iteration makes fp32's noise in a small singular value 3.4445^5 = 485 times as large.
  static const std::vector<RunKind> all{
      {"packed documents", pack_documents},
      {"GPT-2", take_gpt2},
      {"packed documents of GPT-2",
       [](train::Config& config, const TemporaryFolder& folder) {
         take_gpt2(config, folder);
         pack_documents(config, folder);
       }},
      {"Muon",
       [](train::Config& config, const TemporaryFolder&) {
         config.optimizer.name = fsdp::OptimizerName::kMuon;
       },
       1e-4},
      {"Muon of shards in 16 bits, without Nesterov's step",
       [](train::Config& config, const TemporaryFolder&) {
         config.optimizer.name = fsdp::OptimizerName::kMuon;
         config.optimizer.nesterov = false;
         config.precision.storage_dtype.dtype = DType::kBFloat16;
         config.precision.param_dtype.dtype = DType::kBFloat16;
       },
       5e-3},
      {"adapters with dropout",
       [](train::Config& config, const TemporaryFolder& folder) {
         const auto steps = config.training.steps;
         config = test::adapters_run(folder);
         config.training.steps = steps;
       },
       5e-3},
      {"float16, whose loss is scaled",
       [](train::Config& config, const TemporaryFolder&) {
         config.precision.param_dtype.dtype = DType::kFloat16;
       },
       5e-3},
      {"several sources and a validation",
       [](train::Config& config, const TemporaryFolder& folder) {
         const auto page = config.data.path;
         config.data.path.clear();
         config.data.source = {
             {page, 2.0},
             {{folder.write("other.txt", std::string(400, 'x') + std::string(400, 'y'))}, 1.0}};
         config.validation.path = page;
         config.validation.interval = 2;
         config.validation.steps = 2;
       }},
  };
  return all;
}

train::Config experts_run(const TemporaryFolder& folder, int layers) {
  auto config = test::small_run(folder);
  const std::string depth = concat(R"({"num_hidden_layers": )", layers, ",");
  config.model.config = folder.write("experts.json", depth + R"(
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe", "hidden_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "moe_intermediate_size": 24,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": false,
    "hidden_act": "silu", "vocab_size": 259, "max_position_embeddings": 64, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-06, "attention_bias": false, "tie_word_embeddings": false,
    "initializer_range": 0.02})");
  config.training.steps = 4;
  config.precision.param_dtype.dtype = DType::kBFloat16;
  return config;
}

}  // namespace tessera::sim
