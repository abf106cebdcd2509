// Attention, MLP or experts, loss and head of one model, each alone on one device: the library's own
// modules in bf16, forward and backward. PyTorch's side and the table: bench/device_parts.py.
//
//   device_parts CONFIG_JSON DEVICE ROWS POSITIONS STEPS
//
// CONFIG_JSON is a model's config.json, DEVICE cpu, cuda or cuda:N. What goes in is drawn by its name
// alone, with the device's generator: PyTorch's side draws the same. Prints a line of JSON: of each
// part the milliseconds of each step's forward and backward (between events of the device, where it
// has them), the most memory that a step takes beyond what goes in (not of the CPU), and norms of the
// result and of all gradients, by which the sides are compared.
#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mapped_file.h"
#include "comm/device.h"
#include "comm/stream.h"
#include "models/decoder.h"
#include "models/decoder_layer.h"
#include "models/model_spec.h"
#include "models/moe_layer.h"
#include "nn/attention/attention.h"
#include "nn/loss.h"
#include "nn/mlp.h"
#include "nn/rope.h"

namespace {

namespace models = tessera::models;
namespace nn = tessera::nn;

// Of bench/device_shapes.py.
constexpr std::uint64_t kSeed = 1;
constexpr double kInitialDeviation = 0.02;
constexpr int kWarmUpSteps = 5;

/// As Python's zlib.crc32.
std::uint32_t crc32(std::string_view text) {
  std::uint32_t state = ~0U;
  for (const char letter : text) {
    state ^= static_cast<unsigned char>(letter);
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1U) * 0xEDB88320U);
  }
  return ~state;
}

/// A part's tensors, by name.
class Draws {
 public:
  Draws(at::Device device, std::string part) : device_(device), part_(std::move(part)) {}

  at::Tensor weight(const std::string& name, at::IntArrayRef sizes) const {
    const at::TensorOptions options(device_);
    if (sizes.size() == 1) return at::ones(sizes, options.dtype(at::kBFloat16));
    at::Generator generator = at::globalContext().defaultGenerator(device_);
    generator.set_current_seed(kSeed + crc32(part_ + "." + name));
    return at::randn(sizes, generator, options).mul_(kInitialDeviation).to(at::kBFloat16);
  }
  at::Tensor input(const std::string& name, at::IntArrayRef sizes) const {
    return weight(name, sizes).div_(kInitialDeviation);
  }
  void fill(torch::nn::Module& module) const {
    for (auto& item : module.named_parameters()) {
      item.value().set_data(weight(item.key(), item.value().sizes()));
    }
  }

 private:
  at::Device device_;
  std::string part_;
};

/// Marks between what is launched: events of the device, or the host's time.
class Clock {
 public:
  explicit Clock(at::Device device) : device_(device) {}

  void mark() {
    if (device_.is_cpu()) {
      moments_.push_back(std::chrono::steady_clock::now());
      return;
    }
    events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    events_.back().record(tessera::comm::Stream::current(device_).get());
  }
  /// Between each mark and the next. The host waits.
  std::vector<double> milliseconds() const {
    std::vector<double> all;
    if (!events_.empty()) events_.back().synchronize();
    for (std::size_t i = 1; i < events_.size(); ++i) {
      all.push_back(events_[i - 1].elapsedTime(events_[i]));
    }
    for (std::size_t i = 1; i < moments_.size(); ++i) {
      all.push_back(
          std::chrono::duration<double, std::milli>(moments_[i] - moments_[i - 1]).count());
    }
    return all;
  }

 private:
  at::Device device_;
  std::vector<c10::Event> events_;
  std::vector<std::chrono::steady_clock::time_point> moments_;
};

struct Part {
  std::string name;
  std::vector<std::pair<std::string, at::Tensor>> leaves = {};
  at::Tensor grad;  ///< of the result
  std::function<at::Tensor()> forward;

  void add_leaf(const std::string& leaf, const at::Tensor& values) {
    leaves.emplace_back(leaf, values.requires_grad_(true));
  }
  void add_leaves(const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters())
      leaves.emplace_back(item.key(), item.value());
  }
};

struct Sizes {
  models::ModelSpec spec;
  at::Device device = at::kCPU;
  std::int64_t rows = 0, positions = 0;

  at::Tensor targets() const {
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    generator.set_current_seed(kSeed);
    const at::Tensor ids =
        at::randint(0, spec.vocab_size, {rows, positions}, generator, at::TensorOptions(at::kLong));
    return nn::next_token_targets(ids).to(device);
  }
  /// Of a mean over what has a target.
  at::Tensor loss_gradient() const {
    return at::scalar_tensor(1.0 / static_cast<double>(rows * (positions - 1)),
                             at::TensorOptions(device));
  }
};

/// Softmax and its two products, in the order of memory in which the layer calls it.
Part scores(const Sizes& sizes) {
  const models::ModelSpec& spec = sizes.spec;
  const std::int64_t groups = spec.num_key_value_heads, dims = spec.head_dim;
  const Draws draws(sizes.device, "scores");
  const auto heads_of = [&](const char* name, std::int64_t heads) {
    return draws.input(name, {sizes.rows, sizes.positions, heads * dims})
        .view({sizes.rows, sizes.positions, groups, heads / groups, dims})
        .permute({0, 2, 1, 3, 4})
        .contiguous();
  };
  const at::Tensor q = heads_of("q", spec.num_attention_heads), k = heads_of("k", groups);
  const at::Tensor v = draws.input("v", {sizes.rows, sizes.positions, groups * dims});
  Part part{.name = "scores",
            .grad = draws.input("grad", {sizes.rows, sizes.positions, spec.q_size()}),
            .forward = [=] {
              return nn::causal_attention(q, k, v, 1.0 / std::sqrt(static_cast<double>(dims)));
            }};
  part.add_leaf("q", q);
  part.add_leaf("k", k);
  part.add_leaf("v", v);
  return part;
}

/// What `call(x)` makes of the stream.
template <class Module, class Call>
Part of_stream(const Sizes& sizes, const char* name, const std::shared_ptr<Module>& module,
               Call call) {
  const Draws draws(sizes.device, name);
  draws.fill(*module);
  const at::Tensor x = draws.input("x", {sizes.rows, sizes.positions, sizes.spec.hidden_size});
  Part part{.name = name, .grad = draws.input("grad", x.sizes()), .forward = [module, x, call] {
              return call(*module, x);
            }};
  part.add_leaf("x", x);
  part.add_leaves(*module);
  return part;
}

std::shared_ptr<models::DecoderLayer> layer_of(const Sizes& sizes) {
  return std::make_shared<models::DecoderLayer>(
      sizes.spec, 0, models::local_sizes(sizes.spec),
      std::make_shared<nn::Rope>(sizes.spec.rope, sizes.spec.head_dim));
}

template <class Module>
std::shared_ptr<Module> child(const Sizes& sizes, const char* name) {
  return std::dynamic_pointer_cast<Module>(layer_of(sizes)->named_children()[name]);
}

Part attention(const Sizes& sizes) {
  return of_stream(sizes, "attention", child<nn::TokenMixer>(sizes, "self_attn"),
                   [](nn::TokenMixer& module, const at::Tensor& x) { return module.forward(x); });
}

Part mlp(const Sizes& sizes) {
  return of_stream(sizes, "mlp", child<nn::Mlp>(sizes, "mlp"),
                   [](nn::Mlp& module, const at::Tensor& x) { return module.forward(x); });
}

Part experts(const Sizes& sizes) {
  return of_stream(
      sizes, "experts", child<models::MoeLayer>(sizes, "mlp"),
      [](models::MoeLayer& module, const at::Tensor& x) { return module.forward(x, {}).x; });
}

/// Of logits that somebody else holds.
Part loss(const Sizes& sizes) {
  const Draws draws(sizes.device, "loss");
  const at::Tensor logits =
      draws.input("logits", {sizes.rows, sizes.positions, sizes.spec.vocab_size});
  Part part{.name = "loss",
            .grad = sizes.loss_gradient(),
            .forward = [logits, targets = sizes.targets()] {
              return nn::cross_entropy_sum(logits, targets);
            }};
  part.add_leaf("logits", logits);
  return part;
}

/// The last norm, the product and the loss, which may write over its logits.
Part head(const Sizes& sizes) {
  const auto module =
      std::make_shared<models::DecoderHead>(sizes.spec, models::local_sizes(sizes.spec));
  Part part = of_stream(sizes, "head", module,
                        [targets = sizes.targets()](models::DecoderHead& of, const at::Tensor& x) {
                          return of.forward(x, targets);
                        });
  part.grad = sizes.loss_gradient();
  return part;
}

double norm_of(const at::Tensor& values) {
  return values.detach().to(at::kFloat).norm().item<double>();
}

/// The milliseconds of every part's forward, or backward: a mark before, between and behind.
void print_times(const char* name, const std::vector<double>& ms, std::size_t first) {
  std::printf("\"%s\": [", name);
  for (std::size_t i = first + std::size_t{3} * kWarmUpSteps; i < ms.size(); i += 3) {
    std::printf("%s%.4f", i < first + std::size_t{3} * (kWarmUpSteps + 1) ? "" : ", ", ms[i]);
  }
  std::printf("], ");
}

void measure(const Part& part, const Sizes& sizes, int steps) {
  const bool on_card = !sizes.device.is_cpu();
  const auto clear = [&] {
    for (const auto& [name, leaf] : part.leaves) leaf.mutable_grad() = at::Tensor();
  };
  if (on_card) tessera::comm::begin_memory_peaks(sizes.device);
  const std::int64_t before = on_card ? tessera::comm::memory_of(sizes.device).held : 0;
  Clock clock(sizes.device);
  for (int step = 0; step < kWarmUpSteps + steps; ++step) {
    clear();
    clock.mark();
    const at::Tensor y = part.forward();
    clock.mark();
    y.backward(part.grad);
    clock.mark();
  }
  const std::vector<double> ms = clock.milliseconds();
  std::printf("\"%s\": {", part.name.c_str());
  print_times("forward_ms", ms, 0);
  print_times("backward_ms", ms, 1);
  if (on_card) {
    const std::int64_t peak = tessera::comm::memory_of(sizes.device).peak - before;
    std::printf("\"peak_mib\": %.1f, ", static_cast<double>(peak) / 1048576.0);
  }
  // Of a sum of losses their mean.
  const at::Tensor y = part.forward();
  std::printf("\"norms\": {\"result\": %.9g", norm_of(y.dim() == 0 ? y * part.grad : y));
  for (const auto& [name, leaf] : part.leaves) {
    std::printf(", \"%s\": %.9g", name.c_str(), norm_of(leaf.grad()));
  }
  std::printf("}}");
  clear();
}

void run(const Sizes& sizes, int steps) {
  std::vector<Part (*)(const Sizes&)> parts = {scores, attention, mlp, loss, head};
  if (sizes.spec.moe) parts[2] = experts;
  std::printf("{");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) std::printf(", ");
    measure(parts[i](sizes), sizes, steps);  // whose memory is gone before the next
  }
  std::printf("}\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: device_parts CONFIG_JSON DEVICE ROWS POSITIONS STEPS\n");
    return 2;
  }
  try {
    constexpr std::int64_t kMostBytes = 1 << 20;
    const Sizes sizes{.spec = models::parse_spec(tessera::read_text_file(argv[1], kMostBytes)).spec,
                      .device = tessera::comm::device_of_rank(argv[2], 0),
                      .rows = std::stoll(argv[3]),
                      .positions = std::stoll(argv[4])};
    if (!sizes.device.is_cpu()) tessera::comm::use_device(sizes.device);
    run(sizes, std::stoi(argv[5]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "device_parts: %s\n", error.what());
    return 1;
  }
  return 0;
}
